"""Durations are seconds or timedeltas, zero or more, and finite."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from tenure.durations import seconds, timeout_seconds
from tenure.errors import InvalidArgument


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0.0), (1.5, 1.5), (3, 3.0), (timedelta(minutes=2), 120.0), (timedelta(0), 0.0)],
)
def test_seconds_and_timedeltas_are_durations(value: float | timedelta, expected: float) -> None:
    result = seconds(value, "a window")
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize("value", [-1, -0.001, math.inf, math.nan, timedelta(seconds=-1), 10**400])
def test_what_is_negative_or_not_finite_is_none(value: float | timedelta) -> None:
    with pytest.raises(InvalidArgument, match="a window is zero or more seconds, not"):
        seconds(value, "a window")


@pytest.mark.parametrize("value", ["5", None, True, 1j, b"1"])
def test_what_is_no_number_is_none(value: object) -> None:
    with pytest.raises(InvalidArgument, match="a window is seconds or a timedelta, not"):
        seconds(value, "a window")  # type: ignore[arg-type]


def test_a_timeout_may_be_none() -> None:
    assert timeout_seconds(None) is None
    assert timeout_seconds(timedelta(seconds=2)) == 2.0
    text = r"^a timeout is zero or more seconds, not -1; None, the default, waits for ever$"
    with pytest.raises(InvalidArgument, match=text):
        timeout_seconds(-1)
