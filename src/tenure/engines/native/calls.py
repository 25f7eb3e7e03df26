"""A client's operations without an answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from tenure.engines.native.session import NativeSession

__all__ = ["Call", "ConnectionGone"]


class ConnectionGone(Exception):
    """The connection was lost before the answer came. It never leaves this engine."""


class Call:
    """One request under way: the message that asks, and a future of the answer.

    Attributes:
        rid: the number of the request.
        future: of the answer; cancelled by a caller that does not want it any more.
        session: whose operation it is; ``None``: its caller sees to its being asked again.
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
        "parts",
        "perhaps_done",
        "rid",
        "sent",
        "session",
        "until",
    )

    def __init__(
        self,
        rid: int,
        message: Struct,
        future: asyncio.Future[Any],
        session: NativeSession | None = None,
    ) -> None:
        self.rid = rid
        self.message = message
        self.future = future
        self.session = session
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
