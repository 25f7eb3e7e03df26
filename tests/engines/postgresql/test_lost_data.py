"""What a store has lost, such as one of an asynchronous standby, is found before it does harm.

The tests put back an earlier state of the rows. A program whose connection outlives that, as one
behind a pooler does, is told by its next renewal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

import tenure
from tenure._client.internals import session_core
from tenure.engines.contract import Attach, Place
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.recorder import Attached, Proven, Recorder, Removed
from tests.engines.postgresql.helpers import PATIENCE, an_engine, queue_of, until
from tests.engines.postgresql.servers import a_schema, shared

_WINDOW = 2.0
_PUT_BACK = """
    UPDATE SCHEMA.queues q SET held = s.held, whole = s.whole, owners = s.owners,
        waiters = s.waiters, last_owner = s.last_owner
    FROM SCHEMA.saved_queues s WHERE s.id = q.id"""


@pytest.fixture
def url() -> Iterator[str]:
    with a_schema() as url:
        yield url


class _Rows:
    """The rows of a store's queues and requests."""

    def __init__(self, url: str) -> None:
        self._schema = url.rpartition("schema=")[2]

    def _run(self, *statements: str) -> None:
        text = ";".join(statements).replace("SCHEMA", self._schema)
        shared().execute(f"BEGIN;{text};COMMIT")

    @property
    def waiters(self) -> int:
        """Number of requests that wait."""
        ((found,),) = shared().execute(f"SELECT sum(waiters) FROM {self._schema}.queues")
        return int(str(found))

    def save(self) -> None:
        """Keep the rows as they are."""
        self._run(
            "CREATE TABLE SCHEMA.saved_queues AS TABLE SCHEMA.queues",
            "CREATE TABLE SCHEMA.saved_requests AS TABLE SCHEMA.requests",
        )

    @contextmanager
    def blocked(self) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
        """Let nothing change the queues meanwhile."""
        with psycopg.connect(shared().url) as connection:
            connection.execute(f"SELECT FROM {self._schema}.queues FOR UPDATE".encode())
            yield connection

    @contextmanager
    def unreachable(self, session: tenure.Session) -> Iterator[None]:
        """Let a program lose its connection, and make no other one meanwhile."""
        engine = session_core(session).client.engine
        self._run("UPDATE SCHEMA.meta SET serves = 1000")
        engine.connection.drop("the test drops it")  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._run("UPDATE SCHEMA.meta SET serves = 1")

    def crash(self) -> None:
        """End what waits for the queues, as a crash of the server does."""
        waits = f"query LIKE '%{self._schema}.%' AND wait_event_type = 'Lock'"
        find = f"SELECT pid FROM pg_stat_activity WHERE {waits}"
        shared().execute(f"SELECT pg_terminate_backend(pid, 10000) FROM ({find}) found")

    @property
    def owners(self) -> list[int]:
        """The order ids of the owners."""
        found = shared().execute(
            f"SELECT y.order_id FROM {self._schema}.requests y JOIN {self._schema}.queues x "
            "ON x.id = y.queue AND y.order_id <= x.last_owner"
        )
        return [int(str(order_id)) for (order_id,) in found]

    def lose(self, blocking: psycopg.Connection[tuple[object, ...]] | None = None) -> None:
        """Put back what was kept, as a failover that loses the latest commits does.

        Args:
            blocking: has the queues.
        """
        statements = [
            "DELETE FROM SCHEMA.requests",
            "INSERT INTO SCHEMA.requests TABLE SCHEMA.saved_requests",
            _PUT_BACK,
            "SELECT SCHEMA.data_was_restored()",
        ]
        if blocking is None:
            self._run(*statements)
        else:
            blocking.execute(";".join(statements).replace("SCHEMA", self._schema).encode())
            blocking.commit()


@pytest.fixture
def rows(url: str) -> _Rows:
    return _Rows(url)


async def test_a_lease_that_the_store_has_lost_is_lost_although_the_connection_stays(
    url: str, rows: _Rows
) -> None:
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=_WINDOW) as session,
        other.session(recovery_window=_WINDOW) as second,
    ):
        async with session.mutex("m").lock():
            pass
        rows.save()
        lease = await session.mutex("m").lock()
        rows.lose()
        async with second.mutex("m").lock(timeout=PATIENCE) as later:
            assert not lease.held
            assert later.fencing_token > lease.fencing_token
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await lease.wait_lost(), tenure.LeaseLost)


async def test_nothing_is_proven_after_a_loss_before_the_requests_have_been_compared(
    url: str, rows: _Rows
) -> None:
    async with tenure.connect(url) as client, an_engine(url, client.clock) as engine:
        events = Recorder()
        session = await engine.attach(Attach("/default", _WINDOW), events)
        rows.save()
        events.sending(1)
        answer = session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
        assert isinstance(answer, asyncio.Future)
        assert (await answer).place is Place.GRANTED
        rows.lose()
        before = len(events.said)
        session.renew()
        await events.wait_for(lambda found: len(found.removals) == 1, "the loss of the lease")
        await events.wait_for(lambda found: isinstance(found.said[-1], Attached), "contact again")
        found = [type(each) for each in events.said[before:]]
        assert found.index(Removed) < found.index(Proven)
        assert not events.broken
        await session.close()


async def test_a_release_that_the_store_has_lost_is_repeated(url: str, rows: _Rows) -> None:
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=_WINDOW) as session,
        other.session(recovery_window=_WINDOW) as second,
    ):
        async with session.mutex("m").lock() as lease:
            rows.save()
        rows.lose()
        async with second.mutex("m").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > lease.fencing_token
        assert await queue_of(other, "m") == (0, 0)


async def test_a_lease_that_was_handed_on_is_lost_with_its_place(url: str, rows: _Rows) -> None:
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=_WINDOW) as session,
        other.session(recovery_window=_WINDOW) as second,
    ):
        first = await session.mutex("m").lock()
        rows.save()
        waiting = asyncio.create_task(session.mutex("m").lock())
        await until(lambda: rows.waiters == 1)
        await session.mutex("m").locked()  # its answer follows that of the request
        rows.lose()
        releasing = asyncio.create_task(first.release())
        lease = await waiting  # this program does not know of the loss yet
        async with second.mutex("m").lock(timeout=PATIENCE) as later:
            assert not lease.held
            assert later.fencing_token > lease.fencing_token
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await lease.wait_lost(), tenure.LeaseLost)
        await asyncio.gather(releasing, return_exceptions=True)


async def test_a_lease_that_the_store_knows_as_waiting_is_lost(url: str, rows: _Rows) -> None:
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=_WINDOW) as session,
    ):
        second = await other.session(recovery_window=_WINDOW)
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(second.mutex("m").lock())
        await until(lambda: rows.waiters == 1)
        rows.save()
        await lease.release()
        later = await waiting
        rows.lose()
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await later.wait_lost(), tenure.LeaseLost)
        async with session.mutex("m").lock(timeout=PATIENCE) as last:
            assert last.fencing_token > later.fencing_token
        assert await queue_of(other, "m") == (0, 0)
        await second.aclose()


@pytest.mark.exhaustive
async def test_a_lease_that_was_handed_on_is_lost_if_another_request_is_ahead_again(
    url: str, rows: _Rows
) -> None:
    """The other program has not learned that its request was evicted, and the store has lost it."""
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=2 * _WINDOW) as session,
        other.session(recovery_window=2 * _WINDOW) as second,
    ):
        first = await session.mutex("m").lock()
        theirs = asyncio.create_task(second.mutex("m").lock())
        await until(lambda: rows.waiters == 1)
        waiting = [asyncio.create_task(session.mutex("m").lock()) for _ in range(2)]
        await until(lambda: rows.waiters == 3)
        await session.mutex("m").locked()
        rows.save()
        with rows.unreachable(second):
            async with client.session() as administrator:
                found = await administrator.semaphore("m").describe(owners=True, waiters=True)
            assert await client.evict("/default", "m", found.waiters[0].order_id)
            await first.release()
            lease = await waiting[0]
            with rows.blocked() as blocking:
                releasing = asyncio.create_task(lease.release())
                lease = await waiting[1]
                rows.lose(blocking)
            await asyncio.gather(releasing, return_exceptions=True)
        later = await theirs
        assert not lease.held
        await later.release()


async def test_a_lease_that_was_handed_on_is_kept_behind_the_request_that_handed_it_on(
    url: str, rows: _Rows
) -> None:
    async with (
        tenure.connect(url) as client,
        client.session(recovery_window=2 * _WINDOW) as session,
    ):
        first = await session.mutex("m").lock()
        waiting = asyncio.create_task(session.mutex("m").lock())
        await until(lambda: rows.waiters == 1)
        await session.mutex("m").locked()
        rows.save()
        with rows.blocked() as blocking:
            releasing = asyncio.create_task(first.release())
            lease = await waiting
            with rows.unreachable(session):
                rows.crash()
                rows.lose(blocking)
        await releasing
        assert rows.owners == []  # in the quarantine
        await until(lambda: rows.owners == [lease.fencing_token])
        assert lease.held
