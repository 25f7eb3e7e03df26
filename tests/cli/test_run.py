"""`tenure run`: what it passes on, when it gives up, and what it says with its exit code."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import LISTENER, TENURE, Tenure, alive, eventually, listener, pid_of

LOCK = ("run", "--lock", "nightly")


# --- passing through


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_commands_exit_code_is_passed_on(tenure: Tenure, code: int) -> None:
    done = tenure(*LOCK, "--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stderr) == (code, "")


def test_a_store_that_is_made_without_being_named_is_named_once(tenure: Tenure) -> None:
    unnamed = {"TENURE_URL": "", "XDG_STATE_HOME": str(tenure.folder / "state")}
    first = tenure(*LOCK, "--", "true", **unnamed)
    assert first.returncode == 0
    assert f"this makes sqlite:///{tenure.folder}/state/tenure/tenure.db" in first.stderr
    assert "this host alone" in first.stderr
    assert "TENURE_URL" in first.stderr
    assert tenure(*LOCK, "--", "true", **unnamed).stderr == ""
    url = f"sqlite:///{tenure.folder}/other.db"
    assert tenure("--url", url, *LOCK, "--", "true", **unnamed).stderr == ""


@pytest.mark.parametrize("name", ["TERM", "KILL", "SEGV"])
def test_a_command_that_a_signal_ends_counts_as_in_a_shell(tenure: Tenure, name: str) -> None:
    done = tenure(*LOCK, "--", "sh", "-c", f"ulimit -c 0; kill -{name} $$")
    assert done.returncode == 128 + signal.Signals["SIG" + name]


def test_the_command_needs_no_dashes_before_it_and_keeps_its_own_options(tenure: Tenure) -> None:
    assert tenure(*LOCK, "echo", "-n", "--timeout", "3").stdout == "--timeout 3"


def test_the_command_has_our_streams_and_descriptors(tenure: Tenure) -> None:
    command = [*TENURE, *LOCK, "--", "sh", "-c", 'read x; echo "$x"; echo e >&2; echo f >&7']
    process = subprocess.run(
        ["sh", "-c", 'exec "$@" 7>seven', "sh", *command],
        input="in",
        capture_output=True,
        text=True,
        env=tenure.environment,
        cwd=tenure.folder,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "in\n", "e\n")
    assert (tenure.folder / "seven").read_text() == "f\n"


def test_the_command_knows_what_it_holds_and_tokens_rise(tenure: Tenure) -> None:
    assert tenure.inside("node", "create", "/billing").returncode == 0
    show = ("sh", "-c", "echo $TENURE_NAME $TENURE_NODE $TENURE_FENCING_TOKEN")
    tokens = []
    for _ in range(2):
        done = tenure(*LOCK, "--node", "/billing", "--", *show)
        name, node, token = done.stdout.split()
        assert (name, node) == ("nightly", "/billing")
        tokens.append(int(token))
    assert tokens[0] < tokens[1]


def test_each_holder_of_a_semaphore_knows_its_slot(tenure: Tenure) -> None:
    pool = ("run", "--semaphore", "gpu", "--limit", "3")
    show = ("sh", "-c", "echo $TENURE_SLOT; read x")
    first = tenure.start(*pool, "--", *show)
    assert first.line() == "0"
    several = tenure.start(*pool, "--count", "2", "--", *show)
    assert several.line() == "1,2"
    first.say()
    assert first.end()[0] == 0
    assert tenure(*pool, "--", "sh", "-c", "echo $TENURE_SLOT").stdout == "0\n"
    many = ("run", "--semaphore", "many", "--limit", "5000")
    assert tenure(*many, "--", "sh", "-c", "echo ${TENURE_SLOT-none}").stdout == "none\n"
    several.say()
    assert several.end()[0] == 0


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH"])
def test_signals_reach_the_command(tenure: Tenure, name: str) -> None:
    running = tenure.start(*listener())
    pid_of(running.line())
    running.signal(signal.Signals["SIG" + name])
    assert running.line() == "SIG" + name
    assert running.process.poll() is None


def test_a_signal_reaches_the_whole_process_group(tenure: Tenure) -> None:
    twice = ("sh", "-c", '"$@" & "$@"', "sh", sys.executable, "-c", LISTENER)
    running = tenure.start(*LOCK, "--", *twice)
    for _ in range(2):
        pid_of(running.line())
    running.signal(signal.SIGINT)
    assert [running.line(), running.line()] == ["SIGINT", "SIGINT"]


def test_what_nohup_ignores_stays_ignored(tenure: Tenure) -> None:
    command = [*TENURE, *LOCK, "--", "sh", "-c", "kill -HUP $$; echo unmoved"]
    process = subprocess.run(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        env=tenure.environment,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, "unmoved\n")


# --- the lock


def test_two_contenders_run_in_turn(tenure: Tenure) -> None:
    journal = tenure.folder / "journal"
    work = f"echo begin $TENURE_FENCING_TOKEN >> {journal}; read x; echo end >> {journal}"
    first = tenure.start(*LOCK, "--", "sh", "-c", f"echo there; {work}")
    assert first.line() == "there"
    second = tenure.start(*LOCK, "--", "sh", "-c", f"echo there; {work}")
    eventually(lambda: tenure.waiting() == 1)
    first.say()
    assert first.end() == (0, "")
    assert second.line() == "there"
    second.say()
    assert second.end() == (0, "")
    lines = journal.read_text().split()
    assert [lines[at] for at in (0, 2, 3, 5)] == ["begin", "end", "begin", "end"]
    assert int(lines[1]) < int(lines[4])


def test_a_lock_is_free_again_after_the_command(tenure: Tenure) -> None:
    for _ in range(2):
        assert tenure(*LOCK, "--timeout", "0", "--", "true").returncode == 0
    assert tenure("ls").stdout.startswith("nothing is held")


def test_timeout_zero_tries(tenure: Tenure) -> None:
    tenure.hold()
    done = tenure(*LOCK, "--timeout", "0", "--", "echo", "never")
    assert (done.returncode, done.stdout) == (75, "")
    assert re.fullmatch(
        r"tenure: 'nightly' on /default is not free: "
        r"held by tenure run sh, pid \d+ on .* for .* s, 0 waiting\n",
        done.stderr,
    )


def test_a_timeout_is_told_apart_from_a_try(tenure: Tenure) -> None:
    tenure.hold()
    done = tenure(*LOCK, "--timeout", "0.1", "--", "echo", "never")
    assert (done.returncode, done.stdout) == (76, "")
    assert "is not free after 0.1 s: held by" in done.stderr
    assert tenure.waiting() == 0


def test_quiet_leaves_it_to_the_exit_code(tenure: Tenure) -> None:
    tenure.hold()
    done = tenure(*LOCK, "--timeout", "0", "--quiet", "--", "true")
    assert (done.returncode, done.stderr) == (75, "")


def test_verbose_names_the_holder_and_the_place_in_the_queue(tenure: Tenure) -> None:
    holder = tenure.hold()
    first = tenure.start(*LOCK, "--", "true")
    eventually(lambda: tenure.waiting() == 1)
    second = tenure.start(*LOCK, "--verbose", "--", "true")
    assert second.process.stderr is not None
    lines = (line for line in second.process.stderr if " waiting for " in line)
    assert re.fullmatch(
        r"tenure: waiting for 'nightly' on /default: "
        r"held by tenure run sh, pid \d+ on .* for .* s; place 2 of 2 in the queue\n",
        next(lines),
    )
    holder.say("0")
    assert first.end() == (0, "")
    code, said = second.end()
    assert code == 0
    assert "tenure: acquired 'nightly' on /default after " in said


def test_without_a_terminal_a_wait_is_silent(tenure: Tenure) -> None:
    holder = tenure.hold()
    waiter = tenure.start(*LOCK, "--", "sleep", "0")
    eventually(lambda: tenure.waiting() == 1)
    holder.say("0")
    assert waiter.end() == (0, "")


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1"])
def test_a_signal_ends_the_wait(tenure: Tenure, name: str) -> None:
    tenure.hold()
    waiter = tenure.start(*LOCK, "--", "echo", "never")
    eventually(lambda: tenure.waiting() == 1)
    waiter.signal(signal.Signals["SIG" + name])
    assert waiter.end() == (128 + signal.Signals["SIG" + name], "")
    assert tenure.waiting() == 0


def test_different_names_do_not_meet(tenure: Tenure) -> None:
    tenure.hold(name="one")
    assert tenure("run", "--lock", "two", "--timeout", "0", "--", "true").returncode == 0


def test_a_semaphore_is_created_and_shared(tenure: Tenure) -> None:
    slots = ("run", "--semaphore", "gpu", "--limit", "2")
    holders = []
    for _ in range(2):
        holder = tenure.start(*slots, "--", "sh", "-c", "echo there; read x")
        assert holder.line() == "there"
        holders.append(holder)
    assert tenure(*slots, "--timeout", "0", "--", "true").returncode == 75
    assert tenure.json("describe", "gpu")["held"] == 2
    holders[0].say()
    assert holders[0].end() == (0, "")
    assert tenure(*slots, "--timeout", "0", "--", "true").returncode == 0
    # It is there now, and needs no limit any more.
    holders[1].say()
    assert holders[1].end() == (0, "")
    count = ("--count", "2", "--timeout", "0")
    assert tenure("run", "--semaphore", "gpu", *count, "--", "true").returncode == 0


def test_another_limit_is_refused_and_both_are_named(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "gpu", "--limit", "4")
    done = tenure("run", "--semaphore", "gpu", "--limit", "5", "--", "true")
    assert done.returncode == 78
    assert done.stderr == (
        "tenure: 'gpu' on /default has the limit 4, not 5; give that one, "
        "or another name, or change it: 'tenure sem resize gpu 5'\n"
    )


def test_a_leader_is_seen_with_its_data(tenure: Tenure) -> None:
    leader = tenure.start(
        *("run", "--elect", "primary", "--data", "10.0.0.7:80", "--"),
        *("sh", "-c", "echo there; read x"),
    )
    assert leader.line() == "there"
    (owner,) = tenure.json("describe", "primary")["owners"]
    assert owner["data"] == "10.0.0.7:80"
    leader.say()
    assert leader.end() == (0, "")


# --- what is left behind


def test_what_the_command_leaves_running_is_ended_with_it(tenure: Tenure) -> None:
    leave = "sleep 1000 & echo $!"
    done = tenure(*LOCK, "--", "sh", "-c", leave)
    assert done.returncode == 0
    assert not alive(int(done.stdout))


def test_a_leftover_that_will_not_go_is_killed_after_the_grace(tenure: Tenure) -> None:
    stubborn = "trap '' TERM; echo $$; while :; do sleep 0.01; done"
    leave = f'sh -c "{stubborn}" & read x'
    running = tenure.start(*LOCK, "--grace", "0.2", "--", "sh", "-c", leave)
    pid = int(running.line().replace("$$", ""))
    running.say()
    assert running.end() == (0, "")
    assert not alive(pid)


def test_a_daemon_is_on_its_own(tenure: Tenure) -> None:
    # A session of its own, nothing of ours kept open, and its parent gone before the command.
    daemon = """
import os, subprocess, sys
wait = "import os, signal; os.write(1, b'there'); os.close(1); signal.pause()"
daemon = subprocess.Popen(
    [sys.executable, "-c", wait],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
)
daemon.stdout.read()
print(daemon.pid, flush=True)
os._exit(0)
"""
    done = tenure(*LOCK, "--", "sh", "-c", '"$@"; true', "sh", sys.executable, "-c", daemon)
    pid = int(done.stdout)
    assert (done.returncode, alive(pid)) == (0, True)
    os.kill(pid, signal.SIGKILL)


# --- mistakes


def test_a_missing_command_is_told_before_the_wait(tenure: Tenure) -> None:
    tenure.hold()
    done = tenure(*LOCK, "--", "no-such-command")
    assert done.returncode == 127
    assert done.stderr == "tenure: there is no command 'no-such-command'\n"


@pytest.mark.parametrize("content", ["#!/bin/sh\n", None])
def test_a_command_that_cannot_be_executed(tenure: Tenure, content: str | None) -> None:
    program = tenure.folder / "program"
    if content is None:
        program.mkdir()
    else:
        program.write_text(content)
    done = tenure(*LOCK, "--", str(program))
    assert done.returncode == 126
    assert "cannot be executed" in done.stderr


@pytest.mark.parametrize(
    ("content", "code"), [("no interpreter named", 126), ("#!/no/such/interpreter\n", 127)]
)
def test_a_command_that_fails_to_start_gives_the_lock_back(
    tenure: Tenure, content: str, code: int
) -> None:
    program = tenure.folder / "program"
    program.write_text(content)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = tenure(*LOCK, "--", str(program))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    assert tenure(*LOCK, "--timeout", "0", "--", "true").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--", "true"], 78, "give one of --lock, --semaphore and --elect"),
        (["--lock", "a", "--elect", "b", "--", "true"], 78, "give one of --lock"),
        (["--lock", "a"], 78, "missing argument"),
        (["--lock", "", "--", "true"], 78, "a name has 1 to 1024 bytes, this one 0"),
        (["--lock", "a", "--limit", "2", "--", "true"], 78, "go with --semaphore"),
        (["--semaphore", "a", "--limit", "0", "--", "true"], 78, "'--limit'"),
        (["--semaphore", "a", "--limit", "1", "--count", "2", "--", "true"], 78, "--limit 1"),
        (["--semaphore", "a", "--", "true"], 73, "there is no semaphore 'a' on /default; --limit"),
        (["--lock", "a", "--timeout", "-1", "--", "true"], 78, "'--timeout'"),
        (["--lock", "a", "--timeout", "nan", "--", "true"], 78, "timeout"),
        (
            ["--lock", "a", "--timeout", "soon", "--", "true"],
            78,
            "'soon' is not a number of seconds",
        ),
        (
            ["--lock", "a", "--recovery-window", "0.5", "--", "true"],
            78,
            "1 to 1800 seconds, not 0.5",
        ),
        (["--lock", "a", "--grace", "15", "--", "true"], 78, "half of the recovery window (30 s)"),
        (["--lock", "a", "--lokc", "b", "--", "true"], 78, "(see 'tenure run --help')"),
        (["--lock", "a", "--node", "/nowhere", "--", "true"], 73, "there is no node /nowhere"),
        (["--lock", "a", "--node", "nowhere", "--", "true"], 78, "starts with '/'"),
        (["--lock", "a", "--url", "memory://", "--", "true"], 78, "memory of one process"),
        (["--lock", "a", "--url", "jobs.db", "--", "true"], 78, "sqlite:///jobs.db"),
        (["--lock", "a", "--url", "nosuch://x", "--", "true"], 78, "no engine is installed"),
        (["--lock", "a", "--url", "sqlite:////proc/no/t.db", "--", "true"], 74, "/proc/no"),
    ],
)
def test_a_mistake_gets_one_line_and_a_code(
    tenure: Tenure, arguments: list[str], code: int, message: str
) -> None:
    done = tenure.inside("run", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message.lower() in done.stderr.lower()
    assert done.stderr.startswith("tenure: ")
    assert done.stderr.count("\n") == 1


def test_a_lock_and_a_semaphore_of_one_name_are_told_apart(tenure: Tenure) -> None:
    tenure.inside("sem", "create", "nightly", "--limit", "2")
    done = tenure(*LOCK, "--", "true")
    assert done.returncode == 78
    assert "'nightly' on /default is a lasting semaphore" in done.stderr
    done = tenure("run", "--elect", "nightly", "--", "true")
    assert done.returncode == 78
    assert "a semaphore of limit 2" in done.stderr


def test_the_help_has_every_exit_code(tenure: Tenure) -> None:
    done = tenure("run", "--help")
    assert done.returncode == 0
    for code in ("70", "73", "74", "75", "76", "78", "79", "126", "127", "128+n"):
        assert re.search(rf"^  {re.escape(code)}  ", done.stdout, re.MULTILINE), code


def test_the_database_is_left_alone_by_a_command_that_runs_nothing(
    tenure: Tenure, tmp_path: Path
) -> None:
    tenure(*LOCK, "--", "no-such-command")
    assert list(tmp_path.iterdir()) == []
