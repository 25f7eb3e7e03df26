"""The same for threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from tenure.errors import EngineError, InvalidArgument, Misuse, SessionClosed
from tenure.interop import blocking
from tenure.interop.dflockd import DistributedLock
from tenure.interop.effect import LockLost, LockNotAcquired, recurs
from tenure.interop.program import Program
from tests.blocking.helpers import Thread


@pytest.fixture
def here(redis_url: str) -> Iterator[blocking.Connection]:
    with blocking.connect(redis_url) as connection:
        yield connection


@pytest.fixture
def there(redis_url: str) -> Iterator[blocking.Connection]:
    with blocking.connect(redis_url) as connection:
        yield connection


@pytest.fixture
def eye(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """With the last connection the thread is gone; after a call on a closed one, it soon is."""
    yield
    for thread in threading.enumerate():
        if thread.name == "tenure-blocking":
            thread.join(30)
            assert not thread.is_alive()


def is_held(what: blocking.ExclusiveLock | blocking.Permits) -> bool:
    """The same as requesting it, without a type checker taking the answer for lasting."""
    return what.held


def test_one_of_two_has_the_exclusive_lock(
    here: blocking.Connection, there: blocking.Connection
) -> None:
    one, two = here.exclusive_lock("nightly"), there.exclusive_lock("nightly")
    assert (one.name, one.key) == ("nightly", "exclusive-lock:nightly")
    assert one.acquire()
    assert is_held(one)
    assert not two.acquire()
    found = two.inspect()
    assert found is not None
    assert found.contents == one.contents
    one.release()
    one.release()
    assert not is_held(one)
    assert two.acquire()
    two.release()


def test_it_is_refreshed_by_a_thread_of_its_own(
    here: blocking.Connection, eye: redis.Redis
) -> None:
    lock = here.exclusive_lock("nightly", lock_ttl=30, lock_refresh=0.05)
    refreshed = threading.Event()
    lock.on("refreshed", lambda *_: refreshed.set())
    assert lock.acquire()
    eye.pexpire(lock.key, 5000)
    assert refreshed.wait(20)
    assert int(eye.pttl(lock.key)) > 20_000
    lock.release()


def test_closing_gives_back_what_is_held(redis_url: str, eye: redis.Redis) -> None:
    connection = blocking.connect(redis_url)
    lock, semaphore = connection.exclusive_lock("nightly"), connection.semaphore("pool")
    assert lock.acquire()

    def work() -> None:
        with semaphore.take(1):
            connection.close()

    with pytest.raises(SessionClosed, match="closed meanwhile"):
        work()
    connection.close()
    assert not eye.exists(lock.key, "semaphore:pool")
    for ask in (lock.acquire, lock.inspect, semaphore.current_count):
        with pytest.raises(SessionClosed):
            ask()
    with pytest.raises(SessionClosed), semaphore.take(1):
        raise AssertionError("the block must not begin")


def test_closing_gives_back_what_it_can(redis_url: str, eye: redis.Redis) -> None:
    connection = blocking.connect(redis_url)
    locks = [connection.exclusive_lock(name) for name in ("one", "two", "three")]
    for lock in locks:
        assert lock.acquire()
    for lock in locks[:2]:
        eye.delete(lock.key)
        eye.hset(lock.key, "of another", "type")  # which cannot be asked what it contains
    with pytest.raises(EngineError, match="cannot be released"):
        connection.close()
    assert not eye.exists(locks[2].key)
    assert not any(lock.held for lock in locks)


def test_what_was_made_and_is_needed_no_more_is_forgotten(here: blocking.Connection) -> None:
    lock, semaphore = here.exclusive_lock("nightly"), here.semaphore("pool")
    assert lock.acquire()
    with semaphore.take(1):
        assert (len(here._program.locks), len(here._program.semaphores)) == (1, 1)
    key = lock.key
    del lock, semaphore
    gc.collect()
    assert [held.key for held in here._program.locks] == [key]  # it is held
    for held in list(here._program.locks):
        here._portal.call(held.release)
    del held
    gc.collect()
    here._portal.run(gc.collect)
    assert (len(here._program.locks), len(here._program.semaphores)) == (0, 0)


def test_permits_are_held_for_a_block(
    here: blocking.Connection, there: blocking.Connection
) -> None:
    one, two = here.semaphore("pool", limit=3), there.semaphore("pool", limit=3)
    assert (one.key, one.limit) == ("pool", 3)
    taking = one.take(2, identifier="me")
    with taking as permits:
        assert (permits.count, permits.identifier, two.current_count()) == (2, "me", 2)
        permits.check()
        with two.try_take(2) as none:
            assert none is None
        assert two.with_permits_if_available(2, lambda: "done", otherwise="busy") == "busy"
        assert two.with_permits(1, two.current_count) == 3
    assert one.current_count() == 0
    assert not is_held(permits)
    with pytest.raises(Misuse, match="again for another"), taking:
        raise AssertionError("the block must not begin")
    with pytest.raises(KeyError), one.take(1):
        raise KeyError
    assert two.current_count() == 0


def test_what_cannot_be_taken_is_told(
    here: blocking.Connection, there: blocking.Connection
) -> None:
    one = here.semaphore("pool")
    two = there.semaphore("pool", acquire_retry_policy=recurs(2))
    with pytest.raises(InvalidArgument), one.take(2):
        raise AssertionError("the block must not begin")
    with one.take(1), pytest.raises(LockNotAcquired), two.take(1):
        raise AssertionError("the block must not begin")


def test_lost_permits_are_told_when_asked_and_at_the_end(
    here: blocking.Connection, eye: redis.Redis
) -> None:
    semaphore = here.semaphore("pool", refresh_interval=0.05)
    lost = threading.Event()

    def work() -> None:
        with semaphore.take(1) as permits:
            eye.delete("semaphore:pool")
            while permits.loss is None:
                lost.wait(0.01)
            permits.check()

    with pytest.raises(LockLost) as told:
        work()
    assert not hasattr(told.value, "__notes__")  # that it was lost is said once


def test_threads_share_the_permits(here: blocking.Connection, there: blocking.Connection) -> None:
    inside: list[int] = []

    def work(number: int) -> int:
        semaphore = (here, there)[number % 2].semaphore("pool", limit=2)
        most = 0
        for _ in range(5):
            with semaphore.take(1):
                inside.append(number)
                most = max(most, len(inside))
                inside.remove(number)
        return most

    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(work, range(6))) <= 2


def test_an_interrupted_wait_leaves_nothing(
    here: blocking.Connection, there: blocking.Connection
) -> None:
    semaphore = here.semaphore("pool")
    taking = semaphore.take(1)
    with there.semaphore("pool").take(1):
        waiting = Thread(taking.__enter__)
        while taking._holding is None:
            pass
        here._portal.run(taking._undo, None)
        with pytest.raises(SessionClosed):
            waiting.result()
    assert semaphore.current_count() == 0


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("redis://user:secret@cache:6380/0", "redis://cache:6380"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
    ],
)
def test_a_connection_is_named_in_the_log_without_its_secrets(given: str, shown: str) -> None:
    assert Program(given, {}).url == shown


def test_a_lock_of_dflockd_is_named_in_the_log_by_its_servers() -> None:
    lock = DistributedLock("nightly", servers=[("lock.example", 6388)], auth_token="secret")
    assert lock.url.startswith("dflockd://")
    assert "lock.example:6388" in lock.url
    assert "secret" not in lock.url
