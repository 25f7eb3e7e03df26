"""Waiters are granted although background steps fail, on every engine.

What is special to an engine (no descriptor, no thread) is in its own folder.
"""

from __future__ import annotations

import pytest

from tenure import background
from tenure.clock import SystemClock
from tenure.engines.etcd.requests import Waiting
from tenure.engines.etcd.watching import Watching
from tenure.engines.native.connection import NativeConnection
from tenure.engines.redis.engine import RedisEngine
from tenure.engines.sqlite import monitor
from tenure.server.sessions.session import ServerSession
from tenure.testing.recorder import Recorder
from tenure.testing.stage import Stage, Stores
from tests.engines.stores import MEMORY_IN_REAL_TIME, stores
from tests.injection import (
    Injector,
    Scene,
    a_hand_over,
    a_timeout,
    each_error,
    failing_once,
    played_in_spite_of_errors,
)

ENGINES = [
    pytest.param("engines/memory", MEMORY_IN_REAL_TIME, 1, id="memory"),
    pytest.param("engines/sqlite", stores("sqlite"), 5, id="sqlite"),
    pytest.param("engines/redis", stores("redis"), 1, id="redis"),
]


@each_error
@pytest.mark.parametrize("scene", [a_hand_over, a_timeout])
@pytest.mark.parametrize(("part", "stores", "least"), ENGINES)
async def test_a_waiter_is_granted_wherever_a_step_fails(
    part: str,
    stores: Stores,
    least: int,
    scene: Scene,
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(monitor, "_TICK_WAITING", 0.05)
    injector = Injector(monkeypatch, part, error)
    with stores.empty() as url:
        async with Stage(stores, url, SystemClock()) as stage:
            programs = await stage.programs(3)
            fired = await played_in_spite_of_errors(scene, injector, caplog, programs)
    assert len(set(fired)) >= least, fired


# Steps of engines that are tasks: each fails once, before it does anything

STEPS = [
    pytest.param(stores("etcd"), Waiting, "place", id="etcd: looking at a queue"),
    pytest.param(stores("etcd"), Watching, "_process", id="etcd: reading the stream of watches"),
    pytest.param(stores("redis"), RedisEngine, "_deliver_own", id="redis: delivering"),
    pytest.param(MEMORY_IN_REAL_TIME, Recorder, "granted", id="memory: delivering"),
    pytest.param(stores("tenure"), ServerSession, "send", id="tenure: delivering in the server"),
]


@each_error
@pytest.mark.parametrize(("stores", "owner", "name"), STEPS)
async def test_a_waiter_is_granted_after_a_task_has_failed(
    stores: Stores,
    owner: type,
    name: str,
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stores.empty() as url:
        async with Stage(stores, url, SystemClock()) as stage:
            holder, waiter = await stage.programs(2)
            held, waiting = await holder.lock("x"), await waiter.lock("x")
            raised = failing_once(monkeypatch, owner, name, error)
            await holder.withdraw(held)
            await waiting.granted()

            async def has_failed() -> bool:  # the grant may have come another way, and earlier
                return f"injected into {name}" in caplog.text

            await stage.until(has_failed, "a step that failed")
            assert raised == [name]


@each_error
async def test_a_connection_that_cannot_be_looked_after_is_replaced(
    error: type[Exception], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores("tenure").empty() as url:
        async with Stage(stores("tenure"), url, SystemClock()) as stage:
            holder, waiter = await stage.programs(2)
            held = await holder.lock("x")
            raised = failing_once(monkeypatch, NativeConnection, "_beat", error)
            short = await stage.program(engine=waiter.engine, window=3.0)
            waiting = await waiter.lock("x")

            async def has_failed() -> bool:
                short.session.renew()
                return bool(raised)

            await stage.until(has_failed, "a beat that failed")
            await holder.withdraw(held)
            await waiting.granted()
            assert "injected into _beat" in caplog.text
