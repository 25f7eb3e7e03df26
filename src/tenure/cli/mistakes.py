"""Errors of the command line: one line, and an exit code."""

from __future__ import annotations

import click

from tenure import (
    AcquireTimeout,
    AuthenticationFailed,
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
from tenure.cli.status import Status

_STATUS: tuple[tuple[tuple[type[TenureError], ...], Status], ...] = (
    ((InvalidArgument, Unsupported), Status.USAGE),
    ((NodeNotFound, SemaphoreNotFound), Status.REFUSED),
    ((NodeExists, SemaphoreExists, NodeBusy, SemaphoreBusy), Status.REFUSED),
    ((EngineUnavailable, AuthenticationFailed, EngineError), Status.STORE),
    ((AcquireTimeout,), Status.TIMED_OUT),
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
