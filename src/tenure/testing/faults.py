"""An engine that reaches another one over a bad network: late, in pieces, or not at all.

`FaultyEngine` fulfils the contract, as any engine of a remote store must: what it was told to do
is done once and in order, however often the connection breaks meanwhile. What it adds is what a
network adds, as its `Way` has it: each message takes a while, messages wait while the way is cut,
those on their way are lost with the connection and sent again over the next, the answers of an
hour may arrive in one moment, a grant may be told twice. A program that holds leases has to live
with all of that::

    way = Way(delay=lambda: random.uniform(0.001, 0.2))
    engine = FaultyEngine(MemoryEngine("store", clock), way)
    client = Client(engine, clock)
    ...
    way.lose()  # the connection breaks
    way.mend()

* `Way.cut` both ways: the store is silent, and nobody is told.
* `Way.cut` one way: half-open. What is sent arrives and takes effect, and no answer comes; or it
  is the answers of before that still come.
* `Way.lose`: the same, and the session is told that it is detached.

The inner engine may belong to another event loop of the same thread (``store_loop``), and to
another clock: proofs are translated. It is this engine's own, opened and closed with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Engine,
    EngineSession,
    Enqueued,
    Removal,
    SessionEvents,
)
from tenure.errors import EngineUnavailable, SessionExpired
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["FaultyEngine", "Way"]

T = TypeVar("T")
Message = Callable[[], object]


class _Line:
    """One direction of a way: first in, first out, and each message arrives once."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # the receiver's
        self._delay = delay
        self._open = True
        self._queue: deque[Message] = deque()
        self._timers: deque[asyncio.TimerHandle] = deque()
        self._last = 0.0

    def send(self, message: Message) -> None:
        self._queue.append(message)
        if self._open:
            self._launch()

    def _launch(self) -> None:
        loop = self.loop
        assert loop is not None
        self._last = due = max(self._last, loop.time() + self._delay())
        self._timers.append(loop.call_at(due, self._arrive))

    def _arrive(self) -> None:
        self._timers.popleft()
        self._queue.popleft()()

    def cut(self) -> None:
        """What is on its way is lost, and goes once more after `mend`."""
        self._open = False
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def mend(self) -> None:
        if not self._open:
            self._open = True
            for _ in self._queue:
                self._launch()

    def clear(self) -> None:
        self.cut()
        self._queue.clear()


class Way:
    """The way between one program and the store.

    Args:
        delay: called for each message: how many seconds it takes.
        repeats: called for each grant: whether it is told twice.
    """

    def __init__(
        self, delay: Callable[[], float] = lambda: 0.0, repeats: Callable[[], bool] = lambda: False
    ) -> None:
        self.there = _Line(delay)
        self.back = _Line(delay)
        self.repeats = repeats
        self.lost = False
        self.told: Callable[[bool], None] = lambda _: None

    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """Let nothing through, in one direction or both, and tell nobody."""
        if there:
            self.there.cut()
        if back:
            self.back.cut()

    def lose(self) -> None:
        """Break the connection, and have the sessions told."""
        self.cut()
        if not self.lost:
            self.lost = True
            self.told(False)

    def mend(self) -> None:
        """Let through what waits, and whatever comes. Safe when nothing is broken."""
        self.there.mend()
        self.back.mend()
        if self.lost:
            self.lost = False
            self.told(True)


class FaultyEngine:
    """Another engine, at the other end of a way. It belongs to the loop on which it was opened.

    Args:
        inner: the engine of the store's side, not opened yet.
        way: what lies between.
        clock: the program's clock, if it is not the store's.
        store_loop: the loop on which the inner engine is opened, if it is not the program's.
        io_loop: where messages arrive, if that is not the program's loop: an engine that has a
            thread for it hears proofs while the program's loop is stuck.
    """

    def __init__(
        self,
        inner: Engine,
        way: Way,
        *,
        clock: Clock | None = None,
        store_loop: asyncio.AbstractEventLoop | None = None,
        io_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.inner = inner
        self.way = way
        self.clock = clock if clock is not None else inner.clock
        self.loop: asyncio.AbstractEventLoop | None = None
        self.sessions: dict[FaultySession, None] = {}
        self._store_loop = store_loop
        self._io_loop = io_loop
        self._work: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    # Messages

    def operate(
        self, operation: Callable[[], Any], session: FaultySession | None = None
    ) -> asyncio.Future[Any]:
        """Have an operation carried out at the store, and its answer brought back."""
        assert self.loop is not None, "not opened"
        answer = self.loop.create_future()
        if session is not None:
            session.pending[answer] = None
        self.way.there.send(partial(self._carry_out, operation, answer))
        return answer

    def _carry_out(self, operation: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        try:
            result = operation()
            if isinstance(result, Coroutine):
                result = self._begin(result)
        except Exception as error:
            self._reply(answer, None, error)
            return
        if isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._done, answer))
        else:
            self._reply(answer, result, None)

    def _begin(self, operation: Coroutine[Any, Any, T]) -> Answer[T]:
        """Start it now, in its turn; what it has to wait for it does in a task."""
        try:
            waits_for = operation.send(None)
        except StopIteration as stop:
            value: T = stop.value
            return value
        return self.at_store(_Rest(operation, waits_for).finish())

    def at_store(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task at the store's side."""
        assert self.way.there.loop is not None
        task = self.way.there.loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _done(self, answer: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._reply(answer, None, EngineUnavailable(f"{self.url} was closed meanwhile"))
        else:
            error = done.exception()
            self._reply(answer, None if error else done.result(), error)

    def _reply(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.tell(partial(_settle, answer, result, error))

    def tell(self, message: Message) -> None:
        """Have it called on the program's loop, when it gets there."""
        if self._io_loop is None:
            self.way.back.send(message)
        else:
            self.way.back.send(partial(self._pass_on, message))

    def _pass_on(self, message: Message) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(message)

    def _told(self, attached: bool) -> None:
        loop = self.loop
        if loop is not None and not self._closed:
            for session in self.sessions:
                loop.call_soon(session.contact, attached)

    def die(self, *, noticed: bool) -> None:
        """The program is dead: nothing comes from here any more.

        Args:
            noticed: whether the store sees it, as it would see a closed connection or a dead
                process of its own host.
        """
        self._closed = True
        self.way.there.clear()
        self.way.back.clear()
        if noticed:
            for session in self.sessions:
                if session.inner is not None:
                    lives_on = session.how.liveness == "window"
                    self._begin(session.inner.detach() if lives_on else session.inner.close())

    # The contract

    async def open(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.way.there.loop = self._store_loop or self.loop
        self.way.back.loop = self._io_loop or self.loop
        self.way.told = self._told
        await self.operate(self.inner.open)

    async def aclose(self) -> None:
        """Its own affair: the connection is closed whether or not the store is in reach."""
        if self._closed or self.loop is None:
            return
        self._closed = True
        self.way.back.clear()
        closed = self.loop.create_future()
        self.way.there.send(partial(self._close_inner, closed))
        if self.way.there.loop is self.loop and not self.way.lost:
            await closed

    def _close_inner(self, closed: asyncio.Future[None]) -> None:
        task = self.at_store(self.inner.aclose())
        task.add_done_callback(lambda _: _settle(closed, None, None))

    async def attach(self, how: Attach, events: SessionEvents) -> FaultySession:
        session = FaultySession(self, how, events)
        answer = self.operate(lambda: self.at_store(session.attach()))
        try:
            session.inner = await answer
        except BaseException:
            self.way.there.send(session.abandon)
            raise
        self.sessions[session] = None
        return session

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        await self.operate(partial(self.inner.create_node, path, config, exist_ok=exist_ok))

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        await self.operate(partial(self.inner.alter_node, path, config))

    async def drop_node(self, path: str, *, force: bool) -> None:
        await self.operate(partial(self.inner.drop_node, path, force=force))

    async def describe_node(self, path: str) -> NodeDescription:
        found: NodeDescription = await self.operate(partial(self.inner.describe_node, path))
        return found

    async def list_nodes(self) -> Sequence[str]:
        found: Sequence[str] = await self.operate(self.inner.list_nodes)
        return found

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        found: Sequence[SemaphoreDescription] = await self.operate(
            partial(self.inner.list_semaphores, path, owners=owners, waiters=waiters)
        )
        return found

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        found: Sequence[SessionDescription] = await self.operate(
            partial(self.inner.list_sessions, path)
        )
        return found

    async def end_session(self, path: str, session_id: int) -> bool:
        return bool(await self.operate(partial(self.inner.end_session, path, session_id)))

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return bool(await self.operate(partial(self.inner.evict, path, name, order_id)))


class FaultySession:
    """Both ends of one session: what the program calls, and what the store tells.

    Attributes:
        pending: the answers that are still to come.
    """

    def __init__(self, engine: FaultyEngine, how: Attach, events: SessionEvents) -> None:
        self.engine = engine
        self.how = how
        self.inner: EngineSession | None = None
        self.pending: dict[asyncio.Future[Any], None] = {}
        self._way = engine.way
        self._told = events
        self._over: SessionExpired | None = None
        self._thread = threading.get_ident()
        self._attaching: asyncio.Task[Any] | None = None
        self._unwanted = False
        # For each renewal: when it was carried out by the store's clock, and sent by ours.
        self._asked = deque([(float("-inf"), engine.clock.now())])

    # The program's end

    @property
    def _store(self) -> EngineSession:
        assert self.inner is not None
        return self.inner

    @property
    def id(self) -> int:
        return self._store.id

    @property
    def attach_number(self) -> int:
        return self._store.attach_number

    def _operate(self, operation: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._over is not None:
            raise self._over
        answer = self.engine.operate(operation, self)
        answer.add_done_callback(self.pending.pop)
        return answer

    def renew(self) -> None:
        loop, message = self.engine.loop, partial(self._renew, self.engine.clock.now())
        if threading.get_ident() == self._thread:
            self._way.there.send(message)
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._way.there.send, message)

    def _renew(self, sent: float) -> None:
        self._asked.append((self.engine.inner.clock.now(), sent))
        self._store.renew()

    async def close(self) -> None:
        await self._leave(self._store.close)

    async def detach(self) -> None:
        await self._leave(self._store.detach)

    async def _leave(self, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._over is None:
            answer = self.engine.operate(leave)  # no end of the session is a failure of this
            self.engine.sessions.pop(self, None)
            await answer

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        create = self._store.create_semaphore
        await self._operate(partial(create, name, limit, data, exist_ok=exist_ok))

    async def update_semaphore(self, name: str, data: bytes) -> None:
        await self._operate(partial(self._store.update_semaphore, name, data))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        await self._operate(partial(self._store.delete_semaphore, name, force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        describe = self._store.describe_semaphore
        found: SemaphoreDescription = await self._operate(
            partial(describe, name, owners=owners, waiters=waiters)
        )
        return found

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        enqueue = self._store.enqueue
        return self._operate(
            partial(enqueue, hold, name, count, data, timeout=timeout, ephemeral=ephemeral)
        )

    def alter(self, hold: int, *, count: int | None, data: bytes | None) -> Answer[None]:
        return self._operate(partial(self._store.alter, hold, count=count, data=data))

    def withdraw(self, hold: int) -> Answer[None]:
        return self._operate(partial(self._store.withdraw, hold))

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        rules.check_name(name, self.how.node)
        if self._over is not None:
            raise self._over
        watch = _Watch(self, changed)
        self._way.there.send(partial(watch.begin, name, data, owners))
        return watch.stop

    def contact(self, attached: bool) -> None:
        """The connection has broken, or is there again."""
        if self._over is None and self in self.engine.sessions:
            if attached:
                self._told.attached()
            else:
                self._told.detached()

    def _end(self, error: SessionExpired) -> None:
        if self._over is not None:
            return
        self._over = error
        self.engine.sessions.pop(self, None)
        for answer in list(self.pending):
            _settle(answer, None, error)
        self._told.ended(error)

    # The store's end

    async def attach(self) -> EngineSession:
        self._attaching = asyncio.current_task()
        inner = await self.engine.inner.attach(self.how, self)
        if self._unwanted:
            await self._drop(inner)
        return inner

    def abandon(self) -> None:
        """Nobody waits for it to be attached any more."""
        self._unwanted = True
        attaching = self._attaching
        if attaching is not None and not attaching.done():
            attaching.cancel()
        elif attaching is not None and not attaching.cancelled() and not attaching.exception():
            self.engine.at_store(self._drop(attaching.result()))

    async def _drop(self, inner: EngineSession) -> None:
        await (inner.detach() if self.how.session_id is not None else inner.close())

    def proven(self, at: float) -> None:
        while len(self._asked) > 1 and self._asked[1][0] <= at:
            self._asked.popleft()
        self._way.back.send(partial(self._told.proven, self._asked[0][1]))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        self.engine.tell(partial(self._told.resumed, requests))

    def granted(self, hold: int, order_id: int | None) -> None:
        self._tell_granted(hold, order_id)
        if self._way.repeats():
            self._tell_granted(hold, order_id)

    def _tell_granted(self, hold: int, order_id: int | None) -> None:
        self.engine.tell(partial(self._heard_granted, hold, order_id))

    def _heard_granted(self, hold: int, order_id: int | None) -> None:
        if self._over is None:
            self._told.granted(hold, order_id)

    def removed(self, hold: int, why: Removal) -> None:
        self.engine.tell(partial(self._told.removed, hold, why))

    def detached(self) -> None:
        self.engine.tell(self._told.detached)

    def attached(self) -> None:
        self.engine.tell(self._told.attached)

    def ended(self, error: SessionExpired) -> None:
        self.engine.tell(partial(self._end, error))


class _Watch:
    """Both ends of one watch. Changes that are on their way already are merged."""

    def __init__(self, session: FaultySession, changed: Callable[[], None]) -> None:
        self._session = session
        self._changed = changed
        self._stopped = False
        self._on_its_way = False
        self._stop_inner: Callable[[], None] | None = None

    def begin(self, name: str, data: bool, owners: bool) -> None:
        try:
            self._stop_inner = self._session._store.watch(
                name, data=data, owners=owners, changed=self._happened
            )
        except SessionExpired:
            return  # its end is told anyway

    def _happened(self) -> None:
        if not self._on_its_way:
            self._on_its_way = True
            self._session.engine.tell(self._tell)

    def _tell(self) -> None:
        self._on_its_way = False
        if not self._stopped:
            self._changed()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._session._way.there.send(self._end)

    def _end(self) -> None:
        if self._stop_inner is not None:
            self._stop_inner()


class _Rest:
    """The rest of a coroutine that has been run until it had to wait."""

    def __init__(self, work: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    async def finish(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        work, waits_for = self._work, self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = work.throw(error)
                else:
                    waits_for = work.send(sent)
        except StopIteration as stop:
            return stop.value


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return  # nobody wants it any more, or the session's end has settled it
    if error is not None:
        answer.set_exception(error)
        answer.exception()  # it need not be asked for
    else:
        answer.set_result(result)


def at_once(operation: Coroutine[Any, Any, T]) -> T:
    """The result of an operation that does not wait.

    Raises:
        RuntimeError: it would have to.
    """
    try:
        operation.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    operation.close()
    raise RuntimeError("the engine does not answer at once")
