"""Answer to a withdrawal: `Withdrawn.LEFT` if the request was in its queue until then."""

from __future__ import annotations

import asyncio

from tenure.engines.contract import Place, Removal, Withdrawn
from tenure.errors import SemaphoreNotFound, SessionExpired
from tenure.model import DEFAULT_NODE
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import ProgramRequest, answer_of, raises
from tenure.testing.stage import Stage


@behaviour()
async def a_withdrawal_says_that_the_request_was_there_and_a_second_one_that_it_was_not(
    stage: Stage,
) -> None:
    owner, waiter = await stage.programs(2)
    held, waiting = await owner.lock("m"), await waiter.lock("m")
    assert await waiter.withdraw(waiting) is Withdrawn.LEFT
    assert await waiter.withdraw(waiting) is Withdrawn.MISSING
    assert await owner.withdraw(held) is Withdrawn.LEFT
    assert await owner.withdraw(held) is Withdrawn.MISSING


@behaviour()
async def an_owner_that_waited_was_there_too(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held, waiting = await owner.lock("m"), await waiter.lock("m")
    assert await owner.withdraw(held) is Withdrawn.LEFT
    await waiting.granted()
    assert await waiter.withdraw(waiting) is Withdrawn.LEFT
    assert await waiter.withdraw(waiting) is Withdrawn.MISSING


@behaviour()
async def a_request_that_was_refused_or_never_made_was_not_there(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    held = await owner.lock("m")
    refused = await other.lock("m", timeout=0)
    assert refused.place is Place.REFUSED
    assert await other.withdraw(refused) is Withdrawn.MISSING
    assert await answer_of(other.session.withdraw(held.request_id + 12345)) is Withdrawn.MISSING
    assert await owner.withdraw(held) is Withdrawn.LEFT


@behaviour()
async def a_waiter_whose_time_was_over_was_not_there(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held, waiting = await owner.lock("m"), await waiter.lock("m", timeout=0.05)
    assert await waiting.removed() == Removal.TIMED_OUT
    assert await waiter.withdraw(waiting) is Withdrawn.MISSING
    assert await owner.withdraw(held) is Withdrawn.LEFT


@behaviour("fencing")
async def an_evicted_request_is_missing_at_its_release(
    stage: Stage,
) -> None:
    owner, waiter = await stage.programs(2)
    for _ in range(5):
        held, waiting = await owner.lock("m"), await waiter.lock("m")
        for program, request in ((waiter, waiting), (owner, held)):
            await _evict(stage, request)
            assert await program.withdraw(request) is Withdrawn.MISSING
            assert await program.withdraw(request) is Withdrawn.MISSING


@behaviour("fencing")
async def of_an_eviction_and_a_release_at_one_time_one_takes_the_request_out(stage: Stage) -> None:
    owner = await stage.program()
    for number in range(20):
        held = await owner.lock("m")
        order_id = await held.granted()
        assert order_id is not None
        evicting = asyncio.ensure_future(_evicted(stage, order_id))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        released = await owner.withdraw(held)
        assert (released is Withdrawn.LEFT) is not await evicting


@behaviour("lasting")
async def what_was_deleted_by_force_was_not_there(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    eye = await stage.program()
    for _ in range(5):
        await eye.create("pool", 1)
        held, waiting = await owner.enqueue("pool"), await waiter.enqueue("pool")
        await eye.session.delete_semaphore("pool", force=True)
        assert await owner.withdraw(held) is Withdrawn.MISSING
        assert await waiter.withdraw(waiting) is Withdrawn.MISSING


@behaviour("lasting")
async def a_late_release_takes_nothing_from_those_who_came_after_a_deletion(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    await other.create("pool", 1)
    held = await owner.enqueue("pool")
    await other.session.delete_semaphore("pool", force=True)
    await other.create("pool", 1)
    theirs = await other.enqueue("pool")
    assert await owner.withdraw(held) is Withdrawn.MISSING
    assert await stage.queue("pool") == ([other.id], [])
    assert await other.withdraw(theirs) is Withdrawn.LEFT


@behaviour()
async def a_withdrawal_after_the_store_has_ended_the_session_fails_with_it(stage: Stage) -> None:
    program = await stage.program()
    held = await program.lock("m")
    assert await stage.eye.end_session(DEFAULT_NODE, program.id) is True
    with raises(SessionExpired, "a release"):
        await program.withdraw(held)
    await program.ended()
    with raises(SessionExpired, "a release after the event"):
        await program.withdraw(held)


@behaviour("resume")
async def what_a_session_finds_when_it_is_taken_over_was_there(stage: Stage) -> None:
    predecessor = await stage.program(liveness="window")
    await predecessor.lock("m")
    await predecessor.detach()
    engine = await stage.engine()
    successor = await stage.program(engine=engine, liveness="window", resume=predecessor)
    found = successor.recovered("m")
    assert await successor.withdraw(found) is Withdrawn.LEFT
    assert await successor.withdraw(found) is Withdrawn.MISSING


async def _evict(stage: Stage, request: ProgramRequest) -> None:
    order_id = request.order_id
    if order_id is None:  # the engine reports it only with the grant
        waiters = (await request.program.describe(request.name)).waiters
        order_id = waiters[0].order_id
    assert await _evicted(stage, order_id)


async def _evicted(stage: Stage, order_id: int) -> bool:
    try:
        return await stage.eye.evict(DEFAULT_NODE, "m", order_id)
    except SemaphoreNotFound:  # the ephemeral semaphore was deleted with its last request
        return False
