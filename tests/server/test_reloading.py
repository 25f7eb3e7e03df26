"""Reloads: read beside the event loop, one after the other, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tenure.server.loading import Reloader


class Files:
    """Files that are read when a test says so.

    Attributes:
        begun: is set while they are read.
        applied: what was read, and the errors.
    """

    def __init__(self) -> None:
        self.content: Any = "first"
        self.begun = threading.Semaphore(0)
        self.readable = threading.Semaphore(0)
        self.applied: list[Any] = []
        self.threads: list[threading.Thread] = []
        self.changed = asyncio.Event()
        self.idle = 0
        self.reloader = Reloader(self._read, self._note, self._note)

    def _read(self) -> Any:
        content = self.content
        self.threads.append(threading.current_thread())
        self.begun.release()
        self.readable.acquire()
        if isinstance(content, Exception):
            raise content
        return content

    def _note(self, found: object) -> None:
        self.applied.append(found)
        self.changed.set()

    def request(self) -> None:
        self.reloader.request(self._count)

    def _count(self) -> None:
        self.idle += 1
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()

    async def reading(self) -> None:
        """Wait until they are about to be read."""
        await asyncio.to_thread(self.begun.acquire)


async def test_files_are_read_beside_the_event_loop() -> None:
    files = Files()
    files.request()
    await files.reading()  # the loop runs meanwhile
    assert files.applied == []
    files.readable.release()
    await files.until(lambda: files.idle == 1)
    assert files.applied == ["first"]
    assert files.threads[0] is not threading.main_thread()
    await files.reloader.aclose()


async def test_a_request_during_a_reload_reads_the_files_once_more() -> None:
    files = Files()
    files.request()
    await files.reading()
    files.content = "second"
    for _ in range(3):
        files.request()
    files.readable.release()
    await files.reading()
    assert files.idle == 0
    files.readable.release()
    await files.until(lambda: files.idle == 1)
    assert files.applied == ["first", "second"]
    assert len(files.threads) == 2
    await files.reloader.aclose()


@pytest.mark.parametrize("error", [ValueError("malformed"), MemoryError()])
async def test_a_reload_that_fails_is_reported_and_does_not_prevent_the_next(
    error: Exception,
) -> None:
    files = Files()
    files.content = error
    files.request()
    files.readable.release()
    await files.until(lambda: files.idle == 1)
    files.content = "mended"
    files.request()
    files.readable.release()
    await files.until(lambda: files.idle == 2)
    assert files.applied == [error, "mended"]
    await files.reloader.aclose()


async def test_a_thread_that_could_not_be_started_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Files()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        files.request()
        await files.until(lambda: files.idle == 1)
    (error,) = files.applied
    assert isinstance(error, RuntimeError)
    await files.reloader.aclose()


async def test_the_end_of_a_server_waits_for_no_file_and_applies_none() -> None:
    files = Files()
    files.request()
    await files.reading()
    await files.reloader.aclose()
    files.readable.release()
    await asyncio.to_thread(files.threads[0].join)
    await asyncio.sleep(0)
    files.request()
    await asyncio.sleep(0)
    assert files.applied == []
    assert len(files.threads) == 1
    assert files.idle == 0


def test_a_thread_that_outlives_the_event_loop_ends() -> None:
    async def close_while_reading() -> Files:
        files = Files()
        files.request()
        await files.reading()
        await files.reloader.aclose()
        return files

    with asyncio.Runner() as runner:
        files = runner.run(close_while_reading())
    files.readable.release()
    files.threads[0].join()
    assert files.applied == []
