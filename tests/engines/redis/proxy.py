"""A bad network between an engine and its server."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Proxy:
    """What listens on a socket, and passes everything on to another one, for better or worse.

    Attributes:
        delay: seconds by which each answer comes late.
        swallows: whether answers are lost.
        mute: the number of a connection on which nothing is passed on any more; 1 for the first.
        accepted: how many connections there have been.
        refuses: whether new connections are cut at once.
        passed: how many times something was passed on to the server.
        late: how many answers were made to come late, so far.
        server: the path of the server, for new connections.
        error: what it answers to a script instead of the server, which gets nothing of it.
        refused_script: a part of the commands that it answers so.
        refused: set when it has answered so.
    """

    def __init__(self, server: str, path: str) -> None:
        self.path = path
        self.delay = 0.0
        self.swallows = False
        self.mute = 0
        self.accepted = 0
        self.refuses = False
        self.passed = 0
        self.late = 0
        self.error = b""
        self.refused_script = b"EVALSHA"
        self.refused = asyncio.Event()
        self.server = server
        self._writers: set[asyncio.StreamWriter] = set()
        self._ended: list[asyncio.StreamWriter] = []
        self._answered: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._swallowed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"redis+unix://{self.path}?fresh=true"

    async def __aenter__(self) -> Proxy:
        self._listener = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for writer in self._ended:
            with contextlib.suppress(OSError):  # or it would be told when it is collected
                await writer.wait_closed()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._ended += self._writers
        self._writers.clear()

    async def lose_an_answer(self) -> None:
        """Wait until an answer has been swallowed, and cut then."""
        await self._swallowed.wait()
        self._swallowed.clear()
        self.swallows = False
        self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.transport.abort()
            return
        self.accepted = number = self.accepted + 1
        there, back = await asyncio.open_unix_connection(self.server)
        self._writers |= {writer, back}
        self._answered[number] = writer
        for source, sink, answers in ((reader, back, False), (there, writer, True)):
            task = asyncio.create_task(self._pass_on(number, source, sink, answers=answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self,
        number: int,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        answers: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if number == self.mute:
                    continue
                if self.error and not answers and self.refused_script in data:
                    self._answered[number].write(self.error)
                    self.refused.set()
                    continue
                if answers and self.swallows:
                    self._swallowed.set()
                    continue
                if answers and self.delay:
                    self.late += 1
                    await asyncio.sleep(self.delay)
                self.passed += not answers
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
