"""What a session gets that acquires what it owns, or waits for, already."""

from __future__ import annotations

import pytest

from tenure.server.ydb.messages import Status
from tests.server.ydb.raw import (
    FOREVER,
    NODE,
    call,
    channel,
    serving,
    session,
    waiting,
)


async def test_an_owner_that_acquires_again_shrinks_in_place_and_never_grows(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        await owner.create("s", 3)
        await owner.acquired(await owner.acquire("s", 2, data=b"a"))
        waits = await waiter.acquire("s", 2)
        await waiter.pending(waits)
        assert await owner.refused(await owner.acquire("s", 3)) == Status.BAD_REQUEST
        assert await owner.acquired(await owner.acquire("s", 2, data=b"b"))
        found = (await owner.described("s", include_owners=True)).owners[0]
        assert (found.count, found.data) == (2, b"b")
        assert await owner.acquired(await owner.acquire("s", 1, data=b"c"))
        found = (await owner.described("s", include_owners=True)).owners[0]
        assert (found.count, found.data) == (1, b"c")
        assert await waiter.acquired(waits)
        asked = await owner.acquire("s", 1, ephemeral=True)
        assert await owner.refused(asked) == Status.PRECONDITION_FAILED


async def test_a_waiter_that_acquires_again_aborts_the_first_and_keeps_its_place(
    store: str,
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter, behind = [await session(over) for _ in range(3)]
        waits = await waiting(owner, waiter)
        others = await behind.acquire("s", 1)
        await behind.pending(others)
        again = await waiter.acquire("s", 2, data=b"b")
        assert await waiter.refused(waits) == Status.ABORTED
        await waiter.pending(again)
        found = (await owner.described("s", include_waiters=True)).waiters
        assert [each.session_id for each in found] == [waiter.session_id, behind.session_id]
        assert found[0].data == b"b"
        await owner.released(await owner.release("s"))
        assert await waiter.acquired(again)
        assert await behind.acquired(others)


async def test_a_waiter_that_would_grow_is_refused_and_waits_on(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        assert await waiter.refused(await waiter.acquire("s", 3)) == Status.BAD_REQUEST
        await owner.released(await owner.release("s"))
        assert await waiter.acquired(waits)


async def test_a_waiter_that_shrinks_so_that_it_fits_is_granted(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        again = await waiter.acquire("s", 1)
        assert await waiter.refused(waits) == Status.ABORTED
        assert await waiter.acquired(again)  # without a Pending


async def test_what_is_asked_behind_a_shrink_that_fits_finds_the_session_an_owner(
    store: str,
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        again, once_more = await waiter.acquire("s", 1), await waiter.acquire("s", 1, data=b"new")
        released = await waiter.release("s")
        assert await waiter.refused(waits) == Status.ABORTED
        assert await waiter.acquired(again)
        assert await waiter.acquired(once_more)
        assert await waiter.released(released)
        assert not await waiter.released(await waiter.release("s"))


async def test_a_shrink_that_does_not_fit_waits_on_in_its_place(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, first, waiter = [await session(over) for _ in range(3)]
        before = await waiting(owner, first)
        waits = await waiter.acquire("s", 2)
        await waiter.pending(waits)
        again = await waiter.acquire("s", 1)  # one is free, and `first` is before it
        assert await waiter.refused(waits) == Status.ABORTED
        await waiter.pending(again)
        await owner.released(await owner.release("s"))
        assert await first.acquired(before)
        assert await waiter.acquired(again)


async def test_nothing_is_left_to_release_behind_an_acquire_that_does_not_wait(
    store: str,
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        again = await waiter.acquire("s", 2, timeout_millis=0)
        released = await waiter.release("s")
        assert await waiter.refused(waits) == Status.ABORTED
        assert not await waiter.acquired(again)
        assert not await waiter.released(released)


async def test_a_waiter_that_acquires_again_without_waiting_leaves_the_queue(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        again = await waiter.acquire("s", 2, timeout_millis=0)
        assert await waiter.refused(waits) == Status.ABORTED
        assert not await waiter.acquired(again)
        assert not (await owner.described("s", include_waiters=True)).waiters


async def test_a_described_waiter_has_the_timeout_that_it_asked_for(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter, other = [await session(over) for _ in range(3)]
        await owner.create("s")
        await owner.acquired(await owner.acquire("s"))
        for asked in (60_000, 3_600_000, FOREVER, 20_000):  # each takes the place of the former
            await waiter.acquire("s", timeout_millis=asked)
            while not (await waiter.receive()).HasField("acquire_semaphore_pending"):
                pass
            for client in (owner, waiter, other):
                (found,) = (await client.described("s", include_waiters=True)).waiters
                assert found.timeout_millis == asked
        await waiter.call.cancel()
        (found,) = (await other.described("s", include_waiters=True)).waiters
        assert 20_000 <= found.timeout_millis < 60_000  # by what the store knows, when it has left


async def test_a_waiter_that_has_left_its_stream_is_described_by_what_the_store_knows(
    store: str,
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        await owner.create("s")
        await owner.acquired(await owner.acquire("s"))
        await waiter.pending(await waiter.acquire("s", timeout_millis=60_000))
        await waiter.call.cancel()
        await call(over, "DescribeNode", path=NODE)  # after which the stream has been left
        (found,) = (await owner.described("s", include_waiters=True)).waiters
        assert found.timeout_millis == 60_000


async def test_a_waiter_that_acquires_again_waits_as_long_as_it_now_says(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        waits = await waiting(owner, waiter)
        again = await waiter.acquire("s", 2, timeout_millis=50)
        assert await waiter.refused(waits) == Status.ABORTED
        await waiter.pending(again)
        assert not await waiter.acquired(again)


@pytest.mark.parametrize("timeout", [0, 30_000], ids=["without waiting", "waiting"])
async def test_a_waiter_for_a_whole_mutex_that_wants_a_share_of_it_has_it_at_once(
    store: str, timeout: int
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        owner, waiter = await session(over), await session(over)
        assert await owner.acquired(await owner.acquire("m", 1, ephemeral=True))
        whole = await waiter.acquire("m", 2**64 - 1, ephemeral=True)
        share = await waiter.acquire("m", 1, ephemeral=True, timeout_millis=timeout)
        await waiter.pending(whole)
        assert await waiter.refused(whole) == Status.ABORTED
        assert await waiter.acquired(share)
        found = await owner.described("m", include_owners=True, include_waiters=True)
        assert {each.session_id for each in found.owners} == {owner.session_id, waiter.session_id}
        assert not found.waiters
