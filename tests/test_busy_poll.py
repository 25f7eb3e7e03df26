"""A loop stays awake while that pays."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

import tenure
from tenure.busy_poll import BusyPoll
from tests.engines.redis.servers import a_server
from tests.server.served import served

LONGEST = 200.0


class Turns:
    """A loop that does nothing but turn, ten units of time a turn."""

    def __init__(self) -> None:
        self.time_now = 1000.0
        self.others = 0.0
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.soon.append(callback)

    def now(self) -> float:
        return self.time_now

    def turn(self) -> None:
        self.time_now += 10
        soon, self.soon = self.soon, []
        for each in soon:
            each()

    def others_run(self) -> None:
        self.time_now += self.others

    def sleeps(self) -> bool:
        return not self.soon

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


def test_what_has_come_is_not_waited_for_any_more(loop: Turns, poll: BusyPoll) -> None:
    for _ in range(50):
        poll.expect()
        loop.turn()
        assert not loop.sleeps()
        poll.came(more=False)
        assert loop.until_it_sleeps() <= 10


def test_it_is_looked_for_once_a_turn_whoever_asks(loop: Turns, poll: BusyPoll) -> None:
    for _ in range(3):
        poll.expect()
        poll.came(more=False)
    poll.expect()
    assert len(loop.soon) == 1
    assert loop.until_it_sleeps() == LONGEST


def test_it_stays_awake_for_the_rest_when_some_has_come(loop: Turns, poll: BusyPoll) -> None:
    poll.expect()
    for _ in range(10):
        loop.turn()
    poll.came(more=True)
    assert loop.until_it_sleeps() == LONGEST - 100


def test_what_comes_while_it_sleeps_does_not_wake_it(loop: Turns, poll: BusyPoll) -> None:
    poll.expect()
    loop.until_it_sleeps()
    poll.came(more=True)
    assert loop.sleeps()


def test_it_can_be_told_never_to_stay_awake(loop: Turns) -> None:
    poll = BusyPoll(loop.call_soon, 0, loop.now, loop.others_run)
    poll.expect()
    poll.arrived()
    assert loop.sleeps()


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


class Sleeps(selectors.DefaultSelector):
    """Counts how often its loop looked at the sockets with leave to sleep."""

    count = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.count += timeout is None or timeout > 0
        return super().select(timeout)


@contextmanager
def redis() -> Iterator[str]:
    with a_server() as server:
        yield f"{server.url}&busy_poll="


@contextmanager
def native() -> Iterator[str]:
    with served("memory://") as server:
        yield f"{server.address}?busy-poll="


@pytest.mark.parametrize("store", [redis, native])
@pytest.mark.parametrize("microseconds", [0, 10_000])
def test_a_client_stays_awake_for_an_answer_if_it_may(
    store: Callable[[], AbstractContextManager[str]], microseconds: int
) -> None:
    selector = Sleeps()

    async def lock(url: str) -> None:
        async with tenure.connect(url) as client, client.session() as session:
            for number in itertools.count():
                before = selector.count
                lease = await session.mutex("m").lock()
                slept = selector.count > before
                await lease.release()
                if microseconds:
                    if not slept:
                        return  # on a busy machine it is not so every time
                else:
                    assert slept
                    if number == 20:
                        return

    with store() as url:
        loop = asyncio.SelectorEventLoop(selector)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(lock(f"{url}{microseconds}"))
