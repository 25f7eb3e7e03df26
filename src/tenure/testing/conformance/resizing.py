"""Changes of a limit: the requests that they grant, remove, and leave alone."""

from __future__ import annotations

import asyncio

from tenure.core.rules import EXACT
from tenure.engines.contract import Place, Removal
from tenure.errors import InvalidArgument, SemaphoreNotFound, SessionExpired
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, ProgramRequest, raises
from tenure.testing.stage import Stage


async def _resize(program: Program, limit: int) -> None:
    await program.session.resize_semaphore("pool", limit)


async def _counts(program: Program) -> tuple[int, list[int], list[int]]:
    """Return the limit, and the counts of the owners and the waiters, in order."""
    found = await program.describe("pool")
    assert found.held == sum(each.count for each in found.owners)
    return (
        found.limit,
        [each.count for each in found.owners],
        [each.count for each in found.waiters],
    )


async def _queued(program: Program, *counts: int) -> list[ProgramRequest]:
    return [await program.enqueue("pool", count) for count in counts]


@behaviour("lasting", "resize")
async def a_higher_limit_grants_at_once_in_the_order_of_the_queue(stage: Stage) -> None:
    owner, one, two, maker = await stage.programs(4)
    await maker.create("pool", 2)
    await owner.enqueue("pool", 2)
    first, second = await one.enqueue("pool"), await two.enqueue("pool", 2)
    third, fourth = await one.enqueue("pool"), await two.enqueue("pool")
    await _resize(maker, 5)
    await first.granted()
    await second.granted()
    assert await _counts(maker) == (5, [2, 1, 2], [1, 1])
    await _resize(maker, 6)
    await third.granted()
    assert await _counts(maker) == (6, [2, 1, 2, 1], [1])
    await _resize(maker, 60)
    await fourth.granted()
    assert await _counts(maker) == (60, [2, 1, 2, 1, 1], [])


@behaviour("lasting", "resize")
async def a_higher_limit_lets_no_waiter_pass_another(stage: Stage) -> None:
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 4)
    await owner.enqueue("pool", 3)
    large = await waiter.enqueue("pool", 4)
    small = await waiter.enqueue("pool")
    await _resize(maker, 6)
    assert await _counts(maker) == (6, [3], [4, 1])
    await _resize(maker, 7)
    await large.granted()
    assert await _counts(maker) == (7, [3, 4], [1])
    await _resize(maker, 8)
    await small.granted()


@behaviour("lasting", "resize")
async def a_lower_limit_takes_nothing_away(stage: Stage) -> None:
    owner, other, maker = await stage.programs(3)
    await maker.create("pool", 6)
    held = [*await _queued(owner, 3, 1), *await _queued(other, 2)]
    await _resize(maker, 1)
    assert await _counts(maker) == (1, [3, 1, 2], [])
    await owner.fence(maker)
    assert all(each.queued for each in held)
    assert not owner.recorder.removals
    assert not other.recorder.removals
    await _resize(maker, 2)
    assert await _counts(maker) == (2, [3, 1, 2], [])


@behaviour("lasting", "resize")
async def nothing_is_granted_until_it_fits_in_the_lower_limit(stage: Stage) -> None:
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 6)
    held = await _queued(owner, 2, 2, 2)
    await _resize(maker, 3)
    waiting = await waiter.enqueue("pool")
    assert waiting.place is Place.WAITING
    assert (await maker.enqueue("pool", timeout=0)).place is Place.REFUSED
    await owner.withdraw(held[1])
    assert await _counts(maker) == (3, [2, 2], [1])
    await owner.withdraw(held[0])
    await waiting.granted()
    assert await _counts(maker) == (3, [2, 1], [])
    assert (await maker.enqueue("pool", timeout=0)).place is Place.REFUSED
    await owner.withdraw(held[2])
    assert (await maker.enqueue("pool", 2, timeout=0)).place is Place.GRANTED


@behaviour("lasting", "resize")
async def owners_above_the_limit_stay_owners_while_others_leave(stage: Stage) -> None:
    owner, other, maker = await stage.programs(3)
    await maker.create("pool", 9)
    first, second, third = [*await _queued(owner, 4), *await _queued(other, 3, 2)]
    await _resize(maker, 2)
    await owner.withdraw(first)
    assert await _counts(maker) == (2, [3, 2], [])
    await other.alter(second, count=2)
    assert await _counts(maker) == (2, [2, 2], [])
    waiting = await maker.enqueue("pool", 2)
    await other.withdraw(third)
    assert await _counts(maker) == (2, [2], [2])
    await other.withdraw(second)
    await waiting.granted()


@behaviour("lasting", "resize")
async def a_waiter_for_more_than_the_limit_is_removed_and_those_behind_go_on(stage: Stage) -> None:
    owner, large, small, maker = await stage.programs(4)
    await maker.create("pool", 4)
    held = await owner.enqueue("pool", 2)
    too_large, fitting = await large.enqueue("pool", 4), await small.enqueue("pool", 2)
    larger, last = await large.enqueue("pool", 3), await small.enqueue("pool", 1)
    await _resize(maker, 2)
    assert await too_large.removed() == Removal.resized(2)
    assert await larger.removed() == Removal.resized(2)
    assert await _counts(maker) == (2, [2], [2, 1])
    await owner.withdraw(held)
    await fitting.granted()
    await small.withdraw(fitting)
    await last.granted()
    assert not large.recorder.grants
    for request in (too_large, larger):
        await large.withdraw(request)
    assert await _counts(maker) == (2, [1], [])


@behaviour("lasting", "resize")
async def a_removed_waiter_makes_way_at_once(stage: Stage) -> None:
    owner, large, small, maker = await stage.programs(4)
    await maker.create("pool", 5)
    await owner.enqueue("pool", 1)
    too_large, waiting = await large.enqueue("pool", 5), await small.enqueue("pool", 1)
    await _resize(maker, 4)
    assert await too_large.removed() == Removal.resized(4)
    await waiting.granted()
    assert await _counts(maker) == (4, [1, 1], [])


@behaviour("lasting", "resize")
async def a_removed_waiter_does_not_come_back_with_a_higher_limit(stage: Stage) -> None:
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 3)
    await owner.enqueue("pool", 1)
    removed = await waiter.enqueue("pool", 3)
    await _resize(maker, 2)
    await _resize(maker, 30)
    assert await removed.removed() == Removal.resized(2)
    assert await _counts(maker) == (30, [1], [])
    again = await waiter.enqueue("pool", 3)
    assert again.place is Place.GRANTED


@behaviour("lasting", "resize")
async def a_detached_session_keeps_what_it_owns_when_the_limit_is_lowered(stage: Stage) -> None:
    program, maker = await stage.programs(2)
    await maker.create("pool", 3)
    await program.enqueue("pool", 3)
    await program.enqueue("pool", 2)
    await program.enqueue("pool", 1)
    await program.detach()
    await _resize(maker, 1)
    assert await _counts(maker) == (1, [3], [1])


@behaviour("lasting", "resize", "resume")
async def a_waiter_that_is_removed_while_its_session_is_detached_is_not_resumed(
    stage: Stage,
) -> None:
    program = await stage.program(liveness="window")
    maker = await stage.program()
    await maker.create("pool", 3)
    await program.enqueue("pool", 3)
    await program.enqueue("pool", 2)
    await program.enqueue("pool", 1)
    await program.detach()
    await _resize(maker, 1)
    successor = await stage.program(liveness="window", resume=program)
    found = [(each.count, each.granted) for each in successor.recorder.found]
    assert found == [(3, True), (1, False)]
    await _resize(maker, 4)
    waiting = successor.recorder.found[1].request_id
    await successor.recorder.wait_for(lambda it: waiting in it.grants, "the grant")
    assert await _counts(maker) == (4, [3, 1], [])


@behaviour("lasting", "resize")
async def a_request_counts_with_its_number_after_a_change(stage: Stage) -> None:
    """Check that an owner or a waiter for the whole former limit is like any other one."""
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 2)
    held = await owner.enqueue("pool", 2)
    whole = await waiter.enqueue("pool", 2)
    await _resize(maker, 5)
    await whole.granted()
    assert (await maker.enqueue("pool", 1)).place is Place.GRANTED
    assert await _counts(maker) == (5, [2, 2, 1], [])
    next_whole = await maker.enqueue("pool", 5)
    await owner.withdraw(held)
    assert await _counts(maker) == (5, [2, 1], [5])
    await _resize(maker, 8)
    await next_whole.granted()
    assert await _counts(maker) == (8, [2, 1, 5], [])


@behaviour("lasting", "resize")
async def a_request_for_the_whole_new_limit_waits_until_nothing_is_held(stage: Stage) -> None:
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 5)
    first, second = await _queued(owner, 2, 2)
    waiting, behind = await waiter.enqueue("pool", 2), await waiter.enqueue("pool", 1)
    await _resize(maker, 2)
    assert await _counts(maker) == (2, [2, 2], [2, 1])
    await owner.withdraw(first)
    assert await _counts(maker) == (2, [2], [2, 1])
    await owner.withdraw(second)
    await waiting.granted()
    assert await _counts(maker) == (2, [2], [1])
    await waiter.withdraw(waiting)
    await behind.granted()


@behaviour("lasting", "resize")
async def later_requests_are_checked_against_the_new_limit(stage: Stage) -> None:
    program, maker = await stage.programs(2)
    await maker.create("pool", 2)
    held = await program.enqueue("pool", 2)
    await _resize(maker, 4)
    with raises(InvalidArgument):
        await program.enqueue("pool", 5)
    assert (await program.enqueue("pool", 4)).place is Place.WAITING
    await program.withdraw(held)
    await _resize(maker, 1)
    with raises(InvalidArgument):
        await program.enqueue("pool", 2)
    with raises(InvalidArgument):
        await program.enqueue("pool", 2, timeout=0)
    await maker.session.delete_semaphore("pool", force=True)
    await maker.create("pool", 3)
    assert (await program.enqueue("pool", 3)).place is Place.GRANTED


@behaviour("lasting", "resize")
async def an_owner_of_more_than_the_limit_shrinks_in_place(stage: Stage) -> None:
    program, maker = await stage.programs(2)
    await maker.create("pool", 6)
    held = await program.enqueue("pool", 5)
    await _resize(maker, 3)
    with raises(InvalidArgument):
        await program.alter(held, count=6)
    await program.alter(held, count=4)
    waiting = await maker.enqueue("pool", 1)
    assert await _counts(maker) == (3, [4], [1])
    await program.alter(held, count=3)
    assert await _counts(maker) == (3, [3], [1])
    await program.alter(held, count=2)
    await waiting.granted()


@behaviour("lasting", "resize")
async def an_equal_limit_changes_nothing(stage: Stage) -> None:
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 2)
    await owner.enqueue("pool", 2)
    waiting = await waiter.enqueue("pool", 2)
    await _resize(maker, 2)
    await _resize(maker, 2)
    assert await _counts(maker) == (2, [2], [2])
    await waiter.fence(maker)
    assert waiting.queued


@behaviour("lasting", "resize")
async def limits_may_be_as_large_as_every_store_can_add(stage: Stage) -> None:
    owner, waiter, maker = await stage.programs(3)
    await maker.create("pool", 1)
    await owner.enqueue("pool", 1)
    await _resize(maker, EXACT)
    waiting = await waiter.enqueue("pool", EXACT)
    assert waiting.place is Place.WAITING
    assert (await maker.enqueue("pool", 1, timeout=0)).place is Place.REFUSED
    await _resize(maker, EXACT - 1)
    assert await waiting.removed() == Removal.resized(EXACT - 1)
    assert (await waiter.enqueue("pool", EXACT - 2)).place is Place.GRANTED
    assert (await maker.enqueue("pool", 1, timeout=0)).place is Place.REFUSED
    assert await _counts(maker) == (EXACT - 1, [1, EXACT - 2], [])


@behaviour("lasting", "resize")
async def a_limit_is_changed_to_a_whole_number_from_1_to_two_to_the_53_less_1(
    stage: Stage,
) -> None:
    program = await stage.program()
    await program.create("pool", 4)
    for limit in (0, -1, EXACT + 1, EPHEMERAL_LIMIT, 2**64, 1.5, "2", None):
        with raises(InvalidArgument, f"{limit!r}"):
            await _resize(program, limit)  # type: ignore[arg-type]
    assert (await program.describe("pool")).limit == 4


@behaviour("lasting", "resize")
async def only_a_lasting_semaphore_that_exists_has_a_limit_to_change(stage: Stage) -> None:
    program = await stage.program()
    with raises(SemaphoreNotFound):
        await _resize(program, 4)
    await program.lock("pool")
    with raises(InvalidArgument):
        await _resize(program, 4)
    with raises(InvalidArgument):
        await program.session.resize_semaphore("", 4)
    for number, limit in enumerate((EXACT + 1, EPHEMERAL_LIMIT)):
        await program.create(f"vast {number}", limit)
        with raises(InvalidArgument):
            await program.session.resize_semaphore(f"vast {number}", 4)
        assert (await program.describe(f"vast {number}")).limit == limit
    assert (await program.describe("pool")).limit == EPHEMERAL_LIMIT


@behaviour("lasting", "resize")
async def a_session_that_is_closed_or_ended_changes_no_limit(stage: Stage) -> None:
    closed, ended, other = await stage.programs(3)
    await other.create("pool", 3)
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    for program in (closed, ended):
        with raises(SessionExpired, "resize"):
            await _resize(program, 1)
    assert (await other.describe("pool")).limit == 3


@behaviour("lasting", "resize")
async def of_changes_at_one_time_one_stands_and_all_that_fits_is_granted(stage: Stage) -> None:
    makers = await stage.programs(3)
    waiter = await stage.program()
    await makers[0].create("pool", 1)
    waiting = await _queued(waiter, *[1] * 8)
    for _ in range(3):
        await asyncio.gather(
            *(_resize(maker, limit) for maker, limit in zip(makers, (2, 4, 6), strict=True))
        )
        limit, owners, waiters = await _counts(waiter)
        assert limit in {2, 4, 6}
        assert limit <= len(owners) <= 6
        assert len(owners) + len(waiters) == 8
    await _resize(makers[0], 8)
    for request in waiting:
        await request.granted()


@behaviour("lasting", "resize", "watch")
async def a_changed_limit_is_noticed_by_those_who_watch_the_data(stage: Stage) -> None:
    watcher, maker = await stage.programs(2)
    await maker.create("pool", 2, b"data")
    watching = await watcher.watch("pool", owners=False)
    both = await watcher.watch("pool")
    for limit in (5, 1, 2):
        await _resize(maker, limit)
        await watching.called()
        await both.called()
        assert (await watcher.describe("pool")).limit == limit


@behaviour("lasting", "resize", "watch")
async def an_equal_limit_is_not_noticed(stage: Stage) -> None:
    watcher, maker = await stage.programs(2)
    await maker.create("pool", 2, b"data")
    watching = await watcher.watch("pool")
    await watcher.fence(maker)
    calls = watching.calls
    await _resize(maker, 2)
    await watcher.fence(maker)
    assert watching.calls == calls, "nothing that is watched has changed"


@behaviour("lasting", "resize", "watch")
async def owners_of_a_higher_limit_are_noticed(stage: Stage) -> None:
    watcher, owner, maker = await stage.programs(3)
    await maker.create("pool", 1)
    await _queued(owner, 1, 1)
    watching = await watcher.watch("pool", data=False)
    await _resize(maker, 2)
    while await _counts(watcher) != (2, [1, 1], []):
        await watching.called()
