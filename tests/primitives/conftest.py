"""The engines and the time of the primitives' tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tenure.testing.clock import VirtualClock, VirtualLoop
from tests.primitives.helpers import World


@pytest.fixture
def clock() -> VirtualClock:
    """Time that passes when nothing else is to do."""
    return VirtualClock()


@pytest.fixture(autouse=True)
def loop_factory(clock: VirtualClock) -> Callable[[], asyncio.AbstractEventLoop]:
    """Every coroutine test here runs on the virtual clock."""
    return lambda: VirtualLoop(clock)


@pytest.fixture
def world(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(clock)
    world.scopes.watch(monkeypatch)
    return world
