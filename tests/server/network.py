"""A bad network between programs and a server of this host: late, cut, silent, or half-open.

It carries bytes in order and changes none of them. It lives in a thread of its own, so that it goes
on whatever the event loop of a test does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.ports import free_port

T = TypeVar("T")


class _Aside:
    """An event loop in a thread, for servers and networks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="aside", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)


_aside: _Aside | None = None


def aside() -> _Aside:
    """The one of this process."""
    global _aside  # noqa: PLW0603  one thread for all tests of the process
    _aside = _aside or _Aside()
    return _aside


class _Way:
    """One direction of all connections."""

    def __init__(self) -> None:
        self.flows = asyncio.Event()
        self.flows.set()
        self.delay = 0.0
        self.loses = False
        self.lost = threading.Event()


class Network:
    """What listens at a port of its own, and carries everything to another one and back.

    Everything may be called from any thread but its own; what is safe to call once is so twice.

    Args:
        target: the server's port, or the path of its socket, asked for each connection.
    """

    def __init__(self, target: Callable[[], int | str]) -> None:
        self.port = free_port()
        self._target = target
        self._listening: asyncio.Server | None = None
        self._there, self._back = aside().run(_ways())
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Take connections."""
        aside().run(self._start())

    def refuse(self) -> None:
        """Take no connections, and reset those that there are."""
        aside().run(self._refuse())

    def stop(self) -> None:
        """The end; all its tasks have ended then."""
        self.refuse()

    def cut(self) -> None:
        """Reset the connections that there are."""
        aside().run(self._cut())

    def stall(self, *, there: bool = True, back: bool = True) -> None:
        """Carry nothing, in one direction or both, and tell nobody; connections stay."""
        aside().run(self._flow(not there, not back))

    def flow(self) -> None:
        """Carry again, what has waited first."""
        aside().run(self._flow(True, True))

    def delay(self, seconds: float) -> None:
        """Carry everything so much later, in each direction."""
        self._there.delay = self._back.delay = seconds

    def lose_answers(self) -> None:
        """What the server says from now on is lost, until the connections are cut."""
        self._back.lost.clear()
        self._back.loses = True

    def lost_an_answer(self, patience: float) -> bool:
        """Wait until one was; blocks the thread."""
        return self._back.lost.wait(patience)

    async def _start(self) -> None:
        if self._listening is None:
            self._listening = await asyncio.start_server(self._take, "127.0.0.1", self.port)

    async def _refuse(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        await self._cut()

    async def _cut(self) -> None:
        self._back.loses = False
        for writer in self._writers:
            writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _flow(self, there: bool, back: bool) -> None:
        for way, flows in ((self._there, there), (self._back, back)):
            if flows:
                way.flows.set()
            else:
                way.flows.clear()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = self._target()
            back, there = await (
                asyncio.open_connection("127.0.0.1", target)
                if isinstance(target, int)
                else asyncio.open_unix_connection(target)
            )
        except OSError:
            writer.transport.abort()
            return
        for way, source, sink in ((self._there, reader, there), (self._back, back, writer)):
            task = asyncio.create_task(self._carry(way, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._writers.add(sink)

    async def _carry(
        self, way: _Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        """Read on while what was read is on its way: a delay does not make it narrow."""
        loop = asyncio.get_running_loop()
        on_its_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await on_its_way.get()
                if (left := due - loop.time()) > 0:
                    await asyncio.sleep(left)
                await way.flows.wait()
                if not data:
                    return
                sink.write(data)
                await sink.drain()

        async def receive() -> None:
            data = b"?"
            while data:
                data = await source.read(65536)
                if way.loses and data:
                    way.lost.set()
                else:
                    on_its_way.put_nowait((loop.time() + way.delay, data))

        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(deliver())
                both.create_task(receive())
        except* OSError:
            pass  # cut off, on either side
        finally:
            sink.close()
            self._writers.discard(sink)


async def _ways() -> tuple[_Way, _Way]:
    return _Way(), _Way()
