"""A stream of HTTP/2, as `Connection` has it (`tenure.engines.etcd.http2`): a request under way.

It *waits*, where the peer allows no more of them; is *open*; and is *over*, when the peer has ended
it, or either side has reset it, or the connection is over. It is told of its headers, its data and
its end, in this order, at once, out of `Connection.receive`; when it is over it is told nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure.engines.etcd.blocks import Fields
from tenure.engines.etcd.frames import Trouble

if TYPE_CHECKING:
    from tenure.engines.etcd.http2 import Connection

__all__ = ["ROOM", "Stream"]

ROOM = 1 << 24
"""Bytes that the peer may send on a stream before it is told to go on."""


class Stream:
    """A request under way; what is done with it derives from this.

    Attributes:
        number: 0 while it waits.
        pending: what is yet to be sent.
        ends: nothing follows what is pending.
    """

    __slots__ = ("connection", "ends", "head", "number", "pending", "room", "window")

    def __init__(self, head: bytes, pending: bytes = b"", *, ends: bool = False) -> None:
        self.head = head
        self.pending = pending
        self.ends = ends
        self.number = 0
        self.window = 0
        self.room = ROOM
        self.connection: Connection | None = None

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Send more, or that nothing follows, as soon as the peer has room for it."""
        self.pending += data
        self.ends |= ends
        if self.connection is not None:
            self.connection.push(self)

    def reset(self, code: Trouble) -> None:
        """End it, and be told nothing more of it. Safe to call twice."""
        if self.connection is not None:
            self.connection.reset(self, code)

    def heard_headers(self, fields: Fields, ended: bool) -> None:
        """The headers, or, if it is ended, perhaps the trailers."""
        raise NotImplementedError

    def heard_data(self, data: bytes, ended: bool) -> None:
        """A part of the body."""
        raise NotImplementedError

    def lost(self, why: str, *, again: bool) -> None:
        """There will be no answer. `again`: it was surely not acted upon."""
        raise NotImplementedError
