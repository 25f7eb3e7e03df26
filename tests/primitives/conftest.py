"""The engines and the time of the primitives' tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.primitives.helpers import World
from tests.primitives.virtual import VirtualClock, VirtualLoop


@pytest.fixture
def clock() -> VirtualClock:
    """Time that passes when nothing else is to do."""
    return VirtualClock()


@pytest.fixture(autouse=True)
def loop_factory(clock: VirtualClock) -> Callable[[], asyncio.AbstractEventLoop]:
    """Every coroutine test here runs on the virtual clock."""
    return lambda: VirtualLoop(clock)


@pytest.fixture
def world(clock: VirtualClock) -> World:
    return World(clock)
