"""Virtual time, for the tests that use ``loop_factory``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tenure.testing import VirtualClock, VirtualLoop


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def loop_factory(clock: VirtualClock) -> Callable[[], asyncio.AbstractEventLoop]:
    return lambda: VirtualLoop(clock)
