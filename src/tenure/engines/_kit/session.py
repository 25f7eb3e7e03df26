"""Life cycle of an attached session: its takeover, and its one end.

States::

    taking over --resume--> attached ----end, superseded----> ended: the program gets the reason
         |                     |-----------leave------------> left: the program asked for it
         +---------------------+-------------stop-----------> stopped: the engine was closed

Rules:

* The last three states are final. The first reason counts, and `SessionBase.check` raises it.
* `ended` is reported once, for an end by the store's word alone, and no event follows it.
* Events of requests that arrive during a takeover wait until the requests have been reported.
* A takeover is complete when no former attachment can still consider a lease held. Events shorten
  that wait; the store's answer alone ends it.
* A session that its caller does not receive is abandoned: a new one is closed, and one that was
  taken over is detached.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tenure.core import rules
from tenure.engines.contract import Attach, SessionDefaults, SessionEvents
from tenure.errors import SessionExpired, TenureError
from tenure.model import Recovered

__all__ = ["SessionBase", "received"]

T = TypeVar("T")
Session = TypeVar("Session", bound="SessionBase")

_LONGEST = 5.0
"""Seconds between two questions whether a former attachment may hold a lease, at the most."""


class SessionBase(SessionDefaults, ABC):
    """Session without the parts that depend on the store.

    Attributes:
        id: its number in the store.
        path: of its node.
        window: the recovery window, in seconds.
        events: receives its events.
        closing: the program is leaving it, so that its end is not reported any more.
        over: it is in a final state.
        news: set after an event that a takeover waits for.
        early: events that wait for the end of the takeover; ``None`` afterwards.
        taken_over: it existed before this attachment.
        why_over: the reason of its end, if the program did not end it.
    """

    def __init__(self, how: Attach, events: SessionEvents, number: int, window: float) -> None:
        self.id = number
        self.path = how.node
        self.window = window
        self.events = events
        self.closing = False
        self.over = False
        self.news = asyncio.Event()
        self.taken_over = how.session_id is not None
        self.early: list[Callable[[], None]] | None = [] if self.taken_over else None
        self.why_over: TenureError | None = None

    # The end

    def check(self) -> None:
        """Raise the reason if the session is over."""
        if self.over:
            raise self.reason

    @property
    def reason(self) -> TenureError:
        """Reason of the end, as an operation raises it."""
        if self.why_over is not None:
            return self.why_over
        return SessionExpired(f"the session on {self.path} is over", node=self.path)

    def end(self, why: str) -> None:
        """Report that the store has ended the session."""
        self._end(SessionExpired(f"the session on {self.path} is over: {why}", node=self.path))

    def superseded(self) -> None:
        """Report that another attachment has taken over, and acknowledge that to the store."""
        if self._end(rules.taken_over(self.path)):
            self._acknowledge()

    def stop(self, error: TenureError) -> None:
        """End the session without a report, because the engine is being closed."""
        self.why_over = self.why_over or error
        if not self.over:
            self._forget()

    def _end(self, error: SessionExpired) -> bool:
        """End the session, and report it; false if it was over before."""
        if self.over:
            return False
        self.why_over = error
        self._forget()
        if not self.closing:
            self.events.ended(error)
        return True

    def _forget(self) -> None:
        """Enter a final state. Engines add what they release then."""
        self.over = True
        self.news.set()

    @abstractmethod
    def _acknowledge(self) -> None:
        """Have the store note, soon, that this attachment considers nothing held any more."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave a session that `attach` does not return. Safe to call twice."""

    # Takeover

    async def take_over(
        self,
        remaining: Callable[[], Awaitable[float]] | None,
        begin: Callable[[], Awaitable[T]],
    ) -> T:
        """Complete the takeover. A failure or a cancellation abandons the session.

        Args:
            remaining: renews the session, and returns the seconds for which a former attachment
                may still consider a lease held; 0 if none can. ``None``: do not wait for that.
            begin: reads the requests of the session, and calls `resume`.

        Returns:
            what `begin` returns.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over once more.
        """
        try:
            while remaining is not None:
                self.check()
                self.news.clear()
                seconds = await remaining()
                self.check()
                if seconds <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(seconds + 0.001, self.window / 3, _LONGEST)):
                        await self.news.wait()
            return await begin()
        except BaseException:
            self.abandon()
            raise

    def resume(self, found: Sequence[Recovered]) -> None:
        """Report the requests of a session that was taken over, and then the events since."""
        if self.over:
            return
        self.events.resumed(found)
        early, self.early = self.early or [], None
        for event in early:
            event()


async def received(attaching: asyncio.Future[Session]) -> Session:
    """Wait for a session that is being attached. If the caller is cancelled, abandon it."""
    try:
        return await asyncio.shield(attaching)
    except asyncio.CancelledError:
        attaching.add_done_callback(_abandon)
        raise


def _abandon(attaching: asyncio.Future[Session]) -> None:
    if not attaching.cancelled() and attaching.exception() is None:
        attaching.result().abandon()
