"""Rates beside those of PyrateLimiter and limits: takes a second, and how exactly the limit holds.

PyrateLimiter has its sliding window, which keeps every call, and a token bucket; limits has its
moving window, and does not wait. The times for the accuracy are those at which a caller may begin.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pyrate_limiter as pyrate
from limits import RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from redis.asyncio import Redis

import tenure
from benchmarks.measure import Measured, in_turn
from benchmarks.servers import CLIENT, on_core, redis_server
from tenure.testing.rates import most_in_window

SECONDS = 1.5
ENOUGH = 1_000_000
"""A limit for a second that no limiter reaches."""

LIMIT, PER, LATE = 100, 1.0, 0.05
"""The limit of the measurement of accuracy, its period, and how late a task may see its grant."""

Take = Callable[[], Awaitable[object]]
"""Takes a token, after a wait if needed."""

Limiter = Callable[[str, int, float], AbstractAsyncContextManager[Take]]
"""Makes a limiter, given the path of a socket or "", the limit and the period in seconds."""

_numbers = itertools.count(1)


@asynccontextmanager
async def ours(socket: str, limit: int, per: float) -> AsyncIterator[Take]:
    """Use a rate of tenure."""
    url = f"redis+unix://{socket}?fresh=true" if socket else "memory://"
    async with tenure.connect(url) as client:
        rate = client.rate(f"rate-{next(_numbers)}", limit=limit, per=per)
        yield rate.take


def _of_pyrate(algorithm: pyrate.Algorithm | None) -> Limiter:
    @asynccontextmanager
    async def limiter(socket: str, limit: int, per: float) -> AsyncIterator[Take]:
        rates, key = [pyrate.Rate(limit, round(per * 1000))], f"pyrate-{next(_numbers)}"
        bucket: Any
        if algorithm is not None:
            bucket = pyrate.StateBucket(rates, algorithm, pyrate.InMemoryStateStore())
            yield _take_of(pyrate.Limiter(bucket))
            return
        if not socket:
            yield _take_of(pyrate.Limiter(pyrate.InMemoryBucket(rates)))
            return
        async with Redis(unix_socket_path=socket) as client:
            bucket = await pyrate.RedisBucket.init(rates, client, key)
            yield _take_of(pyrate.Limiter(bucket))

    return limiter


def _take_of(limiter: pyrate.Limiter) -> Take:
    async def take() -> None:
        assert await limiter.try_acquire_async("rate")

    return take


@asynccontextmanager
async def moving_window(socket: str, limit: int, per: float) -> AsyncIterator[Take]:
    """Use the moving window of limits, and wait until its oldest call has left it."""
    item = RateLimitItemPerSecond(limit, max(1, round(per)), namespace=f"n{next(_numbers)}")
    storage: Any = MemoryStorage()
    if socket:
        storage = RedisStorage(f"async+redis+unix://{socket}", implementation="redispy")
    limiter = MovingWindowRateLimiter(storage)

    async def take() -> None:
        while not await limiter.hit(item, "rate"):
            stats = await limiter.get_window_stats(item, "rate")
            await asyncio.sleep(max(stats.reset_time - time.time(), 0.001))

    yield take


PYRATE, BUCKET = _of_pyrate(None), _of_pyrate(pyrate.TokenBucket())
PEERS = (("PyrateLimiter's sliding window", PYRATE), ("limits' moving window", moving_window))


async def _takes(limiter: Limiter, socket: str, tasks: int) -> float:
    """Measure takes a second that find their tokens free."""
    async with limiter(socket, ENOUGH, 1.0) as take:
        done = 0
        began = time.perf_counter()

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < began + SECONDS:
                await take()
                done += 1

        await asyncio.gather(*(work() for _ in range(tasks)))
        return done / (time.perf_counter() - began)


async def _accuracy(limiter: Limiter, limit: int, per: float) -> tuple[float, float]:
    """Measure how much of the limit eight tasks get, and the most in a period, by the limit.

    A pause of a period precedes, after which a bucket is full. A grant is seen up to `LATE` seconds
    after its time.
    """
    times: list[int] = []
    async with limiter("", limit, per) as take:
        await take()
        await asyncio.sleep(per)
        until = time.perf_counter() + 6 * per

        async def work() -> None:
            while time.perf_counter() < until:
                await take()
                times.append(round(time.perf_counter() * 1e6))

        await asyncio.gather(*(work() for _ in range(8)))
    # What is granted between the first and the last of the periods' ends.
    inside = sum(1 for each in times if each < times[0] + round(5 * per * 1e6))
    most = most_in_window([(each, 1) for each in times], round((per - LATE) * 1e6))
    return inside / (5 * limit), most / limit


def measure() -> list[Measured]:
    """Measure takes a second, in memory and on Redis, and the accuracy."""
    with on_core(CLIENT):
        rows = [_speed("", 1, "in memory", *each) for each in PEERS]
        with redis_server() as socket:
            for tasks in (1, 64):
                rows += [_speed(socket, tasks, "on Redis", *each) for each in PEERS]
        for peer, limiter in (*PEERS, ("PyrateLimiter's token bucket", BUCKET)):
            share, most = asyncio.run(_accuracy(ours, LIMIT, PER))
            peer_share, peer_most = asyncio.run(_accuracy(limiter, LIMIT, PER))
            rows += [
                Measured(
                    "rates: share of the limit that 8 waiting tasks get",
                    *(share, "of the limit", peer, peer_share, share / peer_share),
                    at_least=0.95 if limiter is not BUCKET else None,
                ),
                Measured(
                    "rates: most in any period",
                    *(most, "of the limit", peer, peer_most, most / peer_most),
                    at_most=1.01,
                ),
            ]
    return rows


def _speed(socket: str, tasks: int, where: str, peer: str, limiter: Limiter) -> Measured:
    def of(limiter: Limiter) -> Callable[[], float]:
        return lambda: asyncio.run(_takes(limiter, socket, tasks))

    found = in_turn(of(ours), of(limiter), 3)
    return Measured(
        f"rates: takes {where}, {tasks} task{'s' if tasks > 1 else ''}",
        *(found[0], "takes/s", peer, found[1], found[2]),
    )
