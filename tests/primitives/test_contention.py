"""A timeout names the holder, in a bounded time, or says how to find out."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import pickle
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tenure._client.waits import MOST_READINGS
from tenure.errors import AcquireTimeout, EngineError
from tenure.identity import this_program
from tenure.model import EPHEMERAL_LIMIT, Capabilities, RequestDescription, SemaphoreDescription
from tenure.testing import VirtualClock
from tests.primitives.helpers import World, turns

me = this_program()
ME = f"{me.program}, pid {os.getpid()} on {me.host}"


async def said(acquiring: Awaitable[object]) -> str:
    with pytest.raises(AcquireTimeout) as late:
        await acquiring
    assert late.value.__cause__ is late.value.__context__ is None
    said = str(late.value).partition("; ")[2]
    said = said.replace("; the calling task or thread holds it itself", "")
    return re.sub(r", acquired at \S+:\d+", "", said)


async def test_a_timeout_names_the_holder_since_when_and_how_many_wait(world: World) -> None:
    async with world.client() as client, world.client() as other, world.client() as third:
        async with other.mutex("m").lock():
            first = asyncio.create_task(third.mutex("m").lock())
            await turns()
            assert (
                await said(client.mutex("m").lock(timeout=3)) == f"held by {ME}, for 3.0 s; 1 waits"
            )
            second = asyncio.create_task(third.mutex("m").lock())
            await turns()
            told = await said(client.mutex("m").lock(timeout=60))
            assert told == f"held by {ME}, for 63 s; 2 wait"
            assert await said(client.mutex("m").lock(timeout=0)) == told
        await (await first).release()
        await (await second).release()


@pytest.mark.parametrize(
    ("since", "told"),
    [
        (None, ""),
        (0.04, ", for 0.0 s"),
        (9.6, ", for 10 s"),
        (119, ", for 119 s"),
        (120, ", for 2 min"),
        (7200, ", for 2 h"),
        (200_000, ", for 2 d"),
    ],
)
async def test_a_time_is_told_in_one_unit(world: World, since: float | None, told: str) -> None:
    client, engine = world.slow()
    asking = engine.operate

    def alter(kind: str, operation: Callable[[], Any]) -> Any:
        if kind != "describe":
            return asking(kind, operation)
        answer = asyncio.get_running_loop().create_future()
        owner = RequestDescription(77, 1, 1, b"", since=since)
        answer.set_result(SemaphoreDescription("m", b"", 1, 1, True, (owner,)))
        return answer

    engine.operate = alter  # type: ignore[method-assign]
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("m").lock(),
    ):
        assert await said(session.mutex("m").lock(timeout=1)) == f"held by session 77{told}"


async def test_the_owners_of_a_semaphore_are_counted(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = other.semaphore("s")
        await pool.create(limit=3)
        async with pool.acquire(2), pool.acquire():
            told = await said(client.semaphore("s").acquire(timeout=1))
            assert told == f"held by {ME}, for 1.0 s, and 1 more (3 of 3)"


async def test_a_program_that_waits_for_itself_is_told_so(world: World) -> None:
    async with world.client() as client, client.session() as session, session.mutex("m").lock():
        assert await said(session.mutex("m").lock(timeout=1)) == ("held by this session, for 1.0 s")


async def test_a_candidate_learns_who_leads(world: World) -> None:
    async with world.client() as client, world.client() as other, other.election("e").campaign():
        told = await said(client.election("e").campaign(timeout=1))
        assert told == f"held by {ME}, for 1.0 s"


async def test_a_ticket_names_the_holder_and_keeps_its_place(world: World) -> None:
    async with world.client() as client, world.client() as other:
        held = await other.mutex("m").lock()
        async with client.semaphore("m", ephemeral=True).enqueue(2**64 - 1) as ticket:
            assert await said(ticket.wait(timeout=1)) == (
                f"held by {ME}, for 1.0 s; 1 waits; the place in its queue is kept"
            )
            await held.release()
            assert (await ticket.wait()).held


@pytest.mark.parametrize("lasting", [False, True])
async def test_what_was_released_meanwhile_is_said_to_be_free(
    world: World, *, lasting: bool
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session, world.client() as other:
        here = session.semaphore("x", ephemeral=not lasting)
        there = other.semaphore("x", ephemeral=not lasting)
        if lasting:
            await there.create(limit=1)
        all_of_it = 1 if lasting else EPHEMERAL_LIMIT
        held = await there.acquire(all_of_it)
        asking = engine.operate

        def release_first(kind: str, operation: Callable[[], Any]) -> Any:
            if kind == "describe" and "describe" in engine.calls:  # after the probe
                held._request.withdraw()
            return asking(kind, operation)

        engine.operate = release_first  # type: ignore[method-assign]
        assert await said(here.acquire(all_of_it, timeout=1)) == "it is free now"


async def test_a_store_that_falls_silent_after_the_probe_delays_by_a_quarter_of_a_second_at_most(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("m").lock(),
    ):
        asking = engine.operate
        engine.operate = lambda kind, operation: (  # type: ignore[method-assign]
            asyncio.get_running_loop().create_future()
            if kind == "describe" and "describe" in engine.calls
            else asking(kind, operation)
        )
        started = clock.now()
        assert "'tenure describe'" in await said(session.mutex("m").lock(timeout=2))
        assert clock.now() == pytest.approx(started + 2.25)
        await asyncio.sleep(1)
        assert session._core.readings == {}


async def test_a_store_out_of_reach_is_not_asked(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("m").lock(),
    ):
        waiting = asyncio.create_task(said(session.mutex("m").lock(timeout=2)))
        await turns()
        session._core.detached()
        started = clock.now()
        assert "'tenure describe'" in await waiting
        assert clock.now() == pytest.approx(started + 2)
        assert "describe" not in engine.calls
        session._core.attached()


@pytest.mark.parametrize("unexpected", [False, True])
async def test_a_failure_of_the_store_is_not_the_program_s(
    world: World, caplog: pytest.LogCaptureFixture, *, unexpected: bool
) -> None:
    client, engine = world.slow()
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("m").lock(),
    ):
        error = OSError("x") if unexpected else EngineError("x")
        engine.fail("describe", error, error)  # for the probe, and for the question who holds it
        with caplog.at_level(logging.ERROR):
            assert "'tenure describe'" in await said(session.mutex("m").lock(timeout=2))
        assert len(caplog.records) == 2 * unexpected


async def test_a_store_that_does_not_tell_is_not_asked(world: World) -> None:
    client, engine = world.slow()
    engine.inner.capabilities = Capabilities(owners=False)  # type: ignore[misc]
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("m").lock(),
    ):
        assert await said(session.mutex("m").lock(timeout=2)) == (
            "this store does not list holders"
        )
        assert engine.calls.count("describe") == 1  # the probe


async def test_tasks_that_time_out_together_ask_once(world: World) -> None:
    client, engine = world.slow()
    async with (
        client,
        client.session() as session,
        world.client() as other,
        other.mutex("m").lock(),
    ):
        told = await asyncio.gather(*(said(session.mutex("m").lock(timeout=2)) for _ in range(20)))
        assert len(set(told)) == 1
        assert told[0].startswith(f"held by {ME}")
        assert engine.calls.count("describe") == 2  # the probe, and the question who holds it


# Attributes of the error


async def late(acquiring: Awaitable[object]) -> AcquireTimeout:
    with pytest.raises(AcquireTimeout) as found:
        await acquiring
    return found.value


async def test_an_error_has_the_holders_and_the_position(world: World) -> None:
    async with world.client() as client, world.client() as other, world.client() as third:
        async with other.mutex("m").lock(data=b"me") as lease:
            first = asyncio.create_task(third.mutex("m").lock())
            await turns()
            error = await late(client.mutex("m").lock(timeout=3))
            (holder,) = error.holders
            assert (holder.data, holder.order_id) == (b"me", lease.fencing_token)
            assert (holder.pid, holder.program) == (os.getpid(), me.program)
            assert error.position == 2
            assert copy.copy(error).holders == pickle.loads(pickle.dumps(error)).holders
            at_once = await late(client.mutex("m").lock(timeout=0))
            assert ([each.order_id for each in at_once.holders], at_once.position) == (
                [lease.fencing_token],
                None,
            )
        await (await first).release()


async def test_a_ticket_s_error_has_them_too(world: World) -> None:
    async with (
        world.client() as client,
        world.client() as other,
        other.mutex("m").lock(),
        client.mutex("m").enqueue() as ticket,
    ):
        error = await late(ticket.wait(timeout=3))
        assert (len(error.holders), error.position) == (1, 1)


async def test_the_error_of_several_has_the_holders_of_all(world: World) -> None:
    async with (
        world.client() as client,
        world.client() as other,
        other.mutex("m").lock(),
        other.mutex("n").lock(),
    ):
        error = await late(client.any_of(client.mutex("m"), client.mutex("n"), timeout=3))
        assert (len(error.holders), error.position) == (2, None)


async def test_during_an_outage_they_are_unknown(world: World) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other, other.mutex("m").lock():
        waiting = asyncio.create_task(client.mutex("m").lock(timeout=5))
        await asyncio.sleep(1)
        engine.cut()
        await asyncio.wait([waiting])
        engine.mend()
        error = waiting.exception()
        assert isinstance(error, AcquireTimeout)
        assert error.__cause__ is not None
        assert (error.holders, error.position) == ((), None)


async def test_a_client_reads_few_whole_queues_a_second(world: World) -> None:
    names = [f"m{at}" for at in range(3 * MOST_READINGS)]
    async with world.client() as client, world.client() as other:
        leases = [await other.mutex(name).lock() for name in names]
        errors = await asyncio.gather(*(late(client.mutex(name).lock(timeout=3)) for name in names))
        assert sum(each.position == 1 for each in errors) == MOST_READINGS
        assert all(len(each.holders) == 1 for each in errors)
        again = await late(client.mutex("m0").lock(timeout=3))
        assert again.position == 1
        for lease in leases:
            await lease.release()


async def test_a_store_without_positions_is_probed_without_its_queue(world: World) -> None:
    client, engine = world.slow(0)
    engine.inner.capabilities = Capabilities(waiter_order=False)  # type: ignore[misc]
    async with client, world.client() as other, other.mutex("m").lock():
        error = await late(client.mutex("m").lock(timeout=3))
        assert (len(error.holders), error.position) == (1, None)
