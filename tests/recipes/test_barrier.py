"""The barrier: nobody passes before all have arrived, round after round."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenure
from tenure.errors import (
    AcquireTimeout,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    SelfDeadlock,
    SemaphoreNotFound,
    SessionExpired,
)
from tenure.recipes import Barrier, BrokenBarrier, DoubleBarrier, Party
from tenure.testing.clock import VirtualClock
from tests.cancelling import cancellers
from tests.guarantees import SQLITE, guarantee
from tests.primitives.helpers import World, turns
from tests.recipes.conftest import program


@asynccontextmanager
async def marks_of(client: tenure.Client, parties: int) -> AsyncIterator[list[list[int]]]:
    """The marks of the barrier "phase", as they are written."""
    marks: list[list[int]] = []
    pool = client.semaphore("phase")
    await pool.create(parties)

    async def follow() -> None:
        async with pool.watch(data=True) as states:
            async for state in states:
                mark = [int(token) for token in state.data.split()]
                marks.extend([mark] if mark else [])

    following = asyncio.create_task(follow())
    yield marks
    following.cancel()
    await asyncio.wait([following])


class Rounds:
    """What parties did, checked while they do it."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.arrived: Counter[int] = Counter()
        self.places: dict[int, list[int]] = {}

    async def take_part(self, barrier: Barrier, rounds: int, pause: int = 0) -> None:
        for number in range(rounds):
            await turns(pause)
            self.arrived[number] += 1
            place = await barrier.wait()
            assert self.arrived[number] == self.parties, "let through before all had arrived"
            self.places.setdefault(number, []).append(place)

    def check(self, rounds: int) -> None:
        assert set(self.places) == set(range(rounds))
        for places in self.places.values():
            assert sorted(places) == list(range(self.parties))


async def test_parties_in_several_programs_wait_for_each_other(url: str) -> None:
    rounds = Rounds(3)
    async with (
        tenure.connect(url) as one,
        tenure.connect(url) as two,
        two.session() as second,
        two.session() as third,
        asyncio.TaskGroup() as group,
    ):
        for source in (one, second, third):
            barrier = Barrier(source, "phase", 3)
            assert repr(barrier) == "<Barrier 'phase' of 3 parties>"
            group.create_task(rounds.take_part(barrier, 5))
    rounds.check(5)


async def test_a_barrier_of_one_holds_nobody_up(url: str) -> None:
    async with tenure.connect(url) as client:
        barrier = Barrier(client, "phase", 1)
        assert [await barrier.wait() for _ in range(3)] == [0, 0, 0]


async def test_it_tells_who_came_first_and_who_last(world: World) -> None:
    async with world.client() as client:
        barrier = Barrier(client, "phase", 3)
        waiting = []
        for _ in range(3):
            waiting.append(asyncio.create_task(barrier.wait()))
            await turns()
        assert [await task for task in waiting] == [0, 1, 2]


@pytest.mark.no_debug
async def test_a_hundred_parties(url: str) -> None:
    rounds = Rounds(100)
    async with tenure.connect(url) as client, asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(rounds.take_part(Barrier(client, "phase", 100), 2))
    rounds.check(2)


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 3])
async def test_fast_and_slow_parties_stay_in_step(world: World, engine_turns: int | None) -> None:
    rounds = Rounds(4)
    async with world.connect(engine_turns) as client, client.session() as session:
        async with asyncio.TaskGroup() as group:
            for pause in (0, 1, 7, 40):
                group.create_task(rounds.take_part(Barrier(session, "phase", 4), 6, pause))
        rounds.check(6)
        assert await world.queue("phase") == []
        assert await world.queue("phase.marking") == []


async def test_more_parties_than_places_go_through_in_rounds(world: World) -> None:
    async with world.client() as client:
        passed: list[int] = []

        async def come() -> None:
            passed.append(await Barrier(client, "phase", 3).wait())

        coming = [asyncio.create_task(come()) for _ in range(8)]
        await turns()
        assert sorted(passed) == [0, 0, 1, 1, 2, 2]
        await asyncio.gather(come(), *coming)
        assert sorted(passed) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


async def test_out_of_time_a_party_has_left(world: World) -> None:
    async with world.client() as client:
        barrier = Barrier(client, "phase", 2)
        with pytest.raises(AcquireTimeout, match=r"not all 2 parties .*'phase' on /default.* 5 s"):
            await barrier.wait(timeout=5)
        assert await world.queue("phase") == []
        with pytest.raises(AcquireTimeout):  # the one that left is not counted
            await barrier.wait(timeout=5)
        assert sorted(await asyncio.gather(barrier.wait(timeout=5), barrier.wait())) == [0, 1]


async def test_out_of_time_in_the_queue_for_the_next_round_it_has_left_too(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("phase")
        await pool.create(2)
        lease = await pool.acquire(2)  # those of the round before, slow to leave
        with pytest.raises(AcquireTimeout):
            await Barrier(client, "phase", 2).wait(timeout=5)
        assert [request.count for request in await world.queue("phase")] == [2]
        await lease.release()


async def test_another_timeout_is_not_taken_for_its_own(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(TimeoutError) as raised:
            async with asyncio.timeout(1):
                await Barrier(client, "phase", 2).wait(timeout=5)
        assert not isinstance(raised.value, AcquireTimeout)
        await turns()
        assert await world.queue("phase") == []


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2])
async def test_cancelled_at_any_step_a_party_leaves_and_the_barrier_goes_on(
    world: World, engine_turns: int | None
) -> None:
    """Whether it was the first or the last to come, and whether it was to write the mark."""
    async with world.connect(engine_turns) as client, client.session() as session:
        barrier = Barrier(session, "phase", 2)
        for step in itertools.count():
            doomed = asyncio.create_task(barrier.wait())
            partner = asyncio.create_task(barrier.wait())
            await turns(step)
            over = doomed.done()
            doomed.cancel()
            await asyncio.wait([doomed])
            await turns()
            if not partner.done():
                assert doomed.cancelled()
                assert await barrier.wait() == 1
            await partner
            await turns()
            assert await world.queue("phase") == []
            assert await world.queue("phase.marking") == []
            assert session._core.requests == {}
            assert session._core.watchers == {}
            if over:
                break
        assert step > 3 or engine_turns in (None, 0)


@pytest.mark.parametrize("engine_turns", [None, 0, 1, 2])
async def test_when_the_last_to_come_is_cancelled_another_completes_the_round(
    world: World, engine_turns: int | None
) -> None:
    async with world.connect(engine_turns) as client, world.client() as others:
        for step in itertools.count():
            first = asyncio.create_task(Barrier(others, "phase", 2).wait())
            await turns()
            last = asyncio.create_task(Barrier(client, "phase", 2).wait())
            await turns(step)
            over = last.done()
            last.cancel()
            await asyncio.wait([last])
            await turns()
            if not first.done():
                assert await Barrier(others, "phase", 2).wait() == 1
            assert await first == 0
            await turns()
            assert await world.queue("phase") == []
            if over:
                break
        assert step > 0


async def test_a_party_whose_session_ends_is_not_counted(world: World) -> None:
    async with world.client() as client, world.client() as other:
        session = await other.session(description="doomed")
        dying = asyncio.create_task(Barrier(session, "phase", 2).wait())
        await turns()
        assert len(await world.queue("phase")) == 1
        await world.end_sessions("doomed")
        with pytest.raises(LeaseLost):
            await dying
        waiting = asyncio.create_task(Barrier(client, "phase", 2).wait())
        await turns()
        assert not waiting.done()
        assert await Barrier(client, "phase", 2).wait() == 1
        assert await waiting == 0


async def test_when_the_marker_dies_before_it_marks_whoever_gets_its_place_does(
    world: World,
) -> None:
    slow, engine = world.slow(0)
    async with world.client() as client, slow:
        doomed = await slow.session(description="doomed")
        first = asyncio.create_task(Barrier(client, "phase", 2).wait())
        await turns()
        marking = asyncio.create_task(Barrier(doomed, "phase", 2).wait())
        while len(await world.queue("phase")) < 2:
            await turns(1)
        engine.back.flowing = False  # it has its place, and does not come to look
        await turns()
        assert not first.done()
        next_one = asyncio.create_task(Barrier(client, "phase", 2).wait())
        await turns()
        assert len(await world.queue("phase")) == 3
        await world.end_sessions("doomed")
        assert await first == 0
        assert await next_one == 1
        engine.back.flowing = True
        with pytest.raises((LeaseLost, SessionExpired)):
            await marking


async def test_a_slow_marker_undoes_no_mark(world: World) -> None:
    """The marker is cut off at each of its steps, while its partner leaves and another comes."""
    slow, engine = world.slow(1)
    async with world.client() as client, slow:
        async with marks_of(client, 2) as marks:
            for step in range(30):
                partner = asyncio.create_task(Barrier(client, "phase", 2).wait())
                await turns()
                marker = asyncio.create_task(Barrier(slow, "phase", 2).wait())
                await turns(step)
                engine.there.flowing = False
                await turns(2)
                partner.cancel()
                await turns(2)
                newcomer = asyncio.create_task(Barrier(client, "phase", 2).wait())
                await turns()
                engine.there.flowing = True
                await turns(100)  # many calls, each some turns long
                if not (marker.done() and newcomer.done()):
                    await Barrier(client, "phase", 2).wait()
                await asyncio.wait([partner, marker, newcomer])
                await turns()
        tokens = list(itertools.chain(*marks))
        assert len(marks) > 30
        assert tokens == sorted(set(tokens)), "a party was in two marks, or a later mark undone"


async def test_who_has_found_all_there_is_not_out_of_time(world: World) -> None:
    slow, engine = world.slow(1)
    async with world.client() as client, slow:
        partner = asyncio.create_task(Barrier(client, "phase", 2).wait())
        await turns()
        marker = asyncio.create_task(Barrier(slow, "phase", 2).wait(timeout=5))
        await partner
        engine.back.flowing = False  # the mark is written, but the marker has not heard so
        await asyncio.sleep(8)
        assert not marker.done()
        engine.back.flowing = True
        assert await marker == 1


async def test_a_party_that_dies_after_the_mark_holds_nobody_up(world: World) -> None:
    async with world.client() as client, world.client() as other:
        # By hand: a party that was marked and has not left.
        pool = other.semaphore("phase")
        await pool.create(2)
        session = await other.session(description="slow to leave")
        slow = await session.semaphore("phase").acquire()
        await pool.update(b"%d" % slow.fencing_token)
        barrier = Barrier(client, "phase", 2)
        both = [asyncio.create_task(barrier.wait()) for _ in range(2)]
        await turns()
        assert not any(task.done() for task in both)  # a place is taken, but nobody is there
        await world.end_sessions("slow to leave")
        assert [await task for task in both] == [0, 1]


async def test_a_lost_place_raises(world: World) -> None:
    async with world.client() as client, world.client() as other:
        waiting = asyncio.create_task(Barrier(client, "phase", 2).wait())
        await turns()
        await other.semaphore("phase").delete(force=True)
        with pytest.raises((LeaseLost, SemaphoreNotFound)):
            await waiting


async def test_another_number_of_parties_is_refused(world: World) -> None:
    async with world.client() as client:
        await Barrier(client, "phase", 1).wait()
        with pytest.raises(
            InvalidArgument, match=r"'phase' on /default is .* limit 1, .* barrier of 2 parties"
        ):
            await Barrier(client, "phase", 2).wait()
        await client.semaphore("config").create(1, b'{"not": "a barrier"}')
        with pytest.raises(InvalidArgument, match="'config' on /default has data"):
            await Barrier(client, "config", 1).wait()
        assert await world.queue("config") == []
        async with client.mutex("m").lock():
            with pytest.raises(InvalidArgument, match="'m' on /default is an ephemeral semaphore"):
                await Barrier(client, "m", 2).wait()


@pytest.mark.parametrize("parties", [0, -1, 60_001, 1.5, "2"])
def test_a_number_that_no_barrier_has_is_refused(world: World, parties: int) -> None:
    with pytest.raises(InvalidArgument, match="1 to 60000 parties, 'phase' on /default"):
        Barrier(world.client(), "phase", parties)


@given(
    parties=st.integers(1, 5),
    pauses=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    leavings=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
)
@settings(max_examples=30)
async def test_whoever_comes_and_gives_up_meanwhile_the_rounds_stay_whole(
    parties: int, pauses: list[int], leavings: list[tuple[int, int]]
) -> None:
    """Steady parties, and visitors that arrive after so many turns and give up after as many.

    A visitor may take a steady party's place in a round; so as many as there are parties have
    arrived before any of a round passes, and every round that is marked is whole and new.
    """
    async with (
        tenure.connect("memory://") as client,
        client.session() as session,
        marks_of(client, parties) as marks,
    ):

        async def steadily(pause: int) -> None:
            for _ in range(4):
                await turns(pause)
                await Barrier(session, "phase", parties).wait()

        async def visit(after: int, patience: int) -> None:
            await turns(after)
            visiting = asyncio.create_task(Barrier(session, "phase", parties).wait())
            await turns(patience)
            visiting.cancel()
            await asyncio.wait([visiting])

        steady = [asyncio.create_task(steadily(pauses[number])) for number in range(parties)]
        async with asyncio.TaskGroup() as group:
            for leaving in leavings:
                group.create_task(visit(*leaving))
        await turns(200)
        # A visitor that passed has left fewer than all to the last rounds: make them up.
        while not all(task.done() for task in steady):
            filling = [asyncio.create_task(visit(0, 30)) for _ in range(parties)]
            await asyncio.wait(filling)
        for task in steady:
            task.result()
        await turns()
        assert all(len(mark) == parties for mark in marks)
        tokens = [token for mark in marks for token in mark]
        assert tokens == sorted(set(tokens))
        described = await session.semaphore("phase").describe(owners=True)
        assert described.owners == ()


# Breaking


async def test_an_abort_breaks_parties_until_the_reset(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        here, there = Barrier(client, "phase", 3), Barrier(other, "phase", 3)
        assert not await here.broken()
        waiting = [asyncio.create_task(each.wait()) for each in (here, there)]
        async with client.semaphore("phase", limit=3).watch(owners=True) as states:
            while len((await anext(states)).owners) < 2:
                pass
        await there.abort(timeout=30)
        for task in waiting:
            with pytest.raises(BrokenBarrier, match=r"'phase' on /default was aborted; reset\(\)"):
                await task
        assert await here.broken()
        with pytest.raises(RuntimeError):
            await here.wait()
        await there.abort()
        await here.reset()
        assert not await there.broken()
        assert sorted(await asyncio.gather(here.wait(), here.wait(), there.wait())) == [0, 1, 2]


async def test_a_reset_breaks_the_parties_that_wait_and_no_later_ones(world: World) -> None:
    async with world.client() as client, world.client() as other:
        barrier = Barrier(client, "phase", 2)
        assert sorted(await asyncio.gather(barrier.wait(), barrier.wait())) == [0, 1]
        waiting = asyncio.create_task(barrier.wait())
        await turns()
        await Barrier(other, "phase", 2).reset()
        with pytest.raises(BrokenBarrier, match="was reset while this party waited; wait again"):
            await waiting
        assert sorted(await asyncio.gather(barrier.wait(), barrier.wait())) == [0, 1]
        await turns()
        assert await world.queue("phase") == []


@pytest.mark.parametrize("aborted", [False, True])
async def test_parties_in_the_queue_are_broken_too(world: World, aborted: bool) -> None:
    async with world.client() as client, world.client() as other:
        pool = other.semaphore("phase")
        await pool.create(2)
        slow = await pool.acquire(2)  # those of the round before, slow to leave
        barrier = Barrier(client, "phase", 2)
        waiting = [asyncio.create_task(barrier.wait(timeout)) for timeout in (None, 60)]
        await turns()
        await (Barrier(other, "phase", 2).abort() if aborted else barrier.reset())
        for task in waiting:
            with pytest.raises(BrokenBarrier):
                await task
        await turns()
        assert len(await world.queue("phase")) == 1
        await slow.release()


async def test_a_party_that_has_not_seen_the_reset_fills_no_round(world: World) -> None:
    slow, engine = world.slow(1)
    async with world.client() as client, slow:
        barrier = Barrier(client, "phase", 2)
        late = asyncio.create_task(Barrier(slow, "phase", 2).wait())
        await turns()
        engine.back.flowing = False
        await barrier.reset()
        waiting = asyncio.create_task(barrier.wait())
        await turns()
        assert not waiting.done()
        engine.back.flowing = True
        with pytest.raises(BrokenBarrier):
            await late
        assert not waiting.done()
        await asyncio.gather(waiting, barrier.wait())


async def test_a_party_that_has_not_seen_the_mark_passes_an_aborted_barrier(world: World) -> None:
    slow, engine = world.slow(1)
    async with world.client() as client, slow:
        barrier = Barrier(client, "phase", 2)
        late = asyncio.create_task(Barrier(slow, "phase", 2).wait())
        await turns()
        engine.back.flowing = False
        assert await barrier.wait() == 1
        await barrier.abort()
        engine.back.flowing = True
        assert await late == 0
        with pytest.raises(BrokenBarrier):
            await barrier.wait()


@pytest.mark.parametrize("how", ["abort", "reset"])
@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_at_any_step_it_is_broken_or_not(
    world: World, how: str, late: bool
) -> None:
    client, _ = world.slow()
    async with client, world.client() as other:
        for number, canceller in enumerate(cancellers(late=late)):
            barrier = Barrier(other, f"phase{number}", 2)
            waiting = asyncio.create_task(barrier.wait())
            await turns()
            await canceller.run(getattr(Barrier(client, barrier.name, 2), how)())
            await turns()
            assert await world.queue(f"{barrier.name}.marking") == []
            if not waiting.done():
                assert not await barrier.broken()
                assert await barrier.wait() == 1
            else:
                with pytest.raises(BrokenBarrier):
                    await waiting
                assert await barrier.broken() is (how == "abort")
            await asyncio.wait([waiting])


@pytest.mark.parametrize("late", [False, True])
async def test_a_party_in_the_queue_that_is_cancelled_has_left(world: World, late: bool) -> None:
    client, _ = world.slow()
    async with client, world.client() as other:
        pool = other.semaphore("phase", limit=2)
        for canceller in cancellers(late=late):
            slow = await pool.acquire(2)
            waiting = asyncio.create_task(canceller.run(Barrier(client, "phase", 2).wait()))
            await turns(40)
            assert await pool.count() == 2
            await slow.release()
            await turns()
            if not waiting.done():
                await Barrier(other, "phase", 2).wait()
            await waiting
            await turns()
            assert await world.queue("phase") == []


async def test_an_abort_waits_as_long_as_it_may(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        async with other.mutex("phase.marking").lock():
            begun = clock.now()
            with pytest.raises(AcquireTimeout):
                await Barrier(client, "phase", 2).abort(timeout=2)
            assert clock.now() - begun == pytest.approx(2, abs=0.1)
        assert not await Barrier(client, "phase", 2).broken()
        await client.semaphore("other").create(1, b"1 reset soon")
        for use in (Barrier(client, "other", 1).reset(), Barrier(client, "other", 1).broken()):
            with pytest.raises(InvalidArgument, match="data that is not a barrier's"):
                await use


async def test_the_end_of_its_session_ends_a_wait_in_the_queue(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = other.semaphore("phase", limit=2)
        slow = await pool.acquire(2)
        session = await client.session(description="doomed")
        waiting = asyncio.create_task(Barrier(session, "phase", 2).wait())
        await turns()
        await world.end_sessions("doomed")
        with pytest.raises((LeaseLost, SessionExpired)):
            await waiting
        await slow.release()


# Both ways


async def test_parties_enter_and_leave_together(url: str) -> None:
    inside: list[int] = []
    left: list[int] = []

    async def take_part(barrier: DoubleBarrier, rounds: int) -> None:
        for number in range(rounds):
            inside.append(number)
            async with barrier.enter(timeout=60) as party:
                assert inside.count(number) == 3
                assert party.position in range(3)
                left.append(number)
                await party.leave(timeout=60)
                assert left.count(number) == 3

    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        asyncio.TaskGroup() as group,
    ):
        for source in (client, client, other):
            barrier = DoubleBarrier(source, "phase", 3)
            assert repr(barrier) == "<DoubleBarrier 'phase' of 3 parties>"
            group.create_task(take_part(barrier, 4))


async def two_inside(one: tenure.Client, two: tenure.Client) -> list[Party]:
    entering = []
    for each in (one, two):
        entering.append(asyncio.create_task(_entered(DoubleBarrier(each, "phase", 2))))
        await turns()
    return await asyncio.gather(*entering)


async def _entered(barrier: DoubleBarrier) -> Party:
    return await barrier.enter(timeout=30)


async def test_no_round_begins_before_all_have_left(world: World) -> None:
    async with world.client() as client, world.client() as other:
        first, second = await two_inside(client, other)
        assert (first.position, second.position) == (0, 1)
        leaving = asyncio.create_task(first.leave())
        await turns()
        assert not leaving.done()
        entering = [asyncio.create_task(_entered(DoubleBarrier(client, "phase", 2)))]
        entering.append(asyncio.create_task(_entered(DoubleBarrier(client, "phase", 2))))
        await turns()
        assert not any(each.done() for each in entering)
        await second.leave()
        await leaving
        for party in await asyncio.gather(*entering):
            await party.release()
        await turns()
        assert await world.queue("phase") == []


async def test_a_party_that_dies_inside_is_not_waited_for(world: World) -> None:
    async with world.client() as client, world.client() as other:
        session = await other.session(description="doomed")
        first = asyncio.create_task(_entered(DoubleBarrier(client, "phase", 2)))
        with pytest.raises(LeaseLost):  # noqa: PT012  a block, with its body
            async with DoubleBarrier(session, "phase", 2).enter() as doomed:
                leaving = asyncio.create_task((await first).leave())
                await turns()
                assert not leaving.done()
                await world.end_sessions("doomed")
                await asyncio.Event().wait()
        await leaving
        with pytest.raises(LeaseLost):
            await doomed.leave()


async def test_a_party_whose_body_fails_leaves_without_waiting(world: World) -> None:
    async with world.client() as client, world.client() as other:
        first, second = await two_inside(client, other)
        with pytest.raises(ZeroDivisionError):
            async with first:
                _ = 1 // 0
        await second.leave(timeout=1)


async def test_out_of_time_it_has_left_and_may_wait_again(world: World) -> None:
    async with world.client() as client, world.client() as other:
        first, second = await two_inside(client, other)
        async with first:
            for _ in range(2):
                with pytest.raises(
                    AcquireTimeout, match=r"not all parties .* left within 3 s: 1 of 2 were inside"
                ):
                    await first.leave(timeout=3)
            assert len(await world.queue("phase")) == 1
            await second.leave()
            await first.leave()
        with pytest.raises(AcquireTimeout, match=r"not all 2 parties .* arrived within 3 s"):
            await DoubleBarrier(client, "phase", 2).enter(timeout=3)


async def test_another_timeout_is_not_taken_for_that_of_leaving(world: World) -> None:
    async with world.client() as client, world.client() as other:
        first, second = await two_inside(client, other)
        with pytest.raises(TimeoutError) as raised:
            async with asyncio.timeout(1):
                await first.leave(timeout=5)
        assert not isinstance(raised.value, AcquireTimeout)
        await second.release()


@pytest.mark.parametrize("late", [False, True])
async def test_entering_that_is_cancelled_keeps_no_place(world: World, late: bool) -> None:
    client, _ = world.slow()
    async with client, world.client() as other:
        for canceller in cancellers(late=late):
            partner = asyncio.create_task(_entered(DoubleBarrier(other, "phase", 2)))
            await canceller.run(DoubleBarrier(client, "phase", 2).enter())
            await turns()
            if not partner.done():
                async with DoubleBarrier(client, "phase", 2).enter(timeout=5):
                    pass
            await (await partner).release()
            await turns()
            assert await world.queue("phase") == []
            assert await world.queue("phase.marking") == []


@pytest.mark.parametrize("late", [False, True])
async def test_leaving_that_is_cancelled_has_left(world: World, late: bool) -> None:
    client, _ = world.slow()
    async with client, world.client() as other:
        for canceller in cancellers(late=late):
            first, second = await two_inside(client, other)
            leaving = asyncio.create_task(canceller.run(first.leave()))
            await turns()
            await second.leave(timeout=5)
            await leaving
            await turns()
            assert await world.queue("phase") == []


async def test_a_task_inside_that_enters_again_gets_an_error(world: World) -> None:
    async with world.client() as client:
        barrier = DoubleBarrier(client, "phase", 1)
        async with barrier.enter():
            with pytest.raises(SelfDeadlock):
                await barrier.enter()


async def test_the_callers_policy_handles_the_loss_of_a_party(world: World) -> None:
    lost: list[LeaseLost] = []
    async with world.client() as client:
        party = await DoubleBarrier(client, "phase", 1).enter(on_loss=lost.append, stop_time=1)
        await client.semaphore("phase").delete(force=True)
        await party.wait_lost()
        assert len(lost) == 1


async def test_an_outage_is_reported_by_parties(world: World) -> None:
    client, engine = world.slow()
    async with client, world.client() as other:
        first, second = await two_inside(client, other)
        outage = EngineUnavailable("no route to host")
        engine.trouble_told = outage
        for use in (first.leave(5), Barrier(client, "phase", 2).wait(5)):
            with pytest.raises(AcquireTimeout, match="no route to host") as raised:
                await use
            assert raised.value.__cause__ is outage
        await second.release()


PARTY = """
import asyncio, sys, tenure
from tenure.recipes import Barrier, BrokenBarrier, DoubleBarrier, Party

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        barrier = Barrier(client, "phase", 2)
        print("ready", flush=True)
        await barrier.wait()
        await barrier.wait()

asyncio.run(main())
"""


@guarantee("killed", "others proceed", on=SQLITE)
async def test_a_killed_party_leaves_and_another_takes_its_place(sqlite_url: str) -> None:
    async with tenure.connect(sqlite_url) as client, program(PARTY, sqlite_url) as doomed:
        async with asyncio.timeout(20):
            barrier = Barrier(client, "phase", 2)
            await barrier.wait()  # with the program, which then waits for the second round
            async with client.semaphore("phase").watch(owners=True) as states:
                async for state in states:
                    if len(state.owners) == 1:
                        break
                doomed.kill()
                async for state in states:
                    if not state.owners:
                        break
            assert sorted(await asyncio.gather(barrier.wait(), barrier.wait())) == [0, 1]
