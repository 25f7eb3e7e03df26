"""Scripts of a conversation: their types, and checks that several of them make.

A *script* carries out one request of a client. It is a generator that yields the operations it
needs, one at a time, is sent the answer of each, or has the error thrown in, and puts its replies
into the conversation's. Scripts of one name run one after the other (`tenure.server.ydb.core`), so
that the state of the name does not change between two steps of one script.
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
"""``start(name, data, owners, changed)``: watch, as the contract says; returns its end."""


class Books(Protocol):
    """Counts of requests against the server's limits."""

    def join(self, node: str, name: str, *, ephemeral: bool) -> None:
        """Raises `LimitReached`."""

    def rejoin(self, node: str, name: str, *, ephemeral: bool) -> None: ...

    def leave(self, node: str, name: str) -> None: ...


def what_is_wrong(name: str, data: bytes, node: str, limits: Limits) -> str:
    """Return an error in a name or data, or nothing."""
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
    """Tell whether data are not too long."""
    return len(data) <= limits.data_bytes


def no_semaphore(name: str) -> str:
    """Return why there can be no semaphore of that name, or nothing."""
    try:
        rules.check_name(name)
    except InvalidArgument as error:
        return f"there is no such semaphore: {error}"
    return ""
