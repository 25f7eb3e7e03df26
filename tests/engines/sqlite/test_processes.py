"""Several processes on one file: hand-off, death, silence, and turns that do not end."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from pathlib import Path

import pytest

from tenure.engines.contract import Place
from tests.engines.sqlite.conftest import Holders, Workers, on_either
from tests.engines.sqlite.helpers import program, result
from tests.engines.sqlite.worker import now
from tests.guarantees import DURABLE_SQLITE, SQLITE, guarantee


@guarantee("none", "in order", "tokens rise", "others proceed", on=SQLITE)
async def test_a_release_in_one_process_grants_in_the_next_in_order(workers: Workers) -> None:
    async with workers(3) as (a, b, c):
        assert (await a.do("enqueue", hold=1, name="x"))[0] == "GRANTED"
        second, first_token = await b.do("enqueue", hold=1, name="x")
        third, second_token = await c.do("enqueue", hold=1, name="x")
        assert (second, third) == ("WAITING", "WAITING")
        await a.do("withdraw", hold=1)
        assert (await b.hear("granted", hold=1))["order_id"] == first_token
        assert not c.has_heard("granted")
        await b.do("withdraw", hold=1)
        assert (await c.hear("granted", hold=1))["order_id"] == second_token > first_token


@guarantee("killed", "others proceed", on=SQLITE)
async def test_a_killed_holder_is_followed_at_once(workers: Workers) -> None:
    async with workers(2) as (holder, waiter):
        await waiter.do("look_no_more")
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        await holder.kill()
        await waiter.hear("granted", hold=1)


@guarantee("killed", "in order", "others proceed", on=SQLITE)
async def test_a_killed_waiter_is_passed_over_in_the_same_step(workers: Workers) -> None:
    async with workers(3) as (holder, dead, waiter):
        await waiter.do("look_no_more")
        await holder.do("enqueue", hold=1, name="x")
        await dead.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        await dead.kill()
        await holder.do("withdraw", hold=1)
        await waiter.hear("granted", hold=1)


@on_either
@guarantee("killed", "nothing leaks", on=(SQLITE, DURABLE_SQLITE))
async def test_a_try_right_after_the_holders_death_succeeds(workers: Workers) -> None:
    async with workers(2) as (holder, other):
        await holder.do("enqueue", hold=1, name="x")
        assert (await other.do("enqueue", hold=1, name="x", timeout=0))[0] == "REFUSED"
        await holder.kill()
        assert (await other.do("enqueue", hold=2, name="x", timeout=0))[0] == "GRANTED"


@on_either
async def test_a_waiter_left_without_time_right_after_the_holders_death_is_granted(
    workers: Workers, url: str
) -> None:
    async with workers(1) as (holder,), program(url) as waiter:
        await holder.do("enqueue", hold=1, name="x")
        assert await waiter.enqueue(1, "x") is Place.WAITING
        holder.kill_unheard()
        await result(waiter.session.alter(1, count=None, data=None, timeout=0))
        await waiter.granted(1)
        assert not waiter.heard.removals


@on_either
@guarantee("killed", "nothing leaks", on=(SQLITE, DURABLE_SQLITE))
async def test_a_dead_holder_is_not_described(workers: Workers) -> None:
    async with workers(2) as (holder, other):
        await holder.do("enqueue", hold=1, name="x")
        await other.do("enqueue", hold=1, name="y")
        await holder.kill()
        with pytest.raises(Exception, match="SemaphoreNotFound"):
            await other.do("owners", name="x")


async def test_what_the_dead_leave_in_the_folder_is_removed(workers: Workers, path: Path) -> None:
    def files() -> set[str]:
        return set(os.listdir(f"{path}.tenure"))

    async with workers(1) as (one,):
        await one.do("enqueue", hold=1, name="x")
        await one.kill()
        assert files() == {"turn.lock", "1.live", "1.sock"}
        async with workers(1) as (two,):
            assert files() == {"turn.lock", "2.live", "2.sock"}
            await two.do("close")
        assert files() == {"turn.lock"}


@on_either
@guarantee("stopped", "loss reported", "others proceed", on=(SQLITE, DURABLE_SQLITE))
async def test_a_stopped_holder_is_followed_after_its_window_and_hears_of_it(
    workers: Workers,
) -> None:
    async with workers(1, window=1.5) as (holder,), workers(1) as (waiter,):
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        holder.stop()
        stopped = now()
        granted = await waiter.hear("granted", hold=1)
        assert granted["at"] - stopped > 0.9
        holder.signal(signal.SIGCONT)
        assert "1.5 s" in (await holder.hear("ended"))["error"]
        with pytest.raises(Exception, match="SessionExpired"):
            await holder.do("enqueue", hold=2, name="y")
        assert not await holder.do("renew")


@on_either
@guarantee("stopped", "one owner", "loss reported", "others proceed", on=(SQLITE, DURABLE_SQLITE))
async def test_a_stopped_holder_believes_no_more_when_the_next_one_holds(holders: Holders) -> None:
    async with holders(2) as (stopped, other):
        await stopped.do("begin", window=1.5, resumable=False)
        await other.do("begin", window=30, resumable=False)
        token = await stopped.do("lock", name="m")
        await other.do("line_up", name="m")
        stopped.stop()
        granted = await other.hear("holds", name="m")
        stopped.signal(signal.SIGCONT)
        lost = await stopped.hear("lost", name="m")
        assert lost["last"] < granted["at"]
        assert lost["deadline"] <= granted["at"], "it could still believe"
        assert granted["token"] > token


@on_either
@guarantee("stopped", "kept", on=(SQLITE, DURABLE_SQLITE))
async def test_a_stop_shorter_than_the_window_costs_nothing(workers: Workers) -> None:
    async with workers(2, window=5) as (holder, waiter):
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        holder.stop()
        assert (await waiter.do("enqueue", hold=2, name="x", timeout=0))[0] == "REFUSED"
        holder.signal(signal.SIGCONT)
        assert await holder.do("renew")
        assert not waiter.has_heard("granted")
        await holder.do("withdraw", hold=1)
        await waiter.hear("granted", hold=1)


async def test_without_a_bell_the_tick_finds_the_grant(workers: Workers) -> None:
    async with workers(2) as (holder, waiter):
        await waiter.do("deaf")
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        await holder.do("withdraw", hold=1)
        await waiter.hear("granted", hold=1)


async def test_watchers_in_other_processes_hear_of_changes(workers: Workers) -> None:
    async with workers(2) as (one, two):
        await one.do("create", name="pool", limit=2)
        await two.do("watch", name="pool", data=True, owners=False)
        await one.do("enqueue", hold=1, name="pool", count=1, ephemeral=False)
        await one.do("update", name="pool", data="new")
        await two.hear("changed", name="pool")
        await two.do("watch", name="x", data=False, owners=True)
        await one.do("enqueue", hold=2, name="x")
        await two.hear("changed", name="x")


async def test_watchers_hear_of_a_leaders_death(workers: Workers) -> None:
    async with workers(2) as (leader, observer):
        await leader.do("enqueue", hold=1, name="x")
        await observer.do("watch", name="x", data=False, owners=True)
        await leader.kill()
        await observer.hear("changed", name="x")


@guarantee("fork", "nothing leaks", "others proceed", on=SQLITE)
async def test_a_forked_child_does_not_keep_its_parents_locks(workers: Workers) -> None:
    async with workers(2) as (holder, waiter):
        await holder.do("enqueue", hold=1, name="x")
        child = await holder.do("fork")
        try:
            await waiter.do("look_no_more")
            await waiter.do("enqueue", hold=1, name="x")
            await holder.kill()
            await waiter.hear("granted", hold=1)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_child_that_was_given_the_sign_of_life_keeps_the_lock(workers: Workers) -> None:
    async with workers(2) as (holder, waiter):
        await holder.do("enqueue", hold=1, name="x")
        child = await holder.do("inherit")
        try:
            await waiter.do("enqueue", hold=1, name="x")
            await holder.kill()
            assert (await waiter.do("enqueue", hold=2, name="x", timeout=0))[0] == "REFUSED"
            assert not waiter.has_heard("granted")
        finally:
            os.kill(child, signal.SIGKILL)
        await waiter.hear("granted", hold=1)


def check_history(holds: list[tuple[int, float, float]]) -> None:
    """Tokens rise in the order of holding, and nobody overlaps."""
    for (_, _, end), (_, begin, _) in itertools.pairwise(sorted(holds)):
        assert end <= begin


@pytest.mark.exhaustive
@on_either
@guarantee("none", "one owner", "tokens rise", on=(SQLITE, DURABLE_SQLITE))
async def test_sixteen_contenders_never_overlap_and_take_turns(workers: Workers) -> None:
    async with workers(16) as contenders:
        numbers = [each.send("contend", name="x", seconds=2.0) for each in contenders]
        for each, number in zip(contenders, numbers, strict=True):
            await each.outcome(number)
        check_history([hold for each in contenders for hold in each.holds()])
        # Only while all contend: on a busy machine some begin, and end, well before others.
        spans = [sorted(at for _, at, _ in each.holds()) for each in contenders]
        first, last = max(each[0] for each in spans), min(each[-1] for each in spans)
        counts = [sum(first <= at <= last for at in each) for each in spans]
        assert min(counts) >= 0.5 * max(counts) - 1, counts


@pytest.mark.exhaustive
@on_either
@guarantee("killed", "one owner", "tokens rise", "others proceed", on=(SQLITE, DURABLE_SQLITE))
@guarantee("stopped", "one owner", "tokens rise", "kept", on=(SQLITE, DURABLE_SQLITE))
async def test_stops_and_kills_break_nothing(workers: Workers, url: str) -> None:
    chance = random.Random(7)
    gone: list[tuple[int, float, float]] = []
    async with workers(8) as contenders:
        running = contenders[:]
        numbers = {each: each.send("contend", name="x", seconds=6.0) for each in running}
        while len(running) > 3:
            await asyncio.sleep(chance.random() * 0.3)
            victim = chance.choice(running)
            if chance.random() < 0.4:
                killed = now()  # when it is known to be dead, the next one may hold already
                await victim.kill()
                running.remove(victim)
                gone += [(token, begin, min(end, killed)) for token, begin, end in victim.holds()]
            else:
                victim.stop()
                await asyncio.sleep(chance.random() * 0.2)
                victim.signal(signal.SIGCONT)
        for each in running:
            await each.outcome(numbers[each])
        assert all(not each.has_heard("ended") for each in running), "nobody has lost anything"
        check_history(gone + [hold for each in running for hold in each.holds()])


@pytest.mark.exhaustive
async def test_an_idle_waiter_costs_next_to_nothing(workers: Workers) -> None:
    async with workers(2) as (holder, waiter):
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        before, start = await waiter.do("cpu"), now()
        await asyncio.sleep(4)  # what is measured is the time itself
        used, took = await waiter.do("cpu") - before, now() - start
        assert used / took < 0.01
