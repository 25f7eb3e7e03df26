"""Commands during an outage: bounded, with the store named, and never taken for contention."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tenure.cli.mistakes import Status
from tests.cli.programs import LISTENER, Tenure, eventually
from tests.engines.outages import NETWORKED, Afar

BOUND = 20.0
"""Seconds for a command; generous for a busy machine, and below the recovery window of 30."""


@pytest.fixture
def afar() -> Iterator[Afar]:
    with NETWORKED["native"]() as found:
        yield found


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--lock", "nightly", "--timeout", "0", "--", "true"],
        ["run", "--lock", "nightly", "--timeout", "2", "--", "true"],
        ["ls"],
        ["describe", "nightly"],
        ["node", "create", "/jobs"],
        ["evict", "nightly", "7"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("how", ["refused", pytest.param("stalled", marks=pytest.mark.exhaustive)])
def test_a_command_says_that_the_store_is_out_of_reach(
    tenure: Tenure, afar: Afar, how: str, command: list[str]
) -> None:
    if how == "refused":
        afar.network.refuse()
    else:
        afar.network.stall()
    began = time.monotonic()
    done = tenure(*command, TENURE_URL=f"{afar.url}?answer_timeout=1")
    assert time.monotonic() - began < BOUND
    assert done.returncode == Status.STORE
    assert afar.url.removeprefix("tenure://") in done.stderr


@pytest.mark.exhaustive
def test_a_wait_that_an_outage_ends_is_not_a_timeout_of_contention(
    tenure: Tenure, afar: Afar
) -> None:
    tenure.environment = {**tenure.environment, "TENURE_URL": afar.direct}
    holder = tenure.start("run", "--lock", "nightly", "--", "python3", "-c", LISTENER)
    holder.line()
    tenure.environment = {**tenure.environment, "TENURE_URL": f"{afar.url}?answer_timeout=1"}
    began = time.monotonic()
    waiter = tenure.start("run", "--lock", "nightly", "--timeout", "6", "--", "true")
    tenure.environment = {**tenure.environment, "TENURE_URL": afar.direct}
    eventually(lambda: len(tenure.json("describe", "nightly")["waiters"]) == 1)
    afar.network.stall()
    code, said = waiter.end()
    assert time.monotonic() - began < 2 * BOUND
    assert code == Status.STORE
    assert "mutex 'nightly' on /default: not acquired within 6 s, because tenure://" in said
