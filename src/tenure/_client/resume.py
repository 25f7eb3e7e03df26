"""Resume tokens, with which a restarted program takes over its own session.

A token is printable text without spaces. It contains the session's protection key, and any program
that has it can take over the session, so keep it like a password. The format is internal to
tenure::

    tenure1.<base64 of: session id, recovery window, key, node, checksum of all that>
"""

from __future__ import annotations

import binascii
import os
import struct
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import NamedTuple

from tenure.core import rules
from tenure.errors import InvalidArgument

_PREFIX = "tenure1."
_FIXED = struct.Struct(f">Qd{rules.ATTACH_KEY_BYTES}s")
_CHECKSUM = struct.Struct(">I")
_SESSION_IDS = 1 << 63


def new_key() -> bytes:
    """Return a protection key that cannot be guessed."""
    return os.urandom(rules.ATTACH_KEY_BYTES)  # as `secrets` does, whose import takes long


class ResumeToken(NamedTuple):
    """Contents of a resume token."""

    node: str
    session_id: int
    recovery_window: float
    key: bytes

    def __str__(self) -> str:
        content = _FIXED.pack(self.session_id, self.recovery_window, self.key) + self.node.encode()
        content += _CHECKSUM.pack(zlib.crc32(content))
        return _PREFIX + urlsafe_b64encode(content).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> ResumeToken:
        """Read a token.

        Raises:
            InvalidArgument: the text is not a complete resume token.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"a resume token is a str, not {type(text).__name__}")
        try:
            if not text.startswith(_PREFIX):
                raise ValueError("another beginning")
            body = text[len(_PREFIX) :]
            read = urlsafe_b64decode(body + "=" * (-len(body) % 4))
            content, checksum = read[: -_CHECKSUM.size], read[-_CHECKSUM.size :]
            if _CHECKSUM.unpack(checksum) != (zlib.crc32(content),):
                raise ValueError("another checksum")
            session_id, window, key = _FIXED.unpack(content[: _FIXED.size])
            node = content[_FIXED.size :].decode()
            rules.check_path(node)
            rules.check_window(window)
            if not 0 < session_id < _SESSION_IDS:
                raise ValueError("no store numbers a session so")
        except (ValueError, binascii.Error, struct.error):
            raise InvalidArgument(
                "this is no resume token, or not the whole of one: take it from "
                "session.resume_token as it is"
            ) from None
        return cls(node, session_id, window, key)
