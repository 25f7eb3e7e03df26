"""One session, over whatever connection there is.

States::

    beginning --> attached <--> away        the connection is lost, and it is attached again
                     |           |
                     +-----------+--> over  closed, detached, ended by the server's word, or away
                                            until no program can believe any more that it lives

Rules:

* Only these end it: the program, the word of the server that it is over, or has been taken over,
  or has another key, and the end of its window. Whatever else a server refuses it with is a
  reason to try again, there or elsewhere.
* What was not answered when the connection was lost is asked again over the next one, under the
  same number (`reconcile` says what need not be), before anything new.
* Once the program has closed it or left it, the program gets no more events of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from functools import partial
from math import inf

from tenure.core import rules
from tenure.engines.contract import Attach, SessionDefaults, SessionEvents
from tenure.engines.native.asking import Asking
from tenure.engines.native.calls import Call, ConnectionGone
from tenure.engines.native.connection import Connection
from tenure.engines.native.heartbeat import NativeHeartbeat, Proofs
from tenure.engines.native.link import Link
from tenure.engines.native.operations import Operations
from tenure.engines.native.reconcile import OWNED, REMOVALS
from tenure.engines.native.watches import Watches
from tenure.errors import AuthenticationFailed, EngineUnavailable, SessionExpired
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire

__all__ = ["STORE_LOST", "NativeSession"]

STORE_LOST = "the server has lost contact to its store"


class NativeSession(Asking, SessionDefaults):
    """The `EngineSession` of a tenure server.

    Attributes:
        id, attach_number: as the store has them.
        window: its recovery window, in seconds.
        channel: where it is on every connection.
        begun: it has been attached once.
        why_over: why it is over, by the server's word or the clock; else ``None``.
        proofs: what is known of its life.
        look: set when something has happened that its beginning waits for.
        is_store_lost: the server has no contact to its own store.
    """

    def __init__(
        self, link: Link, heartbeat: NativeHeartbeat | None, how: Attach, events: SessionEvents
    ) -> None:
        """Start unattached, with a channel of its own."""
        self.id = 0
        self.attach_number = 0
        self.window = float(how.recovery_window)
        self.channel = link.next_channel()
        self.node = how.node
        # Without a key any client could attach it; one that is to be resumed has its own.
        self._drawn = how.liveness == "process" and how.session_id is None and not how.key
        self.key = os.urandom(rules.ATTACH_KEY_BYTES) if self._drawn else how.key
        self.begun = False
        self.why_over: SessionExpired | None = None
        self.proofs = Proofs(self.window)
        self.look = asyncio.Event()
        self.is_store_lost = False
        self._how = how
        self._events = events
        self._link = link
        self._heartbeat = heartbeat
        self._loop = link.loop
        self._thread = threading.get_ident()
        self._now = link.clock.now
        self._over = False
        self._connection: Connection | None = None  # while it is attached over it
        self._attach_sent = 0.0
        self._operations = Operations(self.channel, link)
        self._watches = Watches(self.channel)
        self._leaving: asyncio.Future[object] | None = None
        self._window_ends: asyncio.TimerHandle | None = None
        self._until = inf  # when that is
        self._retry: asyncio.TimerHandle | None = None
        self._refusals = 0

    # Attaching

    @property
    def is_resumed(self) -> bool:
        """True if it existed before, and is taken over."""
        return self._how.session_id is not None

    def ask_to_attach(self, rid: int, connection: Connection) -> Call:
        """Send an `Attach`, the first one or another."""
        how = self._how
        kind: wire.AttachKind = "new" if how.session_id is None else "resume"
        message = wire.Attach(
            rid,
            self.channel,
            "again" if self.begun else kind,
            self.node,
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
        call = Call(rid, message, self._loop.create_future())
        connection.submit(call)
        return call

    def attached(self, answer: wire.Attached, connection: Connection) -> None:
        """The server has attached it, for the first time or again."""
        self.id, self.attach_number = answer.session_id, answer.attach_number
        self._connection = connection
        self.is_store_lost = False  # or else the server says so again
        self._refusals = 0
        self._stop_timers()
        if self.begun:
            self._go_on(answer, connection)
        else:
            self.begun = True
            self._operations.go_on(connection)
            if self._how.session_id is not None:
                for each in answer.requests:
                    self._operations.holds[each.request_id] = OWNED if each.granted else inf
                self._events.resumed([each.model() for each in answer.requests])
        if answer.age is not None:
            self._prove(self._attach_sent - answer.age)
        self.look.set()

    def _go_on(self, answer: wire.Attached, connection: Connection) -> None:
        """It is attached again: find out what became of everything, and ask again what is open."""
        plan = self._operations.reattached(connection, answer)
        if self._leaving is not None:
            return
        for found in plan.granted:
            self._events.granted(found.request_id, found.order_id)
        for request_id, why in plan.removed:
            self._events.removed(request_id, why)
        self._events.attached()
        self._watches.begin_anew(connection)

    def cut_off(self) -> None:
        """The connection is lost."""
        if not self.begun:
            return
        was_attached, self._connection = self._connection is not None, None
        self._operations.cut_off()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._window_ends is None:
            now = self._now()
            self._until = (now if self.proofs.last is None else self.proofs.last) + self.window
            left = max(0.0, self._until - now)
            self._window_ends = self._loop.call_later(left, self._give_up)
        if was_attached and self._leaving is None:
            self._events.detached(self._link.failure)

    def reattach(self, connection: Connection) -> None:
        """Reattach it on a new connection, unless it is over.

        Once its window has passed another program may have resumed it, and attaching would take it
        from that one. The timer of the window may be late, or may not count a suspension.
        """
        self._retry = None
        if self._window_ends is not None and self._now() >= self._until:
            self._stop_timers()
            self._give_up()
        elif self.begun:
            call = self.ask_to_attach(self._link.next_rid(), connection)
            call.future.add_done_callback(partial(self._reattached, connection))

    def _reattached(self, connection: Connection, answer: asyncio.Future[object]) -> None:
        error = answer.exception()
        if error is None or self._over or connection is not self._link.connection:
            return
        if isinstance(error, SessionExpired | AuthenticationFailed):
            self._end(_of(error, self.node), by_server=True)
        elif isinstance(error, ConnectionGone):
            return
        elif self._link.several:
            self._link.elsewhere(connection, f"it cannot attach a session again: {error}")
        else:
            pause = self._link.pause(self._refusals)
            self._refusals += 1
            self._retry = self._loop.call_later(pause, self.reattach, connection)

    def _give_up(self) -> None:
        """Expire it: its window has passed."""
        self._window_ends = None
        self._end(
            SessionExpired(
                f"the session on {self.node} is over: no server that has it could be reached "
                f"within its window of {self.window:g} s",
                node=self.node,
            )
        )

    def _stop_timers(self) -> None:
        for timer in (self._window_ends, self._retry):
            if timer is not None:
                timer.cancel()
        self._window_ends = self._retry = None

    # Proof

    def is_fresh(self) -> bool:
        """True if there is a proof that leaves most of the window."""
        return self.proofs.fresh(self._now())

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if threading.get_ident() == self._thread:
            self._renew()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._renew)
        if self._heartbeat is not None and not self._over:
            self._heartbeat.renew(self)

    def _renew(self) -> None:
        connection = self._connection
        if connection is not None and not self._over:
            number = self.proofs.send(self._now())
            acknowledged = self._operations.answered_up_to()
            connection.send(wire.Renew(self.channel, number, acknowledged))

    def _prove(self, at: float) -> None:
        self.proofs.note(at)
        if self._leaving is None:
            self._events.proven(at)

    def proven_aside(self, at: float) -> None:
        """Note a proof that came on the heartbeat thread."""
        if not self._over:
            self._prove(at)

    # The end

    async def close(self) -> None:
        """End the session."""
        await self._leave(wire.Close)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._leave(wire.Detach)

    async def _leave(self, how: type[wire.Close | wire.Detach]) -> None:
        """End or detach it; a cancelled caller does not stop that."""
        if self._leaving is None:
            if self._over:
                return
            self._leaving = self._ask(how).future
            self._leaving.add_done_callback(self._left)
            self._watches.clear(self._connection)
        await asyncio.wait([self._leaving])
        self._leaving.result()

    def _left(self, _: asyncio.Future[object]) -> None:
        self._finish(None)

    def abandon(self, attaching: Call | None) -> None:
        """Its beginning failed or was cancelled: a new one is closed, one taken over is left."""
        connection = self._connection or self._link.connection
        unanswered = attaching is not None and not attaching.future.done()
        if attaching is not None and unanswered:
            attaching.future.cancel()
        self._leaving = self._loop.create_future()  # no event is delivered any more
        self._finish(None)
        if attaching is None:
            return  # it was sent to no server
        if not self.is_resumed:
            self._link.disown(attaching.message, self.channel, connection)
        elif connection is not None and (unanswered or self.begun):
            rid = self._link.next_rid()
            message = wire.Detach(rid, self.channel)
            connection.submit(Call(rid, message, self._loop.create_future()))

    def stop(self) -> None:
        """The engine is closed, though the server may not know that this session is."""
        self._finish(None)

    def ended(self, push: wire.Ended) -> None:
        """The server says that it is over."""
        self._end(_of(from_wire(push.error), self.node), by_server=True)

    def _end(self, why: SessionExpired, *, by_server: bool = False) -> None:
        if not self._over:
            silent = self._leaving is not None or not self.begun
            self._finish(why, by_server=by_server)
            if not silent:
                self._events.ended(why)

    def _finish(self, why: SessionExpired | None, *, by_server: bool = False) -> None:
        """It is over. Safe to call twice."""
        if self._over:
            return
        self._over = True
        self.why_over = why
        self._connection = None
        self._stop_timers()
        self._watches.clear(None)
        self._link.sessions.pop(self.channel, None)
        self._operations.end(self._expired(), by_server=by_server)
        self.look.set()

    def _expired(self) -> SessionExpired:
        if self.why_over is not None:
            return _of(self.why_over, self.node)
        return SessionExpired(f"the session on {self.node} is over", node=self.node)

    # What the server says

    def granted(self, push: wire.Granted) -> None:
        """A request is an owner now."""
        if push.request_id in self._operations.holds and self._leaving is None:
            self._operations.holds[push.request_id] = OWNED
            self._events.granted(push.request_id, push.order_id)

    def removed(self, push: wire.Removed) -> None:
        """A request has left its queue."""
        if self._operations.holds.pop(push.request_id, None) is not None and self._leaving is None:
            self._events.removed(push.request_id, REMOVALS[push.why])

    def changed(self, push: wire.Changed) -> None:
        """Something that is watched has changed."""
        self._watches.changed(push.number)

    def watch_refused(self, push: wire.WatchRefused) -> None:
        """A watch must do without the server."""
        self._watches.refused(push)

    def proven(self, answer: wire.Proven) -> None:
        """A renewal was answered."""
        at = self.proofs.answered(answer.number, answer.age)
        if at is not None:
            self._prove(at)
            self.look.set()

    def contact(self, push: wire.Contact) -> None:
        """The server has lost, or found, the contact to its store."""
        self.is_store_lost = not push.there
        if self._leaving is None:
            if push.there:
                self._events.attached()
            else:
                self._events.detached(EngineUnavailable(STORE_LOST))


def _of(error: Exception, node: str) -> SessionExpired:
    """Return the end of a session from the server's error: a new object for each recipient."""
    taken_over = isinstance(error, SessionExpired) and error.taken_over
    return SessionExpired(str(error), node=node, taken_over=taken_over)
