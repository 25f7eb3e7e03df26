"""Engines behind what their users have in front of a store: it works, waits, or is refused.

`docs/evidence/intermediaries.md` has the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tenure
from tests.clean_up import clean_up_with
from tests.engines.etcd import servers as etcd
from tests.engines.outages import NETWORKED, Afar
from tests.engines.postgresql import servers as postgresql
from tests.engines.postgresql.servers import PostgresServer
from tests.engines.redis import servers as redis
from tests.server.certificates import Authority
from tests.server.network import Network
from tests.server.served import served

PATIENCE = 30.0
SSL_REQUEST = struct.pack(">II", 8, 80877103)
"""What a client of PostgreSQL's asks before TLS."""


@contextmanager
def a_program(port: int, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a proxy that listens on a port; skip the test where it is not installed."""
    program = shutil.which(words[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip(f"no {words[0]} here: apt-get install haproxy nutcracker stunnel4 etcd-server")
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
        yield process


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


async def is_handed_over(url: str, meanwhile: Callable[[], None] | None = None) -> None:
    """Acquire a lock, hold it for longer than a window, and hand it over to another program.

    Args:
        url: of the store.
        meanwhile: something to do while the lock is held; it blocks.
    """
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        client.session(recovery_window=3) as session,
        other.session(recovery_window=3) as second,
    ):
        lease = await session.mutex("m").lock(timeout=PATIENCE)
        waiting = asyncio.ensure_future(second.mutex("m").lock(timeout=PATIENCE))
        await asyncio.wait([waiting], timeout=4)
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile)
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


class Terminator:
    """A proxy that ends TLS, with a certificate that changes.

    Attributes:
        port: on which it listens.
        url: of the store behind it.
        ca: file of the authority that signs its certificates.
        file: its certificate and key.
    """

    def __init__(self, folder: Path, scheme: str, direct: str) -> None:
        behind, self.port = urlsplit(direct).port, etcd.free_port()
        assert behind is not None
        self.behind = behind
        self._authority = Authority(folder)
        self.ca = self._authority.cert
        self.file = folder / "proxy.pem"
        rest = direct.partition("://")[2].replace(f":{behind}", f":{self.port}")
        self.url = f"{scheme}://{rest}{'&' if '?' in rest else '?'}tls_ca={self.ca}"
        self.renew()

    def renew(self) -> str:
        """Make another certificate, and return it."""
        pair = self._authority.signs("proxy")
        certificate = Path(pair.cert).read_text()
        self.file.write_text(certificate + Path(pair.key).read_text())
        return certificate

    def rotate(self, process: subprocess.Popen[bytes], number: int, *, asks: bytes = b"") -> None:
        """Have the proxy use another certificate; return when it does."""
        certificate = self.renew()
        process.send_signal(number)
        until = time.monotonic() + PATIENCE
        while not self._shows(certificate, asks):
            assert time.monotonic() < until, "the proxy does not use the new certificate"
            time.sleep(0.02)

    def _shows(self, certificate: str, asks: bytes) -> bool:
        context = ssl.create_default_context(cafile=self.ca)
        try:
            with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
                if asks:
                    connection.sendall(asks)
                    assert connection.recv(1) == b"S"
                with context.wrap_socket(connection, server_hostname="localhost") as secured:
                    shown = secured.getpeercert(binary_form=True)
        except ConnectionError:
            return False  # it binds its port again
        assert shown is not None
        return ssl.DER_cert_to_PEM_cert(shown) == certificate


SECURED = {
    "redis": "rediss",
    "etcd": "etcds",
    "native": "tenures",
    "ydb": "ydbs",
    "dflockd": "dflockds",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", SECURED)
async def test_an_engine_works_behind_a_proxy_that_ends_tls(engine: str, tmp_path: Path) -> None:
    # A lock of dflockd's ends with its connection, which is used every 7 seconds.
    idle = "20s" if engine == "dflockd" else "300ms"
    with NETWORKED[engine]() as afar:
        proxy = Terminator(tmp_path, SECURED[engine], afar.direct)
        text = f"""
defaults
    mode tcp
    timeout connect 5s
    timeout client {idle}
    timeout server {idle}
listen store
    bind 127.0.0.1:{proxy.port} ssl crt {proxy.file} alpn h2
    server one 127.0.0.1:{proxy.behind}
"""
        with (
            settings(text) as path,
            a_program(proxy.port, "haproxy", "-W", "-f", path, "-q") as process,
        ):
            await is_handed_over(proxy.url, lambda: proxy.rotate(process, signal.SIGUSR2))


@contextmanager
def a_database() -> Iterator[PostgresServer]:
    """A server of PostgreSQL that listens on a port."""
    with postgresql.a_server("fsync=off") as server:
        server.stop()
        server.listen()
        server.start()
        rules = server.data / "pg_hba.conf"
        rules.write_text("local all,replication all trust\nhost all all 127.0.0.1/32 trust\n")
        server.execute("SELECT pg_reload_conf()")
        yield server


@pytest.mark.exhaustive
async def test_postgresql_works_behind_a_proxy_that_ends_tls(tmp_path: Path) -> None:
    with a_database() as server:
        direct = f"postgresql://tenure@127.0.0.1:{server.port}/postgres"
        proxy = Terminator(tmp_path, "postgresql", direct)
        text = f"""
foreground = yes
pid =
[store]
protocol = pgsql
accept = 127.0.0.1:{proxy.port}
connect = 127.0.0.1:{proxy.behind}
cert = {proxy.file}
TIMEOUTidle = 1
TIMEOUTclose = 0
"""
        with settings(text) as path, a_program(proxy.port, "stunnel", path) as process:
            await is_handed_over(
                proxy.url, lambda: proxy.rotate(process, signal.SIGHUP, asks=SSL_REQUEST)
            )


@pytest.mark.exhaustive
async def test_postgresql_waits_while_a_balancer_leads_to_a_standby() -> None:
    with a_database() as primary, postgresql.a_standby(primary, listens=True) as standby:
        ports = [primary.port]
        balancer = Network(lambda: ports[0])
        balancer.start()
        with clean_up_with(balancer.stop):
            url = f"postgresql://tenure@127.0.0.1:{balancer.port}/postgres"
            async with tenure.connect(url) as client, client.session(recovery_window=20) as session:
                lease = await session.mutex("m").lock(timeout=PATIENCE)
                ports[0] = standby.port
                balancer.cut()
                with pytest.raises(tenure.AcquireTimeout, match="read-only"):
                    await session.mutex("another").lock(timeout=3)
                ports[0] = primary.port
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


@pytest.mark.exhaustive
async def test_postgresql_is_refused_behind_a_balancer_that_leads_to_a_standby() -> None:
    with a_database() as primary, postgresql.a_standby(primary, listens=True) as standby:
        url = f"postgresql://tenure@127.0.0.1:{standby.port}/postgres"
        with pytest.raises(tenure.EngineUnavailable, match=r"read-only.*[Nn]ame the primary"):
            await tenure.connect(url).list_nodes()


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
