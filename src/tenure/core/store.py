"""A complete store, the model as a state machine without a clock, and its deadlines.

A `Store` takes commands, each with the current time, and changes its state in place. It appends
notifications to `effects`: tuples that begin with the session to notify. The caller sends them and
clears the list.

Rules that hold between two commands:

* In every queue the owners are the longest prefix that fits, or a longer one that fitted before the
  limit was lowered: each command that removes or shrinks a request, or raises the limit, grants the
  waiters that then fit, and no command takes anything from an owner.
* No waiter has a count above the limit.
* When a session ends, all its requests are removed before any request is granted, so none of its
  own waiters is granted.
* A command produces at most one effect for each watch.
* `next_deadline` is never later than the first expiry or timeout.

**Deadlines** are the expiry of its sessions and the timeouts of its waiters. Outdated entries stay
in the heap until they reach the top, or until half of the heap may be outdated.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from tenure.core import refusals, rules
from tenure.core.node import Node, StoredRequest, StoredSemaphore, StoredSession, StoredWatch
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, UNCHANGED, Liveness, NodeConfig, Unchanged


class Deadlines:
    """A heap of deadlines, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, StoredSession | StoredRequest]] = []
        self._pushed = 0
        self._compact_at = 1000

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
        return len(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline, which may be outdated; ``None``: no deadline is set."""
        return self._heap[0][0] if self._heap else None

    def add(self, when: float, entry: StoredSession | StoredRequest) -> None:
        """Check a session or a waiter at that time."""
        if len(self._heap) >= self._compact_at:
            self._heap = [each for each in self._heap if _is_right(each)]
            heapify(self._heap)
            self._compact_at = max(1000, 2 * len(self._heap))
        if not isinstance(entry, StoredRequest):
            entry.due = when
        self._pushed += 1
        heappush(self._heap, (when, self._pushed, entry))

    def set_timeout(self, request: StoredRequest, deadline: float | None) -> None:
        """Set, replace or clear (`None`) the deadline of a waiter."""
        request.deadline = deadline
        if deadline is not None:
            self.add(deadline, request)

    def take(self, instant: float) -> Iterator[StoredSession | StoredRequest]:
        """Remove the entries of the earliest deadline, and yield those that are still valid."""
        while self._heap and self._heap[0][0] == instant:
            entry = heappop(self._heap)
            if _is_right(entry):
                yield entry[2]


def _is_right(entry: tuple[float, int, StoredSession | StoredRequest]) -> bool:
    """Return true if the entry has the current deadline of its session or request."""
    when, _, what = entry
    if isinstance(what, StoredRequest):
        return what.deadline == when
    return what.alive and what.due == when


GRANTED, TIMED_OUT, DELETED, EVICTED, CHANGED, ENDED, RESIZED = range(7)
"""Kinds of effects: (session, GRANTED, request), (session, TIMED_OUT | DELETED | EVICTED, request),
(session, CHANGED, watch), (session, ENDED, reason), (session, RESIZED, (request, limit))."""

Effect = tuple[Any, ...]


class Store:
    """All nodes of a store, its numbers, and its deadlines."""

    def __init__(self) -> None:
        """Start with the node ``/default`` and nothing on it."""
        self.nodes = {DEFAULT_NODE: Node(DEFAULT_NODE, NodeConfig())}
        self.effects: list[Effect] = []
        self.last_order_id = 0
        self.last_session_id = 0
        self._deadlines = Deadlines()

    def node(self, path: str) -> Node:
        """Return the node of that path, or raise `NodeNotFound`."""
        node = self.nodes.get(path)
        if node is None:
            raise refusals.node_not_found(path)
        return node

    def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Add a node; if it exists, keep it if `exist_ok`, else raise."""
        rules.check_path(path)
        if path not in self.nodes:
            self.nodes[path] = Node(path, config)
        elif not exist_ok:
            raise refusals.node_exists(path)

    def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node that are set in `config`."""
        node = self.node(path)
        node.config = rules.merge_config(node.config, config)

    def drop_node(self, path: str, *, force: bool) -> None:
        """Remove a node and expire its sessions; attached sessions only if `force`."""
        rules.check_path(path)
        rules.check_droppable(path)
        node = self.node(path)
        attached = sum(session.attached for session in node.sessions.values())
        if attached and not force:
            raise refusals.node_busy(path, attached)
        for session in list(node.sessions.values()):
            self._remove_session(session, f"the node {path} was dropped")
        del self.nodes[path]

    def attach(
        self,
        path: str,
        description: str,
        window: float,
        liveness: Liveness,
        key: bytes,
        now: float,
        number: int | None = None,
    ) -> StoredSession:
        """Attach a new session, or with `number` one whose state is in another store."""
        rules.check_path(path)
        rules.check_window(window, path)
        rules.check_description(description, path)
        rules.check_key(key, path)
        node = self.node(path)
        node.check_room_for_session()
        if number is None:
            number = self.last_session_id = self.last_session_id + 1
        session = StoredSession(node, number, description, window, liveness, key, now)
        node.sessions[session.id] = session
        self._deadlines.add(now + window, session)
        return session

    def take_over(self, path: str, number: int, key: bytes) -> StoredSession:
        """Attach a session for another program, from which no contact counts yet.

        Raises:
            NodeNotFound, SessionExpired, AuthenticationFailed, InvalidArgument
        """
        rules.check_path(path)
        session = self.node(path).sessions.get(number)
        if session is None:
            raise rules.not_there_to_resume(path, number)
        rules.check_resumable(session.liveness, session.key, key, path, number)
        session.drop_watches()
        session.attached = True
        session.attach_number += 1
        return session

    def adopt(self, session: StoredSession, window: float, description: str) -> None:
        """Set the window and the description of a session that was taken over."""
        rules.check_window(window, session.node.path)
        session.window, session.description = window, description
        until = session.last_contact + window
        if until < session.due:  # else it is checked earlier, and then postponed
            self._deadlines.add(until, session)

    def detach(self, session: StoredSession, now: float) -> None:
        """Detach a session: its watches end, and it survives for its recovery window."""
        if session.touch(now):
            session.attached = False
            session.drop_watches()

    def close(self, session: StoredSession, now: float, why: str | None = None) -> None:
        """End a session. With `why`, notify the session of its end with that reason."""
        if session.alive:
            self._advance(self._remove_session(session, why), now)

    def create(self, node: Node, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore, or accept one of the same limit if `exist_ok`."""
        rules.check_name(name, node.path)
        rules.check_limit(limit, node.path, name)
        rules.check_data(data, node.path, name)
        found = node.semaphores.get(name)
        if found is None:
            node.add_semaphore(name, limit, data, ephemeral=False)
            self._changed(node, name, data=True, owners=True)
            return
        rules.check_kind(False, found.ephemeral, node.path, name)
        if not exist_ok or found.limit != limit:
            raise refusals.semaphore_exists(node.path, name, found.limit)

    def update(self, node: Node, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        rules.check_data(data, node.path, name)
        found = node.semaphore(name)
        if found.data != data:
            found.data = data
            self._changed(node, name, data=True, owners=False)

    def resize(self, node: Node, name: str, limit: int, now: float) -> None:
        """Change the limit of a semaphore.

        A waiter whose count is above it leaves the queue, where it would block those behind it.
        """
        rules.check_new_limit(limit, node.path, name)
        found = node.semaphore(name)
        rules.check_resizable(found.limit, node.path, name, ephemeral=found.ephemeral)
        if found.limit == limit:
            return
        for request in found.resize(limit):
            request.leave()
            self.effects.append((request.session, RESIZED, (request, limit)))
        self._changed(node, name, data=True, owners=self._grant(found, now))

    def delete(self, node: Node, name: str, *, force: bool) -> None:
        """Delete a semaphore; if it has requests, remove them if `force`, else raise."""
        found = node.semaphore(name)
        if found.first is not None and not force:
            raise refusals.semaphore_busy(node.path, name)
        for request in list(found):
            request.leave()
            self.effects.append((request.session, DELETED, request))
        del node.semaphores[name]
        self._changed(node, name, data=True, owners=True)

    def enqueue(
        self,
        session: StoredSession,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
        now: float,
        order_id: int,
    ) -> StoredRequest | None:
        """Add a request; return ``None`` if `timeout` is 0 and it cannot be granted at once.

        `order_id` comes from `rules.next_order_id`; it is used only when the request joins.
        """
        node = session.node
        if not session.alive:
            raise refusals.session_over(node.path)
        if timeout is not None:
            rules.check_timeout(timeout, node.path, name)
        if data != b"":
            rules.check_data(data, node.path, name)
        found = node.semaphores.get(name)
        appears = found is None
        if found is None:
            if not ephemeral:
                node.semaphore(name)
            rules.check_name(name, node.path)
            rules.check_count(count, EPHEMERAL_LIMIT, node.path, name)
            found = node.add_semaphore(name, EPHEMERAL_LIMIT, b"", ephemeral=True)
        else:
            rules.check_kind(ephemeral, found.ephemeral, node.path, name)
            rules.check_count(count, found.limit, node.path, name)
        if timeout == 0 and not found.admits(count):
            return None
        self.last_order_id = order_id
        request = StoredRequest(found, session, request_id, order_id, count, data, now)
        session.requests[request_id] = request
        if found.first is None:
            found.begin(request, now)
        else:
            found.append(request)
            if found.first_waiting is not request or found.grant_next(now) is None:
                if timeout is not None:
                    self._deadlines.set_timeout(request, now + timeout)
                return request
        if node.watches:
            self._changed(node, name, data=appears, owners=True)
        return request

    def alter(
        self,
        session: StoredSession,
        request_id: int,
        count: int | None,
        data: bytes | None,
        now: float,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> None:
        """Change a request in place; a new timeout applies only if the request still waits."""
        request = session.requests.get(request_id)
        node = session.node
        if request is None:
            raise refusals.request_over(node.path)
        semaphore = request.semaphore
        if data is not None:
            rules.check_data(data, node.path, semaphore.name)
        if count is not None:
            rules.check_shrink(count, request.count, semaphore.limit, node.path, semaphore.name)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, node.path, semaphore.name)
        owns = request.granted_at is not None
        changed = False
        if data is not None and data != request.data:
            request.data = data
            changed = owns
        if count is not None and count != request.count:
            if owns:
                semaphore.held -= request.count - count
                semaphore.whole = False
                changed = True
            request.count = count
            changed = self._grant(semaphore, now) or changed
        if changed:
            self._changed(node, semaphore.name, data=False, owners=True)
        if timeout is not UNCHANGED and request.granted_at is None:
            if timeout == 0:
                self._withdraw(request, now)
            else:
                self._deadlines.set_timeout(request, None if timeout is None else now + timeout)

    def withdraw(self, session: StoredSession, request_id: int, now: float) -> bool:
        """Withdraw or release a request; return false if it was in no queue."""
        request = session.requests.get(request_id)
        if request is None:
            return False
        semaphore = request.semaphore
        semaphore.remove(request)
        del session.requests[request_id]
        node = semaphore.node
        if semaphore.first is not None or node.watches:
            self._advance({request.semaphore: request.granted_at is not None}, now)
        elif semaphore.ephemeral:  # as `_advance` would do; there is no watch to notify
            del node.semaphores[semaphore.name]
        return True

    def evict(self, node: Node, name: str, order_id: int, now: float) -> bool:
        """Remove one request from its queue; return whether it was there."""
        for request in node.semaphore(name):
            if request.order_id == order_id:
                request.leave()
                self.effects.append((request.session, EVICTED, request))
                self._advance({request.semaphore: request.granted_at is not None}, now)
                return True
        return False

    def watch(
        self, session: StoredSession, name: str, *, data: bool, owners: bool, sink: Any
    ) -> StoredWatch:
        """Watch the data or the owners of a name, which need not exist yet."""
        rules.check_name(name, session.node.path)
        watch = StoredWatch(session, name, data, owners, sink)
        session.watches[watch] = None
        session.node.watches.setdefault(name, {})[watch] = None
        return watch

    def next_deadline(self) -> float | None:
        """Return the latest time for the next call of `expire`; ``None``: no deadline is set."""
        return self._deadlines.next()

    def expire(self, now: float) -> None:
        """Expire everything that is due, earliest first; entries due together end together."""
        while (instant := self._deadlines.next()) is not None and instant <= now:
            affected: dict[StoredSemaphore, bool] = {}
            late: list[StoredRequest] = []
            for entry in self._deadlines.take(instant):
                if isinstance(entry, StoredRequest):
                    late.append(entry)
                elif (until := entry.last_contact + entry.window) > now:
                    self._deadlines.add(until, entry)
                else:
                    why = f"it was silent for its recovery window of {entry.window:g} s"
                    affected |= self._remove_session(entry, why)
            self._advance(affected, instant)
            for request in late:
                if request.deadline is not None:  # neither granted nor removed since
                    self._withdraw(request, instant)

    # Parts of the commands

    def _withdraw(self, request: StoredRequest, now: float) -> None:
        """Remove a waiter whose timeout has passed."""
        request.leave()
        self.effects.append((request.session, TIMED_OUT, request))
        self._advance({request.semaphore: request.granted_at is not None}, now)

    def _advance(self, affected: dict[StoredSemaphore, bool], now: float) -> None:
        """Grant what fits after removals; a value is true if an owner was removed."""
        for semaphore, owners_left in affected.items():
            node = semaphore.node
            changed = self._grant(semaphore, now) or owners_left
            if semaphore.ephemeral and semaphore.first is None:
                del node.semaphores[semaphore.name]
                if node.watches:
                    self._changed(node, semaphore.name, data=True, owners=True)
            elif changed and node.watches:
                self._changed(node, semaphore.name, data=False, owners=True)

    def _grant(self, semaphore: StoredSemaphore, now: float) -> bool:
        granted = False
        while (request := semaphore.grant_next(now)) is not None:
            granted = True
            self.effects.append((request.session, GRANTED, request))
        return granted

    def _remove_session(
        self, session: StoredSession, why: str | None
    ) -> dict[StoredSemaphore, bool]:
        """Remove a session and its requests; return the argument for `_advance`."""
        affected: dict[StoredSemaphore, bool] = {}
        for request in list(session.requests.values()):
            request.leave()
            owned = request.granted_at is not None
            affected[request.semaphore] = affected.get(request.semaphore, False) or owned
        session.drop_watches()
        session.alive = session.attached = False
        del session.node.sessions[session.id]
        if why is not None:
            self.effects.append((session, ENDED, why))
        return affected

    def _changed(self, node: Node, name: str, *, data: bool, owners: bool) -> None:
        for watch in node.watches.get(name, ()):
            if (data and watch.data) or (owners and watch.owners):
                self.effects.append((watch.session, CHANGED, watch))
