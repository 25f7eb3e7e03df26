"""The lock of exclusive-lock, beside original holders, on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tenure.errors import EngineError, InvalidArgument, LeaseLost
from tenure.interop.exclusive_lock import ExclusiveLock, Inspection
from tests.fencing.servers import a_redis
from tests.interop.conftest import Connecting

KEY = "exclusive-lock:nightly"


class Original:
    """A holder as exclusive-lock's own is: the same commands, which look at no contents."""

    def __init__(self, client: Any, key: str = KEY) -> None:
        self._client = client
        self._key = key

    async def acquire(self) -> bool:
        return bool(await self._client.set(self._key, "1", px=3000, nx=True))

    async def refresh(self) -> None:
        await self._client.pexpire(self._key, 3000)

    async def release(self) -> None:
        await self._client.delete(self._key)


def is_held(lock: ExclusiveLock) -> bool:
    """The same as requesting the lock, without a type checker taking the answer for lasting."""
    return lock.held


class Heard:
    """What a lock has told."""

    def __init__(self, lock: ExclusiveLock) -> None:
        self.said: list[tuple[object, ...]] = []
        self._news = asyncio.Event()
        for event in ("acquired", "refreshed", "released", "error"):
            lock.on(event, lambda *facts, event=event: self._hear(event, *facts))

    def _hear(self, *what: object) -> None:
        self.said.append(what)
        self._news.set()

    async def until(self, event: str) -> tuple[object, ...]:
        """The first that it says of an event."""
        async with asyncio.timeout(20):
            while True:
                for said in self.said:
                    if said[0] == event:
                        return said
                self._news.clear()
                await self._news.wait()


async def test_one_of_two_has_it_and_the_key_is_the_originals(connected: Connecting) -> None:
    async with connected() as one, connected() as two:
        lock, original = ExclusiveLock("nightly", one), Original(two)
        assert await lock.acquire()
        assert is_held(lock)
        assert not await original.acquire()
        assert not await ExclusiveLock("nightly", two).acquire()
        assert not await lock.acquire()
        assert await two.get(KEY) == lock.contents
        assert 2000 < await two.pttl(KEY) <= 3000
        await lock.release()
        assert not is_held(lock)
        assert await original.acquire()
        assert not await lock.acquire()
        await original.release()
        assert await lock.acquire()
        await lock.release()


async def test_it_is_refreshed_and_says_what_happens(connected: Connecting) -> None:
    async with connected() as client:
        lock = ExclusiveLock("nightly", client, lock_ttl=30, lock_refresh=0.05)
        heard = Heard(lock)
        assert await lock.acquire()
        await client.pexpire(KEY, 5000)
        assert await heard.until("refreshed") == ("refreshed", KEY, 30.0)
        assert await client.pttl(KEY) > 20_000
        await lock.release()
        await lock.release()
        kinds = [said[0] for said in heard.said]
        assert kinds[0] == "acquired"
        assert kinds[-1] == "released"
        assert kinds.count("acquired") == kinds.count("released") == 1
        assert "error" not in kinds


async def test_another_holders_key_is_neither_refreshed_nor_deleted(connected: Connecting) -> None:
    async with connected() as one, connected() as two:
        lock = ExclusiveLock("nightly", one, lock_ttl=30, lock_refresh=0.05)
        heard, original = Heard(lock), Original(two)
        assert await lock.acquire()
        await two.delete(KEY)  # as if it had expired
        assert await original.acquire()
        _, error = await heard.until("error")
        assert isinstance(error, LeaseLost)
        assert not lock.held
        await lock.release()
        assert await two.get(KEY) == b"1"
        assert await two.pttl(KEY) <= 3000
        assert "released" not in [said[0] for said in heard.said]


async def test_a_release_that_comes_too_late_leaves_the_next_holder_alone(
    connected: Connecting,
) -> None:
    async with connected() as one, connected() as two:
        lock = ExclusiveLock("nightly", one)
        assert await lock.acquire()
        await two.delete(KEY)
        assert await Original(two).acquire()
        await lock.release()
        assert await two.get(KEY) == b"1"


async def test_anyone_may_look(connected: Connecting) -> None:
    async with connected() as one, connected() as two:
        lock = ExclusiveLock("nightly", one, lock_contents="worker 7")
        assert await lock.inspect() is None
        assert await lock.acquire()
        found = await ExclusiveLock("nightly", two).inspect()
        assert found is not None
        assert found.contents == b"worker 7"
        assert found.ttl is not None
        assert 2 < found.ttl <= 3
        await lock.release()
        await two.set(KEY, "for ever")
        assert await lock.inspect() == Inspection(b"for ever", None)


async def test_a_client_that_decodes_serves_as_well(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        lock = ExclusiveLock("nightly", client)
        assert await lock.acquire()
        found = await lock.inspect()
        assert found is not None
        assert found.contents == lock.contents
        await lock.release()
        assert await lock.inspect() is None


@pytest.mark.parametrize(
    ("prefix", "name", "key"),
    [
        ("exclusive-lock", 'some app "x"', "exclusive-lock:some-app-x-"),
        ("my app", "a_b-c.d", "my-app:a_b-c-d"),
        ("p", "größe", "p:gr-e"),
    ],
)
def test_names_become_keys_as_the_originals_do(prefix: str, name: str, key: str) -> None:
    assert ExclusiveLock(name, redis.asyncio.Redis(), key_prefix=prefix).key == key


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lock_ttl": 1.4, "lock_refresh": 1.0}, "at least 0.5 s longer"),
        ({"lock_ttl": -1}, "lock_ttl"),
        ({"lock_refresh": 0}, "more than 0 s"),
        ({"name": ""}, "not empty"),
        ({"key_prefix": None}, "key_prefix is a str"),
        ({"lock_contents": 1}, "lock_contents is a str or bytes"),
        ({"redis": "redis://:secret@localhost"}, "not a builtins.str"),
        ({"redis": redis.Redis()}, "not a redis.client.Redis; for threads"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        ExclusiveLock(**{"name": "nightly", "redis": redis.asyncio.Redis(), **arguments})


def test_what_would_never_be_called_is_no_listener() -> None:
    lock: Any = ExclusiveLock("nightly", redis.asyncio.Redis())

    async def listen(*_: object) -> None: ...

    with pytest.raises(InvalidArgument, match="not 'aquired'"):
        lock.on("aquired", print)
    for listener in (listen, None):
        with pytest.raises(InvalidArgument, match="a listener is a function"):
            lock.on("acquired", listener)


async def test_what_redis_refuses_is_told_without_asking_whether_it_is_there(
    connected: Connecting,
) -> None:
    async with connected() as client:
        await client.hset(KEY, "of another", "type")
        with pytest.raises(EngineError, match="WRONGTYPE") as told:
            await ExclusiveLock("nightly", client).inspect()
        assert "is Redis there" not in str(told.value)


async def test_a_wrong_password_is_told_without_asking_either() -> None:
    with a_redis() as url:
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.config_set("requirepass", "right")
        once = Retry(NoBackoff(), 0)
        async with redis.asyncio.Redis.from_url(url, password="wrong", retry=once) as client:
            with pytest.raises(EngineError, match="password") as told:
                await ExclusiveLock("nightly", client).acquire()
            assert "is Redis there" not in str(told.value)


async def test_a_cancelled_acquire_leaves_nothing(connected: Connecting) -> None:
    async with connected() as one, connected() as two:
        await one.ping()
        for turns in range(12):
            lock = ExclusiveLock("nightly", one)
            acquiring = asyncio.create_task(lock.acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            acquiring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acquiring
            await lock.release()
            assert not lock.held
            assert await two.get(KEY) is None


async def test_a_redis_that_is_gone_is_told_and_ends_the_hold() -> None:
    with ExitStack() as stack:
        url = stack.enter_context(a_redis())
        async with redis.asyncio.Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as client:
            lock = ExclusiveLock("nightly", client, lock_ttl=30, lock_refresh=0.05)
            heard = Heard(lock)
            assert await lock.acquire()
            stack.close()
            _, error = await heard.until("error")
            assert isinstance(error, EngineError)
            assert not lock.held
            with pytest.raises(EngineError, match="is Redis there"):
                await lock.acquire()
            with pytest.raises(EngineError, match="is Redis there"):
                await lock.inspect()
            await lock.release()


async def test_a_redis_that_does_not_answer_ends_the_hold_before_the_key_can_expire(
    connected: Connecting,
) -> None:
    async with connected() as one, connected() as two:
        lock = ExclusiveLock("nightly", one, lock_ttl=1.5, lock_refresh=0.2)
        heard = Heard(lock)
        assert await lock.acquire()
        await two.client_pause(2500)
        _, error = await heard.until("error")
        assert isinstance(error, LeaseLost)
        assert "confirm" in str(error)
        assert not lock.held
        await two.client_unpause()
        await lock.release()
