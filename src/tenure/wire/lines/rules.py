"""Limits of dflockd's protocol for both sides: the sizes of lines, keys and numbers."""

from __future__ import annotations

import re

LINE_BYTES = 256
"""Maximum bytes of a line before its end, including a carriage return."""

AUTH_BYTES = 64 * 1024
"""Maximum bytes of the third line of an `auth`."""

MOST_SECONDS = 9_223_372_036
"""The longest time, which a dflockd server can count in nanoseconds."""

MOST = 2**63 - 1
"""The greatest number."""

_NOT_IN_KEYS = re.compile(r"[ \t\r\n]")


def is_key(text: str) -> bool:
    """Return true if the text is a valid key: not empty, without white space."""
    return bool(text) and _NOT_IN_KEYS.search(text) is None
