"""The queue: FIFO order, one handover at a time, with rising order ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tenure.engines.contract import Place
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT, NodeConfig
from tenure.testing.clock import VirtualClock
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import Program, ProgramRequest, answer_of
from tenure.testing.stage import Stage


def _rise(order_ids: Sequence[int | None]) -> None:
    known = [each for each in order_ids if each is not None]
    assert len(known) == len(order_ids), "every request has an order id"
    assert known == sorted(set(known)), f"order ids rise strictly: {known}"
    assert all(0 < each < 2**53 for each in known), f"order ids are exact everywhere: {known}"


@behaviour()
async def what_is_free_is_granted_at_once(stage: Stage) -> None:
    program = await stage.program()
    held = await program.lock("m")
    assert held.place is Place.GRANTED
    if stage.capabilities.fencing:
        assert held.order_id is not None
    assert await program.queue("m") == ([program.id], [])


@behaviour()
async def who_comes_second_waits_and_is_granted_after_the_release(stage: Stage) -> None:
    owner, second = await stage.programs(2)
    held, waiting = await owner.lock("m"), await second.lock("m")
    assert waiting.place is Place.WAITING
    assert await owner.queue("m") == ([owner.id], [second.id])
    await owner.withdraw(held)
    await waiting.granted()
    assert await owner.queue("m") == ([second.id], [])


@behaviour()
async def two_programs_on_one_connection_meet_like_any_others(stage: Stage) -> None:
    engine = await stage.engine()
    owner, second = [await stage.program(engine=engine) for _ in range(2)]
    held, waiting = await owner.lock("m"), await second.lock("m")
    assert (held.place, waiting.place) == (Place.GRANTED, Place.WAITING)
    await owner.withdraw(held)
    await waiting.granted()
    assert await owner.queue("m") == ([second.id], [])


@behaviour()
async def grants_are_handed_out_in_the_order_of_the_queue(stage: Stage) -> None:
    engines = [await stage.engine() for _ in range(3)]
    programs = [await stage.program(engine=engines[n % 3]) for n in range(12)]
    requests = [await program.lock("m") for program in programs]
    assert await stage.queue("m") == (
        [programs[0].id],
        [program.id for program in programs[1:]],
    )
    for number, request in enumerate(requests):
        await request.granted()
        assert await stage.queue("m") == (
            [programs[number].id],
            [program.id for program in programs[number + 1 :]],
        )
        await programs[number].withdraw(request)
    if stage.capabilities.fencing:
        _rise([request.order_id for request in requests])


@behaviour("fencing")
async def a_request_has_a_place_in_its_queue(stage: Stage) -> None:
    if not stage.capabilities.waiter_order:
        return
    programs = await stage.programs(4)
    requests = [await program.lock("m") for program in programs]

    async def places() -> list[int | None]:
        known = [request.order_id for request in requests if request.order_id is not None]
        assert len(known) == len(requests)
        return [await programs[3].session.position("m", each) for each in known]

    assert await places() == [0, 1, 2, 3]
    await programs[1].withdraw(requests[1])
    assert await places() == [0, None, 1, 2]
    await programs[0].withdraw(requests[0])
    await requests[2].granted()
    assert await places() == [None, None, 0, 1]
    await programs[2].withdraw(requests[2])
    await requests[3].granted()
    await programs[3].withdraw(requests[3])
    assert await places() == [None] * 4  # nor is there a semaphore


@behaviour()
async def a_grant_is_reported_only_to_its_session(stage: Stage) -> None:
    owner, first, second = await stage.programs(3)
    held = await owner.lock("m")
    ahead, behind = await first.lock("m"), await second.lock("m")
    await owner.withdraw(held)
    await ahead.granted()
    await stage.settle()
    assert behind.request_id not in second.recorder.grants
    assert held.request_id not in owner.recorder.grants


@behaviour()
async def a_waiter_that_withdraws_is_never_granted(stage: Stage) -> None:
    owner, leaver, last = await stage.programs(3)
    held = await owner.lock("m")
    left, waiting = await leaver.lock("m"), await last.lock("m")
    await leaver.withdraw(left)
    assert await stage.queue("m") == ([owner.id], [last.id])
    await owner.withdraw(held)
    await waiting.granted()
    assert not leaver.recorder.grants
    assert not leaver.recorder.removals


@behaviour()
async def two_requests_of_one_session_are_two_requests(stage: Stage) -> None:
    program, other = await stage.programs(2)
    first = await program.lock("m", data=b"1")
    second = await program.lock("m", data=b"2")
    third = await other.lock("m")
    assert (first.place, second.place) == (Place.GRANTED, Place.WAITING)
    assert await stage.queue("m") == ([program.id], [program.id, other.id])
    await program.withdraw(first)
    await second.granted()
    assert await stage.queue("m") == ([program.id], [other.id])
    await program.withdraw(second)
    await third.granted()


@behaviour()
async def hold_numbers_are_the_callers_to_choose(stage: Stage) -> None:
    one, two = await stage.programs(2)
    numbers = [7, 1, 2**31 + 5, 2**53 - 1, 0]
    for program in (one, two):  # equal ids in two sessions are different requests
        for number in numbers:
            await program.enqueue(f"of {number}", ephemeral=True, request_id=number)
    for number, request in zip(numbers, one.requests, strict=True):
        await one.withdraw(request)
        assert await stage.queue(f"of {number}") == ([two.id], [])


@behaviour()
async def the_lock_is_never_in_two_hands(stage: Stage) -> None:
    programs = [await stage.program() for _ in range(5)]
    inside: list[int] = []
    order: list[int | None] = []

    async def work(program: Program) -> None:
        for _ in range(6):
            request = await program.lock("m")
            order_id = await request.granted()
            assert not inside
            inside.append(program.id)
            order.append(order_id)
            await asyncio.sleep(0)
            inside.remove(program.id)
            await program.withdraw(request)

    async with asyncio.TaskGroup() as group:
        for program in programs:
            group.create_task(work(program))
    assert len(order) == 30
    if stage.capabilities.fencing:
        _rise(order)
    assert await stage.queue("m") == ([], [])


@behaviour()
async def a_withdrawal_that_crosses_its_grant_leaks_nothing(stage: Stage) -> None:
    owner, waiter, last = await stage.programs(3)
    for turns in range(10):
        held = await owner.lock("m")
        waiting = await waiter.lock("m")

        async def leave(request: ProgramRequest = waiting, turns: int = turns) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await waiter.withdraw(request)

        async with asyncio.TaskGroup() as group:
            group.create_task(leave())
            group.create_task(owner.withdraw(held))
        assert await stage.queue("m") == ([], [])
        final = await last.lock("m", timeout=0)
        assert final.place is Place.GRANTED
        await last.withdraw(final)


# Fencing tokens


@behaviour("fencing")
async def order_ids_rise_over_semaphores_nodes_sessions_and_connections(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    engine = await stage.engine()
    programs = [
        await stage.program(),
        await stage.program("/n"),
        await stage.program(engine=engine),
        await stage.program("/n", engine=engine),
    ]
    order_ids: list[int | None] = []
    for name in ("a", "b", "a"):
        for program in programs:
            request = await program.enqueue(name, ephemeral=True)
            order_ids.append(request.order_id)
    _rise(order_ids)


@behaviour("fencing")
async def an_order_id_is_never_used_again(stage: Stage) -> None:
    await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    order_ids: list[int | None] = []
    for _ in range(3):
        program = await stage.program("/n")
        for _ in range(3):
            request = await program.lock("m")
            order_ids.append(request.order_id)
            await program.withdraw(request)
        await stage.disconnect(program.engine)
        await stage.eye.drop_node("/n", force=True)
        await stage.eye.create_node("/n", NodeConfig(), exist_ok=False)
    _rise(order_ids)


@behaviour("fencing")
async def refused_and_withdrawn_requests_leave_the_order_rising(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    order_ids: list[int | None] = []
    for _ in range(3):
        held = await owner.lock("m")
        order_ids.append(held.order_id)
        assert (await other.lock("m", timeout=0)).order_id is None
        waiting = await other.lock("m")
        if stage.capabilities.waiter_order:
            order_ids.append(waiting.order_id)
        await other.withdraw(waiting)
        await owner.withdraw(held)
    _rise(order_ids)


@behaviour("fencing", "virtual")
async def order_ids_rise_although_the_wall_clock_is_set_back(stage: Stage) -> None:
    assert isinstance(stage.clock, VirtualClock)
    order_ids: list[int | None] = []
    for seconds in (0, 5000, -10_000_000, 1):
        stage.clock.set_wall(stage.clock.wall() + seconds)
        for program in await stage.programs(2):
            order_ids.extend([(await program.lock(f"m{n}")).order_id for n in range(3)])
    _rise(order_ids)


@behaviour("fencing")
async def the_order_id_of_a_grant_is_that_of_the_description(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held, waiting = await owner.lock("m"), await waiter.lock("m")
    found = await owner.describe("m")
    assert [each.order_id for each in found.owners] == [held.order_id]
    before = [each.order_id for each in found.waiters]
    await owner.withdraw(held)
    assert [await waiting.granted()] == before
    [owning] = (await owner.describe("m")).owners
    assert owning.order_id == waiting.order_id


# Answers


@behaviour()
async def operations_take_effect_in_the_order_in_which_they_were_called(stage: Stage) -> None:
    program = await stage.program()
    whole = EPHEMERAL_LIMIT
    first = program.send("m", whole, ephemeral=True)
    second = program.send("m", whole, ephemeral=True)
    left = [program.send_withdrawal(first)]
    third = program.send("m", whole, ephemeral=True)
    left.append(program.send_withdrawal(third))
    fourth = program.send("m", whole, ephemeral=True, timeout=0)
    left.append(program.send_withdrawal(second))
    fifth = program.send("m", whole, ephemeral=True, timeout=0)
    for request in program.requests:
        await request.answered()
    for answer in left:
        await answer_of(answer)
    assert [request.place for request in (first, second, third, fourth, fifth)] == [
        Place.GRANTED,
        Place.WAITING,
        Place.WAITING,
        Place.REFUSED,
        Place.GRANTED,
    ]
    assert await stage.queue("m") == ([program.id], [])


@behaviour()
async def who_no_longer_wants_the_answer_does_not_stop_the_request(stage: Stage) -> None:
    program, other = await stage.programs(2)
    request = program.send("m", ephemeral=True)
    if isinstance(request.answer, asyncio.Future):
        request.answer.cancel()

    async def joined() -> bool:
        return await stage.queue("m") == ([program.id], [])

    await stage.until(joined, "a request is carried out although its answer is not needed")

    answer = program.send_withdrawal(request)
    if isinstance(answer, asyncio.Future):
        answer.cancel()

    mine = await other.lock("m")
    await mine.granted()


@behaviour()
async def a_request_whose_answer_was_never_seen_can_be_withdrawn(stage: Stage) -> None:
    program, other = await stage.programs(2)
    for _ in range(5):
        request = program.send("m", ephemeral=True)
        if isinstance(request.answer, asyncio.Future):
            request.answer.cancel()
        await program.withdraw(request)
        assert await stage.queue("m") == ([], [])
    assert (await other.lock("m", timeout=0)).place is Place.GRANTED
    assert [each.id for each in await stage.eye.list_sessions(DEFAULT_NODE)] == [
        program.id,
        other.id,
    ]
