"""Rates, as a program sees them: waits, timeouts, cancellations and what is refunded."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tenure._client.client import Client
from tenure.errors import (
    AcquireTimeout,
    EngineUnavailable,
    InvalidArgument,
    NodeNotFound,
    RateExceeded,
    Unsupported,
)
from tenure.model import RateDescription
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns
from tests.primitives.slow import SlowEngine


async def test_takes_wait_until_the_window_has_room(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, world.client() as other:
        here, there = (each.rate("api", limit=10, per=60) for each in (client, other))
        began = clock.now()
        taken = await here.take(10)
        assert (taken.count, taken.waited, taken.rate) == (10, 0, here)
        late = await there.take(4)
        assert 60 <= clock.now() - began <= 60.6
        assert late.waited == pytest.approx(clock.now() - began)


async def test_takes_are_granted_in_the_order_of_their_calls(world: World) -> None:
    granted: list[int] = []
    async with world.client() as client:
        api = client.rate("api", limit=10, per=60)

        async def take(count: int) -> None:
            await api.take(count)
            granted.append(count)

        async with asyncio.TaskGroup() as tasks:
            for count in (8, 10, 1, 2):
                tasks.create_task(take(count))
    assert granted == [8, 10, 1, 2]


async def test_a_take_that_cannot_be_granted_in_time_raises_at_once(
    world: World, clock: VirtualClock
) -> None:
    async with world.client() as client:
        api = client.rate("api", limit=100, per=60)
        await api.take(100)
        began = clock.now()
        with pytest.raises(RateExceeded) as caught:
            await api.take(2, timeout=5)
        assert clock.now() == began
        assert isinstance(caught.value, AcquireTimeout)
        assert caught.value.retry_after == pytest.approx(60, rel=0.02)
        assert (caught.value.node, caught.value.name) == ("/default", "api")
        assert str(caught.value) == (
            f"rate 'api' on /default: 2 of 100 per 60 s not granted within 5 s: it would take "
            f"{caught.value.retry_after:.3f} s. Try again after that time"
        )
        await asyncio.sleep(caught.value.retry_after)
        assert await api.try_take(2)


async def test_try_take_does_not_wait(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        api = client.rate("api", limit=2, per=60)
        began = clock.now()
        assert await api.try_take()
        assert await api.try_take()
        assert await api.try_take() is None
        assert clock.now() == began


async def test_a_cancelled_take_gives_its_tokens_back(world: World) -> None:
    async with world.client() as client:
        api = client.rate("api", limit=10, per=60)
        await api.take(5)
        waiting = asyncio.create_task(api.take(10))
        await asyncio.sleep(1)
        assert await api.try_take() is None  # it does not overtake
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await turns()
        assert await api.try_take(5)


async def test_a_take_that_is_cancelled_before_the_answer_gives_its_tokens_back(
    world: World,
) -> None:
    client, engine = world.slow()
    async with client:
        api = client.rate("api", limit=10, per=60)
        await api.take(1)
        engine.back.flowing = False
        waiting = asyncio.create_task(api.take(9))
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.mend()
        await turns()
        assert (await api.peek()).free == 9


async def test_a_client_that_is_closed_waits_until_tokens_are_refunded(world: World) -> None:
    async with world.client() as other:
        client, _ = world.slow()
        async with client:
            await client.rate("api", limit=10, per=60).take(1)
            waiting = asyncio.create_task(client.rate("api", limit=10, per=60).take(10))
            await asyncio.sleep(1)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert (await other.rate("api", limit=10, per=60).peek()).free == 9


async def test_tokens_that_were_not_used_are_refunded(world: World, clock: VirtualClock) -> None:
    async with world.client() as client:
        api = client.rate("api", limit=100, per=60)
        taken = await api.take(80)
        await taken.refund(30)
        assert taken.count == 50
        seen = await api.peek(60)
        assert seen.wait == pytest.approx(60, rel=0.02)
        assert seen == RateDescription(50, seen.wait, 100, 60, 100)
        await taken.refund(0)
        for wrong in (51, -1, 1.5, True):
            with pytest.raises(InvalidArgument, match="a take of 50 tokens cannot refund"):
                await taken.refund(wrong)  # type: ignore[arg-type]
        await asyncio.sleep(100)
        await api.take(100)
        await taken.refund(50)  # too late to have an effect
        assert (await api.peek()).free == 0


async def test_tokens_that_cannot_be_given_back_stay_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow()
    async with client:
        taken = await client.rate("api", limit=10, per=60).take(5)
        engine.fail("rate", EngineUnavailable("the store is down"))
        with caplog.at_level(logging.WARNING, "tenure"):
            await taken.refund(2)
        assert [each.getMessage() for each in caplog.records] == [
            "tokens were not refunded: node=/default name='api' count=2 error=the store is down"
        ]
        assert taken.count == 3
        assert (await client.rate("api", limit=10, per=60).peek()).free == 5


async def test_a_rate_with_other_values_is_refused_until_it_is_resized(world: World) -> None:
    async with world.client() as client:
        api, other = client.rate("api", limit=10, per=60), client.rate("api", limit=20, per=60)
        await api.take(10)
        with pytest.raises(InvalidArgument) as caught:
            await other.take(1)
        assert str(caught.value) == (
            "rate 'api' on /default is 10 per 60 s, and is used here as 20 per 60 s. Use the same "
            "values everywhere, or replace them with rate.resize(...)"
        )
        await api.resize(limit=20, per=60)
        assert (api.limit, api.per, api.burst) == (20, 60, 20)
        assert await other.try_take(10)
        assert (await api.peek()).free == 0
        with pytest.raises(InvalidArgument):
            await api.resize(limit=0, per=60)
        assert api.limit == 20


async def test_more_tokens_than_the_burst_are_refused(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match=r"11 tokens can never be granted.*limit is 10"):
            await client.rate("api", limit=10, per=60).take(11)
        with pytest.raises(InvalidArgument, match=r"6 tokens can never be granted.*burst is 5"):
            await client.rate("api", limit=10, per=60, burst=5).try_take(6)
        for count in (0, -1, 1.5, True):
            with pytest.raises(InvalidArgument, match="a count is a whole number"):
                await client.rate("api", limit=10, per=60).peek(count)  # type: ignore[arg-type]


async def test_a_rate_is_on_a_node(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(NodeNotFound):
            await client.rate("api", limit=1, per=60, path="/billing").take()
        await client.create_node("/billing")
        assert await client.rate("api", limit=1, per=60, path="/billing").try_take()
        assert await client.rate("api", limit=1, per=60).try_take()
        with pytest.raises(InvalidArgument):
            client.rate("", limit=1, per=60)
        with pytest.raises(InvalidArgument):
            client.rate("api", limit=1, per=60, path="billing")
        assert repr(client.rate("api", limit=1, per=60)) == "<Rate 'api': 1 per 60 s>"


async def test_unknown_arguments_are_named(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(TypeError, match="period"):
            client.rate("api", limit=1, per=60, period=3)  # type: ignore[arg-type]
        api = client.rate("api", limit=1, per=60)
        for call in (api.take, api.try_take):
            with pytest.raises(TypeError, match="tokens"):
                await call(tokens=3)  # type: ignore[arg-type]
        taken = await api.take()
        assert repr(taken) == "<Taken: 1 of <Rate 'api': 1 per 60 s>>"


async def test_habits_of_other_limiters_are_answered(world: World) -> None:
    async with world.client() as client:
        api = client.rate("api", limit=1, per=60)
        with pytest.raises(AttributeError, match=r"a rate has no acquire: write await rate\.take"):
            api.acquire  # type: ignore[attr-defined]  # noqa: B018
        with pytest.raises(TypeError, match=r"try_take\(\) does not wait|blocking"):
            await api.take(blocking=False)  # type: ignore[arg-type]


async def test_a_silent_store_is_reported_within_the_answer_timeout(
    world: World, clock: VirtualClock
) -> None:
    client, engine = world.slow()
    async with client:
        api = client.rate("api", limit=10, per=60)
        await api.take(1)
        engine.cut()
        began = clock.now()
        with pytest.raises(EngineUnavailable, match="rate 'api' on /default: no answer within 5 s"):
            await api.take(1, timeout=60)
        assert clock.now() - began == pytest.approx(5)
        engine.mend()


async def test_too_many_reservations_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.core.rates.MOST_BINS", 2)
    async with world.client() as client:
        api = client.rate("api", limit=1, per=60)
        await api.take()
        waiting = asyncio.create_task(api.take())
        await turns()
        with pytest.raises(RateExceeded, match="not granted because too many takes wait") as caught:
            await api.take()
        assert caught.value.retry_after > 100
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_decorated_calls_begin_at_the_rate(world: World, clock: VirtualClock) -> None:
    began = clock.now()
    times: list[float] = []
    async with world.client() as client:

        @client.rate_limited("api {user}", limit=2, per=60)
        async def ask(user: str) -> str:
            times.append(clock.now() - began)
            return user

        assert [await ask(each) for each in ("ann", "ann", "bob", "ann")] == [
            *"ann ann bob ann".split()
        ]
        assert times[:3] == [0, 0, 0]
        assert 60 <= times[3] <= 61


async def test_decorated_calls_raise_or_are_skipped(world: World) -> None:
    async with world.client() as client:

        async def ask() -> int:
            return 1

        raising = client.rate_limited("a", limit=2, per=60, count=2, wait=1)(ask)
        assert await raising() == 1
        with pytest.raises(RateExceeded):
            await raising()
        skipping = client.rate_limited("b", limit=1, per=60, skip=True)(ask)
        assert [await skipping(), await skipping()] == [1, None]
        patient = client.rate_limited("c", limit=1, per=60, skip=True, wait=1)(ask)
        assert [await patient(), await patient()] == [1, None]
        with pytest.raises(InvalidArgument):
            client.rate_limited("d", limit=1, per=60, count=2)
        with pytest.raises(InvalidArgument):
            client.rate_limited("d", limit=1, per=0)


async def test_an_engine_without_rates_says_which_has_them(world: World) -> None:
    class Without(SlowEngine):
        rate = SlowEngine.__mro__[1].rate  # type: ignore[attr-defined]  # the default

    _, engine = world.slow()
    async with Client(Without(engine.inner), world.clock) as client:
        with pytest.raises(Unsupported, match="Use memory://") as caught:
            await client.rate("api", limit=1, per=60).take()
        assert caught.value.name == "api"
