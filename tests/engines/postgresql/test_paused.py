"""A holder that is stopped (SIGSTOP) past its window cannot write late through the guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import psycopg
import pytest

import tenure
from tests.engines.postgresql.helpers import until
from tests.engines.postgresql.servers import a_schema, shared
from tests.guarantees import POSTGRESQL, guarantee

pytestmark = pytest.mark.exhaustive

LOCKS = 100
ROUNDS = 10
"""With as many locks each: 1,000 tries."""

HOLDER = """
import asyncio, sys, psycopg, tenure

url, table, locks, task = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
INSERT = f"INSERT INTO {table} VALUES (%s, %s)"

class PausedConnection(psycopg.AsyncConnection):
    # Sends nothing until the program goes on.
    go_on = None

    async def wait(self, *args, **options):
        if self.go_on is not None:
            await self.go_on.wait()
        return await super().wait(*args, **options)

async def connect():
    return await PausedConnection.connect(url.partition("&schema")[0])

async def write_once(lease, connection):
    async with connection:
        try:
            await lease.guard(connection)
        except tenure.LeaseLost as lost:
            return "refused its guard" in str(lost)  # by the database
        await connection.execute(INSERT, (lease.name, lease.fencing_token))

async def write_for_ever(lease, connection):
    async with connection:
        while True:
            try:
                async with connection.transaction():
                    await lease.guard(connection)
                    await connection.execute(INSERT, (lease.name, lease.fencing_token))
            except tenure.LeaseLost:
                return True

async def main():
    async with tenure.connect(url) as client:
        names = [f"m{n}" for n in range(locks)]
        connections = [await connect() for name in names]  # on a busy machine it takes seconds
        sessions = [await client.session(recovery_window=1) for name in names]
        leases = [await s.mutex(name).lock() for s, name in zip(sessions, names)]
        go_on = asyncio.Event()
        if task == "write_once":
            for connection in connections:
                connection.go_on = go_on
        writers = [
            asyncio.create_task(globals()[task](lease, connection))
            for lease, connection in zip(leases, connections)
        ]
        await asyncio.sleep(0)  # each one has seen that its lease is held
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        go_on.set()
        print(sum(map(bool, await asyncio.gather(*writers))), flush=True)

asyncio.run(main())
"""


@dataclass(frozen=True)
class Store:
    """A store with a table of what was written, and one of takeovers."""

    url: str
    schema: str

    @property
    def written(self) -> str:
        return f"{self.schema}.written"


@pytest.fixture
def store() -> Iterator[Store]:
    with a_schema() as url:
        yield Store(url, url.rpartition("schema=")[2])


class Holder:
    """A program that holds all locks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self.send(signal.SIGCONT)
        self._process.stdin.write(b"\n")


@contextlib.asynccontextmanager
async def a_holder(store: Store, task: str) -> AsyncIterator[Holder]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, store.url, store.written, str(LOCKS), task),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Holder(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def create_tables(store: Store) -> None:
    shared().execute(f"CREATE TABLE {store.written} (name text, token bigint)")
    shared().execute(f"CREATE TABLE {store.schema}.taken (name text, token bigint, before bigint)")


async def take(session: tenure.Session, store: Store, name: str) -> tenure.Lease:
    """Acquire the lock of a paused holder, and count what it has written until then.

    The lease is to be kept: one that is dropped is released.
    """
    lease = await session.mutex(name).lock()
    count = f"SELECT count(*) FROM {store.written} WHERE name = %s"
    async with await psycopg.AsyncConnection.connect(shared().url) as connection:
        await lease.guard(connection)
        await connection.execute(
            f"INSERT INTO {store.schema}.taken VALUES (%s, %s, ({count}))".encode(),
            (name, lease.fencing_token, name),
        )
    return lease


@guarantee("stopped", "one owner", "fenced", on=POSTGRESQL)
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_a_holder_that_is_paused_in_front_of_the_guard_writes_nothing(
    store: Store, number: int
) -> None:
    async with tenure.connect(store.url) as client, a_holder(store, "write_once") as holder:
        create_tables(store)
        assert await holder.line() == "ready"
        holder.send(signal.SIGSTOP)
        async with client.session() as session, asyncio.timeout(60):
            taken = await asyncio.gather(*(take(session, store, f"m{n}") for n in range(LOCKS)))
            holder.go_on()
            assert await holder.line() == str(LOCKS)  # refused, each one by the database
            assert all(each.held for each in taken)
    assert shared().execute(f"SELECT count(*) FROM {store.written}") == [(0,)]


@guarantee("stopped", "one owner", "fenced", "others proceed", on=POSTGRESQL)
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_a_holder_that_is_paused_at_any_moment_writes_nothing_late(
    store: Store, number: int
) -> None:
    async with tenure.connect(store.url) as client, a_holder(store, "write_for_ever") as holder:
        create_tables(store)
        assert await holder.line() == "ready"
        every = f"SELECT count(DISTINCT name) FROM {store.written}"
        await until(lambda: shared().execute(every) == [(LOCKS,)])
        holder.send(signal.SIGSTOP)
        async with client.session() as session, asyncio.timeout(60):
            taking = [
                asyncio.create_task(take(session, store, f"m{each}")) for each in range(LOCKS)
            ]
            # A lock whose transaction was open is held until that ends; the others pass on.
            paused = (
                "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' "
                "AND (query LIKE '%guard(%' OR query LIKE 'INSERT%') AND xact_start < now() - "
                "interval '1 s'"
            )
            await until(
                lambda: (
                    sum(map(asyncio.Task.done, taking))
                    >= LOCKS - int(str(shared().execute(paused)[0][0]))
                )
            )
            holder.go_on()
            assert await holder.line() == str(LOCKS)
            assert all(each.held for each in await asyncio.gather(*taking))
    late = (
        f"SELECT t.name FROM {store.schema}.taken t WHERE t.before <> "
        f"(SELECT count(*) FROM {store.written} w WHERE w.name = t.name)"
    )
    assert shared().execute(late) == []
    assert shared().execute(f"SELECT count(*) FROM {store.schema}.taken") == [(LOCKS,)]
