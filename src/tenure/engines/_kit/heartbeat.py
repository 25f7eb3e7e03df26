"""Heartbeat thread: renews sessions over separate connections while the event loop is stuck.

Rules:

* The first renewal starts the thread. A caller adds its session to a table and never blocks.
* A failed renewal proves nothing, and the next one uses a new connection.
* The connections are closed when no renewal was requested during `IDLE` seconds.
* Closing interrupts the thread's reads. It does not wait long for operations that cannot be
  interrupted, such as the lookup of a name; the thread is a daemon and ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from tenure.background import BackgroundThread, Failures
from tenure.greenlets import new_condition

S = TypeVar("S")

_log = logging.getLogger("tenure")

IDLE = 10.0
"""Seconds after the last renewal for which connections stay open."""

_LONGEST_CLOSE = 4.0
"""Longest time that `aclose` waits for the thread, in seconds."""


class HeartbeatThread(ABC, Generic[S]):
    """The heartbeat thread of one engine, which is open on the running loop.

    Args:
        name: the name of the thread.
        now: reads the clock.
        what: what the thread does, for the log of unexpected errors.

    Attributes:
        expected: errors of `renew_now` that are normal for any store.
    """

    expected: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self, name: str, now: Callable[[], float], what: str) -> None:
        self._now = now
        self._failures = Failures(what, _log)
        self._loop = asyncio.get_running_loop()
        self._thread = BackgroundThread(name, self._run)
        self._ended = asyncio.Event()
        self._condition = new_condition()  # guards the rest
        self._requested: dict[S, float] = {}
        self._woken = False
        self._connections: list[socket.socket] = []
        self._closing = False

    def renew(self, session: S) -> None:
        """Renew a session soon. On any thread; never blocks."""
        self._request(session, self._now())

    def renew_again(self, session: S, at: float) -> None:
        """Renew a session, as was requested at that time, unless it was requested again since."""
        self._request(session, at)

    def wake(self) -> None:
        """Have `renew_now` called soon, even without sessions. On any thread; never blocks."""
        self._request(None, 0.0)

    def _request(self, session: S | None, at: float) -> None:
        with self._condition:
            if self._closing:
                return
            if session is not None:
                self._requested[session] = max(at, self._requested.get(session, at))
            self._woken = True
            with self._failures.contained():  # the next renewal tries again
                self._thread.start()
            self._condition.notify()

    async def aclose(self) -> None:
        """End the thread. Safe to call twice."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self.interrupt()
            for each in self._connections:
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    _log.debug("could not shut down a heartbeat connection: error=%s", error)
        if self._thread.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_CLOSE):
                    await self._ended.wait()
                self._thread.join()

    def interrupt(self) -> None:
        """Interrupt `renew_now` if closing its connections does not suffice."""
        return

    # In the thread

    @abstractmethod
    def renew_now(self, requested: dict[S, float]) -> None:
        """Renew sessions; the values are the times of the requests. None are given after `wake`."""

    @abstractmethod
    def disconnect(self) -> None:
        """Drop all connections. Safe to call twice."""

    def connect(
        self,
        place: str | tuple[str, int],
        timeout: float,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> socket.socket:
        """Open a connection that `aclose` interrupts.

        Args:
            place: the path of a Unix socket, or host and port.
            timeout: timeout of each call of the connection, in seconds.
            tls: wraps the connection.
            server_name: the required name in the certificate.

        Raises:
            OSError: the connection failed, or the engine is being closed.
        """
        if isinstance(place, str):
            connection = socket.socket(socket.AF_UNIX)
        else:
            connection = socket.create_connection(place, timeout)
        try:
            connection.settimeout(timeout)
            if isinstance(place, str):
                connection.connect(place)
            if tls is not None:
                connection = tls.wrap_socket(connection, server_hostname=server_name)
            with self._condition:
                if self._closing:
                    raise ConnectionAbortedError("the engine is being closed")
                self._connections.append(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def drop(self, connection: socket.socket) -> None:
        """Close a connection."""
        with self._condition:
            self._connections.remove(connection)
        connection.close()

    def wait_until_closing(self, seconds: float) -> bool:
        """Wait; return true, at once, when the engine is being closed."""
        with self._condition:
            return self._condition.wait_for(lambda: self._closing, seconds)

    def _run(self) -> None:
        try:
            while (requested := self._next()) is not None:
                try:
                    self.renew_now(requested)
                except self.expected as error:
                    _log.debug("heartbeat failed: error=%s", error)
                    self.disconnect()
                except Exception as error:
                    self._failures.report(error)
                    self.disconnect()
        finally:
            self.disconnect()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)

    def _next(self) -> dict[S, float] | None:
        """Wait for sessions to renew; return ``None`` when the engine is being closed."""
        with self._condition:
            if not self._condition.wait_for(self._has_work, IDLE):
                self.disconnect()
                self._condition.wait_for(self._has_work)
            requested, self._requested, self._woken = self._requested, {}, False
            return None if self._closing else requested

    def _has_work(self) -> bool:
        return self._closing or self._woken
