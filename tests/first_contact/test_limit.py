"""``semaphore(name, limit=4)`` means the same on every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tenure
from tenure import blocking
from tenure.errors import InvalidArgument, SemaphoreExists
from tests.engines.stores import VARIANTS, stores


@pytest.fixture(scope="module", params=[each.name for each in VARIANTS if not each.repeats])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with stores(request.param).empty() as url:
        yield url


async def test_it_is_created_at_its_first_use_and_only_so_many_hold_it(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        pool = client.semaphore("pool", limit=2)
        async with pool, other.semaphore("pool", limit=2):
            assert await pool.try_acquire() is None
            assert (await pool.describe()).limit == 2
        async with client.semaphore("pool").acquire(timeout=30):
            pass


async def test_another_limit_is_an_error_while_it_is_in_use(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        async with client.semaphore("used", limit=2):
            with pytest.raises((SemaphoreExists, InvalidArgument), match="limit"):
                await other.semaphore("used", limit=3).acquire(timeout=30)
        async with other.semaphore("used", limit=2).acquire(timeout=30):
            pass


def test_threads_have_it_too(url: str) -> None:
    with blocking.connect(url) as client:
        pool = client.semaphore("threads", limit=1)
        with pool:
            assert pool.try_acquire() is None
        with pytest.raises(SemaphoreExists, match=r"resize\(2\)|delete\(\)"):
            client.semaphore("threads", limit=2).acquire()
