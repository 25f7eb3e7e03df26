"""TLS records beyond a connection's share of an iteration: read later, and none is lost."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from tenure.server import tls
from tenure.server.budget import LoopBudget, Share
from tenure.server.tls import TlsFiles, server_context, slice_tls
from tests.hostile.strangers import change_keys
from tests.server.certificates import Authority

RECORDS = 3000
PATIENCE = 60.0


class Receiver(asyncio.Protocol):
    """Notes how much it gets at a time."""

    def __init__(self, budget: LoopBudget) -> None:
        self.sizes: list[int] = []
        self.complete = asyncio.Event()
        self._budget = budget

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        slice_tls(self.transport, partial(Share, self._budget, "a client"), self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self.sizes.append(len(data))
        if sum(self.sizes) >= RECORDS:
            self.complete.set()

    def pause_for(self, seconds: float) -> None:
        """Do not read for a while."""
        self.transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, self.transport.resume_reading)


@pytest.mark.parametrize("pauses", [False, True])
async def test_tiny_records_are_read_a_few_at_a_time(tmp_path: Path, *, pauses: bool) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("server")
    budget = LoopBudget(time.perf_counter, logging.getLogger("tests.server.tls_input"))
    receiver = Receiver(budget)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: receiver,
        "127.0.0.1",
        0,
        ssl=server_context(TlsFiles(pair.cert, pair.key)),
    )
    port = server.sockets[0].getsockname()[1]

    def send() -> None:
        context = ssl.create_default_context(cafile=authority.cert)
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            for _ in range(RECORDS):
                client.send(b"x")
            sent.set()
            ends.wait()

    async with asyncio.timeout(PATIENCE), server:
        sent, ends = _Flag(loop), _Flag(loop)
        sending = loop.run_in_executor(None, send)
        try:
            if pauses:
                await sent.awaited()
                receiver.pause_for(0.01)
            await receiver.complete.wait()
        finally:
            ends.set()
            await sending
    assert sum(receiver.sizes) == RECORDS
    assert max(receiver.sizes) <= 256


async def test_records_that_only_change_keys_are_read_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "_SECONDS", 0.0)  # one in a turn
    authority = Authority(tmp_path)
    pair = authority.signs("server")
    budget = LoopBudget(time.perf_counter, logging.getLogger("tests.server.tls_input"))
    receiver = Receiver(budget)
    server = await asyncio.get_running_loop().create_server(
        lambda: receiver, "127.0.0.1", 0, ssl=server_context(TlsFiles(pair.cert, pair.key))
    )
    port = server.sockets[0].getsockname()[1]

    def send() -> None:
        context = ssl.create_default_context(cafile=authority.cert)
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            change_keys(client, 50)
            client.sendall(b"x" * RECORDS)
            client.recv(1)  # until the end

    async with asyncio.timeout(PATIENCE), server:
        sending = asyncio.get_running_loop().run_in_executor(None, send)
        await receiver.complete.wait()
        receiver.transport.close()
        await sending
    assert budget.iteration >= 50


class _Flag:
    """An event between a thread and a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._thread = threading.Event()
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        self._thread.set()
        self._loop.call_soon_threadsafe(self._event.set)

    def wait(self) -> None:
        assert self._thread.wait(PATIENCE)

    async def awaited(self) -> None:
        await self._event.wait()
