"""A store in a folder of its own, and programs that use it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sqlite.holder import Holder
from tests.engines.sqlite.worker import Worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database that does not exist yet."""
    return tmp_path / "store.db"


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder of root's that everyone can enter, and only root can write to."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def url(path: Path, request: pytest.FixtureRequest) -> str:
    """Of that database; see `on_either`."""
    return f"sqlite:///{path}{getattr(request, 'param', '')}"


on_either = pytest.mark.parametrize(
    "url", ["", "?durability=full"], ids=["process", "full"], indirect=True
)
"""The test is run with either durability."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a backup goes: a folder of its own."""
    (tmp_path / "backups").mkdir()
    return tmp_path / "backups" / "store.backup"


Workers = Callable[..., contextlib.AbstractAsyncContextManager[list[Worker]]]
Holders = Callable[..., contextlib.AbstractAsyncContextManager[list[Holder]]]


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


@pytest.fixture
def holders(url: str) -> Holders:
    """``async with holders(3) as (a, b, c)``: the same, of `holder`, with nothing begun yet."""

    @contextlib.asynccontextmanager
    async def start(number: int) -> AsyncIterator[list[Holder]]:
        started: list[Holder] = []
        try:
            while len(started) < number:
                started.append(await Holder.start(url, attach=False))
            yield started
        finally:
            for holder in started:
                await holder.end()

    return start
