"""An engine between the primitives and another engine that answers late, fails, or not at all.

`SlowEngine` fulfils the contract: operations take effect in the order in which they were called,
answers are futures, what it tells comes after the answers that precede it, and a cancelled future
stops nothing. Between it and the store there are two lines, one each way; a test can make each
slow (`turns` of the loop) or cut it (`flowing = False`), and have operations fail (`fail`):

* both lines cut: the store is out of reach;
* `back` cut: half-open, what is sent arrives and takes effect, and no answer comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engines.contract import (
    Answer,
    Attach,
    Engine,
    EngineDefaults,
    EngineSession,
    Enqueued,
    RateAnswer,
    RateCall,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
    rate_answered,
)
from tenure.errors import SessionExpired, TenureError
from tenure.model import (
    UNCHANGED,
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    SemaphoreDescription,
    SessionDescription,
    Unchanged,
)

T = TypeVar("T")


class Line:
    """One way between a program and the store: first in, first out, `turns` of the loop long."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self._flowing = True
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def flowing(self) -> bool:
        return self._flowing

    @flowing.setter
    def flowing(self, value: bool) -> None:
        self._flowing = value
        self._flow()

    def carry(self, call: Callable[[], None]) -> None:
        self._hop(call, self.turns)

    def _hop(self, call: Callable[[], None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._hop, call, turns - 1)
        else:
            self._waiting.append(call)
            self._flow()

    def _flow(self) -> None:
        while self._flowing and self._waiting:
            self._waiting.popleft()()


class SlowEngine(EngineDefaults):
    """Another engine, which answers at once, `turns` turns of the loop away in each direction."""

    def __init__(self, inner: Engine, turns: int = 1) -> None:
        self.inner = inner
        self.there = Line(turns)
        self.back = Line(turns)
        self.sessions: list[SlowSession] = []
        self.calls: list[str] = []
        self.renewals: list[float] = []
        self.trouble_told: TenureError | None = None
        self._failures: dict[str, deque[tuple[Exception, bool]]] = {}

    def cut(self) -> None:
        """The store is out of reach, until `mend`."""
        self.there.flowing = self.back.flowing = False

    def mend(self) -> None:
        self.there.flowing = True
        self.back.flowing = True

    def fail(self, kind: str, *errors: Exception, done: bool = False) -> None:
        """Let the next operations of that name fail with `errors`, one after the other.

        With `done` they are carried out all the same.
        """
        self._failures.setdefault(kind, deque()).extend((error, done) for error in errors)

    def operate(self, kind: str, operation: Callable[[], Answer[T]]) -> asyncio.Future[T]:
        """Carry an operation to the store, and its answer back."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take_effect() -> None:
            error, done = self._outcome(kind)
            result: Any = None
            try:
                if done:
                    result = operation()
            except Exception as raised:
                error = raised
            if isinstance(result, asyncio.Future):  # the store itself takes its time
                result.add_done_callback(
                    lambda late: come_back(_result(late), error or _error(late))
                )
            else:
                come_back(result, error)

        def come_back(result: Any, error: BaseException | None) -> None:
            self.back.carry(lambda: _settle(answer, result, error))

        self.there.carry(take_effect)
        return answer

    def check(self, kind: str) -> None:
        error, _ = self._outcome(kind)
        if error is not None:
            raise error

    def _outcome(self, kind: str) -> tuple[Exception | None, bool]:
        self.calls.append(kind)
        failing = self._failures.get(kind)
        return failing.popleft() if failing else (None, True)

    async def run(self, kind: str, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self.operate(kind, lambda: started(operation()))

    async def reach(self, kind: str, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same for what connects: to a server it does so under a time limit.

        That needs a task, so that it begins a turn later than it would in order.
        """
        if not self.url.startswith(("tenure:", "ydb:")):
            return await self.run(kind, operation)
        loop = asyncio.get_running_loop()
        return await self.operate(kind, lambda: loop.create_task(operation()))

    # The contract

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def clock(self) -> Clock:
        return self.inner.clock

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def open(self) -> None:
        await self.reach("open", self.inner.open)

    async def aclose(self) -> None:
        """Its own affair: a connection is closed whether or not the store answers."""
        for _ in range(2 * self.there.turns):
            await asyncio.sleep(0)
        self.check("aclose")
        await self.inner.aclose()

    def trouble(self, name: str | None = None) -> TenureError | None:
        return self.inner.trouble(name) if self.trouble_told is None else self.trouble_told

    async def attach(self, how: Attach, events: SessionEvents) -> EngineSession:
        session = SlowSession(self, events)

        async def attach() -> None:
            if how.session_id is None and not session.unwanted:
                session.inner = await self.inner.attach(how, session)
                await session.close_if_unwanted()

        try:
            await self.reach("attach", attach)
            if how.session_id is not None:  # that takes a while in the store itself
                session.inner = await self.inner.attach(how, session)
        except BaseException:
            session.unwanted = True
            if session.inner is not None:
                there_before = how.session_id is not None
                await (session.inner.detach() if there_before else session.inner.close())
            raise
        self.sessions.append(session)
        return session

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        await self.inner.create_node(path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        await self.inner.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        await self.inner.drop_node(path, force=force)

    async def describe_node(self, path: str) -> NodeDescription:
        return await self.inner.describe_node(path)

    async def list_nodes(self) -> Sequence[str]:
        return await self.inner.list_nodes()

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        return await self.inner.list_semaphores(path, owners=owners, waiters=waiters)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        return await self.inner.describe_semaphore(path, name, owners=owners, waiters=waiters)

    async def store_time(self) -> float:
        return await self.run("store_time", self.inner.store_time)

    async def rate(self, path: str, name: str, call: RateCall) -> RateAnswer:
        return await self.run("rate", lambda: rate_answered(self.inner.rate(path, name, call)))

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        return await self.inner.list_sessions(path)

    async def end_session(self, path: str, session_id: int) -> bool:
        return await self.inner.end_session(path, session_id)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return await self.inner.evict(path, name, order_id)


class SlowSession(SessionDefaults):
    """One session of a `SlowEngine`, and what stands between the events of the two."""

    def __init__(self, engine: SlowEngine, events: SessionEvents) -> None:
        self.engine = engine
        self.events = events
        self.inner: EngineSession | None = None
        self.unwanted = False
        self._asked = engine.clock.now()

    async def close_if_unwanted(self) -> None:
        """Who asked for it has gone while the store was at it."""
        if self.unwanted:
            await self._store.close()

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

    def renew(self) -> None:
        """Without the lines' turns, because it may come from any thread."""
        if self.engine.there.flowing:
            self._asked = self.engine.clock.now()
            self.engine.renewals.append(self._asked)
            self._store.renew()

    async def close(self) -> None:
        await self.engine.run("close", self._store.close)

    async def detach(self) -> None:
        await self.engine.run("detach", self._store.detach)

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        await self.engine.run(
            "create", lambda: self._store.create_semaphore(name, limit, data, exist_ok=exist_ok)
        )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        await self.engine.run("update", lambda: self._store.update_semaphore(name, data))

    async def resize_semaphore(self, name: str, limit: int) -> None:
        await self.engine.run("resize", lambda: self._store.resize_semaphore(name, limit))

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        await self.engine.run("delete", lambda: self._store.delete_semaphore(name, force=force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        return await self.engine.run(
            "describe",
            lambda: self._store.describe_semaphore(name, owners=owners, waiters=waiters),
        )

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
        return self.engine.operate(
            "enqueue",
            lambda: self._store.enqueue(
                request_id, name, count, data, timeout=timeout, ephemeral=ephemeral
            ),
        )

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        return self.engine.operate(
            "alter", lambda: self._store.alter(request_id, count=count, data=data, timeout=timeout)
        )

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        return self.engine.operate("withdraw", lambda: self._store.withdraw(request_id))

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        return self._store.watch(
            name, data=data, owners=owners, changed=lambda: self.engine.back.carry(changed)
        )

    # What the store tells, on its way back

    def proven(self, at: float) -> None:
        at = min(at, self._asked)  # when it was sent from here
        if self.engine.back.flowing:
            self.events.proven(at)  # at once, because it may come in any thread
        else:
            self.engine.back.carry(lambda: self.events.proven(at))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        self.engine.back.carry(lambda: self.events.resumed(requests))

    def granted(self, request_id: int, order_id: int | None) -> None:
        self.engine.back.carry(lambda: self.events.granted(request_id, order_id))

    def removed(self, request_id: int, why: Removal) -> None:
        self.engine.back.carry(lambda: self.events.removed(request_id, why))

    def detached(self, cause: BaseException | None = None) -> None:
        self.engine.back.carry(lambda: self.events.detached(cause))

    def attached(self) -> None:
        self.engine.back.carry(self.events.attached)

    def ended(self, error: SessionExpired) -> None:
        self.engine.back.carry(lambda: self.events.ended(error))


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return  # nobody wants it any more
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _error(answer: asyncio.Future[Any]) -> BaseException | None:
    return asyncio.CancelledError() if answer.cancelled() else answer.exception()


def _result(answer: asyncio.Future[Any]) -> Any:
    return None if _error(answer) is not None else answer.result()


def started(operation: Coroutine[Any, Any, T]) -> Answer[T]:
    """An operation that has begun already: its result, or a future of it if that is to come."""
    try:
        waits_for = operation.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    return asyncio.get_running_loop().create_task(_Rest(operation, waits_for).complete())


class _Rest(Awaitable[T]):
    """What is left of a coroutine that has begun, and waits for its first future."""

    def __init__(self, operation: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._operation = operation
        self._waits_for = waits_for

    async def complete(self) -> T:
        return await self

    def __await__(self) -> Generator[Any, Any, T]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = self._operation.throw(error)
                else:
                    waits_for = self._operation.send(sent)
        except StopIteration as stop:
            result: T = stop.value
            return result
