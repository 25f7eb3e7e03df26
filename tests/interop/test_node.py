"""Programs in Node.js and in Python on the same keys.

What they run beside is npm's ``effect-distributed-lock`` with ``ioredis``, which ``make test`` puts
into ``.venv/node`` where there is an npm.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeAlias

import pytest
import redis.asyncio

from tenure.interop.effect import DistributedSemaphore, RedisBacking, spaced
from tenure.interop.exclusive_lock import ExclusiveLock
from tests.interop.conftest import Connecting
from tests.test_documents import ROOT

MODULES = ROOT / ".venv" / "node" / "node_modules"
HOLDER = Path(__file__).parent / "node" / "holder.mjs"
SELDOM = 3600_000
"""Milliseconds, so that nothing but a push ends a wait."""


class Node:
    """A program in Node.js."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, script: Path, socket: str) -> Self:
        return cls(
            await asyncio.create_subprocess_exec(
                *("node", str(script), socket),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    def send(self, command: str, **how: Any) -> asyncio.Future[Any]:
        """Have it do something; what comes of it is the result."""
        number = next(self._numbers)
        line = json.dumps({"number": number, "command": command, **how})
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        return answer

    async def do(self, command: str, **how: Any) -> Any:
        return await asyncio.wait_for(self.send(command, **how), 30)

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            answer = self._answers.pop(said["number"])
            if answer.done():
                continue
            if "error" in said:
                answer.set_exception(AssertionError(said["error"]))
            else:
                answer.set_result(said.get("result"))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(AssertionError("the program in Node.js has ended"))

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._listening
        assert self._process.stdin is not None
        self._process.stdin.close()


Nodes: TypeAlias = Callable[[], AbstractAsyncContextManager[Node]]


@pytest.fixture
def nodes(redis_url: str, tmp_path: Path) -> Nodes:
    """``async with nodes() as node``: a program in Node.js on the same Redis."""
    if shutil.which("node") is None:
        pytest.skip("no Node.js here: apt-get install nodejs npm")
    if not (MODULES / "effect-distributed-lock").is_dir():
        pytest.skip(f"no effect-distributed-lock in {MODULES}: 'make test' installs it with npm")
    script = tmp_path / HOLDER.name
    shutil.copy(HOLDER, script)
    (tmp_path / "node_modules").symlink_to(MODULES)  # it is looked for beside the script

    @asynccontextmanager
    async def start() -> AsyncIterator[Node]:
        node = await Node.start(script, redis_url.removeprefix("unix://"))
        try:
            yield node
        finally:
            await node.end()

    return start


async def inside(client: redis.asyncio.Redis, counter: str) -> int:
    """How many hold something now, this one included."""
    others = await client.incr(counter)
    await asyncio.sleep(0)
    await client.decr(counter)
    return int(others)


async def test_permits_taken_there_are_not_free_here_and_the_other_way_round(
    nodes: Nodes, connected: Connecting
) -> None:
    async with nodes() as node, connected() as client:
        semaphore = DistributedSemaphore("pool", RedisBacking(client), limit=3)
        await node.do("take", name="a", key="pool", limit=3, permits=2)
        assert await semaphore.current_count() == 2
        async with semaphore.try_take(2) as taken:
            assert taken is None
        async with semaphore.take(1):
            assert await node.do("count", key="pool", limit=3) == 3
            waiting = node.send("take", name="b", key="pool", limit=3, permits=1)
            await node.do("count", key="pool", limit=3)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 30)
        await node.do("give", name="a")
        await node.do("give", name="b")
        assert await semaphore.current_count() == 0


async def test_each_is_woken_by_the_others_release(nodes: Nodes, connected: Connecting) -> None:
    async with nodes() as node, connected() as client:
        semaphore = DistributedSemaphore(
            "pool", RedisBacking(client), acquire_retry_policy=spaced(SELDOM / 1000)
        )
        channel = "semaphore:pool:released"

        async def until_somebody_listens() -> None:
            while True:  # nobody is told of it
                if (await client.pubsub_numsub(channel))[0][1] > 0:
                    return
                await asyncio.sleep(0.005)

        await node.do("take", name="a", key="pool", limit=1, permits=1)
        waiting = asyncio.create_task(semaphore.with_permits(1, nothing))
        await until_somebody_listens()
        await node.do("give", name="a")
        await asyncio.wait_for(waiting, 30)
        async with semaphore.take(1):
            taking = node.send("take", name="b", key="pool", limit=1, permits=1, poll=SELDOM)
            await until_somebody_listens()
        await asyncio.wait_for(taking, 30)
        await node.do("give", name="b")


async def test_permits_are_handed_over_in_both_directions(
    nodes: Nodes, connected: Connecting
) -> None:
    async with nodes() as node, connected() as client:
        semaphore, backing = (
            DistributedSemaphore("pool", RedisBacking(client)),
            RedisBacking(client),
        )
        await node.do("take", name="a", key="pool", limit=1, permits=1, identifier="from there")
        async with semaphore.take(1, identifier="from there", acquired_externally=True):
            assert await semaphore.current_count() == 1
        assert await semaphore.current_count() == 0
        assert await backing.try_acquire("pool", "from here", 30.0, 1, 1)
        handed = {"identifier": "from here", "acquiredExternally": True}
        await node.do("take", name="b", key="pool", limit=1, permits=1, **handed)
        assert await semaphore.current_count() == 1
        await node.do("give", name="b")
        assert await semaphore.current_count() == 0


async def test_the_limit_is_never_exceeded_by_both_together(
    nodes: Nodes, connected: Connecting
) -> None:
    async with nodes() as one, nodes() as two, connected() as client:
        semaphore = DistributedSemaphore(
            "pool", RedisBacking(client), limit=2, acquire_retry_policy=spaced(0.01)
        )
        how = {"key": "pool", "limit": 2, "poll": 10, "counter": "inside", "rounds": 25}
        there = [node.send("contend", **how) for node in (one, two)]
        most = 0
        for _ in range(25):
            most = max(most, await semaphore.with_permits(1, lambda: inside(client, "inside")))
        counts = [most, *await asyncio.wait_for(asyncio.gather(*there), 60)]
        assert max(counts) <= 2
        assert await semaphore.current_count() == 0


async def test_an_exclusive_lock_is_never_in_two_hands(nodes: Nodes, connected: Connecting) -> None:
    async with nodes() as node, connected() as client:
        lock = ExclusiveLock("nightly", client)
        there = node.send("exclusive", key=lock.key, counter="inside", rounds=40)
        most = rounds = 0
        while rounds < 40:
            if await lock.acquire():
                most = max(most, await inside(client, "inside"))
                await lock.release()
                rounds += 1
            await asyncio.sleep(0.002)  # as the original's users do
        assert (most, await asyncio.wait_for(there, 60)) == (1, 1)


async def nothing() -> None:
    """Work that is done at once."""
