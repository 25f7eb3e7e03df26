"""A store in a folder of its own, and programs that use it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sqlite.worker import Worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database that does not exist yet."""
    return tmp_path / "store.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


Workers = Callable[..., contextlib.AbstractAsyncContextManager[list[Worker]]]


@pytest.fixture
def workers(url: str) -> Workers:
    """``async with workers(3, window=2) as (a, b, c)``: programs that are gone afterwards."""

    @contextlib.asynccontextmanager
    async def start(number: int, **arguments: Any) -> AsyncIterator[list[Worker]]:
        started: list[Worker] = []
        try:
            while len(started) < number:
                started.append(await Worker.start(url, **arguments))
            yield started
        finally:
            for worker in started:
                await worker.end()

    return start
