"""Leases and places when the server, a connection or a task fails."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal

import psycopg
import pytest

import tenure
from tenure.engines._kit.commands.pipeline import OrderIds, Statement
from tenure.engines.postgresql.batch import Batch
from tenure.engines.postgresql.connecting import StatementSender
from tenure.engines.postgresql.connection import PostgresConnection
from tenure.engines.postgresql.statements import Call
from tests.engines.postgresql.helpers import (
    PATIENCE,
    backends,
    engine_of,
    is_waited_for,
    queue_of,
    until,
    until_detached_and_back,
)
from tests.engines.postgresql.servers import PostgresServer
from tests.guarantees import POSTGRESQL, guarantee

_TERMINATIONS = 100
_TERMINATE = b"""SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE application_name = 'tenure'"""


@guarantee("cut off", "kept", "one owner", on=POSTGRESQL)
async def test_a_terminated_connection_loses_no_lease_and_no_place(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tenure")
    async with tenure.connect(server.url) as one, tenure.connect(server.url) as other:
        events = one.events()
        async with other.session() as second:
            await second.semaphore("m").create(limit=1)
            lease = await one.semaphore("m").acquire()
            async with second.semaphore("m").enqueue() as ticket:
                server.execute(_TERMINATE.decode())
                await until_detached_and_back(events)
                assert lease.held
                assert await queue_of(other, "m") == (1, 1)
                await lease.release()
                async with await ticket.wait(timeout=PATIENCE) as next_lease:
                    assert next_lease.fencing_token > lease.fencing_token
        await events.aclose()
    lost = [each for each in caplog.messages if each.startswith("lost contact")]
    assert len(lost) == 2
    for each in lost:
        assert "error=terminating connection due to administrator command" in each


async def test_statements_sent_after_the_end_of_the_connection_fail_for_its_reason(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tenure")
    answered: asyncio.Queue[object] = asyncio.Queue()
    async with tenure.connect(server.url) as client, client.session():
        (backend,) = backends(server)
        server.execute(_TERMINATE.decode())
        while backend in backends(server):  # blocks the loop, so that the client cannot read
            pass
        for _ in range(3):  # sending the first one fails without an error of libpq's
            engine_of(client).send(Call("list_nodes", (), answered.put_nowait))
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                await answered.get()
    (lost,) = [each for each in caplog.messages if each.startswith("lost contact")]
    assert "error=terminating connection due to administrator command" in lost


@guarantee("cut off", "one owner", "others proceed", "nothing leaks", on=POSTGRESQL)
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
async def test_contenders_have_the_lock_in_turn_while_their_connections_are_terminated(
    server: PostgresServer,
) -> None:
    inside: list[int] = []
    tokens: list[int] = []
    terminated = 0

    connected = asyncio.Barrier(9)  # a first connection that fails is not tried again

    async def contend(number: int) -> None:
        async with tenure.connect(server.url) as client, client.session() as session:
            await connected.wait()
            while terminated < _TERMINATIONS:
                async with session.mutex("m").lock() as lease:
                    assert not inside
                    inside.append(number)
                    tokens.append(lease.fencing_token)
                    await asyncio.sleep(0.001 * random.random())
                    assert inside.pop() == number
                    assert lease.held

    async def terminate() -> None:
        nonlocal terminated
        async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as admin:
            await connected.wait()
            while terminated < _TERMINATIONS:
                before = len(tokens)
                await until(lambda before=before: len(tokens) > before)  # type: ignore[misc]
                cursor = await admin.execute(_TERMINATE)
                row = await cursor.fetchone()
                assert row is not None
                terminated += row[0]

    async with asyncio.timeout(200), asyncio.TaskGroup() as group:
        group.create_task(terminate())
        for number in range(8):
            group.create_task(contend(number))
    assert tokens == sorted(set(tokens))
    async with tenure.connect(server.url) as client:
        assert await queue_of(client, "m") == (0, 0)


def _kill_a_backend(server: PostgresServer) -> None:
    os.kill(backends(server)[0], signal.SIGKILL)


@guarantee("restarted", "answers stand", "tokens rise", "kept", on=POSTGRESQL)
@pytest.mark.parametrize("fault", ["fast", "immediate", "backend killed"])
async def test_leases_and_places_survive_a_restart(server: PostgresServer, fault: str) -> None:
    async with tenure.connect(server.url) as one, tenure.connect(server.url) as other:
        events = one.events()
        lease = await one.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock())
        await is_waited_for(one, "m")
        if fault == "backend killed":
            _kill_a_backend(server)
        else:
            await asyncio.to_thread(server.stop, fault)
            await asyncio.to_thread(server.start)
        await until_detached_and_back(events)
        assert await queue_of(one, "m") == (1, 1)
        assert lease.held
        assert not waiting.done()
        await lease.release()
        async with asyncio.timeout(PATIENCE), await waiting as later:
            assert later.fencing_token > lease.fencing_token
        await events.aclose()


@guarantee("power cut", "answers stand", "kept", on=POSTGRESQL)
async def test_crash_recovery_with_full_durability_begins_no_quarantine(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url) as client:
        events = client.events()
        async with client.mutex("m").lock() as lease:
            _kill_a_backend(server)
            await until_detached_and_back(events)
            async with client.mutex("another").lock(timeout=5) as another:
                assert another.fencing_token > lease.fencing_token
        await events.aclose()
    assert server.execute("SELECT quarantine_reason FROM tenure.meta") == [("",)]


@guarantee("cancelled", "nothing leaks", "others proceed", on=POSTGRESQL)
async def test_a_task_cancelled_at_any_time_leaves_no_request(server: PostgresServer) -> None:
    async with (
        tenure.connect(server.url) as client,
        tenure.connect(server.url) as other,
        client.session() as session,
    ):

        async def lock(held: bool) -> None:
            async with session.mutex("m").lock():
                if held:
                    await asyncio.Event().wait()

        for attempt in range(200):
            tasks = [asyncio.create_task(lock(attempt % 2 == 0)) for _ in range(3)]
            await asyncio.wait(tasks, timeout=random.uniform(0, 0.008))
            if attempt % 10 == 9:
                await asyncio.to_thread(server.execute, _TERMINATE.decode())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert all(task.cancelled() or task.exception() is None for task in tasks)
        async with asyncio.timeout(PATIENCE):
            # A request whose answer was lost is sent again, and then withdrawn.
            while server.execute("SELECT count(*) FROM tenure.requests") != [(0,)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with other.mutex("m").lock(timeout=PATIENCE):
            pass


@guarantee("cut off", "kept", on=POSTGRESQL)
async def test_a_server_stopped_for_less_than_the_window_costs_nothing(
    server: PostgresServer,
) -> None:
    async with (
        tenure.connect(server.url) as client,
        client.session(recovery_window=12) as session,
        session.mutex("m").lock() as lease,
    ):
        server.signal(signal.SIGSTOP)
        locking = asyncio.ensure_future(session.mutex("another").lock())
        await asyncio.wait([locking], timeout=2)
        assert not locking.done()
        server.signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE), await locking:
            assert lease.held


@guarantee("cut off", "loss reported", "others proceed", on=POSTGRESQL)
async def test_a_server_stopped_past_the_window_costs_the_lease_by_its_deadline(
    server: PostgresServer,
) -> None:
    async with (
        tenure.connect(server.url) as client,
        tenure.connect(server.url) as other,
        client.session(recovery_window=4) as spare,
    ):
        session = await client.session(recovery_window=1.5)
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock())
        await is_waited_for(other, "m")

        async def hold() -> None:
            async with lease:
                server.signal(signal.SIGSTOP)
                await asyncio.Event().wait()

        try:
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(tenure.LeaseLost):
                    await hold()
            assert (
                lease.deadline <= client.clock.now() < lease.deadline + 5
            )  # the machine may be busy
            with pytest.raises(tenure.AcquireTimeout, match="does not answer") as late:
                await spare.mutex("x").lock(timeout=1)
            assert isinstance(late.value.__cause__, tenure.EngineUnavailable)
            assert not waiting.done()
        finally:
            server.signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE), await waiting as later:
            assert later.fencing_token > lease.fencing_token


async def test_a_withdrawal_that_was_refused_takes_effect_when_it_is_repeated(
    server: PostgresServer,
) -> None:
    async with (
        tenure.connect(server.url) as client,
        tenure.connect(server.url) as other,
        client.session() as session,
    ):
        lease = await session.mutex("m").lock()
        server.execute("ALTER TABLE tenure.requests RENAME COLUMN count TO hidden")
        with pytest.raises(tenure.EngineError, match="refused it"):
            await lease.release()
        server.execute("ALTER TABLE tenure.requests RENAME COLUMN hidden TO count")
        async with other.mutex("m").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > lease.fencing_token
        assert await queue_of(other, "m") == (0, 0)


class Owner:
    """The owner of a connection, which keeps what the next one is to send."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.unanswered: list[Statement] = []

    def pushed(self, channel: str, event: str) -> None:
        raise AssertionError

    def send(self, statement: Statement) -> None:
        raise AssertionError

    def new_batch(self) -> Batch:
        return Batch("", OrderIds(), set(), relaxed=False, pushed=lambda _: None)

    def expire(self, sessions: list[int]) -> Statement:
        raise AssertionError

    def disconnected(self, connection: PostgresConnection, why: str) -> None:
        self.unanswered = connection.take_unanswered()
        self.ended.set()


async def test_statements_for_a_connection_that_fails_while_they_are_sent_are_kept(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    opened = await psycopg.AsyncConnection.connect(server.url, autocommit=True)
    connection = PostgresConnection(opened, owner, "tenure", 0.0)
    statements = [Call("store_time", (), lambda _: None) for _ in range(3)]
    connection.send(statements[0])

    def fail(*_: object, **__: object) -> bool:
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(StatementSender, "send", fail)
    for each in statements[1:]:
        connection.send(each)
    async with asyncio.timeout(PATIENCE):
        await owner.ended.wait()
    assert owner.unanswered == statements
