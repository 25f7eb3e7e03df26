"""`tenure serve` with HTTP as a process: signals, sockets, settings, a store that fails."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import tenure
from tests.clean_up import clean_up_with
from tests.engines.redis.servers import Server
from tests.ports import free_port
from tests.server.http.asking import HOLDER, READER, Answered, ask, called, hosted, scraped
from tests.server.serving import launched, serving
from tests.server.test_process import ACTIVATES
from tests.server.test_revocation import named

SETTINGS = b"\0\0\0\x04\0\0\0\0\0"  # a frame of HTTP/2, without any setting

LISTEN = ("http://127.0.0.1:0", "tenure://127.0.0.1:0")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_it_answers_on_either_loop_and_ends_in_order(loop: str, tmp_path: Path) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    async with serving(tmp_path, "--loop", loop, listen=LISTEN) as server:
        http, native = server.addresses
        async with tenure.connect(native) as client, client.mutex("m").lock():
            held = await scraped(http, lambda it: it.value("tenure_leases", node="/default") == 1)
            assert held.value("process_open_fds") > 3
        async with called(http) as browser:
            for path in ("/healthz", "/readyz", "/metrics", "/"):
                assert (await browser.ask(path)).status == 200
            browser.say(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await browser.reader.readuntil(b"\r\n\r\n")  # a page that lives
            assert await server.end() == 0
        assert [line["event"] for line in server.lines[-2:]] == ["draining", "ended"]
        assert not [line for line in server.lines if line["level"] == "error"]


async def test_every_listener_counts_its_connections_bytes_and_leases(tmp_path: Path) -> None:
    listen = "http://127.0.0.1:0", "dflockd://127.0.0.1:0", "ydb://127.0.0.1:0"
    async with serving(tmp_path, "--store", "memory://", listen=listen) as server:
        http, dflockd, ydb = (each.removesuffix("/local") for each in server.addresses)
        said = {dflockd: b"l\nkey\n0\n", ydb: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS}
        writers, heard = [], {}
        for address, words in said.items():
            parts = urlsplit(address)
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writers.append(writer)
            writer.write(words)
            async with asyncio.timeout(60):
                heard[address] = await reader.read(1000)
        found = await scraped(http, lambda it: it.value("tenure_leases", node="/dflockd") == 1)
        for address, words in said.items():
            listener = {"listener": address}
            assert found.value("tenure_connections", **listener) == 1
            assert found.value("tenure_connections_opened_total", **listener) == 1
            assert found.value("tenure_received_bytes_total", **listener) == len(words)
            assert found.value("tenure_sent_bytes_total", **listener) >= len(heard[address]) > 0
        assert found.value("tenure_grants_total", node="/dflockd") == 1
        for writer in writers:
            writer.transport.abort()
        await scraped(http, lambda it: it.value("tenure_connections", listener=dflockd) == 0)
        await scraped(http, lambda it: it.value("tenure_connections", listener=ydb) == 0)
        assert await server.end() == 0


async def test_a_reload_ends_connections_and_sign_ins_of_a_revoked_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(named(leaving=READER, staying=HOLDER))
    options = ["--auth-token-file", str(file), "--store", "memory://"]
    async with serving(tmp_path, *options, listen=LISTEN[:1]) as server:
        async with called(server.address) as leaving, called(server.address) as staying:
            assert (await leaving.ask("/metrics", token=READER)).lasts
            assert (await staying.ask("/metrics", token=HOLDER)).lasts
            file.write_text(named(staying=HOLDER))
            server.send(signal.SIGHUP)
            assert (await server.until("reloaded"))["connections_ended"] == 1
            assert await leaving.rest() == b""
            assert (await staying.ask("/metrics", token=HOLDER)).status == 200
        assert (await ask(server.address, "/metrics", token=READER)).status == 401
        assert await server.end() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
async def test_it_serves_the_socket_that_systemd_has_opened(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        url = f"http://127.0.0.1:{opened.getsockname()[1]}"
        command = [sys.executable, "-c", ACTIVATES, str(opened.fileno())]
        options = "--store", "memory://", "--listen", url
        async with launched(
            tmp_path, *options, command=command, pass_fds=[opened.fileno()]
        ) as server:
            await server.until("ready")
            assert (await ask(url, "/readyz")).status == 200
            assert await server.end() == 0


async def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    without = "import sys; sys.modules['uvicorn'] = None; "
    code = without + "from tenure.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve"]
    async with launched(tmp_path, "--listen", "http://127.0.0.1:0", command=command) as server:
        assert await server.end(None) == 78
        assert "pip install 'tenure[console]'" in server.lines[-1]["why"]
        assert b"Traceback" not in server.raw


@pytest.fixture
def redis() -> Iterator[Server]:
    """One that a test may stop; its socket's path is short."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-http-"))
    server = Server(folder, port=free_port())
    server.start()
    with clean_up_with(lambda: shutil.rmtree(folder)), clean_up_with(server.kill):
        yield server


async def until(address: str, path: str, status: int) -> Answered:
    async with asyncio.timeout(60):
        while True:
            answered = await ask(address, path)
            if answered.status == status:
                return answered
            await asyncio.sleep(0.1)


async def test_a_store_that_cannot_be_reached_is_shown(redis: Server) -> None:
    async with hosted(f"{redis.url}&max_window=2") as server:  # and so much quarantine
        address = server.address
        assert (await ask(address, "/readyz")).json == {"ready": True}
        redis.stop()
        answered = await until(address, "/readyz", 503)
        assert answered.json["ready"] is False
        assert answered.json["reason"] == "store"
        assert answered.json["detail"]
        assert (await ask(address, "/healthz")).status == 200
        metrics = await server.scrape(lambda it: it.value("tenure_store_up") == 0)
        assert metrics.value("tenure_store_failures_total") >= 1
        checks = await asyncio.gather(*(ask(address, "/readyz") for _ in range(50)))
        assert {each.status for each in checks} == {503}
        redis.start()
        await until(address, "/readyz", 200)
        metrics = await server.scrape(lambda it: it.value("tenure_store_up") == 1)
        assert metrics.value("tenure_store_latency_seconds_count") >= 1


async def test_a_store_that_is_silent_is_shown_within_the_bound(redis: Server) -> None:
    async with hosted(redis.url) as server:
        redis.pause()
        try:
            answered = await until(server.address, "/readyz", 503)
            assert answered.json["reason"] == "store"
        finally:
            redis.resume()
        await until(server.address, "/readyz", 200)
