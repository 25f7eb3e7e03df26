"""When a session counts as proven, and when it asks for proof."""

from __future__ import annotations

import pytest

from tenure._client.session_life import Proof
from tenure.core import rules


@pytest.mark.parametrize("window", [rules.MIN_WINDOW, 2.0, 15.0, 30.0, rules.MAX_WINDOW])
@pytest.mark.parametrize("stop_share", [0.0, 0.02, 0.2, 0.49])
def test_it_renews_well_before_the_deadline_and_that_lies_before_the_window_s_end(
    window: float, stop_share: float
) -> None:
    proof = Proof(window)
    proof.at = proof.sent = 100.0
    proof.add_stop_time(1, stop_share * window)
    assert proof.renew_at < proof.deadline < 100.0 + window
    assert proof.renew_at - 100.0 <= (proof.deadline - 100.0) / 3 + 1e-9


def test_the_margin_is_a_twentieth_of_the_window_but_no_less_than_a_tenth_of_a_second() -> None:
    assert Proof(30.0).deadline == pytest.approx(28.5)
    assert Proof(1.0).deadline == pytest.approx(0.9)


def test_a_session_that_has_asked_for_no_proof_yet_asks_after_one_interval() -> None:
    assert Proof(1.0).renew_at == pytest.approx(0.3)


def test_the_margin_is_the_longest_stop_time_of_what_is_held() -> None:
    proof = Proof(30.0)
    proof.add_stop_time(1, 5.0)
    proof.add_stop_time(2, 10.0)
    assert proof.deadline == pytest.approx(20.0)
    proof.drop_stop_time(2)
    assert proof.deadline == pytest.approx(25.0)
    proof.drop_stop_time(1)
    proof.drop_stop_time(1)
    assert proof.deadline == pytest.approx(28.5)


def test_an_unanswered_renewal_is_repeated_after_a_quarter_of_the_interval() -> None:
    proof = Proof(30.0)
    proof.at = 100.0
    assert proof.interval == pytest.approx(9.5)
    assert proof.renew_at == pytest.approx(109.5)
    proof.sent = 109.5
    assert proof.renew_at == pytest.approx(109.5 + 9.5 / 4)
