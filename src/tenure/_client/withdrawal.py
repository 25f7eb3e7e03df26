"""Seeing to it that a request leaves its queue, as often as that takes.

A request that its program has given up must not stay: not when the caller was cancelled, not when
the store failed, not when nobody waits for the answer. Only the end of its session settles that
otherwise, since it releases everything.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tenure import fork
from tenure.engines.contract import when_answered
from tenure.errors import SessionExpired

if TYPE_CHECKING:
    from tenure._client.requested import Requested
    from tenure._client.session import Session

__all__ = ["Withdrawals"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
"""Seconds between two attempts: at first, and at the most."""

_log = logging.getLogger("tenure")


class Withdrawals:
    """The withdrawals of one session, releases included."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._again: set[asyncio.Task[None]] = set()

    def begin(self, lease: Requested) -> asyncio.Future[bool] | None:
        """Take a request out of its queue.

        Returns:
            what may be waited for, or ``None`` when it is done.

        Raises:
            EngineError: the store failed; it is tried again until the session ends. So it is
                when the future fails.
        """
        session = self._session
        if fork._generation != session._born:
            fork.check(session._born, f"the session on {session.node}")
        if lease._wanted.stop_time:
            session._drop_stop_time(lease)
        if session._ending.why is not None:
            return None  # its end releases everything
        try:
            answer = session._engine.withdraw(lease._hold)
        except SessionExpired as error:
            self.failed(lease, error)
            return None
        except Exception:
            self._try_again(lease)
            raise
        if answer is True:
            session._leases.pop(lease._hold, None)
            return None
        if answer is False:
            lease._left(was_there=False)
            return None
        when_answered(answer, lease._withdrawn)
        return answer

    def stop(self) -> None:
        """The session is over."""
        for task in self._again:
            task.cancel()

    def failed(self, lease: Requested, error: BaseException) -> None:
        """The store's answer to one is an error."""
        if isinstance(error, SessionExpired):
            self._session.ended(error)
            lease._left(was_there=not self._session._ending.by_the_store)
        elif self._session._ending.why is None:
            self._try_again(lease)

    def _try_again(self, lease: Requested) -> None:
        self._session._leases.pop(lease._hold, None)  # nobody waits for it any longer
        task = self._session._client._tasks.see_through(self._repeat(lease))
        self._again.add(task)
        task.add_done_callback(self._again.discard)

    async def _repeat(self, lease: Requested) -> None:
        session = self._session
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                answer = session._engine.withdraw(lease._hold)
                if isinstance(answer, asyncio.Future):
                    answer = await answer
                lease._left(was_there=answer)
                if lease._loss is not None:
                    lease._log_loss()
            except SessionExpired as error:
                self.failed(lease, error)
            except Exception as error:
                _log.warning(
                    "releasing %r on %s failed, and is tried again: %s",
                    lease.name,
                    session.node,
                    error,
                )
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            return
