"""Confirmation of grants by replicas, before they are reported (``min_replicas=N``).

`WAIT` counts the replicas that have the writes of *its own connection*, so it has a separate
connection. On it each grantee writes to its session, a write that follows the grant in the
replication stream. One WAIT follows for all grants since the last one. A replica that has confirmed
the write has the grant. The write does not renew the session: the grantee may be a server's client,
which has died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tenure.background import Failures
from tenure.engines.redis.commands import AttachedSession, Command
from tenure.engines.redis.connecting import Server, connect_once, greet, information
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.url import RedisUrl
from tenure.errors import EngineError

_log = logging.getLogger("tenure")

_TIMEOUT = 1.0
"""Timeout in seconds of the replicas' confirmation."""

Done = Callable[[EngineError | None], None]


class Confirmer:
    """The connection for confirmations, and the grants that wait for them."""

    def __init__(self, address: RedisUrl, witness: str) -> None:
        self._address = address
        self._witness = witness
        self._server: Server | None = None
        self._connection: RedisConnection | None = None
        self._granted: list[tuple[AttachedSession, Done]] = []
        self._task: asyncio.Task[None] | None = None
        self._failures = Failures(f"confirming grants on {address.url}", _log)

    def serve(self, server: Server) -> None:
        """Use this server from now on."""
        self.disconnect()
        self._server = server

    def confirm(self, session: AttachedSession, done: Done) -> None:
        """Call `done` when enough replicas have the grant, or with the error."""
        self._granted.append((session, done))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def disconnect(self) -> None:
        """Drop the connection, also one that is being made; pending grants are not confirmed."""
        self._server = None
        self._drop("the connection to the server ended")

    async def aclose(self) -> None:
        """Stop. Safe to call twice."""
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self.disconnect()

    async def _run(self) -> None:
        try:
            while self._granted:
                batch, self._granted = self._granted, []
                errors = await self._confirm({session for session, _ in batch})
                for session, done in batch:
                    with self._failures.contained():
                        done(errors.get(session))
        finally:
            self._task = None

    async def _confirm(self, sessions: set[AttachedSession]) -> dict[AttachedSession, EngineError]:
        """Return the error of each session whose grants are not confirmed."""
        url, needed = self._address.url, self._address.min_replicas
        try:
            async with asyncio.timeout(_TIMEOUT + self._address.connect_timeout):
                connection = await self._connected()
                *written, replicas = await asyncio.gather(
                    *(connection.run("renew", each.id, each.token, "0") for each in sessions),
                    connection.execute("WAIT", needed, int(_TIMEOUT * 1000)),
                )
        except Exception as error:  # errors of any kind: each grantee receives them
            self._drop(f"a grant was not confirmed: {error!r}")
            return dict.fromkeys(
                sessions,
                EngineError(
                    f"{url}: no replica confirmed the grant, so the lease was released: {error}"
                ),
            )
        if replicas < needed:
            return dict.fromkeys(
                sessions,
                EngineError(
                    f"{url}: {replicas} of min_replicas={needed} replicas confirmed the grant, so "
                    "the lease was released. Check that the replicas are up"
                ),
            )
        return {
            session: EngineError(
                f"{url}: no replica confirmed the grant: the session was over, or attached "
                f"elsewhere: {reply!r}"
            )
            for session, reply in zip(sessions, written, strict=True)
            if reply != 0  # it was not written, so what the replicas have may be without the grant
        }

    async def _connected(self) -> RedisConnection:
        if self._connection is None or self._connection.over:
            server = self._server
            if server is None:
                raise _gone()
            connection = await connect_once(self._address, server.place, _pushed, _lost)
            try:
                await greet(connection, self._address, protocol=2)
                info = await information(connection, self._address)
                await connection.execute("SCRIPT", "LOAD", self._witness)
                # Only the server that grants confirms: after a failover, another one may answer at
                # its address, or this one may have been the master before.
                if self._server is not server or info.get("run_id", "") != server.run_id:
                    raise _gone()
            except BaseException:
                connection.drop("the greeting failed")
                raise
            self._connection = connection
        return self._connection

    def _drop(self, why: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop(why)


def _lost(why: str, unanswered: list[Command]) -> None:
    assert not unanswered, f"{why}: a command would be sent again"


def _gone() -> EngineError:
    return EngineError("the connection to the server ended")


def _pushed(channel: bytes, message: bytes) -> None:
    raise AssertionError(f"a push without a subscription on {channel!r}: {message!r}")
