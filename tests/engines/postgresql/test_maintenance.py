"""Transactions of the store beside an administrator who rewrites its tables.

``CLUSTER`` stands for ``VACUUM FULL``, which does the same and cannot be part of a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import psycopg
import pytest

import tenure
from tests.engines.postgresql.helpers import PATIENCE, until
from tests.engines.postgresql.scenarios import CALLS, a_scenario
from tests.engines.postgresql.servers import PostgresServer
from tests.engines.postgresql.stepping import (
    NODE,
    TABLES,
    a_store,
    maintenance,
)

_INTERNAL = frozenset(
    {"damaged", "deadline", "end_sessions", "expired", "fault", "fits", "lock_expired", "lock_own"}
    | {
        "lock_tables",
        "mend",
        "next_order_id",
        "note_loss",
        "page",
        "quarantine",
        "remove_rates",
        "report",
    }
    | {
        "create_semaphore",
        "update_semaphore",
        "resize_semaphore",
        "delete_semaphore",
        "alter_request",
    }
    | {"server_name", "settle", "take_out", "without"}
)
"""Functions that only functions of the store call."""
_ENDED = {"drop_node": 3, "end_session": 1, "leave": 1}
"""Number of sessions that a call ends: the owner's, the waiter's and the one taken over."""


async def test_these_are_all_functions() -> None:
    async with a_store() as store:
        actor = await store.actor(window=None)
        rows = await actor.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'SCHEMA'::regnamespace"
        )
    assert {name for (name,) in rows} == _INTERNAL | CALLS.keys()


@pytest.mark.parametrize("function", CALLS)
async def test_a_transaction_that_waits_for_a_table_has_locked_no_row(function: str) -> None:
    async with a_scenario() as scenario:
        for table in TABLES:
            await scenario.admin.begin()
            await scenario.admin.execute(f"LOCK TABLE SCHEMA.{table}")
            if table != "witness":  # it has no index
                await scenario.admin.execute(f"CLUSTER SCHEMA.{table} USING {table}_pkey")
            calling = asyncio.create_task(scenario.call(function))
            if await scenario.store.blocked(scenario.caller, calling):
                for each in TABLES:
                    if each not in (table, "witness"):  # NOWAIT: an error if a row is locked
                        await scenario.other.execute(f"SELECT FROM SCHEMA.{each} FOR UPDATE NOWAIT")
            await scenario.admin.commit()
            await calling
        await scenario.store.check()


@pytest.mark.parametrize("function", CALLS)
async def test_reindex_and_a_transaction_are_in_no_deadlock(function: str) -> None:
    async with a_scenario() as scenario:
        for held, table in itertools.product(("nodes", "sessions", "former", "queues"), TABLES):
            await scenario.other.begin()
            await scenario.other.execute(f"SELECT FROM SCHEMA.{held} FOR UPDATE")
            calling = asyncio.create_task(scenario.call(function))
            if await scenario.store.blocked(scenario.caller, calling):  # it has read some tables
                indexing = asyncio.create_task(
                    scenario.admin.execute(f"REINDEX TABLE SCHEMA.{table}")
                )
                await scenario.store.blocked(scenario.admin, indexing)
                await scenario.other.commit()
                await asyncio.gather(calling, indexing)
            else:
                await scenario.other.commit()
                await calling
        await scenario.store.check()


@pytest.mark.parametrize("function", CALLS)
async def test_sessions_are_renewed_while_a_transaction_waits(function: str) -> None:
    async with a_scenario() as scenario:
        sessions = [scenario.owner, scenario.waiter, scenario.taken]
        who = [[each.session, each.token] for each in sessions]
        ended = sessions[: _ENDED.get(function, 0)]  # locked before their queues, and not renewed
        for locks, locked in (("queues FOR UPDATE", ended), ("sessions FOR KEY SHARE", [])):
            await scenario.other.begin()
            await scenario.other.execute(f"SELECT FROM SCHEMA.{locks}")
            calling = asyncio.create_task(scenario.call(function))
            if await scenario.store.blocked(scenario.caller, calling):
                alive = await scenario.admin.call("renew", False, who, scenario.epoch)
                assert {*alive} == {each.session for each in sessions if each not in locked}
            await scenario.other.commit()
            await calling


async def test_a_drop_that_is_refused_locks_no_session() -> None:
    async with a_scenario() as scenario:
        await scenario.other.begin()
        await scenario.other.execute("SELECT FROM SCHEMA.sessions FOR KEY SHARE")
        reply = await scenario.caller.call("drop_node", NODE, False, scenario.caller.channel)
        assert reply == ["busy", 3]
        await scenario.other.commit()


async def test_a_session_that_cannot_be_reattached_leaves_the_others_to_their_renewals() -> None:
    async with a_scenario() as scenario:
        sessions = [scenario.owner, scenario.waiter]
        await scenario.other.begin()
        await scenario.other.execute(  # like an operation under way in the lost connection
            "SELECT FROM SCHEMA.sessions WHERE id = %s FOR KEY SHARE", scenario.waiter.session
        )
        who = [[each.session, [each.token], f"1.again{each.session}"] for each in sessions]
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await scenario.caller.call("reattach", scenario.owner.channel, who, scenario.epoch)
        renewed = [[each.session, each.token] for each in sessions]
        alive = await scenario.admin.call("renew", False, renewed, scenario.epoch)
        assert sorted(alive) == [each.session for each in sessions]
        await scenario.other.commit()
        reply = await scenario.caller.call("reattach", scenario.owner.channel, who, scenario.epoch)
        assert reply == [scenario.epoch, ["ok", "ok"]]


@pytest.mark.parametrize(
    ("told", "renewed"), [([], True), ([True], True), ([False], False)], ids=["older", "yes", "no"]
)
async def test_a_reattached_session_is_renewed_unless_the_program_declines(
    told: list[bool], renewed: bool
) -> None:
    async with a_scenario() as scenario:
        owner = scenario.owner
        seen = f"SELECT seen FROM SCHEMA.sessions WHERE id = {owner.session}"
        before = await scenario.admin.execute(seen)
        who = [[owner.session, [owner.token], "1.again", *told]]
        reply = await scenario.caller.call("reattach", owner.channel, who, scenario.epoch)
        assert reply == [scenario.epoch, ["ok"]]
        assert (await scenario.admin.execute(seen) > before) is renewed


async def test_rewritten_tables_keep_their_queues_and_are_no_loss_of_data() -> None:
    async with a_scenario() as scenario:
        before = {
            table: sorted(await scenario.admin.execute(f"SELECT {table}::text FROM SCHEMA.{table}"))
            for table in TABLES
        }
        for table in TABLES:
            for command in maintenance("SCHEMA", table):
                await scenario.admin.execute(command)
        for table, rows in before.items():
            found = await scenario.admin.execute(f"SELECT {table}::text FROM SCHEMA.{table}")
            assert sorted(found) == rows
        assert (await scenario.admin.call("hello", False, False))[1:4] == [scenario.epoch, 0, ""]
        assert await scenario.owner.operate(scenario.owner.operation("w", "m", 1)) == [0]
        ((granted,),) = await scenario.other.execute(
            "SELECT order_id FROM SCHEMA.requests JOIN SCHEMA.queues ON id = queue "
            "WHERE order_id <= last_owner AND name = 'm'"
        )
        assert granted > scenario.lease


@pytest.mark.parametrize("released", [False, True])
async def test_a_guard_refuses_a_snapshot_from_before_the_requests_were_rewritten(
    released: bool,
) -> None:
    async with a_scenario() as scenario:
        await scenario.other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await scenario.other.execute("SELECT txid_current_snapshot()")
        if released:
            await scenario.owner.operate(scenario.owner.operation("w", "m", 1))
        await scenario.admin.execute("VACUUM FULL SCHEMA.requests")
        guard = "guard", NODE, "m", scenario.lease
        with pytest.raises(psycopg.errors.SerializationFailure, match="was rewritten"):
            await scenario.other.call(*guard)
        await scenario.other.execute("ROLLBACK")
        await scenario.other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        if released:
            with pytest.raises(psycopg.Error, match="not held any more"):
                await scenario.other.call(*guard)
        else:
            await scenario.other.call(*guard)


_PAUSING = """
    CREATE FUNCTION SCHEMA.pause(value text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
        IF value LIKE '%new' THEN PERFORM pg_advisory_xact_lock(pg_backend_pid()); END IF;
        RETURN value;
    END $$"""
_INDEXES = {
    "watch": """
        ALTER TABLE SCHEMA.queues DROP CONSTRAINT queues_node_name_key;
        CREATE INDEX ON SCHEMA.queues (SCHEMA.pause(name));
        CREATE UNIQUE INDEX unique_index ON SCHEMA.queues (node, name)""",
    "attach": """
        DROP INDEX SCHEMA.sessions_by_token;
        CREATE INDEX ON SCHEMA.sessions (SCHEMA.pause(token));
        CREATE UNIQUE INDEX unique_index ON SCHEMA.sessions (token)""",
}
"""In the first of two indexes, the rows of "new" stop until an advisory lock is free."""


@pytest.mark.parametrize("function", ["watch", "attach"])
async def test_a_row_that_two_programs_add_during_reindex_concurrently_is_one(
    function: str,
) -> None:
    async with a_scenario() as scenario:
        programs = [await scenario.store.actor(window=None) for _ in range(2)]
        await scenario.admin.execute(_PAUSING)
        await scenario.admin.execute(_INDEXES[function])
        await scenario.other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await scenario.other.execute("SELECT FROM SCHEMA.meta")
        indexing = asyncio.create_task(
            scenario.admin.execute("REINDEX INDEX CONCURRENTLY SCHEMA.unique_index")
        )
        # It waits for the old snapshot. Until then rows have to be in its new index as well.
        assert await scenario.store.blocked(scenario.admin, indexing)
        calls = []
        for program in programs:
            await scenario.caller.execute("SELECT pg_advisory_lock(%s)", program.backend)
            args = CALLS["attach"](scenario)
            if function == "watch":
                args = scenario.owner.session, scenario.owner.token, "new", "tenure_q"
            calls.append(asyncio.create_task(program.call(function, *args)))
            assert await scenario.store.blocked(program, calls[-1])  # neither sees the other's row
        answers = []
        for program, call in zip(programs, calls, strict=True):
            await scenario.caller.execute("SELECT pg_advisory_unlock(%s)", program.backend)
            answers.append(await call)
        assert answers[0] == answers[1]
        await scenario.other.commit()
        await indexing


@pytest.mark.exhaustive
async def test_contenders_have_their_locks_in_turn_while_the_tables_are_maintained(
    server: PostgresServer,
) -> None:
    inside: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    commands = [command for table in TABLES for command in maintenance("tenure", table)] * 3
    random.shuffle(commands)

    async def contend(client: tenure.Client, number: int) -> None:
        async with client.session(recovery_window=5) as session:
            while commands:
                name = random.choice(("hot", "warm", f"cold{number}", f"{random.random()}"))
                async with session.mutex(name).lock() as lease:
                    assert inside.setdefault(name, number) == number
                    tokens.setdefault(name, []).append(lease.fencing_token)
                    await asyncio.sleep(random.choice((0, 0.001)))
                    del inside[name]
                    lease.check()

    async def maintain() -> None:
        async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as admin:
            await admin.execute("SET deadlock_timeout = '100ms'")
            await admin.execute("VACUUM FULL")
            while commands:
                before = sum(map(len, tokens.values()))
                await admin.execute(commands[-1].encode())
                await until(lambda before=before: sum(map(len, tokens.values())) > before)  # type: ignore[misc]
                commands.pop()

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(tenure.connect(server.url)) for _ in range(4)]
        held = await clients[0].mutex("held").lock()
        waiting = asyncio.ensure_future(clients[1].mutex("held").lock())
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            group.create_task(maintain())
            for number, client in enumerate(clients * 3):
                group.create_task(contend(client, number))
        assert held.held
        assert not waiting.done()
        await held.release()
        async with asyncio.timeout(PATIENCE), await waiting as later:
            assert later.fencing_token > held.fencing_token
        for found in tokens.values():
            assert found == sorted(set(found))
        assert server.execute("SELECT count(*) FROM tenure.requests") == [(0,)]
