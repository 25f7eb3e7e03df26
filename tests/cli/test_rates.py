"""`tenure rate`: tokens are taken, seen, and waited for."""

from __future__ import annotations

import pytest

from tests.cli.programs import Tenure

RATE = ("api", "--limit", "10", "--per", "1h")


def test_tokens_are_taken_until_none_is_free(tenure: Tenure) -> None:
    assert tenure.inside("rate", "take", *RATE).returncode == 0
    assert tenure.json("rate", "peek", *RATE) == {
        "node": "/default",
        "name": "api",
        "free": 9,
        "wait": 0,
        "limit": 10,
        "per": 3600,
        "burst": 10,
    }
    assert tenure.inside("rate", "peek", *RATE).stdout == "api: 9 of 10 free, 1 now\n"
    assert tenure.inside("rate", "take", *RATE, "--count", "9").returncode == 0
    assert tenure.inside("rate", "peek", *RATE).stdout.startswith("api: 0 of 10 free, 1 in ")


@pytest.mark.parametrize(("wait", "code"), [("0", 75), ("2.5", 76)])
def test_a_take_that_would_wait_too_long_fails_at_once(
    tenure: Tenure, wait: str, code: int
) -> None:
    tenure.inside("rate", "take", *RATE, "--count", "10")
    done = tenure.inside("rate", "take", *RATE, "--wait", wait)
    assert done.returncode == code
    assert f"rate 'api' on /default: 1 of 10 per 3600 s not granted within {wait} s" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_take_waits_until_it_is_granted(tenure: Tenure) -> None:
    short = ("api", "--limit", "1", "--per", "0.3")
    for _ in range(2):
        assert tenure.inside("rate", "take", *short, "--wait", "5").returncode == 0


def test_other_values_are_refused_until_the_rate_is_resized(tenure: Tenure) -> None:
    tenure.inside("rate", "take", *RATE, "--count", "10")
    larger = ("api", "--limit", "20", "--per", "1h", "--burst", "20")
    done = tenure.inside("rate", "take", *larger)
    assert done.returncode == 78
    assert "is 10 per 3600 s, and is used here as 20 per 3600 s" in done.stderr
    assert tenure.inside("rate", "resize", *larger).returncode == 0
    assert tenure.inside("rate", "take", *larger, "--count", "10").returncode == 0


def test_wrong_use_is_explained(tenure: Tenure) -> None:
    assert tenure.inside("rate", "peek", *RATE).returncode == 74  # nothing is made
    assert tenure.inside("rate", "take", "api", "--limit", "10").returncode == 78
    assert tenure.inside("rate", "take", *RATE, "--count", "11").returncode == 78
    assert tenure.inside("rate", "take", *RATE, "--burst", "3").returncode == 78
    assert tenure.inside("rate", "take", *RATE, "--node", "/missing").returncode == 73
