"""Requests as a server decodes them."""

from __future__ import annotations

import re
from typing import TypeAlias

from tenure.wire.lines.rules import AUTH_BYTES, LINE_BYTES, MOST, MOST_SECONDS

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
