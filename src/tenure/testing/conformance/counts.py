"""Counts and limits: the owners are the longest fitting prefix of the queue, for any numbers."""

from __future__ import annotations

from tenure.engines.contract import Place
from tenure.errors import InvalidArgument
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, raises
from tenure.testing.stage import Stage

EXACT = 2**53 - 1


async def _held(program: Program, name: str = "pool") -> int:
    return (await program.describe(name)).held


@behaviour("lasting")
async def requests_are_granted_as_long_as_they_fit(stage: Stage) -> None:
    one, two = await stage.programs(2)
    await one.create("pool", 4)
    places = [(await program.enqueue("pool", 2)).place for program in (one, two, one)]
    assert places == [Place.GRANTED, Place.GRANTED, Place.WAITING]
    assert await _held(one) == 4
    assert await stage.queue("pool") == ([one.id, two.id], [one.id])


@behaviour("lasting")
async def nobody_goes_past_a_request_that_waits(stage: Stage) -> None:
    owner, large, small = await stage.programs(3)
    await owner.create("pool", 3)
    held = await owner.enqueue("pool", 2)
    waiting = await large.enqueue("pool", 2)
    behind = await small.enqueue("pool", 1)
    assert behind.place is Place.WAITING
    assert await _held(owner) == 2
    assert await stage.queue("pool") == ([owner.id], [large.id, small.id])
    await owner.withdraw(held)
    await waiting.granted()
    await behind.granted()
    assert await stage.queue("pool") == ([large.id, small.id], [])


@behaviour("lasting")
async def a_release_that_is_too_small_for_the_next_grants_nobody(stage: Stage) -> None:
    one, two, large, small = await stage.programs(4)
    await one.create("pool", 4)
    held = [await program.enqueue("pool", 2) for program in (one, two)]
    waiting = await large.enqueue("pool", 3)
    behind = await small.enqueue("pool", 1)
    await one.withdraw(held[0])
    assert await stage.queue("pool") == ([two.id], [large.id, small.id])
    await two.withdraw(held[1])
    await waiting.granted()
    await behind.granted()


@behaviour("lasting")
async def one_release_grants_all_that_fit(stage: Stage) -> None:
    owner, *others = await stage.programs(6)
    await owner.create("pool", 4)
    held = await owner.enqueue("pool", 4)
    waiting = [await other.enqueue("pool") for other in others]
    await owner.withdraw(held)
    for request in waiting[:4]:
        await request.granted()
    assert await stage.queue("pool") == (
        [other.id for other in others[:4]],
        [others[4].id],
    )
    assert not others[4].recorder.grants


@behaviour("lasting")
async def a_waiter_that_leaves_makes_way_for_those_behind_it(stage: Stage) -> None:
    owner, large, *small = await stage.programs(4)
    await owner.create("pool", 3)
    await owner.enqueue("pool", 1)
    blocking = await large.enqueue("pool", 3)
    waiting = [await program.enqueue("pool", 1) for program in small]
    await large.withdraw(blocking)
    for request in waiting:
        await request.granted()
    assert await _held(owner) == 3


@behaviour("lasting")
async def what_is_owned_is_never_taken_back(stage: Stage) -> None:
    first, second, third = await stage.programs(3)
    await first.create("pool", 3)
    held = await first.enqueue("pool", 1)
    await second.enqueue("pool", 2)
    await third.enqueue("pool", 2)
    await first.withdraw(held)
    assert await stage.queue("pool") == ([second.id], [third.id])
    assert await _held(first) == 2


@behaviour("lasting")
async def the_whole_is_granted_only_when_nothing_is_held(stage: Stage) -> None:
    owner, whole, behind = await stage.programs(3)
    await owner.create("pool", 4)
    held = await owner.enqueue("pool", 1)
    exclusive = await whole.enqueue("pool", 4)
    shared = await behind.enqueue("pool", 1)
    assert (exclusive.place, shared.place) == (Place.WAITING, Place.WAITING)
    await owner.withdraw(held)
    await exclusive.granted()
    assert await stage.queue("pool") == ([whole.id], [behind.id])
    await whole.withdraw(exclusive)
    await shared.granted()


@behaviour()
async def a_mutex_is_shared_by_ones_and_owned_by_the_whole(stage: Stage) -> None:
    one, two, whole, last = await stage.programs(4)
    readers = [await program.enqueue("m", ephemeral=True) for program in (one, two)]
    assert [reader.place for reader in readers] == [Place.GRANTED] * 2
    assert await _held(one, "m") == 2
    writer = await whole.lock("m")
    late = await last.enqueue("m", ephemeral=True)
    assert (writer.place, late.place) == (Place.WAITING, Place.WAITING)
    for program, reader in zip((one, two), readers, strict=True):
        await program.withdraw(reader)
    await writer.granted()
    assert await _held(one, "m") == EPHEMERAL_LIMIT
    assert await stage.queue("m") == ([whole.id], [last.id])
    await whole.withdraw(writer)
    await late.granted()


@behaviour("lasting")
async def sums_are_exact_up_to_two_to_the_53_less_one(stage: Stage) -> None:
    one, two = await stage.programs(2)
    await one.create("pool", EXACT)
    large = await one.enqueue("pool", EXACT - 1)
    fits = await two.enqueue("pool", 1)
    too_much = await two.enqueue("pool", 1)
    assert [each.place for each in (large, fits, too_much)] == [
        Place.GRANTED,
        Place.GRANTED,
        Place.WAITING,
    ]
    assert await _held(one) == EXACT
    await two.withdraw(fits)
    await too_much.granted()
    assert await _held(one) == EXACT


@behaviour("lasting")
async def above_two_to_the_53_a_limit_is_no_bound_but_for_the_whole(stage: Stage) -> None:
    one, two, three = await stage.programs(3)
    for limit in (2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1):
        name = f"of {limit}"
        await one.create(name, limit)
        owned = [await one.enqueue(name, EXACT) for _ in range(3)]
        owned.append(await one.enqueue(name, 1))
        assert [each.place for each in owned] == [Place.GRANTED] * 4
        assert await _held(one, name) == 3 * EXACT + 1
        whole = await two.enqueue(name, limit)
        behind = await three.enqueue(name, 1)
        assert (whole.place, behind.place) == (Place.WAITING, Place.WAITING)
        for each in owned:
            await one.withdraw(each)
        await whole.granted()
        assert await _held(one, name) == limit
        assert await stage.queue(name) == ([two.id], [three.id])
        await two.withdraw(whole)
        await behind.granted()


@behaviour("lasting")
async def above_two_to_the_53_only_the_whole_may_be_requested(stage: Stage) -> None:
    program = await stage.program()
    for limit in (2**53 + 1, 2**64 - 1):
        name = f"of {limit}"
        await program.create(name, limit)
        for count in (2**53, limit - 1):
            with raises(InvalidArgument, f"{count} of {limit}"):
                await program.enqueue(name, count)
        assert await stage.queue(name) == ([], [])
    with raises(InvalidArgument):
        await program.enqueue("m", 2**64 - 2, ephemeral=True)


@behaviour("lasting")
async def a_count_may_be_anything_from_one_to_the_limit(stage: Stage) -> None:
    program = await stage.program()
    await program.create("pool", 3)
    for count in (1, 2, 3):
        request = await program.enqueue("pool", count)
        assert request.place is Place.GRANTED
        assert await _held(program) == count
        await program.withdraw(request)
    for count in (0, -1, 4, 2**64):
        with raises(InvalidArgument, f"count {count}"):
            await program.enqueue("pool", count)
    assert await stage.queue("pool") == ([], [])
