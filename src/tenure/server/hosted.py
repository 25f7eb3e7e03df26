"""A session of the store, kept for a remote holder, and what the store says of it.

States (`Hosted.state`)::

    ARRIVING ──► ATTACHED ◄──► LINKLESS          its holder's connection comes and goes
        │            │             │
        │            ├── Detach, Close ──► LEAVING ──► OVER
        └────────────┴─────────────┴── the store's word, or another program ──► OVER

Who owns what, and what happens:

* The store's session belongs to the `Hosted`, and the `Hosted` to the `Hosting` whose registry it
  is in. The connection (`Link`) owns nothing of it; it comes and goes.
* **Disconnect.** Nothing happens to the session but that its watches end (attaching begins without
  watches). Nobody renews it, so the store's window runs from the holder's last renewal.
* **Proof.** The store's session is renewed when its holder says `Renew`, and not otherwise. The
  answer waits for the store's proof, as long as that is worth anything: a third of the window. Its
  age is what it was when the renewal came: 0 when the server asked its store after that.
* **Once only.** The answer to what changes something is kept, by its rid, until the holder
  acknowledges it; what is sent again meanwhile gets the same answer. How many are kept is limited.
* **Order.** What the engine answers by a coroutine is begun in a task. What came behind it waits
  until that task has begun, so that the store hears of everything in the order in which it came.
* **Cancel.** A holder cannot cancel what it has asked for, and a lost connection does not either.
* **Deadline.** There are none here but the store's: a session ends when the store says so.
* **Close of the server.** The store's session is detached, and lives for its window.

All of it runs on the server's loop, but for `proven`, which may come from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from msgspec import Struct

from tenure.engines.contract import EngineSession, Enqueued, Place, Removal
from tenure.errors import SessionExpired, TenureError
from tenure.model import Recovered
from tenure.server.limits import Count, LimitReached
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
    Proven,
    RemovalWord,
    Removed,
    Unproven,
)
from tenure.wire.values import Found

if TYPE_CHECKING:
    from tenure.server.hosting import Hosting

__all__ = ["UNKNOWN", "Hosted", "Link", "Request", "State", "error_of"]

UNKNOWN = float("inf")
"""Of `Hosted.strangers_until`: it is not known who had the session before."""

_Handler: TypeAlias = "Callable[[Hosted, Any], None]"

_GONE = 128  # requests of one session of which it is remembered why they left
_RENEWALS = 16  # unanswered ones of one session; what is older gets no proof
_NEVER = float("-inf")

_REMOVAL_WORDS: dict[Removal, RemovalWord] = {
    Removal.TIMED_OUT: "timed out",
    Removal.DELETED: "deleted",
    Removal.EVICTED: "evicted",
    Removal.UNCONFIRMED: "unconfirmed",
    # Engines whose sessions end with a connection are not served.
    Removal.CUT_OFF: "evicted",
    Removal.LAPSED: "evicted",
}


class Link(Protocol):
    """The connection over which a holder is reached. None of this raises, blocks or awaits."""

    @property
    def program(self) -> bytes:
        """Whose connection it is."""
        ...

    def send(self, message: Struct) -> None:
        """Say something; nothing happens when the connection is lost."""

    def changed(self, channel: int, number: int) -> None:
        """Say `Changed`; once is enough until the holder has read it."""

    def over(self, channel: int) -> None:
        """The channel has no session any more, and may be forgotten."""

    async def room(self, size: int) -> None:
        """Return when an answer of so many bytes may be said.

        Raises:
            LimitReached: too many bytes of answers wait for that already.
        """

    def begun(self) -> None:
        """An operation that came over this connection could not be answered at once."""

    def finished(self) -> None:
        """It is answered, or will never be."""


class State(Enum):
    """Where a hosted session stands."""

    ARRIVING = "the store is asked for it"
    ATTACHED = "its holder is connected"
    LINKLESS = "its holder's connection is lost"
    LEAVING = "its holder has detached or closed it"
    OVER = "the store, or another program, has ended it"


class Request:
    """A request that the session has in a queue.

    Attributes:
        data: only of one that the store told of, until the holder has been told.
        placing: the rid of the enqueueing and the store's answer, while that is not there.
    """

    __slots__ = ("count", "data", "ephemeral", "granted", "name", "order_id", "placing")

    def __init__(self, name: str, count: int, ephemeral: bool) -> None:
        self.name = name
        self.count = count
        self.ephemeral = ephemeral
        self.data = b""
        self.order_id: int | None = None
        self.granted = False
        self.placing: tuple[int, asyncio.Future[Enqueued]] | None = None


class Hosted:
    """One attachment of a session, for one program.

    Attributes:
        program: whose it is (`Hello.program`).
        born: the rid of the `Attach` that began it, if it is new.
        node, window, key, resumable: as the program said.
        drawn: its client drew the key.
        store: the store's session, once there is one.
        link, channel: over which, and on which channel, the holder is connected.
        error: why it is over.
        proof: the latest time that the store's session is proven to have lived at.
        came_at: when its program came here from another server, or from this one's former life.
        former: those from whom it was taken over, and who may still believe that they have it.
        requests: what it has in queues, by its holds.
        removals: why holds have left their queues, as far as that is remembered.
        unanswered: the rids of operations that are under way.
        watches: what ends each, by its number.
        starting: something has been asked for that the engine will hear of in a moment.
        strangers_until: until when programs that attached it elsewhere may believe so.
    """

    __slots__ = (
        "_acknowledged",
        "_answers",
        "_backlog",
        "_disbelieves",
        "_last_rid",
        "_look",
        "_recovered",
        "_renewals",
        "_store_there",
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
        "program",
        "proof",
        "removals",
        "requests",
        "resumable",
        "starting",
        "state",
        "store",
        "strangers_until",
        "unanswered",
        "watches",
        "window",
    )

    store: EngineSession

    def __init__(
        self,
        hosting: Hosting,
        program: bytes,
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
        self.proof = _NEVER
        self.former: list[Hosted] = []
        self.strangers_until = UNKNOWN
        self.came_at = _NEVER
        self._disbelieves = True  # until it has been told that it is attached
        self._look: asyncio.Event | None = None
        self._store_there = True
        self.requests: dict[int, Request] = {}
        self._recovered = False
        self.removals: OrderedDict[int, RemovalWord] = OrderedDict()
        self._answers: dict[int, Struct] = {}
        self.unanswered: set[int] = set()
        self._acknowledged = 0
        self._last_rid = 0
        self.watches: dict[int, Callable[[], None]] = {}
        self._renewals: deque[tuple[Link, int, int, float]] = deque()
        self._backlog: deque[tuple[Link, Struct, _Handler]] = deque()
        self.starting = False

    # Coming and going of the holder

    def attach(self, link: Link, channel: int) -> None:
        """The holder is, or is again, at this connection; the caller tells it so first of all."""
        self.leave_link()
        self.link = link
        self.channel = channel
        self.state = State.ATTACHED
        self._disbelieves = False

    def leave_link(self) -> None:
        """The holder is not at its connection any more."""
        link, self.link = self.link, None
        if link is not None:
            link.over(self.channel)
            if self.state is State.ATTACHED:
                self.state = State.LINKLESS
        self._stop_watches()
        self._renewals.clear()

    def tell_of_store(self) -> None:
        """What the holder has to know beside that it is attached."""
        if not self._store_there:
            self.say(Contact(self.channel, False))

    def say(self, message: Struct) -> None:
        """Push something to the holder, if it can be reached."""
        if self.link is not None:
            self.link.send(message)

    def found(self) -> list[Found]:
        """What it has in queues, in the order of the order ids."""
        placed = [
            Found(
                hold,
                each.name,
                each.order_id or 0,
                each.count,
                each.data,
                each.ephemeral,
                each.granted,
            )
            for hold, each in self.requests.items()
            if each.placing is None
        ]
        placed.sort(key=lambda each: each.order_id)
        return placed

    def gone(self) -> list[tuple[int, RemovalWord]]:
        """Which requests have left their queues by others' doing, and why."""
        return list(self.removals.items())

    def age(self, asked: float) -> float | None:
        """How old the server's own proof was when it was asked; ``None`` if it is none now."""
        if self.hosting.context.clock.now() - self.proof > self.window / 3:
            return None
        return max(0.0, asked - self.proof)

    @property
    def shown_key(self) -> bytes:
        """Its key, as other programs have to show it: none, if its client drew it."""
        return b"" if self.drawn else self.key

    # Belief

    def believes_until(self) -> float:
        """Until when its program may believe that it has the session.

        Whatever it was told here of proof is no younger than `proof`, and what another server had
        told it before is no younger than its coming from there.
        """
        if self._disbelieves:
            return _NEVER
        return max(self.proof, self.came_at) + self.window

    def disbelieve(self) -> None:
        """Its program knows that it has the session no more."""
        self._disbelieves = True
        self.hosting.look()

    async def until_nobody_believes(self) -> None:
        """Keep the session alive until nobody else can believe that he has it.

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
                last = max(self.strangers_until, *believers, _NEVER)
                wait = last - clock.now()
                if wait <= 0:
                    self.former.clear()
                    return
                self.store.renew()
                await _wait(look, min(wait, self.window / 3))
        finally:
            self._look = None

    def look(self) -> None:
        """Somebody has ceased to believe."""
        if self._look is not None:
            self._look.set()

    # What the holder asks for

    def put_by(self, link: Link, message: Struct, handler: _Handler) -> None:
        """What the holder has sent while something is `starting` waits for its turn."""
        self._backlog.append((link, message, handler))
        link.begun()

    def go_on(self) -> None:
        """What was to begin has begun; the next."""
        self.starting = False
        while self._backlog and not self.starting:
            link, message, handler = self._backlog.popleft()
            link.finished()
            if link is self.link and self.error is None:
                handler(self, message)

    def is_new(self, rid: int) -> bool:
        """Whether an operation has not been seen yet. If it has, it is answered as it was."""
        if rid > self._last_rid:
            self._last_rid = rid
        else:
            answer = self._answers.get(rid)
            if answer is not None:
                self.say(answer)
                return False
            if rid in self.unanswered or rid <= self._acknowledged:
                return False
        if len(self._answers) + len(self.unanswered) >= self.hosting.limits.kept_answers:
            refusal = Count("kept_answers", self.hosting.limits.kept_answers, "this session")
            self.say(Failed(rid, to_wire(refusal.reached(node=self.node))))
            return False
        return True

    def answer(self, rid: int, answer: Struct) -> None:
        """Answer what changes something, and keep the answer until it is acknowledged."""
        self._answers[rid] = answer
        if self.link is not None:
            self.link.send(answer)

    def fail(self, rid: int, error: BaseException) -> None:
        """Answer that it has failed."""
        self.answer(rid, self.failed(rid, error))

    def failed(self, rid: int, error: BaseException) -> Failed:
        """The answer for what has failed; what the log should have is logged."""
        if not isinstance(error, TenureError):
            self.hosting.context.log(
                logging.ERROR, "the store failed", node=self.node, error=repr(error)
            )
        elif isinstance(error, LimitReached):
            self.hosting.context.log(
                logging.WARNING, "operation refused", node=self.node, limit=error.limit
            )
        return Failed(rid, to_wire(error if isinstance(error, Exception) else Exception()))

    def acknowledge(self, upto: int) -> None:
        """Forget the answers to what came up to that rid."""
        if upto > self._acknowledged:
            self._acknowledged = upto
            if self._answers:
                self._answers = {rid: answer for rid, answer in self._answers.items() if rid > upto}

    # Renewal

    def forget_what_was_found(self) -> None:
        """Its holder renews it, and so has been told of what was found in queues."""
        if self._recovered:
            self._recovered = False
            for request in self.requests.values():
                request.data = b""

    def renew(self, link: Link, channel: int, number: int) -> None:
        """Renew it, and say on that connection what that proves."""
        asked = self.hosting.context.clock.now()
        self.store.renew()
        if self.proof >= asked:
            link.send(Proven(channel, number, 0.0))
            return
        if len(self._renewals) >= _RENEWALS:
            self._give_up_renewal()
        self._renewals.append((link, channel, number, asked))
        self.hosting.unproven.add(self)

    def _answer_renewals(self) -> None:
        """There is a new proof."""
        if self.age(self.proof) is not None:
            for link, channel, number, asked in self._renewals:
                link.send(Proven(channel, number, max(0.0, asked - self.proof)))
            self._renewals.clear()
            self.hosting.unproven.discard(self)

    def give_up_renewals(self, now: float) -> None:
        """Say of those that have waited for too long that they have proven nothing."""
        while self._renewals and now - self._renewals[0][3] > self.window / 3:
            self._give_up_renewal()
        if not self._renewals:
            self.hosting.unproven.discard(self)

    def _give_up_renewal(self) -> None:
        link, channel, number, _ = self._renewals.popleft()
        link.send(Unproven(channel, number))

    # Requests

    def answer_placing(self, hold: int, request: Request, error: BaseException | None) -> None:
        """The store has answered the enqueueing."""
        assert request.placing is not None
        (rid, answer), request.placing = request.placing, None
        self.unanswered.discard(rid)
        if error is not None:
            self.drop(hold, request)
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
            self.drop(hold, request)
            self.answer(rid, Placed(rid, REFUSED, None))

    def _see_placed(self, hold: int, request: Request) -> None:
        """The answer precedes the push, also where its callback has not been called yet."""
        if request.placing is not None and request.placing[1].done():
            self.answer_placing(hold, request, error_of(request.placing[1]))

    def drop(self, hold: int, request: Request) -> None:
        """The request is in no queue, or will be in none."""
        if self.requests.get(hold) is request:
            del self.requests[hold]
            self.hosting.semaphores.leave(self.node, request.name)

    def _stop_watches(self) -> None:
        watches, self.watches = self.watches, {}
        for stop in watches.values():
            stop()

    # Leaving

    def leave(self, rid: int, *, closing: bool) -> None:
        """The holder closes or detaches it; it believes no more from now on."""
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
        """It is over here; `error` is why, if its holder does not know. Safe to call twice."""
        if self.state is State.OVER:
            return
        self.state = State.OVER
        self.error = error or SessionExpired(
            f"the session on {self.node} was closed or detached", node=self.node
        )
        self._stop_watches()
        for hold, request in list(self.requests.items()):
            self.drop(hold, request)
        self._answers.clear()
        self.unanswered.clear()
        self.removals.clear()
        while self._renewals:
            self._give_up_renewal()
        self.hosting.forget(self)
        if error is not None and self.link is not None:
            self.link.send(Ended(self.channel, to_wire(error)))
        self.look()

    # What the store says (`SessionEvents`)

    def proven(self, at: float) -> None:
        """The store's session lives. From any thread."""
        if threading.get_ident() == self.hosting.thread:
            self._note_proof(at)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody asks any more
                self.hosting.loop.call_soon_threadsafe(self._note_proof, at)

    def _note_proof(self, at: float) -> None:
        self.proof = max(self.proof, at)
        if self._renewals:
            self._answer_renewals()

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """What the session has in queues, now that it was taken over."""
        for each in requests:
            self.hosting.semaphores.rejoin(self.node, each.name, ephemeral=each.ephemeral)
            self.requests[each.hold] = request = Request(each.name, each.count, each.ephemeral)
            request.data = each.data
            request.order_id = each.order_id
            request.granted = each.granted
        self._recovered = True

    def granted(self, hold: int, order_id: int | None) -> None:
        """A waiting request is an owner now."""
        request = self.requests.get(hold)
        if request is None:
            return  # it is being withdrawn
        self._see_placed(hold, request)
        request.granted = True
        if order_id is not None:
            request.order_id = order_id
        self.say(Granted(self.channel, hold, order_id))

    def removed(self, hold: int, why: Removal) -> None:
        """A request has left its queue by somebody else's doing."""
        request = self.requests.get(hold)
        if request is None:
            return
        self._see_placed(hold, request)
        self.drop(hold, request)
        word = _REMOVAL_WORDS[why]
        self.removals[hold] = word
        if len(self.removals) > _GONE:
            self.removals.popitem(last=False)
        self.say(Removed(self.channel, hold, word))

    def detached(self) -> None:
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


def error_of(answer: asyncio.Future[Any]) -> BaseException | None:
    """What a future of the engine's has failed with, a cancellation included."""
    if answer.cancelled():
        return asyncio.CancelledError()
    return answer.exception()
