"""The stores of the recipes' tests.

`url` is a store on each engine, in real time; `world` is one in this process, in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World

_numbers = itertools.count(1)


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that does not exist yet."""
    if request.param == "memory":
        return f"memory://recipes-{next(_numbers)}"
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture
def world(clock: VirtualClock, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> World:
    return World(clock)  # with the fixture before it, the test runs in virtual time


@contextlib.asynccontextmanager
async def program(text: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python program that has printed its first line; it is gone afterwards."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", text, *arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() != b"", "the program ended before it was ready"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
