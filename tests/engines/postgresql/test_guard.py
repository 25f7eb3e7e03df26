"""The fence in a transaction of the user's: it commits only while the lease is held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

import tenure
from tests.engines.postgresql.helpers import until
from tests.engines.postgresql.servers import a_schema, shared
from tests.guarantees import POSTGRESQL, guarantee

GUARD = "SELECT {}.guard(%s, %s, %s)"


@pytest.fixture
def url() -> Iterator[str]:
    with a_schema() as url:
        yield url


@pytest.fixture
def guard(url: str) -> bytes:
    return GUARD.format(url.rpartition("schema=")[2]).encode()


def transaction() -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(shared().url)


async def test_a_transaction_commits_while_the_lease_is_held(url: str, guard: bytes) -> None:
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        with transaction() as mine:
            mine.execute(guard, ("/default", "job", lease.fencing_token))


async def test_a_lease_that_was_released_fails_the_transaction(url: str, guard: bytes) -> None:
    async with tenure.connect(url) as client, client.mutex("job").lock() as lease:
        token = lease.fencing_token
    with transaction() as mine, pytest.raises(psycopg.Error, match="is not held any more") as error:
        mine.execute(guard, ("/default", "job", token))
    assert error.value.sqlstate == "TN002"


async def test_a_request_that_waits_fails_the_transaction(url: str, guard: bytes) -> None:
    async with tenure.connect(url) as client, client.session() as session:
        slots = session.semaphore("slots")
        await slots.create(limit=1)
        async with slots.acquire(), slots.enqueue():
            (waiter,) = (await slots.describe(waiters=True)).waiters
            with transaction() as mine, pytest.raises(psycopg.Error, match="is not held"):
                mine.execute(guard, ("/default", "slots", waiter.order_id))


async def test_a_release_waits_for_the_transaction_that_guards_it(url: str, guard: bytes) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        lease = await client.mutex("job").lock()
        waiting = asyncio.ensure_future(other.mutex("job").lock())
        with transaction() as mine:
            mine.execute(guard, ("/default", "job", lease.fencing_token))
            releasing = asyncio.ensure_future(lease.release())
            # Nothing else waits for it: other names, of this program and of others, go on.
            for each in (client, other):
                async with each.mutex("another").lock():
                    assert not releasing.done()
                    assert not waiting.done()
        await releasing
        await (await waiting).release()


@guarantee("stopped", "fenced", on=POSTGRESQL)
async def test_an_expiry_waits_for_the_transaction_that_guards_it(url: str, guard: bytes) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        session = await client.session(recovery_window=1)
        lease = await session.mutex("job").lock()
        waiting = asyncio.ensure_future(other.mutex("job").lock())
        with transaction() as mine:
            mine.execute(guard, ("/default", "job", lease.fencing_token))
            await session.detach()  # it expires in a second, like that of a paused program
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 2)
        granted = await waiting
        assert granted.fencing_token > lease.fencing_token
        with transaction() as mine, pytest.raises(psycopg.Error, match="is not held any more"):
            mine.execute(guard, ("/default", "job", lease.fencing_token))
        await granted.release()


async def test_a_guarded_lock_of_an_expired_session_is_refused_and_holds_nothing_up(
    url: str, guard: bytes
) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        session = await client.session(recovery_window=1)
        lease = await session.mutex("job").lock()
        with transaction() as mine:
            mine.execute(guard, ("/default", "job", lease.fencing_token))
            await session.detach()
            schema = url.rpartition("schema=")[2]
            overdue = (
                f"SELECT bool_and({schema}.expired(s)) FROM {schema}.sessions s "
                f"JOIN {schema}.requests r ON r.session = s.id"
            )
            await until(lambda: shared().execute(overdue) == [(True,)])
            assert await other.mutex("job").try_lock() is None
            async with other.mutex("another").lock(timeout=5):
                pass
        async with other.mutex("job").lock(timeout=5) as granted:
            assert granted.fencing_token > lease.fencing_token
