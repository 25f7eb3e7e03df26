"""The PostgreSQL engine in one process, against bare statements and advisory locks.

One server with its commits on disk. Beside the rates: how even 32 contenders are served, the
transactions and bytes of the write-ahead log of a hand-off among 4 contenders and among 256, and
the cost of 1,000 waiters, with notifications and behind a pooler.

An advisory lock commits nothing. Its rates are those of the locks of sqlalchemy-dlock and tooz too,
which are advisory locks with a connection for each contender.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
import warnings
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy_dlock
from sqlalchemy.ext.asyncio import create_async_engine
from tooz import coordination

import tenure
from benchmarks.measure import Measured, in_turn, percentile
from benchmarks.redis_work import Pairs
from benchmarks.tasks import SECONDS, work
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import PostgresServer, a_server

ROUNDS = 3
TASKS = 64
CONTENDERS = 32
POOL = 8
FEW, MANY, PROGRAMS = 4, 256, 4
HAND_OFFS = 300
WAITERS, MOST_STATEMENTS = 1000, 50
WARM_UP, WATCHED = 15.0, 15.0
"""Seconds before and while waiters are watched; the server may count ten seconds late."""
_TRY_AGAIN = 0.01  # seconds between two tries of a program that polls

Connection = psycopg.AsyncConnection[Any]


async def ours(url: str, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through tenure."""
    async with tenure.connect(url) as client, client.session() as session:

        async def pair(number: int) -> float:
            async with session.mutex("key" if one_key else f"key-{number}").lock():
                return time.perf_counter()

        return await work(tasks, pair)


async def _connections(stack: AsyncExitStack, url: str, number: int) -> list[Connection]:
    made = [
        await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=0)
        for _ in range(number)
    ]
    return [await stack.enter_async_context(each) for each in made]


async def bare(url: str, connections: int) -> Pairs:
    """Measure bare pairs of ``INSERT`` and ``DELETE``, a task for each connection."""
    async with AsyncExitStack() as stack:
        made = await _connections(stack, url, connections)
        await made[0].execute("CREATE TABLE IF NOT EXISTS bare (id bigint PRIMARY KEY, t text)")

        async def pair(number: int) -> float:
            await made[number].execute("INSERT INTO bare VALUES (%s, 'x')", (number,))
            done = time.perf_counter()
            await made[number].execute("DELETE FROM bare WHERE id = %s", (number,))
            return done

        return await work(connections, pair)


async def advisory(url: str, contenders: int, *, poll: bool) -> Pairs:
    """Measure pairs of an advisory lock, with a connection for each contender."""
    async with AsyncExitStack() as stack:
        made = await _connections(stack, url, contenders)

        async def pair(number: int) -> float:
            execute = made[number].execute
            if poll:
                while not await _first(await execute("SELECT pg_try_advisory_lock(7)")):  # noqa: ASYNC110
                    await asyncio.sleep(_TRY_AGAIN)
            else:
                await execute("SELECT pg_advisory_lock(7)")
            granted = time.perf_counter()
            await execute("SELECT pg_advisory_unlock(7)")
            return granted

        return await work(contenders, pair)


async def of_dlock(url: str, contenders: int) -> Pairs:
    """Measure pairs of sqlalchemy-dlock's lock, with a connection for each contender."""
    engine = create_async_engine(
        url.replace("postgresql:", "postgresql+psycopg:"), pool_size=contenders
    )
    try:
        async with AsyncExitStack() as stack:
            made = [await stack.enter_async_context(engine.connect()) for _ in range(contenders)]

            async def pair(number: int) -> float:
                async with sqlalchemy_dlock.create_async_sadlock(made[number], "key"):
                    return time.perf_counter()

            return await work(contenders, pair)
    finally:
        await engine.dispose()


def of_tooz(url: str, contenders: int) -> Pairs:
    """Measure pairs of tooz's lock, a thread for each contender; it connects for each pair."""
    pairs, began = Pairs([0] * contenders), time.perf_counter()

    def one(number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the driver itself
            coordinator = coordination.get_coordinator(url, b"%d" % number)
        coordinator.start()
        lock = coordinator.get_lock(b"key")
        while (asked := time.perf_counter()) < began + SECONDS:
            lock.acquire()
            pairs.waits.append(time.perf_counter() - asked)
            pairs.done[number] += 1
            lock.release()
        coordinator.stop()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(contenders)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    pairs.seconds = time.perf_counter() - began
    return pairs


async def _first(cursor: psycopg.AsyncCursor[Any]) -> Any:
    row = await cursor.fetchone()
    assert row is not None
    return row[0]


@dataclass(frozen=True)
class Cost:
    """Cost of one hand-off for the server."""

    transactions: float
    wal: float


async def cost_of_a_hand_off(server: PostgresServer, contenders: int) -> Cost:
    """Count while some contenders, in four programs, take turns at one key."""
    all_in, done = asyncio.Event(), asyncio.Event()
    turns = 0

    async def take_turns(session: tenure.Session) -> None:
        nonlocal turns
        while turns < HAND_OFFS:
            async with session.mutex("turns").lock():
                await all_in.wait()
                turns += 1
                if turns == HAND_OFFS:
                    done.set()

    async with AsyncExitStack() as programs:
        sessions = []
        for _ in range(PROGRAMS):
            client = await programs.enter_async_context(tenure.connect(server.url))
            sessions.append(await client.session(recovery_window=60))
        async with asyncio.TaskGroup() as group:
            for number in range(contenders):  # each waits for one of another program
                group.create_task(take_turns(sessions[number % PROGRAMS]))
                while await _queued(sessions[0]) <= number:  # noqa: ASYNC110  nothing tells
                    await asyncio.sleep(0.001)
            before = _spent(server)
            all_in.set()
            await done.wait()
            after = _spent(server)
    return Cost(
        (after.transactions - before.transactions) / HAND_OFFS, (after.wal - before.wal) / HAND_OFFS
    )


async def _queued(session: tenure.Session) -> int:
    try:
        found = await session.semaphore("turns").describe(owners=True, waiters=True)
    except tenure.SemaphoreNotFound:
        return 0
    return len(found.owners) + len(found.waiters)


def _spent(server: PostgresServer) -> Cost:
    [(transactions, wal)] = server.execute(
        "SELECT pg_current_xact_id()::text::bigint, pg_current_wal_lsn() - '0/0'::pg_lsn"
    )
    return Cost(float(str(transactions)), float(str(wal)))


@dataclass(frozen=True)
class Idle:
    """Cost of waiters for the server: statements a second, and its processor time in percent."""

    statements: float
    processor: float


async def cost_of_waiting(server: PostgresServer, url: str) -> Idle:
    """Count while 1,000 sessions of one program wait in one queue."""
    async with tenure.connect(url) as one, tenure.connect(url) as other:
        lease = await one.mutex("awaited").lock()
        sessions = await asyncio.gather(*(other.session() for _ in range(WAITERS)))
        waiting = [asyncio.create_task(each.mutex("awaited").lock()) for each in sessions]
        await asyncio.sleep(WARM_UP)
        before, began = _idle(server), time.perf_counter()
        await asyncio.sleep(WATCHED)
        after, seconds = _idle(server), time.perf_counter() - began
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await lease.release()
    return Idle(
        (after.statements - before.statements) / seconds,
        100 * (after.processor - before.processor) / seconds,
    )


def _idle(server: PostgresServer) -> Idle:
    """Return the statements so far, and the processor time of the connections in seconds."""
    [(statements,)] = server.execute(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'"
    )
    spent = 0
    for (process,) in server.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name <> '' AND pid <> pg_backend_pid()"
    ):
        spent += int(Path(f"/proc/{process}/schedstat").read_text().split()[0])
    return Idle(float(str(statements)), spent / 1e9)


def measure() -> list[Measured]:
    """Pairs a second, alone and contended, and the cost of a hand-off and of waiters."""
    with a_server("max_connections=400") as server:
        return [
            *_alone(server.url),
            *_contended(server.url),
            *_constant(server),
            *_waiting(server),
        ]


def _alone(url: str) -> list[Measured]:
    results = []
    for tasks, connections, least in ((1, 1, 0.7), (TASKS, POOL, 4.0)):
        what = "PostgreSQL, 1 task" if tasks == 1 else f"PostgreSQL, {tasks} tasks, distinct keys"
        peer_name = f"INSERT and DELETE over {connections} connection(s)"
        for suffix, named in (("", ""), ("&durability=process", ", durability=process")):
            rate, peer, ratio = in_turn(
                lambda: asyncio.run(ours(url + suffix, tasks)).rate,  # noqa: B023  called at once
                lambda: asyncio.run(bare(url, connections)).rate,  # noqa: B023
                ROUNDS,
            )
            results.append(
                Measured(what + named, rate, "pairs/s", peer_name, peer, ratio, at_least=least)
            )
    return results


def _contended(url: str) -> list[Measured]:
    """32 tasks on one key: the rate, the shares, and the longest wait against the fair one."""
    what = f"PostgreSQL, {CONTENDERS} tasks on one key"
    runs: list[Pairs] = []
    rates: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        runs.append(asyncio.run(ours(url, CONTENDERS, one_key=True)))
        rates.append(
            {
                "durable": runs[-1].rate,
                "relaxed": asyncio.run(
                    ours(f"{url}&durability=process", CONTENDERS, one_key=True)
                ).rate,
                "pg_advisory_lock": asyncio.run(advisory(url, CONTENDERS, poll=False)).rate,
                "pg_try_advisory_lock": asyncio.run(advisory(url, CONTENDERS, poll=True)).rate,
                "sqlalchemy-dlock": asyncio.run(of_dlock(url, CONTENDERS)).rate,
                "tooz": of_tooz(url, CONTENDERS).rate,
            }
        )
    results = [
        _beside(what, rates, "durable", peer, at_least=3.0) for peer in list(rates[0])[2:]
    ] + [
        _beside(f"{what}, durability=process", rates, "relaxed", peer, at_least=3.0)
        for peer in list(rates[0])[2:]
    ]
    last = runs[-1]
    least, most = min(last.done), max(last.done)
    waits = [percentile(each.waits, 0.99) for each in runs]
    fair = [CONTENDERS / each.rate for each in runs]
    return [
        *results,
        Measured(
            *("PostgreSQL, turns of the least favoured of them", least, "turns"),
            *("of the most favoured", most, least / most),
            at_least=(most - 1) / most,  # the time was over within a round
        ),
        Measured(
            *("PostgreSQL, the 99th of 100 of their waits", statistics.median(waits) * 1e3, "ms"),
            *("fair share", statistics.median(fair) * 1e3),
            statistics.median(map(truediv, waits, fair)),
            at_most=2.0,
            notes={"longest of each run, ms": [max(each.waits) * 1e3 for each in runs]},
        ),
    ]


def _beside(
    what: str, rates: list[dict[str, float]], mine: str, peer: str, *, at_least: float
) -> Measured:
    """Return the medians of two rates, and of their ratios in each round."""
    return Measured(
        what,
        statistics.median(each[mine] for each in rates),
        "pairs/s",
        peer,
        statistics.median(each[peer] for each in rates),
        statistics.median(each[mine] / each[peer] for each in rates),
        at_least=at_least,
    )


def _waiting(server: PostgresServer) -> list[Measured]:
    with a_pooler(server) as pooled:
        costs = {
            "with notifications": asyncio.run(cost_of_waiting(server, server.url)),
            "behind a pooler": asyncio.run(cost_of_waiting(server, pooled)),
        }
    return [
        Measured(
            *(f"PostgreSQL, {WAITERS} waiters {how}", cost.statements, "statements/s"),
            *("the bound", MOST_STATEMENTS, cost.statements / MOST_STATEMENTS),
            at_most=1.0,
            notes={"server's processor time in percent": cost.processor},
        )
        for how, cost in costs.items()
    ]


def _constant(server: PostgresServer) -> list[Measured]:
    few, many = (asyncio.run(cost_of_a_hand_off(server, each)) for each in (FEW, MANY))
    return [
        Measured(
            *(f"PostgreSQL, transactions of a hand-off, {MANY} contenders", many.transactions, ""),
            *(f"{FEW} contenders", few.transactions, many.transactions / few.transactions),
            at_most=1.5,
        ),
        Measured(
            *(f"PostgreSQL, WAL of a hand-off, {MANY} contenders", many.wal, "bytes"),
            *(f"{FEW} contenders", few.wal, many.wal / few.wal),
            at_most=1.5,
        ),
    ]


if __name__ == "__main__":
    for each in measure():
        print(each)
