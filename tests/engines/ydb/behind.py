"""Servers of YDB's API in a thread, and the store behind each of them.

The suites look at a store with what administrators can do, which YDB's API does not offer: list,
end, evict. `Behind` is a `ydb://` engine that goes to the store itself for what that engine says
it cannot do (`Unsupported`); so the suites also compare what the engine was told with the truth.
A sibling's requests are shown as those of the session that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tenure.clock import Clock, SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine, EngineSession, SessionEvents
from tenure.engines.ydb import connect
from tenure.engines.ydb.engine import YdbEngine
from tenure.errors import NodeNotFound, TenureError, Unsupported
from tenure.identity import part
from tenure.model import (
    NodeConfig,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.limits import Limits
from tenure.server.tls import TlsFiles, server_context
from tenure.server.ydb import YdbListener
from tenure.testing.conformance import Stores
from tests.server.network import Network, aside

_numbers = itertools.count(1)


class Server:
    """A server of YDB's API on a store, with a port that it keeps when it is started again."""

    def __init__(
        self,
        store: str,
        *,
        limits: Limits | None = None,
        tokens: dict[str, str] | None = None,
        tls: TlsFiles | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.store = store
        self._limits = limits or Limits()
        self._authenticator = Authenticator(tokens)
        self._tls = tls
        self._clock = clock or SystemClock()
        self.port = 0
        self._engine: Engine | None = None
        self._listener: YdbListener | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'ydbs' if self._tls else 'ydb'}://{self.address}/local"

    def start(self) -> None:
        aside().run(self._start())

    def stop(self) -> None:
        """Safe to call twice."""
        aside().run(self._stop())

    async def _start(self) -> None:
        self._engine = engine = connect_engine(self.store, self._clock)
        await engine.open()
        logger = logging.getLogger("tests.engines.ydb")
        context = Context(engine, self._limits, self._authenticator, logger)
        tls = server_context(self._tls) if self._tls else None
        scheme = "ydbs" if tls else "ydb"
        self._listener = YdbListener(context, f"{scheme}://127.0.0.1:{self.port}", tls=tls)
        await self._listener.open()
        self.port = int(self._listener.address.partition("://")[2].split("/")[0].split(":")[1])

    async def _stop(self) -> None:
        listener, self._listener = self._listener, None
        engine, self._engine = self._engine, None
        if listener is not None and engine is not None:
            await listener.aclose()
            await engine.aclose()


class Proxy(Network):
    """A bad network before a server."""

    def __init__(self, server: Server) -> None:
        super().__init__(lambda: server.port)

    @property
    def url(self) -> str:
        return f"ydb://127.0.0.1:{self.port}/local"


class Family:
    """All engines of one store, for the sessions that are siblings of others."""

    def __init__(self) -> None:
        self.engines: list[YdbEngine] = []

    def owner(self, session_id: int) -> int:
        for engine in self.engines:
            session_id = engine.database.siblings.get(session_id, session_id)
        return session_id

    def siblings_of(self, session_id: int) -> list[int]:
        found = [engine.database.siblings.items() for engine in self.engines]
        return [sibling for each in found for sibling, of in each if of == session_id]


class _SessionBehind:
    """A session that deletes by force even what YDB's API cannot, and knows others' siblings."""

    def __init__(self, session: Any, behind: Behind, node: str) -> None:
        self._session = session
        self._behind = behind
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def detach(self) -> None:
        """Until it can be seen behind the server too, which goes on to tell its store."""
        await self._session.detach()
        async with asyncio.timeout(20):
            while await self._behind.attached(self._node, self._session.id):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        found = await self._session.describe_semaphore(name, owners=owners, waiters=waiters)
        return self._behind.owned(found)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        try:
            await self._session.delete_semaphore(name, force=force)
        except Unsupported:
            await self._behind.delete(self._node, name)


class Behind:
    """A `ydb://` engine, and the store behind its server."""

    def __init__(self, inner: YdbEngine, store_url: str, family: Family) -> None:
        self.inner = inner
        self.url = inner.url
        self.clock = inner.clock
        self.capabilities = inner.capabilities
        self._store_url = store_url
        self._store: Engine | None = None
        self._family = family
        family.engines.append(inner)

    def trouble(self, name: str | None = None) -> TenureError | None:
        return self.inner.trouble(name)

    async def open(self) -> None:
        await self.inner.open()

    async def aclose(self) -> None:
        await self.inner.aclose()
        store, self._store = self._store, None
        if store is not None:
            await store.aclose()

    async def store(self) -> Engine:
        if self._store is None:
            self._store = connect_engine(self._store_url, self.clock)
            await self._store.open()
        return self._store

    async def attach(self, how: Attach, events: SessionEvents) -> EngineSession:
        session: Any = _SessionBehind(await self.inner.attach(how, events), self, how.node)
        return session  # type: ignore[no-any-return]

    async def attached(self, node: str, session_id: int) -> bool:
        """Whether it is, or one of its siblings."""
        ids = {session_id, *self._family.siblings_of(session_id)}
        with contextlib.suppress(NodeNotFound):
            found = await (await self.store()).list_sessions(node)
            return any(each.id in ids and each.attached for each in found)
        return False

    async def delete(self, node: str, name: str) -> None:
        """Delete by force, through a session of the store's own."""
        store = await self.store()
        session = await store.attach(Attach(node, 60.0), _Nobody())
        try:
            await session.delete_semaphore(name, force=True)
        finally:
            await session.close()

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        await self.inner.create_node(path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        await self.inner.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        try:
            await self.inner.drop_node(path, force=force)
        except Unsupported:
            await (await self.store()).drop_node(path, force=force)

    async def describe_node(self, path: str) -> NodeDescription:
        return await self.inner.describe_node(path)

    async def list_nodes(self) -> Sequence[str]:
        return await (await self.store()).list_nodes()

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        found = await (await self.store()).list_semaphores(path, owners=owners, waiters=waiters)
        return [self.owned(each) for each in found]

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        found = await self.inner.describe_semaphore(path, name, owners=owners, waiters=waiters)
        return self.owned(found)

    def owned(self, found: SemaphoreDescription) -> SemaphoreDescription:
        """With the requests of siblings as those of the sessions that they belong to."""
        return replace(found, owners=self._owned(found.owners), waiters=self._owned(found.waiters))

    def _owned(self, requests: tuple[RequestDescription, ...]) -> tuple[RequestDescription, ...]:
        owner = self._family.owner
        return tuple(replace(each, session_id=owner(each.session_id)) for each in requests)

    async def store_time(self) -> float:
        return await self.inner.store_time()

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        found = await (await self.store()).list_sessions(path)
        return [
            replace(each, description=part(each.description)[0])  # the server adds a host
            for each in found
            if self._family.owner(each.id) == each.id
        ]

    async def end_session(self, path: str, session_id: int) -> bool:
        """With its siblings, which nobody else would end if its program has left."""
        store = await self.store()
        for sibling in self._family.siblings_of(session_id):
            await store.end_session(path, sibling)
        return await store.end_session(path, session_id)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return await (await self.store()).evict(path, name, order_id)


class _Nobody:
    """Hears nothing of a session that lives for one call."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@contextlib.contextmanager
def in_memory() -> Iterator[str]:
    yield f"memory://behind-ydb-{next(_numbers)}"


@contextlib.contextmanager
def in_a_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tenure-") as folder:
        yield f"sqlite:///{folder}/store.db"


def stores_of(
    empty: Callable[[], contextlib.AbstractContextManager[str]], options: str = ""
) -> Stores:
    """Stores behind servers of their own."""
    families: dict[str, tuple[str, Family]] = {}

    @contextlib.contextmanager
    def served() -> Iterator[str]:
        with empty() as store:
            server = Server(store)
            server.start()
            try:
                url = server.url + options
                families[url] = (store, Family())
                yield url
            finally:
                server.stop()

    def connector(url: str, clock: Clock) -> Any:
        store, family = families[url]
        return Behind(connect(url, clock), store, family)

    return Stores(served, connector)
