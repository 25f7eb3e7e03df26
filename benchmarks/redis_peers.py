"""Other locks on the same Redis: two scripts with nothing around them, and those of libraries.

Each takes the port, how many tasks (or threads) there are and whether they want the same key, and
returns what they did for a while.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from typing import Any, cast

import hiredis
import redis
import redis_lock
from pottery import AIORedlock
from redis.asyncio import Redis
from tooz import coordination

from benchmarks.redis_work import Pairs, spent, work

ACQUIRE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return 1
end
return 0
"""
RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class _Connection(asyncio.Protocol):
    """Commands of one turn of the loop in one write; a future for each reply."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=self)
        self._out: list[bytes] = []
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, *words: str | int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked.append(future)
        self._out.append(hiredis.pack_command(words))  # type: ignore[arg-type]  # it takes more
        if len(self._out) == 1:
            self._loop.call_soon(self._flush)
        return future

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not self:
            self._asked.popleft().set_result(reply)


async def bare(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """SET NX and a DEL that compares, on one connection: no queue, token, session or loss."""
    assert not one_key, "it has nobody wait"
    loop = asyncio.get_running_loop()
    transport, connection = await loop.create_connection(_Connection, "127.0.0.1", port)
    try:
        acquire = (await connection.ask("SCRIPT", "LOAD", ACQUIRE)).decode()
        release = (await connection.ask("SCRIPT", "LOAD", RELEASE)).decode()

        async def pair(number: int) -> float:
            key, token = f"bare-{number}", secrets.token_hex(8)
            assert await connection.ask("EVALSHA", acquire, 1, key, token, 30000) == 1
            granted = time.perf_counter()
            assert await connection.ask("EVALSHA", release, 1, key, token) == 1
            return granted

        return await work(port, tasks, pair)
    finally:
        transport.abort()


async def redis_py(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through redis-py's lock."""
    async with Redis(port=port) as client:

        async def pair(number: int) -> float:
            name = "lock:key" if one_key else f"lock:key-{number}"
            async with client.lock(name, timeout=10):
                return time.perf_counter()

        return await work(port, tasks, pair)


async def pottery(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through pottery's lock."""
    async with Redis(port=port) as client:

        async def pair(number: int) -> float:
            name = "key" if one_key else f"key-{number}"
            async with AIORedlock(key=name, masters={client}):
                return time.perf_counter()

        return await work(port, tasks, pair)


async def python_redis_lock(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through python-redis-lock, in threads."""
    client = redis.Redis(port=port)

    def pair(number: int) -> float:
        with redis_lock.Lock(client, "key" if one_key else f"key-{number}", expire=10):
            return time.perf_counter()

    try:
        return await _in_threads(port, tasks, pair)
    finally:
        client.close()


async def tooz(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through tooz, in threads."""
    coordinator = coordination.get_coordinator(f"redis://127.0.0.1:{port}", b"bench")
    coordinator.start(start_heart=True)

    def pair(number: int) -> float:
        with coordinator.get_lock(b"key" if one_key else b"key-%d" % number):
            return time.perf_counter()

    try:
        return await _in_threads(port, tasks, pair)
    finally:
        coordinator.stop()


async def _in_threads(port: int, threads: int, pair: Any, seconds: float = 1.5) -> Pairs:
    pairs = Pairs([0] * threads)
    end = time.perf_counter() + seconds

    def one(number: int) -> None:
        while (asked := time.perf_counter()) < end:
            pairs.waits.append(pair(number) - asked)
            pairs.done[number] += 1

    with spent(port, pairs):
        running = [threading.Thread(target=one, args=[number]) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            await asyncio.to_thread(thread.join)
    return pairs
