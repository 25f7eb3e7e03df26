"""Commands whose answers are lost with the connection, after they were committed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import psycopg
import pytest

import tenure
from tenure._client.internals import session_core
from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Engine
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.model import NodeConfig
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import PATIENCE, an_engine, queue_of, until
from tests.engines.postgresql.servers import a_schema, shared

_BLOCKED = """SELECT count(*) FROM pg_stat_activity
    WHERE query LIKE '%{}.%' AND pg_blocking_pids(pid) <> '{{}}'"""

_Command: TypeAlias = Callable[[Engine, int, int], Awaitable[bool | None]]


async def _create(engine: Engine, session: int, order_id: int) -> None:
    await engine.create_node("/new", NodeConfig(), exist_ok=False)


async def _drop(engine: Engine, session: int, order_id: int) -> None:
    await engine.drop_node("/old", force=True)


async def _end(engine: Engine, session: int, order_id: int) -> bool:
    return await engine.end_session("/default", session)


async def _evict(engine: Engine, session: int, order_id: int) -> bool:
    return await engine.evict("/default", "m", order_id)


@pytest.mark.parametrize(
    ("command", "lock", "expected"),
    [
        (_create, "INSERT INTO SCHEMA.nodes (path, config) VALUES ('/new', '')", None),
        (_drop, "SELECT FROM SCHEMA.nodes WHERE path = '/old' FOR UPDATE", None),
        (_end, "SELECT FROM SCHEMA.sessions FOR UPDATE", True),
        (_evict, "SELECT FROM SCHEMA.queues FOR UPDATE", True),
    ],
)
async def test_a_command_whose_answer_is_lost_succeeds_once(
    command: _Command, lock: str, expected: bool | None
) -> None:
    with a_schema() as url:
        name, clock = url.rpartition("schema=")[2], SystemClock()
        async with an_engine(url, clock) as engine, an_engine(url, clock) as other:
            assert isinstance(engine, PostgresEngine)
            await engine.create_node("/old", NodeConfig(), exist_ok=False)
            session = await other.attach(Attach("/default", 30), Recorder())
            answer = session.enqueue(1, "m", 1, b"", timeout=None, ephemeral=True)
            placed = await answer if isinstance(answer, asyncio.Future) else answer
            assert placed.order_id is not None
            with psycopg.connect(shared().url) as holding:
                holding.execute(lock.replace("SCHEMA", name).encode())
                calling = asyncio.ensure_future(command(engine, session.id, placed.order_id))
                await until(lambda: shared().execute(_BLOCKED.format(name)) == [(1,)])
                assert engine.connection is not None
                engine.connection.drop("the test drops it")
                # The first one is before the repeated one in the queue for the lock.
                await until(lambda: shared().execute(_BLOCKED.format(name)) == [(2,)])
                holding.rollback()
            assert await calling == expected


async def test_a_command_that_has_not_run_before_fails_as_ever() -> None:
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            await engine.create_node("/old", NodeConfig(), exist_ok=False)
            assert engine.connection is not None
            engine.connection.drop("the test drops it")
            with pytest.raises(tenure.NodeExists):
                await engine.create_node("/old", NodeConfig(), exist_ok=False)
            assert not await engine.end_session("/default", 1)


async def test_a_request_whose_answer_is_lost_and_that_is_refused_then_leaves_its_queue() -> None:
    with a_schema() as url:
        name = url.rpartition("schema=")[2]
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            session = await client.session(recovery_window=60)
            engine = session_core(session).client.engine
            assert isinstance(engine, PostgresEngine)
            async with other.mutex("m").lock():
                find = "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = 'operate' "
                ((works,),) = shared().execute(f"{find} AND pronamespace = '{name}'::regnamespace")
                head, mark, _ = str(works).partition("AS $function$")
                with psycopg.connect(shared().url) as holding:
                    holding.execute(f"SELECT FROM {name}.queues FOR UPDATE".encode())
                    acquiring = asyncio.create_task(session.mutex("m").lock())
                    await until(lambda: shared().execute(_BLOCKED.format(name)) == [(1,)])
                    shared().execute(f"{head}{mark} BEGIN RAISE 'it is broken'; END $function$")
                    assert engine.connection is not None
                    engine.connection.drop("the test drops it")
                    holding.rollback()
                with pytest.raises(tenure.EngineError, match="it is broken"):
                    await acquiring
                assert await queue_of(other, "m") == (1, 1)
                shared().execute(str(works))
                async with asyncio.timeout(PATIENCE):
                    while await queue_of(other, "m") != (1, 0):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
