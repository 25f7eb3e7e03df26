"""`tenure run` never lets its command outlive the lock, whatever happens to it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

import tenure as tenure_package
from tests.cli.programs import (
    CONT,
    KILL,
    LISTENER,
    STOP,
    Tenure,
    alive,
    eventually,
    guards_of,
    listener,
    pid_of,
    together,
)
from tests.guarantees import SQLITE, guarantee

LOCK = ("run", "--lock", "nightly")
SHORT = ("--recovery-window", "1", "--grace", "0.2")

# It starts a child in a session of its own and one that ignores SIGTERM, and waits for both.
FAMILY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"SIGTERM\\n"))
inner = 'import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True)\\n'
inner += 'while True: signal.pause()'
children = [
    subprocess.Popen(
        [sys.executable, "-c", inner], stdout=subprocess.PIPE, start_new_session=apart
    )
    for apart in (False, True)
]
for child in children:
    os.write(1, b"there " + child.stdout.readline())
os.write(1, b"there %d\\n" % os.getpid())
while True:
    signal.pause()
"""


def family(*options: str) -> list[str]:
    return [*LOCK, *options, "--", sys.executable, "-c", FAMILY]


@guarantee("killed", "one owner", "nothing leaks", on=SQLITE)
def test_a_killed_run_takes_all_of_its_command_with_it(tenure: Tenure) -> None:
    running = tenure.start(*family())
    pids = [pid_of(running.line()) for _ in range(3)]
    running.signal(KILL)
    eventually(lambda: not any(map(alive, pids)))
    assert running.output.read() == ""  # no SIGTERM: nobody is there to wait
    assert tenure(*LOCK, "--timeout", "20", "--", "true").returncode == 0


@guarantee("killed", "one owner", "others proceed", on=SQLITE)
def test_the_lock_of_a_killed_run_passes_on_to_who_waits(tenure: Tenure) -> None:
    running = tenure.start(*listener())
    pid = pid_of(running.line())
    waiter = tenure.start(*LOCK, "--", "sh", "-c", f"kill -0 {pid} 2>&1; echo mine")
    eventually(lambda: tenure.waiting() == 1)
    running.signal(KILL)
    # Whatever the command was at, it is dead (or a zombie) by the time another has the lock.
    assert waiter.line() != ""
    assert not alive(pid)
    waiter.output.read()
    assert waiter.end()[0] == 0


def test_the_lock_stays_with_a_command_that_has_outlived_everybody(tenure: Tenure) -> None:
    unbound = "import ctypes; ctypes.CDLL(None).prctl(1, 0)  # the parent-death signal\n"
    running = tenure.start(*LOCK, "--no-cgroup", "--", sys.executable, "-c", unbound + LISTENER)
    pid = pid_of(running.line())
    together(running.process.pid, *guards_of(running))
    running.process.wait()
    try:
        # A dead process gives its locks up at once; this one's command has inherited its.
        assert tenure(*LOCK, "--timeout", "1", "--", "true").returncode == 76
        assert alive(pid)
    finally:
        os.kill(pid, KILL)
    assert tenure(*LOCK, "--timeout", "20", "--", "true").returncode == 0


@guarantee("stopped", "one owner", "loss reported", "others proceed", on=SQLITE)
def test_a_stopped_run_does_not_keep_its_command_from_being_ended(tenure: Tenure) -> None:
    running = tenure.start(*family(*SHORT))
    pids = [pid_of(running.line()) for _ in range(3)]
    running.signal(STOP)
    # While it is still stopped: first asked, then killed, with everything in it.
    assert running.line() == "SIGTERM"
    eventually(lambda: not any(map(alive, pids)))
    assert tenure(*LOCK, "--timeout", "30", "--", "true").returncode == 0
    running.signal(CONT)
    code, said = running.end()
    assert code == 79
    assert said.startswith("tenure: the lease of 'nightly' on /default ")
    assert said.count("\n") == 1


def test_a_command_that_ends_in_time_after_sigterm_has_lost_all_the_same(tenure: Tenure) -> None:
    obedient = "trap 'echo asked; sleep 0.2; echo done; exit 0' TERM; echo there; "
    obedient += "while :; do sleep 0.01; done"
    window = ("--recovery-window", "3", "--grace", "1.4")
    running = tenure.start(*LOCK, *window, "--", "sh", "-c", obedient)
    assert running.line() == "there"
    running.signal(STOP)
    assert [running.line(), running.line()] == ["asked", "done"]
    running.signal(CONT)
    assert running.end()[0] == 79


@guarantee("stopped", "kept", on=SQLITE)
def test_a_stop_shorter_than_the_window_is_no_loss(tenure: Tenure) -> None:
    running = tenure.hold()
    running.signal(STOP)
    assert tenure.json("describe", "nightly")["held"] is None  # all of it
    running.signal(CONT)
    running.say("5")
    assert running.end() == (5, "")


def test_a_dead_guardian_means_a_dead_command(tenure: Tenure) -> None:
    running = tenure.start(*listener())
    pid = pid_of(running.line())
    _, guardian = guards_of(running)
    running.signal(STOP)
    os.kill(guardian, KILL)
    eventually(lambda: not alive(pid))  # by the kernel
    running.signal(CONT)
    assert running.end()[0] == 128 + KILL


def test_all_guards_stopped_means_that_the_command_outlives_the_lock(tenure: Tenure) -> None:
    running = tenure.start(*listener(*SHORT))
    pid = pid_of(running.line())
    guards = guards_of(running)
    for each in (running.process.pid, *guards):
        os.kill(each, STOP)
    # The lock passes on, because its holder has not been heard of within its window.
    assert tenure(*LOCK, "--timeout", "30", "--", "true").returncode == 0
    assert alive(pid)
    running.signal(CONT)
    eventually(lambda: not alive(pid))
    for each in guards:
        os.kill(each, CONT)
    assert running.end()[0] == 79


def test_a_lock_that_is_taken_away_ends_the_command_at_once(tenure: Tenure) -> None:
    slot = ("run", "--semaphore", "gpu", "--limit", "1")
    running = tenure.start(*slot, "--", *listener()[4:])
    pid = pid_of(running.line())
    assert tenure("sem", "delete", "gpu", "--force").returncode == 0
    code, said = running.end()
    assert (code, alive(pid)) == (79, False)
    assert "the lease of 'gpu' on /default is lost: the semaphore was deleted" in said


@guarantee("administrator", "loss reported", on=SQLITE)
async def test_an_evicted_holder_ends_its_command(tenure: Tenure) -> None:
    running = tenure.start(*listener())
    pid = pid_of(running.line())
    async with tenure_package.connect(tenure.url) as client:
        (owner,) = (await client.describe_semaphore("nightly")).owners
        assert await client.evict("/default", "nightly", owner.order_id)
        code, said = running.end()
    assert (code, alive(pid)) == (79, False)
    assert "evicted by an administrator" in said


def test_who_was_stopped_while_waiting_queues_again(tenure: Tenure) -> None:
    holder = tenure.hold()
    # Long enough for it to start a command and see it end on a machine with much else to do.
    window = ("--recovery-window", "3", "--grace", "0.2")
    waiter = tenure.start(*LOCK, *window, "--", "echo", "mine")
    eventually(lambda: tenure.waiting() == 1)
    waiter.signal(STOP)
    eventually(lambda: tenure.waiting() == 0)  # its window is over
    waiter.signal(CONT)
    eventually(lambda: tenure.waiting() == 1)
    holder.say("0")
    assert waiter.line() == "mine"
    code, said = waiter.end()
    assert (code, said.count("\n")) == (0, 1)
    assert said.endswith("; queueing again\n")


def test_a_command_that_somebody_stopped_keeps_its_lock(tenure: Tenure) -> None:
    running = tenure.start(*listener(*SHORT))
    pid = pid_of(running.line())
    os.kill(pid, STOP)
    # Three times its window later it is held still: the holder is renewed all the time.
    assert tenure(*LOCK, "--timeout", "3", "--", "true").returncode == 76
    assert alive(pid)
    os.kill(pid, CONT)
    running.signal(signal.SIGTERM)
    assert running.line() == "SIGTERM"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_command_is_killed_when_its_terminal_less_run_is_stopped_from_a_keyboard(
    tenure: Tenure, stopped: bool
) -> None:
    # Without a terminal there is nobody who could continue us: SIGTSTP stops nothing for good.
    running = tenure.start(*listener())
    pid_of(running.line())
    if stopped:
        running.signal(signal.SIGTSTP)
    running.signal(signal.SIGUSR1)
    if stopped:
        running.signal(signal.SIGCONT)
    assert running.line() == "SIGUSR1"
