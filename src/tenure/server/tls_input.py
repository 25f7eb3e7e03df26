"""TLS of one connection, which decrypts a bounded part of its input in an iteration of the loop.

The event loop decrypts all that it has received before the connection's protocol gets any of it.
With one byte in a record, that is thousands of reads; of a connection that is being closed, it is
all that the client continues to send. So beyond `_SLICE` the object says that there is no more. The
rest is read when it is the connection's turn (`tenure.server.budget`). A connection that is being
closed is cut off instead.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Hashable
from functools import partial
from typing import Any

from tenure.server.budget import LoopBudget, Share

__all__ = ["SlicedTls", "slice_tls"]

_SLICE = 256  # records, each of which counts once more for each KiB that it has
_SECONDS = 0.001  # that a slice takes


class SlicedTls(ssl.SSLObject):
    """The TLS state of one connection. `ssl.SSLContext.sslobject_class` makes it."""

    _left = _SLICE
    _share: Share | None = None

    def read(self, *args: Any) -> Any:
        """Return the next data, as `ssl.SSLObject.read` does, up to the bound.

        The protocols here have no buffers of their own, which it would be read into.
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
        """Go on in the turns of this share, whose work is `go_on`."""
        self._share = share
        if self._left <= 0:
            share.queue()

    def go_on(self, transport: asyncio.Transport) -> None:
        """Have the transport read on; cut it off if it is being closed, and its client sends on."""
        if transport.is_closing():
            transport.abort()
            return
        self._left = _SLICE
        if transport.is_reading():
            # Resuming is what makes it look for data; a protocol that has paused it resumes it.
            transport.pause_reading()
            transport.resume_reading()


def slice_tls(transport: asyncio.Transport, budget: LoopBudget, source: Hashable) -> None:
    """Bound what a transport decrypts in an iteration of the loop, if it has TLS."""
    tls = transport.get_extra_info("ssl_object")
    if isinstance(tls, SlicedTls):
        tls.share_loop(Share(budget, source, partial(tls.go_on, transport), _SECONDS))
