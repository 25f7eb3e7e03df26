"""Several locks as one: all of them in one order, or the first that is free."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
from contextlib import AbstractAsyncContextManager

import pytest

from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure._client.mutex import Mutex
from tenure._client.several import Leases
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SelfDeadlock,
    SemaphoreNotFound,
)
from tenure.model import DEFAULT_NODE
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def evict(client: Client, lease: Lease) -> None:
    assert await client.evict(DEFAULT_NODE, lease.name, lease.fencing_token)


async def loses(client: Client, block: AbstractAsyncContextManager[Leases], lost: int) -> None:
    """Enter a block, and wait for the loss of one of its leases."""
    async with block as leases:
        await evict(client, leases[lost])
        try:
            await asyncio.sleep(3600)
        finally:
            assert leases.loss is leases[lost].loss is not None


async def holders(client: Client, *names: str) -> list[int]:
    """The numbers of owners and waiters of some mutexes."""
    found = [await client.mutex(each).describe(owners=True, waiters=True) for each in names]
    return [len(each.owners) + len(each.waiters) for each in found]


async def test_all_of_holds_every_lock_and_returns_the_leases_in_order(world: World) -> None:
    async with world.client() as client, world.client() as other:
        b, a, gpu = client.mutex("b"), client.mutex("a"), client.semaphore("gpu", limit=3)
        async with client.all_of(b, (gpu, 2), a.lock(data=b"me")) as leases:
            assert [each.name for each in leases] == ["b", "gpu", "a"]
            assert [each.count for each in leases][1] == 2
            assert (leases.held, leases.loss) == (True, None)
            assert len(leases) == 3
            assert leases[-1] is list(leases)[2]
            assert [each.name for each in leases[:2]] == ["b", "gpu"]
            leases.check()
            assert await other.mutex("a").try_lock() is None
            assert (await other.mutex("a").describe(owners=True)).owners[0].data == b"me"
            assert await other.semaphore("gpu").try_acquire(2) is None
        with pytest.raises(LeaseReleased):
            leases.check()
        assert await holders(other, "a", "b") == [0, 0]


async def test_callers_with_other_orders_do_not_block_each_other(
    world: World, clock: VirtualClock
) -> None:
    names, done = "abc", []

    async def work(client: Client, order: tuple[str, ...]) -> None:
        for _ in range(5):
            async with client.all_of(*map(client.mutex, order)) as leases:
                await asyncio.sleep(0.01)
                leases.check()
        done.append(order)

    async with world.client() as one, world.client() as two:
        clients = itertools.cycle((one, two))
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for order in itertools.permutations(names):
                group.create_task(work(next(clients), order))
        assert len(done) == 6
        assert await holders(one, *names) == [0, 0, 0]


async def test_a_timeout_is_one_for_all_and_keeps_nothing(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, world.client() as other, other.mutex("b").lock():
        began = clock.now()
        with pytest.raises(AcquireTimeout, match=r"mutex 'b' .* within 5 s; held by"):
            async with client.all_of(client.mutex("a"), client.mutex("b"), timeout=5):
                pass
        assert clock.now() - began == pytest.approx(5)
        assert await holders(client, "a", "b") == [0, 1]
        with pytest.raises(AcquireTimeout, match=r"mutex 'b' .* at once"):
            async with client.all_of(client.mutex("a"), client.mutex("b"), timeout=0):
                pass
        async with other.mutex("a").lock():
            with pytest.raises(AcquireTimeout, match="mutex 'a'"):
                async with client.all_of(client.mutex("b"), client.mutex("a"), timeout=5):
                    pass


async def test_a_cancelled_wait_for_all_keeps_nothing(world: World) -> None:
    async with world.client() as client, world.client() as other:

        async def work() -> None:
            async with client.all_of(*map(client.mutex, "abc")):
                await asyncio.sleep(3600)

        async with other.mutex("b").lock():
            task = asyncio.create_task(work())
            while await holders(client, "a", "b") != [1, 2]:
                await turns()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await turns()
        assert await holders(client, "a", "b", "c") == [0, 0, 0]


async def test_the_loss_of_one_cancels_the_body_and_releases_the_others(world: World) -> None:
    async with world.client() as client, world.client() as other:
        for lost in range(3):
            block = client.all_of(*map(client.mutex, "abc"))
            with pytest.raises(LeaseLost, match=f"'{'abc'[lost]}'"):
                await loses(other, block, lost)
            assert await holders(client, "a", "b", "c") == [0, 0, 0]


async def test_the_loss_of_one_ends_the_wait_for_the_others(world: World) -> None:
    async with world.client() as client, world.client() as other:

        async def work() -> None:
            async with client.all_of(client.mutex("a"), client.mutex("b")):
                raise AssertionError

        async with other.mutex("b").lock():
            task = asyncio.create_task(work())
            while await holders(client, "a", "b") != [1, 2]:
                await turns()
            (owner,) = (await other.mutex("a").describe(owners=True)).owners
            assert await other.evict(DEFAULT_NODE, "a", owner.order_id)
            with pytest.raises(LeaseLost, match="'a'"):
                await task
            assert await holders(client, "a", "b") == [0, 1]


async def test_a_lock_held_around_the_block_is_a_deadlock_with_itself(world: World) -> None:
    async with world.client() as client, client.mutex("b"):
        with pytest.raises(SelfDeadlock):
            async with client.all_of(client.mutex("a"), client.mutex("b")):
                pass
        assert await holders(client, "a") == [0]


async def test_all_of_takes_locks_of_several_stores_and_sessions(world: World) -> None:
    async with (
        world.client() as client,
        world.client() as other,
        client.session() as one,
        other.session() as two,
        one.mutex("a").lock() as around,
        client.all_of(one.mutex("b"), two.mutex("c"), two.mutex("b2")) as leases,
    ):
        assert leases.held
        assert around.held


async def test_any_of_takes_the_first_that_is_free(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        a, b, gpu = client.mutex("a"), client.mutex("b"), client.semaphore("gpu", limit=1)
        async with client.any_of(b, a) as lease:
            assert lease.name == "b"
            async with client.any_of(b, a, timeout=0) as second:
                assert second.name == "a"
                lost = await client.any_of(b, a, gpu)
                assert lost.name == "gpu"
                began = clock.now()
                with pytest.raises(
                    AcquireTimeout, match=r"none of 'b', 'a' .* within 5 s; 'b' held by .*'a' held"
                ):
                    await client.any_of(b, a, timeout=5)
                assert clock.now() - began >= 5
                with pytest.raises(AcquireTimeout, match=r"none of 'b', 'a' .* at once"):
                    await client.any_of(b, a, timeout=0)
                await lost.release()
        assert await holders(other, "a", "b") == [0, 0]


async def test_any_of_waits_in_every_queue_and_leaves_the_others(world: World) -> None:
    async with world.client() as client, world.client() as other:
        held = [await other.mutex(name).lock() for name in "abc"]

        async def work() -> str:
            async with client.any_of(*map(client.mutex, "abc")) as lease:
                return lease.name

        tasks = [asyncio.create_task(work()) for _ in range(2)]
        while await holders(client, "a", "b", "c") != [3, 3, 3]:
            await turns()
        await held[1].release()
        assert await asyncio.gather(*tasks) == ["b", "b"]
        assert await holders(client, "a", "b", "c") == [1, 0, 1]


async def test_a_cancelled_wait_for_any_leaves_every_queue(world: World) -> None:
    async with world.client() as client, world.client() as other:
        held = [await other.mutex(name).lock() for name in "ab"]
        task = asyncio.create_task(_named(client))
        while await holders(client, "a", "b") != [2, 2]:
            await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await turns()
        assert await holders(client, "a", "b") == [1, 1]
        assert all(each.held for each in held)


async def _named(client: Client) -> str:
    return (await client.any_of(client.mutex("a"), client.mutex("b"))).name


async def test_any_of_goes_on_when_one_queue_is_deleted(world: World) -> None:
    async with world.client() as client, world.client() as other:
        gpu = client.semaphore("gpu", limit=1)
        held = await other.mutex("a").lock()
        evicted = await other.semaphore("gpu", limit=1).acquire()
        task = asyncio.ensure_future(client.any_of(gpu, client.mutex("a")))
        while await holders(client, "a") != [2]:
            await turns()
        await other.semaphore("gpu").delete(force=True)
        await held.release()
        assert (await task).name == "a"
        assert not evicted.held


@pytest.mark.parametrize("call", ["all_of", "any_of"])
async def test_wrong_arguments_are_named(world: World, call: str) -> None:
    async with world.client() as client:
        function = getattr(client, call)
        a, gpu = client.mutex("a"), client.semaphore("gpu", limit=2)
        with pytest.raises(InvalidArgument, match=re.escape(f"{call}() needs a lock")):
            function()
        for twice in ((a, client.mutex("a")), (gpu, (gpu, 2))):
            with pytest.raises(InvalidArgument, match="twice"):
                function(*twice)
        async with a as lease:
            for wrong in (lease, "a", 3, client, (gpu, "2"), (a, 1)):
                with pytest.raises(InvalidArgument, match=re.escape(f"{call}() takes mutexes")):
                    function(wrong)
        with pytest.raises(InvalidArgument, match="give the timeout"):
            function(a.lock(timeout=5))
        call_of_ticket = a.enqueue()
        with pytest.raises(InvalidArgument, match="takes mutexes"):
            function(call_of_ticket)
        call_of_ticket.close()
        with pytest.raises(InvalidArgument):
            function(a, timeout=-5)
        entered = a.lock()
        async with entered:
            with pytest.raises(Misuse, match="awaited or entered already"):
                function(entered)


async def test_a_missing_semaphore_is_named_and_nothing_is_kept(world: World) -> None:
    async with world.client() as client:
        for call in (client.all_of, client.any_of):
            with pytest.raises(SemaphoreNotFound, match="'none'"):
                async with call(client.semaphore("none"), client.mutex("a")):
                    pass
            assert await holders(client, "a") == [0]


async def test_a_block_of_all_is_entered_once(world: World) -> None:
    async with world.client() as client:
        block = client.all_of(client.mutex("a"))
        assert "all of 'a'" in repr(block)
        async with block:
            with pytest.raises(Misuse, match="entered already"):
                async with block:
                    pass
        with pytest.raises(Misuse, match="without having been entered"):
            await client.all_of(client.mutex("a")).__aexit__(None, None, None)
        gc.collect()


async def test_an_error_of_the_body_passes_through(world: World) -> None:
    async with world.client() as client:
        mutexes: list[Mutex] = [client.mutex(each) for each in "ab"]
        with pytest.raises(ZeroDivisionError):
            async with client.all_of(*mutexes):
                raise ZeroDivisionError
        assert await holders(client, "a", "b") == [0, 0]
