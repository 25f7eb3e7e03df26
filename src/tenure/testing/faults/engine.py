"""Engine at the program's end of a way, whose operations are carried out at the store's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from tenure.clock import Clock
from tenure.engines.contract import (
    Attach,
    Engine,
    EngineDefaults,
    GuardStatement,
    Pages,
    SessionEvents,
)
from tenure.errors import TenureError
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)
from tenure.testing.faults.exchange import Exchange, settle
from tenure.testing.faults.session import FaultySession, out_of_reach
from tenure.testing.faults.way import Way

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
