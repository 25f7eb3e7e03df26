"""The requests of one session: how they join queues, learn that they own, and leave.

A request is asked (its transaction is under way), waits, owns, or is gone.

Rules:

* **One transaction joins.** If the queue is empty the request is put, and owns: nothing was read.
  If not, a transaction inside the first one puts it and reads what stands before it. Who does not
  want to wait is put only if nothing is newer than the queue that was found to have room.
* **Ownership is the prefix rule** over the queue in the order of the create revisions, as it was
  read by the one who concludes it, at a revision of a majority, and under its own attachment.
* **Who waits is woken by what stands before it.** A request for the whole waits for its
  predecessor to go. Another one waits for its predecessor to go, to shrink, or to be marked as an
  owner; the first that waits watches the owners. An owner that had to wait, and that others may
  own beside, marks itself: to wake the next. The mark tells nobody anything else. Should the one
  that is to make it not live to, the next finds out when it looks, every few seconds.
* Whose predecessor is this engine's own hears of it directly: the transaction that takes out an
  owner reads who is first then, and if that is one of the same session, it owns. Any other one
  that follows looks.
* Time to wait is the waiter's own: a timer takes it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tenure.core import rules
from tenure.engines.contract import Enqueued, Place, Removal
from tenure.engines.etcd import wire
from tenure.engines.etcd.keys import (
    Entry,
    Name,
    Queue,
    entries,
    limit_of,
    number_owning,
    request_value,
)
from tenure.engines.etcd.members import Refused
from tenure.engines.etcd.watching import Watch
from tenure.engines.etcd.wire import Event, KeyValue
from tenure.errors import LeaseReleased, SemaphoreNotFound, TenureError
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, Recovered, Unchanged

if TYPE_CHECKING:
    from tenure.engines.etcd.session import EtcdSession

__all__ = ["DELETED", "EVICTED", "Requests", "not_found"]

_log = logging.getLogger("tenure")

EVICTED, DELETED = b"evicted", b"deleted"
"""What is noted for a session about a request that was taken out."""
_REMOVALS = {EVICTED: Removal.EVICTED, DELETED: Removal.DELETED}

_POLL, _POLL_BY_PLACE = 2.5, 0.02
"""Seconds between two looks of one behind other waiters: at least, and for each before it."""

_NEAR, _MISSED = 2, 0.1
"""Who is so near to the head looks at once when the watch began late; others after so many
seconds."""
_LARGE = 64 * 1024
"""Bytes of data; more are sent but once, at the price of reading the queue though it be empty."""

_ANY_HOLD, _LAST_HOLD = b"\xfftenure: a hold\xff", 2**64 - 1
"""What stands for the number of a hold in a prepared transaction, and is as long."""
_MOST_TEMPLATES = 4096

_REFUSED = Enqueued(Place.REFUSED, None)


class Request:
    """One request.

    Attributes:
        created: its create revision; 0 while it is asked for.
        near: whether it was so near to the head when it joined that no time is to be lost.
        followers: requests of this engine that wait for it to go.
    """

    __slots__ = (
        "count",
        "created",
        "data",
        "data_key",
        "early",
        "ephemeral",
        "followers",
        "gone",
        "hold",
        "key",
        "limit",
        "look_again",
        "looking",
        "marked",
        "name",
        "near",
        "owns",
        "poll",
        "timer",
        "watch",
        "watched",
    )

    def __init__(
        self, session: int, hold: int, name: Name, count: int, data: bytes, ephemeral: bool
    ) -> None:
        which = b"%016x-%016x" % (session, hold)
        self.hold = hold
        self.name = name
        self.count = count
        self.data = data
        self.ephemeral = ephemeral
        self.key = name.requests + which
        self.data_key = name.request_data + which
        self.limit = EPHEMERAL_LIMIT
        self.created = 0
        self.owns = self.gone = self.marked = self.looking = self.look_again = False
        self.near = True
        self.followers: list[tuple[Requests, Request]] = []
        self.early: bytes | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.poll: asyncio.TimerHandle | None = None
        self.watch: Watch | None = None
        self.watched: frozenset[bytes] = frozenset()

    @property
    def decided(self) -> bool:
        """Whether it waits for nothing."""
        return self.gone or self.owns


class Requests:
    """All of one session's."""

    def __init__(self, session: EtcdSession) -> None:
        self._session = session
        self._engine = session.engine
        self._requests: dict[int, Request] = {}
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self._any_hold = b"%016x-" % session.id + _ANY_HOLD
        self._templates: dict[tuple[object, ...], bytes] = {}
        self._prepared_for = 0

    # Joining

    def enqueue(
        self, hold: int, name: Name, count: int, data: bytes, timeout: float | None, ephemeral: bool
    ) -> asyncio.Future[Enqueued]:
        request = Request(self._session.id, hold, name, count, data, ephemeral)
        self._requests[hold] = request
        return self._session.in_turn(name.name, lambda: self._enqueue(request, timeout))

    async def _enqueue(self, request: Request, timeout: float | None) -> Enqueued:
        try:
            placed = await self._join(request, timeout == 0)
        except BaseException:
            if self._requests.pop(request.hold, None) is not None and request.created:
                self._leave(request).add_done_callback(_heard)  # nobody would withdraw it
            raise
        if placed is None:
            self._requests.pop(request.hold, None)
            return _REFUSED
        if request.early is not None:
            self._engine.loop.call_soon(self.taken_out, request.hold, request.early)
        if not request.owns and timeout is not None:
            self._set_timer(request, timeout)
        return Enqueued(Place.GRANTED if request.owns else Place.WAITING, self._order_id(request))

    def _order_id(self, request: Request) -> int:
        return self._engine.base + request.created

    async def _join(self, request: Request, at_once: bool) -> Request | None:
        """Put a request into its queue; ``None`` if it does not wait and cannot own."""
        session, newest = self._session, 0
        while True:
            condition = await self._condition(request)
            whole = request.count == request.limit
            answer, _ = await session.ask(
                partial(self._joining, request, condition, whole, at_once, newest)
                if newest or request.data
                else partial(self._joining_as_before, request, condition, whole, at_once)
            )
            large = not at_once and len(request.data) > _LARGE
            if answer.ok and not large:
                request.owns = True
                return self._joined(request, answer.revision)
            found = answer.parts[1:]
            if not at_once:
                inner = answer if large else found[0]
                if inner.ok:
                    there = inner.parts[-1]
                    request.near = there.count <= _NEAR
                    self._joined(request, answer.revision)
                    self._place(request, entries(there.found), answer.revision)
                    return request
                found = found if large else inner.parts
            limit, own, queue = found[0].first, found[1].first, entries(found[2].found)
            if own is not None:  # an attempt whose answer was lost
                self._joined(request, own.created)
                if at_once:
                    request.owns = True
                else:
                    await self._look(request, tell=False)
                return request
            if not self._check_condition(request, limit, queue):
                continue
            if whole or not _has_room(queue, request):
                return None
            newest = answer.revision + 1

    def _joined(self, request: Request, created: int) -> Request:
        request.created = created
        self._engine.local[request.key] = (self, request)
        return request

    def _joining(
        self, request: Request, condition: bytes, whole: bool, at_once: bool, newest: int
    ) -> bytes:
        session, name = self._session, request.name
        put = [wire.put(request.key, request_value(request.count), session.id)]
        if request.data:
            put.append(wire.put(request.data_key, request.data, session.id))
        get = wire.get(wire.range_(request.key))
        queue = name.newest_two if whole else name.queue
        wrong = (name.get_limit, get, name.first_request)
        if len(request.data) > _LARGE and not at_once:  # which must not be sent twice
            fresh = (wire.nested(wire.txn((name.empty,), (name.drop_data,))),)
            return wire.txn(
                (session.mine, condition, wire.created_at(request.key, wire.ABSENT)),
                (*put, *(fresh if request.ephemeral else ()), queue),
                (session.get, *wrong),
            )
        if newest:  # the queue had room, and nobody has joined it since
            room = wire.created_before(name.requests, newest)
            then = tuple(put)
        else:
            room = name.empty
            then = (*put, name.drop_data) if request.ephemeral else tuple(put)
        otherwise: tuple[bytes, ...]
        if at_once:
            there = name.first_request if whole else name.queue
            otherwise = (session.get, name.get_limit, get, there)
        else:
            inner = wire.txn(
                (session.mine, condition, wire.created_at(request.key, wire.ABSENT)),
                (*put, queue),
                wrong,
            )
            otherwise = (session.get, wire.nested(inner))
        return wire.txn((session.mine, condition, room), then, otherwise)

    def _joining_as_before(
        self, request: Request, condition: bytes, whole: bool, at_once: bool
    ) -> bytes:
        """The same for one without data: only the number of the hold is another one."""
        if request.hold > _LAST_HOLD:
            return self._joining(request, condition, whole, at_once, 0)
        what = (request.name.name, request.count, request.ephemeral, condition, at_once)
        template = self._template(what)
        if template is None:
            hold, request.key = request.key, request.name.requests + self._any_hold
            template = self._joining(request, condition, whole, at_once, 0)
            request.key = hold
            self._templates[what] = template
        return template.replace(_ANY_HOLD, b"%016x" % request.hold)

    def _template(self, what: tuple[object, ...]) -> bytes | None:
        """What was prepared for that under the number of this attachment."""
        if self._prepared_for != self._session.version or len(self._templates) >= _MOST_TEMPLATES:
            self._prepared_for = self._session.version
            self._templates.clear()
        return self._templates.get(what)

    async def _condition(self, request: Request) -> bytes:
        """What must hold of the semaphore; it has been checked that the request is right for it."""
        name, count = request.name, request.count
        right = isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT
        if request.ephemeral:
            if not right or rules.EXACT < count < EPHEMERAL_LIMIT:
                await self._learn(request)
            return name.absent
        if name.lasting is None or not right or not count <= min(name.lasting[1], rules.EXACT):
            await self._learn(request)
        assert name.lasting is not None
        created, request.limit = name.lasting
        return wire.created_at(name.limit, created)

    async def _learn(self, request: Request) -> None:
        """Look up the semaphore, and check the request against it."""
        name = request.name
        limit, queue = (await self._session.read(name.get_limit, name.first_request)).parts
        self._check_condition(request, limit.first, entries(queue.found))
        rules.check_count(request.count, request.limit, name.path, name.name)

    def _check_condition(
        self, request: Request, limit: KeyValue | None, queue: Sequence[Entry]
    ) -> bool:
        """Whether the semaphore is what it was taken for; raises if it cannot be."""
        name, known = request.name, request.name.lasting
        name.lasting = None if limit is None else (limit.created, limit_of(limit.value))
        if request.ephemeral:
            rules.check_kind(True, limit is None, name.path, name.name)
            return True
        if name.lasting is None:
            if queue:
                rules.check_kind(False, True, name.path, name.name)
            raise not_found(name.name, name.path)
        request.limit = name.lasting[1]
        return name.lasting == known

    # Waiting

    def _place(self, request: Request, queue: Sequence[Entry], revision: int) -> None:
        """Conclude from a queue, as it was at that revision, whether a request owns.

        Of the queue of one that wants the whole only its predecessor matters.
        """
        before = [each for each in queue if each.created < request.created]
        if request.count == request.limit:
            owning = 0
        else:
            mine = [each for each in queue if each.created == request.created]
            owning = number_owning([*before, *mine], request.limit)
        if not before or owning > len(before):
            request.owns = True
            self._stop(request)
            return
        if request.gone:  # it is being withdrawn already
            return
        ahead = self._engine.local.get(before[-1].key)
        if ahead is not None and request.count == request.limit:
            self._unwatch(request)
            if (self, request) not in ahead[1].followers:
                ahead[1].followers.append((self, request))
            return
        if owning == len(before) > 1:  # the first that waits
            watched = frozenset(each.key for each in before)
        else:
            watched = frozenset([before[-1].key])
            if owning < len(before) and request.count != request.limit and not request.poll:
                delay = max(_POLL, _POLL_BY_PLACE * len(before))
                request.poll = self._engine.loop.call_later(delay, self._look_soon, request)
        self._watch(request, watched, revision)

    def _watch(self, request: Request, watched: frozenset[bytes], revision: int) -> None:
        if request.watch is not None and request.watched == watched:
            return
        self._unwatch(request)
        request.watched = watched
        key, end = request.name.requests, b""
        if len(watched) == 1:
            (key,) = watched
        else:
            end = wire.after(key)
        happened, missed = partial(self._happened, request), partial(self._missed, request)
        request.watch = self._engine.watching.add(
            *(key, end, revision + 1, happened, missed),
            puts=request.count != request.limit,
            at_once=True,
            once=not end,
        )

    def _missed(self, request: Request) -> None:
        """Something may have happened before the watch began."""
        if request.near:
            self._look_soon(request)
        elif request.poll is None:  # most probably not, so far behind
            request.poll = self._engine.loop.call_later(_MISSED, self._look_soon, request)

    def _happened(self, request: Request, events: Sequence[Event]) -> None:
        if any(event.kv.key in request.watched for event in events):
            self._look_soon(request)

    def _look_soon(self, request: Request) -> None:
        if request.looking:
            request.look_again = True
        elif not (request.decided or self._session.over or not request.created):
            request.looking = True
            self._engine.spawn(self._look_until_seen(request))

    async def _look_until_seen(self, request: Request) -> None:
        try:
            request.look_again = True
            while request.look_again and not request.decided:
                request.look_again = False
                await self._look(request, tell=True)
        except (TenureError, Refused) as error:
            if not self._session.over:
                _log.warning("looking at a queue on %s: %s", request.name.path, error)
                request.poll = self._engine.loop.call_later(_POLL, self._look_soon, request)
        finally:
            request.looking = False

    async def _look(self, request: Request, *, tell: bool) -> None:
        """Read what stands before a request, and act on it."""
        session, name = self._session, request.name
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None
        whole = request.count == request.limit
        before = wire.get(
            wire.range_(
                *(name.requests, wire.after(name.requests)),
                limit=1 if whole else 0,
                created_until=request.created - whole,
                newest_first=whole,
                oldest_first=not whole,
            )
        )
        note = wire.get(wire.range_(session.key + b"/h/%x" % request.hold))
        answer, _ = await session.ask(
            lambda: wire.txn(
                (session.mine, wire.created_at(request.key, request.created)),
                (before,),
                (session.get, note),
            )
        )
        settled = request.decided if tell else request.owns
        if settled:
            return
        if answer.ok:
            self._place(request, entries(answer.parts[0].found), answer.revision)
            if request.owns and tell:
                self._granted(request)
        elif tell:
            left = answer.parts[1].first
            self.taken_out(request.hold, EVICTED if left is None else left.value)

    def _granted(self, request: Request) -> None:
        self._session.events.granted(request.hold, self._order_id(request))
        if request.count != request.limit:
            answer = self._session.in_turn(request.name.name, lambda: self._mark(request))
            answer.add_done_callback(_heard)

    async def _mark(self, request: Request) -> None:
        """Wake the next."""
        if not request.gone:
            request.marked = True
            await self._session.ask(partial(self._changing, request, request.count, None))

    def look_at_all(self) -> None:
        """Something may have been missed."""
        for request in self._requests.values():
            self._look_soon(request)

    # Changing

    def alter(
        self, hold: int, count: int | None, data: bytes | None, timeout: float | Unchanged | None
    ) -> asyncio.Future[None]:
        request = self._requests.get(hold)
        if request is None:
            raise self._released()
        return self._session.in_turn(
            request.name.name, lambda: self._alter(request, count, data, timeout)
        )

    def _released(self) -> LeaseReleased:
        path = self._session.path
        return LeaseReleased(f"the request on {path} is over", node=path)

    async def _alter(
        self,
        request: Request,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None,
    ) -> None:
        path, name = self._session.path, request.name.name
        if request.gone or request.hold not in self._requests:
            raise self._released()
        if data is not None:
            rules.check_data(data, path, name)
        if count is not None:
            # The limit does not matter to one that is to shrink, and growing is always wrong.
            grows = isinstance(count, int) and request.count < count <= EPHEMERAL_LIMIT
            limit = EPHEMERAL_LIMIT if grows and count <= rules.EXACT else request.count
            rules.check_shrink(count, request.count, limit, path, name)
        if timeout is not UNCHANGED:
            rules.check_timeout(timeout, path, name)
        shrinks = count is not None and count != request.count
        if shrinks or (data is not None and data != request.data):
            new = request.count if count is None else count
            answer, _ = await self._session.ask(partial(self._changing, request, new, data))
            if not answer.ok:
                raise self._released()
            request.count = new
            request.data = request.data if data is None else data
            if not request.owns and shrinks:
                self._unwatch(request)  # it watched for what it wanted before
        if not request.owns and (shrinks or timeout == 0):
            await self._look(request, tell=False)
            self._engine.loop.call_soon(self._tell_if_granted, request)
        if timeout is not UNCHANGED:
            self._set_timer(request, timeout)

    def _tell_if_granted(self, request: Request) -> None:
        if request.owns and not (request.gone or self._session.over):
            self._granted(request)

    def _changing(self, request: Request, count: int, data: bytes | None) -> bytes:
        session = self._session
        then = [wire.put(request.key, request_value(count, marked=request.marked), session.id)]
        if data:
            then.append(wire.put(request.data_key, data, session.id))
        elif data is not None:
            then.append(wire.delete(request.data_key))
        return wire.txn(
            (session.mine, wire.created_at(request.key, request.created)),
            tuple(then),
            (session.get,),
        )

    # Leaving

    def withdraw(self, hold: int) -> asyncio.Future[None] | None:
        request = self._requests.pop(hold, None)
        if request is None:
            return self._leaving.get(hold)
        return self._leave(request)

    def _leave(self, request: Request) -> asyncio.Future[None]:
        request.gone = True
        self._stop(request)
        future = self._session.in_turn(request.name.name, lambda: self._delete(request))
        self._leaving[request.hold] = future
        future.add_done_callback(lambda _: self._leaving.pop(request.hold, None))
        return future

    async def _delete(self, request: Request) -> None:
        next_ = next((each for whose, each in request.followers if whose is self), None)
        if next_ is None or not request.owns or not request.created:
            await self._session.ask(partial(self._deleting, request))
        else:
            answer, _ = await self._session.ask(partial(self._handing_over, request))
            head = answer.parts[-1].first
            if not next_.decided and head is not None and head.key == next_.key:
                next_.owns = True
                self._stop(next_)
                self._granted(next_)
        self._gone(request)

    def _handing_over(self, request: Request) -> bytes:
        """Delete a request, and read who is the first then."""
        session, name = self._session, request.name
        first = wire.range_(*(name.requests, wire.after(name.requests)), limit=1, oldest_first=True)
        then = (wire.delete(request.key), wire.delete(request.data_key), wire.get(first))
        return wire.txn((session.mine,), then, (session.get,))

    def _gone(self, request: Request) -> None:
        """It has left its queue, or nobody here hears of it any more: who follows it looks."""
        request.gone = True
        self._engine.local.pop(request.key, None)
        followers, request.followers = request.followers, []
        for whose, follower in followers:
            whose._look_soon(follower)

    def _deleting(self, request: Request) -> bytes:
        session, key = self._session, request.key
        if request.data or request.hold > _LAST_HOLD:
            then = (wire.delete(key), wire.delete(request.data_key))
            return wire.txn((session.mine,), then, (session.get,))
        template = self._template((request.name.name,))
        if template is None:
            key = request.name.requests + self._any_hold
            template = wire.txn((session.mine,), (wire.delete(key),), (session.get,))
            self._templates[request.name.name,] = template
        return template.replace(_ANY_HOLD, b"%016x" % request.hold)

    def _set_timer(self, request: Request, timeout: float | None) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
        if timeout is not None and not request.decided:
            request.timer = self._engine.loop.call_later(timeout, self._give_up, request)

    def _give_up(self, request: Request) -> None:
        """It has waited for as long as it wanted to."""
        if not request.decided:
            self._requests.pop(request.hold, None)
            self._leave(request).add_done_callback(partial(self._gave_up, request.hold))

    def _gave_up(self, hold: int, left: asyncio.Future[None]) -> None:
        if left.cancelled() or self._session.over:
            return
        error = left.exception()
        if error is not None:
            _log.warning("a waiter on %s gave up: %s", self._session.path, error)
        self._session.events.removed(hold, Removal.TIMED_OUT)

    def taken_out(self, hold: int, why: bytes) -> None:
        """Somebody has taken a request out of its queue."""
        request = self._requests.get(hold)
        if request is None:
            return
        if not request.created:
            request.early = why
            return
        del self._requests[hold]
        self._stop(request)
        self._gone(request)
        self._session.events.removed(hold, _REMOVALS.get(why, Removal.EVICTED))

    def _unwatch(self, request: Request) -> None:
        if request.watch is not None:
            self._engine.watching.remove(request.watch)
            request.watch = None
        if request.poll is not None:
            request.poll.cancel()
            request.poll = None

    def _stop(self, request: Request) -> None:
        """Nothing is waited for any more."""
        self._unwatch(request)
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None

    def stop(self) -> None:
        """The session is over."""
        mine = [each for whose, each in self._engine.local.values() if whose is self]
        for request in {*self._requests.values(), *mine}:
            self._stop(request)
            self._gone(request)
        self._requests.clear()

    # Taking over

    def recover(self, queues: Sequence[Queue], data: dict[bytes, bytes]) -> list[Recovered]:
        """Go on with what the session has in queues, and tell it, in the order of the queues."""
        mine: list[Request] = []
        for found in queues:
            name = self._session.name(found.name)
            for number, entry in enumerate(found.requests):
                if entry.session != self._session.id:
                    continue
                request = Request(
                    *(entry.session, entry.hold, name, entry.count, b"", found.limit_kv is None)
                )
                request.data = data.get(request.data_key, b"")
                request.limit = found.limit
                self._joined(request, entry.created)
                request.marked = entry.marked
                request.owns = number < found.owning
                self._requests[entry.hold] = request
                mine.append(request)
        return [
            Recovered(
                hold=each.hold,
                name=each.name.name,
                order_id=self._order_id(each),
                count=each.count,
                data=each.data,
                ephemeral=each.ephemeral,
                granted=each.owns,
            )
            for each in sorted(mine, key=lambda each: each.created)
        ]


def _has_room(queue: Sequence[Entry], request: Request) -> bool:
    """Whether a request would own, behind this queue."""
    if number_owning(queue, request.limit) < len(queue):
        return False
    held = sum(each.count for each in queue)
    whole = any(each.count == request.limit for each in queue)
    return rules.fits(held, whole, request.count, request.limit)


def _heard(answer: asyncio.Future[None]) -> None:
    """Nobody waits for this; what went wrong is noted."""
    if not answer.cancelled() and answer.exception() is not None:
        _log.debug("waking the next: %s", answer.exception())


def not_found(name: str, path: str) -> SemaphoreNotFound:
    """The error for a name that no semaphore has."""
    return SemaphoreNotFound(
        f"there is no semaphore {name!r} on {path}; create it first", node=path, name=name
    )
