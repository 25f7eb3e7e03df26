"""Heartbeat thread of the Redis engine: it connects to the server that the loop used last."""

from __future__ import annotations

import socket
from typing import Any

import hiredis

from tenure.clock import Clock
from tenure.engines._kit.heartbeat import HeartbeatThread
from tenure.engines.redis.commands import SCRIPTS, AttachedSession, Word, keys_of, pack
from tenure.engines.redis.connecting import Server, moved_to
from tenure.engines.redis.url import RedisUrl

_TIMEOUT = 2.0
_SCRIPT = SCRIPTS["renew"]
_NOTHING = object()


class RedisHeartbeat(HeartbeatThread[AttachedSession]):
    """The heartbeat thread of one engine."""

    expected = (OSError, hiredis.HiredisError)

    def __init__(self, address: RedisUrl, clock: Clock, witness: str) -> None:
        super().__init__("tenure-redis-heartbeat", clock.now, f"heartbeats to {address.url}")
        self._address = address
        self._witness = witness
        self._keys = keys_of(address.prefix)
        self._server: Server | None = None
        # The node that another one has named, in the thread, and the server of the loop then.
        self._moved: tuple[Server, Server] | None = None
        self._socket: socket.socket | None = None
        self._connected_to: Server | None = None
        self._reader: Any = None

    def serve(self, server: Server) -> None:
        """Use this server from now on. Called on the loop."""
        self._server = server

    def renew_now(self, requested: dict[AttachedSession, float]) -> None:
        """Renew these sessions, in the thread."""
        sessions = [each for each in requested if not each.over]
        if not sessions:
            return
        connection, server = self._connected()
        at = self._now()
        commands: list[tuple[Word, ...]] = [
            ("EVALSHA", _SCRIPT.digest, *self._keys, each.id, each.token, "", *each.held())
            for each in sessions
        ]
        connection.sendall(b"".join(map(pack, commands)))
        for session in sessions:
            reply = self._read(connection)
            if isinstance(reply, hiredis.ReplyError):
                there = moved_to(str(reply), server.place)
                if there is not None:
                    self._moved = server, server._replace(place=there)
                raise reply  # no script, no rights, no master: the loop's connection reports it
            if reply == 0 and not session.over:
                session.prove(at)

    def _connected(self) -> tuple[socket.socket, Server]:
        server = self._server
        assert server is not None
        if self._moved is not None and self._moved[0] is server:
            server = self._moved[1]
        if self._socket is not None and self._connected_to == server:
            return self._socket, server
        self.disconnect()
        tls, name = self._address.tls, self._address.server_name
        if isinstance(server.place, str):
            tls = None
        connection = self.connect(server.place, _TIMEOUT, tls, name or server.place[0])
        self._socket = connection
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
        return connection, server

    def _read(self, connection: socket.socket) -> Any:
        while (reply := self._reader.gets()) is _NOTHING:
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return reply

    def disconnect(self) -> None:
        """Close the connection of the thread."""
        connection, self._socket = self._socket, None
        self._connected_to = None
        if connection is not None:
            self.drop(connection)
