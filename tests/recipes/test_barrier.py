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
    InvalidArgument,
    LeaseLost,
    SemaphoreNotFound,
    SessionExpired,
)
from tenure.recipes import Barrier
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
        with pytest.raises(SessionExpired):
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
@settings(max_examples=60)
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


PARTY = """
import asyncio, sys, tenure
from tenure.recipes import Barrier

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
