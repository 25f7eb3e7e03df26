"""Attachment of a session: its operation queue, watches, connection, proof and end.

States::

    new --> attached <--> interrupted    the connection is lost, and the session is reattached
               |             |
               +-------------+--> over   closed, detached, ended by the server, or expired

Rules:

* A session is ended by the program, by the server's report that it has ended, was taken over or has
  another key, and when its recovery window has passed. Any other error leads to another attempt, on
  this server or another one.
* Unanswered operations are sent again over the next connection, before new ones, under the same
  number. `reconcile` finds those that need not be sent again.
* A session that the program has closed or detached reports no more events.

**The operation queue** (`NativeOperationQueue`) lasts across all connections of the session:

* An operation is kept until it is answered, and sent again over the next connection.
* The server keeps a limited number of answers until they are acknowledged. At most so many
  operations are sent, counted from the oldest unanswered one; answers before it are acknowledged.
  So only a program with one very slow operation among thousands of others waits here.
* A request that is withdrawn before it was sent is dropped, and so is its withdrawal. Otherwise
  programs that try again and again would fill the memory during a long outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any

from msgspec import Struct, structs

from tenure.core import rules
from tenure.engines._kit.session import PlainSession
from tenure.engines.contract import (
    Attach,
    Enqueued,
    LastWords,
    Orphan,
    Place,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.native.calls import ConnectionGone, NativeCall
from tenure.engines.native.connection import NativeConnection
from tenure.engines.native.heartbeat import NativeHeartbeat, Proofs
from tenure.engines.native.reconcile import OWNED, REFUSED, Plan, Requests, reconcile, removal
from tenure.engines.native.reconnector import NativeReconnector
from tenure.engines.prompt import Prompt
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    SessionExpired,
    TenureError,
)
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire
from tenure.wire.frames import FrameWriter

_log = logging.getLogger("tenure")

_GRANTED, _WAITING = Place.GRANTED, Place.WAITING  # an enumeration's attributes are slow to read


class NativeOperationQueue:
    """Unanswered operations of one session, and its requests.

    Attributes:
        calls: the unanswered operations by number, in order.
        requests: the requests that are, or may be, in queues.
    """

    def __init__(self, channel: int, reconnector: NativeReconnector) -> None:
        self.calls: dict[int, NativeCall] = {}
        self.requests: Requests = {}
        self._channel = channel
        self._reconnector = reconnector
        self._loop = reconnector.loop
        self._now = reconnector.clock.now
        self._connection: NativeConnection | None = None
        self._unsent: dict[int, NativeCall] = {}  # `Enqueue`s without a connection, or waiting
        self._waiting: deque[NativeCall] = deque()  # until the server may drop some answers
        self._kept = 0  # number of answers that it keeps
        self._last = 0  # number of the latest operation
        self._acknowledged = 0  # all operations up to this number

    def call(self, rid: int, message: Struct) -> NativeCall:
        """Send an operation, now or when there is a connection."""
        call = NativeCall(rid, message, Prompt(self._loop), self)
        self.calls[rid] = call
        self._last = call.number = number = self._last + 1
        connection = self._connection
        if connection is not None:
            if (number - self._acknowledged) * 2 > self._kept:
                self._submit(call)
            else:
                connection.submit(call)
        else:
            self._note_unsent(call)
        return call

    def _note_unsent(self, call: NativeCall) -> None:
        message = call.message
        if isinstance(message, wire.Enqueue):
            if not call.sent:
                self._unsent[message.request_id] = call
        elif isinstance(message, wire.Alter):
            self._unsent.pop(message.request_id, None)  # the change expects the request

    def withdraw_unsent(self, request_id: int) -> bool:
        """Withdraw a request if it was not sent; return whether that is done."""
        call = self._unsent.pop(request_id, None)
        if call is None:
            return False
        if self._waiting:
            self._waiting.remove(call)
        self.failed(call)
        self._loop.call_soon(call.succeed, REFUSED)
        return True

    def _submit(self, call: NativeCall) -> None:
        assert self._connection is not None
        unacknowledged = call.number - self._acknowledged
        if unacknowledged * 2 > self._kept:
            self._acknowledge()
            if self._waiting or call.number - self._acknowledged > self._kept:
                self._waiting.append(call)
                self._note_unsent(call)
                return
        self._connection.submit(call)

    def _acknowledge(self) -> None:
        answered = self._answered
        if answered > self._acknowledged and self._connection is not None:
            self._acknowledged = answered
            self._connection.send(wire.Acknowledge(self._channel, self.answered_up_to()))

    @property
    def _answered(self) -> int:
        """Number of the operation before the oldest unanswered one."""
        oldest = next(iter(self.calls.values()), None)
        return self._last if oldest is None else oldest.number - 1

    def answered_up_to(self) -> int:
        """Return the `acknowledged` of the protocol."""
        oldest = next(iter(self.calls), None)
        return self._reconnector.last_rid if oldest is None else oldest - 1

    # Answers

    def placed(self, call: NativeCall, answer: wire.Placed) -> None:
        """Handle the answer to an `Enqueue`."""
        self.answered(call)
        message = call.message
        assert isinstance(message, wire.Enqueue)
        if answer.place == wire.REFUSED:
            self.requests.pop(message.request_id, None)
            call.succeed(REFUSED)
            return
        granted = answer.place == wire.GRANTED
        # Otherwise it has been withdrawn or removed meanwhile, or granted.
        if self.requests.get(message.request_id, OWNED) != OWNED:
            waits_until = inf if call.until is None else call.until
            self.requests[message.request_id] = OWNED if granted else waits_until
        call.succeed(Enqueued(_GRANTED if granted else _WAITING, answer.order_id))

    def failed(self, call: NativeCall) -> None:
        """Record that an operation has failed."""
        self.answered(call)
        if isinstance(call.message, wire.Enqueue):
            self.requests.pop(call.message.request_id, None)

    def answered(self, call: NativeCall) -> None:
        """Record that an operation was answered."""
        self.calls.pop(call.rid, None)
        if self._waiting:
            self._acknowledge()
            waiting = self._waiting
            while waiting and waiting[0].number - self._acknowledged <= self._kept:
                assert self._connection is not None
                next_call = waiting.popleft()
                if isinstance(next_call.message, wire.Enqueue):
                    self._unsent.pop(next_call.message.request_id, None)
                self._connection.submit(next_call)

    # Connections

    def interrupt(self) -> None:
        """Keep the operations until there is another connection."""
        self._connection = None
        self._waiting.clear()
        for call in self.calls.values():
            call.interrupted = call.sent

    def resume(self, connection: NativeConnection, again: Iterable[NativeCall] = ()) -> None:
        """Use a new connection, and send these operations first."""
        self._connection = connection
        self._unsent.clear()
        self._kept = connection.welcome.kept_answers
        self._acknowledged = self._answered
        for call in again:
            self._submit(call)

    def reattached(self, connection: NativeConnection, answer: wire.Attached) -> Plan:
        """Compare with the server's state, and send the open operations again."""
        plan = reconcile(self.requests, self.calls.values(), answer, self._now())
        self.requests = plan.requests
        for call, placed in plan.placed:
            self.answered(call)
            call.succeed(placed)
        for call in plan.made:
            self.answered(call)
            call.succeed(None)
        again = [call for call in plan.again if self._in_time(call)]
        if not answer.kept:
            for call in again:
                call.may_have_run = call.sent
        connection.send(wire.Acknowledge(self._channel, self.answered_up_to()))
        self.resume(connection, again)
        for request_id in plan.orphans:
            rid = self._reconnector.next_rid()
            self.call(rid, wire.Withdraw(rid, self._channel, request_id))
        return plan

    def _in_time(self, call: NativeCall) -> bool:
        """Shorten the timeout of an operation; if it has passed, reject it and return false."""
        if call.until is not None:
            left = call.until - self._now()
            if left <= 0:
                self.failed(call)
                call.succeed(REFUSED)
                return False
            call.message = structs.replace(call.message, timeout=left)
        return True

    def end(self, error: TenureError, *, by_server: bool) -> None:
        """Settle all operations, because the session has ended. Operations that end it succeed.

        Args:
            error: raised by the unanswered operations.
            by_server: whether the server has reported the end. Then a withdrawal was too late,
                unless it may have been carried out over a lost connection.
        """
        calls = list(self.calls.values())
        self.calls.clear()
        self.requests.clear()
        self._unsent.clear()
        self._waiting.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forget(calls)
        for call in calls:
            message = call.message
            if isinstance(message, wire.Close | wire.Detach):
                call.succeed(None)
            elif isinstance(message, wire.Withdraw) and (call.interrupted or not by_server):
                call.succeed(Withdrawn.LEFT)
            else:
                call.fail(error)


POLLING = 1.0
"""Seconds between two notifications if the server rejects a watch."""


class _Watch:
    __slots__ = ("changed", "message", "polling")

    def __init__(self, message: wire.Watch, changed: Callable[[], None]) -> None:
        self.message = message
        self.changed = changed
        self.polling: asyncio.TimerHandle | None = None


class NativeWatches:
    """The watches of one session, on its channel."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._watches: dict[int, _Watch] = {}
        self._last = 0

    def add(
        self,
        connection: NativeConnection | None,
        name: str,
        changed: Callable[[], None],
        *,
        data: bool,
        owners: bool,
    ) -> int:
        """Begin a watch; return its number."""
        self._last += 1
        message = wire.Watch(self._channel, self._last, name, data, owners)
        self._watches[self._last] = _Watch(message, changed)
        if connection is not None:
            connection.send(message)
        return self._last

    def remove(self, connection: NativeConnection | None, number: int) -> None:
        """End a watch. Safe to call twice."""
        watch = self._watches.pop(number, None)
        if watch is None:
            return
        if watch.polling is not None:
            watch.polling.cancel()
        if connection is not None:
            connection.send(wire.Unwatch(self._channel, number))

    def clear(self, connection: NativeConnection | None) -> None:
        """End all watches."""
        for number in list(self._watches):
            self.remove(connection, number)

    def changed(self, number: int) -> None:
        """Notify the watcher of a change."""
        watch = self._watches.get(number)
        if watch is not None:
            watch.changed()

    def resume(self, connection: NativeConnection) -> None:
        """Watch again over a new connection, and notify all: changes may have been missed."""
        watches = list(self._watches.values())
        for watch in watches:
            if watch.polling is not None:
                watch.polling.cancel()
                watch.polling = None
            connection.send(watch.message)
        for watch in watches:
            watch.changed()

    def refused(self, push: wire.WatchRefused) -> None:
        """Poll, because the server rejects this watch."""
        watch = self._watches.get(push.number)
        if watch is not None:
            _log.warning(
                "watch rejected, polling instead: name=%r error=%s",
                watch.message.name,
                from_wire(push.error),
            )
            self._poll(watch)

    def _poll(self, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        watch.polling = loop.call_later(POLLING, self._poll, watch)
        watch.changed()


STORE_LOST = "the server has lost contact to its store"


def closing_again(
    orphan: Orphan, channel: int, first: int, second: int
) -> tuple[wire.Attach, wire.Close]:
    """Return the messages that reattach a session as its program, and close it.

    Args:
        orphan: the session.
        channel: an unused channel.
        first: the number of the first message.
        second: the number of the second one.
    """
    key = bytes.fromhex(orphan.credential.partition(".")[2])
    attach = wire.Attach(
        *(first, channel, "again", orphan.node, orphan.recovery_window, "", key, False),
        *(orphan.session_id, False, 0, True),
    )
    return attach, wire.Close(second, channel)


class NativeAttachment(PlainSession):
    """Session state without the operations of the contract.

    Attributes:
        attach_number: number of this attachment of the session, in the store.
        channel: its number on every connection.
        is_resumed: whether it existed before, and is taken over.
        begun: whether it has been attached once.
        proofs: its proofs.
        changed: set after an event that the first attach waits for.
        is_store_lost: whether the server has lost contact to its store.
    """

    def __init__(
        self,
        reconnector: NativeReconnector,
        heartbeat: NativeHeartbeat | None,
        how: Attach,
        events: SessionEvents,
    ) -> None:
        super().__init__(how, events, 0, float(how.recovery_window))
        self.attach_number = 0
        self.channel = reconnector.next_channel()
        self.is_resumed = how.session_id is not None
        # Without a key any client could attach it; a resumed session has its own.
        self._drawn = how.liveness == "process" and not self.is_resumed and not how.key
        self.key = os.urandom(rules.ATTACH_KEY_BYTES) if self._drawn else how.key
        self.begun = False
        self.proofs = Proofs(self.window)
        self.changed = asyncio.Event()
        self.is_store_lost = False
        self._how = how
        self._reconnector = reconnector
        self._heartbeat = heartbeat
        self._loop = reconnector.loop
        self._thread = threading.get_ident()
        self._now = reconnector.clock.now
        self._connection: NativeConnection | None = None  # set while it is attached over it
        self._attach_sent = 0.0
        self._operations = NativeOperationQueue(self.channel, reconnector)
        self._watches = NativeWatches(self.channel)
        self._leaving: asyncio.Future[object] | None = None
        self._ended_by_server = False
        self._expiry: asyncio.TimerHandle | None = None
        self._expires_at = inf
        self._retry: asyncio.TimerHandle | None = None
        self._refusals = 0

    @property
    def credential(self) -> str:
        """The program's id and the session's key, with which it reattaches."""
        return f"{self._reconnector.program.hex()}.{self.key.hex()}"

    @property
    def last_words(self) -> LastWords | None:
        """A greeting, and what `closing_again` returns."""
        connection = self._connection
        if connection is None or self._reconnector.address.tls is not None:
            return None
        orphan = Orphan(self.path, self.id, self.window, self.credential)
        writer = FrameWriter(wire.GREETING_BYTES)
        for message in (self._reconnector.hello(), *closing_again(orphan, 1, 1, 2)):
            writer.add(message)
        endpoint = connection.endpoint
        place = endpoint.path or (endpoint.host, endpoint.port)
        return LastWords(place, bytes(writer.take()))

    def check(self) -> None:
        """Raise an error if the session has ended, or the program is leaving it."""
        if self.over or self.closing:
            raise self.reason

    # Attaching

    def send_attach(self, rid: int, connection: NativeConnection) -> NativeCall:
        """Send an `Attach`, for the first time or again."""
        how = self._how
        message = wire.Attach(
            rid,
            self.channel,
            "again" if self.begun else "resume" if self.is_resumed else "new",
            self.path,
            self.window,
            how.description,
            self.key,
            how.liveness == "window",
            self.id or how.session_id or 0,
            how.assume_dead,
            self._operations.answered_up_to(),
            self._drawn,
        )
        self._attach_sent = self._now()
        call = NativeCall(rid, message, self._loop.create_future())
        connection.submit(call)
        return call

    def attached(self, answer: wire.Attached, connection: NativeConnection) -> None:
        """Begin, or continue, over a connection on which the server has attached the session."""
        self.id, self.attach_number = answer.session_id, answer.attach_number
        self._connection = connection
        self.is_store_lost = False  # otherwise the server reports it again
        self._refusals = 0
        self._stop_timers()
        if self.begun:
            self._continue(answer, connection)
        else:
            self.begun = True
            self._operations.resume(connection)
            if self.is_resumed:
                for each in answer.requests:
                    self._operations.requests[each.request_id] = OWNED if each.granted else inf
                self.events.resumed([each.model() for each in answer.requests])
        if answer.age is not None:
            self._prove(self._attach_sent - answer.age)
        self.changed.set()

    def _continue(self, answer: wire.Attached, connection: NativeConnection) -> None:
        """Report what has happened meanwhile, and send the open operations again."""
        plan = self._operations.reattached(connection, answer)
        if self.closing:
            return
        for found in plan.granted:
            self.events.granted(found.request_id, found.order_id)
        for request_id, why in plan.removed:
            self.events.removed(request_id, why)
        self.events.attached()
        self._watches.resume(connection)

    def interrupt(self) -> None:
        """Record that the connection is lost; the session expires with its recovery window."""
        if not self.begun:
            return
        was_attached, self._connection = self._connection is not None, None
        self._operations.interrupt()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._expiry is None:
            now = self._now()
            self._expires_at = (now if self.proofs.last is None else self.proofs.last) + self.window
            left = max(0.0, self._expires_at - now)
            self._expiry = self._loop.call_later(left, self._expire)
        if was_attached and not self.closing:
            self.events.detached(self._reconnector.failure)

    def reattach(self, connection: NativeConnection) -> None:
        """Reattach it on a new connection, unless it has ended.

        After the recovery window another program may have resumed it, and reattaching would take it
        away. The timer of the window may be late, or may not count a suspension.
        """
        self._retry = None
        if self._expiry is not None and self._now() >= self._expires_at:
            self._stop_timers()
            self._expire()
        elif self.begun:
            call = self.send_attach(self._reconnector.next_rid(), connection)
            call.future.add_done_callback(partial(self._reattached, connection))

    def _reattached(self, connection: NativeConnection, answer: asyncio.Future[object]) -> None:
        error = answer.exception()
        if error is None or self.over or connection is not self._reconnector.connection:
            return
        if isinstance(error, SessionExpired | AuthenticationFailed):
            self._end_by_server(error)
        elif isinstance(error, ConnectionGone):
            return
        elif self._reconnector.several:
            why = f"it cannot reattach a session: {error}"
            self._reconnector.try_others(connection, why)
        else:
            pause = self._reconnector.pause(self._refusals)
            self._refusals += 1
            self._retry = self._loop.call_later(pause, self.reattach, connection)

    def _expire(self) -> None:
        """End the session, because its recovery window has passed."""
        self._expiry = None
        self.end(
            f"no server that has it could be reached within its recovery window of "
            f"{self.window:g} s"
        )

    def _stop_timers(self) -> None:
        for timer in (self._expiry, self._retry):
            if timer is not None:
                timer.cancel()
        self._expiry = self._retry = None

    # Proof

    def is_fresh(self) -> bool:
        """Return true if there is a proof that leaves most of the window."""
        return self.proofs.fresh(self._now())

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if threading.get_ident() == self._thread:
            self._renew()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._renew)
        if self._heartbeat is not None and not self.over:
            self._heartbeat.renew(self)

    def _renew(self) -> None:
        connection = self._connection
        if connection is not None and not self.over:
            number = self.proofs.send(self._now())
            acknowledged = self._operations.answered_up_to()
            connection.send(wire.Renew(self.channel, number, acknowledged))

    def _prove(self, at: float) -> None:
        self.proofs.note(at)
        if not self.closing:
            self.events.proven(at)

    def proven_by_thread(self, at: float) -> None:
        """Record a proof from the heartbeat thread."""
        if not self.over:
            self._prove(at)

    # The end

    async def close(self) -> None:
        """End the session."""
        await self._leave(wire.Close)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._leave(wire.Detach)

    async def _leave(self, how: type[wire.Close | wire.Detach]) -> None:
        """End or detach it; cancelling the caller does not stop that."""
        if self._leaving is None:
            if self.over:
                return
            rid = self._reconnector.next_rid()
            self._leaving = self._operations.call(rid, how(rid, self.channel)).future
            self.closing = True
            self._leaving.add_done_callback(self._left)
            self._watches.clear(self._connection)
        await asyncio.wait([self._leaving])
        self._leaving.result()

    def _left(self, _: asyncio.Future[object]) -> None:
        if not self.over:
            self._forget()

    def abandon(self, attaching: NativeCall | None) -> None:
        """Leave a session that could not be attached: close a new one, detach an existing one."""
        connection = self._connection or self._reconnector.connection
        unanswered = attaching is not None and not attaching.future.done()
        if attaching is not None and unanswered:
            attaching.future.cancel()
        self.closing = True
        if not self.over:
            self._forget()
        if attaching is None:
            return  # it was sent to no server
        if not self.is_resumed:
            self._reconnector.close_abandoned(attaching.message, self.channel, connection)
        elif connection is not None and (unanswered or self.begun):
            rid = self._reconnector.next_rid()
            message = wire.Detach(rid, self.channel)
            connection.submit(NativeCall(rid, message, self._loop.create_future()))

    def _end_by_server(self, error: BaseException) -> None:
        if not self.over:
            self._ended_by_server = True
            taken_over = isinstance(error, SessionExpired) and error.taken_over
            self._end(SessionExpired(str(error), node=self.path, taken_over=taken_over))

    def _forget(self) -> None:
        super()._forget()
        self._connection = None
        self._stop_timers()
        self._watches.clear(None)
        self._reconnector.sessions.pop(self.channel, None)
        self._operations.end(self.reason, by_server=self._ended_by_server)
        self.changed.set()

    # Messages from the server

    def receive(self, message: Struct) -> None:
        """Handle a message that is not an answer."""
        _RECEIVERS[type(message)](self, message)

    def granted(self, push: wire.Granted) -> None:
        """Report a grant."""
        if push.request_id in self._operations.requests and not self.closing:
            self._operations.requests[push.request_id] = OWNED
            self.events.granted(push.request_id, push.order_id)

    def removed(self, push: wire.Removed) -> None:
        """Report a removal."""
        removed = self._operations.requests.pop(push.request_id, None)
        if removed is not None and not self.closing:
            self.events.removed(push.request_id, removal(push.why, push.limit))

    def watched(self, push: wire.Changed) -> None:
        """Notify a watcher."""
        self._watches.changed(push.number)

    def watch_refused(self, push: wire.WatchRefused) -> None:
        """Poll, because the server has rejected a watch."""
        self._watches.refused(push)

    def proven(self, answer: wire.Proven) -> None:
        """Record the answer to a renewal."""
        at = self.proofs.answered(answer.number, answer.age)
        if at is not None:
            self._prove(at)
            self.changed.set()

    def contact(self, push: wire.Contact) -> None:
        """Report that the server has lost, or re-established, contact to its store."""
        self.is_store_lost = not push.there
        if self.closing:
            return
        if push.there:
            self.events.attached()
        else:
            self.events.detached(EngineUnavailable(STORE_LOST))

    def ended(self, push: wire.Ended) -> None:
        """End the session, as reported by the server."""
        self._end_by_server(from_wire(push.error))


_RECEIVERS: Mapping[type[Struct], Callable[[NativeAttachment, Any], None]] = {
    wire.Granted: NativeAttachment.granted,
    wire.Removed: NativeAttachment.removed,
    wire.Changed: NativeAttachment.watched,
    wire.WatchRefused: NativeAttachment.watch_refused,
    wire.Proven: NativeAttachment.proven,
    wire.Contact: NativeAttachment.contact,
    wire.Ended: NativeAttachment.ended,
}
