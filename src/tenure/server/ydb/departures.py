"""Sessions that the client of a connection has left, until the store has detached them.

A client that cancels or half-closes a session's stream and then makes another call, for example to
drop the session's node, expects the session to be detached by then. HTTP/2 keeps the order of the
two, but each call has its own task: the later call waits here for the earlier streams.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenure.server.ydb.calls import GrpcCall


class Departures:
    """Session streams of one connection, and those that are being detached."""

    def __init__(self) -> None:
        self._streams: dict[GrpcCall, asyncio.Future[None]] = {}
        self._leaving: set[asyncio.Future[None]] = set()

    def begin(self, call: GrpcCall) -> None:
        """Record that `call` is about to attach a session."""
        self._streams[call] = asyncio.get_running_loop().create_future()

    def over(self, call: GrpcCall, detaching: asyncio.Task[None] | None = None) -> None:
        """Record the end of a stream. Safe to call twice; the first call counts.

        Args:
            call: the stream.
            detaching: the task that detaches or ends its session in the store, if there is one.
        """
        future = self._streams.pop(call, None)
        if future is None:
            return
        if detaching is None:
            future.set_result(None)
            return
        self._leaving.add(future)

        def done(_: asyncio.Task[None]) -> None:
            self._leaving.discard(future)
            future.set_result(None)

        detaching.add_done_callback(done)

    async def settled(self, before: GrpcCall | None = None) -> None:
        """Wait until the store has detached every session that the client has left.

        Args:
            before: consider only streams that began before this one.
        """
        waiting = set(self._leaving)
        for call, future in self._streams.items():
            if call is before:
                break
            if call.left:
                waiting.add(future)
        if waiting:
            await asyncio.wait(waiting)

    async def expected(self, seconds: float) -> bool:
        """Wait for the ends of all streams, but only so long; return false if there are none.

        Some clients cancel a stream and make a call at the same time, and the call arrives first.
        """
        waiting = {*self._leaving, *self._streams.values()}
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        return bool(waiting)
