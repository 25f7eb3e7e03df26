"""Requests of a client: one function for each operation.

Each returns the bytes to send, or raises `InvalidArgument`.
"""

from __future__ import annotations

from tenure.errors import InvalidArgument
from tenure.wire.lines.rules import AUTH_BYTES, LINE_BYTES, MOST, MOST_SECONDS, is_key

PING = b"ping\n_\n_\n"
"""Answered ``ok``; by a server before 2.0, ``error``."""

STATS = b"stats\n_\n_\n"
"""Answered ``ok`` and the server's state in JSON."""


def acquire(key: str, timeout: int, lease: int | None = None, *, limit: int | None = None) -> bytes:
    """Request a lock, or with a limit one of so many, and wait for it.

    Answered ``ok`` with token and lease, ``timeout``, or an error.
    """
    terms = _line(seconds("timeout", timeout, least=0), _limit(limit), _lease(lease))
    return _request("l", "sl", limit is not None, key, terms)


def enqueue(key: str, lease: int | None = None, *, limit: int | None = None) -> bytes:
    """Join the queue. Answered ``acquired`` with token and lease, ``queued``, or an error."""
    return _request("e", "se", limit is not None, key, _line(_limit(limit), _lease(lease)))


def wait(key: str, timeout: int, *, counted: bool = False) -> bytes:
    """Wait in the queue that this connection has joined. Answered like `acquire`."""
    return _request("w", "sw", counted, key, str(seconds("timeout", timeout, least=0)))


def renew(key: str, token: str, lease: int | None = None, *, counted: bool = False) -> bytes:
    """Renew the lock. Answered ``ok`` with the lease, or ``error``."""
    return _request("n", "sn", counted, key, _line(check_token(token), _lease(lease)))


def release(key: str, token: str, *, counted: bool = False) -> bytes:
    """Release the lock. Answered ``ok``, or ``error``."""
    return _request("r", "sr", counted, key, check_token(token))


def auth(token: str) -> bytes:
    """Authenticate; the first request if the server requires it. Answered ``ok``.

    Raises:
        InvalidArgument: the token cannot be sent.
    """
    if "\n" in token or "\r" in token:
        raise InvalidArgument("a token for a dflockd server is one line")
    line = token.encode()
    if len(line) > AUTH_BYTES:
        raise InvalidArgument(f"a token for a dflockd server has at most {AUTH_BYTES} bytes")
    return b"auth\n_\n" + line + b"\n"


def check_key(key: str) -> bytes:
    """Return the line of a key.

    Raises:
        InvalidArgument: a dflockd server would reject it.
    """
    if not is_key(key):
        raise InvalidArgument(
            f"the key of a lock on a dflockd server is not empty and has no white space: {key!r}",
            name=key,
        )
    try:
        line = key.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a key is valid text, not {key!r}", name=key) from error
    if len(line) > LINE_BYTES:
        raise InvalidArgument(
            f"the key of a lock on a dflockd server has at most {LINE_BYTES} bytes, this one "
            f"{len(line)}: {key[:40]!r}...",
            name=key,
        )
    return line


def check_limit(limit: int) -> int:
    """Return a semaphore's limit. Raises `InvalidArgument`."""
    if not 1 <= limit <= MOST:
        raise InvalidArgument(f"a limit on a dflockd server is from 1 to 2^63-1, not {limit}")
    return limit


def check_token(token: str) -> str:
    """Return a token, after checking its form. Raises `InvalidArgument`."""
    if not token or not token.isascii() or not token.isalnum() or len(token) > LINE_BYTES // 2:
        raise InvalidArgument(f"{token[:40]!r} is not a token of a dflockd server")
    return token


def seconds(what: str, number: int, *, least: int) -> int:
    """Return a time in whole seconds, as the protocol requires. Raises `InvalidArgument`."""
    if not least <= number <= MOST_SECONDS:
        raise InvalidArgument(
            f"a {what} on a dflockd server is from {least} to {MOST_SECONDS} whole seconds, "
            f"not {number}"
        )
    return number


def _lease(lease: int | None) -> int | None:
    return None if lease is None else seconds("lease", lease, least=1)


def _limit(limit: int | None) -> int | None:
    return None if limit is None else check_limit(limit)


def _line(*fields: int | str | None) -> str:
    return " ".join(str(field) for field in fields if field is not None)


def _request(single: str, many: str, counted: bool, key: str, argument: str) -> bytes:
    return b"%b\n%b\n%b\n" % (
        (many if counted else single).encode(),
        check_key(key),
        argument.encode(),
    )
