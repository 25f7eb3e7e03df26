"""The shared configuration: the last value published, and every newer one."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from typing import Any

import pytest

import tenure
from tenure.errors import InvalidArgument, SemaphoreNotFound
from tenure.recipes import SharedConfig, dataclass_codec, json_codec
from tests.primitives.helpers import World, turns


@dataclass(frozen=True)
class Limits:
    workers: int
    names: list[str]


class Text:
    """Plain text; no text at all is no bytes."""

    def encode(self, value: str, /) -> bytes:
        return value.encode()

    def decode(self, data: bytes, /) -> str:
        return data.decode()


async def test_what_one_publishes_another_gets(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        here: SharedConfig[Any] = SharedConfig(client, "limits")
        there: SharedConfig[Any] = SharedConfig(other, "limits")
        assert repr(here) == "<SharedConfig 'limits'>"
        assert await there.get() is None
        values: list[Any] = [{"workers": 4, "é": [1.5, None, True]}, [], 0, "text"]
        for value in values:
            await here.set(value)
            assert await there.get() == value


async def test_a_subscriber_sees_the_value_now_and_every_newer_one(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        here, there = SharedConfig[int](client, "workers"), SharedConfig[int](other, "workers")
        async with here.watch() as values:
            assert await anext(values) is None
            for number in (4, 8):
                await there.set(number)
                assert await anext(values) == number


async def test_an_equal_value_wakes_nobody(world: World) -> None:
    async with world.client() as client:
        config: SharedConfig[dict[str, int]] = SharedConfig(client, "c")
        await config.set({"a": 1, "b": 2})
        async with config.watch() as values:
            await anext(values)
            next_one = asyncio.ensure_future(anext(values))
            await config.set({"b": 2, "a": 1})
            await turns()
            assert not next_one.done()
            await config.set({"a": 1, "b": 3})
            assert await next_one == {"a": 1, "b": 3}


async def test_values_may_be_of_a_dataclass(world: World) -> None:
    async with world.client() as client:
        config = SharedConfig(client, "limits", codec=dataclass_codec(Limits))
        await config.set(Limits(4, ["a"]))
        assert await config.get() == Limits(4, ["a"])
        raw = await client.semaphore("limits").describe()
        assert raw.data == b'{"names":["a"],"workers":4}'


async def test_values_may_have_any_codec(world: World) -> None:
    async with world.client() as client:
        config = SharedConfig(client, "motd", codec=Text())
        await config.set("good day")
        assert (await client.semaphore("motd").describe()).data == b"good day"
        assert await config.get() == "good day"
        with pytest.raises(InvalidArgument, match=r"'motd' on /default was encoded to no bytes"):
            await config.set("")
        assert await config.get() == "good day"


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), {"a": 1, 2: 3}])
async def test_what_cannot_be_encoded_is_refused(world: World, value: object) -> None:
    async with world.client() as client:
        config: SharedConfig[object] = SharedConfig(client, "c")
        with pytest.raises(InvalidArgument, match="'c' on /default cannot be encoded") as raised:
            await config.set(value)
        assert (raised.value.node, raised.value.name) == ("/default", "c")
        assert isinstance(raised.value.__cause__, TypeError | ValueError)
        assert await config.get() is None


async def test_what_is_too_long_is_refused(url: str) -> None:
    async with tenure.connect(url) as client:
        config: SharedConfig[str] = SharedConfig(client, "c")
        await config.set("x" * (2**20 - 2))  # with its quotation marks
        with pytest.raises(InvalidArgument, match=r"at most 1048576 bytes, this has 1048577"):
            await config.set("x" * (2**20 - 1))


async def test_what_cannot_be_decoded_is_told_and_the_watch_goes_on(world: World) -> None:
    async with world.client() as client:
        config = SharedConfig(client, "limits", codec=dataclass_codec(Limits))
        seen: list[Limits | None] = []
        async with config.watch() as values:
            await anext(values)
            for garbage in (b"{", b'{"workers": 4}', b"[]", b"\xff"):
                await client.semaphore("limits").update(garbage)
                with pytest.raises(InvalidArgument, match="'limits' on /default cannot be decoded"):
                    await anext(values)
                with pytest.raises(InvalidArgument, match="published with another codec"):
                    await config.get()
            await config.set(Limits(1, []))
            async for value in values:
                seen.append(value)
                break
        assert seen == [Limits(1, [])]


async def test_its_deletion_ends_a_watch(world: World) -> None:
    async with world.client() as client:
        values = SharedConfig[int](client, "c").watch()
        await anext(values)
        await client.semaphore("c").delete()
        with pytest.raises(SemaphoreNotFound):
            await anext(values)
        with pytest.raises(StopAsyncIteration):
            await anext(values)


async def test_something_else_of_that_name_is_told_apart(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("pool").create(4, b"its own")
        pool: SharedConfig[int] = SharedConfig(client, "pool")
        for act in (pool.get, lambda: pool.set(1), lambda: anext(pool.watch())):
            with pytest.raises(InvalidArgument, match=r"'pool' on /default is .* limit 4"):
                await act()
        assert (await client.semaphore("pool").describe()).data == b"its own"
        lock: SharedConfig[int] = SharedConfig(client, "lock")
        async with client.mutex("lock").lock():
            for act in (lock.get, lambda: lock.set(1), lambda: anext(lock.watch())):
                with pytest.raises(InvalidArgument, match="'lock' on /default"):
                    await act()


async def test_a_watch_that_could_not_begin_has_ended(world: World) -> None:
    async with world.client() as client:
        await client.semaphore("pool").create(4)
        values = SharedConfig[int](client, "pool").watch()
        with pytest.raises(InvalidArgument):
            await anext(values)
        with pytest.raises(StopAsyncIteration):
            await anext(values)


async def test_one_that_is_closed_before_it_began_sets_nothing_up(world: World) -> None:
    async with world.client() as client:
        async with SharedConfig[int](client, "c").watch() as values:
            pass
        assert [value async for value in values] == []
        with pytest.raises(SemaphoreNotFound):
            await client.semaphore("c").describe()


async def test_a_break_leaks_nothing(world: World) -> None:
    async with world.client() as client, client.session() as session:
        config: SharedConfig[int] = SharedConfig(session, "c")
        async for _ in config.watch():
            break
        gc.collect()
        assert session._core.watchers == {}
        async with config.watch() as values:
            async for _ in values:
                break
        assert session._core.watchers == {}


async def test_read_modify_write_is_safe_under_a_mutex(url: str) -> None:
    async with tenure.connect(url) as one, tenure.connect(url) as two:

        async def add(client: tenure.Client) -> None:
            config: SharedConfig[int] = SharedConfig(client, "counter", codec=json_codec)
            for _ in range(10):
                async with client.mutex("counter writer").lock():
                    await config.set((await config.get() or 0) + 1)

        await asyncio.gather(add(one), add(two))
        assert await SharedConfig[int](one, "counter").get() == 20
