"""``durability=full`` with 64 tasks, against the same SQL in a plain loop of 64 rows a commit.

The statements are those that the engine executes, written down while it does so once; the loop
repeats them through `sqlite3` alone, without asyncio, threads or anything of ours. Both wait for
the same disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from typing import Any

import tenure
from benchmarks.measure import Measured, in_turn
from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.sqlite.engine import SqliteEngine
from tenure.engines.sqlite.url import parse
from tenure.model import EPHEMERAL_LIMIT

SECONDS = 1.5
TASKS = 64
_ORDER_IDS = 10**12  # and above: they are microseconds since 1970

Statements = list[tuple[str, tuple[Any, ...]]]


class _Silent:
    """A session that nobody listens to."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


async def _statements(folder: str) -> tuple[Statements, Statements]:
    """Count what is executed for 64 acquires in one commit, and for 64 releases in another."""
    engine = SqliteEngine(parse(f"sqlite:///{folder}/pilot.db?durability=full"), SystemClock())
    await engine.open()
    session = await engine.attach(Attach("/default", 30.0), _Silent())
    tx = engine.store.tx
    execute, noted = tx.execute, []

    def noting(sql: str, parameters: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        noted.append((sql, tuple(parameters)))
        return execute(sql, parameters)

    tx.execute = noting  # type: ignore[assignment]
    halves = []
    for operation in (
        lambda number: session.enqueue(
            number, f"key-{number}", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True
        ),
        session.withdraw,
    ):
        noted.clear()
        answers = [operation(number) for number in range(TASKS)]
        await asyncio.wait([each for each in answers if isinstance(each, asyncio.Future)])
        assert [sql for sql, _ in noted].count("COMMIT") == 1
        halves.append(noted.copy())
    tx.execute = execute
    await engine.aclose()
    acquires, releases = halves
    return acquires, releases


def _plain_loop(folder: str, acquires: Statements, releases: Statements) -> float:
    """Pairs a second of the statements alone."""
    connection = sqlite3.connect(f"{folder}/pilot.db", isolation_level=None, cached_statements=256)
    connection.execute("PRAGMA synchronous = FULL")
    session = max(parameters[3] for sql, parameters in acquires if sql.startswith("INSERT INTO re"))
    connection.execute(
        "INSERT OR REPLACE INTO sessions VALUES (?, 1, 1, 0, 30.0, 'process', 1, x'', 0.0, '')",
        (session,),
    )
    done = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS:
        # New order ids: a row that does not change is not written.
        shift = int(elapsed * 1e6)
        for sql, parameters in acquires + releases:
            cursor = connection.execute(
                sql,
                tuple(
                    each + shift if isinstance(each, int) and each > _ORDER_IDS else each
                    for each in parameters
                ),
            )
            if sql.lstrip().startswith("SELECT"):
                cursor.fetchall()
        done += TASKS
    rate = done / (time.perf_counter() - start)
    connection.close()
    return rate


async def _tenure(folder: str) -> float:
    done = 0
    url = f"sqlite:///{folder}/bench.db?durability=full"
    async with tenure.connect(url) as client, client.session() as session:
        end = time.perf_counter() + SECONDS

        async def work(number: int) -> None:
            nonlocal done
            mutex = session.mutex(f"key-{number}")
            while time.perf_counter() < end:
                async with mutex.lock():
                    done += 1

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS):
                group.create_task(work(number))
        return done / (time.perf_counter() - start)


def measure() -> list[Measured]:
    """Uncontended pairs a second, each on disk before it is told."""
    with tempfile.TemporaryDirectory() as folder:
        acquires, releases = asyncio.run(_statements(folder))
        ours, peer, ratio = in_turn(
            lambda: asyncio.run(_tenure(folder)),
            lambda: _plain_loop(folder, acquires, releases),
        )
    return [
        Measured(
            "sqlite, durability=full, 64 tasks on distinct keys",
            ours,
            "pairs/s",
            "the same SQL in a plain loop",
            peer,
            ratio,
            at_least=0.5,
        )
    ]


if __name__ == "__main__":
    for measured in measure():
        print(measured)
