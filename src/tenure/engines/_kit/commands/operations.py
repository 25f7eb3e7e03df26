"""Frequent operations of sessions, sent in batches, and the highest order id seen."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from tenure.engines._kit.commands.values import WHOLE, count_text, microseconds
from tenure.engines.contract import Enqueued, Place, Prompt, Removal, Withdrawn
from tenure.model import EPHEMERAL_LIMIT

T = TypeVar("T")

SENT, WAITING, HANDED, OWNS = range(4)
"""States of a request, as far as known here.

A request of which the session owns the mutex already, through the request ahead, is `HANDED`: it is
granted here, and waits in the store until the release ahead has arrived there.
"""

REMOVALS = {"t": Removal.TIMED_OUT, "x": Removal.DELETED, "e": Removal.EVICTED}
"""Reasons of the store for removing requests, by the kinds of the events."""


_init = asyncio.Future.__init__
"""Constructor of operations, called directly because it is on the hot path."""

_LEFT = Withdrawn.LEFT
_REFUSED = Enqueued(Place.REFUSED, None)
_NOT_THERE = -1
"""Answer to the withdrawal of a request that was in no queue."""


class OrderIds:
    """Highest order id seen by this program. Later ones are higher, even after data loss."""

    __slots__ = ("highest",)

    def __init__(self) -> None:
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


class EnqueueOperation(Operation[Enqueued]):
    """Operation that adds a request to a queue.

    Attributes:
        exclusive: it takes all tokens of an ephemeral semaphore.
        deadline: the time of its timeout by the loop's clock, if it has one.
    """

    __slots__ = ("count", "deadline", "exclusive", "name", "request_id")

    def __init__(
        self,
        session: Any,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> None:
        _init(self, loop=session.loop)
        self.listeners = ()
        self.session = session
        self.request_id = request_id
        self.name = name
        self.count = count
        self.exclusive = count == EPHEMERAL_LIMIT and ephemeral
        self.deadline = None if timeout is None else session.loop.time() + timeout
        if self.exclusive and timeout is None and not data:
            self.words = ("m", request_id, name)
        else:
            flags = (microseconds(timeout), "1" if ephemeral else "0")
            self.words = ("e", request_id, name, count_text(count), data, *flags)

    @property
    def is_new(self) -> bool:
        """True unless the store may have carried it out."""
        kind: str = self.words[0]
        return kind != "E"

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self.session.placed(self, reply)

    def again(self) -> None:
        """Make the store look up an earlier sending first."""
        if self.words[0] == "m":
            self.words = ("E", *self.words[1:], WHOLE, b"", "", "1")
        else:
            self.words = ("E", *self.words[1:])


class WithdrawOperation(Operation[Withdrawn]):
    """Operation that takes a request out of its queue.

    Attributes:
        name: the name of the semaphore; empty if unknown here.
        may_have_run: whether it was sent before, without an answer.
        retried: whether the session retries it after a failure, because no caller waits for it.
    """

    __slots__ = ("may_have_run", "name", "request_id", "retried")

    def __init__(self, session: Any, request_id: int, name: str, *, retried: bool = False) -> None:
        _init(self, loop=session.loop)
        self.listeners = ()
        self.session = session
        self.request_id = request_id
        self.name = name
        self.words = ("w", request_id)
        self.may_have_run = False
        self.retried = retried

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        if reply == 0:
            self.session.confirmed(self.request_id)
            self.settle(_LEFT)
        elif reply == _NOT_THERE:
            self.session.confirmed(self.request_id)
            self.settle(_LEFT if self.may_have_run else Withdrawn.MISSING)
        else:
            self.session.not_withdrawn(self, reply)

    def leave_unsent(self, request: EnqueueOperation) -> None:
        """Answer this and the request, of which neither is sent."""
        self.session.loop.call_soon(request.settle, _REFUSED)
        self.answered(0)

    def again(self) -> None:
        """Record that a request that is missing now may have existed before."""
        self.may_have_run = True
