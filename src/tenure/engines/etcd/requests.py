"""The requests of one session: joining queues, waiting in them, and leaving them.

A request is joining (its transaction is pending), waiting, an owner, or gone. `request` builds the
transactions.

Rules for joining and leaving (`EtcdRequests`):

* **One transaction joins.** If the queue is empty, the request is put and is an owner; nothing is
  read. Otherwise a nested transaction puts it and reads the queue before it. A request with timeout
  0 is put only if no request is newer than the queue in which there was room.
* The known kind of a semaphore is compared, and the revision of its limit. Both are read only if
  they have changed, or do not match the request.
* A request is in the table until it is withdrawn, removed, or timed out. Then it is in `_leaving`
  until etcd has confirmed that. If etcd rejects the withdrawal, it is repeated by the next call or
  after a pause.
* A timer of its own program removes an overdue waiter. If that program has lost contact, a program
  that waits behind it does so (`tenure.engines.etcd.cluster.LateWaiters`).
* The transaction that removes an owner also reads the first request if a request of the same
  session follows. If that is the follower, it is an owner. Any other follower in this engine reads
  the queue.
* If an owner of the whole limit leaves just after another request of the session joins behind it,
  one transaction does both: a handover is one commit even if all join again.

Rules for waiting (`Waiting`):

* **Ownership is the prefix rule** over the queue in the order of the create revisions, as this
  session read it at a revision of a majority, under its own attachment.
* **A waiter is woken by the request before it.** A request for the whole limit waits for its
  predecessor to leave. Other requests wait for their predecessor to leave, to shrink, or to be
  marked as an owner; the first waiter watches the owners. An owner that had to wait, and that
  leaves room for others, marks itself to wake the next waiter. If it dies before that, the next
  waiter notices when it reads the queue, every few seconds.
* A waiter whose predecessor is in this engine is notified directly (`Waiting.gone`).
* The waiters of a lasting semaphore also watch its limit, with one watch for each name, and read
  the queue when it has changed. One that is too large for a lower limit leaves the queue, if the
  session that has changed it has not removed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tenure.background import Failures
from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Enqueued,
    Place,
    Removal,
    Withdrawn,
)
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import KeyValue, Lost, Refused, WatchEvent
from tenure.engines.etcd.attachment import EtcdAttachment, WrittenAttachment
from tenure.engines.etcd.cluster import EtcdCluster
from tenure.engines.etcd.keys import (
    DELETED,
    EVICTED,
    TIMED_OUT,
    Entry,
    Limit,
    entries,
    has_room,
    limit_of,
    number_owning,
    resized,
)
from tenure.engines.etcd.request import EtcdRequest
from tenure.engines.etcd.watching import EtcdWatch
from tenure.errors import SessionExpired, TenureError
from tenure.model import EPHEMERAL_LIMIT

_log = logging.getLogger("tenure")

_POLL, _POLL_BY_PLACE = 2.5, 0.02
"""Seconds between two reads of a waiter behind others: the minimum, and the time per request before
it."""

_MISSED = 0.1
"""Seconds until the first read of a waiter far from the head, if its watch began late."""


class Waiting:
    """The waiting requests of one session.

    Args:
        taken_out: called with the number of a request that another client removed, and the reason.
    """

    def __init__(self, session: EtcdAttachment, taken_out: Callable[[int, bytes], None]) -> None:
        self._session = session
        self._engine = session.engine
        self._taken_out = taken_out
        self._limits: dict[bytes, tuple[EtcdWatch, set[EtcdRequest]]] = {}  # watched, by key
        self._failures = Failures("reading a queue", _log)

    def place(self, request: EtcdRequest, queue: Sequence[Entry], revision: int) -> None:
        """Conclude from a queue, as of a revision, whether a request is an owner.

        For a request for the whole limit, only its predecessor matters.
        """
        before = [each for each in queue if each.created < request.created]
        limit = request.limit
        is_owner = request.created <= limit.owned
        if request.whole:
            owning = 0
        else:
            mine = [each for each in queue if each.created == request.created]
            owning = number_owning([*before, *mine], request.limit)
        fits = request.count <= limit.tokens and (not before or owning > len(before))
        if is_owner or fits:
            request.owns = True
            self.stop(request)
            return
        if request.gone:
            return
        if request.count > limit.tokens:
            self._engine.spawn(self._leave_as_too_large(request, limit))
            return
        self._time_late(request, before)
        if not request.ephemeral:
            self._watch_limit(request, revision)
        ahead = self._engine.local.get(before[-1].key)
        if ahead is not None and request.whole:
            self.unwatch(request)
            if request not in ahead.followers:
                ahead.followers.append(request)
            return
        if owning == len(before) > 1:  # the first waiter
            watched = frozenset(each.key for each in before)
        else:
            watched = frozenset([before[-1].key])
            if owning < len(before) and not request.whole and not request.poll:
                self._poll(request, max(_POLL, _POLL_BY_PLACE * len(before)))
        self._watch(request, watched, revision)

    def _time_late(self, request: EtcdRequest, before: Sequence[Entry]) -> None:
        """Set the timer that removes overdue waiters before a request."""
        due = self._engine.late.next_due(before)
        if due is not None and request.late is None:
            pause = due - self._engine.clock.now()
            # An overdue request may be an owner already: its value shows that only after the next
            # put.
            pause = pause if pause > 0 else _POLL
            request.late = self._engine.loop.call_later(pause, self._remove_overdue, request)

    def _remove_overdue(self, request: EtcdRequest) -> None:
        request.late = None
        if not (request.decided or self._session.over):
            self._engine.spawn(self._take_out_and_read(request))

    async def _take_out_and_read(self, request: EtcdRequest) -> None:
        try:
            await self._engine.late.take_out(request.name)
        except (TenureError, Lost, Refused) as error:
            _log.warning(
                "could not remove overdue waiters: node=%s name=%r error=%s",
                *(request.name.path, request.name.name, error),
            )
        except Exception as error:
            self._failures.report(error)
        self.read_soon(request)

    def _watch(self, request: EtcdRequest, watched: frozenset[bytes], revision: int) -> None:
        if request.watch is not None and request.watched == watched:
            return
        self.unwatch(request)
        request.watched = watched
        prefix = request.name.requests
        key, end = (*watched, b"") if len(watched) == 1 else (prefix, wire.after(prefix))
        happened, missed = partial(self._happened, request), partial(self._missed, request)
        request.watch = self._engine.watching.add(
            *(key, end, revision + 1, happened, missed),
            puts=not request.whole,
            at_once=True,
            once=not end,
        )

    def _watch_limit(self, request: EtcdRequest, revision: int) -> None:
        key = request.name.limit
        if key not in self._limits:
            changed = partial(self._limit_changed, key)
            watch = self._engine.watching.add(key, b"", revision + 1, lambda _: changed(), changed)
            self._limits[key] = (watch, set())
        self._limits[key][1].add(request)

    def _unwatch_limit(self, request: EtcdRequest) -> None:
        key = request.name.limit
        if key in self._limits:
            watch, waiting = self._limits[key]
            waiting.discard(request)
            if not waiting:
                self._engine.watching.remove(watch)
                del self._limits[key]

    def _limit_changed(self, key: bytes) -> None:
        if key in self._limits:
            for request in sorted(self._limits[key][1], key=lambda each: each.created):
                self.read_soon(request)

    async def _leave_as_too_large(self, request: EtcdRequest, limit: Limit) -> None:
        """Leave the queue, unless the limit was changed again."""
        try:
            answer, again = await self._session.transact(
                partial(request.leaving_too_large, self._session)
            )
        except (TenureError, Refused) as error:
            _log.debug("could not leave the queue: node=%s error=%s", request.name.path, error)
            return
        if (answer.ok or again) and not request.decided:
            self._taken_out(request.request_id, resized(limit.tokens))
        else:
            self.read_soon(request)

    def _missed(self, request: EtcdRequest) -> None:
        """Read the queue after an interruption before the watch began."""
        if request.near:
            self.read_soon(request)
        elif request.poll is None:  # so far behind, most probably nothing has changed
            self._poll(request, _MISSED)

    def _happened(self, request: EtcdRequest, events: Sequence[WatchEvent]) -> None:
        if any(event.kv.key in request.watched for event in events):
            self.read_soon(request)

    def read_soon(self, request: EtcdRequest) -> None:
        """Read the queue; if it is being read, read it again."""
        if request.reading:
            request.read_again = True
        elif not (request.decided or self._session.over or not request.created):
            request.reading = True
            self._engine.spawn(self._read_until_current(request))

    async def _read_until_current(self, request: EtcdRequest) -> None:
        try:
            request.read_again = True
            while request.read_again and not request.decided:
                request.read_again = False
                await self.read(request, report=True)
        except Exception as error:
            if not isinstance(error, TenureError | Refused):
                self._failures.report(error)
            elif not self._session.over:
                _log.warning(
                    "could not read the queue, retrying: node=%s name=%r error=%s",
                    *(request.name.path, request.name.name, error),
                )
            if not self._session.over:
                self._poll(request, _POLL)
        finally:
            request.reading = False

    def _poll(self, request: EtcdRequest, delay: float) -> None:
        request.poll = self._engine.loop.call_later(delay, self.read_soon, request)

    async def read(self, request: EtcdRequest, *, report: bool) -> None:
        """Read the queue before a request, and process it; report a grant or a removal, too."""
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None
        build = partial(request.reading_before, self._session)
        answer, _ = await self._session.transact(build)
        settled = request.decided if report else request.owns
        if settled:
            return
        if answer.ok and not request.ephemeral:
            whole, limit = request.whole, limit_of(answer.parts[1].first)
            if limit != request.limit:
                request.limit = limit
                self.unwatch(request)  # it watched with the former limit
                if whole and not request.whole:  # its predecessor is not enough
                    await self.read(request, report=report)
                    return
        if answer.ok:
            self.place(request, entries(answer.parts[0].found), answer.revision)
            if request.owns and report:
                self.granted(request)
        elif report:
            left = answer.parts[1].first
            self._taken_out(request.request_id, EVICTED if left is None else left.value)

    def granted(self, request: EtcdRequest) -> None:
        """Report that a request is an owner."""
        self._session.events.granted(request.request_id, self._session.order_id(request))
        if not request.whole:
            answer = self._session.operations.take(request.name.name, lambda: self._mark(request))
            answer.add_done_callback(log_failure)

    async def _mark(self, request: EtcdRequest) -> None:
        """Wake the next waiter."""
        if not request.gone:
            request.marked = True
            count = request.count
            build = partial(request.changing, self._session, count, None)
            await self._session.transact(build)

    def unwatch(self, request: EtcdRequest) -> None:
        """End the watch and the poll of a request."""
        if request.watch is not None:
            self._engine.watching.remove(request.watch)
            request.watch = None
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None

    def stop(self, request: EtcdRequest) -> None:
        """End the watch and the timers of a request that no longer waits."""
        self.unwatch(request)
        if not request.ephemeral:
            self._unwatch_limit(request)
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if request.late is not None:
            request.late.cancel()
            request.late = None

    def gone(self, request: EtcdRequest) -> None:
        """Forget a request that left its queue, or whose session has ended; its followers read."""
        request.gone = True
        self._engine.local.pop(request.key, None)
        followers, request.followers = request.followers, []
        for follower in followers:
            follower.waiting.read_soon(follower)


def log_failure(answer: asyncio.Future[Any]) -> None:
    """Log the failure of an operation without a caller."""
    if not answer.cancelled() and answer.exception() is not None:
        _log.debug("an operation failed in the background: error=%s", answer.exception())


_LAPSED = b"lapsed"
_REMOVALS = {
    EVICTED: Removal.EVICTED,
    DELETED: Removal.DELETED,
    TIMED_OUT: Removal.TIMED_OUT,
    _LAPSED: Removal.LAPSED,
}


def _removal(why: bytes) -> Removal:
    word, _, limit = why.partition(b" ")
    return (
        Removal.resized(int(limit)) if word == b"resized" else _REMOVALS.get(why, Removal.EVICTED)
    )


_CHUNK = 100
"""Reads in one transaction; etcd accepts 128 operations."""

_REFUSED = Enqueued(Place.REFUSED, None)

_AGAIN = 2.0
"""Seconds until a rejected withdrawal is repeated."""

_NEAR = 2
"""Length of a queue up to which a new request is near the head, and reads it without delay."""

_ANY_REQUEST, _LAST_REQUEST = b"\xfftenure: a hold\xff", 2**64 - 1
"""Placeholder for the number of a request in a prepared transaction, and its largest value."""
_MOST_PREPARED = 4096


class EtcdRequests(EtcdAttachment):
    """An attachment with its requests.

    Attributes:
        requests: the requests that have not left their queues, by number.
    """

    def __init__(self, engine: EtcdCluster, attached: WrittenAttachment) -> None:
        super().__init__(engine, attached)
        self.requests: dict[int, EtcdRequest] = {}
        self._leaving: dict[int, asyncio.Future[Withdrawn]] = {}
        self._left_in: dict[int, EtcdRequest] = {}  # withdrawals that etcd rejected
        self._waiting = Waiting(self, self.taken_out)
        self._prepared: dict[tuple[object, ...], bytes] = {}
        self._prepared_for = 0
        self._looking = False

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        """Add a request at the end of a queue."""
        if self.over or self.closing:
            self.check_open()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        if data != b"":
            rules.check_data(data, self.path, name)
        known = self.engine.names.get((self.path, name)) if isinstance(name, str) else None
        keys = known or self.name(name)
        key = b"%s%016x-%016x" % (keys.requests, self.id, request_id)
        request = EtcdRequest(
            *(self._waiting, request_id, keys, key, count, data, ephemeral, timeout)
        )
        self.requests[request_id] = request
        return self.operations.take(name, lambda: self._enqueue(request, timeout), joining=request)

    async def _enqueue(self, request: EtcdRequest, timeout: float | None) -> Enqueued:
        leaving = self.operations.leaves_next(request.name.name)
        placed: EtcdRequest | None = None
        try:
            if leaving is not None and timeout != 0 and request.may_relieve(leaving):
                relieved, head = await self._relieve(request, leaving)
                if relieved:
                    placed = request
                    self._is_out(leaving, head, joined=request)
            if placed is None:
                placed = await self._join(request, timeout == 0)
        except BaseException:
            if self.requests.pop(request.request_id, None) is not None and request.created:
                self._leave(request).add_done_callback(
                    log_failure
                )  # there is no caller to withdraw it
            raise
        if placed is None:
            self.requests.pop(request.request_id, None)
            return _REFUSED
        if not request.owns and timeout is not None:
            self._set_timer(request, timeout)
        if request.early is not None:
            self.taken_out(request.request_id, request.early)
        return Enqueued(Place.GRANTED if request.owns else Place.WAITING, self.order_id(request))

    async def _join(self, request: EtcdRequest, at_once: bool) -> EtcdRequest | None:
        """Put a request into its queue; return ``None`` if its timeout is 0 and it cannot own."""
        newest = 0
        while True:
            condition = await self._condition(request)
            answer, _ = await self.transact(
                partial(request.joining, self, condition, at_once, newest)
                if newest or request.data or request.request_id > _LAST_REQUEST
                else partial(self._joining_as_before, request, condition, at_once),
                joining=request,
            )
            large = not at_once and bool(request.data) and request.large
            if answer.ok and not large:
                request.owns = True
                return self.joined(request, answer.revision)
            found = answer.parts[1:]
            if not at_once:
                inner = answer if large else found[0]
                if inner.ok:
                    there = inner.parts[-1]
                    request.near = there.count <= _NEAR
                    self.joined(request, answer.revision)
                    self._waiting.place(request, entries(there.found), answer.revision)
                    return request
                found = found if large else inner.parts
            limit, own, queue = found[0].first, found[1].first, entries(found[2].found)
            if own is not None:  # an attempt whose answer was lost
                self.joined(request, own.created)
                if at_once:
                    request.owns = True
                else:
                    await self._waiting.read(request, report=False)
                return request
            if not request.check_condition(limit, queue) or not at_once:
                continue
            if request.whole or not has_room(queue, request.count, request.limit):
                if await self._removed_overdue(request, queue):
                    continue
                return None
            newest = answer.revision + 1

    async def _removed_overdue(self, request: EtcdRequest, queue: Sequence[Entry]) -> bool:
        """Remove overdue waiters before a request; return true if there were any."""
        late = self.engine.late
        due = late.next_due(queue)
        if due is None or due > self.engine.clock.now():
            return False
        return await late.take_out_or_later(request.name)

    async def _relieve(
        self, request: EtcdRequest, leaving: EtcdRequest
    ) -> tuple[bool, KeyValue | None]:
        """Put a request into its queue behind an owner of the whole limit, and remove that owner.

        Returns:
            Whether both were done, and the first request after that, if known.
        """
        answer, _ = await self.transact(partial(request.relieving, self, leaving), joining=request)
        if answer.ok:
            there = answer.parts[-4]
            request.near = there.count <= _NEAR
            self.joined(request, answer.revision)
            self._waiting.place(request, entries(there.found), answer.revision)
            return True, answer.parts[-1].first
        own = answer.parts[1].first
        if own is None:
            return False, None
        self.joined(request, own.created)  # by an attempt whose answer was lost
        self._waiting.read_soon(request)
        return True, None

    async def _condition(self, request: EtcdRequest) -> bytes:
        """Return the comparison of the semaphore, after checking the request against it."""
        name, count = request.name, request.count
        right = isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT
        if request.ephemeral:
            if not right or rules.EXACT < count < EPHEMERAL_LIMIT:
                await self._learn(request)
            return name.absent
        if name.lasting is None or not right or not count <= min(name.lasting.tokens, rules.EXACT):
            await self._learn(request)
        assert name.lasting is not None
        request.limit = name.lasting
        return wire.modified_at(name.limit, name.lasting.modified)

    async def _learn(self, request: EtcdRequest) -> None:
        """Read the semaphore, and check the request against it."""
        name = request.name
        limit, queue = (await self.read(name.get_limit, name.first_request)).parts
        request.check_condition(limit.first, entries(queue.found))
        rules.check_count(request.count, request.limit.tokens, name.path, name.name)

    def joined(self, request: EtcdRequest, created: int) -> EtcdRequest:
        """Record the revision at which a request joined its queue."""
        request.created = created
        self.engine.local[request.key] = request
        return request

    def _joining_as_before(self, request: EtcdRequest, condition: bytes, at_once: bool) -> bytes:
        """Return the prepared transaction that joins without data."""
        timeout = None if at_once else request.timeout
        what = (request.name.name, request.count, request.ephemeral, condition, at_once, timeout)
        build = partial(request.joining, self, condition, at_once, 0)
        return self._as_before(request, what, build)

    def _deleting(self, request: EtcdRequest) -> bytes:
        """Return the transaction that deletes a request."""
        build = partial(request.deleting, self)
        if request.data or request.request_id > _LAST_REQUEST:
            return build()
        return self._as_before(request, (request.name.name,), build)

    def _as_before(
        self, request: EtcdRequest, what: tuple[object, ...], build: Callable[[], bytes]
    ) -> bytes:
        """Return a transaction, derived from one that was built for an earlier request.

        Args:
            request: the request of the transaction.
            what: everything it depends on, except the number of the request and the attachment.
            build: makes the transaction if there is none.
        """
        if self._prepared_for != self.version or len(self._prepared) >= _MOST_PREPARED:
            self._prepared_for = self.version
            self._prepared.clear()
        prepared = self._prepared.get(what)
        if prepared is None:
            key, request.key = request.key, request.key[:-16] + _ANY_REQUEST
            try:
                prepared = self._prepared[what] = build()
            finally:
                request.key = key
        return prepared.replace(_ANY_REQUEST, request.key[-16:])

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        self.check_open()
        request = self.requests.pop(request_id, None) or self._left_in.pop(request_id, None)
        if request is None:
            return self._leaving.get(request_id, Withdrawn.MISSING)
        if request.drop is not None and not self.in_contact:
            request.gone = True
            self._waiting.stop(request)
            request.drop(_REFUSED)
            return Withdrawn.LEFT
        return self._leave(request)

    def _leave(self, request: EtcdRequest) -> asyncio.Future[Withdrawn]:
        request.gone = True
        self._waiting.stop(request)
        name = request.name.name
        future = self.operations.take(name, lambda: self._delete(request), request)
        self._leaving[request.request_id] = future
        future.add_done_callback(partial(self._left, request))
        return future

    def _left(self, request: EtcdRequest, left: asyncio.Future[Withdrawn]) -> None:
        del self._leaving[request.request_id]
        if not (self.over or left.cancelled() or left.exception() is None):
            self._left_in[request.request_id] = request
            request.timer = self.engine.loop.call_later(
                _AGAIN, self._leave_again, request.request_id
            )

    def _leave_again(self, request_id: int) -> None:
        self._leave(self._left_in.pop(request_id)).add_done_callback(log_failure)

    async def _delete(self, request: EtcdRequest) -> Withdrawn:
        if request.left:
            return Withdrawn.LEFT
        limit: Limit | None = None
        head: KeyValue | None = None
        follows = any(each.waiting is self._waiting for each in request.followers)
        hands_over = follows and request.owns and request.created
        build = partial(self._deleting, request)
        if hands_over:
            build = partial(request.handing_over, self)
        try:
            answer, _ = await self.transact(build, request)
        except SessionExpired:
            if request.may_have_left:
                return Withdrawn.LEFT
            raise
        if hands_over:
            limit, head = limit_of(answer.parts[-2].first), answer.parts[-1].first
        if self.over:
            request.left = True  # no event is delivered any more
        else:
            self._is_out(request, head, limit)
        was_there = answer.parts[0].count > 0 or request.may_have_left
        return Withdrawn.LEFT if was_there else Withdrawn.MISSING

    def _is_out(
        self,
        request: EtcdRequest,
        head: KeyValue | None = None,
        limit: Limit | None = None,
        *,
        joined: EtcdRequest | None = None,
    ) -> None:
        """Record that a request has left its queue.

        Args:
            request: the request.
            head: the first request of the queue after that, if known.
            limit: the limit of the queue, if it may have changed.
            joined: a request that has just joined and reads the queue itself.
        """
        request.left = True
        for each in request.followers:
            is_first = head is not None and head.key == each.key
            if is_first and limit is not None:
                each.limit = limit
                is_first = each.count <= limit.tokens
            if is_first and each.waiting is self._waiting and not (each.decided or each is joined):
                each.owns = True
                self._waiting.stop(each)
                self._waiting.granted(each)
        self._waiting.gone(request)

    def _set_timer(self, request: EtcdRequest, timeout: float | None) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if timeout is not None and not request.decided:
            request.timer = self.engine.loop.call_later(timeout, self._time_out, request)

    def _time_out(self, request: EtcdRequest) -> None:
        if not request.decided:
            self.requests.pop(request.request_id, None)
            self._leave(request).add_done_callback(partial(self._timed_out, request.request_id))

    def _timed_out(self, request_id: int, left: asyncio.Future[Withdrawn]) -> None:
        if left.cancelled() or self.over:
            return
        error = left.exception()
        if error is not None:
            _log.warning("could not withdraw a waiter: node=%s error=%s", self.path, error)
        self.events.removed(request_id, Removal.TIMED_OUT)

    def taken_out(self, request_id: int, why: bytes) -> None:
        """Forget a request that another client removed from its queue."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if not request.created:
            request.early = why
            return
        del self.requests[request_id]
        self._waiting.stop(request)
        self._waiting.gone(request)
        self.events.removed(request_id, _removal(why))

    def look_up_soon(self) -> None:
        """Look up owned requests and first waiters, unless the last look-up has no answer.

        No client leaves word of a key that was deleted with etcd's own tools.
        """
        placed = [
            each
            for each in self.requests.values()
            if each.created and not each.gone and (each.owns or each.near)
        ]
        if placed and not self._looking and self.early is None:
            self._looking = True
            self.engine.spawn(self._look_up(placed))

    async def _look_up(self, placed: Sequence[EtcdRequest]) -> None:
        try:
            for first in range(0, len(placed), _CHUNK):
                chunk = placed[first : first + _CHUNK]
                found = await self.read(*(wire.get(each.key, keys_only=True) for each in chunk))
                missing = [
                    each
                    for each, part in zip(chunk, found.parts, strict=True)
                    if part.first is None and not each.gone
                ]
                if missing:
                    await self._missing(missing)
        except (TenureError, Refused) as error:
            _log.debug("could not look up requests: session=%d error=%s", self.id, error)
        finally:
            self._looking = False

    async def _missing(self, requests: Sequence[EtcdRequest]) -> None:
        notes = await self.read(*(wire.get(self.note(each.request_id)) for each in requests))
        for each, part in zip(requests, notes.parts, strict=True):
            if not each.gone and self.requests.get(each.request_id) is each:
                note = part.first
                self.taken_out(each.request_id, _LAPSED if note is None else note.value)

    def note(self, request_id: int) -> bytes:
        """Return the key of the reason why a request was removed."""
        return self.key + b"/h/%x" % request_id

    def stop_requests(self) -> None:
        """Stop waiting, because the session has ended."""
        local = self.engine.local.values()
        mine = [each for each in local if each.waiting is self._waiting]
        for request in {*self.requests.values(), *self._left_in.values(), *mine}:
            self._waiting.stop(request)
            self._waiting.gone(request)
        self.requests.clear()
        self._left_in.clear()
