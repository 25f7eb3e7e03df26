"""A server and a network of the kind that engines to come have, really broken."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from chaos.adapter import Fault, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults
from tests.ports import free_port

SILENCE = 0.2
"""Seconds in which an answer would have come; a slow machine makes the test weaker, not red."""


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def line(self) -> bytes:
        return await self._reader.readline()

    async def echoed(self, text: bytes) -> bytes:
        self._writer.write(text)
        return await self.line()

    def say(self, text: bytes) -> None:
        self._writer.write(text)

    async def silent(self) -> bool:
        try:
            async with asyncio.timeout(SILENCE):
                await self._reader.readline()
        except TimeoutError:
            return True
        return False


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def starts(port: int) -> int:
    """How often the server has been started with its data."""
    async with connected(port) as connection:
        return int(await connection.line())


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Server]:
    port = free_port()
    command = (sys.executable, "-m", "tests.chaos.echo", str(port), str(folder / "data"))
    server = Server(command, port, folder / "log")
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@asynccontextmanager
async def proxied(server: Server) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.aclose()


def inflicted(faults: list[Fault], name: str) -> AbstractAsyncContextManager[str]:
    (fault,) = (each for each in faults if each.name == name)
    scene = Scene(crew=None, engine=None, journal=None, random=Random(1))  # type: ignore[arg-type]
    return fault.inflict(scene)


@pytest.mark.parametrize("name", ["kill-server", "restart-server"])
async def test_a_server_that_ended_is_there_again_with_its_data(name: str, tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        assert await starts(server.port) == 1
        async with inflicted(server_faults([server]), name) as what:
            assert str(server.port) in what
            with pytest.raises(ConnectionRefusedError):
                await starts(server.port)
        assert await starts(server.port) == 2


async def test_a_server_can_lose_its_data_where_the_engine_promises_to_survive_that(
    tmp_path: Path,
) -> None:
    def wipe(_: Server) -> None:
        (tmp_path / "data").unlink()

    async with running(tmp_path) as server:
        async with inflicted(server_faults([server], wipe=wipe), "lose-data"):
            pass
        assert await starts(server.port) == 1
        assert "lose-data" not in [fault.name for fault in server_faults([server])]


async def test_a_server_that_is_stopped_answers_when_it_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as server, connected(server.port) as connection:
        await connection.line()
        async with inflicted(server_faults([server]), "pause-server"):
            connection.say(b"hello\n")
            assert await connection.silent()
        assert await connection.line() == b"hello\n"


async def test_a_server_that_does_not_come_up_is_an_error_with_its_log(tmp_path: Path) -> None:
    server = Server((sys.executable, "-c", "raise SystemExit(3)"), 1, tmp_path / "log")
    with pytest.raises(OSError, match=r"ended with status 3; see .*log"):
        await server.start()


async def test_a_whole_network_lets_everything_through(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as server,
        proxied(server) as proxy,
        connected(proxy.port) as connection,
    ):
        assert await connection.line() == b"1\n"
        assert await connection.echoed(b"hello\n") == b"hello\n"


async def test_a_cut_network_resets_old_connections_and_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as server, proxied(server) as proxy:
        async with connected(proxy.port) as connection:
            await connection.line()
            async with inflicted(network_faults([proxy]), "cut"):
                with pytest.raises(ConnectionResetError):
                    await connection.line()
                with pytest.raises(ConnectionResetError):
                    await starts(proxy.port)
        assert await starts(proxy.port) == 1


async def test_a_half_open_connection_is_there_and_dead(tmp_path: Path) -> None:
    async with running(tmp_path) as server, proxied(server) as proxy:
        async with connected(proxy.port) as connection:
            await connection.line()
            async with inflicted(network_faults([proxy]), "half-open"):
                connection.say(b"hello\n")
                assert await connection.silent()
                async with connected(proxy.port) as new:
                    assert await new.silent()
            with pytest.raises(ConnectionResetError):
                await connection.line()
        assert await starts(proxy.port) == 1


async def test_an_end_of_the_server_is_the_end_of_the_connections_through_the_proxy(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path) as server,
        proxied(server) as proxy,
        connected(proxy.port) as connection,
    ):
        await connection.line()
        await server.kill()
        with suppress(ConnectionResetError):
            assert await connection.line() == b""
