"""What goes on although nobody waits for it any more, and who sees to its end.

A task that is in a call of redis-py may not notice that it was cancelled: the call ends as if it
had not been. So whoever ends a task that goes on and on here says so in a way of its own as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tenure.errors import TenureError

__all__ = ["PATIENCE", "Endings", "margin", "over"]

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds for which a cancelled attempt waits until what it obtained has been given back."""


def margin(ttl: float) -> float:
    """How long before the end of its time to live nobody relies on a key any more; in seconds."""
    return min(max(0.05 * ttl, 0.1), ttl / 4)


async def over(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task that has been told to end, even if it takes a cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class Endings:
    """The tasks of one owner, which `wait`s for them in the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._undoing: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have something done, whether or not anybody waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def begin_undoing(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The same for what no further attempt may come before."""
        undoing = self.begin(work)
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        return undoing

    async def wait(self) -> None:
        """Wait until all of it is done, however it ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def attempt(
        self,
        attempt: Coroutine[Any, Any, bool],
        undo: Callable[[], Coroutine[Any, Any, object]],
        *,
        halfway: bool = True,
        given_up: Callable[[], object] = lambda: None,
    ) -> bool:
        """Wait for an attempt to obtain something.

        Whoever is cancelled meanwhile will not have it: the attempt goes on, and what it may have
        obtained is given back. That comes before any further attempt, from which it would otherwise
        take. The cancellation goes on when that has been done, since the program may be about to
        end; after `PATIENCE`, or when cancelled once more, all this goes on in the background.

        An attempt that failed is undone likewise, since its answer may be all that was lost; unless
        `halfway` is false. One that need not go on is told so by `given_up`, and one that has not
        begun never will.
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
            given_up()
            undoing = self.begin_undoing(_undo(task, undo, halfway))
            await asyncio.wait([undoing], timeout=PATIENCE)
            raise

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits hears it; nobody has to


async def _undo(
    attempt: asyncio.Task[bool], undo: Callable[[], Coroutine[Any, Any, object]], halfway: bool
) -> None:
    await asyncio.wait([attempt])
    if halfway if attempt.exception() is not None else attempt.result():
        with contextlib.suppress(TenureError):  # the time to live will end it
            await undo()
