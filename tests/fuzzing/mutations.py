"""Random changes to well-formed inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

LARGEST = 1 << 17
"""Bytes of an input, at the most."""

_NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)
_DIGITS = (b"0", b"-1", b"1e999", b"nan", b"9" * 30, b"9" * 5000, b"0.1", b"00")
_TEXTS = (
    b"\0",
    b"\r\n",
    b"\n\n",
    b"%00",
    b"%zz",
    b"../",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xc2\x85",
)


def mutated(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds with a few changes."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 5, 8, 20))):
        chance.choice(_CHANGES)(chance, data, seeds)
    return bytes(data[:LARGEST])


def pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """Return the data in pieces, as a network may deliver it."""
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice((1, 3, 10))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _place(chance: random.Random, data: bytearray) -> tuple[int, int]:
    """A part of the data, short more often than not."""
    start = chance.randrange(len(data) + 1)
    return start, min(len(data), start + int(chance.expovariate(1 / 8)))


def _flip(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _replace(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start, end = _place(chance, data)
    data[start:end] = chance.randbytes(end - start)


def _number(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    size = chance.choice((1, 2, 3, 4, 8))
    number = chance.choice(_NUMBERS) & ((1 << 8 * size) - 1)
    start, _end = _place(chance, data)
    data[start : start + size] = number.to_bytes(size, chance.choice(("big", "little")))


def _remove(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start, end = _place(chance, data)
    del data[start:end]


def _cut(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if chance.random() < 0.3:
        del data[chance.randrange(len(data) + 1) :]


def _insert(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start, _end = _place(chance, data)
    data[start:start] = chance.choice((*_DIGITS, *_TEXTS))


def _digits(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Another number in the place of one that is written out."""
    found = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if found:
        start = end = chance.choice(found)
        while end < len(data) and 0x30 <= data[end] <= 0x39:
            end += 1
        data[start:end] = chance.choice(_DIGITS)


def _repeat(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    start, end = _place(chance, data)
    times = chance.choice((2, 3, 10, 1000))
    data[start:end] = bytes(data[start:end]) * min(times, 1 + LARGEST // (end - start + 1))
    del data[LARGEST:]


def _splice(chance: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = chance.choice(seeds)
    start, end = _place(chance, data)
    first = chance.randrange(len(other) + 1)
    data[start:end] = other[first : chance.randrange(first, len(other) + 1)]


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_flip, _replace, _number, _remove, _cut, _insert, _digits, _repeat, _splice),
)
