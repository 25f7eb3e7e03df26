"""Prepared statements: on direct connections, never behind a pooler."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psycopg
import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines._kit.commands.pipeline import Statement
from tenure.engines.postgresql.engine import PostgresEngine
from tests.engines.postgresql.helpers import PATIENCE, an_engine
from tests.engines.postgresql.poolers import a_pooled_schema
from tests.engines.postgresql.servers import a_schema


class Question(Statement):
    """A question to the server about the connection of an engine."""

    recurs = False

    def __init__(self, sql: str) -> None:
        self.sql = sql
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:
        return self.sql.encode(), []

    def answered(self, reply: Any) -> None:
        self.reply.set_result(reply)


class Recurring(Question):
    """The same, as a statement that may be prepared."""

    recurs = True


async def ask(engine: PostgresEngine, question: Question) -> Any:
    engine.send(question)
    async with asyncio.timeout(PATIENCE):
        return await question.reply


async def ask_often(engine: PostgresEngine, sql: str) -> list[Any]:
    """Return the replies to a question that is sent five times."""
    return [await ask(engine, Recurring(sql)) for _ in range(5)]


_PREPARED = "SELECT coalesce(json_agg(statement), '[]')::text FROM pg_prepared_statements"


async def test_a_statement_is_prepared_when_it_is_sent_again() -> None:
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            assert await ask_often(engine, "SELECT '1'") == [1] * 5
            assert await ask_often(engine, "SELECT '2'") == [2] * 5
            assert await ask(engine, Question("SELECT '3'")) == 3
            assert await ask(engine, Question("SELECT '3'")) == 3
            assert set(await ask(engine, Question(_PREPARED))) == {"SELECT '1'", "SELECT '2'"}


async def test_a_statement_that_cannot_be_prepared_is_refused() -> None:
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            for reply in await ask_often(engine, "SELECT no_such_column"):
                assert reply.code == "42703"
            assert await ask_often(engine, "SELECT '1'") == [1] * 5


async def test_a_statement_that_is_not_prepared_any_more_is_prepared_again() -> None:
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            assert await ask_often(engine, "SELECT '1'") == [1] * 5
            assert await ask(engine, Question("DEALLOCATE ALL")) is None
            assert await ask_often(engine, "SELECT '1'") == [1] * 5
            assert await ask(engine, Question(_PREPARED)) == ["SELECT '1'"]


async def test_nothing_is_prepared_behind_a_pooler() -> None:
    with a_pooled_schema() as url:
        async with tenure.connect(url) as client, client.session() as session:
            for _ in range(5):
                async with session.mutex("m").lock():
                    pass
        # The pooler has one connection to the server, since one statement came after the other.
        plain = url.partition("?")[0]
        with psycopg.connect(plain, autocommit=True, prepare_threshold=None) as connection:
            row = connection.execute(_PREPARED.encode()).fetchone()
            assert row is not None
            assert json.loads(row[0]) == []


@pytest.mark.parametrize("setting", ["enable_seqscan", "jit"])
async def test_plans_use_indexes_and_are_not_compiled(setting: str) -> None:
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            sql = f"SELECT to_json(current_setting('{setting}'))::text"
            assert await ask(engine, Question(sql)) == "off"
