"""Renewing while the program's loop stands still: from a thread, over connections of its own.

A loop that does not turn sends nothing, so that its sessions would be lost after one window. The
keeper notices, and asks from its own thread (`EngineSession.renew`). Then this sends what the loop
cannot. It renews by id and key (`RenewAside`), and changes nothing about where a session is
attached.

Rules:

* The loop comes first: what it can do within a moment is left to it.
* The thread is started when it is first needed, and ends when nothing was asked for a while.
* All servers are tried, the one that proved something the last time first, until one proves the
  session: only one of them has it, and any may be the one that does not answer.
* Nothing here waits for the loop. At the end the loop waits for the thread, which a closing of
  its sockets wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from msgspec import DecodeError, Struct

from tenure.background import BackgroundThread, Failures
from tenure.clock import Clock
from tenure.engines._kit.url import Endpoint
from tenure.engines.native.url import NativeUrl
from tenure.wire import messages as wire
from tenure.wire.frames import FrameReader, FrameWriter

if TYPE_CHECKING:
    from tenure.engines.native.session import NativeSession

__all__ = ["Sideline"]

_log = logging.getLogger("tenure")

_HEAD_START = 0.05
"""Seconds in which the loop may do it itself."""

_IDLE = 5.0
"""Seconds for which the thread, and its connections, stay when nothing is asked."""

_PATIENCE = (0.25, 2.0)
"""Seconds for which one server may take over an answer: the least, and the most."""

_BYTES = 64 * 1024


class _NoAnswer(Exception):
    """The server did not answer, or not with what was to be expected."""


class _Aside:
    """A connection of the thread's own."""

    def __init__(
        self,
        address: NativeUrl,
        tls: ssl.SSLContext | None,
        endpoint: Endpoint,
        program: bytes,
        patience: float,
    ) -> None:
        self._decode = wire.server_message().decode
        self._reader = FrameReader(wire.GREETING_BYTES)
        self._writer = FrameWriter(wire.GREETING_BYTES)
        self._number = 0
        if endpoint.path:
            self.socket = socket.socket(socket.AF_UNIX)
        else:
            self.socket = socket.create_connection((endpoint.host, endpoint.port), patience)
        try:
            self.socket.settimeout(patience)
            if endpoint.path:
                self.socket.connect(endpoint.path)
            if tls is not None and address.tls is not None:
                name = address.tls.server_name or endpoint.host
                self.socket = tls.wrap_socket(self.socket, server_hostname=name)
            hello = wire.Hello(
                wire.VERSION, wire.VERSION, sorted(wire.FEATURES), address.token, program
            )
            if not isinstance(self._exchange(hello), wire.Welcome):
                raise _NoAnswer
        except BaseException:
            self.socket.close()
            raise

    def renew(self, session: NativeSession, patience: float) -> float | None:
        """The age of the proof that the server gave, or ``None`` if it gave none."""
        self._number += 1
        self.socket.settimeout(patience)
        answer = self._exchange(
            wire.RenewAside(self._number, session.node, session.id, session.key)
        )
        if isinstance(answer, wire.Proven) and answer.number == self._number and answer.age >= 0:
            return answer.age
        if isinstance(answer, wire.Unproven) and answer.number == self._number:
            return None
        raise _NoAnswer

    def _exchange(self, message: Struct) -> wire.ServerMessage:
        """Say something, and read the one thing that is said to it."""
        self._writer.add(message)
        self.socket.sendall(self._writer.take())
        while True:
            data = self.socket.recv(_BYTES)
            if not data:
                raise _NoAnswer
            for frame in self._reader.feed(data):
                return self._decode(frame)


class Sideline:
    """Heartbeat thread that renews an engine's sessions beside its loop."""

    def __init__(
        self, address: NativeUrl, tls: ssl.SSLContext | None, clock: Clock, program: bytes
    ) -> None:
        self._address = address
        self._tls = tls
        self._clock = clock
        self._program = program
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wanted: dict[NativeSession, float] = {}
        self._bell = threading.Event()
        self._closing = threading.Event()
        self._failures = Failures(f"renewing beside the loop on {address.url}", _log)
        self._thread: BackgroundThread | None = None
        self._over = asyncio.Event()
        self._endpoints = list(address.endpoints)
        self._asides: dict[Endpoint, _Aside] = {}

    def renew(self, session: NativeSession) -> None:
        """Renew it, unless the loop does within a moment. From any thread; returns at once."""
        with self._lock:
            if self._closing.is_set():
                return
            self._wanted[session] = self._clock.now()
            if self._thread is None or not self._thread.alive:
                thread = BackgroundThread("tenure-sideline", self._run)
                with self._failures.contained():  # the next renewal tries again
                    thread.start()
                    self._thread = thread
            self._bell.set()

    async def aclose(self) -> None:
        """Stop. Safe to call twice."""
        with self._lock:
            self._closing.set()
            self._bell.set()
            thread = self._thread
            asides = list(self._asides.values())
        for each in asides:
            with contextlib.suppress(OSError):
                each.socket.shutdown(socket.SHUT_RDWR)
        if thread is not None:
            # It may be looking up a name, which nothing interrupts; then it ends by itself.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * _PATIENCE[1]):
                    await self._over.wait()
                thread.join()

    # In the thread

    def _run(self) -> None:
        try:
            while self._go_on():
                self._closing.wait(_HEAD_START)
                with self._lock:
                    wanted, self._wanted = self._wanted, {}
                for session, asked in wanted.items():
                    if session.proofs.asked < asked and not self._closing.is_set():
                        with self._failures.contained():
                            self._prove(session)
        finally:
            for endpoint in list(self._asides):
                self._hang_up(endpoint)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._over.set)

    def _go_on(self) -> bool:
        """Wait for something to do; false when there is nothing for a while, or ever again."""
        self._bell.wait(_IDLE)
        with self._lock:
            self._bell.clear()
            if self._wanted and not self._closing.is_set():
                return True
            if not self._closing.is_set():
                self._thread = None
            return False

    def _prove(self, session: NativeSession) -> None:
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
        self, endpoint: Endpoint, session: NativeSession, patience: float
    ) -> tuple[float, float | None]:
        """Return the time of the question and the age of the proof; reconnect if needed."""
        for _ in range(2):
            aside = self._asides.get(endpoint)
            made_now = aside is None
            try:
                if aside is None:
                    aside = self._asides[endpoint] = _Aside(
                        self._address, self._tls, endpoint, self._program, patience
                    )
                sent = self._clock.now()
                return sent, aside.renew(session, patience)
            except (OSError, DecodeError, RecursionError, UnicodeDecodeError, _NoAnswer):
                self._hang_up(endpoint)
                if made_now or self._closing.is_set():
                    break
        return 0.0, None

    def _hang_up(self, endpoint: Endpoint) -> None:
        aside = self._asides.pop(endpoint, None)
        if aside is not None:
            aside.socket.close()
