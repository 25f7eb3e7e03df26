"""TLS of one connection, which decrypts a bounded part of its input in an iteration of the loop.

The event loop decrypts all received data before the connection's protocol gets any of it. With one
byte per record, this means thousands of reads; on a closing connection, it includes everything that
the client continues to send. So beyond `_SLICE` the object reports no more data. The rest is read
in the connection's turn (`tenure.server.budget`). A closing connection is cut off instead.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from tenure.server.budget import Share

__all__ = ["SlicedTls", "slice_tls"]

_SLICE = 256  # number of records, of which each counts once more for each KiB
_SECONDS = 0.001  # that a slice takes


class SlicedTls(ssl.SSLObject):
    """TLS state of one connection. `ssl.SSLContext.sslobject_class` makes it."""

    _left = _SLICE
    _share: Share | None = None

    def read(self, *args: Any) -> Any:
        """Return the next data, like `ssl.SSLObject.read`, up to the bound.

        The protocols here have no buffers to read into.
        """
        if self._left <= 0:
            if self._share is not None:
                self._share.queue()
            raise ssl.SSLWantReadError
        try:
            data = super().read(*args)
        except ssl.SSLWantReadError:
            self._left = _SLICE
            raise
        self._left -= 1 + (len(data) >> 10)
        return data

    def share_loop(self, share: Share) -> None:
        """Continue in the turns of this share, whose work is `go_on`."""
        self._share = share
        if self._left <= 0:
            share.queue()

    def go_on(self, transport: asyncio.Transport) -> None:
        """Make the transport read more; cut it off if it is closing and its client still sends."""
        if transport.is_closing():
            transport.abort()
            return
        self._left = _SLICE
        if transport.is_reading():
            # Resuming makes it read; a protocol that has paused it resumes it.
            transport.pause_reading()
            transport.resume_reading()


def slice_tls(
    transport: asyncio.Transport, share: Callable[[Callable[[], None], float], Share]
) -> None:
    """Bound what a transport with TLS decrypts in an iteration of the loop."""
    tls = transport.get_extra_info("ssl_object")
    if isinstance(tls, SlicedTls):
        tls.share_loop(share(partial(tls.go_on, transport), _SECONDS))
