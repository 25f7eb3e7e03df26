"""Tasks of a client, which outlive the callers that started them.

* A *beginning* produces something that callers wait for: the opened engine, an attached session.
  Each caller gets its result or its error; the cancellation of a caller does not stop it. Without
  callers its failure is ignored. Closing the client cancels it.
* An *ending* notifies the store that something has ended. Closing the client waits for it, and
  raises its failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """The beginnings and endings of one client, on its loop."""

    __slots__ = ("_beginnings", "_endings", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._beginnings: set[asyncio.Task[Any]] = set()
        self._endings: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `cancel_beginnings` cancels."""
        task = self._own(work, self._beginnings)
        # Retrieves the error, so that asyncio does not report it.
        task.add_done_callback(failure_of)
        return task

    def complete(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `wait_for_endings` waits for."""
        return self._own(work, self._endings)

    def _own(self, work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def cancel_beginnings(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        while self._beginnings:
            for beginning in self._beginnings:
                beginning.cancel()
            await asyncio.wait(self._beginnings)

    async def wait_for_endings(self) -> list[Exception]:
        """Wait for all of them, and return their failures."""
        failures: list[Exception] = []
        while self._endings:
            done, _ = await asyncio.wait(self._endings)
            failures += [error for error in map(failure_of, done) if isinstance(error, Exception)]
        return failures


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error of a finished task, a cancellation included, or ``None``."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()
