"""Exit codes of the command line.

They differ from each other, from a shell's codes, and from the usual codes of commands under
`tenure run`, so that a script can distinguish "another process has the lock" from "the lock was
lost".
"""

from __future__ import annotations

from enum import IntEnum

from tenure import LOSS_EXIT_STATUS


class Status(IntEnum):
    """Exit codes of `tenure` itself."""

    DONE = 0
    DEFECT = 70
    REFUSED = 73
    STORE = 74
    BUSY = 75
    TIMED_OUT = 76
    NOT_DUE = 77
    USAGE = 78
    LOST = LOSS_EXIT_STATUS
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


_MEANING = {
    Status.DEFECT: "a defect in tenure",
    Status.REFUSED: "the named object does not exist, exists already, or is in use",
    Status.STORE: "the store cannot be reached or used",
    Status.BUSY: "not free, with --timeout 0",
    Status.TIMED_OUT: "not granted within --timeout",
    Status.NOT_DUE: "not due, with --once-per: it has run already",
    Status.USAGE: "wrong usage: an option, a name, a URL",
    Status.LOST: "the lock was lost, and the command ended",
    Status.NOT_EXECUTABLE: "the command cannot be executed",
    Status.NOT_FOUND: "the command was not found",
}


def after_signal(number: int) -> int:
    """Return the exit code that a shell reports for a program ended by a signal."""
    return 128 + number


def table(*, run: bool) -> list[tuple[str, str]]:
    """Codes and meanings, for help texts.

    Args:
        run: whether to include those of commands that run another program.
    """
    only_run = {
        Status.BUSY,
        Status.TIMED_OUT,
        Status.NOT_DUE,
        Status.LOST,
        Status.NOT_EXECUTABLE,
        Status.NOT_FOUND,
    }
    rows = [(str(int(each)), _MEANING[each]) for each in _MEANING if run or each not in only_run]
    rows.append(("128+n", "ended by signal n"))
    return rows
