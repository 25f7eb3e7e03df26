"""Keys of any bytes, and their names in the store."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tenure.core.rules import check_name
from tenure.engines.contract import Engine
from tenure.engines.memory import MemoryEngine
from tenure.server.dflockd.claims import key_of, readable, stored_name
from tenure.testing import VirtualClock
from tests.server.dflockd.talking import Client, serving

pytestmark = pytest.mark.usefixtures("loop_factory")

_stores = itertools.count()
WHITE = b" \t\r\n"

keys = st.binary(min_size=1, max_size=256).filter(
    lambda key: not any(each in WHITE for each in key)
)
texts = st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")).filter(len)
parts = st.sampled_from([b"%", b"%FF", b"bytes", b"\xff", "é".encode(), b"\xc3", b"a", b"\x00"])
tricky = st.lists(parts, min_size=1, max_size=12).map(b"".join)
any_key = st.one_of(keys, tricky, texts).filter(
    lambda key: len(key) <= 256 and not any(each in WHITE for each in key)
)


def wire(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


@given(any_key)
def test_a_key_has_a_valid_name_and_is_found_by_it(key: bytes) -> None:
    name = stored_name(wire(key))
    check_name(name)
    found = key_of(name)
    assert found is not None
    assert found.encode("utf-8", "surrogateescape") == key


@given(any_key, any_key)
def test_two_keys_have_two_names(one: bytes, two: bytes) -> None:
    assume(one != two)
    assert stored_name(wire(one)) != stored_name(wire(two))


@given(texts)
def test_a_key_that_is_text_is_its_own_name(key: bytes) -> None:
    assert stored_name(wire(key)) == key.decode()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (b"caf\xe9", "bytes caf%E9"),
        (b"100%\xff", "bytes 100%25%FF"),
        (b"caf%E9", "caf%E9"),
        ("é\x00".encode(), "é\x00"),
        (b"\xff" * 256, "bytes " + "%FF" * 256),
        (b"\xed\xa0\x80", "bytes %ED%A0%80"),  # a surrogate is not UTF-8
    ],
)
def test_names(key: bytes, name: str) -> None:
    assert stored_name(wire(key)) == name
    assert key_of(name) == wire(key)


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "bytes ",
        "bytes caf",
        "bytes caf%e9",
        "bytes %41%FF",
        "bytes é%25",
        "bytes %FF %FF",
        "bytes %FF%20",
        "bytes \n%FF",
        "x" * 257,
        "bytes " + "%FF" * 257,
    ],
)
def test_a_name_that_is_no_keys(name: str) -> None:
    assert key_of(name) is None


def test_what_people_see() -> None:
    assert readable(wire(b"caf\xe9")) == "caf\ufffd"
    assert readable("café") == "café"


async def test_a_key_of_any_bytes_is_a_lock(clock: VirtualClock, engine: Engine) -> None:
    async with serving(clock, engine=engine) as listener:
        one, two = Client(listener), Client(listener)
        one.say(b"l\ncaf\xe9\n0\n")
        assert (await one.hears()).startswith("ok ")
        two.say(b"l\ncaf\xe9\n0\nl\ncaf\xe8\n0\nl\nbytes caf%E9\n0\n")
        first, second, third = (await two.hears()).splitlines()
        assert (first, third) == ("timeout", "error")
        assert second.startswith("ok ")
        two.say(b"sl\n\xff%\n0 2\n")
        assert (await two.hears()).startswith("ok ")
        told = json.loads((await two.asks("stats"))[3:])
        assert sorted(each["key"] for each in told["locks"]) == ["caf\ufffd", "caf\ufffd"]
        assert [each["key"] for each in told["semaphores"]] == ["\ufffd%"]
        found = await engine.list_semaphores("/dflockd", owners=False, waiters=False)
        assert [each.name for each in found] == ["bytes %FF%25", "bytes caf%E8", "bytes caf%E9"]


async def test_a_key_of_any_bytes_outlives_the_server(clock: VirtualClock) -> None:
    name = f"names-{next(_stores)}"
    store = MemoryEngine(name, clock)
    await store.open()
    async with serving(clock, engine=MemoryEngine(name, clock)) as listener:
        client = Client(listener)
        client.say(b"l\n\xff\n0\nsl\n\xfe\n0 2\nsl\n\xfd\n0 2\n")
        lock, slot, unused = (line.split()[1] for line in (await client.hears()).splitlines())
        client.say(f"sr\n\xfd\n{unused}\n".encode("latin-1"))
        assert await client.hears() == "ok\n"
    async with serving(clock, engine=MemoryEngine(name, clock), read_timeout=1000.0) as listener:
        client = Client(listener)
        client.say(b"l\n\xff\n0\nsl\n\xfe\n0 3\nsl\n\xfd\n0 3\n")
        assert await client.hears() == "timeout\nerror_limit_mismatch\nerror_limit_mismatch\n"
        client.say(f"n\n\xff\n{lock} 900\nsr\n\xfe\n{slot}\n".encode("latin-1"))
        assert await client.hears() == "ok 900\nok\n"
        await asyncio.sleep(70)
        found = await store.list_semaphores("/dflockd", owners=False, waiters=False)
        assert [each.name for each in found] == ["bytes %FF"]
    await store.aclose()
