"""Replies of a server, and their decoding."""

from __future__ import annotations

import re
from typing import NamedTuple

from tenure.errors import EngineError
from tenure.wire.lines.rules import MOST_SECONDS

OK = b"ok\n"
QUEUED = b"queued\n"
TIMEOUT = b"timeout\n"
ERROR = b"error\n"
ERROR_ALREADY_ENQUEUED = b"error_already_enqueued\n"
ERROR_AUTH = b"error_auth\n"
ERROR_DRAINING = b"error_draining\n"
ERROR_LEASE_EXPIRED = b"error_lease_expired\n"
ERROR_LIMIT_MISMATCH = b"error_limit_mismatch\n"
ERROR_MAX_LOCKS = b"error_max_locks\n"
ERROR_MAX_WAITERS = b"error_max_waiters\n"
ERROR_NOT_ENQUEUED = b"error_not_enqueued\n"

_TOKEN = re.compile(r"[0-9a-f]{32}")


_DIGITS = 19  # maximum digits of a lease: Python rejects thousands of them


def grant(word: str, token: str, lease: int) -> bytes:
    """Return the reply for a granted lock: ``ok`` to a lock, ``acquired`` to an enqueue."""
    return f"{word} {token} {lease}\n".encode()


def make_token(fence: int, salt: str) -> str:
    """Return a token: the fencing token, then 16 random hex digits."""
    return fence.to_bytes(8, "big").hex() + salt


def fence_of(token: str) -> int | None:
    """Return the fencing token in a token; ``None`` if the server has none there.

    Before version 2.0, tokens had the same form but were random.
    """
    return int(token[:16], 16) if _TOKEN.fullmatch(token) else None


class BadReply(EngineError):
    """Invalid reply of a server: the connection is unusable."""


class Reply(NamedTuple):
    """A server's reply.

    Attributes:
        status: its first word: ``ok``, ``acquired``, ``queued``, ``timeout``, or an ``error…``.
        token: the token of the granted lock, else empty.
        lease: the lease in seconds, if the reply contains it.
        body: the text after ``ok `` in the answer to `STATS`, else empty.
    """

    status: str
    token: str = ""
    lease: int | None = None
    body: str = ""


class ReplyReader:
    """Splitter of a server's data, in chunks of any size, into lines without their ends.

    Args:
        largest: maximum bytes of a reply; the reply to `STATS` grows with the number of locks.
    """

    __slots__ = ("_largest", "_rest")

    def __init__(self, largest: int = 16 * 1024 * 1024) -> None:
        """Start without bytes; a line has at most `largest`."""
        self._largest = largest
        self._rest: list[bytes] = []  # chunks of an incomplete line

    @property
    def kept(self) -> int:
        """Number of buffered bytes of an incomplete reply."""
        return sum(map(len, self._rest))

    def feed(self, data: bytes) -> list[str]:
        """Return the replies that this chunk completes, in order.

        Raises:
            BadReply: a reply is too long, or not text; those before it in this chunk are lost.
        """
        *lines, rest = data.split(b"\n")
        if self._rest and lines:
            lines[0] = b"".join(self._rest) + lines[0]
            self._rest.clear()
        if rest:
            self._rest.append(rest)
        longest = max(map(len, lines), default=0)
        if longest > self._largest or self.kept > self._largest:
            raise BadReply(f"the server's reply is longer than {self._largest} bytes")
        try:
            return [line.rstrip(b"\r").decode() for line in lines]
        except UnicodeDecodeError as error:
            raise BadReply("the server's reply is not text: is it a dflockd server?") from error


def read_reply(line: str) -> Reply:
    """Decode a reply.

    Raises:
        BadReply: it is not a reply of the protocol.
    """
    status, _, rest = line.partition(" ")
    if not rest:
        if not re.fullmatch("[a-z_]+", status):
            raise _bad_reply(line)
        return Reply(status)
    if status == "ok" and rest.startswith("{"):
        return Reply(status, body=rest)
    *token, lease = rest.split() or [""]
    if status not in {"ok", "acquired"} or len(token) > 1 or not lease.isascii():
        raise _bad_reply(line)
    is_number = lease.isdecimal() and len(lease) <= _DIGITS
    if not is_number or int(lease) > MOST_SECONDS or (token and int(lease) == 0):
        raise _bad_reply(line)
    if status == "acquired" and not token:
        raise _bad_reply(line)
    return Reply(status, token[0] if token else "", int(lease))


def _bad_reply(line: str) -> BadReply:
    return BadReply(f"the server replied {line[:80]!r}: is it a dflockd server?")
