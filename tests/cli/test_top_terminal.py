"""`tenure top` on a terminal: what is seen and typed there, and how it is given back."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import termios

import pytest

from tests.cli.programs import TENURE, Tenure
from tests.cli.terminals import Screen, on_terminal, shell

TOP = [*TENURE, "top", "--interval", "0.2"]
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR = "\x1b[?25h"


def is_canonical(screen: Screen) -> bool:
    return bool(termios.tcgetattr(screen.master)[3] & termios.ICANON)


def test_it_is_looked_at_looked_into_and_left(tenure: Tenure) -> None:
    holder = tenure.hold("--data", "\x1b[31mhost")
    with on_terminal(TOP, tenure.environment, tenure.folder) as screen:
        screen.wait_for(ENTER)
        screen.wait_for("by name, ascending")
        screen.wait_for("1 owner, 0 waiting")
        screen.wait_for("1 semaphore, 1 session, 1 node")
        assert "nightly" in screen.wait_for("\\x1b[31mhost")
        assert not is_canonical(screen)
        screen.type("s")
        screen.wait_for("by held, descending")
        screen.type("\r")
        screen.wait_for("owns")
        screen.wait_for(str(holder.process.pid))
        screen.type("w")
        screen.wait_for("on /default: request ")
        screen.wait_for("no wait of it is known")
        screen.type("\x1b")
        screen.wait_for("owns")
        screen.type("\x1b")
        screen.wait_for("by held")
        screen.type("w")
        screen.wait_for("why its waiters wait")
        screen.wait_for("no wait of it is known")
        screen.type("\x1b")
        screen.wait_for("by held")
        holder.say("0")
        screen.wait_for("nothing is held")
        screen.type("q")
        rest = screen.rest()
        assert LEAVE in rest
        assert SHOW_CURSOR in rest
        assert screen.process.wait() == 0


def test_once_prints_and_leaves_the_terminal_as_it_is(tenure: Tenure) -> None:
    tenure.hold()
    with on_terminal([*TOP, "--once"], tenure.environment, tenure.folder) as screen:
        rest = screen.rest()
        assert "nightly" in rest
        assert ENTER not in rest
        assert screen.process.wait() == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_gives_the_terminal_back(
    tenure: Tenure, number: signal.Signals, code: int
) -> None:
    tenure.inside("node", "create", "/other")
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter("tenure top")
        screen.wait_for("nothing is held")
        (pid,) = children_of(screen.process.pid)
        os.kill(pid, number)
        screen.wait_for(LEAVE)
        assert screen.prompt() == code
        assert is_canonical(screen)


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(each) for each in children.read().split()]


def test_an_error_gives_the_terminal_back(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    code = (
        "import tenure.cli.top.command as c, sys\n"
        "from tenure.cli.app import invoke\n"
        "def broken(*_): raise ZeroDivisionError('planted')\n"
        "c.render = broken\n"
        "sys.exit(invoke(['top']))"
    )
    with on_terminal([TENURE[0], "-c", code], tenure.environment, tenure.folder) as screen:
        before = is_canonical(screen)
        seen = screen.rest()
        assert seen.index(LEAVE) < seen.index("ZeroDivisionError: planted")
        assert screen.process.wait() == 70
        assert before


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter("tenure top --interval 0.2")
        screen.wait_for("nothing is held")
        screen.type("\x1a")
        screen.wait_for(LEAVE)
        screen.wait_for("Stopped")
        assert screen.prompt() == 128 + 20
        assert is_canonical(screen)
        screen.enter("fg")
        screen.wait_for(ENTER)
        screen.wait_for("nothing is held")
        screen.type("q")
        screen.wait_for(LEAVE)
        assert screen.prompt() == 0


def test_another_size_is_another_picture(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    for number in range(8):
        tenure.inside("sem", "create", f"s{number:02}", "--limit", "2")
    with on_terminal(TOP, tenure.environment, tenure.folder) as screen:
        screen.wait_for("s07")
        fcntl.ioctl(screen.master, termios.TIOCSWINSZ, struct.pack("HHHH", 6, 30, 0, 0))
        os.killpg(screen.process.pid, signal.SIGWINCH)
        screen.wait_for("q quit  ↑↓ select  Enter look…")
        screen.type("\x1b[F")  # End
        screen.wait_for("s06")
        screen.wait_for("s07")


def test_what_goes_wrong_later_is_told_on_the_screen(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    with on_terminal([*TOP, "--node", "/other"], tenure.environment, tenure.folder) as screen:
        screen.wait_for("nothing is held")
        assert tenure.inside("node", "drop", "/other").returncode == 0
        screen.wait_for("not up to date: ")
        screen.type("q")
        screen.rest()
        assert screen.process.wait() == 0


def test_keys_come_from_the_terminal_when_the_input_is_something_else(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    with shell(tenure.environment, tenure.folder) as screen:
        screen.enter("echo | tenure top")
        screen.wait_for("nothing is held")
        screen.type("q")
        screen.wait_for(LEAVE)
        assert screen.prompt() == 0


def test_a_closed_terminal_ends_it(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    with on_terminal(TOP, tenure.environment, tenure.folder) as screen:
        screen.wait_for("nothing is held")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, screen.master)  # closes it
        os.close(nothing)
        assert screen.process.wait() == 128 + signal.SIGHUP


def test_it_ends_when_nobody_reads_the_pipe(tenure: Tenure) -> None:
    tenure.inside("node", "create", "/other")
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$@" --interval 1000 | head -1', "bash", *TOP],
        env=tenure.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (128 + 13, 1, "")
