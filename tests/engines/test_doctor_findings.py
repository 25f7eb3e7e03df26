"""Findings of `tenure doctor` that are common to networked stores."""

from __future__ import annotations

import pytest

from tenure.engines._kit import doctor


@pytest.mark.parametrize(("ahead", "where"), [(-100.0, "behind"), (100.0, "ahead of")])
def test_a_clock_that_is_far_off_is_a_warning(ahead: float, where: str) -> None:
    found = doctor.clock(ahead)
    assert found.level == "warning"
    assert found.found == f"100 s {where} this machine's"
    assert found.remedy


@pytest.mark.parametrize("ahead", [-0.5, 0.5])
def test_a_clock_that_is_nearly_right_is_sound(ahead: float) -> None:
    assert doctor.clock(ahead).level == "ok"
    assert doctor.clock(ahead).found == "within 500 ms of this machine's"


def test_slow_round_trips_are_a_warning() -> None:
    assert doctor.round_trip([0.001, 0.2, 0.3]).level == "warning"


def test_a_single_slow_round_trip_is_shown_and_no_warning() -> None:
    found = doctor.round_trip([0.001, 0.001, 0.3])
    assert found.level == "ok"
    assert found.found == "1.00 ms (median of 3, at worst 300.00 ms)"


def test_a_quarantine_is_a_failure_until_its_end() -> None:
    found = doctor.quarantine(12.3, "data may be lost")
    assert (found.level, found.remedy) == ("failure", "wait")
    assert found.found == "nothing is granted for another 12 s: data may be lost"
    assert doctor.quarantine(0.0, "data may be lost").level == "ok"
