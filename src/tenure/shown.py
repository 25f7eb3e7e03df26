"""Values of a store as people and scripts read them, in the command line and in the console.

* Other programs may have written control sequences, which move a cursor, overwrite lines or reverse
  the direction of text. So text for people is always escaped (`safe`).
* In JSON, a thing has the same field names everywhere: those of ``tenure describe --json``. Null
  means unknown.
"""

from __future__ import annotations

import base64
import dataclasses
import unicodedata
from typing import Any

from tenure.core.rules import EXACT
from tenure.model import (
    EPHEMERAL_LIMIT,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

DATA_WIDTH = 60


def safe(text: str) -> str:
    """Text in which all characters that are not plainly visible are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in named:
        return named[character]
    code = ord(character)
    if unicodedata.category(character) == "Cs":  # an undecodable byte, as a surrogate escape
        return f"\\x{code & 0xFF:02x}"
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def shown_data(data: bytes, width: int = DATA_WIDTH) -> str:
    """Return data as text if possible, shortened to the width."""
    text = safe(data[: 4 * width].decode("utf-8", errors="surrogateescape"))
    if len(text) <= width and len(data) <= 4 * width:
        return text
    return f"{text[:width]}… ({len(data):,} bytes)"


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units; empty when unknown."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def kind(each: SemaphoreDescription) -> str:
    """Return the kind of primitive that uses the semaphore, as far as it can be inferred."""
    if not each.ephemeral:
        if each.limit > 1:
            return "semaphore"
        if not each.data:  # the data of an election is its leader's
            return "election?"
        return "semaphore" if each.held or each.waiting else "config"
    # A store that does not list requests still reports how much is held.
    whole = each.held in {0, EPHEMERAL_LIMIT} or any(
        request.count == EPHEMERAL_LIMIT for request in (*each.owners, *each.waiters)
    )
    return "mutex" if whole else "registry"


# For scripts


def data_json(data: bytes, longest: int | None = None) -> dict[str, Any]:
    """Return data for JSON: as text where it is valid UTF-8, else as base64.

    Args:
        data: the data.
        longest: number of bytes after which the data is cut; then ``data_bytes`` is its length.
    """
    kept = data if longest is None else data[:longest]
    length = {} if longest is None else {"data_bytes": len(data)}
    try:
        return {"data": kept.decode(), "data_base64": None, **length}
    except UnicodeDecodeError:
        return {"data": None, "data_base64": base64.b64encode(kept).decode(), **length}


def request_json(each: RequestDescription, longest: int | None = None) -> dict[str, Any]:
    """Return a request in JSON; a null count means all tokens.

    Args:
        each: the request.
        longest: as for `data_json`.
    """
    return {
        "order_id": each.order_id,
        "count": _number(each.count),
        **data_json(each.data, longest),
        "since": each.since,
        "timeout": each.timeout,
        "remaining": each.remaining,
        "session_id": each.session_id,
        "session_description": each.session_description,
        "pid": each.pid,
        "host": each.host,
        "program": each.program,
    }


def semaphore_json(
    each: SemaphoreDescription, kind: str, longest: int | None = None
) -> dict[str, Any]:
    """Return a semaphore in JSON without its requests; a null limit means no limit.

    Args:
        each: the semaphore.
        kind: the name of its kind.
        longest: as for `data_json`.
    """
    return {
        "name": each.name,
        "kind": kind,
        "limit": _number(each.limit),
        "held": _number(each.held),
        "waiting": each.waiting,
        "ephemeral": each.ephemeral,
        **data_json(each.data, longest),
    }


def _number(value: int) -> int | None:
    """Return a count or limit; ``None`` (null) if JSON readers cannot represent it."""
    return None if value > EXACT else value


def session_json(each: SessionDescription) -> dict[str, Any]:
    """Return a session in JSON."""
    return dataclasses.asdict(each)


def node_json(each: NodeDescription, semaphores: object) -> dict[str, Any]:
    """Return a node in JSON.

    Args:
        each: the node.
        semaphores: their number, or the semaphores themselves.
    """
    return {"path": each.path, "sessions": each.sessions, "semaphores": semaphores}
