"""Decorated functions of threads; `tests.primitives.test_decorators` has what both APIs share."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tenure import blocking
from tenure.errors import AcquireTimeout, InvalidArgument, Misuse
from tests.blocking.helpers import Thread

PATIENCE = 30.0  # seconds


def test_one_call_runs_at_a_time(client: blocking.Client, eye: blocking.Client) -> None:
    inside = threading.Lock()

    def work(number: int) -> int:
        assert inside.acquire(blocking=False)
        try:
            return number
        finally:
            inside.release()

    calls = [each.exclusive("work {{x}}")(work) for each in (client, eye)]

    def many(call: Callable[[int], int]) -> list[int]:
        return [call(number) for number in range(20)]

    threads = [Thread(lambda call=call: many(call)) for call in calls]  # type: ignore[misc]
    assert [each.result() for each in threads] == [list(range(20))] * 2


def test_a_busy_call_raises_or_is_skipped(client: blocking.Client, eye: blocking.Client) -> None:
    def work(user: int) -> int:
        return user

    with eye.mutex("work 3").lock():
        with pytest.raises(AcquireTimeout):
            client.exclusive("work {user}", wait=0.01)(work)(3)
        assert client.exclusive("work {user}", skip=True)(work)(3) is None
        assert client.exclusive("work {user}", skip=True, wait=0.01)(work)(3) is None
        assert client.exclusive("work {user}", wait=0)(work)(4) == 4
    with eye.semaphore("seats", limit=2).acquire(2):
        assert client.limited("seats", 2, skip=True)(work)(3) is None
        assert client.limited("seats", 2, skip=True, wait=0.01)(work)(3) is None
    assert client.limited("seats", 2, count=2)(work)(3) == 3


def test_a_job_runs_once_in_a_period(client: blocking.Client, eye: blocking.Client) -> None:
    def job(number: int) -> int:
        return number

    here, there = client.once_per("job", hours=1)(job), eye.once_per("job", hours=1)(job)
    assert [here(1), there(2), here(3)] == [1, None, None]


def test_methods_keep_their_names_and_signatures(client: blocking.Client) -> None:
    class Account:
        number = 7

        @client.exclusive("account {self.number}")
        def close(self, reason: str = "") -> str:
            """Close it."""
            return client.list_semaphores()[0].name + reason

    assert Account().close("!") == "account 7!"
    assert Account.close.__doc__ == "Close it."
    assert list(inspect.signature(Account.close).parameters) == ["self", "reason"]


def test_an_error_of_the_function_releases_the_lease(client: blocking.Client) -> None:
    @client.exclusive("work", skip=True)
    def work(error: Exception) -> None:
        raise error

    for error in (ZeroDivisionError(), AcquireTimeout("of another one")):
        with pytest.raises(type(error)) as raised:
            work(error)
        assert raised.value is error
        assert not client.mutex("work").locked()


def test_a_generator_holds_its_lease_until_it_ends_or_is_closed(client: blocking.Client) -> None:
    mutex = client.mutex("counting")

    @client.exclusive("counting")
    def count(to: int) -> Generator[int, str, str]:
        sent = ""
        for number in range(to):
            sent += (yield number) or ""
        return sent

    assert inspect.isgeneratorfunction(count)
    counting = count(2)
    assert not mutex.locked()
    assert next(counting) == 0
    assert mutex.locked()
    assert counting.send("a") == 1
    with pytest.raises(StopIteration) as ended:
        counting.send("b")
    assert ended.value.value == "ab"
    assert not mutex.locked()

    counting = count(2)
    next(counting)
    counting.close()  # which does not wait for the store, because any thread may drop a generator
    with mutex.lock(timeout=PATIENCE):
        pass


def test_a_skipped_generator_is_empty(client: blocking.Client, eye: blocking.Client) -> None:
    @client.exclusive("work", skip=True)
    def work() -> Generator[int, None, None]:
        yield 1

    with eye.mutex("work").lock():
        assert list(work()) == []
    assert list(work()) == [1]


def test_partial_generators_hold_their_lease(client: blocking.Client) -> None:
    def count(to: int) -> Generator[bool, None, None]:
        yield client.mutex("count").locked()

    assert list(client.exclusive("count")(functools.partial(count, 1))()) == [True]


def test_a_function_that_only_begins_its_work_is_refused(client: blocking.Client) -> None:
    def work() -> object:
        return _coroutine()

    with pytest.raises(Misuse, match="returned a coroutine"):
        client.exclusive("work")(work)()
    with pytest.raises(Misuse, match=r"tenure\.connect"):
        client.exclusive("work")(functools.partial(_coroutine))


async def _coroutine() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("decorate", "kind", "message"),
    [
        (lambda client: client.exclusive(_generator), Misuse, "needs a name"),
        (lambda client: client.exclusive("a")(_coroutine), Misuse, "tenure.connect"),
        (lambda client: client.exclusive("a {id}")(_generator), InvalidArgument, "no argument"),
        (lambda client: client.once_per("a", hours=1)(_generator), Misuse, "no generator"),
        (lambda client: client.once_per("a"), InvalidArgument, "hours=1"),
        (lambda client: client.limited("a", 2, count=3), InvalidArgument, "count"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    client: blocking.Client,
    decorate: Callable[[blocking.Client], Any],
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        decorate(client)
