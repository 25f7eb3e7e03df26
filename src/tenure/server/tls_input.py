"""TLS of one connection, which decrypts a bounded part of its input in an iteration of the loop.

The event loop decrypts all received data before the connection's protocol gets any of it. With one
byte per record, or records that only change keys, this means thousands of steps; on a closing
connection, it includes everything that the client continues to send. Rules:

* The library gets one record at a time, since one call handles all records without data.
* Beyond `_SLICE`, or `_SECONDS` without data, the object reports no more data. The rest is read in
  the connection's turn (`tenure.server.budget`).
* A stranger's input is read in its turns alone. A stranger that sends much more is cut off.
* A closing connection is cut off instead of being read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

from tenure.server.budget import FORGOTTEN, Share

NewShare: TypeAlias = Callable[[Callable[[], None], float], Share]
CutOff: TypeAlias = Callable[[], None]

_HEADER = 5  # bytes of a record's header
_LONGEST = _HEADER + 16384 + 2048  # bytes of a record
_KINDS = frozenset(range(20, 25))  # of records
_SLICE = 256  # number of records, of which each counts once more for each KiB
_SECONDS = 0.001  # that a slice takes
_LAST = 256  # records that are searched for the end of a connection


class SlicedTls(ssl.SSLObject):
    """TLS state of one connection. `ssl.SSLContext.sslobject_class` makes it."""

    _received: ssl.MemoryBIO  # by the transport
    _input: ssl.MemoryBIO  # of the library
    _partial = b""  # of a record that has not come whole
    _left = 0
    _ends = 0.0  # of the slice, once it has had a record without data
    _share: Share | None = None
    _cut_off: CutOff | None = None

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, *args: Any, **more: Any) -> SlicedTls:
        """Make the state of a connection; called by `ssl.SSLContext.wrap_bio`."""
        given = ssl.MemoryBIO()
        made: SlicedTls = super()._create(given, *args, **more)  # type: ignore[misc]
        made._received, made._input = incoming, given
        return made

    def _give(self) -> bool:
        """Give the library the next record; false if there is none."""
        received, record = self._received, self._partial
        if len(record) < _HEADER:
            record += received.read(_HEADER - len(record))
        if len(record) >= _HEADER:
            length = _HEADER + int.from_bytes(record[3:_HEADER], "big")
            valid = record[0] in _KINDS and record[1] == 3 and length <= _LONGEST
            if valid and len(record) < length:
                record += received.read(length - len(record))
            if not valid or len(record) == length:  # the library refuses what is not valid
                self._partial = b""
                self._input.write(record)
                return True
        self._partial = record
        return False

    def do_handshake(self) -> None:
        """Continue the handshake, like `ssl.SSLObject.do_handshake`."""
        while True:
            try:
                super().do_handshake()
            except ssl.SSLWantReadError:
                if not self._give():
                    raise
            else:
                return

    def unwrap(self) -> None:
        """End TLS, like `ssl.SSLObject.unwrap`."""
        for _ in range(_LAST):
            try:
                super().unwrap()
            except ssl.SSLWantReadError:
                if not self._give():
                    raise
            else:
                return
        raise ssl.SSLWantReadError

    def read(self, *args: Any) -> Any:
        """Return the next data, like `ssl.SSLObject.read`, up to the bound.

        The protocols here have no buffers to read into.
        """
        while self._left > 0:
            given = self._give()
            try:
                data = super().read(*args)
            except ssl.SSLWantReadError:
                if not given:
                    self._begin_slice()
                    raise
                if self._is_late():
                    break
            else:
                self._left -= 1 + (len(data) >> 10)
                return data
        self._left = 0
        self._wait()
        raise ssl.SSLWantReadError

    def _begin_slice(self) -> None:
        """Allow a slice for what arrives next, unless the client is a stranger."""
        self._left = 0 if self._share is None or self._share.stranger else _SLICE
        self._ends = 0.0

    def _is_late(self) -> bool:
        now = perf_counter()
        if not self._ends:
            self._ends = now + _SECONDS
        return now >= self._ends

    def _wait(self) -> None:
        """Read on in the connection's turn."""
        share, cut_off = self._share, self._cut_off
        if share is None or cut_off is None:
            return
        if share.stranger and self._received.pending > FORGOTTEN:
            asyncio.get_running_loop().call_soon(cut_off)
        else:
            share.queue()

    def bind(self, transport: asyncio.Transport, new_share: NewShare, cut_off: CutOff) -> None:
        """Read in the turns of the connection from now on."""
        self._cut_off = cut_off
        self._share = new_share(partial(self._go_on, transport), _SECONDS)
        self._share.queue()

    def _go_on(self, transport: asyncio.Transport) -> None:
        """Make the transport read more; cut it off if it is closing and its client still sends."""
        if transport.is_closing():
            transport.abort()
            return
        self._left = _SLICE
        self._ends = 0.0
        if transport.is_reading():
            # Resuming makes it read; a protocol that has paused it resumes it.
            transport.pause_reading()
            transport.resume_reading()


def slice_tls(transport: asyncio.Transport, new_share: NewShare, cut_off: CutOff) -> None:
    """Bound what a transport with TLS decrypts in an iteration of the loop.

    Args:
        transport: the transport.
        new_share: returns a share of the loop for the connection, for some work and its seconds.
        cut_off: ends the connection at once.
    """
    tls = transport.get_extra_info("ssl_object")
    if isinstance(tls, SlicedTls):
        tls.bind(transport, new_share, cut_off)
