"""Session of the store that the server keeps for a remote holder, with its events.

States (`Hosted.state`)::

    ARRIVING ──► ATTACHED ◄──► LINKLESS          its holder's connection comes and goes
        │            │             │
        │            ├── Detach, Close ──► LEAVING ──► OVER
        └────────────┴─────────────┴── the store's word, or another program ──► OVER

Who owns what, and what happens:

* The store's session belongs to the `Hosted`, and the `Hosted` to the `Hosting` whose registry it
  is in. The connection (`Link`) owns nothing of it; it comes and goes.
* **Disconnect.** Nothing happens to the session but that its watches end (attaching begins without
  watches). It is not renewed, so the store's window runs from the holder's last renewal.
* **Proof.** The store's session is renewed when its holder says `Renew`, and not otherwise.
* **Once only.** What changes something is done once, and its answer kept (`Answers`).
* **Order.** What the engine answers by a coroutine is begun in a task. Later messages wait until
  that task has begun, so that the store gets everything in the order in which it came; except that
  a costly read may have to wait for its turn (`tenure.server.reads`).
* **Cancel.** A holder cannot cancel its operations, and a lost connection does not either.
* **Deadline.** There are none here but the store's: a session ends when the store says so.
* **Close of the server.** The store's session is detached, and lives for its window.

All of it runs on the server's loop, but for `proven`, which may come from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from tenure.engines.contract import EngineSession, Enqueued, Place, Removal
from tenure.errors import SessionExpired, TenureError
from tenure.model import Recovered
from tenure.server.auth.accounts import Account
from tenure.server.limits import LimitReached
from tenure.server.sessions.answers import Answers
from tenure.server.sessions.connection import Link
from tenure.server.sessions.renewals import NEVER, Renewals
from tenure.server.sessions.requests import Places, Request, error_of
from tenure.wire.errors import to_wire
from tenure.wire.messages import (
    GRANTED,
    REFUSED,
    WAITING,
    Contact,
    Done,
    Ended,
    Failed,
    Granted,
    Placed,
    Removed,
)

if TYPE_CHECKING:
    from tenure.server.sessions.registry import Hosting

__all__ = ["UNKNOWN", "Hosted", "State"]

UNKNOWN = float("inf")
"""Value of `Hosted.strangers_until` while the former holder of the session is not known."""

_Handler: TypeAlias = "Callable[[Hosted, Any], None]"


class State(Enum):
    """Stage of a hosted session."""

    ARRIVING = "the store is asked for it"
    ATTACHED = "its holder is connected"
    LINKLESS = "its holder's connection is lost"
    LEAVING = "its holder has detached or closed it"
    OVER = "the store, or another program, has ended it"


class Hosted:
    """One attachment of a session, for one program.

    Attributes:
        program: whose it is (`Hello.program`).
        account: of the identity that attached it.
        born: the rid of the `Attach` that began it, if it is new.
        node, window, key, resumable: as the program said.
        drawn: its client drew the key.
        store: the store's session, once there is one.
        link, channel: over which, and on which channel, the holder is connected.
        error: why it is over.
        renewals: its holder's renewals, and the latest proof.
        came_at: when its program came here from another server, or from this one's former life.
        former: attachments from which it was taken over, whose programs may still believe that
            they have it.
        places: what it has in queues.
        answers: those that are kept for it, and what is not answered yet.
        watches: what ends each, by its number.
        starting: an operation has been requested that the engine will get in a moment.
        strangers_until: time until which programs that attached it elsewhere may believe that they
            have it.
    """

    __slots__ = (
        "_backlog",
        "_disbelieves",
        "_look",
        "_store_there",
        "account",
        "answers",
        "born",
        "came_at",
        "channel",
        "drawn",
        "error",
        "former",
        "hosting",
        "key",
        "link",
        "node",
        "places",
        "program",
        "renewals",
        "resumable",
        "starting",
        "state",
        "store",
        "strangers_until",
        "watches",
        "window",
    )

    store: EngineSession

    def __init__(
        self,
        hosting: Hosting,
        program: bytes,
        account: Account,
        *,
        born: int,
        node: str,
        window: float,
        key: bytes,
        resumable: bool,
        drawn: bool,
    ) -> None:
        self.hosting = hosting
        self.program = program
        self.account = account
        self.born = born
        self.node = node
        self.window = window
        self.key = key
        self.resumable = resumable
        self.drawn = drawn
        self.state = State.ARRIVING
        self.link: Link | None = None
        self.channel = 0
        self.error: SessionExpired | None = None
        self.former: list[Hosted] = []
        self.strangers_until = UNKNOWN
        self.came_at = NEVER
        self._disbelieves = True  # until its program gets the answer that it is attached
        self._look: asyncio.Event | None = None
        self._store_there = True
        self.places = Places(node, hosting.semaphores, account)
        self.answers = Answers(node, hosting.limits.kept_answers)
        self.watches: dict[int, Callable[[], None]] = {}
        self.renewals = Renewals(hosting.context.clock, window, hosting.unproven)
        self._backlog: deque[tuple[Link, Struct, _Handler]] = deque()
        self.starting = False

    # Coming and going of the holder

    def attach(self, link: Link, channel: int) -> None:
        """Connect it with its holder's connection; the caller sends the answer first of all."""
        self.leave_link()
        self.link = link
        self.channel = channel
        self.state = State.ATTACHED
        self._disbelieves = False

    def leave_link(self) -> None:
        """Disconnect it from its holder's connection, if it has one."""
        link, self.link = self.link, None
        if link is not None:
            link.over(self.channel)
            if self.state is State.ATTACHED:
                self.state = State.LINKLESS
        self._stop_watches()
        self.renewals.forget()

    def tell_of_store(self) -> None:
        """Notify the holder, beside its attachment, if the store cannot be reached."""
        if not self._store_there:
            self.say(Contact(self.channel, False))

    def say(self, message: Struct) -> None:
        """Push something to the holder, if it can be reached."""
        if self.link is not None:
            self.link.send(message)

    @property
    def shown_key(self) -> bytes:
        """Key that other programs have to show; empty if its client drew it."""
        return b"" if self.drawn else self.key

    # Belief

    def believes_until(self) -> float:
        """Return the time until which its program may believe that it has the session.

        Proof that it got here is no younger than `Renewals.proof`. Proof that it got from another
        server before is no younger than its arrival from there.
        """
        if self._disbelieves:
            return NEVER
        return max(self.renewals.proof, self.came_at) + self.window

    def disbelieve(self) -> None:
        """Note that its program knows that it has lost the session."""
        self._disbelieves = True
        self.hosting.look()

    async def until_nobody_believes(self) -> None:
        """Keep the session alive until no other program can believe that it has the session.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over once more.
        """
        clock = self.hosting.context.clock
        self._look = look = asyncio.Event()
        try:
            while True:
                if self.error is not None:
                    raise self.error
                look.clear()
                believers = (each.believes_until() for each in self.former)
                last = max(self.strangers_until, *believers, NEVER)
                wait = last - clock.now()
                if wait <= 0:
                    self.former.clear()
                    return
                self.store.renew()
                await _wait(look, min(wait, self.window / 3))
        finally:
            self._look = None

    def look(self) -> None:
        """Check again which programs may believe that they have the session."""
        if self._look is not None:
            self._look.set()

    # Operations of the holder

    def put_by(self, link: Link, message: Struct, handler: _Handler) -> None:
        """Put a message behind the operation that is `starting`."""
        self._backlog.append((link, message, handler))
        link.begun()

    def go_on(self) -> None:
        """Handle the messages that were put behind the operation that has started."""
        self.starting = False
        while self._backlog and not self.starting:
            link, message, handler = self._backlog.popleft()
            link.finished()
            if link is self.link and self.error is None:
                handler(self, message)

    def answer(self, rid: int, answer: Struct) -> None:
        """Answer an operation that changes something; keep the answer until it is acknowledged."""
        self.answers.kept[rid] = answer
        if self.link is not None:
            self.link.send(answer)

    def fail(self, rid: int, error: BaseException) -> None:
        """Answer that an operation has failed."""
        self.answer(rid, self.failed(rid, error))

    def failed(self, rid: int, error: BaseException) -> Failed:
        """Return the answer for an operation that has failed, and log what the log should have."""
        if not isinstance(error, TenureError):
            self.hosting.context.log(
                logging.ERROR, "the store failed", node=self.node, error=repr(error)
            )
        elif isinstance(error, LimitReached):
            self.hosting.context.log(
                logging.WARNING, "operation refused", node=self.node, limit=error.limit
            )
        return Failed(rid, to_wire(error if isinstance(error, Exception) else Exception()))

    # Requests

    def answer_placing(self, hold: int, request: Request, error: BaseException | None) -> None:
        """Answer the enqueueing of a request: the store has answered it."""
        rid, answer = request.see_answer()
        self.answers.unanswered.discard(rid)
        if error is not None:
            self.places.drop(hold, request)
            self.fail(rid, error)
        else:
            self.place(rid, hold, request, answer.result())

    def place(self, rid: int, hold: int, request: Request, answer: Enqueued) -> None:
        """Answer where the request stands."""
        place, order_id = answer
        if place is Place.GRANTED:
            request.granted = True
            request.order_id = order_id
            self.answer(rid, Placed(rid, GRANTED, order_id))
        elif place is Place.WAITING:
            request.order_id = order_id
            self.answer(rid, Placed(rid, WAITING, order_id))
        else:
            self.places.drop(hold, request)
            self.answer(rid, Placed(rid, REFUSED, None))

    def _see_placed(self, hold: int, request: Request) -> None:
        """Send the answer before the push, even if its callback has not been called yet."""
        if request.placing is not None and request.placing[1].done():
            self.answer_placing(hold, request, error_of(request.placing[1]))

    def _stop_watches(self) -> None:
        watches, self.watches = self.watches, {}
        for stop in watches.values():
            stop()

    # Leaving

    def leave(self, rid: int, *, closing: bool) -> None:
        """Close or detach it for its holder, which considers nothing held from now on."""
        link = self.link
        assert link is not None
        self.state = State.LEAVING
        self.leave_link()
        self.disbelieve()
        link.begun()
        work = self.store.close if closing else self.store.detach
        self.hosting.start(self._see_off(link, rid, work))

    async def _see_off(
        self, link: Link, rid: int, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        answer: Struct
        try:
            await work()
            answer = Done(rid)
        except Exception as error:
            answer = self.failed(rid, error)
        finally:
            link.finished()
            self.end(None)
        link.send(answer)

    def end(self, error: SessionExpired | None) -> None:
        """End it here; `error` is the reason, if its holder does not know. Safe to call twice."""
        if self.state is State.OVER:
            return
        self.state = State.OVER
        self.error = error or SessionExpired(
            f"the session on {self.node} was closed or detached", node=self.node
        )
        self._stop_watches()
        self.places.clear()
        self.answers.clear()
        self.renewals.give_up()
        self.hosting.forget(self)
        if error is not None and self.link is not None:
            self.link.send(Ended(self.channel, to_wire(error)))
        self.look()

    # Events of the store (`SessionEvents`)

    def proven(self, at: float) -> None:
        """Take a proof that the store's session lives. From any thread."""
        if threading.get_ident() == self.hosting.thread:
            self.renewals.prove(at)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no renewal waits
                self.hosting.loop.call_soon_threadsafe(self.renewals.prove, at)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Take the requests that the session has in queues after a takeover."""
        self.places.recover(requests)

    def granted(self, hold: int, order_id: int | None) -> None:
        """Notify the holder that a waiting request is an owner now."""
        request = self.places.requests.get(hold)
        if request is None:
            return  # it is being withdrawn
        self._see_placed(hold, request)
        request.granted = True
        if order_id is not None:
            request.order_id = order_id
        self.say(Granted(self.channel, hold, order_id))

    def removed(self, hold: int, why: Removal) -> None:
        """Notify the holder of a request that was taken out of its queue."""
        request = self.places.requests.get(hold)
        if request is None:
            return
        self._see_placed(hold, request)
        self.say(Removed(self.channel, hold, self.places.remove(hold, request, why)))

    def detached(self, cause: BaseException | None = None) -> None:  # noqa: ARG002
        """The contact to the store is broken."""
        self._store_there = False
        self.say(Contact(self.channel, False))

    def attached(self) -> None:
        """The contact to the store is back."""
        self._store_there = True
        self.say(Contact(self.channel, True))

    def ended(self, error: SessionExpired) -> None:
        """The session is over, by the store's word."""
        self.end(error)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, or so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
