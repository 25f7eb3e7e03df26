"""Engine that reaches another engine over a simulated bad network, with delays and outages.

`FaultyEngine` fulfils the contract, like any engine of a remote store: operations are carried out
once and in order, even if the connection breaks repeatedly. It adds the faults of a network, as
determined by its `Way`:

* Each message is delayed, and messages wait while the way is cut.
* Messages in transit are lost with the connection, and sent again over the next one.
* The answers of an hour may arrive at once.
* A grant may be reported twice, and events of a request may arrive before the answer to it.

A program that holds leases must tolerate all of these::

    way = Way(delay=lambda: random.uniform(0.001, 0.2))
    engine = FaultyEngine(MemoryEngine("store", clock), way)
    client = Client(engine, clock)
    ...
    way.lose()  # the connection breaks
    way.mend()

* `Way.cut` in both directions: the store is silent, and no session is notified.
* `Way.cut` in one direction: a half-open connection. Either requests arrive and take effect, but no
  answer returns; or no request arrives, but earlier answers return.
* `Way.lose`: a cut in both directions, with a notification of the session: it is detached.

The inner engine may use another event loop of the same thread (``store_loop``), and another clock:
proofs are converted. This engine owns it, and opens and closes it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Engine,
    EngineDefaults,
    EngineSession,
    Enqueued,
    GuardStatement,
    Pages,
    RateAnswer,
    RateCall,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
    rate_answered,
)
from tenure.errors import EngineUnavailable, SessionExpired, TenureError
from tenure.model import (
    UNCHANGED,
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
    Unchanged,
)

__all__ = ["FaultyEngine", "FaultySession", "Way", "at_once"]


Message = Callable[[], object]


class _Line:
    """One direction of a way: first in, first out, with each message delivered once."""

    def __init__(self, delay: Callable[[], float]) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None  # the receiver's loop
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
        due = loop.time() + self._delay()
        if due < self._last:  # noqa: PLR1730  a call costs more
            due = self._last
        self._last = due
        self._timers.append(loop.call_at(due, self._arrive))

    def _arrive(self) -> None:
        self._timers.popleft()
        self._queue.popleft()()

    def cut(self) -> None:
        """Lose the messages in transit; they are sent again after `mend`."""
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
    """Simulated network between one program and the store.

    Args:
        delay: called for each message; returns its delay in seconds.
        repeats: called for each grant; returns true if the grant is reported twice.
        lag: called for each request; returns by how many seconds the answer to it is later than
            other messages, so that its events may overtake it.
    """

    def __init__(
        self,
        delay: Callable[[], float] = lambda: 0.0,
        repeats: Callable[[], bool] = lambda: False,
        lag: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.there = _Line(delay)
        self.back = _Line(delay)
        self.repeats = repeats
        self.lag = lag
        self.lost = False
        self.changed: Callable[[bool], None] = lambda _: None

    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """Stop all messages in one direction or both, without notifying the sessions."""
        if there:
            self.there.cut()
        if back:
            self.back.cut()

    def lose(self) -> None:
        """Break the connection in both directions, and notify the sessions."""
        self.cut()
        if not self.lost:
            self.lost = True
            self.changed(False)

    def mend(self) -> None:
        """Deliver waiting and future messages again. Does nothing if the way is not broken."""
        self.there.mend()
        self.back.mend()
        if self.lost:
            self.lost = False
            self.changed(True)


T = TypeVar("T")


class Exchange:
    """Exchange of operations and answers between a program and a store, over a `Way`.

    Attributes:
        loop: the program's loop, once it is open.

    Args:
        url: the store's URL, for errors.
        way: the simulated network between the two.
        io_loop: the loop on which messages arrive, if it differs from the program's.
    """

    def __init__(self, url: str, way: Way, io_loop: asyncio.AbstractEventLoop | None) -> None:
        """Start without a loop; `open` sets it."""
        self.way = way
        self.loop: asyncio.AbstractEventLoop | None = None
        self._url = url
        self._io_loop = io_loop
        self._work: set[asyncio.Task[Any]] = set()

    def open(self, store_loop: asyncio.AbstractEventLoop | None) -> None:
        """Begin on the running loop; the store is on `store_loop`, if that is another one."""
        self.loop = asyncio.get_running_loop()
        self.way.there.loop = store_loop or self.loop
        self.way.back.loop = self._io_loop or self.loop

    def operate(
        self, operation: Callable[[], Any], pending: dict[asyncio.Future[Any], None] | None = None
    ) -> asyncio.Future[Any]:
        """Send an operation to the store, and return the future of its answer.

        Args:
            operation: the operation to carry out there.
            pending: holds the answer until it is set.
        """
        assert self.loop is not None, "not opened"
        answer = self.loop.create_future()
        if pending is not None:
            pending[answer] = None
            answer.add_done_callback(pending.pop)
        self.way.there.send(partial(self._carry_out, operation, answer))
        return answer

    def _carry_out(self, operation: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        try:
            result = operation()
            if isinstance(result, Coroutine):
                result = self.begin(result)
        except Exception as error:
            self._reply(answer, None, error)
            return
        if isinstance(result, asyncio.Future):
            result.add_done_callback(partial(self._done, answer))
        else:
            self._reply(answer, result, None)

    def begin(self, operation: Coroutine[Any, Any, T]) -> Answer[T]:
        """Start an operation now, in the order of arrival; a task finishes its waits."""
        try:
            waits_for = operation.send(None)
        except StopIteration as stop:
            value: T = stop.value
            return value
        return self.at_store(_Rest(operation, waits_for).finish())

    def at_store(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on the store's loop."""
        assert self.way.there.loop is not None
        task = self.way.there.loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _done(self, answer: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._reply(answer, None, EngineUnavailable(f"{self._url} was closed meanwhile"))
        else:
            error = done.exception()
            self._reply(answer, None if error else done.result(), error)

    def _reply(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.deliver(partial(settle, answer, result, error))

    def deliver(self, message: Message) -> None:
        """Send a message back; it is called on the program's loop when it arrives."""
        if self._io_loop is None:
            self.way.back.send(message)
        else:
            self.way.back.send(partial(self._pass_on, message))

    def _pass_on(self, message: Message) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(message)


class _Rest:
    """Remainder of a coroutine that has run until it had to wait."""

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


def settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Set the answer, unless it was cancelled or already set by the end of the session."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
        answer.exception()  # no warning if the program never retrieves it
    else:
        answer.set_result(result)


def at_once(operation: Coroutine[Any, Any, T]) -> T:
    """Run an operation that does not wait, and return its result.

    Raises:
        RuntimeError: the operation would have to wait.
    """
    try:
        operation.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    operation.close()
    raise RuntimeError("the engine does not answer at once")


def out_of_reach() -> EngineUnavailable:
    """Return the error that reports a broken way."""
    return EngineUnavailable("the way to the store is broken")


class FaultySession(SessionDefaults):
    """Both ends of one session: the operations of its program, and the events of the store.

    Args:
        exchange: carries operations and messages.
        engine: the store's engine.
        clock: the program's clock.
        how, events: the arguments of the program's attach.
        living: the program's sessions, from which this one removes itself at its end.
    """

    def __init__(
        self,
        exchange: Exchange,
        engine: Engine,
        clock: Clock,
        how: Attach,
        events: SessionEvents,
        living: dict[FaultySession, None],
    ) -> None:
        """Start without a session at the store; `attach` creates it."""
        self.how = how
        self.inner: EngineSession | None = None
        self.exchange = exchange
        self.deliver = exchange.deliver
        self.way = exchange.way
        self._engine = engine
        self._clock = clock
        self._events = events
        self._living = living
        self._pending: dict[asyncio.Future[Any], None] = {}
        self._over: SessionExpired | None = None
        self._thread = threading.get_ident()
        self._attaching: asyncio.Task[Any] | None = None
        self._unwanted = False
        # For each renewal: its arrival on the store's clock, and its departure on the program's
        self._renewals = deque([(float("-inf"), clock.now())])

    # The program's end

    @property
    def store(self) -> EngineSession:
        """The session at the store's end."""
        assert self.inner is not None
        return self.inner

    @property
    def id(self) -> int:
        """Id of the session in the store."""
        return self.store.id

    @property
    def attach_number(self) -> int:
        """Attach number of the session in the store."""
        return self.store.attach_number

    def _operate(self, operation: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._over is not None:
            raise self._over
        return self.exchange.operate(operation, self._pending)

    def renew(self) -> None:
        """Send a renewal, from any thread."""
        loop, message = self.exchange.loop, partial(self._renew, self._clock.now())
        if threading.get_ident() == self._thread:
            self.way.there.send(message)
        elif loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.way.there.send, message)

    def _renew(self, sent: float) -> None:
        self._renewals.append((self._engine.clock.now(), sent))
        self.store.renew()

    async def close(self) -> None:
        """End the session, over the way."""
        await self._leave(self.store.close)

    async def detach(self) -> None:
        """Detach from the session, over the way."""
        await self._leave(self.store.detach)

    async def _leave(self, leave: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._over is None:
            answer = self.exchange.operate(leave)  # not pending: the session's end must not fail it
            self._living.pop(self, None)
            await answer

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a semaphore, over the way."""
        create = self.store.create_semaphore
        await self._operate(partial(create, name, limit, data, exist_ok=exist_ok))

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace a semaphore's data, over the way."""
        await self._operate(partial(self.store.update_semaphore, name, data))

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Change a semaphore's limit, over the way."""
        await self._operate(partial(self.store.resize_semaphore, name, limit))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore, over the way."""
        await self._operate(partial(self.store.delete_semaphore, name, force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore, over the way."""
        describe = self.store.describe_semaphore
        found: SemaphoreDescription = await self._operate(
            partial(describe, name, owners=owners, waiters=waiters)
        )
        return found

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
        """Add a request to a queue, over the way."""
        enqueue = self.store.enqueue
        answer = self._operate(
            partial(enqueue, request_id, name, count, data, timeout=timeout, ephemeral=ephemeral)
        )
        lag = self.way.lag()
        return self._delayed(answer, lag) if lag else answer

    def _delayed(self, answer: asyncio.Future[Enqueued], lag: float) -> asyncio.Future[Enqueued]:
        loop = answer.get_loop()
        late: asyncio.Future[Enqueued] = loop.create_future()
        self._pending[late] = None
        late.add_done_callback(self._pending.pop)

        def arrived(answer: asyncio.Future[Enqueued]) -> None:
            if not answer.cancelled():
                error = answer.exception()
                result = None if error else answer.result()
                loop.call_later(lag, settle, late, result, error)

        answer.add_done_callback(arrived)
        return late

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place, over the way."""
        return self._operate(
            partial(self.store.alter, request_id, count=count, data=data, timeout=timeout)
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue, over the way."""
        return self._operate(partial(self.store.withdraw, request_id))

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name, over the way; return the function that ends the watch."""
        rules.check_name(name, self.how.node)
        if self._over is not None:
            raise self._over
        watch = _Watch(self, changed)
        self.way.there.send(partial(watch.begin, name, data, owners))
        return watch.stop

    def contact(self, attached: bool) -> None:
        """Notify the program that the connection was dropped or re-established."""
        if self._over is None and self in self._living:
            if attached:
                self._events.attached()
            else:
                self._events.detached(out_of_reach())

    def _end(self, error: SessionExpired) -> None:
        if self._over is not None:
            return
        self._over = error
        self._living.pop(self, None)
        for answer in list(self._pending):
            settle(answer, None, error)
        self._events.ended(error)

    # The store's end

    async def attach(self) -> EngineSession:
        """Attach the session at the store's end; drop it if the program no longer waits."""
        self._attaching = asyncio.current_task()
        inner = await self._engine.attach(self.how, self)
        if self._unwanted:
            await self._drop(inner)
        return inner

    def abandon(self) -> None:
        """Drop the session at the store, because the program no longer waits for its attach."""
        self._unwanted = True
        attaching = self._attaching
        if attaching is not None and not attaching.done():
            attaching.cancel()
        elif attaching is not None and not attaching.cancelled() and not attaching.exception():
            self.exchange.at_store(self._drop(attaching.result()))

    async def _drop(self, inner: EngineSession) -> None:
        await (inner.detach() if self.how.session_id is not None else inner.close())

    def proven(self, at: float) -> None:
        """Send the time of the newest renewal that a proof of `at` covers."""
        while len(self._renewals) > 1 and self._renewals[1][0] <= at:
            self._renewals.popleft()
        self.way.back.send(partial(self._events.proven, self._renewals[0][1]))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Report the recovered requests, over the way."""
        self.deliver(partial(self._events.resumed, requests))

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Report a grant, over the way; sometimes twice."""
        self._report_granted(request_id, order_id)
        if self.way.repeats():
            self._report_granted(request_id, order_id)

    def _report_granted(self, request_id: int, order_id: int | None) -> None:
        self.deliver(partial(self._deliver_granted, request_id, order_id))

    def _deliver_granted(self, request_id: int, order_id: int | None) -> None:
        if self._over is None:
            self._events.granted(request_id, order_id)

    def removed(self, request_id: int, why: Removal) -> None:
        """Report a removal, over the way."""
        self.deliver(partial(self._events.removed, request_id, why))

    def detached(self, cause: BaseException | None = None) -> None:
        """Report the loss of contact, over the way."""
        self.deliver(partial(self._events.detached, cause))

    def attached(self) -> None:
        """Report re-established contact, over the way."""
        self.deliver(self._events.attached)

    def ended(self, error: SessionExpired) -> None:
        """Report the end of the session, over the way."""
        self.deliver(partial(self._end, error))


class _Watch:
    """Both ends of one watch. A change is merged with a notification that is in transit."""

    def __init__(self, session: FaultySession, changed: Callable[[], None]) -> None:
        self._session = session
        self._changed = changed
        self._stopped = False
        self._scheduled = False
        self._stop_inner: Callable[[], None] | None = None

    def begin(self, name: str, data: bool, owners: bool) -> None:
        try:
            self._stop_inner = self._session.store.watch(
                name, data=data, owners=owners, changed=self._happened
            )
        except SessionExpired:
            return  # the program is notified of the end in any case

    def _happened(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._session.deliver(self._notify)

    def _notify(self) -> None:
        self._scheduled = False
        if not self._stopped:
            self._changed()

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._session.way.there.send(self._end)

    def _end(self) -> None:
        if self._stop_inner is not None:
            self._stop_inner()


_Operate = Callable[[Callable[[], Any]], Awaitable[Any]]


class FaultyEngine(EngineDefaults):
    """Engine that reaches an inner engine over a `Way`. It belongs to the loop that opens it.

    Args:
        inner: the engine at the store's end, not opened yet.
        way: the simulated network between the two.
        clock: the program's clock, if it differs from the store's.
        store_loop: the loop on which the inner engine is opened, if it differs from the program's.
        io_loop: the loop on which messages arrive, if it differs from the program's. It simulates
            an engine with an I/O thread, which receives proofs while the program's loop is stuck.
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
        """Reach `inner` over `way`; nothing is sent before `open`."""
        self.inner = inner
        self.way = way
        self.clock = clock if clock is not None else inner.clock
        self._sessions: dict[FaultySession, None] = {}
        self._store_loop = store_loop
        self._exchange = Exchange(inner.url, way, io_loop)
        self._operate = self._exchange.operate
        self._closed = False

    @property
    def url(self) -> str:
        """URL of the inner engine."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the inner engine."""
        return self.inner.capabilities

    # Contact

    def _changed(self, attached: bool) -> None:
        loop = self._exchange.loop
        if loop is not None and not self._closed:
            for session in self._sessions:
                loop.call_soon(session.contact, attached)

    def die(self, *, noticed: bool) -> None:
        """Simulate the death of the program: no more messages are sent or received.

        Args:
            noticed: whether the store detects the death, like a closed connection or a dead process
                on its host.
        """
        self._closed = True
        self.way.there.clear()
        self.way.back.clear()
        if noticed:
            for session in self._sessions:
                if session.inner is not None:
                    lives_on = session.how.liveness == "window"
                    self._exchange.begin(
                        session.inner.detach() if lives_on else session.inner.close()
                    )

    # The contract

    async def open(self) -> None:
        """Open the inner engine, over the way."""
        self._exchange.open(self._store_loop)
        self.way.changed = self._changed
        await self._operate(self.inner.open)

    async def aclose(self) -> None:
        """Close the connection, even if the store cannot be reached."""
        loop = self._exchange.loop
        if self._closed or loop is None:
            return
        self._closed = True
        self.way.back.clear()
        closed = loop.create_future()
        self.way.there.send(partial(self._close_inner, closed))
        if self.way.there.loop is loop and not self.way.lost:
            await closed

    def _close_inner(self, closed: asyncio.Future[None]) -> None:
        task = self._exchange.at_store(self.inner.aclose())
        task.add_done_callback(lambda _: settle(closed, None, None))

    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the outage of the way, or the trouble of the inner engine."""
        return out_of_reach() if self.way.lost else self.inner.trouble(name)

    async def attach(self, how: Attach, events: SessionEvents) -> FaultySession:
        """Attach a session over the way; a failed attach is undone at the store."""
        session = FaultySession(self._exchange, self.inner, self.clock, how, events, self._sessions)
        answer = self._operate(lambda: self._exchange.at_store(session.attach()))
        try:
            session.inner = await answer
        except BaseException:
            self.way.there.send(session.abandon)
            raise
        self._sessions[session] = None
        return session

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node, over the way."""
        await self._operate(partial(self.inner.create_node, path, config, exist_ok=exist_ok))

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change a node's settings, over the way."""
        await self._operate(partial(self.inner.alter_node, path, config))

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node, over the way."""
        await self._operate(partial(self.inner.drop_node, path, force=force))

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node, over the way."""
        found: NodeDescription = await self._operate(partial(self.inner.describe_node, path))
        return found

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, over the way."""
        found: Sequence[str] = await self._operate(self.inner.list_nodes)
        return found

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, over the way."""
        found: Sequence[SemaphoreDescription] = await self._operate(
            partial(self.inner.list_semaphores, path, owners=owners, waiters=waiters)
        )
        return found

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore, over the way."""
        found: SemaphoreDescription = await self._operate(
            partial(self.inner.describe_semaphore, path, name, owners=owners, waiters=waiters)
        )
        return found

    async def store_time(self) -> float:
        """Read the store's wall clock, over the way."""
        return float(await self._operate(self.inner.store_time))

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, over the way."""
        found: Sequence[SessionDescription] = await self._operate(
            partial(self.inner.list_sessions, path)
        )
        return found

    def pages(self) -> Pages | None:
        """Return the inner engine's pages, read over the way; ``None`` if it has none."""
        pages = self.inner.pages()
        return None if pages is None else _FaultyPages(self._operate, pages)

    def guard(self, node: str, name: str, token: int) -> GuardStatement:
        """Return the inner engine's statement, which does not use the way."""
        return self.inner.guard(node, name, token)

    async def rate(self, path: str, name: str, call: RateCall) -> RateAnswer:
        """Carry out an operation on a rate, over the way."""

        async def decided() -> RateAnswer:
            return await rate_answered(self.inner.rate(path, name, call))

        answer: RateAnswer = await self._operate(decided)
        return answer

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session, over the way."""
        return bool(await self._operate(partial(self.inner.end_session, path, session_id)))

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request, over the way."""
        return bool(await self._operate(partial(self.inner.evict, path, name, order_id)))


class _FaultyPages:
    """Pages of the inner engine, read over the same way."""

    def __init__(
        self, operate: Callable[[Callable[[], Any]], Awaitable[Any]], inner: Pages
    ) -> None:
        self._operate = operate
        self._inner = inner

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        found: Sequence[SessionDescription] = await self._operate(
            partial(self._inner.sessions, path, after=after, most=most)
        )
        return found

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        found: Sequence[str] = await self._operate(
            partial(self._inner.names, path, after=after, most=most)
        )
        return found

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        found: Sequence[SemaphoreDescription] = await self._operate(
            partial(
                self._inner.semaphores,
                path,
                owners=owners,
                waiters=waiters,
                after=after,
                most=most,
            )
        )
        return found

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        found: Sequence[RequestDescription] = await self._operate(
            partial(self._inner.requests, path, name, waiters=waiters, after=after, most=most)
        )
        return found
