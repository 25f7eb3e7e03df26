"""Heartbeat thread: renews sessions over a connection of its own while the event loop is stuck.

The first renewal from another thread than the loop's starts it. The caller puts the session in a
list and never blocks. The thread connects to the server that the loop used last. A renewal that
fails proves nothing, and the next one tries again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any

import hiredis

from tenure.background import BackgroundThread, Failures
from tenure.clock import Clock
from tenure.engines.redis.commands import SCRIPTS, AttachedSession, Word, pack
from tenure.engines.redis.connecting import Server
from tenure.engines.redis.url import RedisUrl

__all__ = ["RedisHeartbeat"]

_log = logging.getLogger("tenure")

_TIMEOUT = 2.0
_SCRIPT = SCRIPTS["renew"]
_NOTHING = object()


class RedisHeartbeat:
    """The heartbeat thread of one engine, and the sessions that it renews next."""

    def __init__(self, address: RedisUrl, meta: str, clock: Clock, witness: str) -> None:
        self._address = address
        self._witness = witness
        self._meta = meta
        self._clock = clock
        self._server: Server | None = None
        self._wanted: dict[AttachedSession, None] = {}
        self._look = threading.Condition()
        self._failures = Failures(f"heartbeats to {address.url}", _log)
        self._thread = BackgroundThread("tenure-redis-heartbeat", self._run)
        self._socket: socket.socket | None = None
        self._connected_to: Server | None = None
        self._reader: Any = None
        self._closing = False

    def serve(self, server: Server) -> None:
        """Use this server from now on. Called on the loop."""
        with self._look:
            self._server = server

    def renew(self, session: AttachedSession) -> None:
        """Renew a session soon. Called on any thread; never blocks."""
        with self._look:
            if self._closing:
                return
            self._wanted[session] = None
            with self._failures.contained():  # the next renewal tries again
                self._thread.start()
            self._look.notify()

    async def aclose(self) -> None:
        """End the thread. Safe to call twice."""
        with self._look:
            self._closing = True
            self._look.notify()
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)  # it may be waiting for an answer
                except OSError:
                    _log.debug("the heartbeat thread's connection was closed already")
        if self._thread.alive:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # In the thread

    def _run(self) -> None:
        while True:
            with self._look:
                while not self._wanted and not self._closing:
                    self._look.wait()
                if self._closing:
                    break
                sessions = [each for each in self._wanted if not each.over]
                self._wanted.clear()
            try:
                self._renew(sessions)
            except (OSError, hiredis.HiredisError) as error:
                _log.debug("a heartbeat failed: %s", error)
                self._disconnect()
            except Exception as error:
                self._failures.report(error)
                self._disconnect()
        self._disconnect()

    def _renew(self, sessions: list[AttachedSession]) -> None:
        connection = self._connected()
        at = self._clock.now()
        commands: list[tuple[Word, ...]] = [
            ("EVALSHA", _SCRIPT.digest, 1, self._meta, each.id, each.token) for each in sessions
        ]
        connection.sendall(b"".join(map(pack, commands)))
        for session in sessions:
            reply = self._read(connection)
            if isinstance(reply, hiredis.ReplyError):
                raise reply  # no script, no rights, no master: the loop's connection finds out
            if reply == 0 and not session.over:
                session.events.proven(at)

    def _connected(self) -> socket.socket:
        with self._look:
            server = self._server
        assert server is not None
        if self._socket is not None and self._connected_to == server:
            return self._socket
        self._disconnect()
        connection = self._connect(server)
        with self._look:
            self._socket = connection
            if self._closing:
                raise ConnectionAbortedError("the engine is being closed")
        self._connected_to = server
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        words: list[tuple[Word, ...]] = []
        if self._address.password:
            name = self._address.username
            words.append(("AUTH", *filter(None, (name, self._address.password))))
        if self._address.db:
            words.append(("SELECT", self._address.db))
        words += [("SCRIPT", "LOAD", text) for text in (self._witness, _SCRIPT.text)]
        connection.sendall(b"".join(map(pack, words)))
        for _ in words:
            reply = self._read(connection)
            if isinstance(reply, hiredis.ReplyError):
                raise reply
        return connection

    def _connect(self, server: Server) -> socket.socket:
        if isinstance(server.place, str):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(_TIMEOUT)
                connection.connect(server.place)
            except BaseException:
                connection.close()
                raise
            return connection
        connection = socket.create_connection(server.place, timeout=_TIMEOUT)
        if self._address.tls is None:
            return connection
        try:
            name = self._address.server_name or server.place[0]
            return self._address.tls.wrap_socket(connection, server_hostname=name)
        except BaseException:
            connection.close()
            raise

    def _read(self, connection: socket.socket) -> Any:
        while (reply := self._reader.gets()) is _NOTHING:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return reply

    def _disconnect(self) -> None:
        with self._look:
            connection, self._socket = self._socket, None
        self._connected_to = None
        if connection is not None:
            connection.close()
