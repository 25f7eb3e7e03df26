"""Frequent operations of sessions, sent in batches, and the highest order id seen."""

from __future__ import annotations

from typing import Any, TypeVar

from tenure.engines.contract import Prompt, Removal

__all__ = ["OWNS", "REMOVALS", "SENT", "WAITING", "Operation", "OrderIds"]

T = TypeVar("T")

SENT, WAITING, OWNS = range(3)
"""States of a request, as far as known here."""

REMOVALS = {"t": Removal.TIMED_OUT, "x": Removal.DELETED, "e": Removal.EVICTED}
"""Reasons of the store for removing requests, by the kinds of the events."""


class OrderIds:
    """Highest order id seen by this program. Later ones are higher, even after data loss."""

    __slots__ = ("highest",)

    def __init__(self) -> None:
        """Start with none seen."""
        self.highest = 0

    def saw(self, order_id: int) -> None:
        """Record an order id."""
        self.highest = max(self.highest, order_id)


class Operation(Prompt[T]):
    """A frequent operation of a session, part of a batch.

    Attributes:
        session: the session of the operation, in the type of its engine.
        words: the arguments for the store.
    """

    __slots__ = ("session", "words")

    session: Any
    words: tuple[Any, ...]

    def answered(self, reply: Any) -> None:
        """Handle its part of the reply."""
        raise NotImplementedError

    def settle(self, result: T) -> None:
        """Set the result, unless the caller has cancelled it."""
        if not self.done():
            self.set_result(result)

    def fail(self, error: Exception) -> None:
        """Set the error, unless the caller has cancelled it."""
        if not self.done():
            self.set_exception(error)

    def again(self) -> None:
        """Record that it was sent, may have been executed, and is sent again."""
