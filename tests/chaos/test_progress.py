"""What is looked at when all faults have ended: whether everything goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

import tenure
from chaos import runner
from chaos.adapter import Engine, Fault
from chaos.runner import wait_for_progress
from chaos.work import MUTEXES, NODE, SEVERAL


class File(Engine):
    """A file without faults."""

    name = "file"

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/store.db"

    async def start(self) -> None:
        """Create the node."""
        async with tenure.connect(self.url) as client:
            await client.create_node(NODE)

    async def stop(self) -> None:
        """Nothing runs."""

    def faults(self) -> Sequence[Fault]:
        return ()


async def test_nothing_is_stuck_when_all_requests_leave(tmp_path: Path) -> None:
    engine = File(tmp_path)
    await engine.start()
    assert await wait_for_progress(engine) == []
    async with tenure.connect(engine.url) as client, client.session(NODE) as session:
        mutex = session.mutex(MUTEXES[0])
        async with mutex.enqueue() as first:
            looking = asyncio.create_task(wait_for_progress(engine))
            await asyncio.wait([looking], timeout=0.5)
            assert not looking.done()
            async with mutex.enqueue() as second:  # it comes later, and may stay
                await (await first.wait()).release()
                await second.wait()
                async with asyncio.timeout(60):
                    assert await looking == []


async def test_what_waits_for_each_other_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_STUCK", 0.5)
    engine = File(tmp_path)
    await engine.start()
    async with tenure.connect(engine.url) as client, client.session(NODE) as session:
        one, other = (session.mutex(name) for name in SEVERAL[:2])

        async def hold(first: tenure.Mutex, second: tenure.Mutex, both: asyncio.Barrier) -> None:
            async with first.lock():
                await both.wait()
                async with second.lock():
                    raise AssertionError("nobody gets both")

        both = asyncio.Barrier(2)
        tasks = [
            asyncio.create_task(hold(one, other, both)),
            asyncio.create_task(hold(other, one, both)),
        ]
        async with asyncio.timeout(60):
            for each in (one, other):
                while not (await each.describe(waiters=True)).waiters:  # noqa: ASYNC110  no event
                    await asyncio.sleep(0.01)
            stuck = await wait_for_progress(engine)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert [text.partition(" is stuck: ")[0] for text in stuck] == [repr(n) for n in SEVERAL[:2]]
