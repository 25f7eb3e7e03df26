"""Descriptions: their contents; an engine may omit facts that its store does not know."""

from __future__ import annotations

import asyncio

from tenure.engines.contract import Place
from tenure.errors import InvalidArgument, SemaphoreNotFound
from tenure.model import DEFAULT_NODE, Capabilities, SemaphoreDescription
from tenure.testing.conformance.behaviour import behaviour
from tenure.testing.program import raises
from tenure.testing.stage import Stage


@behaviour()
async def an_engine_has_a_url_a_clock_and_capabilities(stage: Stage) -> None:
    assert "://" in stage.eye.url
    assert stage.eye.clock is stage.clock
    assert isinstance(stage.eye.capabilities, Capabilities)


@behaviour()
async def a_store_returns_its_wall_clock_in_seconds_since_1970(stage: Stage) -> None:
    before = stage.clock.wall()
    times = [await stage.eye.store_time() for _ in range(3)]
    after = stage.clock.wall()
    # The stores of a conformance run are on this machine, so the wall clocks agree.
    assert times == sorted(times)
    assert before - 1 <= times[0]
    assert times[-1] <= after + 1


@behaviour("lasting")
async def owners_and_waiters_are_described_in_the_order_of_the_queue(stage: Stage) -> None:
    programs = await stage.programs(6)
    await programs[0].create("pool", 4, b"data")
    counts = [1, 1, 2, 3, 1, 4]
    requests = [
        await program.enqueue("pool", count, data=b"of %d" % program.id)
        for program, count in zip(programs, counts, strict=True)
    ]
    found = await programs[5].describe("pool")
    described = [*found.owners, *found.waiters]
    assert (len(found.owners), len(found.waiters)) == (3, 3)
    assert [each.session_id for each in described] == [program.id for program in programs]
    assert [each.count for each in described] == counts
    if stage.capabilities.data:
        assert [each.data for each in described] == [b"of %d" % each.id for each in programs]
    if stage.capabilities.fencing:
        for each, request in zip(described, requests, strict=True):
            assert request.order_id in {each.order_id, None}
            assert request.order_id is not None or request.place is Place.WAITING
    assert found.held == 4
    assert found.waiting in {3, None}


@behaviour("lasting")
async def owners_and_waiters_are_described_only_if_requested(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.create("pool", 1)
    await owner.enqueue("pool")
    await waiter.enqueue("pool")
    for owners in (False, True):
        for waiters in (False, True):
            found = await owner.session.describe_semaphore("pool", owners=owners, waiters=waiters)
            assert [each.session_id for each in found.owners] == [owner.id] * owners
            assert [each.session_id for each in found.waiters] == [waiter.id] * waiters
            assert found.held == 1


@behaviour()
async def a_listed_semaphore_is_as_it_is_described(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m", data=b"mine")
    await waiter.lock("m", data=b"yours")
    [listed] = await stage.eye.list_semaphores(owner.node, owners=True, waiters=True)
    described = await owner.describe("m")
    for one, other in zip(
        (*listed.owners, *listed.waiters), (*described.owners, *described.waiters), strict=True
    ):
        assert (one.session_id, one.order_id, one.count, one.data) == (
            other.session_id,
            other.order_id,
            other.count,
            other.data,
        )
    assert (listed.name, listed.data, listed.limit, listed.held, listed.ephemeral) == (
        described.name,
        described.data,
        described.limit,
        described.held,
        described.ephemeral,
    )


@behaviour()
async def times_in_a_description_make_sense_where_they_are_known(stage: Stage) -> None:
    owner = await stage.program(window=100.0, description="who I am")
    waiter, patient = await stage.programs(2)
    began = stage.clock.now()
    await owner.lock("m")
    await waiter.lock("m", timeout=60.0)
    await patient.lock("m")
    found = await owner.describe("m")
    passed = stage.clock.now() - began
    [owning], [waiting, waiting_on] = found.owners, found.waiters
    for each in (owning, waiting, waiting_on):
        assert each.since is None or -1e-6 <= each.since <= passed + 1e-6
        assert each.since is not None or not stage.capabilities.since
        assert each.remaining is None or each.remaining > 0
    assert owning.remaining is None or owning.remaining <= 100.0 + 1e-6
    assert owning.timeout is None
    assert waiting_on.timeout is None
    assert waiting.timeout is None or 60.0 - passed - 1e-6 <= waiting.timeout <= 60.0 + 1e-6
    assert waiting.timeout is not None or not stage.capabilities.waiter_timeout
    assert owning.session_description in {"who I am", None}


@behaviour()
async def owners_and_waiters_are_described_with_what_their_sessions_say(stage: Stage) -> None:
    if not stage.capabilities.descriptions:
        return
    owner = await stage.program(description="one [host=db-1 pid=42 program=backup.py]")
    waiter = await stage.program(description="ü" * 512)
    silent = await stage.program()
    for program in (owner, waiter, silent):
        await program.lock("m")
    described = await owner.describe("m")
    [listed] = await stage.eye.list_semaphores(owner.node, owners=True, waiters=True)
    alone = await stage.eye.describe_semaphore(owner.node, "m", owners=True, waiters=True)
    expected = ["one [host=db-1 pid=42 program=backup.py]", "ü" * 512, ""]
    for found in (described, listed, alone):
        requests = (*found.owners, *found.waiters)
        assert [each.session_description for each in requests] == expected


@behaviour()
async def many_waiters_are_described_with_what_their_sessions_say(stage: Stage) -> None:
    if not stage.capabilities.descriptions:
        return
    engine = await stage.engine()
    texts = [f"program {number}" for number in range(130)]
    for each in texts:
        await (await stage.program(description=each, engine=engine)).lock("m")
    found = await stage.eye.describe_semaphore(DEFAULT_NODE, "m", owners=True, waiters=True)
    assert [each.session_description for each in (*found.owners, *found.waiters)] == texts


@behaviour()
async def one_semaphore_is_described_without_a_session(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    await owner.lock("m", data=b"mine")
    await waiter.lock("m", data=b"yours")
    await waiter.lock("another")
    known = stage.capabilities.owners
    listed, *_ = [
        each
        for each in await stage.eye.list_semaphores(owner.node, owners=known, waiters=known)
        if each.name == "m"
    ]
    found = await stage.eye.describe_semaphore(owner.node, "m", owners=known, waiters=known)
    assert _facts(found) == _facts(listed)
    bare = await stage.eye.describe_semaphore(owner.node, "m", owners=False, waiters=False)
    assert (bare.owners, bare.waiters) == ((), ())
    assert (bare.name, bare.held, bare.limit) == (found.name, found.held, found.limit)


def _facts(found: SemaphoreDescription) -> object:
    """Return the facts of a description that do not change with time."""
    requests = [(each.session_id, each.order_id, each.data) for each in found.owners]
    waiting = [(each.session_id, each.order_id, each.data) for each in found.waiters]
    return (found.name, found.data, found.limit, found.held, requests, waiting)


@behaviour()
async def what_does_not_exist_is_not_described(stage: Stage) -> None:
    with raises(SemaphoreNotFound, "m") as caught:
        await stage.eye.describe_semaphore(DEFAULT_NODE, "m", owners=False, waiters=False)
    assert (caught.error.node, caught.error.name) == (DEFAULT_NODE, "m")
    with raises(InvalidArgument, "a name without an end"):
        await stage.eye.describe_semaphore(DEFAULT_NODE, "x" * 1025, owners=False, waiters=False)


@behaviour("virtual", "since")
async def an_owner_owns_since_its_grant_and_a_waiter_waits_since_it_came(stage: Stage) -> None:
    owner, waiter = await stage.programs(2)
    held = await owner.lock("m")
    await asyncio.sleep(5)
    waiting = await waiter.lock("m", timeout=30)
    await asyncio.sleep(3)
    found = await owner.describe("m")
    _check_about(found.owners[0].since, 8)
    _check_about(found.waiters[0].since, 3)
    if stage.capabilities.waiter_timeout:
        _check_about(found.waiters[0].timeout, 27)
    await owner.withdraw(held)
    await waiting.granted()
    await asyncio.sleep(2)
    [owning] = (await owner.describe("m")).owners
    _check_about(owning.since, 2)
    assert owning.timeout is None


def _check_about(seconds: float | None, expected: float) -> None:
    assert seconds is not None
    assert abs(seconds - expected) < 1e-3
