"""Primitives that are entered themselves, ``with mutex:``, by many threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tenure import blocking
from tenure.errors import LeaseLost, Misuse, SelfDeadlock


def test_one_object_is_entered_by_many_threads_in_turn(client: blocking.Client) -> None:
    mutex = client.mutex("m")
    tokens: list[int] = []
    inside = threading.Lock()

    def work(_: int) -> None:
        with mutex as lease:
            assert inside.acquire(blocking=False)
            tokens.append(lease.fencing_token)
            inside.release()

    with ThreadPoolExecutor(4, "workers") as pool:
        list(pool.map(work, range(40)))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 40
    assert not mutex.locked()


def test_a_thread_that_enters_it_twice_gets_an_error(client: blocking.Client) -> None:
    mutex = client.mutex("m")
    with mutex as lease:
        with pytest.raises(SelfDeadlock, match=r"test_entering\.py:\d+"), mutex:
            raise AssertionError
        assert lease.held
    assert not lease.held


def test_two_wrappers_of_one_name_are_two_blocks(client: blocking.Client) -> None:
    with client.semaphore("pool", limit=2) as outer, client.semaphore("pool", limit=2) as inner:
        assert outer != inner
        assert client.semaphore("pool").count() == 2


def test_threads_hold_a_semaphore_at_once_and_leave_their_own(client: blocking.Client) -> None:
    pool = client.semaphore("pool", limit=3)
    both = threading.Barrier(3)
    tokens: dict[str, int] = {}

    def work(name: str) -> None:
        with pool as lease:
            both.wait(30)
            tokens[name] = lease.fencing_token
            assert lease.held
            both.wait(30)
        assert not lease.held

    with ThreadPoolExecutor(3, "workers") as threads:
        list(threads.map(work, "abc"))
    assert len(set(tokens.values())) == 3
    assert pool.count() == 0


def test_a_loss_is_raised_at_the_end(client: blocking.Client, eye: blocking.Client) -> None:
    mutex = client.mutex("m")

    def lose() -> None:
        with mutex as lease:
            eye.evict("/default", "m", lease.fencing_token)
            lease.wait_lost(30)

    with pytest.raises(LeaseLost):
        lose()
    with mutex:
        pass


def test_it_is_not_left_by_a_thread_that_is_not_inside(client: blocking.Client) -> None:
    mutex = client.mutex("m")
    with pytest.raises(Misuse, match="not inside"):
        mutex.__exit__(None, None, None)
    with pytest.raises(TypeError, match="no decorator"):
        mutex(print)  # type: ignore[operator]


def test_a_generator_that_is_dropped_releases_it(client: blocking.Client) -> None:
    mutex = client.mutex("m")

    def inside() -> object:
        with mutex:
            yield

    generator = inside()
    next(generator)  # type: ignore[call-overload]
    assert mutex.locked()
    del generator
    mutex.lock(timeout=30).release()
