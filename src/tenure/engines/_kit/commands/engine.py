"""Engine that sends commands: its opening and closing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import abstractmethod
from collections.abc import Collection
from typing import Any, Generic, Protocol, TypeVar

from tenure.background import Ending, Failures
from tenure.clock import Clock
from tenure.engines._kit.commands.attaching import CommandAttaching
from tenure.engines._kit.commands.operations import HANDED, OWNS, WAITING, OrderIds
from tenure.engines._kit.commands.session import CommandSession
from tenure.engines._kit.commands.values import Values
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.quarantine import Quarantine
from tenure.engines._kit.session import close_sessions
from tenure.errors import TenureError

S = TypeVar("S", bound=CommandSession)

_ENDING = 2.0
"""Seconds for abandoned sessions to end, when the engine is closed."""


class CommandReconnector(Protocol):
    """The connection of an engine, such as the kit's `Reconnector`."""

    @property
    def failure(self) -> TenureError | None:
        """Reason why there is no connection; ``None`` while there is one."""
        ...

    async def open(self) -> None:
        """Connect for the first time."""

    async def aclose(self) -> None:
        """Disconnect. Safe to call twice."""


class CommandEngine(CommandAttaching[S], Generic[S]):
    """The life cycle of an engine.

    Attributes:
        order_ids: the highest order id seen by this program.
        failures: failures of events and timers.
        heartbeat: renews sessions while the loop is stuck.
        quarantine: the time for which nothing is granted, as far as known here.
        reconnector: keeps a connection.
    """

    heartbeat: HeartbeatThread[Any]
    quarantine: Quarantine
    reconnector: CommandReconnector

    def __init__(self, url: str, answer_timeout: float, values: Values, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        super().__init__(url, answer_timeout, values, clock)
        self.order_ids = OrderIds()
        self.failures = Failures(
            f"looking after the sessions on {url}", logging.getLogger("tenure")
        )
        self._abandoned: set[asyncio.Future[Any]] = set()
        self._closing: Ending | None = None
        self._thread = 0

    # Defined by each engine

    @abstractmethod
    def prepare_opening(self) -> None:
        """Make the reconnector, the heartbeat thread and the timers, for `loop`."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the timers, and drop all sessions and watches."""

    async def closed(self) -> None:
        """Release the remaining resources, as the last step of `aclose`."""
        return

    @abstractmethod
    def all_sessions(self) -> Collection[S]:
        """Return the attached sessions."""

    # Opening and closing

    async def open(self) -> None:
        """Connect to the store."""
        if self._open:
            return
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._closing = None
        self.prepare_opening()
        try:
            await self.loop.create_task(self.reconnector.open())
        except BaseException:
            await self.reconnector.aclose()
            raise
        self._open = True

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        if self._closing is None:
            if not self._open:
                return
            self._closing = Ending(self._close)
        await self._closing.wait()

    async def _close(self) -> None:
        self._open = False
        try:
            await self._end_abandoned()
            await close_sessions(self.all_sessions(), self.url, lambda: self.reconnector.failure)
        finally:
            self._abandoned.clear()
            self.stop()
            self.fail_awaited()
            await self.reconnector.aclose()  # first: nothing is granted afterwards
            await self.heartbeat.aclose()
            await self.closed()

    def close_after(self, ending: asyncio.Future[Any]) -> None:
        """Have the closing wait for the end of an attach or session that its caller abandoned."""
        self._abandoned.add(ending)
        ending.add_done_callback(self._abandoned.discard)

    async def _end_abandoned(self) -> None:
        """Wait until the store has no abandoned session, unless it is out of reach or silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING):
                while self._abandoned and self.reconnector.failure is None:
                    await asyncio.wait(self._abandoned)  # an attach is followed by the end

    # Sessions

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store currently grants nothing, if known."""
        return (self.reconnector.failure or self.quarantine.trouble()) if self._open else None

    def longest_silence(self, timeout: float) -> float:
        """Return the seconds after which a server that does not answer is abandoned.

        Args:
            timeout: the longest time; the sessions need another connection within their windows.
        """
        shortest = min((session.window for session in self.all_sessions()), default=3 * timeout)
        return min(timeout, max(shortest / 3, 0.3))

    def report_detached(self, why: TenureError) -> None:
        """Report the loss of contact to the sessions."""
        for session in self.all_sessions():
            session.events.detached(why)

    def report_attached(self) -> None:
        """Report to the sessions that contact is re-established, and look up their requests."""
        for session in self.all_sessions():
            session.events.attached()
            session.look_up((WAITING, HANDED, OWNS))

    def is_in_loop(self) -> bool:
        """Return true on the thread of the engine's loop."""
        return threading.get_ident() == self._thread
