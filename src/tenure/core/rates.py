"""The rule of a rate: at most so many tokens in any window, in the order of the calls.

A rate is a sliding window with reservations. One step decides a take: it is granted at the earliest
time that the window allows, which may be in the future, and the tokens are counted from then.

Rules:

* In any window, the tokens that are granted are at most the rule's `burst`. The limit is a multiple
  of the burst, and the window the same fraction of the period. So any period has at most `limit`.
* First come, first served: the times of the grants rise with the order of the calls.
* Grants within a hundredth of the window share a bin, which has the time of the latest of them. So
  tokens leave the window up to a hundredth late, and never early.
* Tokens that are refunded leave their bin. Other grants keep their times.
* If the store's clock was set back, everything moves by the same time.

All times are whole microseconds of the store's clock.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeAlias

from tenure.core.rules import EXACT
from tenure.errors import InvalidArgument

MOST_TOKENS = 10**11
"""Greatest limit. So the sum of all bins is below 2^53, which every store adds exactly."""

MOST_BINS = 10_000
"""Greatest number of bins of one rate: a take that would need more is refused."""

BINS = 100
"""Number of bins in a window."""

SHORTEST_PERIOD, LONGEST_PERIOD = 1_000, 366 * 24 * 3600 * 1_000_000
SHORTEST_WINDOW = BINS
EXPIRED_AT_ONCE = 10
"""Number of unused rates that a take removes from the store, at most."""

MICROSECONDS = 1_000_000

RateKind: TypeAlias = Literal["take", "refund", "peek", "resize"]


class RateRule(NamedTuple):
    """Limit of a rate.

    Attributes:
        limit: greatest number of tokens in any period.
        per: the period, in microseconds.
        burst: greatest number of tokens in any window; the limit is a multiple of it.
    """

    limit: int
    per: int
    burst: int

    @classmethod
    def of(
        cls, limit: int, per: float, burst: int | None, node: str | None, name: str | None
    ) -> RateRule:
        """Return the rule for the values of a program. Raises as `check`."""
        period = round(min(per * MICROSECONDS, EXACT))
        rule = cls(limit, period, limit if burst is None else burst)
        rule.check(node, name)
        return rule

    def check(self, node: str | None, name: str | None) -> None:
        """Check the values.

        Raises:
            InvalidArgument: one of them is invalid, or the limit is no multiple of the burst.
        """
        wrong = self._wrong()
        if wrong:
            raise InvalidArgument(wrong, node=node, name=name)

    def _wrong(self) -> str:
        limit, per, burst = self.limit, self.per, self.burst
        if not _is_number(limit) or not 1 <= limit <= MOST_TOKENS:
            return f"the limit of a rate is a whole number from 1 to 10^11, not {limit!r}"
        if not SHORTEST_PERIOD <= per <= LONGEST_PERIOD:
            return (
                "the period of a rate is 0.001 seconds to 366 days, not "
                f"{per / MICROSECONDS:g} seconds"
            )
        if not _is_number(burst) or not 1 <= burst <= limit:
            return f"a burst is a whole number from 1 to the limit, which is {limit}, not {burst!r}"
        if limit % burst:
            parts = limit // burst
            return (
                f"the limit, {limit}, is not a multiple of the burst, {burst}: then a period could "
                f"have more than the limit. Use the limit {parts * burst} or {(parts + 1) * burst}"
            )
        if self.window < SHORTEST_WINDOW:
            return (
                f"the burst {burst} is too small: it is for a window of {self.window} "
                f"microseconds, and the shortest is {SHORTEST_WINDOW}"
            )
        return ""

    @property
    def window(self) -> int:
        """Length in microseconds of the window, in which `burst` tokens are granted at most."""
        return -(-self.per * self.burst // self.limit)

    def __str__(self) -> str:
        """Return it as in an error."""
        burst = f", in bursts of {self.burst}" if self.burst != self.limit else ""
        return f"{self.limit} per {self.per / MICROSECONDS:g} s{burst}"


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class RateCall:
    """One operation on a rate.

    Attributes:
        kind: ``"take"``; ``"peek"``, which changes nothing; ``"refund"``; or ``"resize"``, which
            replaces the rule of a rate that is in use.
        rule: the caller's rule. All calls but a resize must have the rule of the rate.
        count: number of tokens to take, to look for, or to refund.
        longest_wait: microseconds until the grant, at most; ``None`` is no limit.
        at: time of the grant of the tokens that are refunded.
    """

    kind: RateKind
    rule: RateRule
    count: int = 1
    longest_wait: int | None = 0
    at: int = 0

    def check(self, node: str, name: str) -> None:
        """Check the values of a call that a client has sent.

        Raises:
            InvalidArgument: one of them is invalid.
        """
        self.rule.check(node, name)
        most = EXACT if self.kind == "refund" else self.rule.burst
        if not (0 < self.count <= most and 0 <= self.at <= EXACT) or not (
            self.longest_wait is None or 0 <= self.longest_wait <= EXACT
        ):
            raise InvalidArgument(
                f"an operation on a rate has invalid values: {self}", node=node, name=name
            )


class RateAnswer(NamedTuple):
    """Answer to a call.

    Attributes:
        rule: the rule of the rate. If it is not the caller's, nothing was done.
        granted: whether the tokens were taken, or refunded.
        wait: microseconds from now until the grant, or until it would be.
        at: time of the grant by the store's clock; 0 if nothing was taken.
        free: number of tokens that a call could take without a wait.
    """

    rule: RateRule
    granted: bool
    wait: int = 0
    at: int = 0
    free: int = 0


class RateState(NamedTuple):
    """State of a rate with tokens in its window.

    Attributes:
        rule: its rule.
        seen: time of the latest change, by which a clock that was set back is recognised.
        times: the bins, each by the time of its latest grant, in rising order. The last of them
            may be in the future.
        counts: the number of tokens in each bin.
        total: the sum of them.
    """

    rule: RateRule
    seen: int
    times: tuple[int, ...]
    counts: tuple[int, ...]
    total: int

    @classmethod
    def of(
        cls, rule: RateRule, seen: int, times: tuple[int, ...], counts: tuple[int, ...]
    ) -> RateState:
        """Return the state with these bins."""
        return cls(rule, seen, times, counts, sum(counts))

    @property
    def expires(self) -> int:
        """Time at which the last token leaves the window."""
        return self.times[-1] + self.rule.window


def decide(
    state: RateState | None, call: RateCall, now: int
) -> tuple[RateState | None, RateAnswer]:
    """Carry out a call on a rate.

    Args:
        state: the state of the rate; ``None`` if it has no tokens in its window.
        call: the call.
        now: the time by the store's clock.

    Returns:
        The state afterwards, which is the same object if nothing is to be stored; and the answer.
    """
    moved = state if state is None else _moved(state, now)
    current = None if moved is None else _within_window(moved, now)
    rule = call.rule if current is None else current.rule
    if call.kind == "refund":
        return _refunded(moved, current, call, now)
    if call.kind == "resize":
        if current is not None:
            moved = current = current._replace(rule=call.rule, seen=now)
        return moved, RateAnswer(call.rule, True, 0, 0, _free(current, call.rule, now))
    if rule != call.rule:
        return moved, RateAnswer(rule, False, 0, 0, _free(current, rule, now))
    at = _earliest(current, call, now)
    longest = call.longest_wait
    if call.kind == "take" and (longest is None or at - now <= longest):
        taken = _taken(current, call, at, now)
        if len(taken.times) <= MOST_BINS:
            return taken, RateAnswer(rule, True, at - now, at, _free(taken, rule, now))
    return moved, RateAnswer(rule, False, at - now, 0, _free(current, rule, now))


def _moved(state: RateState, now: int) -> RateState:
    """Return the state by the clock of now, if that was set back since the last change."""
    back = state.seen - now
    if back <= 0:
        return state
    times = tuple(time - back for time in state.times)
    return state._replace(seen=now, times=times)


def _within_window(state: RateState, now: int) -> RateState | None:
    """Return the state without the bins that have left the window."""
    times, left = state.times, now - state.rule.window
    if times[0] > left:
        return state
    if times[-1] <= left:
        return None
    first = next(at for at, time in enumerate(times) if time > left)
    return RateState.of(state.rule, state.seen, times[first:], state.counts[first:])


def _free(state: RateState | None, rule: RateRule, now: int) -> int:
    if state is None:
        return rule.burst
    return 0 if state.times[-1] > now else max(rule.burst - state.total, 0)


def _earliest(state: RateState | None, call: RateCall, now: int) -> int:
    """Return the time at which the tokens can be granted."""
    if state is None:
        return now
    at = max(now, state.times[-1])
    excess = state.total + call.count - state.rule.burst
    if excess > 0:
        for time, count in zip(state.times, state.counts, strict=True):
            excess -= count
            if excess <= 0:
                return max(at, time + state.rule.window)
    return at


def _taken(state: RateState | None, call: RateCall, at: int, now: int) -> RateState:
    """Return the state after a grant at that time."""
    if state is None:
        return RateState(call.rule, now, (at,), (call.count,), call.count)
    times, counts = state.times, state.counts
    if _share_bin(times[-1], at, call.rule):
        times, counts = (*times[:-1], at), (*counts[:-1], counts[-1] + call.count)
    else:
        times, counts = (*times, at), (*counts, call.count)
    return RateState(state.rule, now, times, counts, state.total + call.count)


def _share_bin(one: int, other: int, rule: RateRule) -> bool:
    width = -(-rule.window // BINS)
    return one // width == other // width


def _refunded(
    moved: RateState | None, current: RateState | None, call: RateCall, now: int
) -> tuple[RateState | None, RateAnswer]:
    rule = call.rule if current is None else current.rule
    if current is None:
        return moved, RateAnswer(rule, False, 0, 0, rule.burst)
    times, counts = current.times, current.counts
    here = bisect_left(times, call.at)
    gone = call.at + rule.window <= now or here == len(times)
    if gone or not _share_bin(times[here], call.at, rule):
        return moved, RateAnswer(rule, False, 0, 0, _free(current, rule, now))
    left = counts[here] - call.count
    if left > 0:
        counts = (*counts[:here], left, *counts[here + 1 :])
    else:
        times = (*times[:here], *times[here + 1 :])
        counts = (*counts[:here], *counts[here + 1 :])
    if not times:
        return None, RateAnswer(rule, True, 0, 0, rule.burst)
    state = RateState.of(rule, now, times, counts)
    return state, RateAnswer(rule, True, 0, 0, _free(state, rule, now))


def encode(state: RateState) -> str:
    """Return a state as a text; the times are differences, which are short."""
    rule, times = state.rule, state.times
    steps = [later - time for time, later in pairwise(times)]
    values = [rule.limit, rule.per, rule.burst, state.seen, [times[0], *steps], state.counts]
    return json.dumps(values, separators=(",", ":"))


def decode(text: str) -> RateState:
    """Return the state in a text.

    Raises:
        ValueError: it is not a state.
    """
    try:
        limit, per, burst, seen, steps, counts = json.loads(text)
        rule, times = RateRule(limit, per, burst), tuple(accumulate(steps))
        state = RateState.of(rule, seen, times, tuple(counts))
        sane = len(times) == len(counts) > 0 and min(limit, per, burst, *counts) > 0
    except (TypeError, ValueError) as error:
        raise ValueError(f"no state of a rate: {text[:80]!r}") from error
    if not sane:
        raise ValueError(f"no state of a rate: {text[:80]!r}")
    return state


class Rates:
    """The rates of one node, in memory. A rate without tokens in its window is removed."""

    __slots__ = ("_due", "_queued", "_states")

    def __init__(self) -> None:
        self._states: dict[str, RateState] = {}
        self._due: list[tuple[int, str]] = []  # each rate once, not after its end
        self._queued: set[str] = set()

    def __len__(self) -> int:
        """Return the number of rates that are kept."""
        return len(self._states)

    def decide(self, name: str, call: RateCall, now: int) -> RateAnswer:
        """Carry out a call on the rate of that name, and remove some that are over."""
        self._remove_expired(now)
        before = self._states.get(name)
        state, answer = decide(before, call, now)
        if state is None:
            self._states.pop(name, None)
        elif state is not before:
            self._states[name] = state
            if name not in self._queued:
                self._queued.add(name)
                heappush(self._due, (state.expires, name))
        return answer

    def _remove_expired(self, now: int) -> None:
        for _ in range(EXPIRED_AT_ONCE):
            if not self._due or self._due[0][0] > now:
                return
            _, name = heappop(self._due)
            state = self._states.get(name)
            if state is not None and state.expires > now:
                heappush(self._due, (state.expires, name))
                continue
            self._queued.discard(name)
            self._states.pop(name, None)
