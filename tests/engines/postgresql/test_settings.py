"""Settings that others make for the account or the database of the programs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import tenure
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for, queue_of
from tests.engines.postgresql.servers import PostgresServer, a_server, new_name

pytestmark = pytest.mark.exhaustive

_SETTINGS = [
    "search_path = ''",
    "search_path = 'shadows, pg_catalog'",
    "idle_in_transaction_session_timeout = '1ms'",
    "TimeZone = 'Asia/Kathmandu'",
    "DateStyle = 'SQL, DMY'",
    "IntervalStyle = 'sql_standard'",
    "extra_float_digits = -15",
    "bytea_output = 'escape'",
    "array_nulls = off",
    "standard_conforming_strings = off",
    "transform_null_equals = on",
    "quote_all_identifiers = on",
    "plpgsql.variable_conflict = 'use_column'",
    "plpgsql.variable_conflict = 'use_variable'",
    "plpgsql.extra_errors = 'all'",
    "jit_above_cost = 0",
    "client_min_messages = 'debug5'",
    "enable_indexscan = off",
    "work_mem = '64kB'",
    "role = 'program'",
]
_UNDO = "BEGIN READ WRITE; SET ROLE NONE"
_SHADOWS = """
    CREATE SCHEMA shadows;
    CREATE VIEW shadows.pg_stat_activity AS SELECT 1 AS nothing;
    CREATE VIEW shadows.pg_settings AS SELECT 1 AS nothing;
    CREATE FUNCTION shadows.clock_timestamp() RETURNS timestamptz LANGUAGE sql
        AS 'SELECT NULL::timestamptz';
    CREATE FUNCTION shadows.set_config(text, text, boolean) RETURNS text LANGUAGE sql
        AS 'SELECT (1 / 0)::text';
    CREATE FUNCTION shadows.pg_backend_pid() RETURNS integer LANGUAGE sql AS 'SELECT 0';
    GRANT USAGE ON SCHEMA shadows TO PUBLIC"""


@pytest.fixture(scope="module")
def odd() -> Iterator[PostgresServer]:
    """Run the server of these tests."""
    with a_server("fsync=off") as server:
        server.execute("CREATE ROLE program; GRANT CREATE ON DATABASE postgres TO program")
        server.execute(_SHADOWS)
        yield server


@pytest.mark.parametrize("of", ["ROLE tenure", "DATABASE postgres"])
@pytest.mark.parametrize("setting", _SETTINGS)
async def test_every_operation_is_as_it_is_without_the_setting(
    odd: PostgresServer, setting: str, of: str
) -> None:
    if of.startswith("DATABASE") and setting.startswith("role"):
        pytest.skip("a role is not set for a database")
    url = f"{odd.url}&schema={new_name()}"
    odd.execute(f"ALTER {of} SET {setting}")
    try:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            await _operate(client, other)
    finally:
        odd.execute(f"{_UNDO}; ALTER {of} RESET ALL; COMMIT")


async def _operate(client: tenure.Client, other: tenure.Client) -> None:
    """Use what an engine has."""
    await client.create_node("/n")
    async with client.session("/n", resumable=True) as one, other.session("/n") as two:
        semaphore = one.semaphore("s")
        await semaphore.create(limit=3, data=b"\x00\\'\xff")
        lease = await semaphore.acquire(2, data=b"\\x00")
        found = await two.semaphore("s").describe(owners=True, waiters=True)
        assert (found.data, found.limit) == (b"\x00\\'\xff", 3)
        assert [(each.count, each.data) for each in found.owners] == [(2, b"\\x00")]
        with pytest.raises(tenure.AcquireTimeout):
            await two.semaphore("s").acquire(2, timeout=0.2)
        waiting = asyncio.ensure_future(two.semaphore("s").acquire(2, timeout=PATIENCE))
        async with asyncio.timeout(PATIENCE):
            while not (await semaphore.describe(waiters=True)).waiters:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await lease.release()
        async with await waiting as later:
            assert later.fencing_token > lease.fencing_token
        assert (await client.describe_node("/n")).sessions == 2
        session = await client.session("/n", recovery_window=5, resumable=True)
        held = await session.mutex("m").lock()
        resumed = await other.session(resume=session.resume_token)
        assert not held.held
        await resumed.aclose()
    async with client.mutex("m").lock() as lease:
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(client, "m")
    async with await waiting as later:
        assert later.fencing_token > lease.fencing_token
        assert await queue_of(client, "m") == (1, 0)
    await client.drop_node("/n")


async def test_an_account_that_only_reads_gets_a_clear_error(odd: PostgresServer) -> None:
    odd.execute("ALTER ROLE tenure SET default_transaction_read_only = on")
    try:
        with pytest.raises(tenure.EngineUnavailable, match="default_transaction_read_only"):
            async with tenure.connect(odd.url):
                pytest.fail("nothing can be written")
    finally:
        odd.execute(f"{_UNDO}; ALTER ROLE tenure RESET ALL; COMMIT")
