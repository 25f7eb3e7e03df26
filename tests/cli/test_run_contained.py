"""`tenure run` and its guards: whatever is killed or stopped, no process outlives the lock.

The command of these tests starts what such sweeps miss: a child in a session of its own, and a
daemon, whose parents have ended. None of the two keeps any of our descriptors open.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tenure.cli.run.guard import cgroup
from tests.cli import programs
from tests.cli.programs import (
    CONT,
    KILL,
    STOP,
    Running,
    Tenure,
    alive,
    eventually,
    guards_of,
    pid_of,
    together,
)
from tests.guarantees import SQLITE, guarantee

LOCK = ("run", "--lock", "nightly")
SHORT = ("--recovery-window", "3", "--grace", "0.6")
"""A tenth of the window is what a busy machine may delay the end of everything by."""

DAEMONS = """
import os, signal, sys

def there():
    os.write(1, b"there %d\\n" % os.getpid())

def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    there()
    os.closerange(0, 1024)
    while True:
        signal.pause()

there()
if os.fork() == 0:
    os.setsid()
    stay()
between = os.fork()
if between == 0:
    os.setsid()
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            pass
        stay()
    os._exit(0)
os.waitpid(between, 0)
while True:
    signal.pause()
"""

# Whether one of the processes lives; a zombie does not.
SEEN_ALIVE = """
for pid in "$0" "$@"; do
    case "$(sed 's/.*) //; s/ .*//' /proc/$pid/stat 2>&-)" in
        ''|Z|X) ;;
        *) echo alive; exit ;;
    esac
done
echo dead
"""


def _cgroups_possible() -> bool:
    try:
        made = cgroup.make(cgroup.parent_of())
    except cgroup.NoCgroup:
        return False
    made.remove()
    made.close()
    return True


in_cgroup = pytest.mark.skipif(
    not _cgroups_possible(), reason="this user may make no cgroup here (cgroup v2, as root)"
)
CONTAINED = [
    pytest.param((), id="cgroup", marks=in_cgroup),
    pytest.param(("--no-cgroup",), id="sweep"),
]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cgroup in which `tenure` runs, so that no other test's run ends what is left in it."""
    folder = cgroup.parent_of() / f"tenure-test-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir()
    enter = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    monkeypatch.setattr(programs, "TENURE", [*enter, *programs.TENURE])
    yield folder
    eventually(lambda: (folder / "cgroup.procs").read_text() == "")
    folder.rmdir()


def start(tenure: Tenure, *options: str) -> tuple[Running, list[int]]:
    """A command with its daemons, and all of their process ids, the command's first."""
    running = tenure.start(*LOCK, *options, "--", sys.executable, "-c", DAEMONS)
    return running, [pid_of(running.line()) for _ in range(3)]


def people(running: Running) -> dict[str, int]:
    watchdog, guardian = guards_of(running)
    return {"run": running.process.pid, "watchdog": watchdog, "guardian": guardian}


ONE_OR_TWO = [
    pytest.param(each, id="+".join(each))
    for number in (1, 2)
    for each in itertools.combinations(("run", "watchdog", "guardian"), number)
    if each != ("watchdog",)  # nothing ends then
]


@guarantee("killed", "one owner", "nothing leaks", "others proceed", on=SQLITE)
@pytest.mark.parametrize("contained", CONTAINED)
@pytest.mark.parametrize("killed", ONE_OR_TWO)
def test_what_is_left_of_the_guards_ends_everything_before_the_lock_passes_on(
    tenure: Tenure, killed: Sequence[str], contained: Sequence[str]
) -> None:
    running, pids = start(tenure, *contained)
    there = people(running)
    waiter = tenure.start(*LOCK, "--", "sh", "-c", SEEN_ALIVE, *map(str, pids))
    eventually(lambda: tenure.waiting() == 1)
    together(*(there[each] for each in killed))
    assert waiter.line() == "dead"
    assert not any(map(alive, pids))
    assert waiter.end() == (0, "")
    if "run" not in killed:
        assert running.end()[0] == 128 + KILL


def test_a_dead_watchdog_is_no_loss(tenure: Tenure) -> None:
    running = tenure.hold()
    watchdog, guardian = guards_of(running)
    os.kill(watchdog, KILL)
    running.say("5")
    assert running.end() == (5, "")
    eventually(lambda: not alive(guardian))


@in_cgroup
@pytest.mark.usefixtures("apart")
def test_the_next_run_ends_what_three_killed_processes_have_left(tenure: Tenure) -> None:
    running, pids = start(tenure)
    together(*people(running).values())
    running.process.wait()
    assert any(map(alive, pids))  # there is no process left that could end them
    done = tenure(*LOCK, "--verbose", "--timeout", "20", "--", "true")
    assert done.returncode == 0
    assert "ended the processes of a killed 'tenure run' (tenure-run-" in done.stderr
    assert not any(map(alive, pids))


def test_without_a_cgroup_daemons_outlive_three_killed_processes(tenure: Tenure) -> None:
    running, pids = start(tenure, "--no-cgroup")
    together(*people(running).values())
    running.process.wait()
    try:
        assert tenure(*LOCK, "--timeout", "20", "--", "true").returncode == 0
        assert all(map(alive, pids[1:]))  # as the documentation says
    finally:
        for pid in pids[1:]:
            os.kill(pid, KILL)


STOPPED = [
    pytest.param(each, id="+".join(each))
    for number in (1, 2)
    for each in itertools.combinations(("run", "watchdog", "guardian"), number)
    if "run" in each
]


@pytest.mark.exhaustive
@guarantee("stopped", "one owner", "loss reported", "others proceed", on=SQLITE)
@pytest.mark.parametrize("contained", CONTAINED)
@pytest.mark.parametrize("stopped", STOPPED)
def test_who_is_not_stopped_ends_everything_at_the_deadline(
    tenure: Tenure, stopped: Sequence[str], contained: Sequence[str]
) -> None:
    running, pids = start(tenure, *SHORT, *contained)
    there = people(running)
    for each in stopped:
        os.kill(there[each], STOP)
    assert tenure(*LOCK, "--timeout", "30", "--", "true").returncode == 0
    assert not any(map(alive, pids))
    for each in stopped:
        with contextlib.suppress(ProcessLookupError):  # the watchdog kills a stopped guardian
            os.kill(there[each], CONT)
    assert running.end()[0] == 79


@pytest.mark.parametrize("contained", CONTAINED)
def test_a_stopped_guardian_and_a_killed_run_leave_nothing_after_the_deadline(
    tenure: Tenure, contained: Sequence[str]
) -> None:
    running, pids = start(tenure, *SHORT, *contained)
    there = people(running)
    os.kill(there["guardian"], STOP)
    running.signal(KILL)
    running.process.wait()
    eventually(lambda: not any(map(alive, (*pids, there["guardian"], there["watchdog"]))))


@in_cgroup
def test_a_cgroup_disappears_with_its_command(tenure: Tenure) -> None:
    done = tenure(*LOCK, "--verbose", "--", "cat", "/proc/self/cgroup")
    (own,) = [line for line in done.stdout.splitlines() if line.startswith("0::")]
    name = own.rpartition("/")[2]
    assert name.startswith("tenure-run-")
    assert f"/{name}: all of its processes end with the lock" in done.stderr
    assert not (cgroup.parent_of() / name).exists()


@in_cgroup
def test_a_cgroup_disappears_with_a_killed_run(tenure: Tenure) -> None:
    running, _ = start(tenure)
    (path,) = (
        each
        for each in cgroup.parent_of().glob("tenure-run-*")
        if each.name.startswith(f"tenure-run-{running.process.pid}-")
    )
    running.signal(KILL)
    eventually(lambda: not path.exists())


@in_cgroup
def test_a_run_inside_a_run_ends_with_it(tenure: Tenure) -> None:
    inner = ("run", "--lock", "inner", "--", sys.executable, "-c", DAEMONS)
    running = tenure.start(*LOCK, "--", sys.executable, "-m", "tenure", *inner)
    pids = [pid_of(running.line()) for _ in range(3)]
    together(running.process.pid, *guards_of(running)[1:])
    eventually(lambda: not any(map(alive, pids)))
    eventually(lambda: not any(cgroup.parent_of().glob(f"tenure-run-{running.process.pid}-*")))


def test_the_sweep_is_named_with_its_reason_and_its_limit(tenure: Tenure) -> None:
    done = tenure(*LOCK, "--verbose", "--no-cgroup", "--", "true")
    assert done.returncode == 0
    assert "tenure: no cgroup for the command (--no-cgroup): its descendants are" in done.stderr
    assert "killed at once, they would survive" in done.stderr
