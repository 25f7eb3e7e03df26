"""The engines and the time of the primitives' tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World


@pytest.fixture(autouse=True)
def virtual_time(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Every coroutine test here runs on the virtual clock."""


@pytest.fixture
def world(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(clock)
    world.scopes.watch(monkeypatch)
    return world
