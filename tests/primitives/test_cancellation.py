"""A task that is cancelled leaves nothing behind, whatever it was at, and at whatever moment.

Each operation is run again and again, cancelled at each of its steps in turn, on an engine that
answers at once and on engines that take some turns of the loop. Afterwards nothing of it may be
left: no request in any queue, no session in the store, no task, no scope, no pending cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tenure._client.client import Client
from tenure._client.lease import Lease
from tenure._client.session import Session
from tenure._client.session_core import SessionCore
from tenure.errors import AcquireTimeout
from tests.guarantees import MEMORY, guarantee
from tests.primitives.helpers import World, turns
from tests.primitives.slow import SlowEngine

Operation = Callable[["Place"], Awaitable[object]]


@dataclass
class Place:
    """Where an operation takes place."""

    world: World
    client: Client
    session: Session
    rival: Session


async def lock(place: Place) -> object:
    return await place.session.mutex("m").lock()


async def lock_in_time(place: Place) -> object:
    return await place.session.mutex("m").lock(timeout=50)


async def lock_through_the_implicit_session(place: Place) -> object:
    return await place.client.mutex("m").lock()


async def try_lock(place: Place) -> object:
    return await place.session.mutex("m").try_lock()


async def lock_now(place: Place) -> object:
    try:
        return await place.session.mutex("m").lock(timeout=0)
    except AcquireTimeout:
        return None


async def lock_and_work(place: Place) -> None:
    async with place.session.mutex("m").lock():
        await turns(3)


async def lock_and_release(place: Place) -> None:
    lease = await place.session.mutex("m").lock()
    try:
        await turns(1)
    finally:
        await lease.release()


async def enter_a_lease_that_was_awaited(place: Place) -> None:
    lease = await place.session.mutex("m").lock()
    async with lease:
        await turns(1)


async def acquire_and_work(place: Place) -> None:
    async with place.session.semaphore("s").acquire(2):
        await turns(1)


async def acquire_and_update(place: Place) -> None:
    async with place.session.semaphore("s").acquire(2) as lease:
        await lease.update(count=1, data=b"smaller")


async def enqueue(place: Place) -> None:
    async with place.session.semaphore("s").enqueue(2):
        await turns(1)


async def enqueue_and_wait(place: Place) -> None:
    async with place.session.semaphore("s").enqueue(2) as ticket:
        lease = await ticket.wait()
        async with lease:
            await turns(1)


async def enqueue_and_wait_in_time(place: Place) -> None:
    async with place.session.semaphore("s").enqueue(2) as ticket:
        await ticket.wait(timeout=50)


async def enqueue_and_withdraw(place: Place) -> None:
    ticket = await place.session.semaphore("s").enqueue(2)
    await ticket.withdraw()


async def take_all(place: Place) -> None:
    session = place.session
    async with place.client.all_of((session.semaphore("s"), 2), session.mutex("m")):
        await turns(1)


async def take_any(place: Place) -> object:
    session = place.session
    return await place.client.any_of(session.mutex("m"), session.semaphore("s"), timeout=50)


async def acquire_share(place: Place) -> None:
    async with place.session.semaphore("s", per_key=1).acquire(key="a"):
        await turns(1)


async def try_share(place: Place) -> object:
    return await place.session.semaphore("s", per_key=1).try_acquire(key="a")


async def campaign(place: Place) -> None:
    async with place.session.election("e").campaign(b"me") as leadership:
        await leadership.proclaim(b"still me")


async def campaign_and_resign(place: Place) -> None:
    leadership = await place.session.election("e").campaign(b"me")
    await leadership.resign()


async def open_a_session(place: Place) -> None:
    async with place.client.session(description="swept") as session, session.mutex("m").lock():
        await turns(1)


async def attach_and_close(place: Place) -> None:
    session = await place.client.session(description="swept")
    await session.aclose()


async def sessions_in_a_loop(place: Place) -> None:
    async for attempt in place.client.sessions(description="swept"):
        async with attempt as session, session.mutex("m").lock():
            await turns(1)


async def watch(place: Place) -> None:
    async with place.session.semaphore("s").watch(data=True, owners=True) as states:
        async for _ in states:
            await turns(1)
            break


async def observe(place: Place) -> None:
    async with place.session.election("e").observe() as leaders:
        async for _ in leaders:
            break


async def describe(place: Place) -> None:
    await place.session.semaphore("s").describe(owners=True)


async def create_and_delete(place: Place) -> None:
    await place.session.semaphore("t").create(1, exist_ok=True)
    await place.session.semaphore("t").delete()


OPERATIONS: list[Operation] = [
    lock,
    lock_in_time,
    lock_through_the_implicit_session,
    try_lock,
    lock_now,
    lock_and_work,
    lock_and_release,
    enter_a_lease_that_was_awaited,
    acquire_and_work,
    acquire_and_update,
    enqueue,
    enqueue_and_wait,
    enqueue_and_wait_in_time,
    enqueue_and_withdraw,
    take_all,
    take_any,
    acquire_share,
    try_share,
    campaign,
    campaign_and_resign,
    open_a_session,
    attach_and_close,
    sessions_in_a_loop,
    watch,
    observe,
    describe,
    create_and_delete,
]


async def cancelled_at(step: int, operation: Callable[[], Awaitable[object]]) -> object:
    """Run an operation and cancel it when it has had `step` turns; true when it ended before.

    What it has come to by itself is seen to.
    """
    counted: list[int] = []

    async def supervised() -> object:
        task = asyncio.current_task()
        assert task is not None
        try:
            return await operation()
        finally:
            counted.append(task.cancelling())

    task = asyncio.create_task(supervised())
    await turns(step)
    if task.done():
        result = await task
        assert counted == [0]
        if isinstance(result, Lease):
            await result.release()
        return True
    assert task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert counted in ([1], [])  # cancelled once, from here; or before it began
    return False


@contextlib.contextmanager
def eager_tasks() -> Iterator[None]:
    """Every task begins to run where it is made."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009  new in 3.12
    try:
        yield
    finally:
        loop.set_task_factory(None)


async def set_up(world: World, stack: AsyncExitStack, engine_turns: int | None) -> Place:
    client = world.connect(engine_turns)
    await stack.enter_async_context(client)
    session = await client.session(description="operator")
    rivals = await stack.enter_async_context(world.client())
    rival = await rivals.session(description="rival")
    await rival.semaphore("s").create(2)
    return Place(world, client, session, rival)


async def nothing_is_left(place: Place) -> None:
    await turns()
    for name in ("m", "s", "e"):
        assert await place.world.queue(name) == [], name
    for session in place.client._core.sessions:
        assert isinstance(session, SessionCore)
        assert session.requests == {}
        assert session.racing == 0
        assert session.watchers == {}
    assert place.world.scopes.count == 0
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()
    assert {each.description for each in await place.world.sessions()} <= {"operator", "rival", ""}
    # And the next one gets it at once.
    for wanted in (place.rival.mutex("m").try_lock(), place.rival.semaphore("s").try_acquire(2)):
        lease = await wanted
        assert lease is not None
        await lease.release()


@guarantee("cancelled", "nothing leaks", "others proceed", on=MEMORY)
@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_cancelled_at_any_step_it_leaves_nothing(
    world: World, operation: Operation, engine_turns: int | None
) -> None:
    step = 0
    async with AsyncExitStack() as stack:
        place = await set_up(world, stack, engine_turns)
        while not await cancelled_at(step, lambda: operation(place)):
            await nothing_is_left(place)
            step += 1
        await nothing_is_left(place)
        assert step > 0 or engine_turns in (None, 0)
    assert await world.sessions() == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
@pytest.mark.parametrize("engine_turns", [None, 0, 1])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_with_eager_tasks_it_leaves_nothing_either(
    world: World, operation: Operation, engine_turns: int | None
) -> None:
    step = 0
    with eager_tasks():
        async with AsyncExitStack() as stack:
            place = await set_up(world, stack, engine_turns)
            while not await cancelled_at(step, lambda: operation(place)):
                await nothing_is_left(place)
                step += 1
            await nothing_is_left(place)
        async with world.connect(engine_turns) as client, client.mutex("m").lock() as lease:
            assert lease.held
        assert await world.sessions() == []


# From here on without asyncio's debug mode: it would take most of the time.
WAITING = [
    lock,
    lock_in_time,
    lock_through_the_implicit_session,
    lock_and_work,
    acquire_and_work,
    enqueue,
    enqueue_and_wait,
    enqueue_and_wait_in_time,
    campaign,
    sessions_in_a_loop,
]


@guarantee("cancelled", "nothing leaks", "others proceed", on=MEMORY)
@pytest.mark.no_debug
@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2])
@pytest.mark.parametrize("operation", WAITING, ids=lambda operation: operation.__name__)
async def test_cancelled_around_the_instant_of_the_grant_it_gives_back(
    world: World, operation: Operation, engine_turns: int | None
) -> None:
    async with AsyncExitStack() as stack:
        place = await set_up(world, stack, engine_turns)
        await place.rival.election("e").leader()
        for granted_at in (4, 7, 10):
            for step in range(granted_at - 3, granted_at + 8):
                await turns()
                async with AsyncExitStack() as held:
                    await held.enter_async_context(place.rival.mutex("m").lock())
                    await held.enter_async_context(place.rival.semaphore("s").acquire(2))
                    await held.enter_async_context(place.rival.election("e").campaign())
                    give_way = held.pop_all()

                async def release_in_a_while(turn: int, give_way: AsyncExitStack) -> None:
                    await turns(turn)
                    await give_way.aclose()

                # In this task, which is inside those blocks.
                sweeping = asyncio.create_task(cancelled_at(step, lambda: operation(place)))
                await release_in_a_while(granted_at, give_way)
                await sweeping
                await nothing_is_left(place)


@guarantee("cancelled", "nothing leaks", on=MEMORY)
@pytest.mark.no_debug
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_cancelled_twice_it_leaves_nothing_either(world: World, operation: Operation) -> None:
    async with AsyncExitStack() as stack:
        place = await set_up(world, stack, 2)
        for step in range(40):
            for pause in (0, 1, 2):
                task = asyncio.create_task(_whole(operation, place))
                await turns(step)
                task.cancel()
                await turns(pause)
                task.cancel()
                await asyncio.wait([task])
                await nothing_is_left(place)


async def _whole(operation: Operation, place: Place) -> None:
    result = await operation(place)
    if isinstance(result, Lease):
        await result.release()


@guarantee("cut off", "nothing leaks", on=MEMORY)
@pytest.mark.no_debug
@pytest.mark.parametrize("way", ["out of reach", "half-open"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_cancelled_while_the_store_is_silent_it_does_not_wait_for_it(
    world: World, operation: Operation, way: str
) -> None:
    async with AsyncExitStack() as stack:
        place = await set_up(world, stack, 1)
        engine = place.client._core.engine
        assert isinstance(engine, SlowEngine)
        for step in range(30):
            task = asyncio.create_task(_whole(operation, place))
            await turns(step)
            engine.back.flowing = False
            engine.there.flowing = way == "half-open"
            await turns(5)
            task.cancel()
            await turns(5)
            assert task.done()
            engine.mend()
            await nothing_is_left(place)


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2])
async def test_the_call_itself_may_be_a_task(world: World, engine_turns: int | None) -> None:
    async with AsyncExitStack() as stack:
        place = await set_up(world, stack, engine_turns)
        for step in range(8):
            for call in (
                place.session.mutex("m").lock(),
                place.session.semaphore("s").acquire(2),
                place.session.election("e").campaign(),
            ):
                task: asyncio.Task[Lease] = asyncio.create_task(call)
                await turns(step)
                if task.cancel():
                    await asyncio.wait([task])
                    assert task.cancelled()
                else:
                    await (await task).release()
            await nothing_is_left(place)


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2, 3])
async def test_a_client_cancelled_while_it_opens_or_closes_leaves_nothing(
    world: World, engine_turns: int | None
) -> None:
    async def come_and_go() -> None:
        client = world.connect(engine_turns)
        async with client, client.mutex("m").lock():
            await turns(1)

    step = 0
    while not await cancelled_at(step, come_and_go):
        await turns()
        assert await world.sessions() == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert world.scopes.count == 0
        step += 1
    assert step > 1
