"""Time until the next holder, after the death of a program.

``python -m benchmarks.deaths [--deaths N] [ENGINE ...]`` prints a row for each engine and kind of
death: N programs, one after the other, each take a lock for which this one waits, and die. The time
is from the death to the grant. The programs are forked from a process that has imported tenure,
since an interpreter's start takes longer than all the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from statistics import quantiles

import tenure
from tenure.reaper import program as reaper
from tests.engines.stores import stores

ENGINES = ("redis", "tenure", "etcd", "postgresql", "ydb")

LONGEST = 20.0
"""Seconds that one death may take; the recovery window is longer."""

KINDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(3),
    "abort": os.abort,
    "term": lambda: signal.raise_signal(signal.SIGTERM),
    "kill": lambda: signal.raise_signal(signal.SIGKILL),
}


def hold(url: str, kind: str, connection: Connection) -> None:
    """Hold the lock, and die at a word."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    async def main() -> None:
        async with tenure.connect(url) as client, client.mutex("a"):
            await asyncio.to_thread(reaper.settled)
            connection.send("holds")
            connection.recv()
            KINDS[kind]()

    asyncio.run(main())


async def passed_on(client: tenure.Client, url: str, kind: str) -> float:
    """Return the seconds from the death of a holder to the grant."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(url, kind, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()
        async with client.mutex("a").enqueue() as ticket:
            began = time.perf_counter()
            ours.send("die")
            await ticket.wait(timeout=LONGEST)
            return time.perf_counter() - began
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        ours.close()


async def measure(engine: str, deaths: int) -> AsyncIterator[str]:
    """Yield a row for each kind of death."""
    with stores(engine).empty() as url:
        async with tenure.connect(url) as client:
            for kind in KINDS:
                took = [1e3 * await passed_on(client, url, kind) for _ in range(deaths)]
                cuts = quantiles(took, n=100, method="inclusive")
                yield (
                    f"{engine:<12} {kind:<6} {deaths:>6} {cuts[49]:>8.1f} {cuts[98]:>8.1f} "
                    f"{max(took):>8.1f}"
                )


async def print_rows(engine: str, deaths: int) -> None:
    """Print the rows of an engine."""
    async for row in measure(engine, deaths):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time until the next holder, after a death.")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--deaths", type=int, default=100, help="of each kind (default 100)")
    given = parser.parse_args()
    if unknown := set(given.engines) - set(ENGINES):
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.engines.stores"])
    sys.stdout.write("engine       death  deaths   p50 ms   p99 ms   max ms\n")
    for engine in given.engines or ENGINES:
        asyncio.run(print_rows(engine, given.deaths))


if __name__ == "__main__":
    main()
