"""A server's loop stays awake while that pays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tenure.server.busy_poll import BusyPoll

LONGEST = 200.0


class Turns:
    """A loop that does nothing but turn, ten units of time a turn."""

    def __init__(self) -> None:
        self.time_now = 1000.0
        self.others = 0.0
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def now(self) -> float:
        return self.time_now

    def turn(self) -> None:
        self.time_now += 10
        soon, self._soon = self._soon, []
        for each in soon:
            each()

    def others_run(self) -> None:
        self.time_now += self.others

    def sleeps(self) -> bool:
        return not self._soon

    def until_it_sleeps(self) -> float:
        """Turn until there is nothing to do; returns how long that took."""
        began = self.time_now
        while not self.sleeps():
            self.turn()
        return self.time_now - began


@pytest.fixture
def loop() -> Turns:
    return Turns()


@pytest.fixture
def poll(loop: Turns) -> BusyPoll:
    return BusyPoll(loop.call_soon, LONGEST, loop.now, loop.others_run)


def test_it_sleeps_until_something_arrives(loop: Turns, poll: BusyPoll) -> None:
    assert loop.sleeps()
    poll.arrived()
    assert not loop.sleeps()


def test_it_stays_awake_for_a_moment_and_no_longer(loop: Turns, poll: BusyPoll) -> None:
    poll.arrived()
    assert loop.until_it_sleeps() == LONGEST


def test_each_arrival_is_followed_by_a_moment_of_its_own(loop: Turns, poll: BusyPoll) -> None:
    for _ in range(50):  # far longer than one moment
        poll.arrived()
        for _ in range(15):
            loop.turn()
        assert not loop.sleeps()
    poll.arrived()
    poll.arrived()  # within one turn
    assert loop.until_it_sleeps() == LONGEST


def test_who_asks_now_and_then_is_waited_for_ever_more_seldom(loop: Turns, poll: BusyPoll) -> None:
    waited = []
    for _ in range(400):
        poll.arrived()
        waited.append(not loop.sleeps())
        loop.until_it_sleeps()
    at = [number for number, each in enumerate(waited) if each]
    assert at == [0, 2, 5, 10, 19, 36, 69, 134, 199, 264, 329, 394]


def test_when_it_pays_again_nothing_is_passed_over(loop: Turns, poll: BusyPoll) -> None:
    for _ in range(40):
        poll.arrived()
        loop.until_it_sleeps()
    while loop.sleeps():
        poll.arrived()
    poll.arrived()  # while it was awake
    loop.until_it_sleeps()  # in vain, once
    poll.arrived()
    assert loop.sleeps()
    poll.arrived()
    assert not loop.sleeps()


def test_a_core_that_others_want_is_left_to_them(loop: Turns, poll: BusyPoll) -> None:
    loop.others = LONGEST
    poll.arrived()
    loop.turn()
    assert loop.sleeps()
    loop.others = 0
    for _ in range(64):
        poll.arrived()
        assert loop.sleeps()
    poll.arrived()
    assert not loop.sleeps()
