"""A session of the store, kept for a remote holder: what the holder asks for, what the store says.

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
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from tenure.engines.contract import EngineSession, Enqueued, Place, Removal
from tenure.errors import InvalidArgument, SessionExpired, TenureError
from tenure.model import UNCHANGED, Recovered
from tenure.server.limits import Count, LimitReached
from tenure.server.native_operations import check_size
from tenure.wire.errors import to_wire
from tenure.wire.messages import (
    GRANTED,
    REFUSED,
    WAITING,
    Acknowledge,
    Alter,
    Close,
    Contact,
    CreateSemaphore,
    DeleteSemaphore,
    DescribeSemaphore,
    Detach,
    Done,
    Ended,
    Enqueue,
    Failed,
    Granted,
    Placed,
    Proven,
    RemovalWord,
    Removed,
    Renew,
    SemaphoreDescribed,
    Unproven,
    Unwatch,
    UpdateSemaphore,
    Watch,
    WatchRefused,
    Withdraw,
)
from tenure.wire.values import Found, SemaphoreInfo

if TYPE_CHECKING:
    from tenure.server.hosting import Hosting

__all__ = ["SESSION_HANDLERS", "UNKNOWN", "Hosted", "Link", "State"]

UNKNOWN = float("inf")
"""Of `Hosted.strangers_until`: it is not known who had the session before."""

T = TypeVar("T")

_Work: TypeAlias = Callable[[], Coroutine[Any, Any, T]]

_GONE = 128  # requests of one session of which it is remembered why they left
_RENEWALS = 16  # unanswered ones of one session; what is older gets no proof
_NEVER = float("-inf")

_REMOVAL_WORDS: dict[Removal, RemovalWord] = {
    Removal.TIMED_OUT: "timed out",
    Removal.DELETED: "deleted",
    Removal.EVICTED: "evicted",
    Removal.UNCONFIRMED: "unconfirmed",
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
        starting: something has been asked for that the engine will hear of in a moment.
        strangers_until: until when programs that attached it elsewhere may believe so.
    """

    __slots__ = (
        "_acknowledged",
        "_answers",
        "_backlog",
        "_disbelieves",
        "_gone",
        "_hosting",
        "_last_rid",
        "_look",
        "_recovered",
        "_renewals",
        "_requests",
        "_store_there",
        "_unanswered",
        "_watches",
        "born",
        "came_at",
        "channel",
        "drawn",
        "error",
        "former",
        "key",
        "link",
        "node",
        "program",
        "proof",
        "resumable",
        "starting",
        "state",
        "store",
        "strangers_until",
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
        self._hosting = hosting
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
        self._requests: dict[int, Request] = {}
        self._recovered = False
        self._gone: OrderedDict[int, RemovalWord] = OrderedDict()
        self._answers: dict[int, Struct] = {}
        self._unanswered: set[int] = set()
        self._acknowledged = 0
        self._last_rid = 0
        self._watches: dict[int, Callable[[], None]] = {}
        self._renewals: deque[tuple[Link, int, int, float]] = deque()
        self._backlog: deque[tuple[Link, Struct]] = deque()
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
            for hold, each in self._requests.items()
            if each.placing is None
        ]
        placed.sort(key=lambda each: each.order_id)
        return placed

    def gone(self) -> list[tuple[int, RemovalWord]]:
        """Which requests have left their queues by others' doing, and why."""
        return list(self._gone.items())

    def age(self, asked: float) -> float | None:
        """How old the server's own proof was when it was asked; ``None`` if it is none now."""
        if self._hosting.context.clock.now() - self.proof > self.window / 3:
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
        self._hosting.look()

    async def until_nobody_believes(self) -> None:
        """Keep the session alive until nobody else can believe that he has it.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over once more.
        """
        clock = self._hosting.context.clock
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

    def put_by(self, link: Link, message: Struct) -> None:
        """What the holder has sent while something is `starting` waits for its turn."""
        self._backlog.append((link, message))
        link.begun()

    def _go_on(self) -> None:
        """What was to begin has begun; the next."""
        self.starting = False
        while self._backlog and not self.starting:
            link, message = self._backlog.popleft()
            link.finished()
            if link is self.link and self.error is None:
                SESSION_HANDLERS[type(message)](self, message)

    def _is_new(self, rid: int) -> bool:
        """Whether an operation has not been seen yet. If it has, it is answered as it was."""
        if rid > self._last_rid:
            self._last_rid = rid
        else:
            answer = self._answers.get(rid)
            if answer is not None:
                self.say(answer)
                return False
            if rid in self._unanswered or rid <= self._acknowledged:
                return False
        if len(self._answers) + len(self._unanswered) >= self._hosting.limits.kept_answers:
            refusal = Count("kept_answers", self._hosting.limits.kept_answers, "this session")
            self.say(Failed(rid, to_wire(refusal.reached(node=self.node))))
            return False
        return True

    def _answer(self, rid: int, answer: Struct) -> None:
        self._answers[rid] = answer
        if self.link is not None:
            self.link.send(answer)

    def _fail(self, rid: int, error: BaseException) -> None:
        self._answer(rid, self._failed(rid, error))

    def _failed(self, rid: int, error: BaseException) -> Failed:
        if not isinstance(error, TenureError):
            self._hosting.context.log(
                logging.ERROR, "the store failed", node=self.node, error=repr(error)
            )
        elif isinstance(error, LimitReached):
            self._hosting.context.log(
                logging.WARNING, "operation refused", node=self.node, limit=error.limit
            )
        return Failed(rid, to_wire(error if isinstance(error, Exception) else Exception()))

    def acknowledge(self, upto: int) -> None:
        """Forget the answers to what came up to that rid."""
        if upto > self._acknowledged:
            self._acknowledged = upto
            if self._answers:
                self._answers = {rid: answer for rid, answer in self._answers.items() if rid > upto}

    def _on_acknowledge(self, message: Acknowledge) -> None:
        self.acknowledge(message.acknowledged)

    # Renewal

    def _on_renew(self, message: Renew) -> None:
        self.acknowledge(message.acknowledged)
        if self._recovered:  # its holder has been told of the data
            self._recovered = False
            for request in self._requests.values():
                request.data = b""
        assert self.link is not None
        self.renew(self.link, self.channel, message.number)

    def renew(self, link: Link, channel: int, number: int) -> None:
        """Renew it, and say on that connection what that proves."""
        asked = self._hosting.context.clock.now()
        self.store.renew()
        if self.proof >= asked:
            link.send(Proven(channel, number, 0.0))
            return
        if len(self._renewals) >= _RENEWALS:
            self._give_up_renewal()
        self._renewals.append((link, channel, number, asked))
        self._hosting.unproven.add(self)

    def _answer_renewals(self) -> None:
        """There is a new proof."""
        if self.age(self.proof) is not None:
            for link, channel, number, asked in self._renewals:
                link.send(Proven(channel, number, max(0.0, asked - self.proof)))
            self._renewals.clear()
            self._hosting.unproven.discard(self)

    def give_up_renewals(self, now: float) -> None:
        """Say of those that have waited for too long that they have proven nothing."""
        while self._renewals and now - self._renewals[0][3] > self.window / 3:
            self._give_up_renewal()
        if not self._renewals:
            self._hosting.unproven.discard(self)

    def _give_up_renewal(self) -> None:
        link, channel, number, _ = self._renewals.popleft()
        link.send(Unproven(channel, number))

    # Requests

    def _on_enqueue(self, message: Enqueue) -> None:
        rid, hold, name = message.rid, message.hold, message.name
        if not self._is_new(rid):
            return
        hosting, requests = self._hosting, self._requests
        try:
            self._check_data(message.data, name)
            if hold in requests:
                raise InvalidArgument(
                    f"hold {hold} of this session on {self.node} is in a queue already",
                    node=self.node,
                    name=name,
                )
            if len(requests) >= hosting.limits.requests_per_session:
                most = hosting.limits.requests_per_session
                count = Count("requests_per_session", most, "this session")
                raise count.reached(node=self.node, name=name)
            hosting.semaphores.join(self.node, name, ephemeral=message.ephemeral)
        except TenureError as error:
            self._fail(rid, error)
            return
        requests[hold] = request = Request(name, message.count, message.ephemeral)
        try:
            answer = self.store.enqueue(
                hold,
                name,
                message.count,
                message.data,
                timeout=message.timeout,
                ephemeral=message.ephemeral,
            )
        except Exception as error:
            self._drop(hold, request)
            self._fail(rid, error)
            return
        if isinstance(answer, asyncio.Future):
            request.placing = rid, answer
            self._unanswered.add(rid)
            assert self.link is not None
            self.link.begun()
            answer.add_done_callback(partial(self._when_placed, self.link, hold, request))
        else:
            self._place(rid, hold, request, answer)

    def _when_placed(
        self, link: Link, hold: int, request: Request, answer: asyncio.Future[Enqueued]
    ) -> None:
        link.finished()
        error = _error_of(answer)
        if request.placing is not None and self.error is None:
            self._answer_placing(hold, request, error)

    def _answer_placing(self, hold: int, request: Request, error: BaseException | None) -> None:
        """The store has answered the enqueueing."""
        assert request.placing is not None
        (rid, answer), request.placing = request.placing, None
        self._unanswered.discard(rid)
        if error is not None:
            self._drop(hold, request)
            self._fail(rid, error)
        else:
            self._place(rid, hold, request, answer.result())

    def _place(self, rid: int, hold: int, request: Request, answer: Enqueued) -> None:
        place, order_id = answer
        if place is Place.GRANTED:
            request.granted = True
            request.order_id = order_id
            self._answer(rid, Placed(rid, GRANTED, order_id))
        elif place is Place.WAITING:
            request.order_id = order_id
            self._answer(rid, Placed(rid, WAITING, order_id))
        else:
            self._drop(hold, request)
            self._answer(rid, Placed(rid, REFUSED, None))

    def _see_placed(self, hold: int, request: Request) -> None:
        """The answer precedes the push, also where its callback has not been called yet."""
        if request.placing is not None and request.placing[1].done():
            self._answer_placing(hold, request, _error_of(request.placing[1]))

    def _drop(self, hold: int, request: Request) -> None:
        """The request is in no queue, or will be in none."""
        if self._requests.get(hold) is request:
            del self._requests[hold]
            self._hosting.semaphores.leave(self.node, request.name)

    def _on_withdraw(self, message: Withdraw) -> None:
        rid, hold = message.rid, message.hold
        if not self._is_new(rid):
            return
        request = self._requests.get(hold)
        if request is not None:
            self._drop(hold, request)
        elif self._gone:
            self._gone.pop(hold, None)
        try:
            answer = self.store.withdraw(hold)
        except Exception as error:
            self._fail(rid, error)
            return
        if answer is None:
            self._answer(rid, Done(rid))
        else:
            self._answer_later(rid, answer)

    def _on_alter(self, message: Alter) -> None:
        rid = message.rid
        if not self._is_new(rid):
            return
        request = self._requests.get(message.hold)
        try:
            if message.data is not None:
                self._check_data(message.data, None if request is None else request.name)
            answer = self.store.alter(
                message.hold,
                count=message.count,
                data=message.data,
                timeout=message.timeout if message.new_timeout else UNCHANGED,
            )
        except Exception as error:
            self._fail(rid, error)
            return
        if answer is None:
            self._answer(rid, Done(rid))
        else:
            self._answer_later(rid, answer)
        if request is not None and message.count is not None:
            request.count = message.count

    def _answer_later(self, rid: int, answer: asyncio.Future[None]) -> None:
        assert self.link is not None
        self._unanswered.add(rid)
        self.link.begun()
        answer.add_done_callback(partial(self._when_done, self.link, rid))

    def _when_done(self, link: Link, rid: int, answer: asyncio.Future[None]) -> None:
        link.finished()
        self._unanswered.discard(rid)
        error = _error_of(answer)
        if self.error is not None:
            return  # that it is over has been told
        if error is not None:
            self._fail(rid, error)
        else:
            self._answer(rid, Done(rid))

    # Semaphores

    def _on_create(self, message: CreateSemaphore) -> None:
        self._start(message.rid, partial(self._create, message))

    async def _create(self, message: CreateSemaphore) -> Struct:
        name = message.name
        self._check_data(message.data, name)
        await self._hosting.semaphores.create(self.node, name)
        await self.store.create_semaphore(
            name, message.limit, message.data, exist_ok=message.exist_ok
        )
        self._hosting.semaphores.created(self.node, name)
        return Done(message.rid)

    def _on_update(self, message: UpdateSemaphore) -> None:
        self._start(message.rid, partial(self._update, message))

    async def _update(self, message: UpdateSemaphore) -> Struct:
        self._check_data(message.data, message.name)
        await self.store.update_semaphore(message.name, message.data)
        return Done(message.rid)

    def _on_delete(self, message: DeleteSemaphore) -> None:
        self._start(message.rid, partial(self._delete, message))

    async def _delete(self, message: DeleteSemaphore) -> Struct:
        await self.store.delete_semaphore(message.name, force=message.force)
        self._hosting.semaphores.deleted(self.node, message.name)
        return Done(message.rid)

    def _on_describe(self, message: DescribeSemaphore) -> None:
        self._start(message.rid, partial(self._describe, message), reads=True)

    async def _describe(self, message: DescribeSemaphore) -> Struct:
        found = await self.store.describe_semaphore(
            message.name, owners=message.owners, waiters=message.waiters
        )
        size = check_size(found, self.node, self._hosting.limits.output_bytes // 2)
        if self.link is not None:
            await self.link.room(size)
        return SemaphoreDescribed(message.rid, SemaphoreInfo.of(found))

    def _start(self, rid: int, work: _Work[Struct], *, reads: bool = False) -> None:
        """Begin what takes time, in its order; `reads` means that it changes nothing."""
        if not reads and not self._is_new(rid):
            return
        if not reads:
            self._unanswered.add(rid)
        assert self.link is not None
        self.link.begun()
        self._hosting.start(self._carry_out(self.link, rid, work, reads))
        self.starting = True
        asyncio.get_running_loop().call_soon(self._go_on)  # behind the task's first step

    async def _carry_out(self, link: Link, rid: int, work: _Work[Struct], reads: bool) -> None:
        try:
            answer = await work()
        except Exception as error:
            answer = self._failed(rid, error)
        finally:
            self._unanswered.discard(rid)
            link.finished()
        if self.error is not None:
            return  # that it is over has been told
        if reads:
            self.say(answer)
        else:
            self._answer(rid, answer)

    def _check_data(self, data: bytes, name: str | None) -> None:
        most = self._hosting.limits.data_bytes
        if len(data) > most:
            raise LimitReached(
                f"this server takes at most {most} bytes of data (its limit data_bytes), not "
                f"{len(data)}; store it elsewhere and keep its address here",
                "data_bytes",
                node=self.node,
                name=name,
            )

    # Watches

    def _on_watch(self, message: Watch) -> None:
        number = message.number
        try:
            if number in self._watches:
                raise InvalidArgument(f"there is a watch {number} already", node=self.node)
            if len(self._watches) >= self._hosting.limits.watches_per_session:
                most = self._hosting.limits.watches_per_session
                count = Count("watches_per_session", most, "this session")
                raise count.reached(node=self.node, name=message.name)
            self._watches[number] = self.store.watch(
                message.name,
                data=message.data,
                owners=message.owners,
                changed=partial(self._changed, number),
            )
        except Exception as error:
            failed = self._failed(0, error)
            self.say(WatchRefused(self.channel, number, failed.error))

    def _changed(self, number: int) -> None:
        if self.link is not None and number in self._watches:
            self.link.changed(self.channel, number)

    def _on_unwatch(self, message: Unwatch) -> None:
        stop = self._watches.pop(message.number, None)
        if stop is not None:
            stop()

    def _stop_watches(self) -> None:
        watches, self._watches = self._watches, {}
        for stop in watches.values():
            stop()

    # Leaving

    def _on_detach(self, message: Detach) -> None:
        self._leave(message.rid, self.store.detach)

    def _on_close(self, message: Close) -> None:
        self._leave(message.rid, self.store.close)

    def leave(self, rid: int, *, closing: bool) -> None:
        """`Close` or `Detach`, which came before the session did."""
        self._leave(rid, self.store.close if closing else self.store.detach)

    def _leave(self, rid: int, work: _Work[None]) -> None:
        link = self.link
        assert link is not None
        self.state = State.LEAVING
        self.leave_link()
        self.disbelieve()
        link.begun()
        self._hosting.start(self._see_off(link, rid, work))

    async def _see_off(self, link: Link, rid: int, work: _Work[None]) -> None:
        answer: Struct
        try:
            await work()
            answer = Done(rid)
        except Exception as error:
            answer = self._failed(rid, error)
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
        for hold, request in list(self._requests.items()):
            self._drop(hold, request)
        self._answers.clear()
        self._unanswered.clear()
        self._gone.clear()
        while self._renewals:
            self._give_up_renewal()
        self._hosting.forget(self)
        if error is not None and self.link is not None:
            self.link.send(Ended(self.channel, to_wire(error)))
        self.look()

    # What the store says (`SessionEvents`)

    def proven(self, at: float) -> None:
        """The store's session lives. From any thread."""
        self.proof = max(self.proof, at)
        if self._renewals:
            hosting = self._hosting
            if threading.get_ident() == hosting.thread:
                self._answer_renewals()
            else:
                hosting.loop.call_soon_threadsafe(self._answer_renewals)

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """What the session has in queues, now that it was taken over."""
        for each in requests:
            self._hosting.semaphores.rejoin(self.node, each.name, ephemeral=each.ephemeral)
            self._requests[each.hold] = request = Request(each.name, each.count, each.ephemeral)
            request.data = each.data
            request.order_id = each.order_id
            request.granted = each.granted
        self._recovered = True

    def granted(self, hold: int, order_id: int | None) -> None:
        """A waiting request is an owner now."""
        request = self._requests.get(hold)
        if request is None:
            return  # it is being withdrawn
        self._see_placed(hold, request)
        request.granted = True
        if order_id is not None:
            request.order_id = order_id
        self.say(Granted(self.channel, hold, order_id))

    def removed(self, hold: int, why: Removal) -> None:
        """A request has left its queue by somebody else's doing."""
        request = self._requests.get(hold)
        if request is None:
            return
        self._see_placed(hold, request)
        self._drop(hold, request)
        word = _REMOVAL_WORDS[why]
        self._gone[hold] = word
        if len(self._gone) > _GONE:
            self._gone.popitem(last=False)
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


SESSION_HANDLERS: dict[type[Struct], Callable[[Hosted, Any], None]] = {
    Acknowledge: Hosted._on_acknowledge,
    Alter: Hosted._on_alter,
    Close: Hosted._on_close,
    CreateSemaphore: Hosted._on_create,
    DeleteSemaphore: Hosted._on_delete,
    DescribeSemaphore: Hosted._on_describe,
    Detach: Hosted._on_detach,
    Enqueue: Hosted._on_enqueue,
    Renew: Hosted._on_renew,
    Unwatch: Hosted._on_unwatch,
    UpdateSemaphore: Hosted._on_update,
    Watch: Hosted._on_watch,
    Withdraw: Hosted._on_withdraw,
}
"""What carries out each message that is for the session on its channel.

Not to be called while the session is over, or has something `starting`.
"""


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, or so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _error_of(answer: asyncio.Future[Any]) -> BaseException | None:
    if answer.cancelled():
        return asyncio.CancelledError()
    return answer.exception()
