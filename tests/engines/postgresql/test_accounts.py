"""Settings and rights of the account that a program uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

import tenure
from tenure.engines.postgresql.schema import initialize, upgrade
from tenure.engines.postgresql.url import parse
from tests.engines.postgresql.helpers import (
    PATIENCE,
    is_waited_for,
    queue_of,
    until_detached_and_back,
)
from tests.engines.postgresql.scenarios import CALLS, a_scenario
from tests.engines.postgresql.servers import PostgresServer

pytestmark = pytest.mark.exhaustive

_ROLE = "program"
_READING = {"describe_node", "guard", "list_nodes", "list_sessions", "look", "store_time"}
"""Functions that write nothing."""
_HOSTILE = b"""
    CREATE FUNCTION public.same(oid, regclass) RETURNS boolean LANGUAGE sql AS
        $$ INSERT INTO public.called VALUES ('=') RETURNING $1 = $2::oid $$;
    CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.same)"""
"""Fits the view `calm` better than the operator in `pg_catalog`."""


def _url_of_the_role(server: PostgresServer) -> str:
    return server.url.replace("tenure@", f"{_ROLE}@")


@contextmanager
def _a_locked_queue(server: PostgresServer, name: str) -> Iterator[None]:
    """Lock the row of a queue, as an administrator's open transaction does."""
    with psycopg.connect(server.url) as connection:
        connection.execute("SELECT FROM tenure.queues WHERE name = %s FOR UPDATE", (name,))
        yield


@pytest.mark.parametrize(
    "setting",
    [
        "statement_timeout = '150ms'",
        "lock_timeout = '20ms'",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_isolation = 'repeatable read'",
        "synchronous_commit = 'off'",
        "idle_session_timeout = '300ms'",
    ],
)
async def test_every_setting_of_the_account_leaves_locks_as_they_are(
    server: PostgresServer, setting: str
) -> None:
    if setting.startswith("idle_session_timeout") and server.major < 14:
        pytest.skip("PostgreSQL 13 has no idle_session_timeout")
    server.execute(f"ALTER ROLE tenure SET {setting}")
    inside: list[int] = []
    tokens: list[int] = []

    async def contend(number: int) -> None:
        async with tenure.connect(server.url) as client, client.session() as session:
            for _ in range(10):
                async with session.mutex("m").lock() as lease:
                    assert not inside
                    inside.append(number)
                    tokens.append(lease.fencing_token)
                    await asyncio.sleep(0)
                    assert inside.pop() == number

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(contend(number))
    assert len(tokens) == 60
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("setting", ["statement_timeout = '150ms'", "lock_timeout = '20ms'"])
async def test_a_request_outlasts_the_lock_on_a_row_that_its_account_must_not_wait_for(
    server: PostgresServer, setting: str
) -> None:
    async with tenure.connect(server.url) as client, client.mutex("m").lock():
        pass
    server.execute(f"ALTER ROLE tenure SET {setting}")
    async with tenure.connect(server.url) as client, client.session() as session:
        with _a_locked_queue(server, "m"):
            with pytest.raises(tenure.AcquireTimeout, match="refuses to commit: canceling"):
                await session.mutex("m").lock(timeout=1)
            locking = asyncio.ensure_future(session.mutex("m").lock())
            await asyncio.wait([locking], timeout=0.2)
            assert not locking.done()
        async with asyncio.timeout(PATIENCE), await locking:
            assert await queue_of(client, "m") == (1, 0)


@pytest.mark.parametrize("durability", ["full", "process"])
@pytest.mark.parametrize(
    "setting", ["default_transaction_isolation = 'serializable'", "lock_timeout = '1ms'"]
)
async def test_programs_that_connect_at_once_after_a_crash_all_get_in(
    server: PostgresServer, setting: str, durability: str
) -> None:
    url = f"{server.url}&durability={durability}"
    async with tenure.connect(url):
        server.execute(f"ALTER ROLE tenure SET {setting}")
    server.crash()
    await asyncio.to_thread(server.start)

    async def lock() -> int:
        async with (
            tenure.connect(url) as client,
            client.mutex("m").lock(timeout=PATIENCE) as lease,
        ):
            return lease.fencing_token

    tokens = await asyncio.gather(*(lock() for _ in range(10)))
    assert len(set(tokens)) == 10


async def test_a_crash_loses_no_grant_although_the_account_does_not_wait_for_the_disk(
    server: PostgresServer,
) -> None:
    server.execute("ALTER ROLE tenure SET synchronous_commit = 'off'")
    # The server's own flush of such commits comes too late for this test.
    server.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    server.execute("SELECT pg_reload_conf()")
    async with tenure.connect(server.url) as client:
        events = client.events()
        async with client.mutex("m").lock() as lease:
            server.crash()
            await asyncio.to_thread(server.start)
            await until_detached_and_back(events)
            assert await queue_of(client, "m") == (1, 0)
            assert lease.held
        await events.aclose()


@pytest.mark.parametrize("function", sorted(CALLS.keys() - _READING - {"data_was_restored"}))
async def test_every_function_that_writes_waits_for_the_disk_whatever_the_account_does(
    function: str,
) -> None:
    async with a_scenario() as scenario:
        caller = scenario.caller
        await caller.execute("SET synchronous_commit = 'off'")
        await caller.begin()
        await caller.call(function, *CALLS[function](scenario))
        assert await caller.execute("SHOW synchronous_commit") == [("on",)]
        await caller.execute("ROLLBACK")


async def test_an_account_that_may_not_create_the_schema_gets_a_clear_error(
    server: PostgresServer,
) -> None:
    server.execute(f"CREATE ROLE {_ROLE} LOGIN")
    with pytest.raises(tenure.AuthenticationFailed) as refused:
        async with tenure.connect(_url_of_the_role(server)):
            pytest.fail("there is no store")
    text = str(refused.value)
    assert "has no schema tenure, and this account may not create it" in text
    assert "permission denied for database postgres" in text
    assert "administrator" in text


async def test_an_account_without_rights_to_the_store_gets_a_clear_error(
    server: PostgresServer,
) -> None:
    server.execute(f"CREATE ROLE {_ROLE} LOGIN")
    async with tenure.connect(server.url):
        pass
    for granted in ("nothing", "USAGE"):
        if granted == "USAGE":
            server.execute(f"GRANT USAGE ON SCHEMA tenure TO {_ROLE}")
        with pytest.raises(tenure.AuthenticationFailed, match="permission denied for"):
            async with tenure.connect(_url_of_the_role(server)):
                pytest.fail("the account may not use the store")


async def test_an_account_with_usage_and_execute_can_use_a_store_that_exists(
    server: PostgresServer,
) -> None:
    server.execute(f"CREATE ROLE {_ROLE} LOGIN")
    async with tenure.connect(server.url) as owner:
        server.execute(f"GRANT USAGE ON SCHEMA tenure TO {_ROLE}")
        server.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tenure TO {_ROLE}")
        async with tenure.connect(_url_of_the_role(server)) as client:
            async with client.session() as session:
                await session.semaphore("s").create(limit=2)
                lease = await session.semaphore("s").acquire(2)
                waiting = asyncio.ensure_future(owner.semaphore("s").acquire())
                await is_waited_for(client, "s")
                await lease.release()
                async with asyncio.timeout(PATIENCE), await waiting as later:
                    assert later.fencing_token > lease.fencing_token
            assert await queue_of(client, "s") == (0, 0)
    with (
        psycopg.connect(_url_of_the_role(server)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("SELECT FROM tenure.requests")


async def test_an_operator_of_another_account_is_not_called(
    server: PostgresServer,
) -> None:
    server.execute(f"CREATE ROLE {_ROLE} LOGIN")
    server.execute(f"GRANT CREATE ON SCHEMA public TO {_ROLE}")
    server.execute("CREATE TABLE called (what text); GRANT INSERT ON called TO PUBLIC")
    with psycopg.connect(_url_of_the_role(server), autocommit=True) as hostile:
        hostile.execute(_HOSTILE)
    assert initialize(parse(server.url))
    upgrade(parse(server.url))
    async with tenure.connect(server.url) as client, client.mutex("m").lock():
        pass
    assert server.execute("SELECT what FROM called") == []
