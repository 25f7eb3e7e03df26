"""Permits whose store fails: late, for long, in strange ways, or by losing them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry as RedisRetry
from redis.backoff import NoBackoff

import tenure
from tenure.clock import SystemClock
from tenure.errors import LeaseLost, LeaseReleased
from tenure.interop.effect import (
    BackingError,
    ClientBacking,
    DistributedSemaphore,
    LockLost,
    Permits,
    RedisBacking,
)
from tenure.interop.effect import permits as permits_module
from tests.interop.conftest import Connecting
from tests.interop.test_effect import done, forever, is_held
from tests.interop.test_interrupted import a_place, cancelled, hold


class Broken:
    """A backing that fails in ways of its own: each of the answers is returned, or raised."""

    def __init__(self, *, refresh: BaseException | bool = True, release: object = 1) -> None:
        self._refresh = refresh
        self._release = release

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        return True

    async def refresh(self, key: str, holder_id: str, ttl: float, limit: int, permits: int) -> bool:
        if isinstance(self._refresh, BaseException):
            raise self._refresh
        return self._refresh

    async def release(self, key: str, holder_id: str, permits: int) -> int:
        if isinstance(self._release, BaseException):
            raise self._release
        return 1

    async def get_count(self, key: str, ttl: float) -> int:
        return 0


class Away(Broken):
    """A backing that cannot be reached, until it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.back = False

    async def try_acquire(
        self, key: str, holder_id: str, ttl: float, limit: int, permits: int
    ) -> bool:
        self.asked += 1
        if not self.back:
            raise BackingError("try_acquire", "away", name=key)
        return True

    refresh = try_acquire


class Jumping:
    """The machine's clock, after it has been suspended for a while."""

    virtual = False

    def __init__(self) -> None:
        self.suspended = 0.0

    def now(self) -> float:
        return SystemClock.now() + self.suspended

    def wall(self) -> float:
        return SystemClock.wall() + self.suspended


async def until(what: Callable[[], bool]) -> None:
    """Nobody is told of it."""
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_take_that_the_client_sends_twice_succeeds() -> None:
    async with a_place() as place:
        retry = RedisRetry(NoBackoff(), 1)
        async with redis.asyncio.Redis(unix_socket_path=place.proxy.path, retry=retry) as client:
            semaphore = DistributedSemaphore("interrupted", RedisBacking(client), ttl=3600)
            await semaphore.current_count()
            place.proxy.swallows = True
            taking = asyncio.create_task(semaphore.with_permits(1, done, identifier="me"))
            await place.proxy.lose_an_answer()
            assert await asyncio.wait_for(taking, 20) == "done"
        assert await place.held() == 0


async def test_the_same_identifier_is_not_the_same_acquisition(connected: Connecting) -> None:
    async with connected() as client:
        semaphore = DistributedSemaphore("pool", RedisBacking(client))
        once, again = (take(1, identifier="me") for take in (semaphore.take, semaphore.try_take))
        async with once, again as taken:
            assert taken is None


async def test_a_block_of_lost_permits_ends_even_if_the_store_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permits_module, "UNDO_TIMEOUT", 0.05)
    async with a_place() as place:
        semaphore = DistributedSemaphore(
            "interrupted", RedisBacking(place.client), ttl=0.6, refresh_interval=0.05
        )
        begun = asyncio.Event()
        working = asyncio.create_task(semaphore.with_permits(1, lambda: forever(begun)))
        await begun.wait()
        place.proxy.swallows = True
        with pytest.raises(LockLost, match="not confirmed"):
            await asyncio.wait_for(working, 10)
        await place.proxy.lose_an_answer()
        await semaphore.aclose()


async def test_a_block_ends_when_its_permits_have_expired_while_they_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permits_module, "UNDO_TIMEOUT", 0.05)
    async with a_place() as place:
        semaphore = DistributedSemaphore("interrupted", RedisBacking(place.client), ttl=0.6)
        async with asyncio.timeout(10):
            async with semaphore.take(1):
                place.proxy.swallows = True
        await place.proxy.lose_an_answer()
        await semaphore.aclose()


async def test_what_no_backing_should_raise_is_a_loss_too() -> None:
    semaphore = DistributedSemaphore("pool", Broken(refresh=KeyError("strange")))
    with pytest.raises(LockLost, match="could not be refreshed: 'strange'") as told:
        await semaphore.with_permits(1, forever)
    assert isinstance(told.value.__cause__, KeyError)


async def test_what_no_backing_should_raise_when_it_is_given_back_is_not_hidden() -> None:
    semaphore = DistributedSemaphore("pool", Broken(release=KeyError("strange")))
    with pytest.raises(KeyError, match="strange"):
        await semaphore.with_permits(1, done)


async def test_whoever_waits_for_a_loss_is_told_of_the_end() -> None:
    async with DistributedSemaphore("pool", Broken()).take(1) as permits:
        waiting = asyncio.create_task(permits.wait_lost())
        await asyncio.sleep(0)
    with pytest.raises(LeaseReleased, match="were released"):
        await waiting


async def test_a_take_that_is_cancelled_asks_no_more_when_the_store_is_back() -> None:
    away = Away()
    semaphore = DistributedSemaphore(
        "pool", away, backing_failure_retry_policy=lambda: itertools.repeat(0.01)
    )
    taking = asyncio.create_task(semaphore.with_permits(1, done))
    await until(lambda: away.asked >= 3)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    asked = away.asked
    away.back = True
    await semaphore.aclose()
    assert away.asked == asked


async def test_a_take_that_waits_for_what_is_undone_first_can_be_cancelled_at_once() -> None:
    async with a_place() as place:
        await place.mine.current_count()
        place.proxy.swallows = True
        first = asyncio.create_task(hold(place.mine, asyncio.Event()))
        await until(lambda: bool(place.mine._endings._tasks))
        first.cancel()
        second = asyncio.create_task(hold(place.mine, asyncio.Event()))
        await until(lambda: bool(place.mine._endings._undoing))
        await asyncio.sleep(0)
        begun = len(place.mine._endings._tasks)
        await cancelled(second)
        assert len(place.mine._endings._tasks) == begun
        await place.proxy.lose_an_answer()
        with contextlib.suppress(asyncio.CancelledError):
            await first


async def test_permits_do_not_outlive_a_suspended_machine() -> None:
    clock = Jumping()
    semaphore = DistributedSemaphore("pool", Broken(), ttl=3600, clock=clock)

    async def work() -> None:
        async with semaphore.take(1) as permits:
            await asyncio.sleep(0)
            clock.suspended = 3600.0
            assert not permits.held
            await forever()

    with pytest.raises(LockLost, match="not confirmed"):
        await asyncio.wait_for(work(), 20)


async def test_permits_of_an_engine_are_lost_when_their_lease_is(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    async with tenure.connect(url) as client, tenure.connect(url) as admin:
        semaphore = DistributedSemaphore("pool", ClientBacking(client), ttl=3600)
        taken: Permits | None = None

        async def work() -> None:
            nonlocal taken
            async with semaphore.take(1) as taken:
                assert is_held(taken)
                await admin.semaphore("pool").delete(force=True)
                await forever()

        with pytest.raises(LockLost):
            await asyncio.wait_for(work(), 20)
        assert taken is not None
        assert isinstance(taken.loss, LeaseLost)


async def test_a_holder_of_an_engine_does_not_lose_sight_of_what_it_has(tmp_path: Path) -> None:
    async with tenure.connect(f"memory://{tmp_path.name}") as client:
        backing = ClientBacking(client)
        assert await backing.try_acquire("pool", "me", 30.0, 2, 1)
        assert not await backing.try_acquire("pool", "me", 30.0, 2, 1)
        assert await backing.get_count("pool", 30.0) == 1
        assert await backing.release("pool", "me", 1) == 1
        assert await backing.get_count("pool", 30.0) == 0
        await backing.wait_lost("pool", "me")
        assert not backing.is_held("pool", "me")
