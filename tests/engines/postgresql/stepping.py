"""Transactions of a store that a test runs step by step, so that they meet where the test wants.

Each `Actor` has a connection of its own. A call of one that may have to wait is started as a task;
`Store.blocked` returns when the server says that it waits for a lock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg

from tenure.core import rules
from tenure.engines.postgresql import schema
from tests.engines.postgresql.helpers import PATIENCE
from tests.engines.postgresql.servers import new_name, shared

NODE = "/default"
TABLES = (
    "meta",
    "witness",
    "nodes",
    "sessions",
    "former",
    "queues",
    "requests",
    "removals",
    "rates",
)


def maintenance(schema_name: str, table: str) -> list[str]:
    """Return what an administrator may do with a table while programs use the store."""
    name = f"{schema_name}.{table}"
    commands = "VACUUM FULL", "REINDEX TABLE", "REINDEX TABLE CONCURRENTLY", "VACUUM", "ANALYZE"
    found = [f"{command} {name}" for command in commands]
    if table != "witness":  # it has no index
        found.append(f"CLUSTER {name} USING {table}_pkey")
    return found


def array(numbers: Sequence[int]) -> str:
    """Return numbers as PostgreSQL writes an array."""
    return "{" + ",".join(map(str, numbers)) + "}"


def arguments(
    who: Sequence[tuple[int, str]], operations: Sequence[list[Any]], fresh: Collection[str]
) -> list[str]:
    """Return arguments of the function `operate`.

    Args:
        who: sessions and their tokens.
        operations: place in `who`, kind, request id, name and what else it has, for each.
        fresh: names of semaphores that may have no row yet.
    """
    sessions = sorted(who)
    words = [[*each[1:], "", "", "", ""][:7] for each in operations]
    columns: list[Iterable[Any]] = [
        *zip(*sessions, strict=True),
        [sessions.index(who[at - 1]) + 1 for at, *_ in operations],
        *zip(*words, strict=True),
        [at for at, each in enumerate(words, 1) if each[0] != "w" and each[2] in fresh],
    ]
    texts = [",".join(str(each) or "NULL" for each in column) for column in columns]
    return [f"{{{each}}}" for each in texts]


class Actor:
    """One connection to a store, and one session of its own.

    Attributes:
        channel: of the engine that it stands for.
        session: number of the session.
        token: of the session's attachment.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any], name: str, channel: str) -> None:
        self._connection = connection
        self._schema = name
        self._requests = 0
        self.channel = channel
        self.session = 0
        self.token = f"1.{channel}"

    @property
    def backend(self) -> int:
        """Number of the server's process."""
        return self._connection.pgconn.backend_pid

    async def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """Run SQL, in which SCHEMA stands for the schema's name; return the rows."""
        text = sql.replace("SCHEMA", self._schema).encode()
        cursor = await self._connection.execute(text, args or None)
        return await cursor.fetchall() if cursor.description else []

    async def call(self, function: str, *args: Any) -> Any:
        """Call a function of the store; return its reply. Lists are sent as JSON."""
        values = [json.dumps(each) if isinstance(each, list) else each for each in args]
        ((reply,),) = await self.execute(
            f"SELECT SCHEMA.{function}({','.join(['%s'] * len(args))})", *values
        )
        return json.loads(reply) if reply else None

    async def attach(self, window: float = 30.0) -> None:
        """Attach the session."""
        reply = await self.call(
            *("attach", NODE, self.token, self.channel, window, "", "window", ""),
            rules.SESSIONS_PER_NODE,
        )
        self.session = reply[1]

    def operation(self, kind: str, name: str, number: int = 0) -> list[Any]:
        """Return an operation of the session: "m", "e" without waiting, or "w" of a request."""
        if kind == "w":
            return [1, "w", number, name]
        self._requests += 1
        words = [1, kind, self._requests, name]
        return words if kind == "m" else [*words, "1", "", "0", "1"]

    async def operate(self, *operations: list[Any], fresh: tuple[str, ...] = ()) -> list[Any]:
        """Send operations as one batch; return the answers."""
        found: list[Any] = await self.call(
            *("operate", self.channel, 0, False),
            *arguments([(self.session, self.token)], operations, fresh),
            False,
        )
        return found

    async def lock(self, name: str) -> int:
        """Lock a mutex whose row may not exist yet; return the answer."""
        (answer,) = await self.operate(self.operation("m", name), fresh=(name,))
        found: int = answer
        return found

    async def acquire(self, name: str, wait: int | None = None) -> Any:
        """Lock a mutex that has a row, by the function for one operation; return the answer.

        Args:
            name: of the mutex.
            wait: microseconds.
        """
        _, _, number, _ = self.operation("m", name)
        (answer,) = await self.call(
            *("acquire", self.channel, 0, False, self.session, self.token, number, name, wait)
        )
        return answer

    async def release(self, name: str, number: int) -> list[Any]:
        """Release a lease, by the function for that; return the answers."""
        place = self.channel, 0, False, self.session, self.token
        found: list[Any] = await self.call("release", *place, number, name)
        return found

    async def turn_over(
        self,
        name: str,
        leaving: Sequence[int],
        joining: Sequence[int] = (),
        *,
        waits: Sequence[int] = (),
        kept: Sequence[int] = (),
    ) -> list[Any]:
        """Release leases, and queue up again, by the function for both; return the answers.

        Args:
            name: of the mutex.
            leaving: numbers of the requests that leave.
            joining: numbers of those that join.
            waits: microseconds for each that joins.
            kept: for each that leaves, the number of the request that it keeps.
        """
        place = self.channel, 0, False, self.session, self.token
        lists = map(array, (leaving, joining, waits, kept))
        found: list[Any] = await self.call("turn_over", *place, name, *lists)
        return found

    async def notifications(self) -> list[str]:
        """Return what ``NOTIFY`` has sent to this connection."""
        return [each.payload async for each in self._connection.notifies(timeout=0.1)]

    async def begin(self) -> None:
        """Begin a transaction, which holds its locks until `commit`."""
        await self.execute("BEGIN")

    async def commit(self) -> None:
        """End the transaction."""
        await self.execute("COMMIT")


class Store:
    """A new store in the server of all tests, with its actors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actors: list[Actor] = []
        self._connections: list[psycopg.AsyncConnection[Any]] = []

    async def actor(self, *, window: float | None = 30.0) -> Actor:
        """Connect an actor; attach its session unless the window is ``None``."""
        connection = await psycopg.AsyncConnection.connect(
            shared().url, autocommit=True, prepare_threshold=None
        )
        self._connections.append(connection)
        actor = Actor(connection, self.name, f"tenure_{len(self._connections)}")
        if window is not None:
            await actor.attach(window)
        return actor

    async def blocked(self, actor: Actor, task: asyncio.Task[Any]) -> bool:
        """Return true when an actor waits for a lock, or false when its task is done."""
        watching = self._connections[0]
        async with asyncio.timeout(PATIENCE):
            while not task.done():
                cursor = await watching.execute(
                    b"SELECT pg_blocking_pids(%s) <> '{}'", (actor.backend,)
                )
                if await cursor.fetchone() == (True,):
                    return True
                await asyncio.sleep(0)
        return False

    async def owner(self, name: str) -> int:
        """Return the session that owns a mutex; 0 if there is none."""
        cursor = await self._connections[0].execute(
            f"SELECT y.session FROM {self.name}.requests y JOIN {self.name}.queues x "
            "ON x.id = y.queue AND y.order_id <= x.last_owner WHERE x.name = %s".encode(),
            (name,),
        )
        found = await cursor.fetchall()
        assert len(found) < 2
        return int(found[0][0]) if found else 0

    async def check(self) -> None:
        """Assert that the counters of every queue are those of its requests."""
        cursor = await self._connections[0].execute(
            _MISMATCHES.replace("SCHEMA", self.name).encode()
        )
        assert await cursor.fetchall() == []

    async def lose_data(self) -> None:
        """Have the next transaction find that data were lost."""
        sql = f"SELECT {self.name}.data_was_restored()"
        await self._connections[0].execute(sql.encode())

    async def aclose(self) -> None:
        """Close all connections."""
        for each in self._connections:
            await each.close()


_MISMATCHES = """
    SELECT q.name, q.held, q.owners, q.waiters, q.last_owner, r.* FROM SCHEMA.queues q
    FULL JOIN (
        SELECT y.queue, sum(y.count) FILTER (WHERE y.order_id <= x.last_owner) AS held,
            count(*) FILTER (WHERE y.order_id <= x.last_owner) AS owners,
            count(*) FILTER (WHERE y.order_id > x.last_owner) AS waiters
        FROM SCHEMA.requests y LEFT JOIN SCHEMA.queues x ON x.id = y.queue GROUP BY y.queue
    ) r ON r.queue = q.id
    WHERE q.id IS NULL OR q.held <> coalesce(r.held, 0) OR q.owners <> coalesce(r.owners, 0)
        OR q.waiters <> coalesce(r.waiters, 0) OR q.max_count IS NULL AND q.owners > 1
            AND q.held > 18446744073709551615"""
"""Queues whose counters are wrong, and mutexes with two owners."""


@asynccontextmanager
async def a_store() -> AsyncIterator[Store]:
    """Create a store, which has a connection that watches the others."""
    store = Store(new_name())
    try:
        await asyncio.to_thread(shared().execute, schema.creation(store.name))
        await store.actor(window=None)
        yield store
    finally:
        await store.aclose()
