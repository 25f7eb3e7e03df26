"""`tenure.blocking` beside the locks of synchronous libraries, and beside its asynchronous API.

Each thread takes and releases a lock of its own, in one process: redis-py's ``Lock``, filelock, and
PostgreSQL's advisory locks, with a connection for each thread. One thread shows the time of a pair,
which is a median, and many show their pairs a second. The kernel places the threads and the server
on the cores.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

import tenure
from benchmarks.measure import Measured, in_turn
from tenure import blocking

SECONDS = 1.0
THREADS = 16

Block = Callable[[], AbstractContextManager[object]]
"""Makes the block of one pair: entering it takes the lock, and leaving it releases the lock."""

Locks = Callable[[ExitStack, int], Block]
"""Prepares the lock of a thread, in that thread."""


@dataclass(frozen=True)
class ThreadPairs:
    """Pairs of some threads.

    Attributes:
        rate: pairs a second of all of them.
        median: time of a pair in microseconds.
    """

    rate: float
    median: float


def _pairs(locks: Locks, threads: int) -> ThreadPairs:
    times: list[list[float]] = [[] for _ in range(threads)]
    begin = threading.Barrier(threads)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        now = time.perf_counter
        try:
            with ExitStack() as stack:
                block = locks(stack, number)
                for _ in range(10):  # connects, and warms up
                    with block():
                        pass
                begin.wait(60)
                end = now() + SECONDS
                while (start := now()) < end:
                    with block():
                        pass
                    times[number].append(now() - start)
        except BaseException as error:
            errors.append(error)  # first: the other threads raise that the barrier is broken
            begin.abort()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    rate = sum(len(each) / sum(each) for each in times)
    return ThreadPairs(rate, statistics.median(chain.from_iterable(times)) * 1e6)


def _ours(url: str, threads: int) -> ThreadPairs:
    with blocking.connect(url) as client, client.session() as session:

        def locks(_: ExitStack, number: int) -> Block:
            return session.mutex(f"key-{number}").lock

        return _pairs(locks, threads)


def _beside(
    engine: str, url: str, peer: str, locks: Locks, at_most: float, *, rounds: int = 5
) -> Iterator[Measured]:
    """One thread, and many on locks of their own: ours, and those of a peer."""
    ours, theirs, ratio = in_turn(
        lambda: _ours(url, 1).median, lambda: _pairs(locks, 1).median, rounds
    )
    what = f"{engine}, tenure.blocking, 1 thread"
    yield Measured(what, ours, "us/pair", peer, theirs, ratio, at_most=at_most)
    ours, theirs, ratio = in_turn(
        lambda: _ours(url, THREADS).rate, lambda: _pairs(locks, THREADS).rate, rounds
    )
    what = f"{engine}, tenure.blocking, {THREADS} threads on distinct keys"
    yield Measured(what, ours, "pairs/s", peer, theirs, ratio)


def measure_redis() -> Iterator[Measured]:
    """Beside redis-py's ``Lock``, on one Redis without persistence."""
    from redis import Redis

    from benchmarks.redis_work import a_server

    with a_server() as port, Redis(port=port) as server:

        def locks(_: ExitStack, number: int) -> Block:
            return lambda: server.lock(f"peer-{number}", timeout=30)

        url = f"redis://127.0.0.1:{port}?fresh=true"
        yield from _beside("redis", url, "redis-py's Lock", locks, 1.2)


def measure_postgresql() -> Iterator[Measured]:
    """Beside advisory locks, on one server with its commits on disk."""
    import psycopg

    from tests.engines.postgresql.servers import a_server

    with a_server() as server:

        def locks(stack: ExitStack, number: int) -> Block:
            connection = stack.enter_context(psycopg.connect(server.url, autocommit=True))
            connection.prepare_threshold = 0

            @contextmanager
            def block() -> Iterator[None]:
                connection.execute("SELECT pg_advisory_lock(%s)", (number,))
                try:
                    yield
                finally:
                    connection.execute("SELECT pg_advisory_unlock(%s)", (number,))

            return block

        yield from _beside("postgresql", server.url, "pg_advisory_lock", locks, 2.5)


async def _asynchronous(url: str) -> float:
    """Return the median time of a pair of one task, in microseconds."""
    times, now = [], time.perf_counter
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("key")
        end = now() + SECONDS
        while (start := now()) < end:
            async with mutex.lock():
                pass
            times.append(now() - start)
        return statistics.median(times) * 1e6


def measure_sqlite() -> Iterator[Measured]:
    """Beside filelock, and beside one task of the asynchronous API, on one file."""
    import filelock

    with tempfile.TemporaryDirectory() as folder:

        def locks(_: ExitStack, number: int) -> Block:
            lock = filelock.FileLock(f"{folder}/{number}.lock")
            return lock.acquire

        url = f"sqlite:///{folder}/bench.db"
        yield from _beside("sqlite", url, "filelock", locks, 1.5)
        ours, task, ratio = in_turn(
            lambda: _ours(url, 1).median, lambda: asyncio.run(_asynchronous(url))
        )
        yield Measured(
            "sqlite, tenure.blocking, 1 thread",
            ours,
            "us/pair",
            "tenure, one task",
            task,
            ratio,
            at_most=2.0,
        )
