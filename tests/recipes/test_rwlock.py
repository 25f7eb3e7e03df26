# ruff: noqa: PT012  what raises here is a block, with its body
"""The read/write lock: readers together, a writer alone, everybody in turn."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenure
from tenure.errors import AcquireTimeout, InvalidArgument, LeaseLost, SelfDeadlock
from tenure.recipes import RWLock
from tests.guarantees import MEMORY, guarantee
from tests.primitives.helpers import World, for_ever, turns


async def test_readers_share_it_and_a_writer_is_alone(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        here, there = RWLock(client, "catalogue"), RWLock(other, "catalogue")
        assert repr(here) == "<RWLock 'catalogue'>"
        async with here.read(data=b"a"), there.read(data=b"b") as reader:
            assert reader.count == 1
            assert await there.try_write() is None
            lease = await here.try_read()
            assert lease is not None
            await lease.release()
        async with here.write(data=b"w"):
            assert await there.try_read() is None
            assert await there.try_write() is None
        written = await there.try_write(data=b"w")
        assert written is not None
        await written.release()


async def test_it_needs_no_set_up_and_leaves_nothing(world: World) -> None:
    async with world.client() as client, client.session() as session:
        async with RWLock(session, "l").read():
            pass
        async with RWLock(session, "l").write():
            assert len(await world.queue("l")) == 1
        assert await world.queue("l") == []


async def test_a_writer_that_waits_holds_back_later_readers_and_is_not_starved(url: str) -> None:
    async with tenure.connect(url) as client:
        lock = RWLock(client, "l")
        order: list[str] = []

        async def read(name: str) -> None:
            async with lock.read():
                order.append(name)

        async def write(name: str) -> None:
            async with lock.write():
                order.append(name)

        async with asyncio.TaskGroup() as group, lock.read():
            for number, do in enumerate((write, read, read, write)):
                group.create_task(do(f"{do.__name__} {number}"))
                await until_waiting(client, "l", number + 1)
            assert await lock.try_read() is None
            assert order == []
        # Which of two readers admitted together goes first is the loop's business.
        assert order[0] == "write 0"
        assert sorted(order[1:3]) == ["read 1", "read 2"]
        assert order[3] == "write 3"


async def until_waiting(client: tenure.Client, name: str, number: int) -> None:
    """Until so many requests wait behind the owners."""
    semaphore = client.semaphore(name, ephemeral=True)
    while len((await semaphore.describe(waiters=True)).waiters) < number:
        await turns(1)


async def test_a_writer_becomes_a_reader_with_nobody_in_between(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        lock, theirs = RWLock(client, "l"), RWLock(other, "l")
        async with lock.write() as lease:
            token = lease.fencing_token
            reading = asyncio.create_task(theirs.read())
            writing = asyncio.create_task(RWLock(other, "l").write())
            await until_waiting(client, "l", 2)
            await lease.update(count=1)
            assert (lease.count, lease.fencing_token) == (1, token)
            reader = await reading
            assert not writing.done()
        await reader.release()
        await (await writing).release()


async def test_who_wants_to_write_inside_of_reading_is_told(world: World) -> None:
    async with world.client() as client:
        lock = RWLock(client, "l")
        async with lock.read():
            with pytest.raises(SelfDeadlock):
                await lock.write()
            with pytest.raises(AcquireTimeout):
                await lock.write(timeout=1)
        async with lock.write():
            with pytest.raises(SelfDeadlock):
                await lock.read()
        assert await world.queue("l") == []


@pytest.mark.parametrize("side", ["read", "write"])
async def test_a_loss_stops_either_side(world: World, side: str) -> None:
    async with world.client() as client:
        lock = RWLock(await client.session(description="mine"), "l")
        with pytest.raises(LeaseLost):
            async with lock.read() if side == "read" else lock.write():
                await world.end_sessions("mine")
                await for_ever()


async def test_tokens_rise_in_the_order_of_the_queue(world: World) -> None:
    async with world.client() as client:
        lock = RWLock(client, "l")
        tokens = []
        for take in (lock.read, lock.write, lock.read, lock.read, lock.write):
            async with take() as lease:
                tokens.append(lease.fencing_token)
        assert tokens == sorted(set(tokens))


async def test_a_mutex_of_that_name_is_a_writer_and_a_semaphore_is_refused(world: World) -> None:
    async with world.client() as client:
        async with client.mutex("l").lock():
            assert await RWLock(client, "l").try_read() is None
        await client.semaphore("s").create(3)
        with pytest.raises(InvalidArgument, match="lasting semaphore"):
            await RWLock(client, "s").read()


steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 6), st.booleans()),
    min_size=1,
    max_size=12,
)


@guarantee("none", "one owner", "in order", on=MEMORY)
@given(steps)
@settings(max_examples=60)
async def test_in_any_history_no_writer_is_with_anyone_and_nobody_overtakes(
    history: list[tuple[bool, int, int, bool]],
) -> None:
    """Each step: who writes, how long until the next comes, how long it stays, whether it gives up.

    Those inside at any time are readers, or one writer; and whoever cannot be inside together
    goes inside in the order of arrival, which is that of the tokens.
    """
    async with tenure.connect("memory://") as client, client.session() as session:
        lock = RWLock(session, "l")
        inside: list[bool] = []
        entered: list[tuple[int, bool]] = []

        async def visit(writes: bool, stay: int) -> None:
            async with lock.write() if writes else lock.read() as lease:
                entered.append((lease.fencing_token, writes))
                inside.append(writes)
                assert not (any(inside) and len(inside) > 1)
                try:
                    await turns(stay)
                finally:
                    inside.remove(writes)

        visits: list[tuple[asyncio.Task[None], bool]] = []
        for writes, pause, stay, gives_up in history:
            visits.append((asyncio.create_task(visit(writes, stay)), gives_up))
            await turns(pause)
            if gives_up:
                visits[len(visits) // 2][0].cancel()
        await asyncio.wait([task for task, _ in visits])
        for task, _ in visits:
            assert task.cancelled() or task.exception() is None
        for (earlier, one), (later, other) in itertools.combinations(entered, 2):
            assert earlier < later or not (one or other)  # readers may enter side by side
        described = await session.semaphore("l", ephemeral=True).describe()
        assert (described.held, described.waiting) == (0, 0)
