"""Faults that every engine can meet, and what holds on each.

`memory://` lives in virtual time here, but where a loop is stuck in earnest. Faults of processes
and disks are tested where their engines are.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

import tenure
from tenure.fencing import Fence
from tests.corpus.subjects import SUBJECTS, Check, Scene, run
from tests.engines.stores import Variant
from tests.guarantees.vocabulary import INAPPLICABLE, Fault, Promise, broken, guarantee
from tests.primitives.helpers import is_held


def on_each_engine(
    fault: Fault, *promises: Promise, does_not_hold: bool = False, real_time: bool = False
) -> Callable[[Check], Callable[[Variant], None]]:
    """Make a test of a check, run on every engine that the fault concerns."""
    mark = broken if does_not_hold else guarantee
    subjects = [
        pytest.param(each, id=each.name, marks=mark(fault, *promises, on=each.name))
        for each in SUBJECTS
        if (each.name, fault) not in INAPPLICABLE
    ]

    def make(check: Check) -> Callable[[Variant], None]:
        @pytest.mark.parametrize("subject", subjects)
        def test(subject: Variant) -> None:
            run(check, subject.slow_stores if real_time else subject.stores, planted=False)

        return test

    return make


@on_each_engine("cut off", "one owner", "loss reported", "others proceed")
async def test_who_is_out_of_reach_believes_no_more_when_the_next_holds(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with scene.client() as other, client:
        session = await client.session(recovery_window=1)
        lease = await session.mutex("m").lock()
        waiting = asyncio.create_task(other.mutex("m").lock())
        await scene.queued("m", 2)
        engine.cut()
        following = await scene.soon(waiting)
        assert not is_held(lease)
        assert lease.deadline <= scene.clock.now()
        assert following.fencing_token > lease.fencing_token
        engine.mend()


@on_each_engine("cut off", "kept")
async def test_a_silence_within_the_window_costs_nothing(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with scene.client() as other, client:
        session = await client.session(recovery_window=scene.window)
        lease = await session.mutex("m").lock()
        engine.cut()
        deadline = lease.deadline
        await asyncio.sleep(0.3 * scene.window)
        engine.mend()

        async def proven() -> bool:
            return lease.deadline > deadline

        await scene.eventually(proven, "a proof after the silence")
        assert is_held(lease)
        assert await other.mutex("m").try_lock() is None


@on_each_engine("cancelled", "one owner", "in order", "kept", "others proceed")
async def test_waiters_that_are_cancelled_leave_the_others_alone_and_in_order(
    scene: Scene,
) -> None:
    served: list[int] = []
    inside: set[int] = set()

    async def contend(client: tenure.Client, number: int) -> None:
        async with client.mutex("m").lock():
            assert not inside
            inside.add(number)
            served.append(number)
            tasks[3].cancel()  # whether it waits, is just being granted, or has begun
            await asyncio.sleep(0)
            inside.discard(number)

    tasks: list[asyncio.Task[None]] = []
    async with scene.client() as client:
        async with client.mutex("m").lock() as lease:
            for number in range(5):
                tasks.append(asyncio.create_task(contend(client, number)))
                await scene.queued("m", number + 2)
            tasks[2].cancel()
            await scene.queued("m", 5)
            assert is_held(lease)
        await scene.soon(asyncio.wait(tasks))
        assert [task.cancelled() for task in tasks] == [False, False, True, True, False]
    assert served == [0, 1, 4]


@on_each_engine("suspended", "one owner", "loss reported", "others proceed")
async def test_after_a_long_suspension_nothing_is_held_and_all_is_free(scene: Scene) -> None:
    async with scene.client() as client, scene.client() as other:
        session = await client.session(recovery_window=scene.window)

        async def hold() -> None:
            async with session.mutex("m").lock() as lease:
                scene.suspend(3600)
                assert not is_held(lease)  # at once, whoever asks
                await scene.in_vain()

        with pytest.raises(tenure.LeaseLost):
            await hold()
        following = await scene.soon(other.mutex("m").lock())
        assert is_held(following)


@on_each_engine("suspended", "kept")
async def test_a_suspension_within_the_window_costs_nothing(scene: Scene) -> None:
    async with scene.client() as client, scene.client() as other:
        session = await client.session(recovery_window=60)
        lease = await session.mutex("m").lock()
        deadline = lease.deadline
        scene.suspend(40)
        assert is_held(lease)
        assert await other.mutex("m").try_lock() is None

        async def proven() -> bool:
            return lease.deadline > deadline

        await scene.eventually(proven, "a proof after the suspension")
        assert is_held(lease)


@on_each_engine("stalled", "one owner", "loss reported", "others proceed", real_time=True)
async def test_a_wedged_program_believes_no_more_when_the_next_holds(scene: Scene) -> None:
    held: list[tenure.Lease] = []
    begun, may_end = threading.Event(), threading.Event()

    async def wedge() -> None:
        async with tenure.connect(scene.url) as client:
            session = await client.session(recovery_window=1, max_stall=0.5)
            held.append(await session.mutex("m").lock())
            begun.set()
            assert may_end.wait(60)  # and its loop does not turn

    wedged = threading.Thread(target=lambda: asyncio.run(wedge()))
    wedged.start()
    try:
        await asyncio.to_thread(begun.wait)
        began = time.monotonic()
        async with scene.client() as other:
            following = await scene.soon(other.mutex("m").lock())
            assert not is_held(held[0])
            assert time.monotonic() - began > 0.5
            assert following.fencing_token > held[0].fencing_token
    finally:
        may_end.set()
        await asyncio.to_thread(wedged.join)


@on_each_engine("wall clock", "loss reported")
async def test_a_wall_clock_that_is_set_back_prolongs_no_belief(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with client:
        session = await client.session(recovery_window=1)
        lease = await session.mutex("m").lock()
        engine.cut()
        scene.set_wall(scene.clock.wall() - 1e6)
        await asyncio.sleep(lease.deadline - scene.clock.now() + 0.001)
        assert not is_held(lease)
        await scene.soon(lease.wait_lost())
        engine.mend()


@on_each_engine("administrator", "one owner", does_not_hold=True)
async def test_who_is_evicted_believes_until_the_news_arrives(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with scene.client() as other, client:
        lease = await client.mutex("m").lock()
        engine.back.flowing = False
        assert await other.evict("/default", "m", lease.fencing_token)
        following = await scene.soon(other.mutex("m").lock())
        assert is_held(following)
        assert is_held(lease)  # two, and only the fencing token tells who is the later one
        assert following.fencing_token > lease.fencing_token
        engine.mend()
        await scene.soon(lease.wait_lost())


@on_each_engine("administrator", "fenced")
async def test_what_is_written_by_who_believes_wrongly_is_refused(scene: Scene) -> None:
    fence, written = Fence("report"), []
    client, engine = scene.slow(1)
    async with scene.client() as other, client:
        lease = await client.mutex("m").lock()
        engine.back.flowing = False
        assert await other.evict("/default", "m", lease.fencing_token)
        following = await scene.soon(other.mutex("m").lock())
        with fence.writing(following):
            written.append("the next")
        assert is_held(lease)
        with pytest.raises(tenure.StaleToken), fence.writing(lease):
            written.append("the one who was evicted")
        engine.mend()
    assert written == ["the next"]


@on_each_engine("administrator", "tokens rise", "nothing leaks")
async def test_a_name_that_was_deleted_by_force_begins_with_a_higher_token(scene: Scene) -> None:
    async with scene.client() as client:
        await client.semaphore("pool").create(limit=2)
        lease = await client.semaphore("pool").acquire()
        await client.semaphore("pool").delete(force=True)
        await client.semaphore("pool").create(limit=2)
        following = await client.semaphore("pool").acquire(2)
        assert following.fencing_token > lease.fencing_token


@on_each_engine("restarted", "tokens rise")
async def test_tokens_rise_through_a_restart_although_the_wall_clock_was_set_back(
    scene: Scene,
) -> None:
    tokens = []
    for _ in range(3):
        async with scene.client() as client, client.mutex("m").lock() as lease:
            tokens.append(lease.fencing_token)
        await scene.reopen()
        scene.set_wall(scene.clock.wall() - 3600)
    assert tokens == sorted(set(tokens))


@on_each_engine("taken over", "in order", "tokens rise", "others proceed")
async def test_who_waits_behind_a_session_that_is_taken_over_is_granted_next(
    scene: Scene,
) -> None:
    async with scene.client() as former, scene.client() as successor, scene.client() as other:
        session = await former.session(resumable=True)
        lease = await session.mutex("m").lock()
        waiting = asyncio.create_task(other.mutex("m").lock())
        await scene.queued("m", 2)
        resumed = await successor.session(resume=session.resume_token)
        assert not is_held(lease)
        ticket = resumed.mutex("m").recover()
        assert ticket is not None
        recovered = await ticket.wait()
        assert recovered.fencing_token == lease.fencing_token
        assert await other.mutex("m").try_lock() is None
        await recovered.release()
        assert (await scene.soon(waiting)).fencing_token > lease.fencing_token
