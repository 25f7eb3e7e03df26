"""dflockd's line protocol, for both ends: encoding and decoding of requests and replies.

A request is three lines (command, key, argument), a reply is one, and replies come in the order of
the requests. A line has at most 256 bytes before its end, the token of an `auth` 64 KiB; nothing
can be read after a longer line. Rules:

* An invalid request raises nothing on the server: the reply is `error`. Invalid arguments on the
  client raise `InvalidArgument`; an invalid reply raises `BadReply`.
* A reader buffers at most one incomplete request or reply.
* Each operation of a client has a function, which returns the bytes to send.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from tenure.errors import EngineError, InvalidArgument

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


RawRequest: TypeAlias = tuple[str, str, str]
"""A request: command, key, argument. A key may be any bytes; bytes that are not UTF-8 are lone
surrogates, by the error handler ``surrogateescape``."""

_NUMBER = re.compile(r"[+-]?[0-9]+")
_NO_SPACE = re.compile(r"[\x1c-\x1f]")  # Python splits lines at these, and the protocol does not


class RequestReader:
    """Splitter of a client's data, in chunks of any size, into requests.

    Attributes:
        failed: whether a line was too long. After the requests returned so far, answer `error` and
            close: nothing more is read.
        between: whether no incomplete request is buffered.
    """

    __slots__ = ("_beginning", "_overlong", "_rest", "between", "failed")

    def __init__(self) -> None:
        self._beginning: list[bytes] = []  # the lines of a request that is not whole
        self._rest = b""  # of a line that is not whole
        self._overlong = False  # that line is too long; it is not kept
        self.failed = False
        self.between = True

    @property
    def lines(self) -> int:
        """Complete lines of an incomplete request: 0, 1 or 2."""
        return len(self._beginning)

    @property
    def kept(self) -> int:
        """Bytes of an incomplete request, without the ends of its lines."""
        return sum(map(len, self._beginning)) + len(self._rest)

    def alone(self, data: bytes) -> RawRequest | None:
        """Return the request if this chunk is exactly one, as usual; ``None`` if it must be fed."""
        if not self.between or len(data) > LINE_BYTES:
            return None
        text = data.decode("utf-8", "surrogateescape")
        try:
            command, key, argument, rest = text.split("\n")
        except ValueError:  # it has other line ends
            return None
        return None if rest or "\r" in text else (command, key, argument)

    def feed(self, data: bytes) -> list[RawRequest]:
        """Return the requests that this chunk completes, in order."""
        found = self._cut(data)
        self.between = not (self._beginning or self._rest or self._overlong or self.failed)
        return found

    def _cut(self, data: bytes) -> list[RawRequest]:
        found: list[RawRequest] = []
        if self.failed:
            return found
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = b""
        for line in lines:
            if self._overlong or len(line) > self._most():
                self.failed = True
                self._beginning.clear()
                return found
            self._beginning.append(line)
            if len(self._beginning) == 3:
                found.append(_as_text(self._beginning))
                self._beginning.clear()
        if self._overlong or len(rest) > self._most():
            self._overlong = True  # its end is awaited; its content is dropped
        else:
            self._rest = rest
        return found

    def _most(self) -> int:
        lines = self._beginning
        is_token = len(lines) == 2 and lines[0].rstrip(b"\r") == b"auth"
        return AUTH_BYTES if is_token else LINE_BYTES


def _as_text(lines: list[bytes]) -> RawRequest:
    command, key, argument = (
        line.rstrip(b"\r").decode("utf-8", "surrogateescape") for line in lines
    )
    return command, key, argument


def acquire_terms(argument: str, *, counted: bool) -> tuple[int, int, int | None] | None:
    """Decode an `l`, or if `counted` an `sl`: timeout, limit, and optionally lease, in seconds."""
    numbers = _numbers(argument)
    if numbers is None or not 1 + counted <= len(numbers) <= 2 + counted:
        return None
    timeout = numbers[0]
    limit = numbers[1] if counted else 1
    lease = numbers[1 + counted] if len(numbers) == 2 + counted else None
    if not _is_timeout(timeout) or limit < 1 or not _is_lease(lease):
        return None
    return timeout, limit, lease


def enqueue_terms(argument: str, *, counted: bool) -> tuple[int, int | None] | None:
    """Decode an `e`, or if `counted` an `se`: limit, and optionally lease, in seconds."""
    numbers = _numbers(argument)
    if numbers is None or not counted <= len(numbers) <= 1 + counted:
        return None
    limit = numbers[0] if counted else 1
    lease = numbers[counted] if len(numbers) == 1 + counted else None
    if limit < 1 or not _is_lease(lease):
        return None
    return limit, lease


def wait_terms(argument: str) -> int | None:
    """Decode a `w` or an `sw`: timeout, in seconds."""
    numbers = _numbers(argument)
    if numbers is None or len(numbers) != 1 or not _is_timeout(numbers[0]):
        return None
    return numbers[0]


def renew_terms(argument: str) -> tuple[str, int | None] | None:
    """Decode an `n` or an `sn`: token, and optionally lease, in seconds."""
    token, *more = argument.split() or [""]
    if not token or len(more) > 1:
        return None
    if not more:
        return token, None
    numbers = _numbers(more[0])
    if numbers is None or not _is_lease(numbers[0]):
        return None
    return token, numbers[0]


def _numbers(argument: str) -> list[int] | None:
    """Return the numbers in an argument; ``None`` if it contains anything else."""
    if _NO_SPACE.search(argument):
        return None
    numbers = []
    for field in argument.split():
        if not _NUMBER.fullmatch(field):
            return None
        number = int(field)
        if not -MOST - 1 <= number <= MOST:
            return None
        numbers.append(number)
    return numbers


def _is_timeout(timeout: int) -> bool:
    return 0 <= timeout <= MOST_SECONDS


def _is_lease(lease: int | None) -> bool:
    return lease is None or 1 <= lease <= MOST_SECONDS


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
