"""Rates for threads: waits, and interruptions that leave no tokens behind."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest

from tenure import blocking
from tenure.errors import InvalidArgument, RateExceeded
from tests.blocking.helpers import until
from tests.blocking.interrupting import Interruption
from tests.blocking.test_interruption import untraced


def test_threads_take_tokens_in_turn(client: blocking.Client) -> None:
    rate = client.rate("api", limit=4, per=0.3)
    began = time.monotonic()
    taken = []

    def work() -> None:
        taken.append(rate.take(2, timeout=10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(taken) == 4
    assert time.monotonic() - began >= 0.3
    assert max(each.waited for each in taken) <= 0.31
    assert {each.rate for each in taken} == {rate}


def test_tokens_are_taken_refunded_and_seen(client: blocking.Client, eye: blocking.Client) -> None:
    rate, same = (each.rate("api", limit=10, per=3600) for each in (client, eye))
    assert (rate.name, rate.node, rate.limit, rate.per, rate.burst) == (
        *("api", "/default", 10, 3600, 10),
    )
    taken = rate.take(7)
    assert same.peek().free == 3
    taken.refund(5)
    assert (taken.count, same.peek().free) == (2, 8)
    assert same.try_take(9) is None
    with pytest.raises(RateExceeded) as caught:
        same.take(9, timeout=1)
    assert 3500 < caught.value.retry_after <= 3600
    same.resize(limit=20, per=3600)
    with pytest.raises(InvalidArgument):
        rate.take()
    assert same.try_take(18)


def test_decorated_functions_begin_at_the_rate(client: blocking.Client) -> None:
    @client.rate_limited("skips {user}", limit=1, per=3600, skip=True)
    def skips(user: str) -> str:
        return user

    @client.rate_limited("waits", limit=1, per=0.2, wait=10)
    def waits() -> None:
        times.append(time.monotonic())

    @client.rate_limited("raises", limit=1, per=3600, wait=0.01)
    def raises() -> None:
        pass

    @client.rate_limited("patient", limit=1, per=3600, wait=0.01, skip=True)
    def patient() -> int:
        return 1

    assert [skips("ann"), skips("bob"), skips("ann")] == ["ann", "bob", None]
    times: list[float] = []
    waits()
    waits()
    assert times[1] - times[0] >= 0.19
    raises()
    with pytest.raises(RateExceeded):
        raises()
    assert [patient(), patient()] == [1, None]


def test_a_take_that_is_interrupted_while_it_waits_is_refunded(client: blocking.Client) -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    rate = client.rate("api", limit=10, per=3600)
    rate.take(4)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            rate.take(10)
    finally:
        signal.signal(signal.SIGALRM, before)
    until(lambda: rate.peek().free == 6)


@untraced
@pytest.mark.parametrize("call", ["take", "try_take"])
def test_a_take_that_is_interrupted_anywhere_is_refunded(
    client: blocking.Client, call: str
) -> None:
    rate = client.rate("api", limit=10, per=3600)
    for number in itertools.count(1):
        interruption, taken = Interruption(number), None
        with interruption.expected():
            taken = getattr(rate, call)(10)
        if taken is not None:
            taken.refund(10)
        until(lambda: rate.peek().free == 10)
        if not interruption.struck:
            break
    assert number > 20


@untraced
def test_a_refund_that_is_interrupted_is_carried_out(client: blocking.Client) -> None:
    rate = client.rate("api", limit=10, per=3600)
    for number in itertools.count(1):
        taken, interruption = rate.take(10), Interruption(number)
        with interruption.expected():
            taken.refund(10)
        until(lambda: rate.peek().free == 10)
        if not interruption.struck:
            break
    assert number > 20
