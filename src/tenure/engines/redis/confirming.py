"""Having replicas confirm grants before anybody hears of them (``min_replicas=N``).

`WAIT` says how many replicas have what was written *on its own connection*, so there is a
connection for this alone: on it each grantee renews its session, a write that comes after the grant
in the replication stream, and one WAIT follows for all that were granted meanwhile. A replica that
has confirmed the one has the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tenure.background import Failures
from tenure.clock import Clock
from tenure.engines.redis.commands import Pending
from tenure.engines.redis.connecting import Server, connect_once, greet
from tenure.engines.redis.url import RedisUrl
from tenure.engines.redis.wire import Wire
from tenure.errors import EngineError

if TYPE_CHECKING:
    from tenure.engines.redis.attachment import Attachment

__all__ = ["Confirmer"]

_log = logging.getLogger("tenure")

_PATIENCE = 1.0
"""Seconds that the replicas have."""

Told = Callable[[EngineError | None], None]


class Confirmer:
    """The connection, and the grants that are to be confirmed."""

    def __init__(self, address: RedisUrl, meta: str, clock: Clock, witness: str) -> None:
        self._address = address
        self._witness = witness
        self._meta = meta
        self._clock = clock
        self._server: Server | None = None
        self._wire: Wire | None = None
        self._granted: list[tuple[Attachment, Told]] = []
        self._task: asyncio.Task[None] | None = None
        self._failures = Failures(f"confirming grants on {address.url}", _log)

    def serve(self, server: Server) -> None:
        """Where the server is now."""
        self._server = server

    def confirm(self, session: Attachment, told: Told) -> None:
        """Call `told` when enough replicas have what was granted, or with why that cannot be."""
        self._granted.append((session, told))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def disconnect(self) -> None:
        """The server is gone; whatever is under way is not confirmed."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.give_up("the server is gone")

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
                error = await self._confirm({session for session, _ in batch})
                for _, told in batch:
                    with self._failures.contained():
                        told(error)
        finally:
            self._task = None

    async def _confirm(self, sessions: set[Attachment]) -> EngineError | None:
        wanted = self._address.min_replicas
        try:
            async with asyncio.timeout(_PATIENCE + self._address.connect_timeout):
                wire = await self._connected()
                at = self._clock.now()
                replies = await asyncio.gather(
                    *(wire.run("renew", session) for session in sessions),
                    wire.ask("WAIT", wanted, int(_PATIENCE * 1000)),
                )
        except Exception as error:  # whatever it is, those who were granted hear of it
            self.disconnect()
            return EngineError(
                f"{self._address.url}: no replica could be asked to confirm the grant ({error}); "
                "it was given back"
            )
        for session, reply in zip(sessions, replies, strict=False):
            if reply == 0 and not session.over:
                session.events.proven(at)
        if replies[-1] < wanted:
            return EngineError(
                f"{self._address.url}: {replies[-1]} of the {wanted} replicas that min_replicas "
                "asks for confirmed the grant; it was given back. See that the replicas are up"
            )
        return None

    async def _connected(self) -> Wire:
        if self._wire is None or self._wire.over:
            assert self._server is not None
            wire = await connect_once(
                self._address, self._server.place, self._meta, _unheard, self._lost
            )
            try:
                await greet(wire, self._address, protocol=2)
                if self._address.db:
                    await wire.ask("SELECT", self._address.db)
                await wire.ask("SCRIPT", "LOAD", self._witness)
            except BaseException:
                wire.give_up("the greeting failed")
                raise
            self._wire = wire
        return self._wire

    def _lost(self, why: str, unanswered: list[Pending]) -> None:
        assert not unanswered, f"{why}: only what is not sent again goes this way"
        self._wire = None


def _unheard(channel: bytes, message: bytes) -> None:
    raise AssertionError(f"nothing is subscribed to here, and yet {channel!r} says {message!r}")
