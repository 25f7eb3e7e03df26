"""An unanswered message of the client."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from msgspec import Struct

from tenure.wire import messages as wire


class ConnectionGone(Exception):
    """Error: the connection was lost before the answer arrived. It never leaves this engine."""


class CallOwner(Protocol):
    """Operation queue of a session, as seen by its calls."""

    def placed(self, call: NativeCall, answer: wire.Placed) -> None:
        """Handle the answer to an `Enqueue`."""

    def answered(self, call: NativeCall) -> None:
        """Record that a call was answered."""

    def failed(self, call: NativeCall) -> None:
        """Record that a call has failed."""


class NativeCall:
    """A message that expects an answer, and the future of the answer.

    Attributes:
        rid: the number of the message.
        future: the future of the answer; a caller that stops waiting cancels it.
        owner: the operation queue of its session; ``None``: its caller sends it again.
        number: the number of an operation among those of its session.
        until: the end of an `Enqueue`'s timeout.
        parts: received parts of an answer in several parts.
        sent: whether it was sent, over this connection or an earlier one.
        may_have_run: whether a server that has lost the session may have carried it out.
        interrupted: whether it was sent over a connection that was lost before the answer.
    """

    __slots__ = (
        "future",
        "interrupted",
        "may_have_run",
        "message",
        "number",
        "owner",
        "parts",
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
        self.rid = rid
        self.message = message
        self.future = future
        self.owner = owner
        self.number = 0
        self.until: float | None = None
        self.parts: list[Any] = []
        self.sent = self.may_have_run = self.interrupted = False

    def succeed(self, result: object) -> None:
        """Set the answer, unless the caller has cancelled it."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set the error. No warning is logged if the caller does not retrieve it."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()
