"""Names of keys: bytes on the wire, text in the store.

A key is any bytes without white space. In the server it is a `str` in which a byte that is not
UTF-8 is a lone surrogate, by the error handler ``surrogateescape``. A name in the store is text:

* A key that is UTF-8 is its own name.
* Any other key is ``bytes`` and a space, then the key with each byte that is not UTF-8 as ``%E9``,
  and ``%`` as ``%25``. No key contains a space, so no other key has this name.

Each key has one name, and each name at most one key. The longest name has 774 bytes.
"""

from __future__ import annotations

import re

from tenure.wire.lines.rules import LINE_BYTES, is_key

_MARK = "bytes "
_TO_ESCAPE = re.compile("[%\udc80-\udcff]")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")


def stored_name(key: str) -> str:
    """Return the name of a key in the store."""
    if key.isascii() or _is_text(key):
        return key
    return _MARK + _TO_ESCAPE.sub(lambda each: f"%{ord(each[0]) & 0xFF:02X}", key)


def key_of(name: str) -> str | None:
    """Return the key of a name in the store; ``None`` if no key has it."""
    key = name
    if name.startswith(_MARK):
        escaped = name[len(_MARK) :].encode()
        raw = _ESCAPED.sub(lambda each: bytes([int(each[1], 16)]), escaped)
        key = raw.decode("utf-8", "surrogateescape")
        if stored_name(key) != name:
            return None
    fits = len(key.encode("utf-8", "surrogateescape")) <= LINE_BYTES
    return key if fits and is_key(key) else None


def readable(key: str) -> str:
    """Return a key as text for people, with a replacement character for invalid bytes."""
    return key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
