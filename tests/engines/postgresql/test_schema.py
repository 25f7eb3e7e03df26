"""Creation and loss of the schema."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable

import psycopg
import pytest

import tenure
from tenure.engines.contract import Attach, Withdrawn
from tenure.engines.postgresql.connecting import OpenedConnections
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import (
    PATIENCE,
    a_transaction,
    an_engine,
    is_waited_for,
    queue_of,
)
from tests.engines.postgresql.servers import PostgresServer

_PROGRAM = """
import asyncio, sys, tenure

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        print("connected", flush=True)
        async with client.mutex("m").lock(timeout=30) as lease:
            print(lease.fencing_token)

sys.stdin.readline()
asyncio.run(main())
"""


async def test_programs_that_create_the_store_at_the_same_time_all_use_it(
    server: PostgresServer,
) -> None:
    programs = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _PROGRAM, server.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(10)
    ]
    said = await asyncio.gather(*(each.communicate(b"go\n") for each in programs))
    assert [each.returncode for each in programs] == [0] * 10, said
    tokens = {int(output.split()[1]) for output, _ in said}
    assert len(tokens) == 10


@pytest.mark.parametrize("setting", ["", "lock_timeout = '1ms'", "statement_timeout = '200ms'"])
async def test_clients_that_create_the_store_at_the_same_time_all_use_it(
    server: PostgresServer, setting: str
) -> None:
    if setting:
        server.execute(f"ALTER ROLE tenure SET {setting}")

    async def lock() -> int:
        async with (
            tenure.connect(server.url) as client,
            client.mutex("m").lock(timeout=PATIENCE) as lease,
        ):
            return lease.fencing_token

    tokens = await asyncio.gather(*(lock() for _ in range(10)))
    assert len(set(tokens)) == 10


async def test_a_schema_that_was_created_just_now_is_not_taken_for_another_programs(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tenure.connect(server.url) as client:
        await client.list_nodes()
    calls = []
    call = OpenedConnections.call

    async def looked_up_before(self: OpenedConnections, function: str, *words: object) -> object:
        calls.append(function)
        if len(calls) == 1:  # as the server says whose memory is older than the schema
            raise psycopg.errors.UndefinedFunction(f"function {function} does not exist")
        return await call(self, function, *words)

    monkeypatch.setattr(OpenedConnections, "call", looked_up_before)
    async with tenure.connect(server.url) as client, client.mutex("m").lock(timeout=PATIENCE):
        pass
    assert calls[:2] == ["tenure.hello"] * 2


async def test_a_program_that_is_also_creating_the_store_is_not_taken_for_a_user_of_a_former_one(
    server: PostgresServer,
) -> None:
    async with a_transaction(server) as other:
        # As a program looked for users of a dropped store before it read `pg_locks`.
        looks = "hashtext('tenure: programs'), hashtext('tenure')"
        await other.execute(f"SELECT pg_advisory_xact_lock({looks})")
        async with tenure.connect(server.url) as client:
            lease = await client.mutex("m").try_lock()
            assert lease is not None
            await lease.release()


@pytest.mark.exhaustive
async def test_a_dropped_schema_costs_its_leases_and_a_new_program_creates_a_store(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client, tenure.connect(server.url) as other:
        session = await client.session()
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(client, "m")
        server.execute("DROP SCHEMA tenure CASCADE")
        acting = asyncio.ensure_future(session.semaphore("s").create(limit=1))
        async with asyncio.timeout(PATIENCE):
            lost = await lease.wait_lost()
            with pytest.raises(tenure.SessionExpired, match="the schema of the store was dropped"):
                await acting
        assert isinstance(lost.__cause__, tenure.SessionExpired)
        assert "the schema of the store was dropped" in str(lost.__cause__)
        with pytest.raises(tenure.TenureError, match="was dropped: start the programs"):
            await client.session()
        async with (
            tenure.connect(server.url) as again,
            again.mutex("m").lock(timeout=PATIENCE) as later,
        ):
            assert later.fencing_token > lease.fencing_token
            assert await queue_of(again, "m") in {(1, 0), (1, 1)}
        await asyncio.wait([waiting], timeout=PATIENCE)
        assert waiting.done()
        if not waiting.exception():
            await waiting.result().release()


async def test_operations_of_a_session_fail_with_it_when_the_schema_is_dropped(
    server: PostgresServer,
) -> None:
    async with (
        tenure.connect(server.url) as client,
        an_engine(server.url, client.clock) as engine,
    ):
        first, second = Recorder(), Recorder()
        session = await engine.attach(Attach("/default", 30), first)
        leaving = await engine.attach(Attach("/default", 30), second)
        server.execute("DROP SCHEMA tenure CASCADE")
        first.sending(1)
        request = session.enqueue(1, "m", 1, b"", timeout=None, ephemeral=True)
        withdrawal = session.withdraw(2)
        assert isinstance(request, asyncio.Future)
        assert isinstance(withdrawal, asyncio.Future)
        calls: list[Awaitable[object]] = [
            request,
            session.create_semaphore("s", 1, b"", exist_ok=False),
            session.describe_semaphore("s", owners=True, waiters=True),
        ]
        async with asyncio.timeout(PATIENCE):
            await leaving.close()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert await withdrawal is Withdrawn.MISSING
        assert [type(each) for each in answers] == [tenure.SessionExpired] * len(calls)
        assert "was dropped: start the programs" in str(engine.trouble())


@pytest.mark.parametrize("schema", ["public", "another"])
async def test_the_schema_of_another_program_is_refused_and_left_alone(
    server: PostgresServer, schema: str
) -> None:
    server.execute("CREATE SCHEMA another")
    with pytest.raises(tenure.EngineError, match=f"schema {schema} is there, and is not one of"):
        async with tenure.connect(f"{server.url}&schema={schema}"):
            pytest.fail("there is no store")
    assert server.execute(
        f"SELECT count(*) FROM pg_proc WHERE pronamespace = '{schema}'::regnamespace"
    ) == [(0,)]
