"""The log is emptied beside the event loop."""

# ruff: noqa: ASYNC240  nothing else runs on the loop

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenure.engines.sqlite import checkpoint, schema
from tenure.engines.sqlite.url import SqliteUrl
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
            if hold % 250 == 0:  # on a busy machine the thread might not run at all
                engine.store._checkpointer.close()
        assert os.path.getsize(f"{path}-wal") < 24 * 2**20
        assert os.path.getsize(path) < 2**20


async def test_a_commit_stands_when_no_thread_can_be_started_for_the_checkpoint(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 3)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with opened(url) as engine:
        one = await attached(engine)
        engine.store._checkpointer.close()  # one that attaching has started would copy more
        before = os.path.getsize(path)
        with monkeypatch.context() as patch:
            patch.setattr("tenure.greenlets.threading.Thread.start", fails)
            for number in range(10):
                await one.session.create_semaphore(f"a-{number}", 1, b"x" * 1000, exist_ok=False)
        assert os.path.getsize(path) == before
        for number in range(10):
            await one.session.create_semaphore(f"b-{number}", 1, b"x" * 1000, exist_ok=False)
        engine.store._checkpointer.close()
        assert os.path.getsize(path) > before + 8_000  # at least those of the first ten


# SQLite's WAL-reset bug


Hook = Callable[[], None]


def checkpoints_of(monkeypatch: pytest.MonkeyPatch, before: Hook) -> list[tuple[int, int, int]]:
    """Have `before` called in each checkpoint, and return what the checkpoints answer.

    `before` stands for what other connections do in the instant in which a checkpoint begins.
    """
    answers: list[tuple[int, int, int]] = []

    class Watched(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if "wal_checkpoint" not in sql:
                return super().execute(sql, *arguments)
            before()
            answers.append(super().execute(sql).fetchone())
            return super().execute("SELECT 0")

    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **how: connect(*args, factory=Watched, **how)
    )
    return answers


def generation_of_log(path: Path) -> bytes:
    """The salt of the log, which is another one after each restart."""
    with open(f"{path}-wal", "rb") as log:
        return log.read(32)[16:24]


def another_connection(path: Path) -> sqlite3.Connection:
    return schema._connect(SqliteUrl("", str(path), 0o600, "process"))


async def test_no_commit_restarts_the_log_while_a_checkpoint_begins(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        other = another_connection(path)
        await one.enqueue(1, "x")
        generations = []

        def before() -> None:
            generations.append(generation_of_log(path))
            _, length, copied = other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            assert length == copied  # hence the next commit would restart the log
            other.execute("UPDATE meta SET last_news_id = last_news_id + 1")
            generations.append(generation_of_log(path))

        with monkeypatch.context() as patch:
            answers = checkpoints_of(patch, before)
            engine.store._checkpointer.checkpoint()
        other.close()
    assert len(answers) == 1
    assert generations[0] == generations[1]


async def test_a_checkpoint_copies_nothing_if_the_log_may_be_restarted_while_it_begins(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        other = another_connection(path)
        await one.enqueue(1, "x")
        engine.store._checkpointer.checkpoint()  # all of it: the next commit restarts the log
        generations = []

        def before() -> None:
            generations.append(generation_of_log(path))
            other.execute("UPDATE meta SET last_news_id = last_news_id + 1")
            generations.append(generation_of_log(path))

        with monkeypatch.context() as patch:
            answers = checkpoints_of(patch, before)
            engine.store._checkpointer.checkpoint()
        other.close()
    assert generations[0] != generations[1]
    ((_, length, copied),) = answers
    assert length > 0
    assert copied == 0
