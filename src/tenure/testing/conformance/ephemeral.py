"""Ephemeral semaphores: created by their first request, and deleted with their last one."""

from __future__ import annotations

from tenure.engines.contract import Place
from tenure.errors import InvalidArgument, SemaphoreNotFound
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import raises
from tenure.testing.stage import Stage


async def _is_empty(stage: Stage) -> bool:
    return not await stage.eye.list_semaphores(DEFAULT_NODE, owners=True, waiters=True)


@behaviour()
async def an_ephemeral_semaphore_comes_with_its_first_request(stage: Stage) -> None:
    program, other = await stage.programs(2)
    await program.enqueue("m", 3, ephemeral=True)
    found = await other.describe("m")
    assert (found.name, found.limit, found.data) == ("m", EPHEMERAL_LIMIT, b"")
    assert (found.held, found.ephemeral) == (3, True)


@behaviour()
async def an_ephemeral_semaphore_goes_with_its_last_request(stage: Stage) -> None:
    one, two = await stage.programs(2)
    held, waiting = await one.lock("m"), await two.lock("m")
    await one.withdraw(held)
    await waiting.granted()
    assert (await one.describe("m")).ephemeral
    await two.withdraw(waiting)
    with raises(SemaphoreNotFound):
        await one.describe("m")
    assert await _is_empty(stage)


@behaviour()
async def an_ephemeral_semaphore_goes_with_the_session_that_used_it(stage: Stage) -> None:
    closed, ended, expired = await stage.programs(2) + [await stage.program(window=1.0)]
    for number, program in enumerate((closed, ended, expired)):
        await program.lock(f"m{number}")
        await program.lock(f"m{number}")
    await closed.close()
    await stage.eye.end_session(DEFAULT_NODE, ended.id)
    await expired.ended()
    if not stage.capabilities.one_step:
        await stage.until(lambda: _is_empty(stage), "all of a session goes")
    assert await _is_empty(stage)


@behaviour()
async def an_ephemeral_semaphore_goes_although_a_waiter_was_the_last_to_leave(
    stage: Stage,
) -> None:
    owner, waiter = await stage.programs(2)
    held = await owner.lock("m")
    waiting = await waiter.lock("m")
    await waiter.withdraw(waiting)
    assert (await owner.describe("m")).ephemeral
    await owner.withdraw(held)
    assert await _is_empty(stage)


@behaviour()
async def a_new_ephemeral_semaphore_knows_nothing_of_the_old_one(stage: Stage) -> None:
    program = await stage.program()
    held = await program.lock("m")
    if stage.capabilities.data:
        await program.session.update_semaphore("m", b"old")
        assert (await program.describe("m")).data == b"old"
    await program.withdraw(held)
    await program.lock("m")
    assert (await program.describe("m")).data == b""


@behaviour()
async def an_ephemeral_semaphore_in_use_cannot_be_used_as_a_lasting_one(
    stage: Stage,
) -> None:
    owner, other = await stage.programs(2)
    await owner.lock("m")
    for timeout in (None, 0):
        with raises(InvalidArgument, f"enqueue with timeout {timeout}"):
            await other.enqueue("m", timeout=timeout, ephemeral=False)
    assert await stage.queue("m") == ([owner.id], [])


@behaviour("lasting")
async def an_ephemeral_semaphore_in_use_cannot_be_created_as_a_lasting_one(stage: Stage) -> None:
    owner, other = await stage.programs(2)
    held = await owner.lock("m")
    for exist_ok in (False, True):
        for limit in (1, EPHEMERAL_LIMIT):
            with raises(InvalidArgument, f"create with limit {limit}"):
                await other.session.create_semaphore("m", limit, b"", exist_ok=exist_ok)
    assert (await other.describe("m")).ephemeral
    await owner.withdraw(held)
    await other.create("m", 1)
    assert not (await other.describe("m")).ephemeral


@behaviour("lasting")
async def a_lasting_semaphore_cannot_be_used_as_an_ephemeral_one(stage: Stage) -> None:
    maker, other = await stage.programs(2)
    for name, limit in (("pool", 1), ("wide", EPHEMERAL_LIMIT)):
        await maker.create(name, limit)
        for timeout in (None, 0):
            with raises(InvalidArgument, f"{name} with timeout {timeout}"):
                await other.enqueue(name, timeout=timeout, ephemeral=True)
        assert await stage.queue(name) == ([], [])
        assert not (await maker.describe(name)).ephemeral


@behaviour()
async def an_ephemeral_semaphore_admits_one_owner_of_the_whole(stage: Stage) -> None:
    programs = await stage.programs(3)
    requests = [await program.lock("m") for program in programs]
    assert [each.place for each in requests] == [Place.GRANTED, Place.WAITING, Place.WAITING]
    assert (await programs[0].describe("m")).held == EPHEMERAL_LIMIT


@behaviour()
async def an_ephemeral_semaphore_admits_any_number_of_ones(stage: Stage) -> None:
    programs = await stage.programs(4)
    for number, program in enumerate(programs):
        request = await program.enqueue("services", data=b"%d" % number, ephemeral=True)
        assert request.place is Place.GRANTED
    found = await programs[0].describe("services")
    assert found.held == 4
    assert [each.session_id for each in found.owners] == [program.id for program in programs]
    if stage.capabilities.data:
        assert [each.data for each in found.owners] == [b"0", b"1", b"2", b"3"]
