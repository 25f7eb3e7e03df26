"""Output queue of the replies of one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from tenure.server.ydb.calls import GrpcCall, frame
from tenure.server.ydb.long_replies import LongReply

_MUCH = 256 * 1024  # bytes of output above which the client's messages are not read


class Output:
    """Queue of a stream's replies.

    Args:
        call: the stream.
        count: called with the change of the number of waiting bytes.
        progressed: called when the client has read a chunk of a long reply.

    Attributes:
        is_long: whether a long reply is being sent; messages that the client must answer wait
            behind it.
    """

    def __init__(
        self, call: GrpcCall, count: Callable[[int], None], progressed: Callable[[], None]
    ) -> None:
        self.is_long = False
        self._call = call
        self._count = count
        self._progressed = progressed
        self._waiting: deque[bytes | LongReply] = deque()
        self._bytes = 0

    @property
    def is_much(self) -> bool:
        """True if so much waits that the client's messages are not read."""
        return self._bytes > _MUCH

    def add(self, replies: list[Any]) -> None:
        """Append replies to the queue."""
        for reply in replies:
            if isinstance(reply, LongReply):
                self._waiting.append(reply)
                continue
            encoded = frame(reply.SerializeToString())
            self._waiting.append(encoded)
            self._bytes += len(encoded)
            self._count(len(encoded))

    async def flush(self) -> None:
        """Send the queue, as fast as the client reads."""
        while self._waiting:
            if isinstance(self._waiting[0], LongReply):
                await self._send_long()
            else:
                await self._send_short()
            self._call.resume()

    async def _send_short(self) -> None:
        short = []
        while self._waiting and isinstance(encoded := self._waiting[0], bytes):
            short.append(encoded)
            self._waiting.popleft()
        frames = b"".join(short)
        try:
            await self._call.send(frames)
        finally:
            self._bytes -= len(frames)
            self._count(-len(frames))

    async def _send_long(self) -> None:
        reply = self._waiting.popleft()
        assert isinstance(reply, LongReply)
        self.is_long = True
        try:
            for piece in reply.pieces():
                self._count(len(piece))
                try:
                    await self._call.send(piece)
                finally:
                    self._count(-len(piece))
                self._progressed()
                await asyncio.sleep(0)  # other clients are served between two chunks
        finally:
            self.is_long = False

    def close(self) -> None:
        """Stop sending."""
        self._count(-self._bytes)
        self._bytes = 0
        self._waiting.clear()
