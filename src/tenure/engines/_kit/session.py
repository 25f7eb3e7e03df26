"""Life cycle of an attached session: its takeover, and its end.

States::

    taking over --resume--> attached ----end, superseded----> ended: the program gets the reason
         |                     |-----------leave------------> left: the program has left it
         +---------------------+-------------stop-----------> stopped: the engine was closed

Rules:

* The last three states are final. The first reason counts, and `SessionBase.check` raises it.
* `ended` is reported once, only for an end reported by the store, and no event follows it.
* Events of requests that arrive during a takeover wait until the requests have been reported.
* A takeover is complete when no former attachment can still consider a lease held. Events shorten
  that wait, but only the store's answer ends it.
* A session that its caller does not receive is abandoned: a new one is closed, and a resumed one is
  detached.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import wraps
from typing import Any, ClassVar, Protocol, TypeVar

from tenure.core import refusals, rules
from tenure.engines.contract import Attach, SessionDefaults, SessionEvents
from tenure.errors import EngineError, NodeNotFound, SessionExpired, TenureError
from tenure.model import DEFAULT_NODE, NodeConfig, Recovered

T = TypeVar("T")
Session = TypeVar("Session", bound="SessionBase")

_LEAVING = 2.0
"""Seconds for the sessions of an engine to close, when the engine is closed."""


class PlainSession(SessionDefaults):
    """Session that cannot be taken over, without the parts that depend on the store.

    Attributes:
        id: its id in the store.
        path: the path of its node.
        window: the recovery window in seconds.
        events: receives its events.
        closing: whether the program is leaving it, so that its end is not reported.
        over: whether it is in a final state.
        why_over: the reason of its end, unless the program ended it.
    """

    def __init__(self, how: Attach, events: SessionEvents, number: int, window: float) -> None:
        self.id = number
        self.path = how.node
        self.window = window
        self.events = events
        self.closing = False
        self.over = False
        self.why_over: TenureError | None = None

    # The end

    def check(self) -> None:
        """Raise the reason if the session has ended."""
        if self.over:
            raise self.reason

    @property
    def reason(self) -> TenureError:
        """Reason of the end, as an operation raises it."""
        if self.why_over is not None:
            return self.why_over
        return refusals.session_over(self.path)

    def end(self, why: str) -> None:
        """Report that the store has ended the session."""
        self._end(refusals.session_over(self.path, why))

    def stop(self, error: TenureError) -> None:
        """End the session without a report, because the engine is being closed."""
        self.why_over = self.why_over or error
        if not self.over:
            self._forget()

    def _end(self, error: SessionExpired) -> bool:
        """End the session, and report it; return false if it had ended before."""
        if self.over:
            return False
        self.why_over = error
        self._forget()
        if not self.closing:
            self.events.ended(error)
        return True

    def _forget(self) -> None:
        """Enter a final state. Engines override it to release resources."""
        self.over = True


class SessionBase(PlainSession, ABC):
    """Session that can be taken over, without the parts that depend on the store.

    Attributes:
        recheck: set after an event that a takeover waits for.
        early: events that wait for the end of the takeover; ``None`` afterwards.
        taken_over: whether it existed before this attachment.
        check_every: longest time between two checks of former attachments, in seconds.
    """

    check_every: ClassVar[float] = 5.0

    def __init__(self, how: Attach, events: SessionEvents, number: int, window: float) -> None:
        super().__init__(how, events, number, window)
        self.recheck = asyncio.Event()
        self.taken_over = how.session_id is not None
        self.early: list[Callable[[], None]] | None = [] if self.taken_over else None

    # The end

    def superseded(self) -> None:
        """Report that another attachment has taken over, and acknowledge that to the store."""
        if self._end(rules.taken_over(self.path)):
            self._acknowledge()

    def _forget(self) -> None:
        super()._forget()
        self.recheck.set()

    @abstractmethod
    def _acknowledge(self) -> None:
        """Inform the store, soon, that this attachment no longer considers anything held."""

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
            The result of `begin`.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over again.
        """
        try:
            while remaining is not None:
                self.check()
                self.recheck.clear()
                seconds = await remaining()
                self.check()
                if seconds <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        min(seconds + 0.001, self.window / 3, self.check_every)
                    ):
                        await self.recheck.wait()
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
        if not attaching.done():
            await asyncio.wait([attaching])
    except asyncio.CancelledError:
        if attaching.done():
            _abandon(attaching)
        else:
            attaching.add_done_callback(_abandon)
        raise
    return attaching.result()


class _CreatesNodes(Protocol):
    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None: ...


E = TypeVar("E", bound=_CreatesNodes)


def restores_default(
    attach: Callable[[E, Attach, SessionEvents], Coroutine[Any, Any, Session]],
) -> Callable[[E, Attach, SessionEvents], Coroutine[Any, Any, Session]]:
    """Create the default node again when an attach finds that its record was deleted.

    Opening an engine creates it. A server, or another program that runs for months, opens none.
    """

    @wraps(attach)
    async def attach_again(engine: E, how: Attach, events: SessionEvents) -> Session:
        try:
            return await attach(engine, how, events)
        except NodeNotFound:
            if how.node != DEFAULT_NODE:
                raise
            await engine.create_node(DEFAULT_NODE, NodeConfig(), exist_ok=True)
        return await attach(engine, how, events)

    return attach_again


def _abandon(attaching: asyncio.Future[Session]) -> None:
    if not attaching.cancelled() and attaching.exception() is None:
        attaching.result().abandon()


class ClosableSession(Protocol):
    """A session, as closed by its engine."""

    async def close(self) -> None:
        """Close the session."""

    def stop(self, error: TenureError) -> None:
        """End the session without the store."""


async def close_sessions(
    sessions: Collection[ClosableSession], url: str, trouble: Callable[[], object]
) -> None:
    """Close the sessions of an engine, and stop those that the store does not confirm in time.

    Args:
        sessions: all sessions of the engine.
        url: the store's URL, for messages.
        trouble: returns the reason why the store cannot be reached, if it is known.

    Raises:
        EngineError: the store did not confirm the end of a session in time.
    """
    closing = [asyncio.ensure_future(session.close()) for session in sessions]
    try:
        if closing:
            _, late = await asyncio.wait(closing, timeout=_LEAVING)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
                raise EngineError(
                    f"{url} was closed while it could not be reached ({trouble() or 'no answer'}). "
                    "Its sessions expire with their recovery windows"
                )
            for task in closing:
                task.result()
    finally:
        for session in sessions:
            session.stop(EngineError(f"{url} was closed"))
