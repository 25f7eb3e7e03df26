"""The numbers are those of what the program did, on each engine, to the last one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import tenure
from tenure import blocking
from tenure.errors import AcquireTimeout, LeaseLost
from tenure.telemetry import table
from tests.engines.outages import NETWORKED, Afar
from tests.engines.stores import BY_NAME, at_once
from tests.telemetry.helpers import Backend

ENGINES = [
    pytest.param(name, marks=BY_NAME[name].marks)
    for name in at_once()
    if name in {"memory", "sqlite", "redis", "postgresql", "etcd", "tenure-sqlite"}
]


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with at_once()[request.param].empty() as url:
        yield url


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds, which soon does."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  a metric notifies no waiter
            await asyncio.sleep(0.01)


async def test_two_hundred_waits_are_counted_by_their_ends(url: str, backend: Backend) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        backend.instrument(client)
        held = await other.mutex("m").lock()
        mutex = client.mutex("m")

        # 30 that time out, 30 that try, and 30 that are cancelled once all of them wait
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(_times_out(mutex.lock(timeout=0.1)))
        assert [await mutex.try_lock() for _ in range(30)] == [None] * 30
        waiting = [asyncio.create_task(mutex.lock()) for _ in range(30)]
        await until(lambda: backend.value(table.WAITERS, kind="mutex") == 30)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert backend.value(table.WAITERS) == 0

        # 95 that are granted, one after the other
        await held.release()

        async def work() -> None:
            for _ in range(19):
                async with mutex.lock():
                    assert backend.value(table.LEASES) == 1

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(work())

        # 10 that are evicted, and 5 whose session an administrator ends
        for number in range(10):
            lease = await client.mutex(f"evicted-{number}").lock()
            assert await other.evict("/default", lease.name, lease.fencing_token)
            assert isinstance(await lease.wait_lost(), LeaseLost)
        leases = [await client.mutex(f"expired-{number}").lock() for number in range(5)]
        assert backend.value(table.LEASES) == 5
        assert await other.end_session("/default", leases[0].session.id)
        for lease in leases:
            assert isinstance(await lease.wait_lost(), LeaseLost)

        engine = url.partition(":")[0]
        outcomes = {"timed_out": 30, "rejected": 30, "cancelled": 30, "acquired": 110}
        assert {
            each: backend.value(table.ACQUISITIONS, outcome=each, engine=engine)
            for each in outcomes
        } == outcomes
        assert backend.value(table.ACQUISITIONS) == 200
        assert backend.distribution(table.WAIT).count == 110
        await until(lambda: backend.distribution(table.HOLD).count == 110)
        assert backend.value(table.LOSSES, cause="evicted") == 10
        assert backend.value(table.LOSSES, cause="session_expired") == 5
        assert backend.value(table.LOSSES) == 15
        assert backend.value(table.LEASES) == backend.value(table.WAITERS) == 0
        assert backend.value(table.EXPIRATIONS) == 1
    waits = backend.spans_named("acquire mutex")
    ends = [(span.attributes or {})["tenure.outcome"] for span in waits]
    assert {each: ends.count(each) for each in outcomes} == outcomes
    holds = backend.spans_named("hold mutex")
    assert len(holds) == 110
    assert len([span for span in holds if "tenure.loss.cause" in (span.attributes or {})]) == 15


async def _times_out(locking: Awaitable[object]) -> None:
    with pytest.raises(AcquireTimeout):
        await locking


@pytest.mark.parametrize("name", ["ydb", "dflockd"])
async def test_waits_are_counted_where_stores_have_no_administrator(
    name: str, backend: Backend
) -> None:
    with BY_NAME[name].slow_stores.empty() as url:
        async with tenure.connect(url) as client, tenure.connect(url) as other:
            backend.instrument(client)
            held = await other.mutex("m").lock()
            mutex = client.mutex("m")
            for _ in range(3):
                assert await mutex.try_lock() is None
                await _times_out(mutex.lock(timeout=0.2))
            waiting = [asyncio.create_task(mutex.lock()) for _ in range(4)]
            await until(lambda: backend.value(table.WAITERS) == 4)
            for each in waiting[:2]:
                each.cancel()
            await asyncio.wait(waiting[:2])
            await held.release()
            for each in waiting[2:]:
                await (await each).release()
            outcomes = {"timed_out": 3, "rejected": 3, "cancelled": 2, "acquired": 2}
            assert {
                each: backend.value(table.ACQUISITIONS, outcome=each) for each in outcomes
            } == outcomes
            assert backend.value(table.ACQUISITIONS) == 10
            assert backend.value(table.LEASES) == backend.value(table.WAITERS) == 0


@pytest.fixture
def afar() -> Iterator[Afar]:
    with NETWORKED["redis"]() as afar:
        yield afar


async def test_an_outage_is_counted_by_what_it_costs(afar: Afar, backend: Backend) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(tenure.connect(afar.url))
        backend.instrument(client)
        session = await client.session()
        lease = await session.mutex("m").lock()
        assert backend.value(table.SESSIONS, state="attached") == 1
        afar.network.refuse()
        await until(lambda: backend.value(table.SESSIONS, state="detached") == 1)
        assert backend.value(table.SESSIONS, state="attached") == 0
        assert backend.value(table.RECONNECTS) == 0
        with pytest.raises(AcquireTimeout, match="unreachable"):
            await session.mutex("n").lock(timeout=1)
        afar.network.start()
        await until(lambda: backend.value(table.SESSIONS, state="attached") == 1)
        assert backend.value(table.RECONNECTS) == 1
        assert backend.value(table.SESSIONS, state="detached") == 0
        await until(lambda: backend.distribution(table.RENEWALS).count > 0)
        await lease.release()
        await session.aclose()
        assert backend.value(table.SESSIONS) == 0
        assert backend.value(table.ACQUISITIONS, outcome="timed_out") == 1
        assert backend.value(table.LOSSES) == 0


def test_threads_are_counted_and_so_are_their_sessions(backend: Backend, tmp_path: Path) -> None:
    with blocking.connect(f"sqlite:///{tmp_path}/jobs.db") as client:
        with client.mutex("before").lock():
            handles = backend.instrument(client)
            assert backend.value(table.LEASES) == 1
            assert backend.value(table.SESSIONS, state="attached") == 1
        begin = threading.Barrier(8)

        def work() -> None:
            begin.wait(60)
            for _ in range(5):
                with client.mutex("m").lock():
                    pass

        threads = [threading.Thread(target=work) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        with client.mutex("m").lock():
            thread = ThreadPoolExecutor(1)
            assert thread.submit(client.mutex("m").try_lock).result() is None
            with pytest.raises(AcquireTimeout):
                thread.submit(client.mutex("m").lock, timeout=0.1).result()
            thread.shutdown()
        assert backend.value(table.ACQUISITIONS, outcome="acquired") == 41
        assert backend.value(table.ACQUISITIONS) == 43
        assert backend.distribution(table.WAIT).count == 41
        assert backend.distribution(table.HOLD).count == 42  # with the one that there was before
        assert all(each.active for each in handles)
    assert not any(each.active for each in handles)
    assert backend.value(table.SESSIONS) == 0
