"""Deadlocks and the graph of waits on real stores, among clients and among programs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest

import tenure
from tenure.core.deadlocks import WAITS
from tenure.errors import Deadlock, SemaphoreNotFound, Unsupported
from tests.engines.stores import BY_NAME, stores

ENGINES = ("memory", "sqlite", "redis", "postgresql", "etcd", "tenure-sqlite")
PATIENCE = 40
"""Seconds after which a test fails that waits for what never happens."""


@pytest.fixture(
    params=[
        *ENGINES,
        *(
            pytest.param(name, marks=BY_NAME[name].marks)
            for name in ("sqlite-portable", "redis-cluster", "postgresql-pooled")
        ),
    ]
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as found:
        yield found


@asynccontextmanager
async def session_of(url: str, on_deadlock: tenure.OnDeadlock) -> AsyncIterator[tenure.Session]:
    async with tenure.connect(url) as client, client.session(on_deadlock=on_deadlock) as session:
        yield session


class Meeting:
    """A point at which tasks wait until all have reached it."""

    def __init__(self, parties: int) -> None:
        self._left = parties
        self._all = asyncio.Event()

    async def reach(self) -> None:
        self._left -= 1
        if not self._left:
            self._all.set()
        await self._all.wait()


async def take(session: tenure.Session, outer: str, inner: str, met: Meeting) -> str:
    async with session.mutex(outer).lock():
        await met.reach()
        try:
            async with session.mutex(inner).lock():
                return "granted"
        except Deadlock:
            return "deadlock"


async def eventually(so: Callable[[], Awaitable[object]]) -> None:
    while not await so():  # noqa: ASYNC110  the store is polled
        await asyncio.sleep(0.05)


async def published(client: tenure.Client) -> int:
    try:
        return len((await client.describe_semaphore(WAITS)).owners)
    except SemaphoreNotFound:
        return 0


async def test_one_of_two_raises_and_the_other_is_granted(url: str) -> None:
    async with asyncio.timeout(PATIENCE), tenure.connect(url) as eye:
        met = Meeting(2)
        async with session_of(url, "raise") as one, session_of(url, "raise") as two:
            outcomes = await asyncio.gather(take(one, "a", "b", met), take(two, "b", "a", met))
        assert sorted(outcomes) == ["deadlock", "granted"]
        assert await published(eye) == 0


async def test_a_session_that_waits_is_listed_and_shown(url: str) -> None:
    async with asyncio.timeout(PATIENCE), tenure.connect(url) as eye:
        met = Meeting(2)
        async with session_of(url, "wait") as one, session_of(url, "wait") as two:
            tasks = [
                asyncio.create_task(take(one, "a", "b", met)),
                asyncio.create_task(take(two, "b", "a", met)),
            ]

            async def found() -> object:
                return await eye.deadlocks()

            await eventually(found)
            (deadlock,) = await eye.deadlocks()
            assert {each.session_id for each in deadlock} == {one.id, two.id}
            graph = await eye.waits("a")
            assert [each.name for each in graph.semaphores] == ["a", "b"]
            assert {each.id for each in graph.sessions} == {one.id, two.id}
            assert graph.deadlocks == (deadlock,)
            assert [each.session_id for each in graph.holders] == [one.id]
            assert [each.session_id for each in graph.waiters] == [two.id]
            assert WAITS not in {each.name for each in await eye.list_semaphores()}
            tasks[1].cancel()
            assert await tasks[0] == "granted"
        assert await eye.deadlocks() == []
        assert await published(eye) == 0


async def test_two_tasks_of_one_session_are_two(url: str) -> None:
    async with asyncio.timeout(PATIENCE), tenure.connect(url) as eye:
        met = Meeting(3)
        async with session_of(url, "raise") as one, session_of(url, "raise") as two:
            x = await eye.mutex("x").lock()
            tasks = [
                asyncio.create_task(take(one, "a", "x", met)),
                asyncio.create_task(take(two, "b", "a", met)),
                asyncio.create_task(take(one, "c", "b", met)),
            ]

            async def all_published() -> bool:
                return await published(eye) == 3

            await eventually(all_published)
            assert await eye.deadlocks() == []
            await asyncio.sleep(1.5)  # time in which a wrong search would have found one
            await x.release()
            assert await asyncio.gather(*tasks) == ["granted"] * 3


async def test_of_counted_tokens_a_knot_is_one_and_a_cycle_is_none(url: str) -> None:
    async def token_then_a(session: tenure.Session, met: Meeting) -> str:
        async with session.semaphore("pool").acquire():
            await met.reach()
            async with session.mutex("a").lock():
                return "granted"

    async def a_then_token(session: tenure.Session, met: Meeting) -> str:
        async with session.mutex("a").lock():
            await met.reach()
            try:
                async with session.semaphore("pool").acquire():
                    return "granted"
            except Deadlock:
                return "deadlock"

    async with asyncio.timeout(PATIENCE), tenure.connect(url) as eye:
        await eye.semaphore("pool").create(2)
        async with session_of(url, "wait") as one, session_of(url, "raise") as two:
            other = await eye.semaphore("pool").acquire()
            met = Meeting(2)
            cycle = [
                asyncio.create_task(token_then_a(one, met)),
                asyncio.create_task(a_then_token(two, met)),
            ]

            async def both_published() -> bool:
                return await published(eye) == 2

            await eventually(both_published)
            assert await eye.deadlocks() == []
            await other.release()
            outcomes = await asyncio.gather(*cycle)
            assert outcomes == ["granted", "granted"]

            met = Meeting(3)
            knot = (token_then_a(one, met), token_then_a(one, met), a_then_token(two, met))
            assert list(await asyncio.gather(*knot)) == ["granted", "granted", "deadlock"]


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_of_three_programs_in_a_circle_one_raises(engine: str) -> None:
    with stores(engine).empty() as url, ExitStack() as stack:
        programs = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.cli.blocked", url, "raise", pair],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for pair in ("ab", "bc", "ca")
        ]
        for program in programs:
            stack.callback(program.kill)
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline().startswith("inside ")
        said = []
        for program in programs:
            assert program.stdin is not None
            program.stdin.write("go\n")
            program.stdin.flush()
        for program in programs:
            output, _ = program.communicate(timeout=PATIENCE)
            assert program.returncode == 0
            said.append(output)
        assert sum("deadlock: mutex " in each for each in said) == 1
        assert sum("too" in each for each in said) == 2


@pytest.mark.parametrize("engine", ["ydb", "dflockd"])
async def test_stores_that_do_not_show_waits_say_so(engine: str) -> None:
    with stores(engine).empty() as url:
        async with asyncio.timeout(PATIENCE), tenure.connect(url) as client:
            with pytest.raises(Unsupported, match="does not show which task waits for which"):
                await client.session(on_deadlock="raise")
            with pytest.raises(Unsupported):
                await client.deadlocks()
            with pytest.raises(Unsupported):
                await client.waits("a")
            async with client.mutex("a").lock():
                x = await client.mutex("x").lock()
                waiting = asyncio.create_task(client.mutex("x").lock())
                await asyncio.sleep(1.5)
                await x.release()
                await (await waiting).release()
