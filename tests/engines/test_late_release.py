"""A lease that another program took away is lost by its release, before any push can arrive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

import tenure
from tests.engines.stores import at_once
from tests.engines.ydb.behind import Server, in_a_file, in_memory

Urls = tuple[str, str]
"""The program's way to the store, and that of the one who takes its leases away."""


def _same(empty: Callable[[], AbstractContextManager[str]]) -> Callable[[], Any]:
    @contextmanager
    def urls() -> Iterator[Urls]:
        with empty() as url:
            yield url, url

    return urls


def _ydb(empty: Callable[[], AbstractContextManager[str]]) -> Callable[[], Any]:
    @contextmanager
    def urls() -> Iterator[Urls]:
        with empty() as store:
            server = Server(store)
            server.start()
            try:
                yield server.url, store
            finally:
                server.stop()

    return urls


_STORES = {
    **{name: _same(stores.empty) for name, stores in at_once().items()},
    "ydb-memory": _ydb(in_memory),
    "ydb-sqlite": _ydb(in_a_file),
}


@pytest.fixture(params=list(_STORES.values()), ids=list(_STORES))
def urls(request: pytest.FixtureRequest) -> Iterator[Urls]:
    with request.param() as urls:
        yield urls


def elsewhere(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Do this in another thread, while this one's loop stands still and hears of nothing."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failures == []


def evict(url: str, lease: tenure.Lease) -> None:
    async def work() -> None:
        async with tenure.connect(url) as other:
            assert await other.evict("/default", lease.name, lease.fencing_token)

    elsewhere(work)


def delete(url: str, name: str) -> None:
    async def work() -> None:
        async with tenure.connect(url) as other:
            await other.semaphore(name).delete(force=True)

    elsewhere(work)


async def test_the_release_of_an_evicted_lease_is_its_loss(urls: Urls) -> None:
    mine, theirs = urls
    async with tenure.connect(mine) as client, client.session() as session:
        for _ in range(5):
            lease = await session.mutex("m").lock()
            evict(theirs, lease)
            with pytest.raises(tenure.LeaseLost):
                await lease.release()
        async with session.mutex("m").lock(timeout=30):
            assert session.state == "attached"


async def test_the_end_of_a_block_whose_lease_was_evicted_is_its_loss(urls: Urls) -> None:
    mine, theirs = urls

    async def work(session: tenure.Session) -> None:
        async with session.mutex("m").lock() as lease:
            evict(theirs, lease)

    async with tenure.connect(mine) as client, client.session() as session:
        for _ in range(5):
            with pytest.raises(tenure.LeaseLost):
                await work(session)


async def test_the_release_of_what_was_deleted_by_force_is_its_loss(urls: Urls) -> None:
    mine, theirs = urls
    async with tenure.connect(mine) as client, client.session() as session:
        pool = session.semaphore("pool")
        for _ in range(5):
            await pool.create(limit=2)
            first, second = await pool.acquire(), await pool.acquire()
            delete(theirs, "pool")
            for lease in (first, second):
                with pytest.raises(tenure.LeaseLost):
                    await lease.release()


async def test_the_release_in_a_session_that_the_store_has_ended_is_its_loss(urls: Urls) -> None:
    mine, theirs = urls
    async with tenure.connect(mine) as client, tenure.connect(theirs) as eye:
        for _ in range(5):
            session = await client.session()
            lease = await session.mutex("m").lock()
            (owner,) = (await eye.describe_semaphore("m")).owners

            async def end(session_id: int = owner.session_id) -> None:
                async with tenure.connect(theirs) as other:
                    assert await other.end_session("/default", session_id)

            elsewhere(end)
            with pytest.raises(tenure.LeaseLost) as caught:
                await lease.release()
            assert isinstance(caught.value.__cause__, tenure.SessionExpired)
            assert session.state == "expired"


async def test_releases_that_nobody_disturbs_are_none(urls: Urls) -> None:
    mine, _ = urls
    async with tenure.connect(mine) as client, client.session() as session:
        for _ in range(3):
            leases = [await session.mutex(f"m{number}").lock() for number in range(5)]
            await asyncio.gather(*(lease.release() for lease in leases))

        async def work() -> None:
            async with session.mutex("contended").lock():
                await asyncio.sleep(0)

        await asyncio.gather(*(work() for _ in range(10)))
