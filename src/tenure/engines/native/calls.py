"""A client's operations without an answer."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from msgspec import Struct

from tenure.wire.messages import Placed

__all__ = ["Call", "CallOwner", "ConnectionGone"]


class ConnectionGone(Exception):
    """The connection was lost before the answer came. It never leaves this engine."""


class CallOwner(Protocol):
    """Session's side of its calls."""

    def placed(self, call: Call, answer: Placed) -> None:
        """Handle the answer to an `Enqueue`."""

    def landed(self, call: Call) -> None:
        """Note that a call was answered."""

    def refused(self, call: Call) -> None:
        """Note that a call has failed."""


class Call:
    """One request under way: the message that asks, and a future of the answer.

    Attributes:
        rid: the number of the request.
        future: of the answer; cancelled by a caller that does not want it any more.
        owner: the operations of its session; ``None``: its caller repeats it.
        number: of an operation, its number among those of its session.
        until: of an `Enqueue` with a timeout, when that is over.
        parts: what has arrived of an answer that comes in parts.
        sent: it was sent, over this connection or one before, and may have been done.
        perhaps_done: a server has had it that may have done it, and cannot be asked any more.
        cut_off: it was sent over a connection that was lost before the answer.
    """

    __slots__ = (
        "cut_off",
        "future",
        "message",
        "number",
        "owner",
        "parts",
        "perhaps_done",
        "rid",
        "sent",
        "until",
    )

    def __init__(
        self,
        rid: int,
        message: Struct,
        future: asyncio.Future[Any],
        owner: CallOwner | None = None,
    ) -> None:
        """Start unsent."""
        self.rid = rid
        self.message = message
        self.future = future
        self.owner = owner
        self.number = 0
        self.until: float | None = None
        self.parts: list[Any] = []
        self.sent = False
        self.perhaps_done = self.cut_off = False

    def succeed(self, result: object) -> None:
        """Settle it with its answer."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Fail. No warning is logged if the caller does not read the error."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()
