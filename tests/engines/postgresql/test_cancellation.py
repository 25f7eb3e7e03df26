"""A task that is cancelled at any of its suspensions leaves nothing behind in a server.

`tests.primitives.test_cancellation` has the operations, and cancels them on an engine in memory.
Here the waits of the client, the engine and psycopg are between, in several tasks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import psycopg
import pytest

import tenure
from tenure._client.client import client_core
from tenure._client.request import WAITING
from tenure._client.session_core import SessionCore
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.postgresql import connecting
from tenure.engines.postgresql.engine import PostgresEngine
from tests.cancelling import cancellers
from tests.engines.postgresql.helpers import PATIENCE, a_transaction
from tests.engines.postgresql.servers import a_schema, shared
from tests.primitives import test_cancellation as primitives
from tests.primitives.helpers import World, turns

pytestmark = pytest.mark.no_debug

early_or_late = pytest.mark.parametrize("late", [False, True], ids=["suspended", "resuming"])
once_or_twice = pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])

_BACKENDS = """SELECT pid FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"""


class Store:
    """What is in a store, a server and this program: what an operation may leave behind."""

    def __init__(self, url: str, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        self.url = url
        self._connection = connection
        self._schema = url.rpartition("schema=")[2]
        self._tasks = self._backends = self._sessions = self._requests = set[object]()

    async def rows(self, sql: str) -> set[object]:
        """Run SQL, in which SCHEMA stands for the schema's name; return the first column."""
        cursor = await self._connection.execute(sql.replace("SCHEMA", self._schema).encode())
        return {row[0] for row in await cursor.fetchall()}

    async def note(self) -> None:
        """Note what is there: this may be left."""
        self._tasks = {*asyncio.all_tasks()}
        self._backends = await self.rows(_BACKENDS)
        if await self.exists():
            self._sessions = await self.rows("SELECT id FROM SCHEMA.sessions")
            self._requests = await self.rows("SELECT order_id FROM SCHEMA.requests")

    async def exists(self) -> bool:
        """Return whether the store has been created."""
        return bool(await self.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'SCHEMA'"))

    async def _left(self) -> dict[str, object]:
        found: dict[str, set[object]] = {
            "tasks": set[object](asyncio.all_tasks()) - self._tasks,
            "connections": await self.rows(_BACKENDS) - self._backends,
        }
        if await self.exists():
            found["sessions"] = await self.rows("SELECT id FROM SCHEMA.sessions") - self._sessions
            orders = await self.rows("SELECT order_id FROM SCHEMA.requests")
            found["requests"] = orders ^ self._requests
        return {what: each for what, each in found.items() if each}

    async def nothing_is_left(self) -> None:
        """Return when tasks, connections, sessions and requests are those that were noted."""
        left: dict[str, object] = {}
        try:
            async with asyncio.timeout(PATIENCE):
                while left := await self._left():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"left: {left}") from None


@asynccontextmanager
async def a_store(url: str) -> AsyncIterator[Store]:
    async with await psycopg.AsyncConnection.connect(shared().url, autocommit=True) as connection:
        store = Store(url, connection)
        await store.note()
        yield store


@dataclass
class Scene(primitives.Place):
    """Where an operation takes place, in a server."""

    store: Store

    async def nothing_is_left(self) -> None:
        """Return when nothing is left; others proceed then, and so does the client."""
        await self.store.nothing_is_left()
        async with asyncio.timeout(PATIENCE):
            for session in (self.rival, self.session):
                await (await session.mutex("m").lock()).release()
                await (await session.semaphore("s").acquire(2)).release()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a store that the tests of this module share."""
    with a_schema() as url:
        yield url


@asynccontextmanager
async def a_scene(url: str) -> AsyncIterator[Scene]:
    world = World(SystemClock(), url)
    async with a_store(url) as store, world.client() as client, world.client() as rivals:
        session, rival = await client.session(), await rivals.session()
        await client.mutex("m").locked()  # it attaches the implicit session
        await rival.semaphore("s").create(2, exist_ok=True)
        await rival.election("e").leader()
        await store.note()
        yield Scene(world, client, session, rival, store)


@early_or_late
@pytest.mark.parametrize("operation", primitives.OPERATIONS, ids=lambda each: each.__name__)
async def test_an_operation_that_is_cancelled_leaves_nothing(
    url: str, operation: primitives.Operation, late: bool
) -> None:
    async with a_scene(url) as scene:
        for canceller in cancellers(late=late):
            await canceller.run(operation(scene))
            await scene.nothing_is_left()


async def release_when_waited_for(
    scene: Scene, leases: Sequence[tenure.Lease], ended: asyncio.Event
) -> None:
    """Release leases when a request of the scene's client waits, or the operation has ended."""
    sessions = cast("dict[SessionCore, None]", client_core(scene.client).sessions)
    while not ended.is_set() and not any(
        request.state is WAITING for each in sessions for request in each.requests.values()
    ):
        await turns(1)
    for lease in leases:
        await lease.release()


@early_or_late
@pytest.mark.parametrize("inside", [False, True], ids=["behind a rival", "handed on"])
@pytest.mark.parametrize("operation", primitives.WAITING, ids=lambda each: each.__name__)
async def test_an_operation_that_is_cancelled_around_its_grant_leaves_nothing(
    url: str, operation: primitives.Operation, inside: bool, late: bool
) -> None:
    async with a_scene(url) as scene:
        holder = scene.session if inside else scene.rival
        for canceller in cancellers(late=late):
            leases = [
                await holder.mutex("m").lock(),
                await holder.semaphore("s").acquire(2),
                await holder.election("e").campaign(),
            ]
            ended = asyncio.Event()
            releasing = asyncio.create_task(release_when_waited_for(scene, leases, ended))
            await canceller.run(operation(scene))
            ended.set()
            await releasing
            await scene.nothing_is_left()


async def come_and_go(url: str) -> None:
    async with (
        tenure.connect(url) as client,
        client.session() as session,
        session.mutex("m").lock(),
        client.mutex("n").lock(),
    ):
        await turns(1)


@early_or_late
@once_or_twice
async def test_a_client_that_is_cancelled_leaves_nothing(url: str, late: bool, twice: bool) -> None:
    async with a_store(url) as store, tenure.connect(url) as other:
        await other.mutex("m").locked()
        await store.note()
        for canceller in cancellers(late=late, twice=twice):
            await canceller.run(come_and_go(url))
            await store.nothing_is_left()
            for name in ("m", "n"):
                await (await other.mutex(name).lock(timeout=PATIENCE)).release()


@pytest.mark.exhaustive
@early_or_late
@once_or_twice
async def test_an_engine_that_is_cancelled_while_it_creates_its_store_leaves_nothing(
    late: bool, twice: bool
) -> None:
    for canceller in cancellers(late=late, twice=twice):
        with a_schema() as url:
            async with a_store(url) as store:
                engine = connect_engine(url, SystemClock())
                await canceller.run(engine.open())
                if canceller.cancelled:
                    await store.nothing_is_left()
                await engine.open()  # again
                assert await engine.list_nodes() == ["/default"]
                await engine.aclose()
                await store.nothing_is_left()


@early_or_late
@once_or_twice
async def test_an_engine_that_is_cancelled_while_it_reconnects_leaves_nothing(
    url: str, late: bool, twice: bool
) -> None:
    async def reconnect() -> None:
        engine = connect_engine(url, SystemClock())
        assert isinstance(engine, PostgresEngine)
        await engine.open()
        try:
            assert engine.connection is not None
            engine.connection.drop("the test drops it")
            await turns(2)
            await engine.reconnector.connected(None)
            assert await engine.list_nodes() == ["/default"]
        finally:
            await engine.aclose()

    async with a_store(url) as store:
        for canceller in cancellers(late=late, twice=twice):
            await canceller.run(reconnect())
            await store.nothing_is_left()


@pytest.mark.parametrize("again", [False, True], ids=["connects", "reconnects"])
async def test_an_engine_that_is_cancelled_does_not_wait_for_a_silent_server(
    url: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up = connecting._set_up
    stopped = asyncio.Event()

    async def set_up_in_silence(*connections: Any) -> bool:
        shared().signal(signal.SIGSTOP)
        stopped.set()
        return await set_up(*connections)

    engine = connect_engine(url, SystemClock())
    assert isinstance(engine, PostgresEngine)
    if again:
        await engine.open()
    monkeypatch.setattr(connecting, "_set_up", set_up_in_silence)
    try:
        if engine.connection is not None:
            engine.connection.drop("the test drops it")
        opening = asyncio.create_task(engine.open())
        await stopped.wait()
        async with asyncio.timeout(8):  # psycopg would wait for ten seconds
            if again:
                await engine.aclose()
            else:
                opening.cancel()
                await asyncio.wait([opening])
    finally:
        shared().signal(signal.SIGCONT)
    assert opening.cancelled() != again


async def close_the_session(client: tenure.Client, session: tenure.Session) -> None:
    await session.aclose()


async def leave_the_session(client: tenure.Client, session: tenure.Session) -> None:
    async with session:
        await turns(1)


async def close_the_client(client: tenure.Client, session: tenure.Session) -> None:
    await client.aclose()


async def leave_the_client(client: tenure.Client, session: tenure.Session) -> None:
    async with client, session:
        await turns(1)


@early_or_late
@once_or_twice
@pytest.mark.parametrize(
    "close",
    [close_the_session, leave_the_session, close_the_client, leave_the_client],
    ids=lambda each: each.__name__,
)
async def test_closing_that_is_cancelled_takes_effect(
    url: str,
    close: Callable[[tenure.Client, tenure.Session], Awaitable[None]],
    late: bool,
    twice: bool,
) -> None:
    async with a_store(url) as store, tenure.connect(url) as other:
        await other.mutex("m").locked()
        await store.note()
        for canceller in cancellers(late=late, twice=twice):
            client = tenure.connect(url)
            session = await client.session()
            waiting = [asyncio.create_task(session.mutex("m").lock()) for _ in range(3)]
            await waiting[0]
            await canceller.run(close(client, session))
            async with asyncio.timeout(PATIENCE), other.mutex("m").lock():
                await client.aclose()
            await asyncio.wait(waiting)
            for each in waiting[1:]:
                assert isinstance(each.exception(), tenure.SessionClosed)
            await store.nothing_is_left()


@early_or_late
@once_or_twice
@pytest.mark.parametrize("alive", [False, True], ids=["detached", "alive"])
async def test_a_takeover_that_is_cancelled_leaves_the_session_to_the_next(
    url: str, alive: bool, late: bool, twice: bool
) -> None:
    async with a_store(url) as store, tenure.connect(url) as former, tenure.connect(url) as client:
        await former.list_nodes(), await client.list_nodes()
        await store.note()
        for canceller in cancellers(late=late, twice=twice):
            session = await former.session(resumable=True)
            lease = await session.mutex("m").lock()
            if not alive:
                await session.detach()
            await canceller.run(client.session(resume=session.resume_token))
            async with (
                asyncio.timeout(PATIENCE),
                client.session(resume=session.resume_token) as resumed,
            ):
                ticket = resumed.mutex("m").recover()
                assert ticket is not None
                assert (await ticket.wait()).fencing_token == lease.fencing_token
            await store.nothing_is_left()


@early_or_late
async def test_a_detaching_that_is_cancelled_takes_effect(url: str, late: bool) -> None:
    async with a_store(url) as store, tenure.connect(url) as client:
        await client.list_nodes()
        await store.note()
        for canceller in cancellers(late=late):
            session = await client.session(resumable=True)
            await canceller.run(session.detach())
            await (await client.session(resume=session.resume_token)).aclose()
            await store.nothing_is_left()


@early_or_late
async def test_guards_and_guarded_releases_that_are_cancelled_hold_nothing_up(
    url: str, late: bool
) -> None:
    async with a_scene(url) as scene:
        for canceller in cancellers(late=late):
            lease = await scene.session.mutex("m").lock()
            async with a_transaction(shared()) as connection:
                await canceller.run(lease.guard(connection))
                releasing = asyncio.create_task(lease.release())
                await turns(1)
                releasing.cancel()
                await asyncio.wait([releasing])
            await scene.nothing_is_left()
