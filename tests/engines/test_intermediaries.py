"""Engines behind what their users have in front of a store: it works, waits, or is refused.

`docs/evidence/intermediaries.md` has the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tenure
from tests.clean_up import clean_up_with
from tests.engines.etcd import servers as etcd
from tests.engines.outages import NETWORKED, Afar
from tests.engines.redis import servers as redis
from tests.server.network import Network
from tests.server.served import served

PATIENCE = 30.0


@contextmanager
def a_program(port: int, *words: str) -> Iterator[None]:
    """Run a proxy that listens on a port; skip the test where it is not installed."""
    program = shutil.which(words[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip(f"no {words[0]} here: apt-get install haproxy nutcracker etcd-server")
    process = subprocess.Popen(
        [program, *words[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def end() -> None:
        process.kill()
        process.wait()

    with clean_up_with(end):
        until = time.monotonic() + PATIENCE
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "it has ended"
                assert time.monotonic() < until, "it accepts no connection"
                time.sleep(0.02)
        yield


@contextmanager
def settings(text: str) -> Iterator[str]:
    """Yield the path of a file with that text."""
    with tempfile.TemporaryDirectory(prefix="tenure-") as folder:
        path = Path(folder) / "settings"
        path.write_text(text)
        yield str(path)


@contextmanager
def an_haproxy(port: int, behind: int, server: str = "", more: str = "") -> Iterator[None]:
    """Run an HAProxy that passes bytes on, and closes connections that are idle for 300 ms."""
    text = f"""
defaults
    mode tcp
    timeout connect 5s
    timeout client 300ms
    timeout server 300ms
    {more}
listen store
    bind 127.0.0.1:{port}
    server one 127.0.0.1:{behind} {server}
"""
    with settings(text) as path, a_program(port, "haproxy", "-f", path, "-db", "-q"):
        yield


@contextmanager
def an_etcd_proxy(kind: str) -> Iterator[str]:
    with etcd.a_prefix() as url:
        parts, port = urlsplit(url), etcd.free_port()
        places = ("--listen-addr", f"127.0.0.1:{port}", "--endpoints", f"127.0.0.1:{parts.port}")
        with a_program(port, "etcd", kind, "start", *places):
            yield f"etcd://127.0.0.1:{port}?{parts.query}"


async def is_handed_over(url: str) -> None:
    """Acquire a lock, hold it for longer than a window, and hand it over to another program."""
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=3) as session,
        other.session(recovery_window=3) as second,
    ):
        lease = await session.mutex("m").lock(timeout=PATIENCE)
        waiting = asyncio.ensure_future(second.mutex("m").lock(timeout=PATIENCE))
        await asyncio.wait([waiting], timeout=4)
        assert lease.held
        assert not waiting.done()
        await lease.release()
        async with await waiting as later:
            assert later.fencing_token > lease.fencing_token


# It works


@pytest.mark.exhaustive
async def test_etcd_works_behind_its_gateway() -> None:
    with an_etcd_proxy("gateway") as url:
        await is_handed_over(url)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", sorted({*NETWORKED} - {"dflockd"}))
async def test_an_engine_works_behind_a_proxy_that_closes_idle_connections(engine: str) -> None:
    with NETWORKED[engine]() as afar:
        behind, port = urlsplit(afar.direct).port, etcd.free_port()
        assert behind is not None
        with an_haproxy(port, behind):
            await is_handed_over(afar.direct.replace(f":{behind}", f":{port}"))


@pytest.mark.exhaustive
async def test_a_balancer_moves_a_client_between_servers_of_one_store() -> None:
    with etcd.a_prefix() as store, served(store) as one, served(store) as two:
        ports = [int(each.address.rpartition(":")[2]) for each in (one, two)]
        balancer = Network(lambda: ports[0])
        balancer.start()
        with clean_up_with(balancer.stop):
            url = f"tenure://127.0.0.1:{balancer.port}"
            async with tenure.connect(url) as client, client.session(resumable=True) as session:
                lease = await session.mutex("m").lock()
                for _ in range(3):
                    ports.reverse()
                    balancer.cut()
                    async with session.mutex("another").lock(timeout=PATIENCE):
                        assert lease.held


# It is refused, with the reason


async def test_etcd_is_refused_behind_its_grpc_proxy() -> None:
    with (
        an_etcd_proxy("grpc-proxy") as url,
        pytest.raises(tenure.Unsupported, match=r"grpc-proxy.*Name the members"),
    ):
        await tenure.connect(url).list_nodes()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_redis_is_refused_behind_a_proxy_that_lacks_commands(protocol: int) -> None:
    port, behind = redis.free_port(), redis.free_port()
    text = f"""
store:
  listen: 127.0.0.1:{port}
  redis: true
  servers:
    - 127.0.0.1:{behind}:1
"""
    words = ("-s", str(redis.free_port()))
    with (
        redis.a_server(port=behind),
        settings(text) as path,
        a_program(port, "nutcracker", "-c", path, *words),
        pytest.raises(tenure.EngineUnavailable, match="name the server itself"),
    ):
        await tenure.connect(f"redis://127.0.0.1:{port}?protocol={protocol}").list_nodes()


async def test_a_node_of_a_redis_cluster_is_refused() -> None:
    with (
        redis.a_server("--cluster-enabled", "yes") as server,
        pytest.raises(tenure.Unsupported, match="Redis Cluster, which is not supported"),
    ):
        await tenure.connect(server.url).list_nodes()


HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\nContent-Length: 24\r\n"
    b"Connection: close\r\n\r\n<h1>400 Bad Request</h1>"
)


@asynccontextmanager
async def a_web_server() -> AsyncIterator[int]:
    """A server that answers everything with a page, as an HTTP proxy does; yields its port."""
    connections: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        with contextlib.suppress(OSError):
            await reader.read(65536)
            writer.write(HTTP)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in connections:
            each.transport.abort()


SCHEMES = {
    "redis": "redis://127.0.0.1:{port}",
    "postgresql": "postgresql://tenure@127.0.0.1:{port}/jobs",
    "etcd": "etcd://127.0.0.1:{port}?connect_timeout=2",
    "tenure": "tenure://127.0.0.1:{port}",
    "ydb": "ydb://127.0.0.1:{port}/local?discovery=off",
    "dflockd": "dflockd://127.0.0.1:{port}",
}


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_web_server_in_place_of_a_store_is_refused(scheme: str) -> None:
    async with a_web_server() as port:
        url = SCHEMES[scheme].format(port=port)
        with pytest.raises(tenure.EngineUnavailable) as refused:
            async with asyncio.timeout(PATIENCE), tenure.connect(url) as client:
                await client.mutex("m").try_lock()
    assert f"127.0.0.1:{port}" in str(refused.value)


@contextmanager
def announcing(afar: Afar) -> Iterator[str]:
    """Yield the URL of a store behind a proxy that announces its clients (PROXY protocol)."""
    behind, port = urlsplit(afar.direct).port, etcd.free_port()
    assert behind is not None
    with an_haproxy(port, behind, "send-proxy"):
        yield afar.direct.replace(f":{behind}", f":{port}")


@pytest.mark.parametrize("engine", sorted(NETWORKED))
async def test_a_proxy_that_announces_its_clients_is_refused(engine: str) -> None:
    with NETWORKED[engine]() as afar, announcing(afar) as url:
        with pytest.raises(tenure.TenureError) as refused:
            async with asyncio.timeout(PATIENCE), tenure.connect(url) as client:
                await client.mutex("m").try_lock()
        if engine == "redis":
            assert "send-proxy" in str(refused.value)
