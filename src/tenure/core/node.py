"""State of a node: its sessions, and its semaphores with their queues of requests.

*The owners are the longest prefix of the queue whose counts fit in the limit; the rest wait.*

A queue is a linked list through the requests, in the order of their order ids: the owners first,
then, from `first_waiting` on, the waiters. Adding, removing anywhere and granting the next each
take constant time.

The commands that change a node are methods of `tenure.core.store.Store`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tenure.core import refusals, rules
from tenure.core.rates import Rates
from tenure.core.rules import fits
from tenure.model import Liveness, NodeConfig


class Node:
    """A namespace with its configuration."""

    __slots__ = ("config", "path", "rates", "semaphores", "sessions", "watches")

    def __init__(self, path: str, config: NodeConfig) -> None:
        self.path = path
        self.config = config
        self.rates = Rates()
        self.sessions: dict[int, StoredSession] = {}
        self.semaphores: dict[str, StoredSemaphore] = {}
        self.watches: dict[str, dict[StoredWatch, None]] = {}

    def check_room_for_session(self) -> None:
        """Raise `InvalidArgument` if the node has reached its limit of sessions."""
        if len(self.sessions) >= rules.SESSIONS_PER_NODE:
            raise refusals.node_full(self.path)

    def semaphore(self, name: str) -> StoredSemaphore:
        """Return the semaphore of that name, or raise `SemaphoreNotFound`."""
        found = self.semaphores.get(name)
        if found is None:
            rules.check_name(name, self.path)
            raise refusals.semaphore_not_found(self.path, name)
        return found

    def add_semaphore(
        self, name: str, limit: int, data: bytes, *, ephemeral: bool
    ) -> StoredSemaphore:
        """Add a semaphore, whose name is free."""
        if len(self.semaphores) >= rules.SEMAPHORES_PER_NODE:
            raise refusals.semaphores_full(self.path, name)
        self.semaphores[name] = added = StoredSemaphore(self, name, limit, data, ephemeral)
        return added


class StoredSession:
    """One session. `sink` belongs to its driver."""

    __slots__ = (
        "alive",
        "attach_number",
        "attached",
        "description",
        "due",
        "id",
        "key",
        "last_contact",
        "liveness",
        "node",
        "requests",
        "sink",
        "watches",
        "window",
    )

    def __init__(
        self,
        node: Node,
        number: int,
        description: str,
        window: float,
        liveness: Liveness,
        key: bytes,
        now: float,
    ) -> None:
        """Start attached, last contacted at `now`, with attach number 1 and no requests."""
        self.node = node
        self.id = number
        self.description = description
        self.window = window
        self.liveness = liveness
        self.key = key
        self.last_contact = now
        self.due = 0.0  # time of the next check for expiry
        self.attach_number = 1
        self.attached = True
        self.alive = True
        self.requests: dict[int, StoredRequest] = {}
        self.watches: dict[StoredWatch, None] = {}
        self.sink: Any = None

    def touch(self, now: float) -> bool:
        """Record a contact of the session; return false if it has ended."""
        if not self.alive:
            return False
        self.last_contact = max(self.last_contact, now)
        return True

    def drop_watches(self) -> None:
        """Stop all its watches."""
        for watch in list(self.watches):
            watch.stop()


class StoredWatch:
    """A session's watch of a semaphore's data, its owners, or both."""

    __slots__ = ("data", "name", "owners", "session", "sink")

    def __init__(
        self, session: StoredSession, name: str, data: bool, owners: bool, sink: Any
    ) -> None:
        """Watch the semaphore `name` for `session`."""
        self.session = session
        self.name = name
        self.data = data
        self.owners = owners
        self.sink = sink

    def stop(self) -> None:
        """Stop the watch. Safe to call twice."""
        if self in self.session.watches:
            del self.session.watches[self]
            watches = self.session.node.watches
            del watches[self.name][self]
            if not watches[self.name]:
                del watches[self.name]


class StoredRequest:
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
        semaphore: StoredSemaphore,
        session: StoredSession,
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
        self.previous: StoredRequest | None = None
        self.next: StoredRequest | None = None

    def leave(self) -> None:
        """Leave the queue and the session, without granting another request."""
        self.semaphore.remove(self)
        del self.session.requests[self.request_id]


class StoredSemaphore:
    """One semaphore and its queue.

    `held` is the sum of the owners' counts. It is above the limit after the limit was lowered,
    until enough is released. `whole` is true while the only owner holds the whole limit
    (`rules.fits`).
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
        self.first: StoredRequest | None = None
        self.first_waiting: StoredRequest | None = None
        self.last: StoredRequest | None = None

    def __iter__(self) -> Iterator[StoredRequest]:
        """Iterate over the queue in order: the owners, then the waiters."""
        request = self.first
        while request is not None:
            yield request
            request = request.next

    def waiters(self) -> Iterator[StoredRequest]:
        """Iterate over the waiters in order."""
        request = self.first_waiting
        while request is not None:
            yield request
            request = request.next

    def admits(self, count: int) -> bool:
        """Return true if a request of that count would be granted at once."""
        return self.first_waiting is None and fits(self.held, self.whole, count, self.limit)

    def begin(self, request: StoredRequest, now: float) -> None:
        """Add a request whose count is within the limit to an empty queue, and grant it."""
        self.first = self.last = request
        self.held = request.count
        self.whole = request.count == self.limit
        request.granted_at = now

    def append(self, request: StoredRequest) -> None:
        """Add a request at the end of a queue that is not empty, as a waiter."""
        last = self.last
        assert last is not None
        last.next = self.last = request
        request.previous = last
        if self.first_waiting is None:
            self.first_waiting = request
        self.waiting += 1

    def remove(self, request: StoredRequest) -> None:
        """Take a request out at any position, without granting another; see `grant_next`."""
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

    def resize(self, limit: int) -> list[StoredRequest]:
        """Change the limit, and return the waiters that can never be granted any more."""
        self.limit = limit
        first = self.first
        self.whole = first is not None and first.count == self.held == limit
        return [each for each in self if each.granted_at is None and each.count > limit]

    def grant_next(self, now: float) -> StoredRequest | None:
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
