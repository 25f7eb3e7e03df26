"""Background tasks without a waiter, and the owner that waits for their end.

A task inside a call of redis-py may not notice a cancellation: the call can return normally. Code
that ends a periodic task here therefore also signals the end in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tenure.errors import TenureError

__all__ = ["UNDO_TIMEOUT", "Endings", "margin", "over"]

T = TypeVar("T")

UNDO_TIMEOUT = 2.0
"""Seconds for which a cancelled attempt waits for the release of what it obtained."""


def margin(ttl: float) -> float:
    """Return the seconds before its expiry during which a key is no longer relied on."""
    return min(max(0.05 * ttl, 0.1), ttl / 4)


async def over(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task that is about to end, even if it suppresses a cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class Endings:
    """Tasks of one owner, which finally `wait`s for them."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._undoing: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that runs to its end even without a waiter."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def start_undoing(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task, as `begin` does, that further attempts wait for."""
        undoing = self.begin(work)
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        return undoing

    async def wait(self) -> None:
        """Wait until all tasks have ended, with any results."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def attempt(
        self,
        attempt: Coroutine[Any, Any, bool],
        undo: Callable[[], Coroutine[Any, Any, object]],
        *,
        halfway: bool = True,
        abandoned: Callable[[], object] = lambda: None,
    ) -> bool:
        """Wait for an attempt to obtain something.

        If the caller is cancelled, the attempt continues, and its result, if any, is released.
        Further attempts wait for the release, which could otherwise take away what they obtain. The
        cancellation proceeds after the release, since the program may be about to exit. After
        `UNDO_TIMEOUT`, or a second cancellation, the release continues in the background.

        A failed attempt is also released, since only its answer may be lost, unless `halfway` is
        false. `abandoned` notifies an attempt that it need not continue; an attempt that has not
        begun never begins.
        """
        try:
            while self._undoing:
                await asyncio.wait(self._undoing)
        except BaseException:
            attempt.close()
            raise
        task = self.begin(attempt)
        try:
            return await asyncio.shield(task)
        except BaseException:
            abandoned()
            undoing = self.start_undoing(_undo(task, undo, halfway))
            await asyncio.wait([undoing], timeout=UNDO_TIMEOUT)
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # raised in a waiter, if there is one


async def _undo(
    attempt: asyncio.Task[bool], undo: Callable[[], Coroutine[Any, Any, object]], halfway: bool
) -> None:
    await asyncio.wait([attempt])
    if halfway if attempt.exception() is not None else attempt.result():
        with contextlib.suppress(TenureError):  # the time to live will end it
            await undo()
