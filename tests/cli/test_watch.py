"""`tenure watch`: each state of a name as it comes, whatever the name stands for."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from tests.cli.programs import HOST, TENURE, Running, Tenure


def state(running: Running) -> Any:
    return json.loads(running.line())


def test_a_mutex_is_watched_before_it_exists_and_after(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")  # the store is there
    watching = tenure.start("watch", "nightly", "--json", "--count", "3")
    first = state(watching)
    assert (first["exists"], first["kind"], first["owners"]) == (False, None, [])
    holder = tenure.hold("--data", "backup")
    second = state(watching)
    assert (second["exists"], second["kind"], second["waiting"]) == (True, "mutex", 0)
    assert [(each["pid"], each["data"]) for each in second["owners"]] == [
        (holder.process.pid, "backup")
    ]
    holder.say("0")
    assert state(watching)["exists"] is False
    assert watching.end() == (0, "")


def test_what_the_name_stands_for_may_change(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    watching = tenure.start("watch", "gpu")
    assert watching.line().split()[1:] == ["gpu", "free"]
    tenure.inside("sem", "create", "gpu", "--limit", "3", "--data", "one")
    assert watching.line().split()[1:] == [*"gpu 0 of 3 held data".split(), '"one"']
    tenure.inside("sem", "update", "gpu", "--data", "\x1b[2Jtwo")
    assert watching.line().endswith('data "\\x1b[2Jtwo"')
    slot = tenure.start("run", "--semaphore", "gpu", "--count", "2", "--", "sh", "-c", "read x")
    assert (
        f"2 of 3 held by tenure run sh, pid {slot.process.pid} on {HOST}, x2 (token "
        in watching.line()
    )
    slot.say()
    assert "0 of 3 held" in watching.line()
    tenure.inside("sem", "delete", "gpu")
    assert watching.line().split()[1:] == ["gpu", "free"]
    holder = tenure.hold(name="gpu")
    assert f"gpu  held by tenure run sh, pid {holder.process.pid} " in watching.line()


def test_once_is_the_present_state(tenure: Tenure) -> None:
    tenure.hold("--data", "me")
    done = tenure("watch", "nightly", "--once")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert done.stdout.endswith(') "me"\n')


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_ends_it_without_a_word(tenure: Tenure, number: signal.Signals, code: int) -> None:
    tenure.inside("node", "create", "/other")
    watching = tenure.start("watch", "nightly")
    watching.line()
    watching.signal(number)
    assert watching.end() == (code, "")


def test_it_ends_when_nobody_reads_it_any_more(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$@" watch nightly | head -1', "bash", *TENURE],
        env=tenure.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # Nothing happens to the lock: it is the closed pipe itself that is noticed.
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (128 + 13, 1, "")


def test_a_session_that_was_ended_is_followed_by_another(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    watching = tenure.start("watch", "nightly")
    watching.line()
    (session,) = tenure.json("session", "ls")["sessions"]
    assert tenure.inside("session", "end", "/default", str(session["id"])).returncode == 0
    tenure.hold()
    assert "held by" in watching.line()  # and "free" is not told twice


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["watch"], 78, "missing argument 'NAME'"),
        (["watch", ""], 78, "1 to 1024 bytes"),
        (["watch", "a", "--count", "0"], 78, "one or more"),
        (["watch", "a", "--node", "/defualt"], 73, "did you mean /default?"),
        (["watch", "a", "--url", "sqlite:///nowhere.db"], 74, "nowhere.db yet"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    tenure.inside("node", "create", "/other")
    done = tenure.inside(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
