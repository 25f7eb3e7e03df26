"""A network that can be broken: what stands between the clients and a server on this host.

The engine gives clients the proxy's port instead of the server's, and gets the faults of
`network_faults`. The proxy belongs to one event loop; `aclose` ends all its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from chaos.adapter import Fault, Scene

_PIECE = 1 << 16


class Proxy:
    """Forwards connections to a port of this host, as long as the network is whole.

    Args:
        target: the server's port.
    """

    def __init__(self, target: int) -> None:
        """Start whole; `start` begins to listen."""
        self._target = target
        self._server: asyncio.Server | None = None
        self._whole = asyncio.Event()
        self._whole.set()
        self._refusing = False
        self._links: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def port(self) -> int:
        """Where clients find it."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Accept connections, on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def aclose(self) -> None:
        """Close everything. Safe to call twice."""
        if self._server is not None:
            self._server.close()
        await self._drop_all()

    async def cut(self) -> None:
        """Reset every connection; new ones are reset at once."""
        self._refusing = True
        await self._drop_all()

    def fall_silent(self) -> None:
        """Half-open: connections stay, new ones are accepted, and nothing comes through."""
        self._whole.clear()

    async def mend(self) -> None:
        """Whole again. What was sent into the silence is lost, with its connections."""
        if not self._whole.is_set():
            await self._drop_all()
        self._whole.set()
        self._refusing = False

    async def _drop_all(self) -> None:
        links = dict(self._links)
        for link, client in links.items():
            _reset(client)
            link.cancel()
        if links:
            await asyncio.wait(links)

    def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(client)
            return
        link = asyncio.get_running_loop().create_task(self._link(reader, client))
        self._links[link] = client
        link.add_done_callback(self._links.pop)

    async def _link(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            back, server = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, server))
                    both.create_task(self._forward(back, client))
            finally:
                server.transport.abort()
        except* OSError:
            pass  # one of the two ends is gone, and so is the other now
        finally:
            client.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while piece := await source.read(_PIECE):
            await self._whole.wait()
            sink.write(piece)
            await sink.drain()
        await self._whole.wait()
        with contextlib.suppress(OSError):
            sink.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close it in the hard way: the other side is told that it was reset, not that it ended."""
    end: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed already
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def network_faults(proxies: Sequence[Proxy]) -> list[Fault]:
    """Return the faults of the network, before one server at a time."""

    @asynccontextmanager
    async def cut(scene: Scene) -> AsyncIterator[str]:
        proxy = scene.random.choice(proxies)
        await proxy.cut()
        try:
            yield f"port {proxy.port}"
        finally:
            await proxy.mend()

    @asynccontextmanager
    async def fall_silent(scene: Scene) -> AsyncIterator[str]:
        proxy = scene.random.choice(proxies)
        proxy.fall_silent()
        try:
            yield f"port {proxy.port}"
        finally:
            await proxy.mend()

    return [
        Fault("cut", "connections are reset, and new ones too", cut, (0.1, 3.0)),
        Fault("half-open", "connections stay, and nothing comes through", fall_silent, (0.3, 4.0)),
    ]
