"""`tenure run` in an interactive shell: the keyboard, Ctrl-C, Ctrl-Z, `fg`, pipelines."""

from __future__ import annotations

import sys

import pytest

from tests.cli.programs import Tenure
from tests.cli.terminals import shell

ASK = "tenure run --lock nightly -- sh -c 'echo there; read x; echo \"got $x\"'"


def test_the_command_reads_the_keyboard(tenure: Tenure) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK)
        screen.wait_for("there\n")
        screen.enter("hello")
        screen.wait_for("got hello")
        assert screen.prompt() == 0


@pytest.mark.parametrize(("key", "code"), [("\x03", 130), ("\x1c", 131)])
def test_the_keyboard_interrupts_the_command(tenure: Tenure, key: str, code: int) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK)
        screen.wait_for("there\n")
        screen.type(key)
        assert screen.prompt() == code


def test_the_keyboard_interrupts_the_wait(tenure: Tenure) -> None:
    tenure.hold()
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK)
        screen.wait_for("waiting for 'nightly' on /default: held by tenure run ")
        screen.type("\x03")
        assert screen.prompt() == 130
    assert tenure.waiting() == 0


STOPPED = "until jobs -s | grep -q .; do :; done"
"""Wait until the shell knows of the stop: `fg` continues no job that it takes for running."""


@pytest.mark.parametrize("how", ["fg", f"bg; {STOPPED}; fg"])
def test_a_suspended_job_goes_on_in_the_foreground(tenure: Tenure, how: str) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK)
        screen.wait_for("there\n")
        screen.type("\x1a")
        screen.wait_for("Stopped")
        assert screen.prompt() == 128 + 20
        screen.enter(how)
        screen.wait_for('"$@"')  # the shell says what it continues
        screen.enter("hello")
        screen.wait_for("got hello")
        assert screen.prompt() == 0


STALE = """
import asyncio, os, signal, subprocess
from tenure.cli.run.holder import JobControl

class Command:
    def __init__(self):
        self.process = subprocess.Popen(["sleep", "60"], process_group=0)
        self.group = self.process.pid
        self.signals = []

    def signal(self, number):
        self.signals.append(number)

async def main():
    control = JobControl()
    control.command = command = Command()
    os.tcsetpgrp(0, command.group)  # as after `fg`
    control.stopped(signal.SIGTTIN)  # of the time before it
    print("foreground", os.tcgetpgrp(0) == command.group, "continued", command.signals == [18])
    command.process.kill()
    command.process.wait()
    control.close()

asyncio.run(main())
"""


def test_an_old_report_of_a_stop_does_not_suspend_a_job_in_the_foreground(tenure: Tenure) -> None:
    (tenure.folder / "stale.py").write_text(STALE)
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(f"{sys.executable} stale.py")
        screen.wait_for("foreground True continued True")
        assert screen.prompt() == 0


def test_a_job_suspended_for_too_long_has_lost_its_lock(tenure: Tenure) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK.replace(" --", " --recovery-window 1 --", 1))
        screen.wait_for("there\n")
        screen.type("\x1a")
        screen.wait_for("Stopped")
        assert screen.prompt() == 128 + 20
        done = tenure("run", "--lock", "nightly", "--timeout", "30", "--", "true")
        assert done.returncode == 0
        screen.enter("fg")
        screen.wait_for("tenure: the lease of 'nightly' on /default ")
        assert screen.prompt() == 79


def test_in_a_pipeline_the_command_gets_the_keyboard_when_it_asks(tenure: Tenure) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK + " | cat")
        screen.wait_for("there\n")
        screen.enter("hello")
        screen.wait_for("got hello")
        assert screen.prompt() == 0


def test_a_job_in_the_background_waits_for_the_keyboard(tenure: Tenure) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter(ASK + " &")
        screen.wait_for("there\n")
        screen.enter(STOPPED)  # it reads, and is stopped
        screen.enter("fg")
        screen.enter("hello")
        screen.wait_for("got hello")


def test_a_killed_command_leaves_the_terminal_as_it_was(tenure: Tenure) -> None:
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter("tenure run --lock nightly -- sh -c 'stty raw; kill -9 $$'; stty -a")
        assert {"icanon", "isig"} <= set(screen.wait_for("extproc").split())
