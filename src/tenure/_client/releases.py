"""Withdrawals that are sent again until the store confirms them.

A withdrawn request must leave its queue, even when the caller was cancelled, the store failed, or
no task waits for the answer. The end of the session releases everything and so ends the retries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from tenure.engines.contract import Answer, Withdrawn
from tenure.errors import SessionExpired

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
