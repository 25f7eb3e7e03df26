"""Quarantine of a store, as far as a program knows it."""

from __future__ import annotations

import logging

import pytest

from tenure.clock import SystemClock
from tenure.engines._kit.quarantine import Quarantine


class Time(SystemClock):
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


def test_nothing_is_granted_until_it_ends() -> None:
    clock = Time()
    quarantine = Quarantine("store://", clock)
    assert quarantine.trouble() is None
    quarantine.update(30.0, "data were lost")
    trouble = str(quarantine.trouble())
    assert trouble.startswith("store:// grants nothing for another 30.0 s (until ")
    assert trouble.endswith("): data were lost")
    clock.at += 29.0
    assert quarantine.left == pytest.approx(1.0)
    clock.at += 1.0
    assert quarantine.trouble() is None


def test_its_reason_stays_until_there_is_another_one() -> None:
    quarantine = Quarantine("store://", Time())
    quarantine.update(10.0, "data were lost")
    quarantine.prolong(20.0)
    assert "data were lost" in str(quarantine)
    quarantine.update(20.0, "a standby was promoted")
    assert "a standby was promoted" in str(quarantine)


def test_it_is_prolonged_and_never_shortened_by_an_estimate() -> None:
    quarantine = Quarantine("store://", Time())
    quarantine.update(10.0, "data were lost")
    quarantine.prolong(5.0)
    assert quarantine.left == pytest.approx(10.0)
    quarantine.prolong(15.0)
    assert quarantine.left == pytest.approx(15.0)


def test_a_grant_ends_it() -> None:
    clock = Time()
    quarantine = Quarantine("store://", clock)
    quarantine.update(10.0, "data were lost")
    quarantine.end()
    assert quarantine.trouble() is None
    clock.at += 1.0
    quarantine.end()
    assert quarantine.left == pytest.approx(-1.0)  # it has not begun again


def test_one_warning_is_logged_and_another_one_if_it_is_prolonged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Time()
    quarantine = Quarantine("store://", clock)
    with caplog.at_level(logging.WARNING, "tenure"):
        quarantine.update(10.0, "data were lost")
        for _ in range(5):
            clock.at += 1.0
            quarantine.update(quarantine.left + 0.1, "")  # the answers are late
        assert len(caplog.records) == 1
        quarantine.update(20.0, "")
    assert len(caplog.records) == 2
    assert caplog.messages[0].startswith(
        "quarantine: url=store:// reason=store:// grants nothing for another 10.0 s"
    )
