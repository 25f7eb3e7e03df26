"""Pains of locks on PostgreSQL: most packages have advisory locks, which belong to a connection."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

import tenure
from tenure._client.client import Client
from tenure._client.session import Session
from tenure.engines import connect_engine
from tenure.engines.postgresql.engine import PostgresEngine
from tests.corpus.rows import replacing, row, together
from tests.corpus.sql import in_sql
from tests.corpus.subjects import Scene
from tests.engines.postgresql.helpers import backends
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import shared
from tests.primitives.helpers import is_held


@row(
    26,
    together(
        in_sql("WHEN q.whole THEN false", "WHEN true THEN pg_try_advisory_lock(q.id)"),
        in_sql("AND x.max_count IS NULL AND x.data = ''", "AND false AND x.data = ''"),
    ),
    on=("postgresql",),
)
async def two_programs_behind_a_pooler_have_a_lock_in_turn(scene: Scene) -> None:
    (schema,) = parse_qs(urlsplit(scene.url).query)["schema"]
    with a_pooler(shared()) as pooler:

        def client() -> Client:
            return Client(connect_engine(f"{pooler}?schema={schema}", scene.clock), scene.clock)

        async with client() as one, client() as other:
            lease = await one.mutex("x").lock()
            assert await other.mutex("x").try_lock() is None
            await lease.release()
            async with await scene.soon(other.mutex("x").lock()) as later:
                assert await one.mutex("x").try_lock() is None
                assert later.fencing_token > lease.fencing_token


@row(
    27,
    in_sql("ELSIF NOT (each.v -> 1) ? (each.s).token THEN", "ELSIF true THEN"),
    on=("postgresql",),
)
async def a_connection_that_is_lost_costs_no_lock(scene: Scene) -> None:
    async with scene.client() as holder:
        session = await holder.session()
        lease = await session.mutex("x").lock()
        for process in backends(shared()):
            shared().execute(f"SELECT pg_terminate_backend({process})")
        async with scene.client() as other:
            with pytest.raises(tenure.AcquireTimeout):
                await other.mutex("x").lock(timeout=1)
            assert is_held(lease)
            await lease.release()
            await (await scene.soon(other.mutex("x").lock())).release()


_mutex = Session.mutex


def _mutex_by_its_hash(self: Session, name: str, *more: Any, **named: Any) -> tenure.Mutex:
    return _mutex(self, f"{zlib.crc32(name.encode()):x}", *more, **named)


@row(28, replacing(Session, "mutex", _mutex_by_its_hash))
async def names_with_one_hash_are_two_locks(scene: Scene) -> None:
    async with scene.client() as client:
        session = await client.session()
        async with session.mutex("plumless").lock():
            another = await session.mutex("buckeroo").try_lock()  # the same CRC-32
            assert another is not None
            await another.release()


_note_waiter = PostgresEngine.note_waiter
_opened: list[psycopg.Connection[Any]] = []


def _note_waiter_with_a_connection(self: PostgresEngine) -> None:
    _opened.append(psycopg.connect(self._address.conninfo))
    _note_waiter(self)


@row(
    29,
    replacing(PostgresEngine, "note_waiter", _note_waiter_with_a_connection),
    on=("postgresql",),
)
async def a_hundred_waiters_share_the_connections_of_their_program(scene: Scene) -> None:
    name = "a-hundred-waiters"
    url = f"{scene.url}&application_name={name}"
    async with Client(connect_engine(url, scene.clock), scene.clock) as client:
        session = await client.session()
        lease = await session.mutex("x").lock()
        waiting = [asyncio.create_task(session.mutex("x").lock()) for _ in range(100)]
        try:
            await scene.queued("x", 101)
            counted = shared().execute(
                f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}'"
            )
            assert int(str(counted[0][0])) <= 3
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
            await lease.release()
            while _opened:
                _opened.pop().close()
