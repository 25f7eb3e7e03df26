"""A pooler in transaction mode: polling, and notifications over a direct address."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import psycopg
import pytest

import tenure
from tenure.engines.postgresql import monitor
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for
from tests.engines.postgresql.poolers import a_pooled_schema, a_pooler
from tests.engines.postgresql.servers import new_name, shared


@pytest.fixture(scope="module")
def pooled() -> Iterator[str]:
    """The URL of the server of all tests, behind a pooler in transaction mode."""
    with a_pooler(shared()) as url:
        yield f"{url}?schema={new_name()}"


@pytest.mark.parametrize("direct", [False, True])
async def test_a_lock_is_handed_over_behind_a_pooler(pooled: str, direct: bool) -> None:
    url = f"{pooled}&listen={shared().folder}" if direct else pooled
    async with tenure.connect(url) as one, tenure.connect(url) as other:
        lease = await one.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(one, "m")
        await lease.release()
        async with await waiting as granted:
            assert granted.fencing_token > lease.fencing_token


async def test_a_direct_address_that_is_a_pooler_is_an_error(pooled: str) -> None:
    place = pooled.rpartition("@")[2].partition("/")[0]
    with pytest.raises(tenure.EngineError, match="listen= names a pooler"):
        async with tenure.connect(f"{pooled}&listen={place}"):
            pass


async def test_many_contenders_behind_a_pooler_take_turns(pooled: str) -> None:
    inside, most, turns = 0, 0, 0

    async def work(client: tenure.Client) -> None:
        nonlocal inside, most, turns
        for _ in range(10):
            async with client.mutex("turns").lock():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1
                turns += 1

    async with tenure.connect(pooled) as one, tenure.connect(pooled) as other:
        await asyncio.gather(*(work(client) for client in (one, other) for _ in range(3)))
    assert (most, turns) == (1, 60)


async def test_a_watch_is_notified_behind_a_pooler(
    pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_NET", 3600.0)
    async with (
        tenure.connect(pooled) as one,
        tenure.connect(pooled) as other,
        one.session() as watching,
        other.session() as writing,
    ):
        config = writing.semaphore("config")
        await config.create(limit=1, data=b"old")
        async with watching.semaphore("config").watch(data=True) as states:
            assert (await anext(states)).data == b"old"
            await config.update(b"new")
            async with asyncio.timeout(PATIENCE):
                assert (await anext(states)).data == b"new"


@pytest.mark.exhaustive
@pytest.mark.no_debug
@pytest.mark.parametrize(
    ("clients", "sessions", "names"),
    [(1, 1, 1), (1, 1000, 1), (1, 1000, 1000), (1, 1, 1000), (20, 1, 1), (20, 1, 1000)],
)
async def test_a_thousand_waiters_cost_at_most_fifty_statements_a_second(
    sent: list[bytes], clients: int, sessions: int, names: int
) -> None:
    with a_pooled_schema() as store:
        # A busy machine attaches and closes a thousand sessions in more than the usual time.
        url = f"{store}&answer_timeout={PATIENCE:g}&connect_timeout={PATIENCE:g}"
        async with AsyncExitStack() as opened:
            holder = await opened.enter_async_context(tenure.connect(url))
            holding = await holder.session()
            held = await asyncio.gather(*(holding.mutex(f"m{at}").lock() for at in range(names)))
            their_sessions = []
            for _ in range(clients):
                client = await opened.enter_async_context(tenure.connect(url))
                their_sessions += await asyncio.gather(*(client.session() for _ in range(sessions)))
            async with asyncio.TaskGroup() as waiters:
                tasks = [
                    waiters.create_task(
                        their_sessions[at % len(their_sessions)].mutex(f"m{at % names}").lock()
                    )
                    for at in range(1000)
                ]
                async with asyncio.timeout(PATIENCE):
                    while _requests(store) < names + 1000:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                await asyncio.sleep(1)  # a program learns how many others there are
                sent.clear()
                began = time.monotonic()
                await asyncio.sleep(5)
                count, seconds = len(sent), time.monotonic() - began
                for each in tasks:
                    each.cancel()
            assert len(held) == names
            assert 0 < count <= 50 * seconds, Counter(sent)


def _requests(url: str) -> int:
    """Count the requests of a store, over a connection that no program of the test uses."""
    [(count,)] = shared().execute(f"SELECT count(*) FROM {url.rpartition('=')[2]}.requests")
    return int(str(count))


async def test_a_waiter_behind_the_first_one_is_found_granted(pooled: str) -> None:
    async with (
        tenure.connect(pooled) as one,
        tenure.connect(pooled) as other,
        one.session() as holding,
    ):
        gate = holding.semaphore("gate")
        await gate.create(limit=3)
        all_of_it = await gate.acquire(3)
        async with other.session() as first, other.session() as second:
            waiting = [
                asyncio.ensure_future(each.semaphore("gate").acquire(timeout=PATIENCE))
                for each in (first, second, second)
            ]
            async with asyncio.timeout(PATIENCE):
                while len((await gate.describe(waiters=True)).waiters) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await all_of_it.release()
            for lease in await asyncio.gather(*waiting):
                await lease.release()


@pytest.mark.exhaustive
async def test_a_pool_that_others_use_up_costs_no_lease_where_there_is_a_direct_connection() -> (
    None
):
    with a_pooler(shared(), settings="default_pool_size=1\nreserve_pool_size=0") as pooler:
        url = f"{pooler}?schema={new_name()}&listen={shared().folder}"
        async with (
            tenure.connect(url) as client,
            client.session(recovery_window=2) as session,
            await psycopg.AsyncConnection.connect(pooler) as other,
        ):
            lease = await session.mutex("m").lock()
            await other.execute("SELECT 1")  # its transaction keeps the pool's only connection
            waiting = asyncio.ensure_future(session.mutex("another").lock())
            done, _ = await asyncio.wait([waiting], timeout=4)
            assert not done
            assert lease.held
            await other.rollback()
            async with asyncio.timeout(PATIENCE), await waiting:
                assert lease.held


@pytest.mark.parametrize("code", ["08006", "25006", "55000", "57P01", "57P03", "57P05"])
async def test_calls_wait_while_the_server_behind_a_pooler_cannot_serve(
    pooled: str, code: str
) -> None:
    schema = pooled.rpartition("=")[2]
    async with tenure.connect(pooled) as client, client.session() as session:
        await (await session.mutex("m").lock()).release()
        shared().execute(
            f"""CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION 'not now' USING ERRCODE = '{code}'; END $$;
            CREATE TRIGGER refusal BEFORE INSERT ON {schema}.requests
            EXECUTE FUNCTION {schema}.refuse()"""
        )
        try:
            waiting = asyncio.ensure_future(session.mutex("m").lock())
            with pytest.raises(tenure.AcquireTimeout, match="because"):
                await session.mutex("late").lock(timeout=0.5)
            assert not waiting.done()
        finally:
            shared().execute(f"DROP FUNCTION {schema}.refuse() CASCADE")
        async with asyncio.timeout(PATIENCE), await waiting as lease:
            assert lease.held


# Replies that a pooler gives to the wrong client


_SIZE_OF_A_REQUEST = 8  # for encryption


class Between:
    """A proxy in front of a pooler, which reads the messages of both sides.

    Attributes:
        most: statements of a connection that were under way at the same time, at the most.
        connections: number of connections so far.
        repeat: pass on the last reply again, before the next one.
    """

    def __init__(self, port: int) -> None:
        self.most = self.connections = 0
        self.repeat = False
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while len(beginning := await self._beginning(reader)) == _SIZE_OF_A_REQUEST:
                writer.write(b"N")  # no encryption here
            back, there = await asyncio.open_connection("127.0.0.1", self._port)
            there.write(beginning)
            syncs: list[None] = []  # those that are not answered
            await asyncio.gather(self._there(reader, there, syncs), self._back(back, writer, syncs))
        writer.close()

    async def _beginning(self, reader: asyncio.StreamReader) -> bytes:
        size = await reader.readexactly(4)
        return size + await reader.readexactly(int.from_bytes(size) - 4)

    async def _there(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, syncs: list[None]
    ) -> None:
        async for message in _messages(source, sink):
            sink.write(message)
            if message[:1] == b"S":
                syncs.append(None)
                self.most = max(self.most, len(syncs))

    async def _back(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, syncs: list[None]
    ) -> None:
        before = reply = b""
        async for message in _messages(source, sink):
            reply += message
            if message[:1] == b"Z":
                if syncs:
                    syncs.pop()
                if self.repeat:
                    self.repeat = False
                    sink.write(before)
                sink.write(reply)
                before, reply = reply, b""


async def _messages(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter
) -> AsyncIterator[bytes]:
    """Yield the messages of one side; close the other one at their end."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await source.readexactly(5)
            yield head + await source.readexactly(int.from_bytes(head[1:]) - 4)
    sink.close()


@asynccontextmanager
async def in_between(pooled: str) -> AsyncIterator[tuple[Between, str]]:
    """A proxy in front of the pooler, and the URL of the store behind both."""
    port = urlsplit(pooled).port
    assert port
    proxy = Between(port)
    served: set[asyncio.Task[None]] = set()
    server = await asyncio.start_server(
        lambda *streams: served.add(asyncio.create_task(proxy.serve(*streams))), "127.0.0.1", 0
    )
    here = server.sockets[0].getsockname()[1]
    yield proxy, pooled.replace(str(port), str(here), 1)
    server.close()
    await server.wait_closed()
    await asyncio.gather(*served)  # the clients have closed


async def test_one_statement_is_under_way_at_a_time(pooled: str) -> None:
    # PgBouncer 1.18 gives the replies to the others to another client, if this one is killed.
    async with in_between(pooled) as (proxy, url), tenure.connect(url) as client:

        async def work(name: str) -> None:
            for _ in range(5):
                async with client.mutex(name).lock():
                    await client.mutex(name).describe()

        await asyncio.gather(*(work(f"one-at-a-time-{number % 10}") for number in range(40)))
        assert proxy.most == 1


async def test_a_reply_to_the_statement_of_another_client_is_not_taken(
    pooled: str,
) -> None:
    async with (
        in_between(pooled) as (proxy, url),
        tenure.connect(url) as client,
        tenure.connect(url) as other,
    ):
        held = await other.mutex("taken").lock()
        await (await client.mutex("free").lock()).release()
        for _ in range(3):
            before = proxy.connections
            proxy.repeat = True
            assert await client.mutex("taken").try_lock() is None
            lease = await client.mutex("free").try_lock()
            assert lease is not None
            assert await client.mutex("taken").try_lock() is None
            await lease.release()
            assert not proxy.repeat
            assert proxy.connections > before
        assert held.held
        await held.release()
