"""Arguments of a program's calls, checked and converted for the wire.

What could not be put into a message is refused here, with the error that every engine has for it;
everything else is the server's to judge. A message has plain values, whatever they derive from.
"""

from __future__ import annotations

from tenure.core import rules
from tenure.errors import InvalidArgument
from tenure.model import EPHEMERAL_LIMIT

__all__ = ["plain_count", "plain_data", "plain_name", "plain_path", "plain_timeout"]

_SMALLEST = -(2**63)


def plain_name(name: str, node: str) -> str:
    """A semaphore's name."""
    rules.check_name(name, node)
    return name if type(name) is str else str.__str__(name)


def plain_path(path: str) -> str:
    """A node's path."""
    rules.check_path(path)
    return path if type(path) is str else str.__str__(path)


def plain_data(data: bytes, node: str, name: str | None = None) -> bytes:
    """A semaphore's data, or a request's."""
    if type(data) is bytes and len(data) <= rules.DATA_BYTES:
        return data
    rules.check_data(data, node, name)
    return bytes(data)


def plain_timeout(timeout: float | None, node: str, name: str | None = None) -> float | None:
    """Return the seconds to wait."""
    if timeout is None:
        return None
    rules.check_timeout(timeout, node, name)
    return float(timeout)


def plain_count(count: int, what: str, node: str, name: str | None = None) -> int:
    """A count or a limit; whether it is too much or too little the server knows."""
    if type(count) is int and 0 <= count <= EPHEMERAL_LIMIT:
        return count
    if not isinstance(count, int) or not _SMALLEST <= count <= EPHEMERAL_LIMIT:
        raise InvalidArgument(
            f"a {what} is a whole number from 1 to 2^64-1, not {count!r}", node=node, name=name
        )
    return int(count)
