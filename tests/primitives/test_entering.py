"""Primitives that are entered themselves: ``async with mutex:``, by many tasks at once."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import tenure
from tenure._client.internals import abandon_entered, source_of
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    Misuse,
    SelfDeadlock,
    SemaphoreExists,
)
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def test_one_object_is_entered_by_many_tasks_in_turn(world: World) -> None:
    inside = 0
    tokens: list[int] = []
    async with world.client() as client:
        mutex = client.mutex("m")

        async def work() -> None:
            nonlocal inside
            async with mutex as lease:
                tokens.append(lease.fencing_token)
                inside += 1
                assert inside == 1
                await turns(2)
                inside -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(work())
        assert tokens == sorted(set(tokens))
        assert not await mutex.locked()


async def test_a_task_that_enters_it_twice_gets_an_error_and_keeps_the_first(world: World) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")
        async with mutex as lease:
            with pytest.raises(SelfDeadlock, match=r"test_entering\.py:\d+"):
                await contextlib.AsyncExitStack().enter_async_context(mutex)
            assert lease.held
        assert not await mutex.locked()
        async with mutex:
            pass


async def test_a_semaphore_is_entered_as_often_as_it_has_tokens(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("pool", limit=2)
        async with pool as outer, pool as inner:
            assert outer is not inner
            assert await pool.count() == 2
        assert await pool.count() == 0


async def test_an_error_of_the_body_and_a_loss_are_those_of_a_lease(world: World) -> None:
    async with world.client() as client, world.client() as other:
        mutex = client.mutex("m")
        with pytest.raises(ZeroDivisionError):
            async with mutex:
                _ = 1 / 0

        async def lose() -> None:
            async with mutex as lease:
                await other.evict("/default", "m", lease.fencing_token)
                await asyncio.Event().wait()

        with pytest.raises(LeaseLost):
            await lose()
        assert not await mutex.locked()


async def test_a_cancelled_wait_leaves_nothing(world: World) -> None:
    async with world.client() as client, world.client() as other:
        mutex = client.mutex("m")
        lease = await other.mutex("m").lock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5), mutex:
                raise AssertionError
        await lease.release()
        assert not await mutex.locked()


async def test_another_task_may_leave_the_only_block(world: World) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")
        stack = contextlib.AsyncExitStack()

        async def enter() -> None:
            await stack.enter_async_context(mutex)

        await asyncio.create_task(enter())
        assert await mutex.locked()
        await stack.aclose()
        assert not await mutex.locked()


async def test_it_is_not_left_by_a_task_that_is_not_inside(world: World) -> None:
    async with world.client() as client:
        mutex, pool = client.mutex("m"), client.semaphore("pool", limit=2)
        with pytest.raises(Misuse, match="not inside"):
            await mutex.__aexit__(None, None, None)
        inside = asyncio.Event()

        async def enter() -> None:
            async with pool:
                inside.set()
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(enter()) for _ in range(2)]
        while await pool.count() < 2:
            await turns(1)
        with pytest.raises(Misuse, match="not inside"):
            await pool.__aexit__(None, None, None)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await pool.count() == 0


# Semaphores with a limit


async def test_a_semaphore_with_a_limit_is_created_at_its_first_use(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("pool", limit=4)
        assert [each.name for each in await client.list_semaphores()] == []
        assert (await pool.describe()).limit == 4
        async with client.semaphore("pool", limit=4).acquire(3):
            assert await pool.try_acquire(2) is None
        await pool.delete()
        assert (await pool.describe()).limit == 4


async def test_another_limit_is_an_error_that_says_how_to_change_it(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("pool").create(limit=2)
        other = client.semaphore("pool", limit=4)
        for attempt in (other.acquire, other.try_acquire, other.describe, other.enqueue):
            with pytest.raises(SemaphoreExists, match=r"has the limit 2, not 4.*resize\(4\)") as e:
                await attempt()
            assert e.value.limit == 2
        await other.delete()
        async with other:
            assert (await other.describe()).limit == 4


@pytest.mark.parametrize("limit", [0, -1, 1.5, "4"])
async def test_a_limit_that_is_none_is_refused_when_it_is_given(world: World, limit: int) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match="a limit is"):
            client.semaphore("pool", limit=limit)
        with pytest.raises(InvalidArgument, match="ephemeral"):
            client.semaphore("pool", limit=2, ephemeral=True)


async def test_a_timeout_of_one_with_a_limit_names_the_holder(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("pool", limit=1)
        assert source_of(pool).recovery_window == client_window(client)
        async with pool, client.mutex("other"):
            with pytest.raises(AcquireTimeout) as error:
                await pool.acquire(timeout=1)
            assert "this session, acquired at" in str(error.value)
            assert "the calling task or thread holds it itself" in str(error.value)


def client_window(client: tenure.Client) -> float:
    return source_of(client.mutex("any")).recovery_window


async def test_a_count_that_is_false_is_refused_and_true_is_one(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("pool", limit=2)
        with pytest.raises(InvalidArgument, match="number of tokens"):
            pool.acquire(False)
        async with pool.acquire(True) as lease:
            assert lease.count == 1


async def test_a_session_makes_them_too(world: World) -> None:
    async with (
        world.client() as client,
        client.session() as session,
        session.mutex("m"),
        session.semaphore("pool", limit=1) as lease,
    ):
        assert lease.session is session


# Clients


async def test_an_awaited_client_is_connected(clock: VirtualClock) -> None:
    client = await tenure.connect("memory://awaited", clock=clock)
    assert await client.list_nodes() == ["/default"]
    async with client, client.mutex("m"):
        pass
    with pytest.raises(tenure.SessionClosed):
        await client


def test_without_an_event_loop_of_asyncio_the_first_call_says_so() -> None:
    client = tenure.connect("memory://loopless")
    for call in (client.__aenter__, client.aclose, client.mutex("m").locked):
        with pytest.raises(Misuse, match=r"asyncio's event loop.*trio"):
            run_without_a_loop(call())
    for once in (client.mutex("m").lock(timeout=5), client.session(), client.mutex("m").lock()):
        with pytest.raises(Misuse, match=r"asyncio's event loop.*trio"):
            once.send(None)


def run_without_a_loop(coroutine: object) -> None:
    """Run to the first wait, as an event loop that is not asyncio's would."""
    coroutine.send(None)  # type: ignore[attr-defined]


async def test_what_is_not_awaited_has_no_attributes_but_those_of_coroutines(world: World) -> None:
    async with world.client() as client:
        locking = client.mutex("m").lock()
        assert not hasattr(locking, "nonsense")
        with pytest.raises(AttributeError, match="write 'await' before the call"):
            _ = locking.fencing_token  # type: ignore[attr-defined]
        locking.close()


async def test_an_entering_is_undone_at_any_time_and_more_than_once(world: World) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")
        lease = await mutex.__aenter__()
        for _ in range(2):  # an interrupted thread does so, and perhaps is interrupted again
            abandon_entered(mutex, lease)
        await turns(2)
        assert not lease.held
        async with mutex as lease:
            pass
        abandon_entered(mutex, lease)
        assert not await mutex.locked()
