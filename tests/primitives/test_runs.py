"""`once`: a job that is due once in a period, wherever its callers are."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from tenure._client.client import Client, connect
from tenure._client.runs import SUFFIX, RunLease
from tenure._client.session import Session
from tenure.core.periods import RunRecord, encode
from tenure.engines.contract import Answer, Withdrawn
from tenure.errors import (
    AcquireTimeout,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Unsupported,
)
from tenure.model import DEFAULT_NODE, Capabilities
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns

HOUR = timedelta(hours=1)


async def run(client: Client, **options: object) -> bool:
    """Run the job if it is due; whether it did."""
    async with client.once("job", per=HOUR, **options) as lease:  # type: ignore[arg-type]  # theirs
        return lease is not None


async def inside(
    client: Client | Session, work: Callable[[], Awaitable[object]], per: float = 3600.0
) -> None:
    """Work in a run that is due."""
    async with client.once("job", per=per) as lease:
        assert lease is not None
        await work()


async def error() -> None:
    raise ZeroDivisionError


async def fail(client: Client | Session, per: float = 3600.0) -> None:
    """Begin a run that does not succeed."""
    with pytest.raises(ZeroDivisionError):
        await inside(client, error, per)


async def test_a_job_runs_once_in_a_period(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        assert await run(client)
        assert not await run(other)
        clock.advance(3599.0)
        assert not await run(client)
        clock.advance(1.0)
        assert await run(other)
        assert not await run(client)


async def test_a_period_counts_from_the_start_of_a_run(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        async with client.once("job", per=HOUR) as lease:
            assert lease is not None
            await asyncio.sleep(1800)
        clock.advance(1800)
        assert await run(client)


async def test_two_callers_at_once_are_one_run(world: World) -> None:
    ran = 0
    async with world.client() as client, world.client() as other:

        async def once(who: Client) -> None:
            nonlocal ran
            async with who.once("job", per=HOUR) as lease:
                if lease is not None:
                    ran += 1
                    await asyncio.sleep(5)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(once(client if number % 2 else other))
    assert ran == 1


async def test_a_run_that_failed_is_tried_again(world: World) -> None:
    async with world.client() as client, world.client() as other:
        await fail(client)
        assert await run(other)
        assert not await run(client)


async def test_a_run_that_failed_counts_on_request(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        await fail(client)
        assert not await run(client, count_failed=True)
        clock.advance(3600)
        assert await run(client, count_failed=True)


async def test_a_run_that_failed_does_not_hide_the_one_before(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        assert await run(client)
        clock.advance(1800)
        async with client.session() as session:
            await fail(session, per=60)
        # By a period of an hour, the run of half an hour ago still counts.
        assert not await run(client)


async def test_a_run_whose_program_died_is_tried_again(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        lease = await client.once("job", per=HOUR)
        assert lease is not None
        await world.end_sessions()
        await turns()
        assert await run(other)


async def test_a_caller_may_wait_for_a_run_that_goes_on(world: World) -> None:
    async with world.client() as client, world.client() as other:
        lease = await client.once("job", per=HOUR)
        assert lease is not None
        assert await other.once("job", per=HOUR) is None
        assert await other.once("job", per=HOUR, timeout=2) is None
        waiting = asyncio.create_task(run(other, timeout=None))
        await asyncio.sleep(1)
        await lease.release()  # it has not succeeded
        assert await waiting
        assert not await run(client, timeout=None)


async def test_a_lease_without_a_block_says_that_it_succeeded(world: World) -> None:
    async with world.client() as client:
        lease = await client.once("job", per=HOUR)
        assert isinstance(lease, RunLease)
        await lease.succeed()
        await lease.succeed()
        assert lease.held
        await lease.release()
        with pytest.raises(LeaseReleased):
            await lease.succeed()
        assert not await run(client)


async def test_the_last_run_is_told(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, client.session(description="invoices") as session:
        assert await client.last_run("job") is None
        started = clock.wall()
        async with client.once("job", per=HOUR) as lease:
            assert lease is not None
            token = lease.fencing_token
            clock.advance(2)
            going = await session.last_run("job")
        ended = await client.last_run("job")
        assert going is not None
        assert ended is not None
        assert (going.started, going.since, going.succeeded) == (started, 2.0, False)
        assert (ended.started, ended.succeeded, ended.fencing_token) == (started, True, token)
        assert (going.description, ended.description) == ("", "")
        async with session.once("other", per=HOUR):
            pass
        last = await session.last_run("other")
        assert last is not None
        assert last.description == "invoices"


async def test_the_last_run_names_its_program(clock: VirtualClock) -> None:
    async with (
        connect("memory://named", clock=clock) as client,
        connect("memory://named", clock=clock) as other,
    ):
        async with client.once("job", per=HOUR):
            pass
        last = await other.last_run("job")
        assert last is not None
        assert (last.host, last.pid) == (socket.gethostname(), os.getpid())
        assert last.program


async def test_a_job_excludes_the_mutex_of_its_name(world: World) -> None:
    async with world.client() as client, client.mutex("job").lock():
        assert await client.once("job", per=HOUR) is None
    assert [each.session_id for each in await world.queue("job")] == []


async def test_a_clock_that_was_set_back_delays_a_job_by_one_period(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        now = clock.wall()
        clock.set_wall(now + 86400)
        assert await run(client)
        clock.set_wall(now)
        assert not await run(client)
        last = await client.last_run("job")
        assert last is not None
        assert (last.started, last.since) == (now, 0.0)
        clock.advance(3600)
        assert await run(client)


async def test_a_session_that_is_over_records_nothing(world: World) -> None:
    async with world.client() as client, world.client() as other:
        with pytest.raises(LeaseLost):
            await inside(client, world.end_sessions)
        last = await other.last_run("job")
        assert last is not None
        assert not last.succeeded
        assert await run(other)


async def test_an_evicted_run_records_nothing(world: World) -> None:
    client, engine = world.slow()
    async with client, world.client() as other:
        lease = await client.once("job", per=HOUR)
        assert lease is not None
        engine.back.flowing = False
        assert await other.evict(DEFAULT_NODE, "job", lease.fencing_token)
        later = await other.once("job", per=HOUR)
        assert later is not None
        assert lease.held  # as far as it knows
        engine.back.flowing = True
        with pytest.raises(LeaseLost, match="evicted"):
            await lease.succeed()
        async with later:
            pass
        assert not await run(other)


async def test_a_run_does_not_replace_the_record_of_a_later_one(world: World) -> None:
    async with world.client() as client, world.client() as other, other.session() as session:
        later = RunRecord(7.0, 2**52, "later")
        record = session.semaphore("job" + SUFFIX)
        with pytest.raises(LeaseLost, match="another run has been recorded since"):
            await inside(client, lambda: record.update(encode(later)))
        last = await client.last_run("job")
        assert last is not None
        assert (last.description, last.succeeded) == ("later", False)


@pytest.mark.parametrize("later", range(0, 120, 7))
async def test_a_block_that_ends_without_an_error_has_recorded_its_success(
    world: World, later: int
) -> None:
    client, _ = world.slow(turns=20)
    async with client, world.client() as other:
        began = asyncio.Event()

        async def work() -> None:
            async with client.once("job", per=HOUR) as lease:
                assert lease is not None
                began.set()

        task = asyncio.create_task(work())
        await began.wait()
        await turns(later)
        await world.end_sessions()
        lost = False
        try:
            await task
        except LeaseLost:
            lost = True
        last = await other.last_run("job")
        assert last is not None
        assert lost or last.succeeded


async def test_a_caller_that_is_cancelled_leaves_no_lock_behind(world: World) -> None:
    for number in range(40):
        client, _ = world.slow(turns=2)
        async with client:
            task = asyncio.create_task(client.once(f"job{number}", per=HOUR))
            await turns(number)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                lease = task.result()
                assert lease is not None
                await lease.release()
            await turns()
            assert await world.queue(f"job{number}") == []


async def test_a_store_without_data_is_refused_by_name(world: World) -> None:
    client, engine = world.slow()
    engine.inner.capabilities = Capabilities(data=False)  # type: ignore[misc]
    async with client:
        with pytest.raises(Unsupported, match=r"stores no data.*sqlite://"):
            await client.once("job", per=HOUR)
        with pytest.raises(Unsupported, match="stores no data"):
            await client.last_run("job")


async def test_a_name_that_is_used_for_something_else_is_told(world: World) -> None:
    async with world.client() as client, client.session() as session:
        await session.semaphore("job" + SUFFIX).create(1, b"something else")
        with pytest.raises(InvalidArgument, match="cannot be read as the last run of 'job'"):
            await client.once("job", per=HOUR)
        assert await world.queue("job") == []
        async with client.mutex("mine" + SUFFIX).lock():
            with pytest.raises(InvalidArgument, match="mine:last-run"):
                await client.once("mine", per=HOUR)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("", {"per": 1}),
        ("x" * 1016, {"per": 1}),
        ("job", {"per": -1}),
        ("job", {"per": "1h"}),
        ("job", {"per": 1, "timeout": -1}),
    ],
)
async def test_what_makes_no_sense_is_refused_at_once(
    world: World, name: str, options: dict[str, object]
) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument):
            client.once(name, **options)  # type: ignore[arg-type]  # that is the point


async def test_a_store_without_fencing_tokens_remembers_as_well(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.once("job", per=HOUR)
        assert lease is not None
        lease._request.order_id = None
        await lease.succeed()
        assert not await run(client)


@pytest.mark.parametrize("timeout", [0, 5])
async def test_a_store_that_is_out_of_reach_is_no_run_that_goes_on(
    world: World, timeout: float
) -> None:
    client, engine = world.slow()
    async with client:
        await client.last_run("job")  # the session is there
        engine.cut()
        with pytest.raises(AcquireTimeout):
            await client.once("job", per=HOUR, timeout=timeout)
        engine.mend()
        await turns()
        assert await world.queue("job") == []


async def test_equal_records_are_written_once(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, client.session() as session:
        record = RunRecord(clock.wall(), 1, "me", clock.wall())
        await session.semaphore("job" + SUFFIX).create(1, encode(record))
        async with session.semaphore("job" + SUFFIX).watch(data=True) as states:
            await anext(states)
            assert not await run(client)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(10):
                    await anext(states)


async def test_a_caller_that_is_cancelled_while_the_release_fails_is_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = world.slow()
    async with client:
        _held = await client.mutex("another").try_lock()
        session = engine.sessions[0]
        withdraw, failures = session.withdraw, [EngineError("the disk is full")]

        def fail_once(hold: int) -> Answer[Withdrawn]:
            if failures:
                raise failures.pop()
            return withdraw(hold)

        monkeypatch.setattr(session, "withdraw", fail_once)
        beginning = asyncio.create_task(client.once("job", per=HOUR))
        while "store_time" not in engine.calls:
            await turns(1)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        assert failures == []
        await asyncio.sleep(1)
        assert await world.queue("job") == []


@pytest.mark.parametrize("attached", [True, False])
async def test_during_an_outage_calls_end_and_name_it(
    world: World, clock: VirtualClock, attached: bool
) -> None:
    client, engine = world.slow()
    async with client:
        await client.list_nodes()
        if attached:
            _held = await client.mutex("another").try_lock()
        engine.cut()
        began = clock.now()
        with pytest.raises(EngineUnavailable, match="last run of 'job' on /default: not read"):
            await client.last_run("job")
        assert clock.now() - began == pytest.approx(5)
        with pytest.raises(AcquireTimeout, match="has not answered"):
            await client.once("job", per=HOUR)
        assert clock.now() - began == pytest.approx(10)
        engine.mend()


async def test_a_store_that_falls_silent_while_a_run_begins_is_named(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        _held = await client.mutex("another").try_lock()
        beginning = asyncio.create_task(client.once("job", per=HOUR))
        while "store_time" not in engine.calls:
            await turns(1)
        engine.cut()
        began = clock.now()
        with pytest.raises(EngineUnavailable, match="has not answered for 5"):
            await beginning
        assert clock.now() - began == pytest.approx(5)
        engine.mend()
        await turns()
        assert await world.queue("job") == []


async def test_a_store_that_falls_silent_after_a_job_was_not_due_holds_up_no_caller(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        assert await run(client)
        engine.calls.clear()
        beginning = asyncio.create_task(client.once("job", per=HOUR))
        while "withdraw" not in engine.calls:
            await turns(1)
        engine.back.flowing = False
        began = clock.now()
        assert await beginning is None
        assert clock.now() - began == pytest.approx(5)
        assert await world.queue("job") == []
        engine.mend()
