"""YDB's own Python SDK, unchanged: its driver with discovery, tokens and TLS, and both of its
coordination clients.

They are asked only for what they do right: an `acquire` of theirs returns normally when its time in
the queue was over, and none of them ever stops a session.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ydb
import ydb.aio
from ydb.aio.coordination import CoordinationClient as AsyncClient
from ydb.coordination import (
    ConsistencyMode,
    CoordinationClient,
    NodeConfig,
    RateLimiterCountersMode,
)

from tenure.server.auth import Authenticator
from tenure.server.tls import TlsFiles, server_context
from tests.server.certificates import Authority
from tests.server.ydb.raw import NODE, Server, eventually, serving

sdk: Any = ydb  # its types are not for strict eyes
TOKEN = "a token that nobody guesses"
PATIENCE = 20.0


@contextlib.asynccontextmanager
async def session_of(client: Any, node: str = NODE) -> AsyncIterator[Any]:
    """A session of the SDK's client for asyncio.

    On Python 3.11 `asyncio.wait_for` drops a cancellation that comes together with its result. The
    SDK cancels its reader once, and waits for it: if a ping came just then, it would wait for ever.
    """
    session = client.session(node)
    try:
        yield session
    finally:
        closing = asyncio.create_task(session.close())
        while not (await asyncio.wait({closing}, timeout=5))[0]:
            closing.cancel()  # cancels the reader again
        with contextlib.suppress(asyncio.CancelledError):
            await closing


def config(**changes: Any) -> NodeConfig:
    fields: dict[str, Any] = {
        "attach_consistency_mode": ConsistencyMode.STRICT,
        "rate_limiter_counters_mode": RateLimiterCountersMode.DETAILED,
        "read_consistency_mode": ConsistencyMode.RELAXED,
        "self_check_period_millis": 1500,
        "session_grace_period_millis": 9000,
        **changes,
    }
    return NodeConfig(**fields)


async def settled() -> None:
    """Wait for the tasks of grpc.aio and of the SDK that outlive what they were made for."""
    me = asyncio.current_task()
    async with asyncio.timeout(PATIENCE):
        while theirs := [task for task in asyncio.all_tasks() if task is not me]:
            await asyncio.wait(theirs)


@contextlib.asynccontextmanager
async def driver(server: Server, **how: Any) -> AsyncIterator[Any]:
    """The SDK's driver for asyncio, ready: it has asked for the endpoints, and reached one."""
    scheme = "grpcs" if "root_certificates" in how else "grpc"
    how.setdefault("credentials", sdk.AnonymousCredentials())
    made = sdk.aio.Driver(endpoint=f"{scheme}://{server.target}", database="/local", **how)
    try:
        await made.wait(timeout=PATIENCE, fail_fast=True)
        yield made
    finally:
        await made.stop()


def in_a_server(test: Callable[[Server, Any], Any]) -> Callable[[str], Any]:
    """Run a test with a server and a driver."""

    async def run(store: str) -> None:
        async with serving(store) as server, driver(server) as made:
            await test(server, made)
        await settled()

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_a_server
async def test_nodes(server: Server, made: Any) -> None:
    client = AsyncClient(made)
    await client.create_node("/local/n", config())
    assert await client.describe_node("/local/n") == config()
    await client.alter_node("/local/n", config(self_check_period_millis=2500))
    assert (await client.describe_node("/local/n")).self_check_period_millis == 2500
    await client.delete_node("/local/n")
    with pytest.raises(sdk.SchemeError):
        await client.describe_node("/local/n")


@in_a_server
async def test_a_semaphore_is_shared_by_sessions(server: Server, made: Any) -> None:
    client = AsyncClient(made)
    async with session_of(client) as first, session_of(client) as second:
        one, other = first.semaphore("s", 2), second.semaphore("s", 2)
        await one.acquire(2)
        waits = asyncio.create_task(other.acquire(1))

        async def is_waiting() -> bool:
            return bool((await one.describe()).waiters)

        await eventually(is_waiting)
        await one.update(b"data")
        described = await one.describe()
        assert (described.data, described.limit, described.count) == (b"data", 2, 2)
        assert [each.count for each in described.owners] == [2]
        assert not waits.done()
        await one.release()
        await waits
        assert [each.count for each in (await other.describe()).owners] == [1]
        await other.release()
        async with one:
            assert (await one.describe()).count == 1


@in_a_server
async def test_a_session_outlives_its_connection(server: Server, made: Any) -> None:
    client = AsyncClient(made)
    async with session_of(client) as session:
        mine = session.semaphore("s", 1)
        await mine.acquire()
        (before,) = await server.context.engine.list_sessions("/default")
        for connection in list(server.listener.connections):
            connection.cut_off()

        async def back() -> bool:
            with contextlib.suppress(asyncio.TimeoutError, sdk.Error):
                return len((await mine.describe()).owners) == 1
            return False

        await eventually(back)
        (after,) = await server.context.engine.list_sessions("/default")
        assert after.id == before.id
        await mine.release()
        assert (await mine.describe()).owners == []


@pytest.mark.exhaustive
async def test_the_sdk_stays_connected_and_attached_without_anything_to_do() -> None:
    """For as long as it takes a stock server to send the SDK away: four pings without data."""
    options = [
        ("grpc.keepalive_time_ms", 1000),  # grpc-core goes no lower
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with serving() as server, driver(server, channel_options=options) as made:
        client = AsyncClient(made)
        async with session_of(client) as session:
            await session.semaphore("s", 1).acquire()
            (stream,) = server.listener._streams

            async def only_one_is_left() -> bool:  # the SDK closes that of its discovery
                return len(server.listener.connections) == 1

            await eventually(only_one_is_left)
            connections = set(server.listener.connections)

            async def pinged_six_times() -> bool:
                return all(each.pings >= 6 for each in connections)

            await eventually(pinged_six_times)
            assert set(server.listener.connections) == connections
            assert set(server.listener._streams) == {stream}
    await settled()


async def test_a_token_lets_the_sdk_in_and_a_wrong_one_does_not() -> None:
    authenticator = Authenticator({TOKEN: "deploy"})
    async with serving(authenticator=authenticator) as server:
        async with driver(server, credentials=sdk.AccessTokenCredentials(TOKEN)) as made:
            client = AsyncClient(made)
            await client.create_node("/local/n", config())
            async with session_of(client, "/local/n") as session:
                await session.semaphore("s", 1).acquire()
        wrong = sdk.aio.Driver(
            endpoint=f"grpc://{server.target}",
            database="/local",
            credentials=sdk.AccessTokenCredentials("wrong"),
        )
        try:
            with pytest.raises(sdk.ConnectionFailure, match="token"):
                await wrong.wait(timeout=PATIENCE, fail_fast=True)
        finally:
            await wrong.stop()
    await settled()


async def test_the_sdk_comes_in_through_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("server.example")
    tls = server_context(TlsFiles(pair.cert, pair.key))
    roots = await asyncio.to_thread(Path(authority.cert).read_bytes)
    async with (
        serving(url="ydbs://127.0.0.1:0", tls=tls) as server,
        driver(server, root_certificates=roots) as made,
    ):
        (endpoint,) = made._store.connections.values()
        assert endpoint.endpoint == server.target
        async with session_of(AsyncClient(made)) as session:
            await session.semaphore("s", 1).acquire()
    await settled()


# --- the synchronous one


@contextlib.contextmanager
def serving_in_a_thread() -> Iterator[Server]:
    """A server on a loop of its own, as a program of its own would have it."""
    started: list[Server] = []
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving() as server:
            started.append(server)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield started[0]
    finally:
        done.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_the_synchronous_client_does_the_same() -> None:
    with (
        serving_in_a_thread() as server,
        sdk.Driver(
            endpoint=f"grpc://{server.target}",
            database="/local",
            credentials=sdk.AnonymousCredentials(),
        ) as made,
    ):
        made.wait(timeout=PATIENCE, fail_fast=True)
        client = CoordinationClient(made)
        client.create_node("/local/n", config())
        assert client.describe_node("/local/n") == config()
        client.alter_node("/local/n", config(self_check_period_millis=2500))
        assert client.describe_node("/local/n").self_check_period_millis == 2500
        with client.session(NODE) as session:
            with session.semaphore("s", 1) as held:
                held.update(b"data")
                described = held.describe()
                assert (described.data, len(described.owners)) == (b"data", 1)
            assert session.semaphore("s", 1).describe().owners == []
        client.delete_node("/local/n")
        with pytest.raises(sdk.SchemeError):
            client.describe_node("/local/n")
