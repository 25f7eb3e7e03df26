"""The rule of rates, against a list of all grants without bins."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.core import rates
from tenure.core.rates import (
    RateAnswer,
    RateCall,
    RateRule,
    Rates,
    RateState,
    decide,
    decode,
    encode,
)
from tenure.errors import InvalidArgument
from tenure.testing.rates import most_in_window

START = 1_700_000_000_000_000
RULE = RateRule(10, 1_000_000, 10)


@st.composite
def rules(draw: st.DrawFn) -> RateRule:
    burst, parts = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    return RateRule(burst * parts, draw(st.integers(10_000, 3_000_000)), burst)


@dataclass
class Caller:
    """Calls a rate as a store would, and keeps every grant.

    Attributes:
        grants: time and count of each grant that was not refunded.
    """

    rule: RateRule
    now: int = START
    state: RateState | None = None
    grants: list[tuple[int, int]] = field(default_factory=list)

    def call(self, call: RateCall) -> RateAnswer:
        before = self.state
        self.state, answer = decide(before, call, self.now)
        if self.state is not None:
            assert list(self.state.times) == sorted(set(self.state.times))
            assert min(self.state.counts) > 0
        return answer

    def take(self, count: int, longest: int | None = None) -> RateAnswer:
        answer = self.call(RateCall("take", self.rule, count, longest))
        if answer.granted:
            assert answer.at == self.now + answer.wait
            self.grants.append((answer.at, count))
        return answer

    def refund(self, number: int, count: int) -> None:
        time, counted = self.grants[number]
        count = min(count, counted)
        if count:
            answer = self.call(RateCall("refund", self.rule, count, at=time))
            assert answer.granted is (time + self.rule.window > self.now)
            self.grants[number] = (time, counted - count)

    def earliest(self, count: int) -> int:
        """Return the first time that an exact sliding window allows, in order."""
        at = max([self.now, *(time for time, counted in self.grants if counted)])
        for time in sorted({at, *(time + self.rule.window for time, _ in self.grants)}):
            inside = [n for t, n in self.grants if time - self.rule.window < t]
            if time >= at and sum(inside) + count <= self.rule.burst:
                return time
        raise AssertionError("the last time has an empty window")


steps = st.lists(
    st.tuples(
        st.integers(0, 1_500_000),  # the time that passes
        st.integers(1, 12),  # a count
        st.none() | st.integers(0, 2_000_000),  # the longest wait
        st.none() | st.integers(0, 30),  # a grant to refund
    ),
    max_size=40,
)


@given(rules(), steps)
def test_no_window_exceeds_the_burst_and_no_period_the_limit(
    rule: RateRule, given_steps: list[tuple[int, int, int | None, int | None]]
) -> None:
    caller = Caller(rule)
    for passed, count, longest, back in given_steps:
        caller.now += passed
        if back is not None and back < len(caller.grants):
            caller.refund(back, count)
        elif count <= rule.burst:
            caller.take(count, longest)
    assert most_in_window(caller.grants, rule.window) <= rule.burst
    assert most_in_window(caller.grants, rule.per) <= rule.limit


@given(rules(), steps)
def test_takes_are_granted_in_order_and_wait_a_hundredth_too_long_at_most(
    rule: RateRule, given_steps: list[tuple[int, int, int | None, int | None]]
) -> None:
    caller = Caller(rule)
    width = -(-rule.window // rates.BINS)
    for passed, count, longest, back in given_steps:
        caller.now += passed
        if back is not None and back < len(caller.grants):
            caller.refund(back, 12)
        if count > rule.burst:
            continue
        earliest = caller.earliest(count)
        latest = max([0, *(time for time, counted in caller.grants if counted)])
        before = caller.state
        answer = caller.take(count, longest)
        at = caller.now + answer.wait
        # A time may depend on several bins, one behind the other, but only on the last of them.
        assert earliest <= at <= max(earliest + width, latest)
        assert answer.granted is (longest is None or answer.wait <= longest)
        if answer.granted:
            assert at >= latest
        else:
            assert caller.state is before


@given(rules(), st.lists(st.integers(1, 12), min_size=1, max_size=20), st.data())
def test_giving_everything_back_leaves_nothing(
    rule: RateRule, counts: list[int], data: st.DataObject
) -> None:
    caller = Caller(rule)
    for count in counts:
        caller.take(min(count, rule.burst))
    for number in data.draw(st.permutations(range(len(counts)))):
        caller.refund(number, 12)
    assert caller.state is None


def test_a_rate_is_kept_in_about_a_hundred_bins_whatever_the_number_of_calls() -> None:
    caller = Caller(RateRule(1_000_000, 1_000_000, 1_000_000))
    for _ in range(5_000):
        caller.now += 300
        assert caller.take(1, 0).granted
    assert caller.state is not None
    assert len(caller.state.times) <= 101


def test_the_bins_of_reservations_are_bounded() -> None:
    caller = Caller(RateRule(1, 1_000, 1))
    caller.state = RateState.of(
        caller.rule,
        seen=START,
        times=tuple(START + number * 1000 for number in range(1, rates.MOST_BINS + 1)),
        counts=(1,) * rates.MOST_BINS,
    )
    before = caller.state
    answer = caller.take(1)
    assert not answer.granted
    assert answer.wait >= rates.MOST_BINS * 1000
    assert caller.state is before


def test_a_clock_that_was_set_back_moves_the_window_with_it() -> None:
    caller = Caller(RULE)
    caller.take(10)
    caller.now -= 3_600_000_000
    refused = caller.take(1, 0)
    assert not refused.granted
    assert refused.wait <= 1_010_000
    caller.now += refused.wait
    assert caller.take(1, 0).granted


def test_a_resize_keeps_the_order_of_the_bins() -> None:
    caller = Caller(RULE)
    caller.now += 1
    caller.take(10)
    caller.rule = RateRule(20, 100_000, 20)
    caller.call(RateCall("resize", caller.rule))
    answer = caller.take(1, 0)
    assert answer.granted
    assert caller.state is not None
    assert caller.state.times == (answer.at,)
    assert caller.state.counts == (11,)


def test_a_take_with_another_rule_changes_nothing() -> None:
    caller = Caller(RULE)
    caller.take(1)
    before = caller.state
    caller.rule = RULE._replace(limit=20)
    answer = caller.take(1)
    assert (answer.rule, answer.granted, answer.free) == (RULE, False, 9)
    assert caller.state is before


def test_rates_without_tokens_in_their_window_are_removed() -> None:
    table = Rates()
    take = RateCall("take", RULE, 1)
    for number in range(25):
        assert table.decide(f"user {number}", take, START).granted
    assert len(table) == 25
    table.decide("user 0", take, START + 500_000)
    for _ in range(3):
        table.decide("other", RateCall("peek", RULE), START + 1_100_000)
    assert len(table) == 1  # the one that was used later
    for turn in range(100):  # a name that comes and goes is remembered once
        answer = table.decide("one", take, START + 1_100_000 + turn)
        table.decide("one", RateCall("refund", RULE, 1, at=answer.at), answer.at)
    assert len(table) == 1


@given(steps)
def test_a_state_is_kept_as_a_text(
    given_steps: list[tuple[int, int, int | None, int | None]],
) -> None:
    caller = Caller(RateRule(24, 3_000_000, 12))
    for passed, count, longest, _ in given_steps:
        caller.now += passed
        caller.take(count, longest)
        if caller.state is not None:
            assert decode(encode(caller.state)) == caller.state


def test_a_damaged_text_is_no_state() -> None:
    good = encode(RateState.of(RULE, 5, (1, 2), (3, 4)))
    assert decode(good) == RateState.of(RULE, 5, (1, 2), (3, 4))
    for wrong in (
        "",
        "{}",
        "[1,2]",
        "null",
        good[:-1],
        good.replace("3", "0"),
        good.replace("[1,1]", "[1]"),
    ):
        with pytest.raises(ValueError, match="no state of a rate"):
            decode(wrong)


def test_values_of_a_rule_are_checked() -> None:
    def rule(limit: object, per: float, burst: object = None) -> RateRule:
        return RateRule.of(limit, per, burst, "/n", "r")  # type: ignore[arg-type]

    assert rule(100, 60) == RateRule(100, 60_000_000, 100)
    assert rule(100, 60, 25).window == 15_000_000
    assert rule(3, 0.01, 1).window == 3334
    assert str(rule(100, 60)) == "100 per 60 s"
    assert str(rule(100, 0.5, 50)) == "100 per 0.5 s, in bursts of 50"
    for limit in (0, -1, 1.5, "9", True, 10**11 + 1):
        with pytest.raises(InvalidArgument, match="the limit of a rate is"):
            rule(limit, 60)
    for per in (0, 0.0001, 1e9, 1e306):
        with pytest.raises(InvalidArgument, match="the period of a rate is"):
            rule(1, per)
    for burst in (0, 101, 1.0, False):
        with pytest.raises(InvalidArgument, match="a burst is a whole number"):
            rule(100, 60, burst)
    with pytest.raises(InvalidArgument, match="Use the limit 60 or 120") as caught:
        rule(100, 60, 60)
    assert (caught.value.node, caught.value.name) == ("/n", "r")
    with pytest.raises(InvalidArgument, match="too small"):
        rule(1000, 0.001, 1)


def test_the_check_of_a_history_finds_a_window_that_is_exceeded() -> None:
    assert most_in_window([], 10) == 0
    assert most_in_window([(0, 3), (10, 4), (9, 2)], 10) == 6
    assert most_in_window([(0, 3), (9, 4), (19, 5), (18, 1)], 10) == 7
