"""Sessions that outlive their process, the store's being open, and the machine's uptime.

The tests with processes record when each side was seen to hold (`Lease.held`), on the clock that
all of them share: never two at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal

import pytest

from tenure.engines.contract import Attach, Place
from tenure.engines.sqlite.engine import SqliteEngine
from tenure.engines.sqlite.sessions import Found
from tenure.engines.sqlite.transaction import EVICTED, GRANTED
from tenure.errors import EngineError, EngineUnavailable, SessionExpired
from tenure.model import NodeConfig, Recovered
from tenure.testing.recorder import GrantedRequest, Recorder, Resumed
from tests.engines.sqlite.conftest import Holders, on_either
from tests.engines.sqlite.helpers import Program, attached, engine_of, opened, program, result
from tests.engines.sqlite.holder import Holder
from tests.engines.sqlite.test_life import Hands
from tests.engines.sqlite.worker import Refused, is_taking_over, now
from tests.guarantees import DURABLE_SQLITE, SQLITE, guarantee

WINDOW = 2.0
PROMPT = 5.0  # seconds; less than a third of the window, after which everybody looks in any case


# Processes


@on_either
@guarantee("restarted", "kept", on=(SQLITE, DURABLE_SQLITE))
@guarantee("killed", "in order", "tokens rise", on=(SQLITE, DURABLE_SQLITE))
async def test_a_restarted_process_has_what_the_killed_one_had(holders: Holders) -> None:
    async with holders(3) as (first, second, other):
        token = await first.do("begin", window=30)
        await other.do("begin", window=30)
        held = await first.do("lock", name="held")
        blocking = await other.do("lock", name="awaited")
        await first.do("line_up", name="awaited")
        await other.do("line_up", name="held")
        await first.kill()
        resumed = await second.do("resume", token=token)
        assert resumed["took"] < 5  # and not the window
        (one, one_token, owns), (two, two_token, also) = resumed["found"]
        assert ((one, one_token, owns), (two, also)) == (("held", held, True), ("awaited", False))
        assert await second.do("recover", name="held") == held
        awaiting = second.send("recover", name="awaited")
        assert not other.has_heard("holds", name="held")
        await other.do("release", name="awaited")
        assert await second.outcome(awaiting) == two_token > blocking
        await second.do("release", name="held")
        assert (await other.hear("holds", name="held"))["token"] > held


@on_either
@guarantee("taken over", "one owner", "loss reported", on=(SQLITE, DURABLE_SQLITE))
async def test_after_a_stop_the_session_is_taken_over_when_belief_has_ended(
    holders: Holders,
) -> None:
    async with holders(3) as (stopped, successor, other):
        token = await stopped.do("begin", window=WINDOW)
        await other.do("begin", window=30)
        held = await stopped.do("lock", name="m")
        stopped.stop()
        resumed = await successor.do("resume", token=token)
        assert await successor.do("recover", name="m") == held
        # What was asked of it meanwhile, it does when it goes on.
        late = [stopped.send("lock", name="another"), stopped.send("release", name="m")]
        stopped.signal(signal.SIGCONT)
        lost = await stopped.hear("lost", name="m")
        assert lost["last"] < resumed["at"]
        assert lost["deadline"] <= resumed["at"], "it could still believe"
        for number in late:
            with pytest.raises(Refused, match=r"SessionExpired|LeaseLost"):
                await stopped.outcome(number)
        with pytest.raises(Refused, match="AcquireTimeout"):
            await other.do("lock", name="m", timeout=0)
        await other.do("lock", name="another", timeout=0)
        assert not successor.has_heard("lost")


@guarantee("taken over", "one owner", "loss reported", "others proceed", on=SQLITE)
async def test_a_living_holder_is_told_and_followed_at_once(holders: Holders) -> None:
    async with holders(2) as (former, successor):
        token = await former.do("begin", window=60)
        await successor.do("open")
        for each in (former, successor):
            await each.do("look_no_more")
        held = await former.do("lock", name="m")
        resumed = await successor.do("resume", token=token)
        assert resumed["took"] < PROMPT
        assert resumed["found"] == [["m", held, True]]
        lost = await former.hear("lost", name="m")
        assert lost["last"] < resumed["at"]
        assert "resumed it" in lost["why"]
        with pytest.raises(Refused, match="SessionExpired"):
            await former.do("lock", name="another")
        with pytest.raises(Refused, match="LeaseLost"):
            await former.do("release", name="m")
        await former.do("close")
        assert await successor.do("recover", name="m") == held


async def test_a_stop_that_ends_in_time_does_not_make_the_successor_wait(
    holders: Holders,
) -> None:
    async with holders(2) as (former, successor):
        token = await former.do("begin", window=60)
        await successor.do("open")
        for each in (former, successor):
            await each.do("look_no_more")
        await former.do("lock", name="m")
        former.stop()
        resuming = successor.send("resume", token=token)
        await until_taken(successor)
        continued = now()
        former.signal(signal.SIGCONT)
        resumed = await successor.outcome(resuming)
        assert resumed["at"] - continued < PROMPT
        assert (await former.hear("lost", name="m"))["last"] < resumed["at"]


async def test_the_death_of_a_stopped_holder_ends_the_wait(holders: Holders) -> None:
    async with holders(2) as (former, successor):
        token = await former.do("begin", window=60)
        held = await former.do("lock", name="m")
        await successor.do("open")
        await successor.do("look_no_more")
        former.stop()
        resuming = successor.send("resume", token=token)
        await until_taken(successor)
        killed = now()
        await former.kill()
        resumed = await successor.outcome(resuming)
        assert resumed["at"] - killed < PROMPT
        assert await successor.do("recover", name="m") == held


async def test_who_is_taken_for_dead_is_not_waited_for(holders: Holders) -> None:
    async with holders(2) as (former, successor):
        token = await former.do("begin", window=60)
        held = await former.do("lock", name="m")
        former.stop()
        resumed = await successor.do("resume", token=token, assume_dead=True)
        assert resumed["took"] < 5
        assert await successor.do("recover", name="m") == held


@guarantee("taken over", "one owner", on=SQLITE)
async def test_the_last_of_several_waits_for_the_first_as_well(holders: Holders) -> None:
    async with holders(3) as (stopped, second, third):
        token = await stopped.do("begin", window=WINDOW)
        await stopped.do("lock", name="m")
        stopped.stop()
        resuming = second.send("resume", token=token)
        await until_taken(second)
        resumed = await third.do("resume", token=token)
        with pytest.raises(Refused, match=r"SessionExpired.*resumed it"):
            await second.outcome(resuming)
        stopped.signal(signal.SIGCONT)
        lost = await stopped.hear("lost", name="m")
        assert lost["last"] < resumed["at"]
        assert lost["deadline"] <= resumed["at"]


@guarantee("killed", "others proceed", on=SQLITE)
async def test_a_session_that_nobody_resumes_ends_with_its_window(holders: Holders) -> None:
    async with holders(2) as (dead, waiter):
        await dead.do("begin", window=2 * WINDOW)
        await waiter.do("begin", window=30)
        await dead.do("lock", name="m")
        await waiter.do("line_up", name="m")
        killed = now()
        await dead.kill()
        with pytest.raises(Refused, match="AcquireTimeout"):
            await waiter.do("lock", name="m", timeout=0)
        granted = await waiter.hear("holds", name="m")
        assert granted["at"] - killed > WINDOW / 2  # not with its process; a renewal may be late


@pytest.mark.exhaustive
@on_either
@guarantee("taken over", "one owner", on=(SQLITE, DURABLE_SQLITE))
async def test_take_overs_stops_and_kills_never_make_two_holders(holders: Holders) -> None:
    chance = random.Random(11)
    async with holders(6) as everyone:
        living = everyone[:]
        holder = living[0]
        token = await holder.do("begin", window=1.5)
        await holder.do("lock", name="m")
        killed: dict[Holder, float] = {}
        for _ in range(8):
            fate = chance.choice(["stop", "stop", "live", "kill"])
            if fate == "stop":
                holder.stop()
            elif fate == "kill" and len(living) > 3:
                await holder.kill()
                living.remove(holder)
                killed[holder] = now()
            successor = chance.choice([each for each in living if each is not holder])
            resuming = successor.send("resume", token=token)
            if fate == "stop":
                await asyncio.sleep(chance.random() * 1.0)  # before, or after it is believed dead
                holder.signal(signal.SIGCONT)
            await successor.outcome(resuming)
            await successor.do("recover", name="m")
            if holder not in killed:
                await holder.believes_no_more("m")
            holder = successor
        beliefs = sorted(
            (begin, min(end, killed.get(each, end)))
            for each in everyone
            for begin, end in each.beliefs("m")
        )
        assert len(beliefs) == 9
        for (_, end), (begin, _) in itertools.pairwise(beliefs):
            assert end < begin


async def until_taken(successor: Holder) -> None:
    """Return when a take-over that was sent has reached the store."""
    while not await successor.do("is_taking_over"):
        pass


# One process: what the store does


async def resume(engine: SqliteEngine, former: Program, **how: object) -> Program:
    """Take a session over."""
    heard = Recorder()
    attach = Attach("/default", 30.0, session_id=former.session.id, **how)  # type: ignore[arg-type]
    return Program(await engine.attach(attach, heard), heard)


def make_deaf(engine: SqliteEngine) -> None:
    """It reads no news, as one whose loop is stuck."""
    engine.monitor.delivery.read = lambda tx: 0  # type: ignore[method-assign]


async def taking_over(engine: SqliteEngine) -> None:
    """Return when a take-over by this engine has reached the store."""
    while not is_taking_over(engine):  # noqa: ASYNC110  nobody is told of it
        await asyncio.sleep(0)


@guarantee("taken over", "loss reported", on=SQLITE)
async def test_the_commands_of_a_former_attachment_are_refused_by_the_store(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        former = await attached(here, liveness="window")
        await former.enqueue(1, "m")
        await former.session.create_semaphore("pool", 2, b"", exist_ok=False)
        # Nothing turns the loop, so that the former side has not been told.
        successor = await resume(there, former, assume_dead=True)
        assert former.heard.end is None
        with pytest.raises(SessionExpired, match="resumed it"):
            await former.enqueue(2, "another")
        with pytest.raises(SessionExpired, match="resumed it"):
            await result(former.session.alter(1, count=None, data=b"x"))
        with pytest.raises(SessionExpired, match="resumed it"):
            await former.session.create_semaphore("new", 2, b"", exist_ok=True)
        with pytest.raises(SessionExpired, match="resumed it"):
            await former.session.update_semaphore("pool", b"x")
        with pytest.raises(SessionExpired, match="resumed it"):
            await former.session.delete_semaphore("pool", force=True)
        with pytest.raises(SessionExpired, match="resumed it"):
            await former.withdraw(1)
        found = await successor.session.describe_semaphore("m", owners=True, waiters=True)
        assert [owner.data for owner in found.owners] == [b""]
        assert len(await there.list_semaphores("/default", owners=False, waiters=False)) == 2


@pytest.mark.parametrize("how", ["close", "detach"])
async def test_a_former_attachment_that_leaves_does_no_harm(url: str, how: str) -> None:
    async with opened(url) as here, opened(url) as there:
        former = await attached(here, liveness="window")
        await former.enqueue(1, "m")
        successor = await resume(there, former, assume_dead=True)
        assert former.heard.end is None
        await getattr(former.session, how)()
        (described,) = await there.list_sessions("/default")
        assert described.attached
        assert successor.heard.found[0].granted
        with there.store.reading() as tx:
            assert tx.execute("SELECT count(*) FROM news WHERE kind = 7").fetchone() == (0,)


async def test_an_engine_takes_its_own_session_over(url: str) -> None:
    async with opened(url) as engine:
        former = await attached(engine, liveness="window")
        other = await attached(engine)
        await other.enqueue(1, "n")
        await former.enqueue(1, "m")
        await former.enqueue(2, "n")
        successor = await resume(engine, former)
        assert former.heard.end is not None
        assert [each.request_id for each in successor.heard.found] == [1, 2]
        await other.withdraw(1)
        await successor.granted(2)
        assert former.heard.grants == {}
        assert (await engine.list_sessions("/default"))[0].attached
        again = await resume(engine, successor)
        assert [each.granted for each in again.heard.found] == [True, True]


async def test_what_happens_while_a_take_over_waits_is_found_or_told(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        former = await attached(here, liveness="window")
        other = await attached(there)
        await other.enqueue(1, "n")
        for hold, name in enumerate(["n", "o", "p"], 1):
            await former.enqueue(hold, name)
        make_deaf(here)
        heard = Recorder()
        how = Attach("/default", 30.0, session_id=former.session.id)
        attaching = asyncio.create_task(there.attach(how, heard))
        await taking_over(there)
        await other.withdraw(1)
        (place,) = (await other.session.describe_semaphore("o", owners=True, waiters=False)).owners
        assert place.order_id is not None
        await there.evict("/default", "o", place.order_id)
        assert not attaching.done()
        assert heard.said == []
        former.session.superseded()
        successor = Program(await attaching, heard)
        assert [(each.request_id, each.granted) for each in heard.found] == [(1, True), (3, True)]
        assert heard.removals == {}
        assert heard.broken == []
        assert await successor.enqueue(4, "o") is Place.GRANTED


async def test_a_push_between_the_last_look_and_the_answer_is_told_after_what_was_found(
    url: str,
) -> None:
    async with opened(url) as here, opened(url) as there:
        former = await attached(here, liveness="window")
        await former.enqueue(1, "m")
        make_deaf(here)
        heard = Recorder()
        how = Attach("/default", 30.0, session_id=former.session.id)
        attaching = asyncio.create_task(there.attach(how, heard))
        await taking_over(there)
        delivery = there.monitor.delivery
        session = delivery.sessions[former.session.id]
        pushes = [(GRANTED, session.id, 1, 7, ""), (EVICTED, session.id, 2, None, "")]
        delivery.pass_on(pushes)
        await asyncio.sleep(0)
        assert heard.said == []
        attaching.cancel()
        await asyncio.wait([attaching])
        session.over = False
        delivery.sessions[session.id] = session
        waiting = Recovered(1, "m", 7, 1, b"", True, False)
        session.begin([Found(waiting, None)])
        assert heard.said == [Resumed((waiting,))]
        await asyncio.sleep(0)
        assert heard.said == [Resumed((waiting,)), GrantedRequest(1, 7)], "and not what was before"


async def test_a_recovered_place_is_looked_after(url: str) -> None:
    async with opened(url) as there:
        other = await attached(there)
        await other.enqueue(1, "m")
        async with opened(url) as here:
            former = await attached(here, liveness="window")
            await former.enqueue(1, "m", timeout=0.5)
            await former.session.detach()
        successor = await resume(there, former)
        assert [each.request_id for each in successor.heard.found] == [1]
        await successor.heard.wait_for(lambda heard: 1 in heard.removals, "the end of the wait")


async def test_a_take_over_that_was_read_is_not_acknowledged_before_it_was_told(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        former = await attached(here, liveness="window")
        attaching = asyncio.create_task(resume(there, former))
        await taking_over(there)
        here.monitor.notified()
        await here.create_node("/n", NodeConfig(), exist_ok=False)  # which removes what was read
        with there.store.reading() as tx:
            assert tx.execute("SELECT count(*) FROM news WHERE kind = 7").fetchone() == (1,)
        assert former.heard.end is None
        await attaching
        assert former.heard.end is not None


async def test_a_take_over_keeps_the_session_alive_while_it_waits(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        former = await attached(here, liveness="window", window=1.0)
        await former.enqueue(1, "m")
        make_deaf(here)
        until = now() + 2.5
        attaching = asyncio.create_task(resume(there, former))
        while now() < until:  # it goes on renewing, as a program does whose loop is stuck
            former.session.renew()
            await asyncio.wait([attaching], timeout=0.1)
            assert not attaching.done()
        successor = await attaching
        assert former.heard.proofs[-1] + 1.0 < successor.heard.proofs[0]


async def test_closing_an_engine_leaves_what_it_was_taking_over_detached(url: str) -> None:
    async with opened(url) as here, opened(url) as eye:
        former = await attached(here, liveness="window")
        await former.enqueue(1, "m")
        make_deaf(here)
        there = engine_of(url)
        await there.open()
        attaching = asyncio.create_task(resume(there, former))
        await taking_over(there)
        await there.aclose()
        with pytest.raises((EngineError, EngineUnavailable)):
            await attaching
        (described,) = await eye.list_sessions("/default")
        assert not described.attached
        former.session.superseded()
        successor = await resume(eye, former)
        assert successor.session.attach_number == 3


async def test_closing_an_engine_detaches_what_it_was_about_to_take_over(url: str) -> None:
    async with opened(url) as here, opened(url) as eye:
        former = await attached(here, liveness="window")
        for cancelled in (False, True):
            there = engine_of(url)
            await there.open()
            await attached(there)
            turn = here.store.turn
            assert turn.try_take()
            attaching = asyncio.create_task(resume(there, former))
            await asyncio.sleep(0)
            if cancelled:
                attaching.cancel()
            closing = asyncio.create_task(there.aclose())
            await asyncio.sleep(0)
            turn.release()
            await closing
            with pytest.raises((EngineError, EngineUnavailable, asyncio.CancelledError)):
                await attaching
            (described,) = await eye.list_sessions("/default")
            assert (described.id, described.attached) == (former.session.id, False)


# Reopening, and reboots


@on_either
@guarantee("restarted", "kept", "nothing leaks", on=(SQLITE, DURABLE_SQLITE))
async def test_after_everybody_was_gone_a_session_has_its_window_and_a_grace_period(
    url: str,
) -> None:
    clock = Hands()
    async with opened(url, clock) as engine:
        await engine.create_node("/n", NodeConfig(session_grace_period=5), exist_ok=False)
        former = await attached(engine, "/n", window=10, liveness="window")
        await former.enqueue(1, "m")
        await former.session.detach()
    clock.time += 1000
    async with opened(url, clock) as engine:
        clock.time += 14.9
        assert [each.id for each in await engine.list_sessions("/n")] == [former.session.id]
        other = await attached(engine, "/n", window=10, liveness="window")
        await other.session.detach()
    async with opened(url, clock) as engine:  # once is enough
        clock.time += 0.2
        assert [each.id for each in await engine.list_sessions("/n")] == [other.session.id]


@on_either
@guarantee("restarted", "kept", on=(SQLITE, DURABLE_SQLITE))
async def test_a_session_is_resumed_long_after_everybody_was_gone(url: str) -> None:
    clock = Hands()
    async with opened(url, clock) as engine:
        former = await attached(engine, window=10, liveness="window")
        await former.enqueue(1, "m")
        await former.session.detach()
    clock.time += 1000
    async with opened(url, clock) as engine:
        successor = await resume(engine, former)
        assert [each.granted for each in successor.heard.found] == [True]
        await successor.session.detach()
    clock.time += 1000
    async with opened(url, clock) as engine:
        assert (await resume(engine, former)).session.attach_number == 3


async def test_while_somebody_is_there_a_session_has_its_window_alone(url: str) -> None:
    clock = Hands()
    async with opened(url, clock) as engine, program(url, clock) as other:
        former = await attached(engine, window=10, liveness="window")
        await former.session.detach()
        async with opened(url, clock):
            clock.time += 10.1
            async with opened(url, clock) as late:
                other.session.renew()
                sessions = await late.list_sessions("/default")
                assert [each.id for each in sessions] == [other.session.id]


@on_either
@guarantee("power cut", "kept", on=(SQLITE, DURABLE_SQLITE))
async def test_a_session_outlives_a_reboot(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hands()
    engine = engine_of(url, clock)
    await engine.open()
    mortal = await attached(engine)
    former = await attached(engine, window=10, liveness="window")
    await mortal.enqueue(1, "n")
    await former.enqueue(1, "m")
    await former.enqueue(2, "n", timeout=100)
    engine._release(EngineError("the machine is gone"), left=False)
    monkeypatch.setattr("tenure.engines.sqlite.store.boot_id", lambda: "another")
    clock.time = 3.0  # the clock begins anew
    async with opened(url, clock) as engine:
        clock.time += 19.9
        successor = await resume(engine, former)
        assert [each.granted for each in successor.heard.found] == [True, True]
        with pytest.raises(SessionExpired, match="has ended"):
            await resume(engine, mortal)
        (owner,) = (
            await successor.session.describe_semaphore("n", owners=True, waiters=False)
        ).owners
        assert owner.since == pytest.approx(19.9)


@on_either
@guarantee("power cut", "nothing leaks", on=(SQLITE, DURABLE_SQLITE))
async def test_a_reboot_does_not_make_sessions_immortal(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Hands()
    engine = engine_of(url, clock)
    await engine.open()
    former = await attached(engine, window=10, liveness="window")
    engine._release(EngineError("the machine is gone"), left=False)
    monkeypatch.setattr("tenure.engines.sqlite.store.boot_id", lambda: "another")
    clock.time = 3.0
    async with opened(url, clock) as engine:
        clock.time += 20.1
        with pytest.raises(SessionExpired, match="has ended"):
            await resume(engine, former)


@pytest.mark.parametrize("url", ["?durability=full"], indirect=True)
async def test_nobody_has_to_hear_how_a_cancelled_take_over_failed(url: str) -> None:
    """Nothing is left that would be complained of: the tests' own loop hears such complaints."""
    async with opened(url) as engine, asyncio.timeout(30):
        former = await engine.attach(Attach("/default", 30, liveness="window"), Recorder())
        await former.close()
        gone = Attach("/default", 30, liveness="window", session_id=former.id)
        taking = asyncio.create_task(engine.attach(gone, Recorder()))
        await asyncio.sleep(0)  # it has begun, and its answer is on its way from the disk
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert "/default" in await engine.list_nodes()  # by now it has failed
