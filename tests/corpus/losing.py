"""Pains of those who lose what they hold: silently, too late, for nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import tenure
from tenure import fork
from tenure._client import scope
from tenure._client.client_core import TICK, Keeper
from tenure._client.request import Request
from tenure._client.session_core import SessionCore
from tenure._client.session_life import Proof
from tenure.engines.redis.session import RedisSession
from tenure.testing.clock import VirtualClock
from tests.corpus.rows import does_nothing, replacing, row, together
from tests.corpus.subjects import Scene, SystemClockThatSteps
from tests.engines.redis.servers import forget_as_in_a_failover
from tests.primitives.helpers import is_held


@row(
    1,
    replacing(scope.Scope, "trigger", does_nothing),
    not_on={"dflockd": "tests/corpus/lines.py asks it, by cutting connections off"},
    shows=("administrator", ("loss reported",)),
)
async def the_body_of_a_lost_lease_is_cancelled(scene: Scene) -> None:
    went_on = False
    async with scene.client() as client:
        session = await client.session(description="victim")

        async def hold() -> None:
            nonlocal went_on
            async with session.mutex("x").lock():
                await scene.end_sessions("victim")
                await scene.in_vain()
                went_on = True

        with pytest.raises(tenure.LeaseLost):
            await hold()
    assert not went_on


def _renews_nothing(self: Keeper, sessions: list[Any]) -> float:
    for session in sessions:
        if self._clock.now() >= session.deadline:
            session._core.lapse()
    return TICK


@row(
    2,
    replacing(Keeper, "_watch_sessions", _renews_nothing),
    not_on={
        "ydb": "its SDK lives in the loop: what is stuck for longer than its window has lost it"
    },
    real_time=True,
    shows=("stalled", ("kept",)),
)
async def a_loop_stuck_in_one_call_keeps_its_lease(scene: Scene) -> None:
    async with scene.client() as client:
        session = await client.session(recovery_window=4, max_stall=60)
        async with session.mutex("x").lock() as lease:
            until = time.monotonic() + 5
            while time.monotonic() < until and lease.held:
                time.sleep(0.1)  # noqa: ASYNC251  the loop is to be stalled
            assert lease.held


def raise_the_failure(error: BaseException | None, failure: Exception, what: str) -> None:
    raise failure


@row(
    6,
    lambda patch: patch.setattr("tenure._client.lease.note_failure", raise_the_failure),
    seen_as=(tenure.EngineError,),  # in the place of the body's
    shows=("cut off", ("nothing leaks",)),
)
async def the_bodys_error_is_the_one_that_is_raised(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with client:

        async def fail_twice() -> None:
            async with client.mutex("x").lock():
                engine.fail("withdraw", tenure.EngineError("the disk is full"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as error:
            await fail_twice()
        assert any("the disk is full" in note for note in error.value.__notes__)
        await scene.queued("x", 0)


def _proven_for_ever(self: SessionCore) -> bool:
    fork.check(self._born, "the session")
    return self.why is None


believes_for_ever = together(
    replacing(SessionCore, "lapse", does_nothing),
    replacing(SessionCore, "is_proven", _proven_for_ever),
)


@row(7, believes_for_ever, shows=("cut off", ("loss reported", "kept")))
async def renewals_that_fail_end_the_lease_at_its_deadline_and_not_before(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with client:
        session = await client.session(recovery_window=scene.window)
        lease = await session.mutex("x").lock()
        engine.cut()
        deadline = lease.deadline
        await asyncio.sleep(0.6 * scene.window)
        assert is_held(lease) or scene.clock.now() >= deadline  # one blip kills nobody
        await asyncio.sleep(deadline - scene.clock.now() + 0.001)
        assert not is_held(lease)
        assert isinstance(await scene.soon(lease.wait_lost()), tenure.LeaseLost)
        engine.mend()


@row(
    9,
    replacing(Request, "lose", does_nothing),
    not_on={"dflockd": "tests/corpus/lines.py asks it, by cutting connections off"},
    shows=("administrator", ("tokens rise", "loss reported")),
)
async def a_lease_of_an_earlier_session_is_not_held(scene: Scene) -> None:
    async with scene.client() as client:
        first = await client.session(description="victim")
        old = await first.election("x").campaign(b"old")
        await scene.end_sessions("victim")
        second = await client.session()
        new = await scene.soon(second.election("x").campaign(b"new"))

        async def it_is_known() -> bool:
            return first.state == "expired"

        await scene.eventually(it_is_known, "news of the session's end")
        assert is_held(new)
        assert not is_held(old)
        assert isinstance(old.loss, tenure.LeaseLost)
        assert new.fencing_token > old.fencing_token


@row(
    13,
    together(
        replacing(VirtualClock, "now", VirtualClock.wall),
        replacing(SystemClockThatSteps, "now", SystemClockThatSteps.wall),
    ),
    shows=("wall clock", ("kept", "tokens rise")),
)
async def a_step_of_the_wall_clock_changes_nothing(scene: Scene) -> None:
    clock = scene.clock
    async with scene.client() as client:
        lease = await client.mutex("x").lock()
        scene.set_wall(clock.wall() + 1e6)
        assert is_held(lease)
        scene.set_wall(clock.wall() - 2e6)
        assert is_held(lease)
        await lease.release()
        again = await scene.soon(client.mutex("x").lock())
        assert again.fencing_token > lease.fencing_token


_NO_REPLICAS = "its store has no replica that could take its place"


@row(
    11,
    {"redis": replacing(RedisSession, "_report_loss", does_nothing)},
    not_on={
        "memory": _NO_REPLICAS,
        "sqlite": _NO_REPLICAS,
        "native": _NO_REPLICAS,
        "ydb": _NO_REPLICAS,
        "postgresql": "tests/engines/postgresql/test_failover.py has one",
        "etcd": "a member that takes over has all that was ever told",
        "dflockd": _NO_REPLICAS,
    },
    shows=("restarted", ("tokens rise",)),
)
async def a_lock_that_a_failover_forgot_is_lost_to_its_holder(scene: Scene) -> None:
    async with scene.client() as client:
        session = await client.session()
        lease = await session.mutex("x").lock()
        forget_as_in_a_failover(scene.url, session.id, "x")
        assert isinstance(await scene.soon(lease.wait_lost()), tenure.LeaseLost)
        async with client.session() as another:
            later = await scene.soon(another.mutex("x").lock())
            assert later.fencing_token > lease.fencing_token


@row(14, replacing(Proof, "interval", property(lambda self: 2 * self._window)))
async def renewal_comes_before_the_deadline_and_that_before_the_window(scene: Scene) -> None:
    for window in (1.0, 5.0, 30.0, 1800.0):
        proof = Proof(window)
        assert 3 * proof.interval <= proof.span < window
        proof.add_stop_time(1, 0.49 * window)
        assert 3 * proof.interval <= proof.span <= window / 2 + 0.02 * window
    async with scene.client() as client:
        with pytest.raises(tenure.InvalidArgument):
            await client.mutex("x").lock(stop_time=15)  # half the window
