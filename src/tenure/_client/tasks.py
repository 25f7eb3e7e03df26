"""Tasks of a client that outlive the callers that started them, and repeated withdrawals.

* A *beginning* produces something that callers wait for: the opened engine, an attached session.
  Each caller gets its result or its error; the cancellation of a caller does not stop it. Without
  callers its failure is ignored. Closing the client cancels it.
* An *ending* notifies the store that something has ended. Closing the client waits for it, and
  raises its failure.

**Withdrawals** are sent again until the store confirms them. A withdrawn request must leave its
queue, even when the caller was cancelled, the store failed, or no task waits for the answer. The
end of the session releases everything and so ends the retries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from tenure.background import Ending
from tenure.engines.contract import Answer, Withdrawn
from tenure.errors import SessionExpired

T = TypeVar("T")


class Tasks:
    """The beginnings and endings of one client, on its loop."""

    __slots__ = ("_beginnings", "_endings", "_loop", "_not_begun")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._beginnings: set[asyncio.Task[Any]] = set()
        self._endings: set[asyncio.Task[Any]] = set()
        self._not_begun: set[Ending] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `cancel_beginnings` cancels."""
        task = self._own(work, self._beginnings)
        # Retrieves the error, so that asyncio does not report it.
        task.add_done_callback(failure_of)
        return task

    def complete(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `wait_for_endings` waits for."""
        return self._own(work, self._endings)

    def end(self, step: Callable[[], Awaitable[None]]) -> Ending:
        """Start an ending that is begun, also if the loop ends before."""

        async def run() -> None:
            self._not_begun.discard(ending)
            await step()

        ending = Ending(run, self.complete)
        self._not_begun.add(ending)
        return ending

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
        while self._endings or self._not_begun:
            for ending in list(self._not_begun):
                ending.ensure_begun()
            done, _ = await asyncio.wait(self._endings)
            failures += [error for error in map(failure_of, done) if isinstance(error, Exception)]
        return failures


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return the error of a finished task, a cancellation included, or ``None``."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()


FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""First and longest time between two attempts, in seconds."""

_log = logging.getLogger("tenure")


class Withdrawable(Protocol):
    """A request, as its release retry needs it."""

    id: int
    name: str

    @property
    def node(self) -> str: ...

    @property
    def loss(self) -> Exception | None: ...

    def left(self, withdrawn: Withdrawn) -> None: ...

    def withdrawal_failed(self, error: BaseException) -> None: ...

    def log_loss(self) -> None: ...


class ReleaseRetries:
    """Release retries of one session.

    Args:
        withdraw: sends a withdrawal, given the id of the request.
        run: starts a task that the client waits for when it is closed.
    """

    def __init__(
        self,
        withdraw: Callable[[int], Answer[Withdrawn]],
        run: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        self._withdraw = withdraw
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, request: Withdrawable) -> None:
        """Withdraw the request until the store confirms it."""
        task = self._run(self._repeat(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Stop all retries: the session has ended."""
        for task in self._tasks:
            task.cancel()

    async def _repeat(self, request: Withdrawable) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                answer = self._withdraw(request.id)
                if isinstance(answer, asyncio.Future):
                    answer = await answer
                request.left(answer)
                if request.loss is not None:
                    request.log_loss()
            except SessionExpired as error:
                request.withdrawal_failed(error)
            except Exception as error:
                _log.warning(
                    "release failed, retrying: node=%s name=%r error=%s",
                    request.node,
                    request.name,
                    error,
                )
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            return
