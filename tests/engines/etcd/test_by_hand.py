"""What becomes of sessions and requests when keys are removed by hand, as `etcdctl del` does."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import pytest

import tenure
from tests.engines.etcd.contest import PATIENCE
from tests.engines.etcd.servers import a_prefix, shared

WINDOW = 3.0


@pytest.fixture
def url() -> Iterator[str]:
    with a_prefix() as url:
        yield url


def _text(key: str | bytes) -> str:
    return base64.b64encode(key.encode() if isinstance(key, str) else key).decode()


async def keys_under(url: str, what: str) -> list[bytes]:
    """The keys of that kind, such as ``q/``, in the order in which they were created."""
    start = f"{url.partition('=')[2]}/{what}"
    request: dict[str, object] = {
        "key": _text(start),
        "range_end": _text(start[:-1] + chr(ord(start[-1]) + 1)),
        "keys_only": True,
        "sort_target": "CREATE",
        "sort_order": "ASCEND",
    }
    answer = await asyncio.to_thread(shared().ask, "kv/range", request)
    found = answer.get("kvs", [])
    assert isinstance(found, list)
    return [base64.b64decode(each["key"]) for each in found]


async def remove(key: bytes) -> None:
    answer = await asyncio.to_thread(shared().ask, "kv/deleterange", {"key": _text(key)})
    assert answer["deleted"] == "1"


async def requests_for(url: str, number: int, name: str = "m") -> list[bytes]:
    """The keys of the requests in a queue, when there are so many."""
    found, where = list[bytes](), f"q/:default/{name}/r/"
    async with asyncio.timeout(PATIENCE):
        while len(found) < number:
            await asyncio.sleep(0.01)
            found = await keys_under(url, where)
    return found


async def test_a_waiter_whose_request_was_removed_is_told_when_its_turn_comes(url: str) -> None:
    async with tenure.connect(url) as one, tenure.connect(url) as two, tenure.connect(url) as three:
        async with one.mutex("m").lock() as held:
            second = asyncio.ensure_future(two.mutex("m").lock(timeout=PATIENCE))
            await requests_for(url, 2)
            third = asyncio.ensure_future(three.mutex("m").lock(timeout=PATIENCE))
            _, removed, _ = await requests_for(url, 3)
            await remove(removed)
            assert held.held
        lease = await third
        await lease.release()
        with pytest.raises(tenure.LeaseLost):
            await second


async def test_who_comes_after_an_owner_whose_request_was_removed_has_a_higher_token(
    url: str,
) -> None:
    """The former owner is not told; a fence tells the two apart."""
    async with tenure.connect(url) as one, tenure.connect(url) as two:
        first = await one.mutex("m").lock()
        waiting = asyncio.ensure_future(two.mutex("m").lock(timeout=PATIENCE))
        removed, _ = await requests_for(url, 2)
        await remove(removed)
        second = await waiting
        assert second.fencing_token > first.fencing_token
        with pytest.raises(tenure.LeaseLost, match="lost before its release"):
            await first.release()
        assert second.held
        assert await one.mutex("m").try_lock() is None
        await second.release()
        assert await keys_under(url, "q/") == []


async def test_a_semaphore_that_was_removed_takes_no_requests_until_it_is_created_again(
    url: str,
) -> None:
    async with tenure.connect(url) as one, tenure.connect(url) as two:
        pool, other = one.semaphore("pool"), two.semaphore("pool")
        await pool.create(1)
        lease = await pool.acquire()
        waiting = asyncio.ensure_future(other.acquire(timeout=PATIENCE))
        await requests_for(url, 2, "pool")
        await remove((await keys_under(url, "q/:default/pool/limit"))[0])
        with pytest.raises(tenure.InvalidArgument, match="ephemeral"):
            await pool.acquire(timeout=1)
        await lease.release()
        lease = await waiting  # it stood in the queue already
        assert lease.held
        await lease.release()
        with pytest.raises(tenure.SemaphoreNotFound):
            await pool.acquire(timeout=1)
        await other.create(1)
        async with pool.acquire(timeout=PATIENCE) as lease:
            assert lease.held


async def test_a_session_whose_key_was_removed_is_over(url: str) -> None:
    async with tenure.connect(url) as one, tenure.connect(url) as two:
        session = await one.session(recovery_window=WINDOW)
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(two.mutex("m").lock(timeout=PATIENCE))
        await requests_for(url, 2)
        removed = next(key for key in await keys_under(url, "s/") if key.count(b"/") == 3)
        await remove(removed)
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await lease.wait_lost(), tenure.LeaseLost)
        assert session.state == "expired"
        with pytest.raises(tenure.SessionExpired):
            await session.mutex("another").lock()
        after = await waiting  # when the lease has run out
        assert after.fencing_token > lease.fencing_token
        await after.release()


async def test_a_node_that_was_removed_takes_no_new_sessions_until_it_is_created_again(
    url: str,
) -> None:
    async with tenure.connect(url) as client:
        await client.create_node("/billing")
        session = await client.session("/billing")
        async with session.mutex("m").lock() as lease:
            await remove((await keys_under(url, "n/:billing"))[0])
            with pytest.raises(tenure.NodeNotFound, match="/billing"):
                await client.session("/billing")
            with pytest.raises(tenure.NodeNotFound, match="/billing"):
                await client.describe_node("/billing")
            await lease.update(b"still there")
            assert lease.held
        await client.create_node("/billing")
        assert (await client.describe_node("/billing")).sessions == 1
        await session.aclose()
