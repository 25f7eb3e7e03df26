"""Proofs of sessions, and the heartbeat thread of the native engine.

The thread renews a session by its id and key (`RenewAside`), without changing its attachment.

Rules:

* The loop has precedence: the thread first gives it time to renew the session.
* All servers are tried until one proves the session, because only one of them has it. The server of
  the last proof is tried first.
"""

from __future__ import annotations

import socket
import ssl
from typing import Protocol

from msgspec import DecodeError, Struct

from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.url import Endpoint
from tenure.engines.native.url import NativeUrl
from tenure.wire import messages as wire
from tenure.wire.frames import FrameReader, FrameWriter

_HEAD_START = 0.05
"""Seconds for the loop to renew first."""

_TIMEOUT = (0.25, 2.0)
"""Shortest and longest timeout in seconds for the answer of one server."""

_BYTES = 64 * 1024

_REMEMBERED = 32
"""Number of renewals whose times are kept. A later answer proves nothing."""


class Proofs:
    """Renewals of one session. Used on its loop, except `note`.

    Attributes:
        last: the time of the latest proof; ``None``: there was none.
        renewed: the time when the latest renewal was sent.
    """

    def __init__(self, window: float) -> None:
        self.last: float | None = None
        self.renewed = 0.0
        self._window = window
        self._sent: dict[int, float] = {}
        self._number = 0

    def fresh(self, now: float) -> bool:
        """Return true if there is a proof that leaves most of the window."""
        return self.last is not None and now - self.last <= self._window / 3

    def send(self, now: float) -> int:
        """Record a renewal that is being sent; return its number."""
        self.renewed = now
        self._number += 1
        self._sent[self._number] = now
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return self._number

    def answered(self, number: int, age: float) -> float | None:
        """Return the time proven by the answer to a renewal; ``None`` if it proves none."""
        sent = self._sent.pop(number, None)
        if sent is None or not age >= 0:
            return None
        return sent - age

    def note(self, at: float) -> None:
        """Record a proof for that time. Safe to call on any thread."""
        if self.last is None or at > self.last:
            self.last = at


class RenewedSession(Protocol):
    """A session, as seen by its renewals."""

    id: int
    path: str
    key: bytes
    window: float
    proofs: Proofs

    def proven_by_thread(self, at: float) -> None:
        """Record a proof from the heartbeat thread."""


class _NoAnswer(Exception):
    """Error: the server did not answer, or sent an unexpected answer."""


class _HeartbeatConnection:
    """Connection of the thread to one server."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._decode = wire.server_message().decode
        self._reader = FrameReader(wire.GREETING_BYTES)
        self._writer = FrameWriter(wire.GREETING_BYTES)
        self._number = 0

    def greet(self, hello: wire.Hello) -> None:
        """Exchange the greetings."""
        if not isinstance(self._exchange(hello), wire.Welcome):
            raise _NoAnswer

    def renew(self, session: RenewedSession, timeout: float) -> float | None:
        """Return the age of the proof from the server, or ``None`` if it gave none."""
        self._number += 1
        self.socket.settimeout(timeout)
        answer = self._exchange(
            wire.RenewAside(self._number, session.path, session.id, session.key)
        )
        if isinstance(answer, wire.Proven) and answer.number == self._number and answer.age >= 0:
            return answer.age
        if isinstance(answer, wire.Unproven) and answer.number == self._number:
            return None
        raise _NoAnswer

    def _exchange(self, message: Struct) -> wire.ServerMessage:
        """Send a message, and read the answer."""
        self._writer.add(message)
        self.socket.sendall(self._writer.take())
        while True:
            data = self.socket.recv(_BYTES)
            if not data:
                raise _NoAnswer
            for frame in self._reader.feed(data):
                return self._decode(frame)


class NativeHeartbeat(HeartbeatThread[RenewedSession]):
    """The heartbeat thread of one engine."""

    def __init__(
        self, address: NativeUrl, tls: ssl.SSLContext | None, clock: Clock, program: bytes
    ) -> None:
        super().__init__("tenure-native-heartbeat", clock.now, f"heartbeats to {address.url}")
        self._server_name = "" if address.tls is None else address.tls.server_name
        self._tls = tls
        self._hello = wire.Hello(
            wire.VERSION, wire.VERSION, sorted(wire.FEATURES), address.token, program
        )
        self._endpoints = list(address.endpoints)
        self._servers: dict[Endpoint, _HeartbeatConnection] = {}

    def renew_now(self, requested: dict[RenewedSession, float]) -> None:
        """Renew the sessions that the loop has not renewed meanwhile."""
        self.wait_until_closing(_HEAD_START)
        for session, at in requested.items():
            if session.proofs.renewed < at and not self._closing:
                with self._failures.contained():
                    self._prove(session)

    def disconnect(self) -> None:
        """Close all connections of the thread."""
        for endpoint in list(self._servers):
            self._close(endpoint)

    def _prove(self, session: RenewedSession) -> None:
        least, most = _TIMEOUT
        timeout = max(least, min(most, session.window / 8))
        for endpoint in list(self._endpoints):
            sent, age = self._renew(endpoint, session, timeout)
            if age is not None:
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                session.proven_by_thread(sent - age)
                return

    def _renew(
        self, endpoint: Endpoint, session: RenewedSession, timeout: float
    ) -> tuple[float, float | None]:
        """Return the time of sending and the age of the proof; reconnect if needed."""
        for _ in range(2):
            connection = self._servers.get(endpoint)
            is_new = connection is None
            try:
                if connection is None:
                    place = endpoint.path or (endpoint.host, endpoint.port)
                    name = self._server_name or endpoint.host
                    opened = self.connect(place, timeout, self._tls, name)
                    connection = self._servers[endpoint] = _HeartbeatConnection(opened)
                    connection.greet(self._hello)
                sent = self._now()
                return sent, connection.renew(session, timeout)
            except (OSError, DecodeError, RecursionError, UnicodeDecodeError, _NoAnswer):
                self._close(endpoint)
                if is_new or self._closing:
                    break
        return 0.0, None

    def _close(self, endpoint: Endpoint) -> None:
        connection = self._servers.pop(endpoint, None)
        if connection is not None:
            self.drop(connection.socket)
