"""Header blocks of HTTP/2: made for requests, and put together and understood when they are heard.

Neither side puts anything into a table (RFC 7541): the peer is told so in the settings, before it
can have said anything. So the bytes of a block mean the same on every connection: what is sent is
made once, and what is heard again is not understood again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from hpack import Decoder
from hpack.exceptions import HPACKError

from tenure.engines.etcd.frames import (
    END_HEADERS,
    PADDED,
    PRIORITY,
    Trouble,
    Violation,
    without_padding,
)

__all__ = ["Blocks", "Fields", "Heard", "head"]

Fields: TypeAlias = Mapping[bytes, bytes]
"""Headers by their names; of one that comes twice, the last."""

Heard: TypeAlias = tuple[int, int, Fields]
"""Of a whole block: the flags of its first frame, its stream, and what it says."""

_LARGEST = 1 << 18
_MOST = 256
"""How many blocks are remembered, with what they say."""

_KNOWN = {":authority": 1, ":path": 4, "content-type": 31, "user-agent": 58}
_NO_TABLE, _POST, _HTTP, _HTTPS = b"\x20", b"\x83", b"\x86", b"\x87"
_NEVER_INDEXED = 0x10


def head(path: str, authority: str, *, secure: bool, more: Iterable[tuple[str, str]]) -> bytes:
    """The block of a POST.

    Args:
        more: further headers, their names in lower case.
    """
    block = _NO_TABLE + _POST + (_HTTPS if secure else _HTTP)
    for name, value in ((":path", path), (":authority", authority), *more):
        known = _KNOWN.get(name, 0)
        block += _integer(known, 4, _NEVER_INDEXED)
        block += _text(value) if known else _text(name) + _text(value)
    return block


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _integer(len(encoded), 7) + encoded


def _integer(number: int, bits: int, prefix: int = 0) -> bytes:
    most = (1 << bits) - 1
    if number < most:
        return bytes((prefix | number,))
    out, number = bytearray((prefix | most,)), number - most
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class Blocks:
    """Those that are heard on one connection.

    Attributes:
        unfinished: only its continuation may follow.
    """

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._decoder.header_table_size = self._decoder.max_allowed_table_size = 0
        self._known: dict[bytes, Fields] = {}
        self._flags = self._number = 0
        self._so_far = bytearray()
        self.unfinished = False

    def begin(self, flags: int, number: int, payload: bytes) -> Heard | None:
        """HEADERS; ``None`` if the block goes on in another frame."""
        if flags & PADDED:
            payload = without_padding(payload)
        if flags & PRIORITY:
            if len(payload) < 5:
                raise Violation(Trouble.FRAME_SIZE_ERROR, "headers are too short")
            payload = payload[5:]
        if flags & END_HEADERS:
            return flags, number, self._known.get(payload) or self._understood(payload)
        self._flags, self._number, self._so_far = flags, number, bytearray(payload)
        self.unfinished = True
        return None

    def go_on(self, flags: int, number: int, payload: bytes) -> Heard | None:
        """CONTINUATION."""
        if not self.unfinished or self._number != number:
            raise Violation(Trouble.PROTOCOL_ERROR, "what is continued is no header block")
        self._so_far += payload
        if len(self._so_far) > _LARGEST:
            raise Violation(Trouble.ENHANCE_YOUR_CALM, "a header block is too large")
        if not flags & END_HEADERS:
            return None
        self.unfinished = False
        return self._flags, number, self._understood(bytes(self._so_far))

    def _understood(self, block: bytes) -> Fields:
        try:
            headers = self._decoder.decode(block, raw=True)
        except (HPACKError, IndexError) as error:
            why = f"a header block means nothing ({error})"
            raise Violation(Trouble.COMPRESSION_ERROR, why) from error
        fields = {bytes(name): bytes(value) for name, value in headers}
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[block] = fields
        return fields
