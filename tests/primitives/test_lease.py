# ruff: noqa: PT012, SIM117  what raises here is a block, with its body
"""A lease: held until it is released, or lost, and then the work stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Any

import pytest

import tenure
from tenure import events
from tenure._client.internals import check_enterable, enter_lease
from tenure._client.lease import Lease
from tenure.engines.contract import Enqueued, Place
from tenure.errors import (
    EngineError,
    InvalidArgument,
    LeaseLost,
    LeaseReleased,
    Misuse,
    SessionClosed,
    SessionExpired,
    Unsupported,
)
from tenure.testing.clock import VirtualClock
from tests.guarantees import MEMORY, guarantee
from tests.primitives.helpers import World, for_ever, is_held, this_task, turns

# What it is while it is held


async def test_it_is_held_from_its_grant_to_its_release(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        assert lease.held
        assert lease.loss is None
        lease.check()
        assert (lease.name, lease.node, lease.count) == ("m", "/default", 2**64 - 1)
        assert lease.session is session
        assert repr(lease) == (f"<Lease 'm' on /default held fencing_token={lease.fencing_token}>")
        await lease.release()
        assert not is_held(lease)
        assert lease.loss is None
        with pytest.raises(LeaseReleased, match="'m' on /default has been released"):
            lease.check()
        assert await world.queue("m") == []


async def test_each_has_a_higher_fencing_token_than_all_before(world: World) -> None:
    async with world.client() as client, client.session() as session:
        tokens = []
        for name in ("a", "b", "a"):
            async with session.mutex(name).lock() as lease:
                tokens.append(lease.fencing_token)
        assert tokens == sorted(set(tokens))


async def test_a_store_without_order_gives_no_fencing_token(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session:
        store = engine.sessions[0].inner
        assert store is not None

        def no_number(*_: object, **__: object) -> Enqueued:
            return Enqueued(Place.GRANTED, None)

        store.enqueue = no_number  # type: ignore[method-assign]
        lease = await session.mutex("m").lock()
        with pytest.raises(Unsupported, match="no fencing tokens"):
            _ = lease.fencing_token
        assert repr(lease) == "<Lease 'm' on /default held>"


async def test_a_store_without_tokens_of_its_own_shows_none(world: World) -> None:
    async with world.client() as client, client.mutex("m").lock() as lease:
        with pytest.raises(Unsupported, match="no tokens of its own"):
            _ = lease.store_token


async def test_it_has_no_truth_value_to_misread(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        await lease.release()
        assert bool(lease)


async def test_a_release_may_be_repeated(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        await lease.release()
        await lease.release()
        async with await session.mutex("m").lock() as lease:
            await lease.release()  # inside of its own block


async def test_its_block_is_left_once_by_who_has_entered_it(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        with pytest.raises(Misuse, match="lease of 'm' is left without"):
            await lease.__aexit__(None, None, None)
        assert lease.held
        async with lease:
            pass
        with pytest.raises(Misuse, match="left once"):
            await lease.__aexit__(None, None, None)


async def test_its_count_can_shrink_and_its_data_change_in_place(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(3)
        async with pool.acquire(3, data=b"one") as lease:
            token = lease.fencing_token
            await lease.update(count=2)
            await lease.update(data=b"two")
            assert (lease.count, lease.fencing_token) == (2, token)
            (owner,) = await world.queue("s")
            assert (owner.count, owner.data, owner.order_id) == (2, b"two", token)
            with pytest.raises(InvalidArgument, match="cannot grow from 2 to 3"):
                await lease.update(count=3)
            with pytest.raises(InvalidArgument, match="a lease's count, its data, or both"):
                await lease.update()
            assert lease.count == 2
        with pytest.raises(LeaseReleased):
            await lease.update(data=b"three")


async def test_a_change_whose_caller_was_cancelled_is_known_when_it_is_done(world: World) -> None:
    client, _ = world.slow(2)
    async with client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(3)
        async with pool.acquire(3) as lease:
            changing = asyncio.create_task(lease.update(count=1))
            await turns(1)
            changing.cancel()
            await turns()
            assert changing.cancelled()
            assert lease.count == 1


# How it is lost


@guarantee("cut off", "one owner", "loss reported", on=MEMORY)
async def test_a_silent_store_cancels_the_body_before_the_lease_can_have_expired(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=30)
        started = clock.now()
        with pytest.raises(LeaseLost) as raised:
            async with session.mutex("m").lock() as lease:
                engine.cut()
                await for_ever()
        assert 20 < clock.now() - started <= 28.5 + 0.1
        assert isinstance(raised.value.__cause__, SessionExpired)
        assert raised.value.fencing_token == lease.fencing_token
        assert (raised.value.node, raised.value.name) == ("/default", "m")
        assert lease.loss is not None
        assert not lease.held
        assert session.state == "expired"
        # Until then nobody else was granted it.
        assert [owner.session_id for owner in await world.queue("m")] == [session.id]
        engine.mend()
        await turns()
        assert await world.queue("m") == []
    assert this_task().cancelling() == 0


@guarantee("cut off", "loss reported", on=MEMORY)
async def test_a_store_that_answers_nothing_any_more_is_a_silent_one(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=30)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock():
                engine.back.flowing = False  # renewals arrive, and their answers do not
                await for_ever()
        engine.mend()


@guarantee("cut off", "kept", on=MEMORY)
async def test_a_short_silence_costs_nothing(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with client, client.session(recovery_window=30) as session:
        async with session.mutex("m").lock() as lease:
            for _ in range(5):
                engine.cut()
                await asyncio.sleep(17)
                engine.mend()
                await asyncio.sleep(5)
            assert lease.held


async def test_proof_counts_from_when_it_was_asked_for(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=30)
        lease = await session.mutex("m").lock()
        before = lease.deadline
        engine.back.flowing = False
        await asyncio.sleep(20)
        assert lease.deadline == before
        engine.back.flowing = True
        asked = engine.renewals[-1]
        assert asked < clock.now()
        assert lease.deadline == pytest.approx(asked + 28.5)
        await session.aclose()


@guarantee("cut off", "one owner", on=MEMORY)
async def test_a_proof_that_comes_too_late_revives_nothing(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        session = await client.session(recovery_window=30)
        lease = await session.mutex("m").lock()
        clock.advance(29)  # and nobody has looked at the clock
        session._core.proven(clock.now() - 1)
        assert not lease.held
        assert session.state == "expired"


@guarantee("suspended", "loss reported", on=MEMORY)
async def test_a_suspended_machine_finds_its_leases_lost_at_once(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        session = await client.session(recovery_window=30)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock() as lease:
                clock.advance(3600)
                assert not lease.held
                resumed = clock.now()
                try:
                    await for_ever()
                finally:
                    assert clock.now() - resumed <= 1.0


@guarantee("suspended", "loss reported", on=MEMORY)
async def test_a_suspension_is_noticed_within_a_second_by_whoever_waits(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        session = await client.session(recovery_window=30)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock():
                asyncio.get_running_loop().call_soon(clock.advance, 3600)
                try:
                    await for_ever()
                finally:
                    noticed = clock.now()
        assert noticed - 1000.0 <= 3600 + 1.0


@guarantee("administrator", "loss reported", on=MEMORY)
async def test_the_store_s_word_loses_it_at_once(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(LeaseLost, match="administrator ended it") as raised:
            async with session.mutex("m").lock():
                await world.end_sessions()
                await for_ever()
        assert isinstance(raised.value.__cause__, SessionExpired)
    assert this_task().cancelling() == 0


@guarantee("administrator", "loss reported", on=MEMORY)
async def test_evicted_it_is_lost_and_the_session_is_not(world: World) -> None:
    async with world.client() as client, client.session() as session:
        with pytest.raises(LeaseLost, match="evicted by an administrator") as raised:
            async with session.mutex("m").lock() as lease:
                assert await client.evict("/default", "m", lease.fencing_token)
                await for_ever()
        assert raised.value.__cause__ is None
        assert session.state == "attached"
        async with session.mutex("m").lock():
            pass


@guarantee("administrator", "loss reported", on=MEMORY)
async def test_deleted_by_force_it_is_lost(world: World) -> None:
    async with world.client() as client, client.session() as session:
        pool = session.semaphore("s")
        await pool.create(1)
        with pytest.raises(LeaseLost, match="the semaphore was deleted"):
            async with pool.acquire():
                await pool.delete(force=True)
                await for_ever()


async def test_what_the_store_has_forgotten_is_lost_when_it_is_asked_for(world: World) -> None:
    client, engine = world.slow(0)
    async with client, client.session() as session:
        with pytest.raises(LeaseLost, match="no longer in the store's queue"):
            async with session.mutex("m").lock() as lease:
                engine.fail("alter", LeaseReleased("what request?"))
                await lease.update(data=b"x")
        assert lease.loss is not None


@pytest.mark.parametrize("engine_turns", [0, 2])
async def test_an_update_after_the_session_s_end_says_why(world: World, engine_turns: int) -> None:
    client, engine = world.slow(engine_turns)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.fail("alter", SessionExpired("over"))
        with pytest.raises(SessionExpired, match="over"):
            await lease.update(data=b"x")
        assert isinstance(lease.loss, LeaseLost)


async def test_an_engine_may_refuse_an_update_in_the_call(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        await session._core.engine.close()  # behind the session's back
        with pytest.raises((SessionExpired, LeaseLost)):
            await lease.update(data=b"x")


# What the block raises


async def test_a_deadline_that_passed_unnoticed_is_noticed_at_the_block_s_end(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        session = await client.session(recovery_window=30)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock():
                clock.advance(60)
        with pytest.raises(KeyError) as raised:
            async with client.mutex("m").lock():
                clock.advance(60)
                raise KeyError("the body's")
        assert "meanwhile: the lease of 'm'" in raised.value.__notes__[0]


async def test_a_body_that_ends_after_the_loss_still_raises_it(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock():
                await world.end_sessions()
                with contextlib.suppress(asyncio.CancelledError):
                    await for_ever()
    assert this_task().cancelling() == 0
    await turns()


async def test_the_body_s_own_error_is_kept_and_told_of_the_loss(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(ValueError, match="mine") as raised:
            async with session.mutex("m").lock():
                await world.end_sessions()
                try:
                    await for_ever()
                finally:
                    raise ValueError("mine")
        assert "meanwhile: the lease of 'm' on /default is lost" in raised.value.__notes__[0]
    assert this_task().cancelling() == 0


async def test_cancellation_from_outside_wins_over_the_loss(world: World) -> None:
    async with world.client() as client:
        session = await client.session()

        async def work() -> None:
            async with session.mutex("m").lock():
                await for_ever()

        task = asyncio.create_task(work())
        await turns()
        await world.end_sessions()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_of_leases_lost_together_the_innermost_raises_first(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(LeaseLost, match="'outer'"):
            async with session.mutex("outer").lock():
                with pytest.raises(LeaseLost, match="'inner'"):
                    async with session.mutex("inner").lock():
                        await world.end_sessions()
                        await for_ever()
                await for_ever()  # caught, so the work goes on, until here
    assert this_task().cancelling() == 0
    await turns()


async def test_in_a_task_group_the_loss_ends_the_siblings_and_is_caught_with_except_star(
    world: World,
) -> None:
    lost: list[LeaseLost] = []
    async with world.client() as client:
        session = await client.session()

        async def work() -> None:
            async with session.mutex("m").lock():
                await for_ever()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(work())
                group.create_task(for_ever())
                await turns()
                await world.end_sessions()
        except* LeaseLost as errors:
            lost.extend(error for error in errors.exceptions if isinstance(error, LeaseLost))
    assert len(lost) == 1


async def test_tracebacks_of_several_tasks_do_not_mix(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        await world.end_sessions()
        await turns()
        raised = []
        for _ in range(2):
            with pytest.raises(LeaseLost) as caught:
                lease.check()
            raised.append(caught.value)
        assert raised[0] is not raised[1]
        assert lease.loss is not None
        assert lease.loss.__traceback__ is None


# A loss that the program itself causes


async def test_closing_the_own_session_inside_the_block_raises_at_its_end(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        reached = False
        with pytest.raises(LeaseLost, match="was closed") as raised:
            async with session.mutex("m").lock():
                await session.aclose()
                await turns()  # and is not cancelled
                reached = True
        assert reached
        assert isinstance(raised.value.__cause__, SessionClosed)
    assert this_task().cancelling() == 0
    await turns()


async def test_closing_the_own_client_inside_the_block_raises_at_its_end(world: World) -> None:
    client = world.client()
    reached = False
    with pytest.raises(LeaseLost, match="was closed"):
        async with client.mutex("m").lock():
            await client.aclose()
            await turns()
            reached = True
    assert reached
    assert this_task().cancelling() == 0


async def test_another_task_that_closes_the_session_cancels_the_body(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(LeaseLost, match="was closed"):
            async with session.mutex("m").lock():
                closing = asyncio.create_task(session.aclose())
                await for_ever()
        await closing
    assert this_task().cancelling() == 0


async def test_a_session_that_is_left_behind_loses_its_leases(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        with pytest.raises(LeaseLost, match="was detached"):
            async with session.mutex("m").lock():
                await session.detach()
        assert session.state == "detached"
        assert len(await world.queue("m")) == 1  # until its window is over
        await asyncio.sleep(31)
        assert await world.queue("m") == []


# Entering


async def test_it_is_entered_once(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        async with lease:
            with pytest.raises(Misuse, match="entered already"):
                await lease.__aenter__()
            assert lease.held
        with pytest.raises(Misuse, match="entered already"):
            await lease.__aenter__()


async def test_of_two_threads_that_enter_it_one_gets_an_error(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        check_enterable(lease)
        check_enterable(lease)
        enter_lease(lease, this_task())
        with pytest.raises(Misuse, match="entered already"):
            enter_lease(lease, this_task())
        await lease.__aexit__(None, None, None)


async def test_one_that_is_over_cannot_be_entered(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        await lease.release()
        with pytest.raises(LeaseReleased):
            await lease.__aenter__()
        lease = await session.mutex("m").lock()
        assert await client.evict("/default", "m", lease.fencing_token)
        await turns()
        with pytest.raises(LeaseLost):
            await lease.__aenter__()
        lease = await session.mutex("m").lock()
        await session.aclose()
        with pytest.raises(LeaseLost) as raised:
            await lease.__aenter__()
        assert isinstance(raised.value.__cause__, SessionClosed)


async def test_another_task_than_acquired_it_may_enter_and_is_the_one_cancelled(
    world: World,
) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()

        async def work() -> None:
            with pytest.raises(LeaseLost):
                async with lease:
                    await for_ever()

        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            await turns()
            await world.end_sessions()
            await turns()  # this one is not


async def test_not_entered_it_cancels_nobody(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        await world.end_sessions()
        await turns()
        assert not lease.held
        with pytest.raises(LeaseLost):
            await lease.release()


# Waiting for the loss


async def test_a_loss_can_be_waited_for(world: World) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        waiting = asyncio.create_task(lease.wait_lost())
        await turns()
        assert not waiting.done()
        await world.end_sessions()
        assert await waiting is lease.loss
        assert await lease.wait_lost() is lease.loss


async def test_waiting_for_the_loss_of_what_is_released_ends_in_an_error(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        waiting = asyncio.create_task(lease.wait_lost())
        await turns()
        await lease.release()
        with pytest.raises(LeaseReleased):
            await waiting


async def test_a_thread_may_ask_at_any_time(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        seen: list[object] = []

        def ask() -> None:
            seen.append(lease.held)
            try:
                lease.check()
            except LeaseLost as error:
                seen.append(error)
            seen.append(lease.loss)

        def in_a_thread() -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

        in_a_thread()
        assert seen == [True, None]
        seen.clear()
        clock.advance(60)
        in_a_thread()  # it is the first to notice
        assert seen[0] is False
        assert isinstance(seen[1], LeaseLost)
        assert seen[2] is lease.loss
        await turns()
        assert session.state == "expired"


async def test_it_cannot_be_entered_on_another_loop(world: World) -> None:
    async with world.client() as client, client.session() as session:
        lease = await session.mutex("m").lock()
        failures: list[BaseException] = []

        def elsewhere() -> None:
            async def enter() -> None:
                async with lease:
                    pytest.fail("entered")

            try:
                asyncio.run(enter())
            except Misuse as error:
                failures.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "belongs to another event loop" in str(failures[0])
        assert lease.held


# What a loss does beside being raised


async def test_a_policy_is_called_with_the_loss_and_the_body_is_cancelled_too(
    world: World,
) -> None:
    told: list[LeaseLost] = []
    async with world.client() as client:
        session = await client.session(on_loss=told.append)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock() as lease:
                await world.end_sessions()
                await for_ever()
        assert told == [lease.loss]


async def test_a_lease_s_own_policy_goes_before_its_session_s(world: World) -> None:
    told: list[str] = []
    async with world.client() as client:
        session = await client.session(on_loss=lambda _: told.append("session's"))
        mutex = session.mutex("m")
        lease = await mutex.lock(on_loss=lambda _: told.append("lease's"))
        assert await client.evict("/default", "m", lease.fencing_token)
        await turns()
        assert told == ["lease's"]


async def test_what_the_program_ends_itself_carries_out_no_policy(world: World) -> None:
    told: list[LeaseLost] = []
    async with world.client() as client:
        session = await client.session(on_loss=told.append)
        lease = await session.mutex("m").lock()
        await session.aclose()
        assert lease.loss is not None
        assert told == []


# Time to stop


async def test_a_lease_that_needs_time_to_stop_is_given_up_so_much_earlier(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=30)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock(stop_time=12) as lease:
                await turns()
                proven = clock.now()
                assert lease.deadline == pytest.approx(proven + 18)
                engine.cut()
                await for_ever()
        assert clock.now() - proven <= 18.1
        engine.mend()


async def test_its_release_gives_the_time_back(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, client.session(recovery_window=30) as session:
        async with session.mutex("m").lock(stop_time=12):
            assert session.deadline == pytest.approx(clock.now() + 18)
        assert session.deadline == pytest.approx(clock.now() + 28.5)


async def test_one_that_only_waits_takes_no_time_from_the_others(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, client.session(recovery_window=30) as session:
        async with session.mutex("m").lock():
            waiting = asyncio.create_task(_lock_and_release(session.mutex("m"), stop_time=12))
            await turns()
            assert session.deadline == pytest.approx(clock.now() + 28.5)
        await waiting


async def _lock_and_release(mutex: tenure.Mutex, **how: Any) -> None:
    async with mutex.lock(**how):
        pass


async def test_its_loss_gives_the_time_back_too(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow(0)
    async with client:
        session = await client.session(recovery_window=30)
        lease = await session.mutex("m").lock(stop_time=12)
        await turns()
        proven = clock.now()
        assert await client.evict("/default", "m", lease.fencing_token)
        await lease.wait_lost()
        assert session.deadline == pytest.approx(proven + 28.5)
        engine.cut()
        states: list[str] = []
        for seconds in (28, 1):
            await asyncio.sleep(seconds)
            states.append(session.state)
        assert states == ["attached", "expired"]
        engine.mend()


async def test_what_its_end_gives_back_does_not_revive_a_session(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with other.mutex("m").lock():
            session = await client.session(recovery_window=30)
            waiting = asyncio.create_task(session.mutex("m").lock(stop_time=12))
            await turns()
            await session.aclose()
            with pytest.raises(SessionClosed):
                await waiting
            assert session.state == "closed"


async def test_a_stop_time_is_under_half_the_window(world: World) -> None:
    async with world.client() as client, client.session(recovery_window=30) as session:
        with pytest.raises(InvalidArgument, match="under half the recovery window"):
            await session.mutex("m").lock(stop_time=15)
        assert session._core.requests == {}


# Releases that fail


@guarantee("cut off", "nothing leaks", on=MEMORY)
async def test_a_failed_release_is_raised_and_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        engine.fail("withdraw", EngineError("disk full"), EngineError("still full"))
        with caplog.at_level(logging.WARNING), pytest.raises(EngineError, match="disk full"):
            async with session.mutex("m").lock():
                pass
        assert len(await world.queue("m")) == 1
        await asyncio.sleep(1)
        assert await world.queue("m") == []
    assert "release failed, retrying: node=/default name='m' error=still full" in caplog.text


async def test_a_failed_release_never_hides_the_body_s_error(world: World) -> None:
    client, engine = world.slow()
    async with client, client.session() as session:
        engine.fail("withdraw", EngineError("disk full"))
        with pytest.raises(KeyError) as raised:
            async with session.mutex("m").lock():
                raise KeyError("the body's")
        assert raised.value.__notes__ == ["and the release of 'm' on /default failed: disk full"]


async def test_a_release_does_not_outwait_its_session(world: World, clock: VirtualClock) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session(recovery_window=30)
        started = clock.now()
        async with session.mutex("m").lock():
            engine.cut()
        # The session's end has released it; the work was done in time.
        assert clock.now() - started <= 28.6
        assert session.state == "expired"
        engine.mend()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_interruption_of_the_body_releases_and_passes(
    world: World, error: type[BaseException]
) -> None:
    async with world.client() as client, client.session() as session:
        with pytest.raises(error):
            async with session.mutex("m").lock():
                raise error
        assert await world.queue("m") == []


# Abandoned


async def test_a_body_that_is_closed_from_outside_is_released_soon(world: World) -> None:
    async with world.client() as client, client.session() as session:
        leases: list[Lease] = []

        async def work() -> None:
            async with session.mutex("m").lock() as lease:
                leases.append(lease)
                await _Suspended()

        # Driven by hand in this task, and dropped in the middle.
        coroutine = work()
        coroutine.send(None)
        assert leases[0].held
        coroutine.close()
        await turns()
        assert not is_held(leases[0])
        assert await world.queue("m") == []


class _Suspended:
    def __await__(self) -> Any:
        yield


# What it tells


async def test_it_tells_of_its_grant_its_release_and_its_loss(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client, client.events() as stream:
        session = await client.session()
        async with session.mutex("m").lock() as lease:
            await asyncio.sleep(2)
        again = await session.mutex("m").lock()
        assert await client.evict("/default", "m", again.fencing_token)
        await turns()
        told = [event for event in stream._events if not isinstance(event, events.SessionAttached)]
        where = ("/default", session.id, "m")
        assert told[:5] == [
            events.Requested(*where),
            events.Acquired(*where, lease.fencing_token, waited=0.0),
            events.Released(*where, lease.fencing_token, held_for=2.0),
            events.Requested(*where),
            events.Acquired(*where, again.fencing_token, waited=0.0),
        ]
        (lost,) = told[5:]
        assert isinstance(lost, events.Lost)
        assert "evicted" in lost.reason
        assert lost.cause == "evicted"


async def test_a_release_that_fails_at_once_does_not_hide_the_bodys_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.client() as client, client.session() as session:

        def fail(hold: int) -> None:
            raise EngineError("the disk is full")

        async def fail_twice() -> None:
            async with session.mutex("x").lock():
                monkeypatch.setattr(session._core.engine, "withdraw", fail)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as error:
            await fail_twice()
        assert any("the disk is full" in note for note in error.value.__notes__)
        monkeypatch.undo()
        await asyncio.sleep(10)
        assert await world.queue("x") == []


async def test_an_update_on_its_way_ends_with_the_session(world: World) -> None:
    client, engine = world.slow(0)
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.cut()
        updating = asyncio.create_task(lease.update(data=b"new"))
        await turns()
        closing = asyncio.create_task(session.aclose())
        with pytest.raises(SessionClosed):
            await updating
        engine.mend()
        await closing
