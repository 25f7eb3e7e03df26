"""Defects for fences: what has one must fail the checks, or these show nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tenure.fencing import Fence, redis, sql
from tenure.fencing.tokens import Token, stale, token_of

Plant = Callable[[pytest.MonkeyPatch], None]


def _local(*, remembers: bool = True, refuses: Callable[[int, int], bool] = int.__lt__) -> Plant:
    @contextmanager
    def writing(self: Fence, token: Token) -> Iterator[None]:
        number = token_of(token)
        if self._newest is not None and refuses(number, self._newest):
            raise stale(self.resource, number, self._newest)
        if remembers or self._newest is None:
            self._newest = number
        yield

    return lambda patch: patch.setattr(Fence, "writing", writing)


def _replaced(module: object, name: str, old: str, new: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        text = getattr(module, name)
        assert old in text
        patch.setattr(module, name, text.replace(old, new))

    return plant


PLANTS: dict[str, dict[str, Plant]] = {
    "local": {
        "forgets": _local(remembers=False),
        "goes back": _local(refuses=lambda token, newest: False),
        "refuses its own": _local(refuses=int.__le__),
    },
    "sql": {
        "forgets": _replaced(sql, "_ADVANCE", "SET token = ?,", "SET token = token + 0 * ?,"),
        "goes back": _replaced(sql, "_ADVANCE", "AND token <= ?", "AND ? >= 0"),
        "refuses its own": _replaced(sql, "_ADVANCE", "token <= ?", "token < ?"),
    },
    "redis": {
        "forgets": _replaced(redis, "_GUARD", "'SET', fence, token", "'SETNX', fence, token"),
        "goes back": _replaced(redis, "_GUARD", "if newest and", "if false and"),
        "refuses its own": _replaced(redis, "_GUARD", "(token) <", "(token) <="),
        "compares text": _replaced(
            redis, "_GUARD", "tonumber(token) < tonumber(newest)", "token < newest"
        ),
    },
}
"""By the kind of fence, and what is wrong with it."""
