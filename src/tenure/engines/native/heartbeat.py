"""Proofs of sessions, and the heartbeat thread of the native engine.

The thread renews a session by its id and key (`RenewAside`), and changes nothing about where the
session is attached.

Rules:

* The loop comes first: it gets a moment to renew by itself.
* All servers are tried until one proves the session, because only one of them has it, and any may
  be the one that does not answer. The server that gave the last proof is the first.
"""

from __future__ import annotations

import logging
import socket
import ssl
from typing import Protocol

from msgspec import DecodeError, Struct

from tenure.background import Failures
from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines._kit.url import Endpoint
from tenure.engines.native.url import NativeUrl
from tenure.wire import messages as wire
from tenure.wire.frames import FrameReader, FrameWriter

__all__ = ["NativeHeartbeat", "Proofs"]

_HEAD_START = 0.05
"""Seconds in which the loop may do it itself."""

_PATIENCE = (0.25, 2.0)
"""Seconds for which one server may take over an answer: the least, and the most."""

_BYTES = 64 * 1024


_REMEMBERED = 32
"""Renewals whose times of sending are remembered: an answer that comes later proves nothing."""


class Proofs:
    """The renewals of one session. On its loop, but for `note`.

    Attributes:
        last: the time of the latest proof; ``None``: there was none.
        asked: when the latest renewal was sent.
    """

    def __init__(self, window: float) -> None:
        """Start without a proof."""
        self.last: float | None = None
        self.asked = 0.0
        self._window = window
        self._sent: dict[int, float] = {}
        self._number = 0

    def fresh(self, now: float) -> bool:
        """True if there is a proof that leaves most of the window."""
        return self.last is not None and now - self.last <= self._window / 3

    def send(self, now: float) -> int:
        """A renewal is about to be sent; returns its number."""
        self.asked = now
        self._number += 1
        self._sent[self._number] = now
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return self._number

    def answered(self, number: int, age: float) -> float | None:
        """A renewal was answered; returns what time that proves."""
        sent = self._sent.pop(number, None)
        if sent is None or not age >= 0:
            return None
        return sent - age

    def note(self, at: float) -> None:
        """It is proven that the session lived at that time. From any thread."""
        if self.last is None or at > self.last:
            self.last = at


class RenewedSession(Protocol):
    """A session, as it is renewed."""

    id: int
    node: str
    key: bytes
    window: float
    proofs: Proofs

    def proven_aside(self, at: float) -> None:
        """Note a proof that came on the heartbeat thread."""


class _NoAnswer(Exception):
    """The server did not answer, or not with what was to be expected."""


class _Aside:
    """Conversation with one server."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decode = wire.server_message().decode
        self._reader = FrameReader(wire.GREETING_BYTES)
        self._writer = FrameWriter(wire.GREETING_BYTES)
        self._number = 0

    def greet(self, hello: wire.Hello) -> None:
        """Open the conversation."""
        if not isinstance(self._exchange(hello), wire.Welcome):
            raise _NoAnswer

    def renew(self, session: RenewedSession, patience: float) -> float | None:
        """Return the age of the proof that the server gave, or ``None`` if it gave none."""
        self._number += 1
        self.connection.settimeout(patience)
        answer = self._exchange(
            wire.RenewAside(self._number, session.node, session.id, session.key)
        )
        if isinstance(answer, wire.Proven) and answer.number == self._number and answer.age >= 0:
            return answer.age
        if isinstance(answer, wire.Unproven) and answer.number == self._number:
            return None
        raise _NoAnswer

    def _exchange(self, message: Struct) -> wire.ServerMessage:
        """Send a message, and read the answer."""
        self._writer.add(message)
        self.connection.sendall(self._writer.take())
        while True:
            data = self.connection.recv(_BYTES)
            if not data:
                raise _NoAnswer
            for frame in self._reader.feed(data):
                return self._decode(frame)


class NativeHeartbeat(HeartbeatThread[RenewedSession]):
    """The heartbeat thread of one engine."""

    def __init__(
        self, address: NativeUrl, tls: ssl.SSLContext | None, clock: Clock, program: bytes
    ) -> None:
        """Start without a thread and without connections."""
        failures = Failures(f"heartbeats to {address.url}", logging.getLogger("tenure"))
        super().__init__("tenure-native-heartbeat", clock.now, failures)
        self._server_name = "" if address.tls is None else address.tls.server_name
        self._tls = tls
        self._hello = wire.Hello(
            wire.VERSION, wire.VERSION, sorted(wire.FEATURES), address.token, program
        )
        self._endpoints = list(address.endpoints)
        self._asides: dict[Endpoint, _Aside] = {}

    def renew_now(self, wanted: dict[RenewedSession, float]) -> None:
        """Renew the sessions that the loop has not renewed meanwhile."""
        self.wait_until_closing(_HEAD_START)
        for session, asked in wanted.items():
            if session.proofs.asked < asked and not self._closing:
                with self._failures.contained():
                    self._prove(session)

    def disconnect(self) -> None:
        """Close all connections of the thread."""
        for endpoint in list(self._asides):
            self._hang_up(endpoint)

    def _prove(self, session: RenewedSession) -> None:
        least, most = _PATIENCE
        patience = max(least, min(most, session.window / 8))
        for endpoint in list(self._endpoints):
            sent, age = self._ask(endpoint, session, patience)
            if age is not None:
                self._endpoints.remove(endpoint)
                self._endpoints.insert(0, endpoint)
                session.proven_aside(sent - age)
                return

    def _ask(
        self, endpoint: Endpoint, session: RenewedSession, patience: float
    ) -> tuple[float, float | None]:
        """Return the time of the question and the age of the proof; reconnect if needed."""
        for _ in range(2):
            aside = self._asides.get(endpoint)
            made_now = aside is None
            try:
                if aside is None:
                    place = endpoint.path or (endpoint.host, endpoint.port)
                    name = self._server_name or endpoint.host
                    connection = self.connect(place, patience, self._tls, name)
                    aside = self._asides[endpoint] = _Aside(connection)
                    aside.greet(self._hello)
                sent = self._now()
                return sent, aside.renew(session, patience)
            except (OSError, DecodeError, RecursionError, UnicodeDecodeError, _NoAnswer):
                self._hang_up(endpoint)
                if made_now or self._closing:
                    break
        return 0.0, None

    def _hang_up(self, endpoint: Endpoint) -> None:
        aside = self._asides.pop(endpoint, None)
        if aside is not None:
            self.drop(aside.connection)
