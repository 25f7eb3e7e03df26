"""One request: withdrawn, altered in place, evicted."""

from __future__ import annotations

from tenure.engines.contract import Place, Removal
from tenure.errors import InvalidArgument, LeaseReleased
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import answer_of, raises
from tenure.testing.stage import Stage

# Withdrawing


@behaviour()
async def withdrawing_twice_is_no_error(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held, waiting = await owner.lock("m"), await waiter.lock("m")
    for _ in range(3):
        await waiter.withdraw(waiting)
    for _ in range(3):
        await owner.withdraw(held)
    assert await stage.queue("m") == ([], [])


@behaviour()
async def withdrawing_what_never_was_is_no_error(stage: Stage) -> None:
    program, other = await stage.programs(2)
    mine = await other.lock("m", data=b"mine")
    await answer_of(program.session.withdraw(mine.request_id))
    await answer_of(program.session.withdraw(12345))
    assert await stage.queue("m") == ([other.id], [])


@behaviour()
async def a_second_withdrawal_releases_nothing_else(stage: Stage) -> None:
    program, other = await stage.programs(2)
    first = await program.lock("m")
    second = await program.lock("m")
    third = await other.lock("m")
    await program.withdraw(first)
    await second.granted()
    await program.withdraw(first)
    assert await stage.queue("m") == ([program.id], [other.id])
    await program.withdraw(second)
    await third.granted()


# Altering


@behaviour("data")
async def an_owner_and_a_waiter_may_change_their_data_in_place(stage: Stage) -> None:
    owner, waiter, other = await stage.programs(3)
    held = await owner.lock("m", data=b"owner")
    waiting = await waiter.lock("m", data=b"waiter")
    await other.lock("m", data=b"other")
    await owner.alter(held, data=b"owner, later")
    await waiter.alter(waiting, data=b"")
    found = await other.describe("m")
    assert [each.data for each in (*found.owners, *found.waiters)] == [
        b"owner, later",
        b"",
        b"other",
    ]
    assert await stage.queue("m") == ([owner.id], [waiter.id, other.id])
    if stage.capabilities.fencing:
        assert found.owners[0].order_id == held.order_id
        assert waiting.order_id in {found.waiters[0].order_id, None}
        assert waiting.order_id is not None or not stage.capabilities.waiter_order


@behaviour("lasting")
async def an_owner_that_shrinks_makes_room_for_the_next(stage: Stage) -> None:
    owner, first, second = await stage.programs(3)
    await owner.create("pool", 4)
    held = await owner.enqueue("pool", 4)
    ahead, behind = await first.enqueue("pool", 2), await second.enqueue("pool", 2)
    await owner.alter(held, count=2)
    await ahead.granted()
    found = await owner.describe("pool")
    assert [(each.session_id, each.count) for each in found.owners] == [
        (owner.id, 2),
        (first.id, 2),
    ]
    assert found.held == 4
    await owner.alter(held, count=1)
    assert await stage.queue("pool") == ([owner.id, first.id], [second.id])
    await first.withdraw(ahead)
    await behind.granted()
    if stage.capabilities.fencing:
        assert (await owner.describe("pool")).owners[0].order_id == held.order_id


@behaviour("lasting")
async def a_waiter_that_shrinks_until_it_fits_is_granted(stage: Stage) -> None:
    owner, waiter, behind = await stage.programs(3)
    await owner.create("pool", 4)
    await owner.enqueue("pool", 2)
    waiting = await waiter.enqueue("pool", 4)
    last = await behind.enqueue("pool", 1)
    await waiter.alter(waiting, count=3)
    assert await stage.queue("pool") == ([owner.id], [waiter.id, behind.id])
    await waiter.alter(waiting, count=1)
    await waiting.granted()
    await last.granted()
    assert (await owner.describe("pool")).held == 4


@behaviour("lasting")
async def a_waiter_that_shrinks_keeps_its_place(stage: Stage) -> None:
    owner, large, small = await stage.programs(3)
    await owner.create("pool", 2)
    held = await owner.enqueue("pool", 2)
    ahead, behind = await large.enqueue("pool", 2), await small.enqueue("pool", 2)
    await small.alter(behind, count=1)
    await owner.withdraw(held)
    await ahead.granted()
    assert await stage.queue("pool") == ([large.id], [small.id])


@behaviour()
async def a_mutex_can_be_turned_into_a_shared_one_without_a_gap(stage: Stage) -> None:
    writer, reader, other = await stage.programs(3)
    held = await writer.lock("m")
    reading = await reader.enqueue("m", ephemeral=True)
    excluded = await other.lock("m")
    await writer.alter(held, count=1)
    await reading.granted()
    found = await writer.describe("m")
    assert (found.held, found.limit) == (2, EPHEMERAL_LIMIT)
    assert await stage.queue("m") == ([writer.id, reader.id], [other.id])
    await writer.withdraw(held)
    await reader.withdraw(reading)
    await excluded.granted()


@behaviour("lasting", "data")
async def a_request_cannot_grow_and_a_refused_change_changes_nothing(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.create("pool", 4)
    held = await owner.enqueue("pool", 2, data=b"owner")
    waiting = await waiter.enqueue("pool", 3, data=b"waiter")
    for program, request, counts in (
        (owner, held, (3, 4, 5, 0, -1)),
        (waiter, waiting, (4, 5, 0, -1)),
    ):
        for count in counts:
            with raises(InvalidArgument, f"alter to {count}"):
                await program.alter(request, count=count, data=b"changed")
    found = await owner.describe("pool")
    assert [(each.count, each.data) for each in found.owners] == [(2, b"owner")]
    assert [(each.count, each.data) for each in found.waiters] == [(3, b"waiter")]


@behaviour("lasting", "data")
async def a_change_to_what_is_so_already_changes_nothing(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.create("pool", 2)
    held = await owner.enqueue("pool", 2, data=b"owner")
    await waiter.enqueue("pool", 1)
    await owner.alter(held, count=2, data=b"owner")
    await owner.alter(held, count=None, data=None)
    found = await owner.describe("pool")
    assert [(each.count, each.data) for each in found.owners] == [(2, b"owner")]
    assert await stage.queue("pool") == ([owner.id], [waiter.id])


@behaviour()
async def a_request_that_is_not_in_the_queue_cannot_be_altered(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    released = await owner.lock("m")
    await owner.withdraw(released)
    with raises(LeaseReleased, "released"):
        await owner.alter(released, data=b"late")
    with raises(LeaseReleased, "never sent"):
        await answer_of(owner.session.alter(12345, count=None, data=b"late"))
    mine = await other.lock("m", data=b"mine")
    with raises(LeaseReleased, "another session's"):
        await answer_of(owner.session.alter(mine.request_id + 1000, count=None, data=b"late"))
    assert [each.data for each in (await other.describe("m")).owners] == [b"mine"]


# Evicting


@behaviour("fencing")
async def an_evicted_owner_is_notified_and_the_next_is_granted(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held, waiting = await owner.lock("m"), await waiter.lock("m")
    assert held.order_id is not None
    assert await stage.eye.evict(DEFAULT_NODE, "m", held.order_id) is True
    assert await held.removed() == Removal.EVICTED
    await waiting.granted()
    assert owner.recorder.end is None
    with raises(LeaseReleased):
        await owner.alter(held, data=b"still here?")
    await owner.withdraw(held)
    assert await stage.queue("m") == ([waiter.id], [])


@behaviour("fencing")
async def an_evicted_waiter_is_notified_and_passed_over(stage: Stage) -> None:
    owner, waiter, last = await stage.programs(3)
    held, evicted, waiting = await owner.lock("m"), await waiter.lock("m"), await last.lock("m")
    first = (await owner.describe("m")).waiters[0]
    assert await stage.eye.evict(DEFAULT_NODE, "m", first.order_id) is True
    assert await evicted.removed() == Removal.EVICTED
    assert await stage.queue("m") == ([owner.id], [last.id])
    await owner.withdraw(held)
    await waiting.granted()
    assert not waiter.recorder.grants


@behaviour("fencing")
async def evicting_takes_one_request_and_leaves_the_others_of_its_session(stage: Stage) -> None:
    program = await stage.program()
    first, second = await program.lock("m"), await program.lock("m")
    other_program = await program.lock("another")
    assert first.order_id is not None
    await stage.eye.evict(DEFAULT_NODE, "m", first.order_id)
    await second.granted()
    assert await stage.queue("m") == ([program.id], [])
    assert await stage.queue("another") == ([other_program.program.id], [])


@behaviour("fencing")
async def evicting_a_missing_request_returns_false(stage: Stage) -> None:
    program = await stage.program()
    held, other = await program.lock("m"), await program.lock("another")
    assert held.order_id is not None
    assert other.order_id is not None
    assert await stage.eye.evict(DEFAULT_NODE, "m", other.order_id) is False
    assert await stage.eye.evict(DEFAULT_NODE, "m", 1) is False
    await program.withdraw(held)
    assert await stage.eye.evict(DEFAULT_NODE, "another", held.order_id) is False
    assert await stage.queue("another") == ([program.id], [])


@behaviour("fencing")
async def the_last_request_to_be_evicted_takes_its_mutex_with_it(stage: Stage) -> None:
    program, other = await stage.programs(2)
    held = await program.lock("m")
    assert held.order_id is not None
    assert await stage.eye.evict(DEFAULT_NODE, "m", held.order_id) is True
    assert not await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)
    assert (await other.lock("m", timeout=0)).place is Place.GRANTED
