"""Pauses between attempts."""

from __future__ import annotations

import pytest

from tenure.engines._kit.reconnect import FIRST_PAUSE, LONGEST_PAUSE, backoff


@pytest.mark.parametrize(
    ("failures", "longest", "pause"),
    [
        (0, LONGEST_PAUSE, FIRST_PAUSE),
        (1, LONGEST_PAUSE, 2 * FIRST_PAUSE),
        (2, LONGEST_PAUSE, 4 * FIRST_PAUSE),
        (10, LONGEST_PAUSE, LONGEST_PAUSE),
        (100_000, LONGEST_PAUSE, LONGEST_PAUSE),
        (10, 0.3, 0.3),
        (0, 0.0, FIRST_PAUSE),
        (10, 0.0, FIRST_PAUSE),
    ],
)
def test_pauses_double_up_to_a_limit_and_are_drawn(
    failures: int, longest: float, pause: float
) -> None:
    drawn = {backoff(failures, longest) for _ in range(50)}
    assert pause / 2 <= min(drawn) < max(drawn) <= pause
