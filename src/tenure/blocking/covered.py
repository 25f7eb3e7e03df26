"""Functions whose ``try`` covers all their instructions.

Python checks for signals when a function begins, before the first instruction of its first
``try``. An exception that a signal handler raises then passes by every handler of the function. So
a release that has been called would not have begun, and a `finally` of the program that calls it
would leave the lock held. The value that a function returns has left its ``try``, too.

`covered` extends the ``try`` over the whole function, in the exception table of its code. No other
means of Python does so in a plain function. Python 3.11 does not
apply that to a signal at the beginning of a function while a trace function is set, as by a
debugger.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def covered(function: F) -> F:
    """Extend the ``try`` of a function over its first and its last instruction.

    The function's body is one ``try`` with handlers, without blocks inside the ``try``. A handler
    uses parameters alone: no other variable may be set yet.
    """
    return _extended(function, first=True)


def covered_to_the_end(function: F) -> F:
    """Extend the ``try`` at the end of a function over its last instruction."""
    return _extended(function, first=False)


def _extended(function: F, *, first: bool) -> F:
    assert isinstance(function, FunctionType)
    code = function.__code__
    entries = list(_entries(getattr(code, "co_exceptiontable", b"")))
    handler = entries[0][2] if entries else 0
    body = [entry for entry in entries if entry[0] < handler]
    if body and {entry[2:] for entry in body} == {(handler, 0)}:  # as CPython lays it out
        start = 0 if first else body[0][0]
        table = [(start, handler - start, handler, 0), *entries[len(body) :]]
        function.__code__ = code.replace(co_exceptiontable=b"".join(map(_encoded, table)))
    return function


def _entries(table: bytes) -> list[tuple[int, int, int, int]]:
    """Return the start, length, handler and stack of each entry, which has four numbers.

    A number has six bits in a byte, the highest first; the bit 64 says that more follow. The bit
    128 begins an entry.
    """
    numbers: list[int] = []
    value = 0
    for byte in table:
        value = value << 6 | byte & 63
        if not byte & 64:
            numbers.append(value)
            value = 0
    return list(zip(*[iter(numbers)] * 4, strict=True))


def _encoded(entry: tuple[int, int, int, int]) -> bytes:
    coded = bytearray()
    for number in entry:
        sixes = [number & 63]
        while number := number >> 6:
            sixes.append(number & 63 | 64)
        coded += bytes(reversed(sixes))
    coded[0] |= 128
    return bytes(coded)
