"""Errors of the command line: one line, and an exit code.

Exit codes of the command line.

They differ from each other, from a shell's codes, and from the usual codes of commands under
`tenure run`, so that a script can distinguish "another process has the lock" from "the lock was
lost".
"""

from __future__ import annotations

from enum import IntEnum

import click

from tenure import (
    LOSS_EXIT_STATUS,
    AcquireTimeout,
    AuthenticationFailed,
    Deadlock,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionClosed,
    SessionExpired,
    TenureError,
    Unsupported,
)


class Status(IntEnum):
    """Exit codes of `tenure` itself."""

    DONE = 0
    DEFECT = 70
    DEADLOCK = 72
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
    Status.DEADLOCK: "tenure deadlocks has found a deadlock",
    Status.REFUSED: "the named object does not exist, exists already, or is in use",
    Status.STORE: "the store cannot be reached or used",
    Status.BUSY: "not free, with --timeout 0 or --wait 0",
    Status.TIMED_OUT: "not granted within --timeout or --wait",
    Status.NOT_DUE: "not due, with --once-per: it has run already",
    Status.USAGE: "wrong usage: an option, a name, a URL",
    Status.LOST: "the lock was lost, and the command ended",
    Status.NOT_EXECUTABLE: "the command cannot be executed",
    Status.NOT_FOUND: "the command was not found",
}


def after_signal(number: int) -> int:
    """Return the exit code that a shell reports for a program ended by a signal."""
    return 128 + number


_OF_RUN = frozenset(
    {
        Status.BUSY,
        Status.TIMED_OUT,
        Status.NOT_DUE,
        Status.LOST,
        Status.NOT_EXECUTABLE,
        Status.NOT_FOUND,
    }
)
_OF_OTHERS = frozenset({Status.DEADLOCK})


def table(*, run: bool = True, others: bool = True) -> list[tuple[str, str]]:
    """Codes and meanings, for help texts.

    Args:
        run: whether to include those of commands that run another program.
        others: whether to include those of the other commands.
    """
    left_out = (frozenset() if run else _OF_RUN) | (frozenset() if others else _OF_OTHERS)
    rows = [(str(int(each)), _MEANING[each]) for each in _MEANING if each not in left_out]
    rows.append(("128+n", "ended by signal n"))
    return rows


_STATUS: tuple[tuple[tuple[type[TenureError], ...], Status], ...] = (
    ((InvalidArgument, Unsupported), Status.USAGE),
    ((NodeNotFound, SemaphoreNotFound), Status.REFUSED),
    ((NodeExists, SemaphoreExists, NodeBusy, SemaphoreBusy), Status.REFUSED),
    ((EngineUnavailable, AuthenticationFailed, EngineError), Status.STORE),
    ((AcquireTimeout, Deadlock), Status.TIMED_OUT),
    ((LeaseLost, SessionExpired, SessionClosed), Status.LOST),
)


class Mistake(Exception):
    """Error of a command, with a message for the user and an exit code."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def explain(error: Exception) -> tuple[Status, str] | None:
    """Return the exit code and line for an error; ``None`` for a defect of tenure."""
    if isinstance(error, Mistake):
        return error.status, _one_line(str(error))
    if isinstance(error, click.ClickException):
        message = _one_line(error.format_message()).rstrip(".")
        context = getattr(error, "ctx", None)
        if isinstance(error, click.UsageError) and context is not None:
            message += f" (see '{context.command_path} --help')"
        return Status.USAGE, message[:1].lower() + message[1:]
    if isinstance(error, AcquireTimeout) and isinstance(error.__cause__, TenureError):
        return Status.STORE, _one_line(str(error))  # an outage is not contention
    for kinds, status in _STATUS:
        if isinstance(error, kinds):
            return status, _one_line(str(error))
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())
