"""Many requests and clients at once: bounded statements, fair turns, nothing left over."""

from __future__ import annotations

import asyncio

import tenure
from tenure.clock import SystemClock
from tenure.engines._kit.commands.pipeline import OrderIds, Statement
from tenure.engines.contract import Attach, Enqueued, Place
from tenure.engines.postgresql.batch import Batch
from tenure.engines.postgresql.engine import PostgresEngine
from tenure.engines.postgresql.statements import Call
from tenure.testing.recorder import Recorder
from tests.engines.postgresql.helpers import (
    PATIENCE,
    SessionOfStatements,
    a_lock,
    an_engine,
    enqueue,
)
from tests.engines.postgresql.servers import PostgresServer, a_schema

MIB = 1024 * 1024


def batches_of(session: SessionOfStatements, sizes: list[int]) -> list[list[int]]:
    """Return the sizes of data by batch, as a connection would send them."""
    found: list[list[int]] = []
    batch = Batch("", OrderIds(), set(), relaxed=False, pushed=lambda _: None)
    for size in sizes:
        operation = a_lock(session, 1, "m", data=b"x" * size)
        if not found or not batch.add(operation):
            batch = Batch("", OrderIds(), set(), relaxed=False, pushed=lambda _: None)
            assert batch.add(operation)
            found.append([])
        found[-1].append(size)
    return found


async def test_a_batch_has_a_thousand_operations_or_a_mebibyte_at_the_most() -> None:
    session = SessionOfStatements(1)
    assert [len(each) for each in batches_of(session, [0] * 2500)] == [1000, 1000, 500]
    assert batches_of(session, [MIB // 2] * 3) == [[MIB // 2] * 2, [MIB // 2]]
    assert batches_of(session, [2 * MIB, 1, 2 * MIB]) == [[2 * MIB], [1], [2 * MIB]]


def order_ids_of_owners(answers: list[Enqueued | BaseException]) -> list[int]:
    """Return the order ids of requests that were all granted."""
    found = []
    for each in answers:
        assert isinstance(each, Enqueued)
        assert each.place is Place.GRANTED
        assert each.order_id is not None
        found.append(each.order_id)
    return found


async def test_requests_with_much_data_are_granted_in_order() -> None:
    with a_schema() as url:
        async with tenure.connect(url) as client, an_engine(url, client.clock) as engine:
            async with client.session() as creating:
                await creating.semaphore("s").create(limit=100)
            session = await engine.attach(Attach("/default", 60), Recorder())
            answers = await enqueue(session, [("s", b"x" * MIB)] * 24, ephemeral=False)
            found = order_ids_of_owners(answers)
            assert found == sorted(found)


async def test_a_batch_that_takes_longer_than_the_database_allows_is_sent_in_parts(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client, client.session() as creating:
        await creating.semaphore("s").create(limit=10_000)
        server.execute(
            # A request takes a millisecond of the database's time, and a thousand take too long.
            "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(0.001); RETURN NEW; END $$; "
            "CREATE TRIGGER slowly AFTER INSERT ON tenure.requests "
            "FOR EACH ROW EXECUTE FUNCTION slowly(); "
            "ALTER ROLE tenure SET statement_timeout = 300"
        )
        async with an_engine(server.url, client.clock) as engine:
            session = await engine.attach(Attach("/default", 60), Recorder())
            found = order_ids_of_owners(
                await enqueue(session, [("s", b"")] * 1200, ephemeral=False)
            )
            assert found == sorted(found)


async def test_tasks_that_take_turns_need_one_transaction_for_each_turn(
    server: PostgresServer,
) -> None:
    turns, tasks = 200, 8

    def transactions() -> int:
        ((found,),) = server.execute("SELECT pg_current_xact_id()::text::bigint")
        return int(str(found))

    async def take_turns(session: tenure.Session) -> None:
        for _ in range(turns // tasks):
            async with session.mutex("m").lock():
                pass

    async with tenure.connect(server.url) as client, client.session() as session:
        async with session.mutex("m").lock():
            pass
        before = transactions()
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(take_turns(session))
        assert transactions() - before < 1.2 * turns


async def test_a_reply_whose_receiver_fails_does_not_hold_the_others_up() -> None:
    class Failing(Statement):
        def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:
            return b"SELECT '1'", []

        def answered(self, reply: object) -> None:
            raise MemoryError

    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reports.append(context.get("exception"))
    )
    with a_schema() as url:
        async with an_engine(url, SystemClock()) as engine:
            assert isinstance(engine, PostgresEngine)
            answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            engine.send(Failing())
            engine.send(Call("store_time", (), answered.set_result))
            async with asyncio.timeout(PATIENCE):
                assert isinstance(await answered, float)
    assert [type(each) for each in reports] == [MemoryError]
