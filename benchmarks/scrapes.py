"""Metrics of `tenure serve`: what counting costs an operation, and what scrapes cost the others.

* Counting: pairs of lock and release at a session of the server, in this process and in memory,
  with and without the counts. The difference is compared with a pair over the native protocol,
  which is the operation that clients see.
* Scrapes: the longest lag of the server's event loop during 10,000 scrapes over several
  connections, against the 100 ms for which no client may block it; and the pairs of a client
  beside them, against those without.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from unittest.mock import patch

import uvloop

import tenure
from benchmarks.measure import Measured, in_turn, percentile
from benchmarks.servers import CLIENT, on_core, running
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach
from tenure.server.auth import ANONYMOUS, guarded
from tenure.server.auth.guard import Guard
from tenure.server.dflockd.listener import Deaf
from tenure.server.limits import Limits
from tenure.server.meter import RequestTimes

SECONDS = 1.0
SCRAPES = 10_000
CONNECTIONS = 4
ALL = 2**64 - 1


class _Uncounted(RequestTimes):
    """Counts nothing."""

    __slots__ = ()

    def granted_at_once(self, request_id: int) -> None:
        pass

    def left(self, request_id: int) -> None:
        pass


async def _pairs_in_process() -> float:
    """Pairs a second at a session behind the guard."""
    engine = connect_engine("memory://", SystemClock())
    await engine.open()
    guard = Guard(engine, Limits())
    session = await guarded.GuardedEngine(guard, ANONYMOUS).attach(Attach("/default", 30.0), Deaf())
    pairs = 0
    began = time.perf_counter()
    while time.perf_counter() < began + SECONDS:
        for _ in range(100):
            pairs += 1
            session.enqueue(pairs, "m", ALL, b"", timeout=None, ephemeral=True)
            session.withdraw(pairs)
        await asyncio.sleep(0)
    rate = pairs / (time.perf_counter() - began)
    await session.close()
    await guard.aclose()
    await engine.aclose()
    return rate


def _uncounted() -> float:
    with patch.object(guarded, "RequestTimes", _Uncounted):
        return uvloop.run(_pairs_in_process())


async def _pairs(url: str, seconds: float) -> float:
    """Pairs a second of one task."""
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("m")
        pairs = 0
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            async with mutex.lock():
                pairs += 1
        return pairs / (time.perf_counter() - began)


@contextmanager
def _server() -> Iterator[tuple[str, int]]:
    """Run `tenure serve` with two listeners; yield the URL for clients and the port of HTTP."""
    command = [sys.executable, "-m", "tenure", "serve", "--store", "memory://"]
    command += ["--listen", "tenure://127.0.0.1:0", "--listen", "http://127.0.0.1:0"]
    with running(command, "ready") as (_, line):
        native, http = re.findall(r"(?:tenure|http)://127\.0\.0\.1:\d+", line)
        yield native, int(http.rpartition(":")[2])


def _lag(text: bytes) -> float:
    found = re.search(rb"^tenure_loop_lag_max_seconds (\S+)", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


class _Scraper(threading.Thread):
    """Scrapes over one connection, until it is told to stop.

    Attributes:
        lags: the longest lag of the loop, as each scrape reports it.
        times: seconds of each scrape.
    """

    def __init__(self, port: int, most: int) -> None:
        super().__init__(daemon=True)
        self.lags: list[float] = []
        self.times: list[float] = []
        self.stopped = threading.Event()
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self._most = most

    def run(self) -> None:
        with contextlib.closing(self._connection):
            while len(self.times) < self._most and not self.stopped.is_set():
                began = time.perf_counter()
                self._connection.request("GET", "/metrics")
                text = self._connection.getresponse().read()
                self.times.append(time.perf_counter() - began)
                self.lags.append(_lag(text))


@contextmanager
def _scraping(port: int, most: int) -> Iterator[list[_Scraper]]:
    scrapers = [_Scraper(port, most) for _ in range(CONNECTIONS)]
    for each in scrapers:
        each.start()
    try:
        yield scrapers
    finally:
        for each in scrapers:
            each.stopped.set()
            each.join()


def _counting() -> Measured:
    counted, uncounted, _ = in_turn(lambda: uvloop.run(_pairs_in_process()), _uncounted)
    with _server() as (url, _), on_core(CLIENT):
        pair = 1 / uvloop.run(_pairs(url, SECONDS))
    cost = 1 / counted - 1 / uncounted
    return Measured(
        "counting of a pair for the metrics",
        1e6 * cost,
        "us",
        "a pair over tenure://, in us",
        1e6 * pair,
        cost / pair,
        at_most=0.03,
        notes={"pairs/s counted": counted, "pairs/s uncounted": uncounted},
    )


def _scrapes() -> Iterator[Measured]:
    with _server() as (url, port), on_core(CLIENT):
        alone = uvloop.run(_pairs(url, SECONDS))
        began = time.perf_counter()
        with _scraping(port, SCRAPES // CONNECTIONS) as scrapers:
            for each in scrapers:
                each.join()
        took = time.perf_counter() - began
        lags = sorted(lag for each in scrapers for lag in each.lags)
        times = [seconds for each in scrapers for seconds in each.times]
        yield Measured(
            f"longest lag of the loop under {SCRAPES:,} scrapes",
            1000 * lags[-1],
            "ms",
            "limit",
            100.0,
            10 * lags[-1],
            at_most=1,
            notes={
                "scrapes/s": SCRAPES / took,
                "p99 of a scrape, ms": 1000 * percentile(times, 0.99),
            },
        )
        with _scraping(port, sys.maxsize):
            beside = uvloop.run(_pairs(url, SECONDS))
        yield Measured(
            f"pairs of a client beside {CONNECTIONS} connections that scrape without end",
            beside,
            "pairs/s",
            "without them",
            alone,
            beside / alone,
        )


def measure() -> Iterator[Measured]:
    """Measure what counting and scrapes cost."""
    yield _counting()
    yield from _scrapes()


if __name__ == "__main__":
    for measured in measure():
        print(measured)
