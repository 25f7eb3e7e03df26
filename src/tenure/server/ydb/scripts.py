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

__all__ = ["Books", "Script", "StartWatch", "what_is_wrong"]

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
    most = limits.data_bytes
    if len(data) > most:
        return f"data has at most {most} bytes (limit data_bytes), this has {len(data)}"
    return ""
