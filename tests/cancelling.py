"""Cancellation of an operation at each of its suspensions, one after the other.

An operation suspends where its task waits, and where a task waits that was started for it: a
client connects in a task of its own, for example. `turns` of the loop do not find these places when
answers come from a server.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

from tenure._client.lease import Lease

T = TypeVar("T")


class Canceller:
    """Cancels an operation at one of its suspensions.

    Args:
        number: of the suspension, from 1 on.
        late: cancel when the task that suspends is about to resume with what it has waited for.
        twice: cancel once more when the operation's own task suspends next.

    Attributes:
        reached: the operation, or a task of it, has suspended so many times.
        cancelled: the number of cancellations.
    """

    def __init__(self, number: int, *, late: bool = False, twice: bool = False) -> None:
        self.reached = False
        self.cancelled = 0
        self._number = self._left = number
        self._late = late
        self._twice = twice
        self._task: asyncio.Task[Any]

    async def run(self, operation: Awaitable[T]) -> T | None:
        """Run an operation to its end; return its result unless it was cancelled.

        The result may be a lease, which is released.
        """

        async def operate() -> T:
            return await operation

        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._new_task)
        try:
            self._task = task = loop.create_task(operate())
            await asyncio.wait([task])
        finally:
            loop.set_task_factory(None)
        if self.cancelled:
            assert task.cancelled(), f"cancelled at suspension {self._number}: {task!r}"
            return None
        result = await task
        if isinstance(result, Lease):
            await result.release()
        return result

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_Counted(coroutine, self._suspended), loop=loop, **options)

    def _suspended(self, waits_for: asyncio.Future[object] | None) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached = True
            if not self._late:
                self._cancel()
            elif waits_for is None:
                asyncio.get_running_loop().call_soon(self._cancel)
            else:  # this is called before the task, which waits for it from now on
                waits_for.add_done_callback(self._cancel)
        elif self.cancelled == 1 and self._twice and asyncio.current_task() is self._task:
            self._cancel()

    def _cancel(self, _: object = None) -> None:
        self.cancelled += self._task.cancel()


class _Counted(Coroutine[Any, Any, T]):
    """A coroutine that reports what it waits for whenever it suspends."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        suspended: Callable[[asyncio.Future[object] | None], None],
    ) -> None:
        self._coroutine = coroutine
        self._suspended = suspended

    def send(self, value: Any) -> Any:
        waits_for = self._coroutine.send(value)
        self._suspended(waits_for)
        return waits_for

    def throw(self, *error: Any) -> Any:
        waits_for = self._coroutine.throw(*error)
        self._suspended(waits_for)
        return waits_for

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()


def cancellers(*, late: bool = False, twice: bool = False) -> Iterator[Canceller]:
    """Yield a canceller for each suspension of an operation that the caller runs with it.

    The last one cancels nothing.

    Args:
        late: see `Canceller`.
        twice: see `Canceller`.
    """
    for number in itertools.count(1):
        canceller = Canceller(number, late=late, twice=twice)
        yield canceller
        if not canceller.reached:
            return
