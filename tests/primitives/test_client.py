# ruff: noqa: PT012  what raises here is a block, with its body
"""A client: opened on first use, closed whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    LeaseLost,
    Misuse,
    SessionClosed,
    Unsupported,
)
from tests.primitives.helpers import World, for_ever, turns

# Where it goes


def test_without_a_url_it_is_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", "memory://mine")
    assert tenure.default_url() == "memory://mine"
    assert tenure.connect().url == "memory://mine"


def test_without_an_environment_it_is_the_user_s_own_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENURE_URL", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "a b"))
    assert tenure.default_url() == f"sqlite:///{tmp_path}/a%20b/tenure/tenure.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tenure.default_url() == f"sqlite:///{tmp_path}/.local/state/tenure/tenure.db"


def test_without_a_home_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENURE_URL", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(InvalidArgument, match="Set HOME, or name a store"):
        tenure.default_url()
    with pytest.raises(InvalidArgument, match="not in /etc/passwd"):
        tenure.connect()


def test_a_url_that_is_wrong_is_refused_in_the_call() -> None:
    with pytest.raises(InvalidArgument):
        tenure.connect("jobs.db")
    with pytest.raises(Unsupported):
        tenure.connect("carrier-pigeon://loft")
    with pytest.raises(InvalidArgument, match="a URL is a str, not int"):
        tenure.connect(5)  # type: ignore[arg-type]


def test_it_tells_where_it_goes_and_what_that_can() -> None:
    client = tenure.connect("memory://somewhere")
    assert repr(client) == "<Client memory://somewhere>"
    assert client.url == "memory://somewhere"
    assert client.capabilities.watch
    assert client.guarantees == ""
    assert isinstance(client.clock, SystemClock)


# Opening


async def test_it_is_opened_by_its_block_or_by_its_first_use(world: World) -> None:
    client, engine = world.slow()
    assert engine.calls == []
    async with client:
        assert engine.calls == ["open"]
        await client.list_nodes()
    client, engine = world.slow()
    await client.list_nodes()
    assert engine.calls == ["open"]
    await client.aclose()
    assert repr(client).endswith("(closed)>")


async def test_used_by_many_at_once_it_is_opened_once(world: World) -> None:
    client, engine = world.slow(3)
    await asyncio.gather(*(client.list_nodes() for _ in range(5)))
    assert engine.calls == ["open"]
    await client.aclose()


async def test_an_opening_that_fails_is_told_to_all_and_tried_again(world: World) -> None:
    client, engine = world.slow(3)
    engine.fail("open", EngineUnavailable("no route"), EngineUnavailable("still none"))
    outcomes = await asyncio.gather(
        client.list_nodes(), client.session(), client.mutex("m").lock(), return_exceptions=True
    )
    assert [str(outcome) for outcome in outcomes] == ["no route"] * 3
    with pytest.raises(EngineUnavailable, match="still none"):
        async with client:
            pytest.fail("entered")
    assert repr(client).endswith("(closed)>")  # its block is over
    client, engine = world.slow(3)
    engine.fail("open", EngineUnavailable("no route"))
    with pytest.raises(EngineUnavailable):
        await client.list_nodes()
    assert await client.list_nodes() == ["/default"]
    await client.aclose()


async def test_what_fails_on_closing_after_a_failed_opening_is_noted(world: World) -> None:
    client, engine = world.slow()
    engine.fail("open", EngineUnavailable("no route"))
    engine.fail("aclose", EngineError("disk full"))
    with pytest.raises(EngineUnavailable) as raised:
        await client.__aenter__()
    assert "failed: disk full" in raised.value.__notes__[0]


async def test_an_opening_survives_the_cancellation_of_who_began_it(world: World) -> None:
    client, engine = world.slow(3)
    first = asyncio.create_task(client.describe_node())
    second = asyncio.create_task(client.list_nodes())
    await turns(3)
    first.cancel()
    assert await second == ["/default"]
    assert engine.calls == ["open"]
    await client.aclose()


# Closing


async def test_closing_ends_its_sessions_and_who_waits(world: World) -> None:
    client = world.client()
    session = await client.session()
    lease = await session.mutex("m").lock()
    waiting = asyncio.create_task(session.mutex("m").lock())
    await turns()
    await client.aclose()
    assert not lease.held
    with pytest.raises(SessionClosed):
        await waiting
    assert await world.sessions() == []
    for call in (client.list_nodes(), client.session(), client.mutex("m").lock()):
        with pytest.raises(SessionClosed, match=r"the client of memory://.* is closed"):
            await call


async def test_it_may_be_closed_twice_unused_and_by_several_at_once(world: World) -> None:
    await world.client().aclose()
    client, engine = world.slow(2)
    await client.list_nodes()
    await asyncio.gather(client.aclose(), client.aclose())
    await client.aclose()
    assert engine.calls.count("aclose") == 1


@pytest.mark.parametrize("step", range(12))
async def test_closed_while_others_attach_it_leaves_no_session(world: World, step: int) -> None:
    client, _ = world.slow(2)
    tasks: list[asyncio.Task[object]] = [
        asyncio.create_task(client.session()),
        asyncio.create_task(client.mutex("m").lock()),
    ]
    await turns(step)
    await client.aclose()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, SessionClosed)
    assert await world.sessions() == []


async def test_closing_survives_the_cancellation_of_who_closes(world: World) -> None:
    client, engine = world.slow(3)
    _held = await client.session()
    closing = asyncio.create_task(client.aclose())
    await turns(2)
    closing.cancel()
    await asyncio.wait([closing])
    await client.aclose()
    assert await world.sessions() == []
    assert engine.calls[-1] == "aclose"


async def test_another_task_that_closes_it_cancels_who_is_inside(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(LeaseLost):
            async with client.mutex("m").lock():
                closing = asyncio.create_task(client.aclose())
                await for_ever()
        await closing


async def test_what_fails_on_closing_is_told(world: World) -> None:
    client, engine = world.slow()
    _held = await client.session()
    _held_2 = await client.session()
    engine.fail("close", EngineError("first"), EngineError("second"))
    engine.fail("aclose", EngineError("third"))
    with pytest.raises(EngineError) as raised:
        await client.aclose()
    told = "".join([str(raised.value), *raised.value.__notes__])
    assert all(what in told for what in ("first", "second", "third"))


async def test_what_fails_on_closing_does_not_hide_the_body_s_error(world: World) -> None:
    client, engine = world.slow()
    engine.fail("aclose", EngineError("disk full"))
    with pytest.raises(KeyError) as raised:
        async with client:
            raise KeyError("the body's")
    assert "closing the client of memory://" in raised.value.__notes__[0]
    assert "failed: disk full" in raised.value.__notes__[0]
    client, engine = world.slow()
    engine.fail("aclose", EngineError("disk full"))
    with pytest.raises(EngineError):
        async with client:
            pass


async def test_closing_sees_to_releases_that_have_failed(world: World) -> None:
    client, engine = world.slow()
    async with client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        engine.fail("withdraw", *[EngineError("disk full")] * 100)
        with pytest.raises(EngineError):
            await lease.release()
    assert await world.queue("m") == []


async def test_it_belongs_to_one_loop(world: World) -> None:
    client = world.client()
    await client.list_nodes()
    client._core.loop = asyncio.new_event_loop()  # as it looks from another one
    try:
        for call in (client.list_nodes(), client.aclose(), client.__aenter__()):
            with pytest.raises(Misuse, match="another event loop"):
                await call
    finally:
        client._core.loop.close()
        client._core.loop = asyncio.get_running_loop()
        await client.aclose()
