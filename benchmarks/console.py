"""The console of a large store: 10,000 semaphores with 100,000 waiters, in memory.

Times of pages, beside that of an empty page of the same server, and the delay of the event loop
while 100 pages are live. The browsers are a process of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from benchmarks.measure import Measured, percentile
from tenure.clock import SystemClock
from tenure.console.app import make_app
from tenure.console.service import Console
from tenure.engines.contract import Attach
from tenure.engines.memory import MemoryEngine
from tenure.model import EPHEMERAL_LIMIT

SEMAPHORES, WAITERS, LONG = 10_000, 100_000, 50_000
"""Semaphores, waiters, and how many of these are in one queue."""

PAGES = {
    "overview": "/",
    "list of semaphores": "/semaphores?after=lock-05000",
    "search": "/semaphores?search=09999",
    "long queue": "/semaphore?name=lock-00000",
    "list of sessions": "/sessions",
}
LOADS = 40
CONSOLES = 100
SECONDS = 10.0

SLOWEST = 100.0  # milliseconds of a page
MOST_LAG = 50.0  # milliseconds of the event loop, 99 %


class _Visitor:
    name = "benchmark"

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine

    def may(self, _node: str, _access: str) -> bool:
        return True


class _OpenDoor:
    """A door that lets everything in."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._visitor = _Visitor(engine)

    def recognise(self, _connection: object) -> _Visitor:
        return self._visitor

    async def sign_in(self, *_: object) -> _Visitor:
        return self._visitor

    def still_valid(self, _visitor: object) -> bool:
        return True

    def action(self, *_: object, **_facts: object) -> Any:
        return contextlib.nullcontext({})


class _Silent:
    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _filled() -> MemoryEngine:
    engine = MemoryEngine("", SystemClock())
    await engine.open()
    sessions = [await engine.attach(Attach("/default", 600.0), _Silent()) for _ in range(100)]
    number = 0

    def enqueue(name: str) -> None:
        nonlocal number
        number += 1
        session = sessions[number % len(sessions)]
        session.enqueue(number, name, EPHEMERAL_LIMIT, b"data", timeout=None, ephemeral=True)

    for each in range(SEMAPHORES):
        enqueue(f"lock-{each:05}")
    for _ in range(LONG):
        enqueue("lock-00000")
    for each in range(WAITERS - LONG):
        enqueue(f"lock-{each % SEMAPHORES:05}")
    return engine


@contextlib.asynccontextmanager
async def _serving(engine: MemoryEngine) -> AsyncIterator[tuple[int, Console]]:
    """Serve the console, and an empty page; the port and the console."""
    app = make_app(_OpenDoor(engine), engine)
    console: Console = app.state.console

    async def empty(_request: object) -> PlainTextResponse:
        return PlainTextResponse("")

    whole = Starlette(routes=[Route("/empty", empty), Mount("/", app)])
    config = uvicorn.Config(whole, log_config=None, access_log=False, lifespan="off")
    server = _Server(config)
    # asyncio turns Nagle's algorithm off for sockets that name their protocol.
    with socket.socket(proto=socket.IPPROTO_TCP) as sock:
        sock.bind(("127.0.0.1", 0))
        async with console.running():
            serving = asyncio.create_task(server.serve([sock]))
            while not server.started:  # noqa: ASYNC110  it has no event
                await asyncio.sleep(0.01)
            try:
                yield sock.getsockname()[1], console
            finally:
                console.end_streams()
                server.should_exit = True
                await serving


def _loads(port: int, path: str) -> list[float]:
    """Milliseconds of each load of a page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = []
    for _ in range(LOADS):
        start = time.perf_counter()
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, (path, response.status)
        times.append((time.perf_counter() - start) * 1000)
    connection.close()
    return times


async def _lag(seconds: float) -> list[float]:
    """Milliseconds by which the event loop is late."""
    delays = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        await asyncio.sleep(0.005)
        delays.append((time.perf_counter() - start - 0.005) * 1000)
    return delays


async def _measure() -> list[Measured]:
    engine = await _filled()
    rows = []
    async with _serving(engine) as (port, console):
        async with asyncio.timeout(120):
            while console.observer.record.rounds < 2:
                console.observer.want()
                await asyncio.sleep(0.1)
        floor = percentile(await asyncio.to_thread(_loads, port, "/empty"), 0.5)
        for name, path in PAGES.items():
            times = await asyncio.to_thread(_loads, port, path)
            middle = percentile(times, 0.5)
            rows.append(
                Measured(
                    f"console: {name}, of 10,000 semaphores with 100,000 waiters",
                    middle,
                    "ms",
                    "100 ms",
                    SLOWEST,
                    middle / SLOWEST,
                    at_most=1.0,
                    notes={"95 %": percentile(times, 0.95), "empty page, ms": floor},
                )
            )
        quiet = await _lag(SECONDS / 2)
        arguments = "-m", "benchmarks.console", str(port)
        browsers = await asyncio.create_subprocess_exec(sys.executable, *arguments)
        try:
            async with asyncio.timeout(60):
                while console.hub.streams < CONSOLES:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            used = time.process_time()
            busy = await _lag(SECONDS)
            used = time.process_time() - used
        finally:
            browsers.terminate()
            await browsers.wait()
        late = percentile(busy, 0.99)
        rows.append(
            Measured(
                "console: delay of the loop with 100 live pages, 99 %",
                late,
                "ms",
                "50 ms",
                MOST_LAG,
                late / MOST_LAG,
                at_most=1.0,
                notes={
                    "longest": max(busy),
                    "99 % without live pages": percentile(quiet, 0.99),
                    "share of a core": used / SECONDS,
                },
            )
        )
    await engine.aclose()
    return rows


def measure() -> list[Measured]:
    return asyncio.run(_measure())


def _look(port: int, path: str) -> None:
    """Keep a live page open."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        while sock.recv(65536):
            pass


if __name__ == "__main__":
    where = ["/live", "/live/semaphores", "/live/semaphore?name=lock-00000", "/live/timelines"]
    for at in range(CONSOLES):
        target = where[at % len(where)]
        threading.Thread(target=_look, args=(int(sys.argv[1]), target), daemon=True).start()
    threading.Event().wait()
