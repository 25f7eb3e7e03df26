"""A bad network between an engine and its server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType

_AT_ONCE = struct.pack("ii", 1, 0)


class Proxy:
    """What listens on a port, and passes everything on to another one, for better or worse.

    Attributes:
        accepted: how many connections have been made.
        open: how many there are now.
        refuses: whether new connections are cut at once.
        silent: whether nothing is passed on, in either direction.
    """

    def __init__(self, port: int) -> None:
        self.accepted = 0
        self.refuses = False
        self.silent = False
        self._port = port
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._news = asyncio.Event()

    @property
    def port(self) -> int:
        assert self._listener is not None
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"dflockd://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        return len(self._pairs)

    async def __aenter__(self) -> Proxy:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._listener is not None
        self.refuses = True
        self._listener.close()
        self.cut()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """Break every connection, on both sides."""
        for pair in list(self._pairs):
            for writer in pair:
                _abort(writer)

    def cut_client(self) -> None:
        """Break every connection on the client's side; the server does not hear of it."""
        for client, _ in list(self._pairs):
            _abort(client)

    def cut_server(self) -> None:
        """Break every connection on the server's side; the client does not hear of it."""
        self.silent = True
        for _, server in list(self._pairs):
            _abort(server)

    async def until_open(self, number: int) -> None:
        """Return when there are so many connections."""
        async with asyncio.timeout(30):
            while self.open != number:
                self._news.clear()
                await self._news.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            _abort(writer)
            return
        self.accepted += 1
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair: tuple[asyncio.StreamWriter, ...] = (writer,)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            pair = both = (writer, back)
            self._pairs.add(both)
            self._news.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, back, from_client=True))
                group.create_task(self._copy(there, writer, from_client=False))
        finally:
            for each in pair:
                _abort(each)
            self._pairs = {other for other in self._pairs if other[0] is not writer}
            self._news.set()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, from_client: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if self.silent:
                    continue
                sink.write(data)
                await sink.drain()
            if (from_client or not self.silent) and sink.can_write_eof():
                sink.write_eof()


def _abort(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    writer.transport.abort()
