"""The floor of whatever travels over a connection: frames that come back as they are.

Length-prefixed msgpack, like the native protocol's, on a Protocol with one write for each arrival;
``python -m benchmarks.echo`` is the server. The client waits for each frame with a future.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import cast

import msgspec
import uvloop


class _Frames(asyncio.Protocol):
    """Cuts what arrives into frames, and decodes them."""

    def __init__(self) -> None:
        self._rest = b""
        self._decode = msgspec.msgpack.Decoder(list[int]).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) - at >= 4:
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if end > len(data):
                break
            self.frame(self._decode(data[at + 4 : end]))
            at = end
        self._rest = data[at:]

    def framed(self, message: list[int]) -> bytes:
        body = self._encode(message)
        return len(body).to_bytes(4, "big") + body

    def frame(self, message: list[int]) -> None:
        raise NotImplementedError


class _EchoServer(_Frames):
    def __init__(self) -> None:
        super().__init__()
        self._out: list[bytes] = []

    def frame(self, message: list[int]) -> None:
        self._out.append(self.framed(message))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.write(b"".join(self._out))
        self._out.clear()


class EchoClient(_Frames):
    """One connection, any number of frames under way; they come back in order."""

    def __init__(self) -> None:
        """Start with no frames under way."""
        super().__init__()
        self._waiting: deque[asyncio.Future[list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []

    async def there_and_back(self) -> None:
        """Send a frame and wait until it comes back."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(self.framed([1, 2, 3, 4, 5]))
        answer = self._loop.create_future()
        self._waiting.append(answer)
        await answer

    def _flush(self) -> None:
        self.transport.write(b"".join(self._out))
        self._out.clear()

    def frame(self, message: list[int]) -> None:
        """Handle a frame that came back."""
        self._waiting.popleft().set_result(message)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_EchoServer, "127.0.0.1", 0)
    print("listening on port", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
