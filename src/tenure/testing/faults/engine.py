"""Engine at the program's end of a way, which has its operations carried out at the store's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engines.contract import Answer, Attach, Engine, EngineDefaults, Pages, SessionEvents
from tenure.errors import EngineUnavailable, TenureError
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)
from tenure.testing.faults.answers import Rest, settle
from tenure.testing.faults.session import FaultySession, out_of_reach
from tenure.testing.faults.way import Message, Way

__all__ = ["FaultyEngine"]

T = TypeVar("T")


class FaultyEngine(EngineDefaults):
    """Engine that reaches an inner engine over a `Way`. It belongs to the loop that opens it.

    Args:
        inner: the engine at the store's end, not opened yet.
        way: the simulated network between the two.
        clock: the program's clock, if it is not the store's.
        store_loop: the loop on which the inner engine is opened, if it is not the program's.
        io_loop: the loop on which messages arrive, if it is not the program's. It simulates an
            engine with a thread for I/O, which receives proofs while the program's loop is stuck.
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
        """Send an operation to the store, and return the future of its answer."""
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
        """Start an operation now, in the order of arrival; a task finishes it if it has to wait."""
        try:
            waits_for = operation.send(None)
        except StopIteration as stop:
            value: T = stop.value
            return value
        return self.at_store(Rest(operation, waits_for).finish())

    def at_store(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on the store's loop."""
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
        self.tell(partial(settle, answer, result, error))

    def tell(self, message: Message) -> None:
        """Send a message back; it is called on the program's loop when it arrives."""
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
        """Simulate the death of the program: no message is sent or received any more.

        Args:
            noticed: true if the store detects the death, as it would detect a closed connection
                or a dead process of its own host.
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
        """Close the connection, whether or not the store can be reached."""
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
        task.add_done_callback(lambda _: settle(closed, None, None))

    def trouble(self, name: str | None = None) -> TenureError | None:
        return out_of_reach() if self.way.lost else self.inner.trouble(name)

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

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        found: SemaphoreDescription = await self.operate(
            partial(self.inner.describe_semaphore, path, name, owners=owners, waiters=waiters)
        )
        return found

    async def store_time(self) -> float:
        return float(await self.operate(self.inner.store_time))

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        found: Sequence[SessionDescription] = await self.operate(
            partial(self.inner.list_sessions, path)
        )
        return found

    def pages(self) -> Pages | None:
        pages = self.inner.pages()
        return None if pages is None else _FaultyPages(self, pages)

    async def end_session(self, path: str, session_id: int) -> bool:
        return bool(await self.operate(partial(self.inner.end_session, path, session_id)))

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return bool(await self.operate(partial(self.inner.evict, path, name, order_id)))


class _FaultyPages:
    """Pages of the inner engine, read over the same way."""

    def __init__(self, engine: FaultyEngine, inner: Pages) -> None:
        self._engine = engine
        self._inner = inner

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        found: Sequence[SessionDescription] = await self._engine.operate(
            partial(self._inner.sessions, path, after=after, most=most)
        )
        return found

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        found: Sequence[SemaphoreDescription] = await self._engine.operate(
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
