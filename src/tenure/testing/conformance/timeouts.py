"""Requests with a timeout."""

from __future__ import annotations

import asyncio
import contextlib

from tenure.engines.contract import Place, Removal
from tenure.errors import LeaseReleased
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import answer_of, raises
from tenure.testing.stage import Stage

SOON = 0.05

PROMPT = 5.0
"""Maximum seconds after its timeout until a waiter leaves, generous for a busy machine."""


@behaviour()
async def a_request_that_does_not_wait_is_granted_if_it_can_be(stage: Stage) -> None:
    program = await stage.program()
    request = await program.lock("m", timeout=0)
    assert request.place is Place.GRANTED
    if stage.capabilities.fencing:
        assert request.order_id is not None
    assert await stage.queue("m") == ([program.id], [])


@behaviour()
async def a_request_that_does_not_wait_never_joins_the_queue(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    held = await owner.lock("m")
    for program in (owner, other):
        refused = await program.lock("m", timeout=0)
        assert (refused.place, refused.order_id) == (Place.REFUSED, None)
        with raises(LeaseReleased):
            await program.alter(refused, data=b"still here?")
        await program.withdraw(refused)
    assert await stage.queue("m") == ([owner.id], [])
    await owner.withdraw(held)
    assert await stage.queue("m") == ([], [])
    assert not other.recorder.grants
    assert not other.recorder.removals


@behaviour("lasting")
async def a_request_that_does_not_wait_never_goes_past_one_that_does(stage: Stage) -> None:
    owner, waiter, other = await stage.programs(3)
    await owner.create("pool", 3)
    await owner.enqueue("pool", 2)
    await waiter.enqueue("pool", 2)
    for program in (owner, waiter, other):
        assert (await program.enqueue("pool", 1, timeout=0)).place is Place.REFUSED
    assert await stage.queue("pool") == ([owner.id], [waiter.id])


@behaviour("lasting")
async def a_request_that_does_not_wait_is_granted_beside_others_if_it_fits(stage: Stage) -> None:
    one, two = await stage.programs(2)
    await one.create("pool", 3)
    places = [(await each.enqueue("pool", 1, timeout=0)).place for each in (one, two, one, two)]
    assert places == [Place.GRANTED, Place.GRANTED, Place.GRANTED, Place.REFUSED]


@behaviour()
async def a_waiter_leaves_when_its_time_is_over(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m")
    began = stage.clock.now()
    waiting = await waiter.lock("m", timeout=SOON)
    assert waiting.place is Place.WAITING
    assert await waiting.removed() == Removal.TIMED_OUT
    assert SOON - 1e-6 <= stage.clock.now() - began < SOON + PROMPT
    assert await stage.queue("m") == ([owner.id], [])
    with raises(LeaseReleased):
        await waiter.alter(waiting, data=b"still here?")
    await waiter.withdraw(waiting)
    assert not waiter.recorder.grants


@behaviour()
async def a_waiter_that_timed_out_is_passed_over(stage: Stage) -> None:
    owner, impatient, patient = await stage.programs(3)
    held = await owner.lock("m")
    timed_out = await impatient.lock("m", timeout=SOON)
    waiting = await patient.lock("m")
    await timed_out.removed()
    assert await stage.queue("m") == ([owner.id], [patient.id])
    await owner.withdraw(held)
    await waiting.granted()
    assert not impatient.recorder.grants


@behaviour("lasting")
async def a_waiter_behind_one_that_timed_out_is_granted_if_it_fits(stage: Stage) -> None:
    owner, large, small = await stage.programs(3)
    await owner.create("pool", 3)
    await owner.enqueue("pool", 1)
    blocking = await large.enqueue("pool", 3, timeout=SOON)
    waiting = await small.enqueue("pool", 1)
    if waiting.place is Place.WAITING:  # otherwise the machine is very slow
        await waiting.granted()
    assert await blocking.removed() == Removal.TIMED_OUT
    assert await stage.queue("pool") == ([owner.id, small.id], [])


@behaviour("lasting")
async def a_detached_waiter_whose_timeout_has_passed_does_not_block_its_queue(
    stage: Stage,
) -> None:
    owner, other = await stage.programs(2)
    await owner.create("pool", 2)
    await owner.enqueue("pool", 1)
    lost = await stage.program()
    assert (await lost.enqueue("pool", 2, timeout=4 * SOON)).place is Place.WAITING
    await lost.detach()
    waiting = await other.enqueue("pool", 1)
    if waiting.place is Place.WAITING:  # otherwise the machine is very slow
        await waiting.granted()
    assert await stage.queue("pool") == ([owner.id, other.id], [])


@behaviour("lasting")
async def a_detached_waiter_whose_timeout_has_passed_is_not_waited_behind(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    await owner.create("pool", 2)
    await owner.enqueue("pool", 1)
    lost = await stage.program()
    assert (await lost.enqueue("pool", 2, timeout=SOON)).place is Place.WAITING
    await lost.detach()

    async def is_granted_at_once() -> bool:
        return (await other.enqueue("pool", 1, timeout=0)).place is Place.GRANTED

    await stage.until(is_granted_at_once, "the late waiter has left")
    assert await stage.queue("pool") == ([owner.id, other.id], [])


@behaviour()
async def the_time_to_wait_is_over_with_the_grant(stage: Stage) -> None:
    owner, waiter, sentinel = await stage.programs(3)
    held = await owner.lock("m")
    waiting = await waiter.lock("m", timeout=5 * SOON)
    await owner.withdraw(held)
    await waiter.recorder.wait_for(
        lambda recorder: (
            waiting.request_id in recorder.grants or waiting.request_id in recorder.removals
        ),
        "an answer",
    )
    granted = waiting.request_id in waiter.recorder.grants  # otherwise the machine is very slow
    at_once = await owner.lock("another", timeout=5 * SOON)
    later = await sentinel.lock("another", timeout=10 * SOON)
    await later.removed()
    assert await stage.queue("m") == ([waiter.id] * granted, [])
    assert at_once.request_id not in owner.recorder.removals
    assert await stage.queue("another") == ([owner.id], [])


@behaviour()
async def each_waiter_has_its_own_time(stage: Stage) -> None:
    owner, one, two, three = await stage.programs(4)
    await owner.lock("m")
    waiting = [
        await one.lock("m", timeout=3 * SOON),
        await two.lock("m", timeout=SOON),
        await three.lock("m", timeout=2 * SOON),
    ]
    for request in waiting:
        assert await request.removed() == Removal.TIMED_OUT
    assert await stage.queue("m") == ([owner.id], [])


@behaviour()
async def a_request_is_granted_or_times_out_and_never_both(stage: Stage) -> None:
    owner = await stage.program()
    engine = await stage.engine()
    others = [await stage.program(engine=engine) for _ in range(10)]
    held = await owner.lock("m")
    waiting = [
        await other.lock("m", timeout=SOON + 0.004 * number) for number, other in enumerate(others)
    ]
    await asyncio.sleep(SOON + 0.01)
    await owner.withdraw(held)
    for request in waiting:
        recorder = request.program.recorder
        number = request.request_id
        await recorder.wait_for(
            lambda recorder: number in recorder.grants or number in recorder.removals,  # noqa: B023  awaited here
            "a grant or the end of the time",
        )
        if request.request_id in recorder.grants:
            await request.program.withdraw(request)
    for request in waiting:
        recorder = request.program.recorder
        assert (request.request_id in recorder.grants) != (request.request_id in recorder.removals)
    assert await stage.queue("m") == ([], [])


@behaviour()
async def a_try_for_a_new_mutex_that_is_withdrawn_leaves_nothing(stage: Stage) -> None:
    program = await stage.program()
    request = await program.lock("m", timeout=0)
    await program.withdraw(request)
    assert not await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)


# Replacing a timeout


@behaviour()
async def a_waiter_with_a_shorter_timeout_times_out_sooner(stage: Stage) -> None:
    owner, waiter, other = await stage.programs(3)
    await owner.lock("m")
    for timeout in (None, 3600.0):
        waiting = await waiter.lock("m", timeout=timeout)
        await other.lock("m")
        began = stage.clock.now()
        await waiter.alter(waiting, timeout=SOON)
        assert await waiting.removed() == Removal.TIMED_OUT
        assert SOON - 1e-6 <= stage.clock.now() - began < SOON + PROMPT
    assert await stage.queue("m") == ([owner.id], [other.id, other.id])
    assert not waiter.recorder.grants


@behaviour()
async def a_waiter_that_is_given_more_time_keeps_its_place(stage: Stage) -> None:
    owner, first, second, sentinel = await stage.programs(4)
    held = await owner.lock("m")
    timeout = 10 * SOON
    while True:
        waiting = await first.lock("m", timeout=timeout)
        behind = await second.lock("m", timeout=timeout)
        try:
            await first.alter(waiting, timeout=None)
            await second.alter(behind, timeout=3600)
            break
        except LeaseReleased:  # the machine is very slow, and one has timed out
            await first.withdraw(waiting)
            await second.withdraw(behind)
            timeout *= 2
    await (await sentinel.lock("m", timeout=timeout + SOON)).removed()
    assert await stage.queue("m") == ([owner.id], [first.id, second.id])
    await owner.withdraw(held)
    await waiting.granted()
    await first.withdraw(waiting)
    await behind.granted()


@behaviour("data")
async def a_timeout_that_is_not_mentioned_is_left_alone(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m")
    waiting = await waiter.lock("m", timeout=5 * SOON)
    with contextlib.suppress(LeaseReleased):  # the machine is very slow, and it has timed out
        await waiter.alter(waiting, data=b"changed")
    assert await waiting.removed() == Removal.TIMED_OUT
    assert await stage.queue("m") == ([owner.id], [])


@behaviour("lasting")
async def a_waiter_left_without_time_goes_at_once_and_those_behind_it_move_up(
    stage: Stage,
) -> None:
    owner, large, small = await stage.programs(3)
    await owner.create("pool", 3)
    await owner.enqueue("pool", 1)
    blocking, waiting = await large.enqueue("pool", 3), await small.enqueue("pool", 1)
    await large.alter(blocking, timeout=0)
    assert await blocking.removed() == Removal.TIMED_OUT
    await waiting.granted()
    assert await stage.queue("pool") == ([owner.id, small.id], [])
    with raises(LeaseReleased):
        await large.alter(blocking, timeout=None)
    assert not large.recorder.grants


@behaviour("lasting")
async def a_waiter_left_without_time_is_granted_if_what_it_wants_now_fits(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    await owner.create("pool", 3)
    await owner.enqueue("pool", 2)
    waiting = await other.enqueue("pool", 3)
    await other.alter(waiting, count=1, timeout=0)
    await waiting.granted()
    assert await stage.queue("pool") == ([owner.id, other.id], [])
    assert not other.recorder.removals


@behaviour()
async def an_owner_does_not_mind_a_timeout(stage: Stage) -> None:
    owner, sentinel = await stage.programs(2)
    held = await owner.lock("m")
    for timeout in (SOON, 0, None, SOON):
        await owner.alter(held, timeout=timeout)
    await (await sentinel.lock("m", timeout=2 * SOON)).removed()
    assert await stage.queue("m") == ([owner.id], [])
    assert not owner.recorder.removals


@behaviour()
async def a_request_may_be_withdrawn_at_once_after_it_was_sent(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held = await owner.lock("m")
    waiting = waiter.send("m", EPHEMERAL_LIMIT, ephemeral=True)
    changed = waiter.send_change(waiting, timeout=0)
    assert (await waiting.answered()).place is Place.WAITING
    await answer_of(changed)
    assert await waiting.removed() == Removal.TIMED_OUT
    await owner.withdraw(held)
    assert await stage.queue("m") == ([], [])
    assert not waiter.recorder.grants


@behaviour("waiter_timeout")
async def a_description_has_the_latest_timeout_of_a_waiter(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m")
    waiting = await waiter.lock("m", timeout=3600)
    for timeout in (None, 100.0, 1000.0, 60.0):
        began = stage.clock.now()
        await waiter.alter(waiting, timeout=timeout)
        [found] = (await owner.describe("m")).waiters
        if timeout is None:
            assert found.timeout is None
        else:
            passed = stage.clock.now() - began
            assert found.timeout is not None
            assert timeout - passed - 1e-6 <= found.timeout <= timeout + 1e-6


@behaviour("virtual")
async def a_replaced_timeout_counts_from_its_replacement(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m")
    waiting = await waiter.lock("m", timeout=10)
    began = stage.clock.now()
    for _ in range(5):
        await asyncio.sleep(6)
        await waiter.alter(waiting, timeout=7.5)
    await waiting.removed()
    assert abs(stage.clock.now() - began - 37.5) < 1e-3


@behaviour("virtual")
async def a_waiter_waits_exactly_as_long_as_it_said(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m")
    began = stage.clock.now()
    waiting = await waiter.lock("m", timeout=12.5)
    await waiting.removed()
    assert abs(stage.clock.now() - began - 12.5) < 1e-3


@behaviour("virtual")
async def a_waiter_without_a_timeout_waits_for_an_hour(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held = await owner.lock("m")
    forever = await waiter.lock("m")
    for _ in range(60):
        await asyncio.sleep(60)
        owner.session.renew()
        waiter.session.renew()
    assert await stage.queue("m") == ([owner.id], [waiter.id])
    await owner.withdraw(held)
    await forever.granted()
