"""What a conversation's scripts are made of.

A *script* is what one question of a client takes: a generator that yields the operations it needs,
one at a time, is sent what each was answered with, or has the error thrown in, and puts the replies
into the conversation's. Scripts of one name run one after the other (`tenure.server.ydb.core`), so
that what one knows of the name is true from each of its steps to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeAlias

from tenure.core import rules
from tenure.errors import InvalidArgument
from tenure.server.limits import Limits
from tenure.server.ydb.operations import Answered, Operation, Settled

__all__ = ["Books", "Script", "StartWatch", "data_fit", "no_semaphore", "what_is_wrong"]

Script: TypeAlias = Generator[Operation | Settled | Answered, Any, None]

StartWatch: TypeAlias = Callable[[str, bool, bool, Callable[[], None]], Callable[[], None]]
"""``start(name, data, owners, changed)``: watch, as the contract says; returns what ends it."""


class Books(Protocol):
    """Where requests are counted against the server's limits."""

    def join(self, node: str, name: str, *, ephemeral: bool) -> None:
        """Raises `LimitReached`."""

    def rejoin(self, node: str, name: str, *, ephemeral: bool) -> None: ...

    def leave(self, node: str, name: str) -> None: ...


def what_is_wrong(name: str, data: bytes, node: str, limits: Limits) -> str:
    """What is wrong with a name and data, or nothing."""
    try:
        rules.check_name(name, node)
    except InvalidArgument as error:
        return str(error)
    if not data_fit(data, limits):
        return (
            f"data has at most {limits.data_bytes} bytes (limit data_bytes), this has {len(data)}"
        )
    return ""


def data_fit(data: bytes, limits: Limits) -> bool:
    """Whether data are not too long."""
    return len(data) <= limits.data_bytes


def no_semaphore(name: str) -> str:
    """Why there can be no semaphore of that name, or nothing."""
    try:
        rules.check_name(name)
    except InvalidArgument as error:
        return f"there is no such semaphore: {error}"
    return ""
