"""Transactions of the store beside an administrator who rewrites its tables.

``CLUSTER`` stands for ``VACUUM FULL``, which does the same and cannot be part of a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import tenure
from tenure.core import rules
from tests.engines.postgresql.helpers import PATIENCE, until
from tests.engines.postgresql.servers import PostgresServer
from tests.engines.postgresql.stepping import (
    NODE,
    TABLES,
    Actor,
    Store,
    a_store,
    arguments,
    maintenance,
)

_PASSING = frozenset({"TN001", "55P03"})
"""Codes of errors after which the engine sends the call again."""
_INTERNAL = frozenset(
    {"deadline", "end_sessions", "expired", "fault", "fits", "lock_expired", "lock_own"}
    | {"lock_tables", "next_order_id", "page", "quarantine", "report", "server_name", "settle"}
    | {"create_semaphore", "update_semaphore", "delete_semaphore", "alter_request"}
    | {"take_out", "without"}
)
"""Functions that only functions of the store call."""
_WAITS = 600.0


@dataclass
class _Scene:
    """A store with a bit of everything.

    Attributes:
        owner: owns the mutex "m", with request 1.
        waiter: waits for it, with request 1.
        expired: owns the mutex "d", with request 1.
        taken: its session was taken over, which is not completed.
        caller: makes the calls of the test, each in a transaction that is rolled back.
        admin: maintains the tables.
        other: holds locks, or looks for them.
        lease: order id of the owner's request.
        epoch: of the store.
    """

    store: Store
    owner: Actor
    waiter: Actor
    expired: Actor
    taken: Actor
    caller: Actor
    admin: Actor
    other: Actor
    lease: int
    epoch: str

    async def call(self, function: str) -> Any:
        """Call a function in a transaction, and undo what it does."""
        await self.caller.begin()
        try:
            return await self.caller.call(function, *_CALLS[function](self))
        except psycopg.Error as error:
            if error.sqlstate not in _PASSING:
                raise
        finally:
            await self.caller.execute("ROLLBACK")


@contextlib.asynccontextmanager
async def _a_scene() -> AsyncIterator[_Scene]:
    async with a_store() as store:
        owner, waiter, expired, taken = [await store.actor(window=_WAITS) for _ in range(4)]
        caller, admin, other = [await store.actor(window=None) for _ in range(3)]
        lease = await owner.lock("m")
        await waiter.operate(waiter.operation("m", "m"))
        await expired.lock("d")
        await expired.execute(
            "UPDATE SCHEMA.sessions SET seen = 'epoch' WHERE id = %s", expired.session
        )
        take_over = NODE, taken.session, "secret", caller.channel, "", None
        _, taken.token, *_ = await caller.call("take_over", *take_over)
        await owner.call("change", *_change(owner, 1, "create", ["s", "2", "", True, 100]))
        await caller.call("create_node", "/empty", "{}")
        for actor in (caller, admin, other):
            await actor.execute("SET deadlock_timeout = '10ms'")
            await actor.execute("SET statement_timeout = '20s'")
        ((epoch,),) = await caller.execute("SELECT epoch FROM SCHEMA.meta")
        yield _Scene(
            *(store, owner, waiter, expired, taken, caller, admin, other), lease=lease, epoch=epoch
        )


def _change(actor: Actor, number: int, kind: str, args: list[Any]) -> tuple[Any, ...]:
    return actor.session, actor.token, number, kind, args, actor.channel, False


def _single(actor: Actor, number: int, name: str) -> tuple[Any, ...]:
    return actor.channel, 0, False, actor.session, actor.token, number, name


_CALLS: dict[str, Callable[[_Scene], tuple[Any, ...]]] = {
    "acknowledge": lambda s: (s.taken.session, [f"1.{s.taken.channel}"], ""),
    "acquire": lambda s: (*_single(s.owner, 2, "m"), None),
    "alter_node": lambda s: (NODE, "{}", "{}"),
    "attach": lambda s: (
        *(NODE, "1.new", s.caller.channel, _WAITS + 1, "", "window", "", rules.SESSIONS_PER_NODE),
    ),
    "begin_session": lambda s: (s.taken.session, s.taken.token, ""),
    "change": lambda s: _change(s.owner, 2, "alter", ["m", 1, None, "", "-"]),
    "create_node": lambda s: ("/other", "{}"),
    "data_was_restored": lambda s: (),
    "describe": lambda s: (NODE, None, "all"),
    "describe_node": lambda s: (NODE,),
    "drop_node": lambda s: (NODE, True, s.caller.channel),
    "end_session": lambda s: (NODE, s.owner.session, s.caller.channel),
    "evict": lambda s: (NODE, "m", s.lease, s.caller.channel),
    "examine": lambda s: (),
    "expire": lambda s: ([s.expired.session], s.caller.channel),
    "guard": lambda s: (NODE, "m", s.lease),
    "hello": lambda s: (True, True),
    "leave": lambda s: (s.owner.session, [s.owner.token], False, s.owner.channel, False),
    "list_nodes": lambda s: (),
    "list_sessions": lambda s: (NODE,),
    "look": lambda s: ([[s.owner.session, s.owner.token, [1]]],),
    "operate": lambda s: (
        *(s.owner.channel, 0, False),
        *arguments(
            [(s.owner.session, s.owner.token)],
            [[1, "m", 2, "new"], [1, "w", 1, "m"], [1, "m", 3, "m"]],
            ["new"],
        ),
        False,
    ),
    "reattach": lambda s: (s.owner.channel, [[s.owner.session, [s.owner.token], "1.again"]], "x"),
    "release": lambda s: _single(s.owner, 1, "m"),
    "remaining": lambda s: (s.taken.session, s.taken.token),
    "renew": lambda s: (False, [[s.owner.session, s.owner.token]], s.epoch),
    "store_time": lambda s: (),
    "take_over": lambda s: (NODE, s.owner.session, "another", s.caller.channel, "", _WAITS + 1),
    "tick": lambda s: (
        *(s.caller.channel, [[NODE, "d"], [NODE, "m"]], [[NODE, "watched", "tenure_q"]]),
    ),
    "turn_over": lambda s: (
        *(s.owner.channel, 0, False, s.owner.session, s.owner.token),
        *("m", "{1}", "{2}", "{NULL}", "{}"),
    ),
    "watch": lambda s: (s.owner.session, s.owner.token, "m", "tenure_q"),
}

_ENDED = {"drop_node": 3, "end_session": 1, "leave": 1}
"""Number of sessions that a call ends: the owner's, the waiter's and the one taken over."""


async def test_these_are_all_functions() -> None:
    async with a_store() as store:
        actor = await store.actor(window=None)
        rows = await actor.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'SCHEMA'::regnamespace"
        )
    assert {name for (name,) in rows} == _INTERNAL | _CALLS.keys()


@pytest.mark.parametrize("function", _CALLS)
async def test_a_transaction_that_waits_for_a_table_has_locked_no_row(function: str) -> None:
    async with _a_scene() as scene:
        for table in TABLES:
            await scene.admin.begin()
            await scene.admin.execute(f"LOCK TABLE SCHEMA.{table}")
            if table != "witness":  # it has no index
                await scene.admin.execute(f"CLUSTER SCHEMA.{table} USING {table}_pkey")
            calling = asyncio.create_task(scene.call(function))
            if await scene.store.blocked(scene.caller, calling):
                for each in TABLES:
                    if each not in (table, "witness"):  # NOWAIT: an error if a row is locked
                        await scene.other.execute(f"SELECT FROM SCHEMA.{each} FOR UPDATE NOWAIT")
            await scene.admin.commit()
            await calling
        await scene.store.check()


@pytest.mark.parametrize("function", _CALLS)
async def test_reindex_and_a_transaction_are_in_no_deadlock(function: str) -> None:
    async with _a_scene() as scene:
        for held, table in itertools.product(("nodes", "sessions", "former", "queues"), TABLES):
            await scene.other.begin()
            await scene.other.execute(f"SELECT FROM SCHEMA.{held} FOR UPDATE")
            calling = asyncio.create_task(scene.call(function))
            if await scene.store.blocked(scene.caller, calling):  # it has read some tables
                indexing = asyncio.create_task(scene.admin.execute(f"REINDEX TABLE SCHEMA.{table}"))
                await scene.store.blocked(scene.admin, indexing)
                await scene.other.commit()
                await asyncio.gather(calling, indexing)
            else:
                await scene.other.commit()
                await calling
        await scene.store.check()


@pytest.mark.parametrize("function", _CALLS)
async def test_sessions_are_renewed_while_a_transaction_waits(function: str) -> None:
    async with _a_scene() as scene:
        sessions = [scene.owner, scene.waiter, scene.taken]
        who = [[each.session, each.token] for each in sessions]
        ended = sessions[: _ENDED.get(function, 0)]  # locked before their queues, and not renewed
        for locks, locked in (("queues FOR UPDATE", ended), ("sessions FOR KEY SHARE", [])):
            await scene.other.begin()
            await scene.other.execute(f"SELECT FROM SCHEMA.{locks}")
            calling = asyncio.create_task(scene.call(function))
            if await scene.store.blocked(scene.caller, calling):
                alive = await scene.admin.call("renew", False, who, scene.epoch)
                assert {*alive} == {each.session for each in sessions if each not in locked}
            await scene.other.commit()
            await calling


async def test_a_drop_that_is_refused_locks_no_session() -> None:
    async with _a_scene() as scene:
        await scene.other.begin()
        await scene.other.execute("SELECT FROM SCHEMA.sessions FOR KEY SHARE")
        reply = await scene.caller.call("drop_node", NODE, False, scene.caller.channel)
        assert reply == ["busy", 3]
        await scene.other.commit()


async def test_a_session_that_cannot_be_reattached_leaves_the_others_to_their_renewals() -> None:
    async with _a_scene() as scene:
        sessions = [scene.owner, scene.waiter]
        await scene.other.begin()
        await scene.other.execute(  # as an operation does that was under way in the lost connection
            "SELECT FROM SCHEMA.sessions WHERE id = %s FOR KEY SHARE", scene.waiter.session
        )
        who = [[each.session, [each.token], f"1.again{each.session}"] for each in sessions]
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await scene.caller.call("reattach", scene.owner.channel, who, scene.epoch)
        renewed = [[each.session, each.token] for each in sessions]
        alive = await scene.admin.call("renew", False, renewed, scene.epoch)
        assert sorted(alive) == [each.session for each in sessions]
        await scene.other.commit()
        reply = await scene.caller.call("reattach", scene.owner.channel, who, scene.epoch)
        assert reply == [scene.epoch, ["ok", "ok"]]


async def test_rewritten_tables_keep_their_queues_and_are_no_loss_of_data() -> None:
    async with _a_scene() as scene:
        before = {
            table: sorted(await scene.admin.execute(f"SELECT {table}::text FROM SCHEMA.{table}"))
            for table in TABLES
        }
        for table in TABLES:
            for command in maintenance("SCHEMA", table):
                await scene.admin.execute(command)
        for table, rows in before.items():
            found = await scene.admin.execute(f"SELECT {table}::text FROM SCHEMA.{table}")
            assert sorted(found) == rows
        assert (await scene.admin.call("hello", False, False))[1:4] == [scene.epoch, 0, ""]
        assert await scene.owner.operate(scene.owner.operation("w", "m", 1)) == [0]
        ((granted,),) = await scene.other.execute(
            "SELECT order_id FROM SCHEMA.requests JOIN SCHEMA.queues ON id = queue "
            "WHERE order_id <= last_owner AND name = 'm'"
        )
        assert granted > scene.lease


@pytest.mark.parametrize("released", [False, True])
async def test_a_guard_refuses_a_snapshot_from_before_the_requests_were_rewritten(
    released: bool,
) -> None:
    async with _a_scene() as scene:
        await scene.other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await scene.other.execute("SELECT txid_current_snapshot()")
        if released:
            await scene.owner.operate(scene.owner.operation("w", "m", 1))
        await scene.admin.execute("VACUUM FULL SCHEMA.requests")
        guard = "guard", NODE, "m", scene.lease
        with pytest.raises(psycopg.errors.SerializationFailure, match="was rewritten"):
            await scene.other.call(*guard)
        await scene.other.execute("ROLLBACK")
        await scene.other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        if released:
            with pytest.raises(psycopg.Error, match="not held any more"):
                await scene.other.call(*guard)
        else:
            await scene.other.call(*guard)


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
    async with _a_scene() as scene:
        programs = [await scene.store.actor(window=None) for _ in range(2)]
        await scene.admin.execute(_PAUSING)
        await scene.admin.execute(_INDEXES[function])
        await scene.other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await scene.other.execute("SELECT FROM SCHEMA.meta")
        indexing = asyncio.create_task(
            scene.admin.execute("REINDEX INDEX CONCURRENTLY SCHEMA.unique_index")
        )
        # It waits for the old snapshot. Until then rows have to be in its new index as well.
        assert await scene.store.blocked(scene.admin, indexing)
        calls = []
        for program in programs:
            await scene.caller.execute("SELECT pg_advisory_lock(%s)", program.backend)
            args = _CALLS["attach"](scene)
            if function == "watch":
                args = scene.owner.session, scene.owner.token, "new", "tenure_q"
            calls.append(asyncio.create_task(program.call(function, *args)))
            assert await scene.store.blocked(program, calls[-1])  # neither has seen the other's row
        answers = []
        for program, call in zip(programs, calls, strict=True):
            await scene.caller.execute("SELECT pg_advisory_unlock(%s)", program.backend)
            answers.append(await call)
        assert answers[0] == answers[1]
        await scene.other.commit()
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
