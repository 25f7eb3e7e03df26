"""The network between the members of an etcd cluster, from which one can be cut out.

A member is known to the others by the port of its *gate*, through which they reach it. Who comes to
a gate says in its first request by which address it is known itself, so that a member can be cut
off in both directions: nobody reaches it, and it reaches nobody. Clients go another way.

It belongs to one event loop; `aclose` ends all its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

_SENDER = re.compile(rb"\r\nX-PeerURLs: http://127\.0\.0\.1:(\d+)\r\n", re.IGNORECASE)

_PIECE = 1 << 16

_MayPass: TypeAlias = Callable[[int, int], bool]


class Peers:
    """Gates to some ports of this host."""

    def __init__(self, targets: Sequence[int]) -> None:
        """Start with all gates open."""
        self._gates = [_Gate(target, self._may_pass) for target in targets]
        self._alone: set[int] = set()

    async def start(self) -> None:
        """Begin to listen at all gates."""
        for gate in self._gates:
            await gate.start()

    async def aclose(self) -> None:
        """Close everything. Safe to call twice, and without start."""
        for gate in self._gates:
            await gate.aclose()

    @property
    def ports(self) -> list[int]:
        """By which the members are known, in the order of the targets."""
        return [gate.port for gate in self._gates]

    async def isolate(self, number: int) -> None:
        """Cut one off from all others; its connections are reset, and new ones too."""
        self._alone.add(self._gates[number].port)
        for gate in self._gates:
            await gate.drop()

    def mend(self) -> None:
        """Everybody reaches everybody. Safe when nothing is broken."""
        self._alone.clear()

    def _may_pass(self, sender: int, receiver: int) -> bool:
        return not self._alone & {sender, receiver}


class _Gate:
    """The way to one member."""

    def __init__(self, target: int, may_pass: _MayPass) -> None:
        self.port = 0
        self._target = target
        self._may_pass = may_pass
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], int] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._end(list(self._links))

    async def drop(self) -> None:
        """End the links of those who may not pass any more."""
        await self._end(
            [link for link, sender in self._links.items() if not self._may_pass(sender, self.port)]
        )

    @staticmethod
    async def _end(links: Sequence[asyncio.Task[None]]) -> None:
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)

    def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        link = asyncio.get_running_loop().create_task(self._link(reader, client))
        self._links[link] = 0
        link.add_done_callback(self._links.pop)

    async def _link(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            said = _SENDER.search(head)
            self._links[this] = sender = int(said[1]) if said else 0
            if not self._may_pass(sender, self.port):
                return
            back, server = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                server.write(head)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_forward(reader, server))
                    both.create_task(_forward(back, client))
            finally:
                server.transport.abort()
        except* (OSError, EOFError):
            pass  # one of the two ends is gone, and so is the other now
        finally:
            client.transport.abort()


async def _forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()
