"""Clients on a network that end their side of a connection: half-closed ones, and dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.server.dflockd.test_processes import DFLOCKD, Talk, port_of, talking
from tests.server.serving import PATIENCE, launched

pytestmark = pytest.mark.parametrize("kept", [False, True], ids=["released", "kept"])


@contextlib.asynccontextmanager
async def serving(folder: Path, *, kept: bool) -> AsyncIterator[int]:
    """A server on which locks end with their connection, or are kept for the lease: its port."""
    flags = ["--port", "0", "--store", f"sqlite:///{folder}/locks.db"]
    if kept:
        flags.append("--no-auto-release-on-disconnect")
    async with launched(folder, *flags, command=DFLOCKD) as served:
        await served.until("ready")
        yield port_of(served)


@contextlib.contextmanager
def half_closed(port: int, said: bytes) -> Iterator[socket.socket]:
    """Send this and end the input, as ``printf … | nc`` does."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as client:
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        yield client


def all_of(client: socket.socket) -> str:
    heard = b""
    while data := client.recv(4096):
        heard += data
    return heard.decode()


async def waiting(talk: Talk, number: int) -> None:
    """Wait until so many wait for the key ``job``."""
    async with asyncio.timeout(PATIENCE):
        while True:
            told = json.loads((await talk.ask("stats"))[3:])
            if {each["key"]: each["waiters"] for each in told["locks"]}["job"] == number:
                return


async def test_a_half_closed_client_gets_its_reply(tmp_path: Path, kept: bool) -> None:
    async with serving(tmp_path, kept=kept) as port:
        with half_closed(port, b"l\nfree\n10\nping\n_\n_\n") as client:
            heard = await asyncio.to_thread(all_of, client)
        assert heard.startswith("ok ")
        assert heard.endswith("\nok\n")
        async with talking(port) as holder:
            token = await holder.token("l", "job", "0 600")
            with half_closed(port, b"l\njob\n600\n") as client:
                await waiting(holder, 1)
                assert await holder.ask("r", "job", token) == "ok"
                assert (await asyncio.to_thread(all_of, client)).startswith("ok ")


async def test_a_dead_client_costs_nobody_the_lock(tmp_path: Path, kept: bool) -> None:
    async with (
        serving(tmp_path, kept=kept) as port,
        talking(port) as holder,
        talking(port) as other,
    ):
        token = await holder.token("l", "job", "0 600")
        with half_closed(port, b"l\njob\n600 600\n"):
            await waiting(holder, 1)
        other.say("l", "job", "600")
        await waiting(holder, 2)  # the server cannot tell yet that the first one is dead
        assert await holder.ask("r", "job", token) == "ok"
        assert (await other.hear()).startswith("ok ")


async def test_a_client_whose_kernel_reports_its_end_waits_no_more(
    tmp_path: Path, kept: bool
) -> None:
    async with serving(tmp_path, kept=kept) as port, talking(port) as holder:
        await holder.token("l", "job", "0 600")
        with half_closed(port, b"l\njob\n600 600\n") as client:
            await waiting(holder, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await waiting(holder, 0)
