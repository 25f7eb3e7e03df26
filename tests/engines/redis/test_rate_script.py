"""The script of rates against `tenure.core.rates`, by a clock that the test sets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.core.rates import RateAnswer, RateCall, RateRule, RateState, decide
from tenure.engines.redis.lua import SCRIPTS
from tests.engines.redis.servers import shared

START = 1_700_000_000_000_000
CLOCK = "call('TIME')"
EXPIRE = "call('PEXPIRE'"
TEXT = (
    SCRIPTS["rate"]
    .text.replace(CLOCK, "{ARGV[11], ARGV[12]}")
    .replace(EXPIRE, "call('EXPIRE'")  # in seconds, since Redis itself has another clock
)
_numbers = itertools.count(1)


@dataclass
class Both:
    """A rate in Redis, and the same by the rule.

    Attributes:
        kept: count and time of each grant.
    """

    server: Any
    now: int = START
    state: RateState | None = None
    kept: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefix = f"{{rate-script-{next(_numbers)}}}:"
        self.server.hset(f"{self.prefix}meta", mapping={"e": "1", "o": "1", "p": "0"})
        self.server.hset(f"{self.prefix}nodes", "/n", "{}")
        assert CLOCK not in TEXT
        assert EXPIRE not in TEXT

    def call(self, call: RateCall) -> None:
        rule = call.rule
        words = (call.kind, rule.limit, rule.per, rule.burst, rule.window, call.count)
        longest = "" if call.longest_wait is None else call.longest_wait
        time = divmod(self.now, 1_000_000)
        key = f"{self.prefix}meta"
        reply = self.server.eval(TEXT, 1, key, "/n", "a", *words, longest, call.at, *time)
        assert reply[0] == b"ok"
        limit, per, burst, granted, wait, at, free = reply[1:]
        answer = RateAnswer(RateRule(limit, per, burst), bool(granted), wait, at, free)
        self.state, expected = decide(self.state, call, self.now)
        assert answer == expected, call
        if answer.granted and call.kind == "take":
            self.kept.append((call.count, at))


RULES = st.sampled_from(
    [
        RateRule(10, 1_000_000, 10),
        RateRule(300, 1_000_000, 300),
        RateRule(12, 60_000, 4),
        RateRule(1, 1_000, 1),
    ]
)
STEPS = st.one_of(st.just(0), st.integers(0, 20_000), st.integers(0, 2_000_000))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_script_decides_by_the_rule(data: st.DataObject) -> None:
    with redis.Redis(unix_socket_path=shared().socket) as server:
        both = Both(server)
        rule = data.draw(RULES)
        for _ in range(data.draw(st.integers(1, 60))):
            both.now += data.draw(STEPS)
            match data.draw(st.sampled_from("ttttttppreb")):
                case "t":
                    longest = data.draw(st.sampled_from([None, None, 0, 100_000]))
                    count = data.draw(st.integers(1, rule.burst))
                    both.call(RateCall("take", rule, count, longest))
                case "p":
                    both.call(RateCall("peek", rule, data.draw(st.integers(1, rule.burst))))
                case "r" if both.kept:
                    count, at = both.kept.pop(data.draw(st.integers(0, len(both.kept) - 1)))
                    both.call(RateCall("refund", rule, data.draw(st.integers(1, count)), at=at))
                case "e":
                    rule = data.draw(RULES)
                    both.call(RateCall("resize", rule))
                case "b":  # the script forgets what has left the window also without a change
                    both.call(RateCall("take", rule, 1, None))
                    both.now -= data.draw(st.integers(0, 500_000))
        server.delete(*server.keys(f"{both.prefix}*"))


def test_hundreds_of_takes_that_wait_are_decided_by_the_rule() -> None:
    with redis.Redis(unix_socket_path=shared().socket) as server:
        both, rule = Both(server), RateRule(10, 1_000_000, 1)
        for number in range(400):
            both.call(RateCall("take", rule, 1, None))
            if number % 7 == 0:
                count, at = both.kept.pop(len(both.kept) // 2)
                both.call(RateCall("refund", rule, count, at=at))
        both.now += 15_000_000  # more than a hundred bins have left
        both.call(RateCall("peek", rule))
        both.now -= 1_000_000
        both.call(RateCall("take", rule, 1, None))
        both.now += 60_000_000
        both.call(RateCall("take", rule, 1, None))
        server.delete(*server.keys(f"{both.prefix}*"))
