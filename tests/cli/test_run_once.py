"""`tenure run --once-per` and `--hold-at-least`: a cron job that one machine of many runs."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tenure.cli.mistakes import Status
from tests.cli.programs import KILL, Tenure, alive, eventually, pid_of

ONCE = ("run", "--lock", "nightly", "--once-per", "1h")


def note(tenure: Tenure) -> tuple[str, ...]:
    """A job that is over at once, and leaves a line."""
    return ("--", "sh", "-c", f"echo ran >> {tenure.folder / 'journal'}")


def ran(tenure: Tenure) -> int:
    journal = tenure.folder / "journal"
    return journal.read_text().count("ran") if journal.exists() else 0


def test_a_job_that_is_shorter_than_the_skew_of_the_clocks_runs_once(tenure: Tenure) -> None:
    # Each starts when the one before has long ended: a lock alone would let all of them run.
    codes = [tenure(*ONCE, *note(tenure)).returncode for _ in range(3)]
    assert (codes, ran(tenure)) == ([0, 77, 77], 1)


@pytest.mark.parametrize("options", [(), ("--timeout", "0")])
def test_of_racing_machines_one_runs_the_job(tenure: Tenure, options: tuple[str, ...]) -> None:
    racing = [tenure.start(*ONCE, *options, "--quiet", *note(tenure)) for _ in range(4)]
    codes = sorted(each.end()[0] for each in racing)
    assert ran(tenure) == 1
    assert codes[0] == 0
    assert set(codes[1:]) <= {75, 77}


def test_a_job_that_is_not_due_says_who_ran_it_and_when(tenure: Tenure) -> None:
    assert tenure(*ONCE, "--", "true").returncode == 0
    done = tenure(*ONCE, "--", "echo", "never")
    assert (done.returncode, done.stdout) == (77, "")
    assert re.fullmatch(
        r"tenure: 'nightly' on /default is not due for (59 min \d+ s|1 h): it ran \d+\.\d s ago "
        r"\(tenure run true, pid \d+ on .+\)\n",
        done.stderr,
    )
    assert tenure(*ONCE, "--quiet", "--", "true").stderr == ""


def test_a_job_that_failed_is_run_by_the_next_caller(tenure: Tenure) -> None:
    assert tenure(*ONCE, "--", "sh", "-c", "exit 3").returncode == 3
    assert tenure(*ONCE, *note(tenure)).returncode == 0
    assert tenure(*ONCE, *note(tenure)).returncode == 77
    assert ran(tenure) == 1


def test_a_job_that_failed_counts_on_request(tenure: Tenure) -> None:
    assert tenure(*ONCE, "--", "sh", "-c", "exit 3").returncode == 3
    assert tenure(*ONCE, "--count-failed", *note(tenure)).returncode == 77


def test_a_job_that_was_killed_is_run_by_who_waits(tenure: Tenure) -> None:
    running = tenure.start(*ONCE, "--", "sh", "-c", "echo there $$; read x")
    pid = pid_of(running.line())
    waiter = tenure.start(*ONCE, *note(tenure))
    eventually(lambda: tenure.waiting() == 1)
    running.signal(KILL)
    assert waiter.end()[0] == 0
    assert (ran(tenure), alive(pid)) == (1, False)


def test_who_waits_for_a_job_that_succeeds_has_nothing_to_do(tenure: Tenure) -> None:
    running = tenure.start(*ONCE, "--", "sh", "-c", "echo there; read x")
    assert running.line() == "there"
    waiter = tenure.start(*ONCE, *note(tenure))
    eventually(lambda: tenure.waiting() == 1)
    busy = tenure(*ONCE, "--timeout", "0", "--", "true")
    assert busy.returncode == 75
    assert "is not free: held by" in busy.stderr
    late = tenure(*ONCE, "--timeout", "0.2", "--", "true")
    assert late.returncode == 76
    running.say()
    assert running.end()[0] == 0
    assert waiter.end()[0] == 77
    assert ran(tenure) == 0


def test_a_period_that_has_passed_makes_a_job_due(tenure: Tenure) -> None:
    assert tenure(*ONCE, *note(tenure)).returncode == 0
    short = (*ONCE[:-1], "0.001s")
    assert tenure(*short, *note(tenure)).returncode == 0
    assert ran(tenure) == 2


def test_a_lock_is_held_for_as_long_as_is_asked_for(tenure: Tenure) -> None:
    done = tenure.folder / "done"
    running = tenure.start(
        *("run", "--lock", "nightly", "--hold-at-least", "1h", "--", "sh", "-c", f"echo > {done}")
    )
    eventually(done.exists)
    eventually(lambda: guards_are_gone(running.process.pid))
    assert tenure("run", "--lock", "nightly", "--timeout", "0", "--", "true").returncode == 75
    running.signal(signal.SIGTERM)
    assert running.end() == (0, "")
    assert tenure("run", "--lock", "nightly", "--timeout", "0", "--", "true").returncode == 0


def guards_are_gone(pid: int) -> bool:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""


def test_a_lock_held_for_longer_passes_on_after_that(tenure: Tenure) -> None:
    hold = ("run", "--lock", "nightly", "--hold-at-least", "0.3s")
    assert tenure(*hold, "--", "sh", "-c", "exit 4").returncode == 4


def test_a_lock_that_is_lost_while_it_is_held_for_longer_is_told(tenure: Tenure) -> None:
    done = tenure.folder / "done"
    hold = ("run", "--lock", "nightly", "--hold-at-least", "1h")
    running = tenure.start(*hold, "--", "sh", "-c", f"echo > {done}")
    eventually(done.exists)
    eventually(lambda: guards_are_gone(running.process.pid))
    token = tenure.json("describe", "nightly")["owners"][0]["order_id"]
    assert tenure("evict", "nightly", str(token)).returncode == 0
    code, said = running.end()
    assert code == 79
    assert "evicted by an administrator" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elect", "a", "--once-per", "1h"], "--once-per goes with --lock"),
        (["--lock", "a", "--count-failed"], "--count-failed goes with --once-per"),
        (["--lock", "a", "--once-per", "1w"], "'1w' is no length of time"),
        (["--lock", "a", "--once-per", "-1h"], "'-1h' is no length of time"),
        (["--lock", "a", "--hold-at-least", "x"], "'x' is no length of time"),
    ],
)
def test_a_mistake_is_told(tenure: Tenure, arguments: list[str], message: str) -> None:
    done = tenure.inside("run", *arguments, "--", "true")
    assert done.returncode == 78
    assert message in done.stderr


ANOTHER_RUN = """
import tenure.blocking
from tenure.core.periods import RunRecord, encode

with tenure.blocking.connect() as client:
    client.semaphore("nightly:last-run").update(encode(RunRecord(1.0, 1, "another run")))
"""


def test_a_loss_that_shows_after_the_command_is_not_said_to_have_ended_it(tenure: Tenure) -> None:
    done = tenure(*ONCE, "--", sys.executable, "-c", ANOTHER_RUN)
    assert done.returncode == Status.LOST
    assert "another run has been recorded since; the command had ended by itself" in done.stderr
