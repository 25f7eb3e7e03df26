"""A pooler in transaction mode: polling, and notifications over a direct address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import tenure
from tests.engines.postgresql.helpers import PATIENCE, is_waited_for
from tests.engines.postgresql.poolers import a_pooler
from tests.engines.postgresql.servers import new_name, shared


@pytest.fixture(scope="module")
def pooled() -> Iterator[str]:
    """The URL of the server of all tests, behind a pooler in transaction mode."""
    with a_pooler(shared()) as url:
        yield f"{url}?schema={new_name()}"


@pytest.mark.parametrize("direct", [False, True])
async def test_a_lock_is_handed_over_behind_a_pooler(pooled: str, direct: bool) -> None:
    url = f"{pooled}&listen={shared().folder}" if direct else pooled
    async with tenure.connect(url) as one, tenure.connect(url) as other:
        lease = await one.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(one, "m")
        await lease.release()
        async with await waiting as granted:
            assert granted.fencing_token > lease.fencing_token


async def test_a_direct_address_that_is_a_pooler_is_an_error(pooled: str) -> None:
    place = pooled.rpartition("@")[2].partition("/")[0]
    with pytest.raises(tenure.EngineError, match="listen= names a pooler"):
        async with tenure.connect(f"{pooled}&listen={place}"):
            pass


async def test_many_contenders_behind_a_pooler_take_turns(pooled: str) -> None:
    inside, most, turns = 0, 0, 0

    async def work(client: tenure.Client) -> None:
        nonlocal inside, most, turns
        for _ in range(10):
            async with client.mutex("turns").lock():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1
                turns += 1

    async with tenure.connect(pooled) as one, tenure.connect(pooled) as other:
        await asyncio.gather(*(work(client) for client in (one, other) for _ in range(3)))
    assert (most, turns) == (1, 60)


async def test_a_watch_is_notified_behind_a_pooler(pooled: str) -> None:
    async with (
        tenure.connect(pooled) as one,
        tenure.connect(pooled) as other,
        one.session() as watching,
        other.session() as writing,
    ):
        config = writing.semaphore("config")
        await config.create(limit=1, data=b"old")
        async with watching.semaphore("config").watch(data=True) as states:
            assert (await anext(states)).data == b"old"
            await config.update(b"new")
            async with asyncio.timeout(PATIENCE):
                assert (await anext(states)).data == b"new"
