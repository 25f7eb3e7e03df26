"""`tenure.blocking` beside the locks of synchronous libraries, and beside its asynchronous API.

Each thread takes and releases a lock of its own, in one process: redis-py's ``Lock``, filelock, and
PostgreSQL's advisory locks, with a connection for each thread. The figures are the time of a pair
for its thread.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import tenure
from benchmarks.measure import Measured, in_turn
from tenure import blocking

SECONDS = 1.0
THREADS = 16

Block = Callable[[], AbstractContextManager[object]]
"""Makes the block of one pair: entering it takes the lock, and leaving it releases the lock."""

Locks = Callable[[ExitStack, int], Block]
"""Prepares the lock of a thread, in that thread."""


def _microseconds(locks: Locks, threads: int) -> float:
    """Return the time of a pair, for each of some threads."""
    done = [0] * threads
    begin = threading.Barrier(threads + 1)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with ExitStack() as stack:
                block = locks(stack, number)
                with block():  # connects
                    pass
                begin.wait(60)
                while not stop.is_set():
                    with block():
                        done[number] += 1
        except BaseException as error:
            begin.abort()
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        begin.wait(60)
        start = time.perf_counter()
        time.sleep(SECONDS)
        spent = time.perf_counter() - start
        pairs = sum(done)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return spent * threads / pairs * 1e6


def _ours(url: str, threads: int) -> float:
    with blocking.connect(url) as client, client.session() as session:

        def locks(_: ExitStack, number: int) -> Block:
            return session.mutex(f"key-{number}").lock

        return _microseconds(locks, threads)


def _beside(
    engine: str, url: str, peer: str, locks: Locks, at_most: float, *, rounds: int = 5
) -> Iterator[Measured]:
    """One thread, and many on locks of their own: ours, and those of a peer."""
    for threads, bound in ((1, at_most), (THREADS, None)):
        ours, theirs, ratio = in_turn(
            lambda threads=threads: _ours(url, threads),  # type: ignore[misc]
            lambda threads=threads: _microseconds(locks, threads),  # type: ignore[misc]
            rounds,
        )
        yield Measured(
            f"{engine}, tenure.blocking, {threads} thread{'s' if threads > 1 else ''}",
            ours,
            "us/pair",
            peer,
            theirs,
            ratio,
            at_most=bound,
        )


def measure_redis() -> Iterator[Measured]:
    """Beside redis-py's ``Lock``, on one Redis without persistence."""
    from redis import Redis

    from benchmarks.redis_pairs import a_server

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
    """Return the time of a pair of one task."""
    done = 0
    async with tenure.connect(url) as client, client.session() as session:
        mutex = session.mutex("key")
        start = time.perf_counter()
        while time.perf_counter() < start + SECONDS:
            async with mutex.lock():
                done += 1
        return (time.perf_counter() - start) / done * 1e6


def measure_sqlite() -> Iterator[Measured]:
    """Beside filelock, and beside one task of the asynchronous API, on one file."""
    import filelock

    with tempfile.TemporaryDirectory() as folder:

        def locks(_: ExitStack, number: int) -> Block:
            lock = filelock.FileLock(f"{folder}/{number}.lock")
            return lock.acquire

        url = f"sqlite:///{folder}/bench.db"
        yield from _beside("sqlite", url, "filelock", locks, 1.5)
        ours, task, ratio = in_turn(lambda: _ours(url, 1), lambda: asyncio.run(_asynchronous(url)))
        yield Measured(
            "sqlite, tenure.blocking, 1 thread",
            ours,
            "us/pair",
            "tenure, one task",
            task,
            ratio,
            at_most=2.0,
        )
