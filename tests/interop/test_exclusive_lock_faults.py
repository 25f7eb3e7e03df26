"""An exclusive lock whose answers come late or not at all, and what is sent twice because of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff

from tenure.errors import EngineError, LeaseLost, Misuse
from tenure.interop.exclusive_lock import ExclusiveLock
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import a_folder, shared
from tests.interop.test_effect_faults import Jumping
from tests.interop.test_exclusive_lock import Heard, is_held
from tests.interop.test_interrupted import is_late

KEY = "exclusive-lock:faults"
ONCE = Retry(NoBackoff(), 0)


@dataclass
class Place:
    """A client behind a bad line, and another one on a good one."""

    proxy: Proxy
    client: redis.asyncio.Redis
    eye: redis.asyncio.Redis

    def lock(self, **how: Any) -> ExclusiveLock:
        return ExclusiveLock("faults", self.client, **{"lock_ttl": 3600, **how})

    async def contents(self) -> bytes | None:
        found: Any = await self.eye.get(KEY)
        return None if found is None else bytes(found)


@asynccontextmanager
async def a_place(*, patience: float | None = None, retry: Retry = ONCE) -> AsyncIterator[Place]:
    """With a client that waits so long for an answer, and perhaps sends again what failed."""
    server = shared()
    with a_folder() as folder:
        async with (
            Proxy(server.socket, str(folder / "proxy")) as proxy,
            redis.asyncio.Redis(
                unix_socket_path=proxy.path, socket_timeout=patience, retry=retry
            ) as client,
            redis.asyncio.Redis(unix_socket_path=server.socket) as eye,
        ):
            await eye.delete(KEY)
            await client.ping()  # connected
            yield Place(proxy, client, eye)
            await eye.delete(KEY)


async def test_a_second_acquire_that_fails_does_not_give_back_what_the_first_has() -> None:
    async with a_place(patience=0.5) as place:
        lock = place.lock()
        assert await lock.acquire()
        place.proxy.delay = 1.0
        assert not await lock.acquire()
        assert await place.contents() == lock.contents
        place.proxy.delay = 0.0
        await lock.release()


async def test_of_two_acquires_at_once_one_that_fails_leaves_the_other_its_key() -> None:
    async with a_place(patience=0.5) as place:
        lock = place.lock()
        place.proxy.delay = 1.0
        first = asyncio.create_task(lock.acquire())
        second = asyncio.create_task(lock.acquire())
        await is_late(place.proxy)
        with pytest.raises(EngineError):
            await first
        assert await second
        assert await place.contents() == lock.contents
        await lock.release()


async def test_an_acquire_that_the_client_sends_twice_succeeds() -> None:
    async with a_place(retry=Retry(NoBackoff(), 1)) as place:
        lock = place.lock()
        place.proxy.swallows = True
        acquiring = asyncio.create_task(lock.acquire())
        await place.proxy.lose_an_answer()
        assert await acquiring
        assert await place.contents() == lock.contents
        await lock.release()
        assert await place.contents() is None


async def test_contents_that_were_given_may_be_anothers() -> None:
    async with a_place() as place:
        lock = place.lock(lock_contents="1")
        assert await lock.acquire()
        assert not await place.lock(lock_contents="1").acquire()
        await lock.release()
        await place.eye.hset(KEY, "of another", "type")
        assert not await place.lock().acquire()


@pytest.mark.parametrize("contents", [None, "mine", ""], ids=["made", "given", "empty"])
async def test_a_late_release_leaves_the_next_acquisition_alone(contents: str | None) -> None:
    async with a_place(retry=Retry(ConstantBackoff(0.3), 1)) as place:
        lock = place.lock(lock_contents=contents)
        assert await lock.acquire()
        place.proxy.swallows = True
        releasing = asyncio.create_task(lock.release())
        await place.proxy.lose_an_answer()  # the client will send it once more
        assert await place.contents() is None
        assert await lock.acquire()
        await releasing
        assert await place.contents() == lock.contents
        assert is_held(lock)
        await lock.release()


async def test_an_answer_that_comes_too_late_is_no_proof() -> None:
    async with a_place() as place:
        lock = place.lock(lock_ttl=0.6, lock_refresh=0.1)
        place.proxy.delay = 0.7
        acquiring = asyncio.create_task(lock.acquire())
        await is_late(place.proxy)
        assert not await acquiring  # it has expired meanwhile
        assert not is_held(lock)
        place.proxy.delay = 0.7
        acquiring = asyncio.create_task(lock.acquire())
        await is_late(place.proxy)
        await place.eye.persist(KEY)
        assert await acquiring
        assert is_held(lock)
        await lock.release()


async def test_a_lock_that_cannot_be_confirmed_is_given_back() -> None:
    async with a_place() as place:
        lock = place.lock(lock_ttl=1.0, lock_refresh=0.1)
        heard = Heard(lock)
        assert await lock.acquire()
        place.proxy.delay = 1.5
        _, error = await heard.until("error")
        assert isinstance(error, LeaseLost)
        await place.eye.persist(KEY)  # it would stay
        place.proxy.delay = 0.0
        await heard.until("released")
        assert await place.contents() is None


async def test_what_cannot_be_given_back_after_an_error_is_told_too() -> None:
    async with a_place() as place:
        lock = place.lock(lock_refresh=0.05)
        heard = Heard(lock)
        assert await lock.acquire()
        place.proxy.refuses = True
        place.proxy.cut()
        await heard.until("error")
        await lock._endings.wait()
        errors = [str(said[1]) for said in heard.said if said[0] == "error"]
        assert [" ".join(error.split()[3:6]) for error in errors] == [
            "cannot be refreshed:",
            "cannot be released:",
        ]


async def test_what_no_client_should_raise_ends_the_hold_as_well() -> None:
    async with a_place() as place:
        lock = place.lock(lock_refresh=0.05)
        heard = Heard(lock)
        assert await lock.acquire()

        async def broken(*_: object) -> None:
            raise KeyError("broken")

        lock._redis = type("Broken", (), {"eval": staticmethod(broken)})
        _, error = await heard.until("error")
        assert isinstance(error, KeyError)
        assert not is_held(lock)


@pytest.mark.parametrize("times", [(3.0, 1.0), (3.0, 2.5), (12.0, 11.5), (600.0, 599.5)])
def test_a_refresh_comes_before_the_lock_is_not_held_any_more(times: tuple[float, float]) -> None:
    ttl, interval = times
    lock = ExclusiveLock("late", redis.asyncio.Redis(), lock_ttl=ttl, lock_refresh=interval)
    assert interval + 0.25 <= lock._life < ttl


async def test_a_lock_moves_to_another_loop_when_its_own_is_closed() -> None:
    async with a_place() as place:
        lock = place.lock()
        assert await lock.acquire()

        def elsewhere() -> None:
            with pytest.raises(Misuse, match="another event loop"):
                asyncio.run(lock.release())

        await asyncio.to_thread(elsewhere)
        await lock.release()


def test_a_lock_that_a_loop_left_held_can_be_released_and_acquired_in_the_next_one() -> None:
    locks: list[ExclusiveLock] = []

    async def leave() -> None:
        async with redis.asyncio.Redis(unix_socket_path=shared().socket) as client:
            locks[:] = [ExclusiveLock("faults", client, lock_ttl=3600)]
            assert await locks[0].acquire()

    async def find(*, release: bool) -> None:
        lock = locks[0]
        async with lock._redis as client:
            if release:
                await lock.release()
                assert await client.get(KEY) is None
            else:
                await client.delete(KEY)
            assert await lock.acquire()
            await lock.release()

    for release in (True, False):
        asyncio.run(leave())
        asyncio.run(find(release=release))


@pytest.mark.parametrize("again", ["release", "acquire"])
async def test_a_release_that_failed_can_be_made_good(again: str) -> None:
    async with a_place() as place:
        lock = place.lock()
        heard = Heard(lock)
        assert await lock.acquire()
        place.proxy.refuses = True
        place.proxy.cut()
        with pytest.raises(EngineError, match="cannot be released"):
            await lock.release()
        await lock.release()  # it is not held any more: what fails here is an event
        assert [said[0] for said in heard.said] == ["acquired", "error"]
        with pytest.raises(EngineError, match="cannot be released"):
            await lock.acquire()
        place.proxy.refuses = False
        assert await place.contents() is not None
        if again == "acquire":
            assert await lock.acquire()
            assert await place.contents() == lock.contents
        await lock.release()
        assert await place.contents() is None
        assert heard.said[-1] == ("released", KEY)


async def test_a_lock_does_not_outlive_a_suspended_machine() -> None:
    async with a_place() as place:
        clock = Jumping()
        lock = place.lock(lock_refresh=0.05, clock=clock)
        heard = Heard(lock)
        assert await lock.acquire()
        clock.suspended = 3600.0
        assert not is_held(lock)
        _, error = await heard.until("error")
        assert "did not confirm" in str(error)
        await heard.until("released")
        assert "refreshed" not in [said[0] for said in heard.said]


async def test_a_listener_that_fails_harms_nobody_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_place() as place:
        lock = place.lock(lock_refresh=0.05)
        off = lock.on("acquired", lambda key: 1 / 0)
        heard = Heard(lock)
        assert await lock.acquire()
        assert "listener failed: event=acquired" in caplog.text
        await heard.until("refreshed")
        off()
        off()
        await lock.release()
        assert await lock.acquire()
        assert caplog.text.count("ZeroDivisionError") == 1
        await lock.release()
