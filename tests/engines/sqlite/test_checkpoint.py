"""The log is emptied beside the event loop."""

# ruff: noqa: ASYNC240  nothing else runs on the loop

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenure.engines.sqlite import checkpoint
from tenure.errors import EngineError
from tests.engines.sqlite.helpers import attached, opened

pytestmark = pytest.mark.no_debug


async def test_a_thread_moves_what_was_committed_into_the_database(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 20)
    async with opened(url) as engine:
        one = await attached(engine)
        before = os.path.getsize(path)
        for number in range(30):
            await one.session.create_semaphore(f"pool-{number}", 1, b"x" * 1000, exist_ok=False)
        thread = engine.store._checkpointer._thread
        assert thread is not None
        thread.join()
        assert os.path.getsize(path) > before + 10_000


async def test_a_log_that_cannot_be_moved_is_left_for_the_next_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 3)
    async with opened(url) as engine:
        one = await attached(engine)

        def fails(_: object) -> None:
            raise EngineError("not now")

        with monkeypatch.context() as patch:
            patch.setattr("tenure.engines.sqlite.checkpoint.schema.connect", fails)
            for number in range(10):
                await one.enqueue(number, f"key-{number}")
            engine.store._checkpointer.close()
        assert one.heard.end is None


async def test_a_long_run_keeps_the_log_short(url: str, path: Path) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        for hold in range(5000):
            await one.enqueue(hold, f"key-{hold % 7}")
            await one.withdraw(hold)
        assert os.path.getsize(f"{path}-wal") < 24 * 2**20
        assert os.path.getsize(path) < 2**20
