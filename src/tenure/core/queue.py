"""One semaphore: its limit, its data, and one ordered queue of requests, which decides ownership.

*The owners are the longest prefix of the queue whose counts fit in the limit; the rest wait.*

The queue is a linked list through the requests, in the order of their order ids: the owners first,
then, from `first_waiting` on, the waiters. Adding, removing anywhere and granting the next each
take a constant number of steps, however long the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tenure.core.rules import fits

if TYPE_CHECKING:
    from tenure.core.node import Node, Session

__all__ = ["Request", "Semaphore"]


class Request:
    """One request. `granted_at` is ``None`` while it waits; only a waiter has a `deadline`."""

    __slots__ = (
        "count",
        "data",
        "deadline",
        "granted_at",
        "joined_at",
        "next",
        "order_id",
        "previous",
        "request_id",
        "semaphore",
        "session",
    )

    def __init__(
        self,
        semaphore: Semaphore,
        session: Session,
        request_id: int,
        order_id: int,
        count: int,
        data: bytes,
        joined_at: float,
    ) -> None:
        self.semaphore = semaphore
        self.session = session
        self.request_id = request_id
        self.order_id = order_id
        self.count = count
        self.data = data
        self.joined_at = joined_at
        self.granted_at: float | None = None
        self.deadline: float | None = None
        self.previous: Request | None = None
        self.next: Request | None = None


class Semaphore:
    """One semaphore and its queue.

    `held` is the sum of the owners' counts. `whole` is true while the only owner holds the whole
    limit (`rules.fits`).
    """

    __slots__ = (
        "data",
        "ephemeral",
        "first",
        "first_waiting",
        "held",
        "last",
        "limit",
        "name",
        "node",
        "waiting",
        "whole",
    )

    def __init__(self, node: Node, name: str, limit: int, data: bytes, ephemeral: bool) -> None:
        self.node = node
        self.name = name
        self.limit = limit
        self.data = data
        self.ephemeral = ephemeral
        self.held = 0
        self.whole = False
        self.waiting = 0
        self.first: Request | None = None
        self.first_waiting: Request | None = None
        self.last: Request | None = None

    def __iter__(self) -> Iterator[Request]:
        request = self.first
        while request is not None:
            yield request
            request = request.next

    def admits(self, count: int) -> bool:
        """Return true if a request of that count would own at once."""
        return self.first_waiting is None and fits(self.held, self.whole, count, self.limit)

    def begin(self, request: Request, now: float) -> None:
        """Add a request whose count is within the limit to an empty queue: it owns at once."""
        self.first = self.last = request
        self.held = request.count
        self.whole = request.count == self.limit
        request.granted_at = now

    def append(self, request: Request) -> None:
        """Add a request at the end of a queue that is not empty, as a waiter."""
        last = self.last
        assert last is not None
        last.next = self.last = request
        request.previous = last
        if self.first_waiting is None:
            self.first_waiting = request
        self.waiting += 1

    def remove(self, request: Request) -> None:
        """Take a request out at any position. Grants no other request; see `grant_next`."""
        before, after = request.previous, request.next
        if before is None:
            self.first = after
        else:
            before.next = after
        if after is None:
            self.last = before
        else:
            after.previous = before
        if request is self.first_waiting:
            self.first_waiting = after
        request.previous = request.next = request.deadline = None
        if request.granted_at is None:
            self.waiting -= 1
        else:
            self.held -= request.count
            self.whole = False

    def grant_next(self, now: float) -> Request | None:
        """Make the first waiter an owner if it fits, and return it."""
        request = self.first_waiting
        if request is None or not fits(self.held, self.whole, request.count, self.limit):
            return None
        self.first_waiting = request.next
        self.waiting -= 1
        self.held += request.count
        self.whole = request.count == self.limit
        request.granted_at = now
        request.deadline = None
        return request
