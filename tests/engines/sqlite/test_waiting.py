"""How long a request waits, as the engine that looks after it sees it."""

from __future__ import annotations

from tenure.engines.contract import Place, Removal
from tests.engines.sqlite.conftest import Workers, on_either
from tests.engines.sqlite.helpers import attached, opened, program, result


async def test_a_killed_waiters_timeout_is_applied_by_any_other_program(workers: Workers) -> None:
    """As behind a server, whose sessions outlive it: killed, it applies no deadline."""
    async with workers(2) as (owner, other), workers(1, attach=False) as (killed,):
        await killed.do("attach", window=600.0, renew=True, liveness="window")
        await owner.do("create", name="pool", limit=2)
        await owner.do("enqueue", hold=1, name="pool", count=1, ephemeral=False)
        late = {"hold": 1, "name": "pool", "count": 2, "timeout": 0.7, "ephemeral": False}
        assert (await killed.do("enqueue", **late))[0] == "WAITING"
        await killed.kill()
        await other.do("enqueue", hold=1, name="pool", count=1, ephemeral=False)
        await other.hear("granted", hold=1)


async def test_timeouts_that_were_replaced_do_not_pile_up(url: str) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        for hold in (2, 3):
            assert await one.enqueue(hold, "x", timeout=3600.0) is Place.WAITING
        for number in range(1000):
            sooner, later = 3600.0 - number, 3600.0 + number
            await result(one.session.alter(2, count=None, data=None, timeout=sooner))
            await result(one.session.alter(3, count=None, data=None, timeout=later))
        assert len(engine.monitor._deadlines) < 200
        await result(one.session.alter(3, count=None, data=None, timeout=0.05))
        await one.heard.wait_for(lambda heard: 3 in heard.removals, "the end of the time")
        assert one.heard.removals == {3: Removal.TIMED_OUT}


@on_either
async def test_a_time_that_was_replaced_is_over_when_the_last_one_is(url: str) -> None:
    async with program(url) as one:
        await one.enqueue(1, "x")
        await one.enqueue(2, "x", timeout=3600.0)
        began = one.session._now()
        answers = [
            one.session.alter(2, count=None, data=None, timeout=timeout)
            for timeout in (0.01, None, 3600.0, 0.2)
        ]
        for answer in answers:
            await result(answer)
        await one.heard.wait_for(lambda heard: 2 in heard.removals, "the end of the time")
        assert one.session._now() - began >= 0.2
        assert one.heard.removals == {2: Removal.TIMED_OUT}
        await one.withdraw(1)
        assert not one.heard.grants
