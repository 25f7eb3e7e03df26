"""Silent and hurried connections keep no honest client out, on any listener."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tenure
from tests.server.certificates import Authority
from tests.server.serving import PATIENCE, Served, launched, serving

DFLOCKD = [sys.executable, "-W", "error", "-m", "tenure", "dflockd"]
TOKEN = "a-token-of-a-test-0123456789"


def port_of(server: Served, number: int) -> int:
    port = urlsplit(server.addresses[number]).port
    assert port
    return port


@contextlib.asynccontextmanager
async def silent(ports: list[int], number: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections that say nothing, so many to each port."""
    opened = [
        await asyncio.open_connection("127.0.0.1", port) for port in ports for _ in range(number)
    ]
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()
        for _, writer in opened:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def holds(url: str) -> None:
    """A client of this URL is served."""
    async with (
        tenure.connect(url) as client,
        asyncio.timeout(PATIENCE),
        client.mutex("held").lock(),
    ):
        pass


async def test_silent_connections_lock_no_client_out(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    options = ("--auth-token-file", str(tmp_path / "token"), "--max-greetings", "60")
    local = f"tenure+unix://{tmp_path}/tenure.sock"
    listen = ["tenure://127.0.0.1:0", "dflockd://127.0.0.1:0", "ydb://127.0.0.1:0", local]
    async with serving(tmp_path, *options, listen=listen) as server:
        native, dflockd, ydb = (port_of(server, each) for each in range(3))
        async with silent([native, dflockd, ydb], 40):
            await holds(f"tenure://{TOKEN}@127.0.0.1:{native}")
            await holds(f"tenure+unix://{TOKEN}@{tmp_path}/tenure.sock")
            await holds(f"dflockd://{TOKEN}@127.0.0.1:{dflockd}")
            await holds(f"ydb://127.0.0.1:{ydb}/local?token={TOKEN}")
        assert await server.end() == 0
    limits = {line["limit"] for line in server.told("connection refused")}
    assert limits == {"greetings"}


@pytest.mark.parametrize("tls", [False, True], ids=["token", "token and TLS"])
async def test_dflockds_clients_that_connect_at_once_come_in(tmp_path: Path, *, tls: bool) -> None:
    options = ["--port", "0", "--auth-token", TOKEN, "--read-timeout", "300"]
    secure = None
    if tls:
        authority = Authority(tmp_path)
        pair = authority.signs("server")
        options += ["--tls-cert", pair.cert, "--tls-key", pair.key]
        secure = ssl.create_default_context(cafile=authority.cert)
    number = 600 if tls else 1000
    async with launched(tmp_path, *options, command=DFLOCKD) as server:
        await server.until("ready")
        port = port_of(server, 0)
        connected = 0
        all_connected = asyncio.Event()

        async def come_in() -> bytes:
            nonlocal connected
            reader, writer = await asyncio.open_connection(
                "localhost" if tls else "127.0.0.1", port, ssl=secure
            )
            connected += 1
            if connected == number:
                all_connected.set()
            await all_connected.wait()  # until then, each of them is one that has shown no token
            writer.write(f"auth\n_\n{TOKEN}\n".encode())
            reply = await reader.readline()
            writer.close()
            return reply

        async with asyncio.timeout(2 * PATIENCE):
            replies = await asyncio.gather(*(come_in() for _ in range(number)))
        assert replies == [b"ok\n"] * number
        assert await server.end() == 0


async def test_a_page_of_another_site_takes_no_lock(tmp_path: Path) -> None:
    listen = ["tenure://127.0.0.1:0", "dflockd://127.0.0.1:0"]
    async with serving(tmp_path, listen=listen) as server:
        for number in range(2):
            port = port_of(server, number)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\n"
                b"Content-Type: text/plain\r\nContent-Length: 12\r\n\r\nl\nstolen\n600\n"
            )
            async with asyncio.timeout(PATIENCE):
                assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
            writer.close()
        async with (
            tenure.connect(f"dflockd://127.0.0.1:{port_of(server, 1)}") as client,
            client.mutex("stolen").lock(timeout=PATIENCE),
        ):
            pass
        assert await server.end() == 0
    assert len(server.told("an HTTP client at a port that does not serve HTTP")) == 2
