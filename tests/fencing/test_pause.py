"""A holder is paused past its window, between its last look at the lease and its write.

Both believe to hold, for a moment: the one that was paused, since it looked before, and the one
that was granted the lease meanwhile. No lease can help that. What the fence sees to, every time, is
that the paused one's write is refused, and that the other's stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import psycopg
import pytest
import redis

from tenure.errors import StaleToken
from tenure.fencing import Fence
from tests.fencing.holder import SQL, Holder
from tests.fencing.plants import PLANTS
from tests.guarantees import SQLITE, guarantee

WINDOW = 2.0  # seconds: the shortest is 1, which a busy machine may be stuck for
TIMES = 20  # how often the paused one tries

Visible = Callable[[], list[str]]


@asynccontextmanager
async def local(path: str) -> AsyncIterator[Visible]:
    """An object of this process, its fence, and a socket by which others write to it."""
    fence, written = Fence("notes"), list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            asked = json.loads(await reader.readline())
            try:
                with fence.writing(asked["token"]):
                    written.append(asked["text"])
            except StaleToken:
                writer.write(b'{"stale": true}\n')
            else:
                writer.write(b'{"stale": false}\n')
            await writer.drain()

    async with await asyncio.start_unix_server(serve, path):
        yield lambda: written


@contextlib.contextmanager
def in_sqlite(path: str) -> Iterator[Visible]:
    with closing(sqlite3.connect(path)) as connection:
        SQL.create_table(connection)
        connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")
        connection.commit()
        yield lambda: [t for (t,) in connection.execute("SELECT text FROM notes ORDER BY id")]


@contextlib.contextmanager
def in_postgres(url: str) -> Iterator[Visible]:
    with psycopg.connect(url, autocommit=True) as connection:
        SQL.create_table(connection)
        connection.execute("CREATE TABLE notes (id SERIAL, text TEXT)")
        try:
            yield lambda: [t for (t,) in connection.execute("SELECT text FROM notes ORDER BY id")]
        finally:
            connection.execute("DROP TABLE tenure_fences, notes")


@contextlib.contextmanager
def in_redis(url: str) -> Iterator[Visible]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.flushall()
        yield lambda: [str(each) for each in client.lrange("{notes}", 0, -1)]


@asynccontextmanager
async def resources(
    kinds: list[str], request: pytest.FixtureRequest, folder: Path
) -> AsyncIterator[tuple[dict[str, str], dict[str, Visible]]]:
    """Where each kind is, for those who write, and what is visible there."""
    where, visible = dict[str, str](), dict[str, Visible]()
    async with contextlib.AsyncExitStack() as stack:
        for kind in kinds:
            if kind == "local":
                where[kind] = str(folder / "socket")
                visible[kind] = await stack.enter_async_context(local(where[kind]))
            elif kind == "postgres":
                where[kind] = request.getfixturevalue("postgres_url")
                visible[kind] = stack.enter_context(in_postgres(where[kind]))
            elif kind == "redis":
                where[kind] = request.getfixturevalue("redis_url")
                visible[kind] = stack.enter_context(in_redis(where[kind]))
            else:
                where[kind] = str(folder / f"{kind}.db")
                visible[kind] = stack.enter_context(in_sqlite(where[kind]))
        yield where, visible


@asynccontextmanager
async def holders(folder: Path) -> AsyncIterator[tuple[Holder, Holder]]:
    url = f"sqlite:///{folder / 'leases.db'}"
    async with contextlib.AsyncExitStack() as stack:
        paused = await Holder.start(url, attach=False)
        stack.push_async_callback(paused.end)
        other = await Holder.start(url, attach=False)
        stack.push_async_callback(other.end)
        yield paused, other


async def check(
    paused: Holder, other: Holder, where: dict[str, str], visible: dict[str, Visible]
) -> None:
    older = await paused.do("lock", window=WINDOW)
    assert await paused.do("write", where=where, text="in time", times=2) == {
        kind: ["written"] * 2 for kind in where
    }
    writing = paused.send("pause_and_write", where=where, text="too late", times=TIMES)
    paused.until_stopped()

    newer = await other.do("lock", window=WINDOW)  # when the window of the one that is stopped ends
    assert newer > older
    assert await other.do("write", where=where, text="next", times=1) == {
        kind: ["written"] for kind in where
    }

    paused.signal(signal.SIGCONT)  # it looked before, and goes on in the belief that it holds
    outcomes = await paused.outcome(writing)
    assert outcomes == {kind: ["refused"] * TIMES for kind in where}, "a stale write was admitted"
    assert not await paused.do("believes")
    await other.do("write", where=where, text="last", times=1)
    for kind in where:
        assert visible[kind]() == ["in time", "in time", "next", "last"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(
            ["local", "sqlite", "sqlalchemy"], marks=guarantee("stopped", "fenced", on=SQLITE)
        ),
        ["postgres"],
        ["redis"],
    ],
)
async def test_the_write_of_a_paused_holder_is_refused_every_time(
    kinds: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with resources(kinds, request, tmp_path) as made, holders(tmp_path) as both:
        await check(*both, *made)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "resource"), [("local", "local"), ("sql", "sqlite"), ("redis", "redis")]
)
async def test_the_check_fails_on_a_fence_with_a_defect(
    kind: str,
    resource: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with resources([resource], request, tmp_path) as made, holders(tmp_path) as both:
        PLANTS[kind]["forgets"](monkeypatch)
        for each in both:
            await each.do("plant", kinds=[kind], defect="forgets")
        with pytest.raises(AssertionError, match="a stale write was admitted"):
            await check(*both, *made)
