"""`tenure session` and `tenure evict`: what others hold is looked at, and ended, in plain sight."""

from __future__ import annotations

import json

import pytest

from tests.cli.programs import HOST, Tenure, eventually


def token(tenure: Tenure, name: str = "nightly") -> int:
    (owner,) = tenure.json("describe", name)["owners"]
    return int(owner["order_id"])


def test_the_sessions_of_every_node_or_of_one_are_listed(tenure: Tenure) -> None:
    assert tenure.inside("session", "ls").stdout == "no sessions\n"
    tenure.inside("node", "create", "/billing")
    here, there = tenure.hold(), tenure.hold("--node", "/billing", name="bill")
    lines = tenure.inside("session", "ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NODE", "/billing", "/default"]
    assert str(there.process.pid) in lines[1].split()
    (only,) = tenure.json("session", "ls", "/default")["sessions"]
    assert (only["pid"], only["description"]) == (here.process.pid, "tenure run sh")
    done = tenure.inside("session", "ls", "/biling")
    assert (done.returncode, "did you mean /billing?" in done.stderr) == (73, True)


def test_a_session_that_is_ended_loses_what_it_holds(tenure: Tenure) -> None:
    holder = tenure.hold()
    (session,) = tenure.json("session", "ls")["sessions"]
    done = tenure.inside("session", "end", "/default", str(session["id"]))
    assert done.stdout == (
        f"ended the session {session['id']} on /default: "
        f"tenure run sh, pid {holder.process.pid} on {HOST}\n"
    )
    code, said = holder.end()
    assert code == 79
    assert "'nightly' on /default is lost" in said


def test_a_wrong_session_is_told_with_the_right_ones(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/billing")
    tenure.hold()
    (session,) = tenure.json("session", "ls")["sessions"]
    done = tenure.inside("session", "end", "/default", str(2**70))
    assert done.returncode == 73
    assert done.stderr.endswith(f"on /default; there are: {session['id']}\n")
    done = tenure.inside("session", "end", "/billing", str(session["id"]))
    assert done.returncode == 73
    assert done.stderr.endswith("on /billing; there are: none (but on /default)\n")


def test_an_evicted_owner_loses_its_lease_and_the_next_one_gets_it(tenure: Tenure) -> None:
    holder = tenure.hold("--data", "me\x1b[2J")
    waiter = tenure.start("run", "--lock", "nightly", "--", "echo", "mine")
    eventually(lambda: tenure.waiting() == 1)
    done = tenure.inside("evict", "nightly", str(token(tenure)))
    assert done.returncode == 0
    assert f": tenure run sh, pid {holder.process.pid} on {HOST}, count all, for " in done.stdout
    assert done.stdout.endswith("data me\\x1b[2J\n")
    assert holder.end()[0] == 79
    assert waiter.line() == "mine"


def test_an_evicted_waiter_is_told_as_well(tenure: Tenure) -> None:
    tenure.hold()
    waiter = tenure.start("run", "--lock", "nightly", "--", "true")
    eventually(lambda: tenure.waiting() == 1)
    (waiting,) = tenure.json("describe", "nightly")["waiters"]
    gone = tenure.json("evict", "nightly", str(waiting["order_id"]))
    assert (gone["evicted"], gone["order_id"]) == (True, waiting["order_id"])
    assert gone["request"]["pid"] == waiter.process.pid
    code, said = waiter.end()
    assert (code, said.count("\n")) == (79, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["evict", "nightly"], 78, "missing argument 'TOKEN'"),
        (["evict", "nightly", "first"], 78, "'first' is not a whole number"),
        (["evict", "gpu", "7"], 73, "no owner or waiter 7; it has no holder and no waiter"),
        (["evict", "gpu", str(2**64)], 73, "no owner or waiter"),
        (["evict", "gpo", "7"], 73, "did you mean 'gpu'?"),
        (["evict", "gpu", "7", "--node", "/defualt"], 73, "did you mean /default?"),
        (["session", "end", "/default"], 78, "missing argument 'ID'"),
        (["session", "end", "/default", "0"], 78, "one or more"),
        (["session", "end", "/defualt", "1"], 73, "did you mean /default?"),
        (["session", "end", "/default", "1"], 73, "there are: none\n"),
        (["session", "list"], 78, "did you mean 'ls'?"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    assert tenure.inside("sem", "create", "gpu", "--limit", "2").returncode == 0
    done = tenure.inside(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_store_there_are_no_sessions(tenure: Tenure) -> None:
    assert json.loads(tenure("session", "ls", "--json").stdout) == {"sessions": []}
    assert tenure("evict", "nightly", "7").returncode == 74
    assert list(tenure.folder.iterdir()) == []
