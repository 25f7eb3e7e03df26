"""The stream of what happened: bounded, typed, and no burden when nobody reads it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys

import pytest

from tenure import events
from tenure.errors import InvalidArgument, SessionClosed
from tenure.testing.clock import VirtualClock
from tests.primitives.helpers import World, turns


async def test_it_tells_a_session_s_whole_life(world: World, clock: VirtualClock) -> None:
    async with world.client() as client, client.events() as stream:
        async with client.session() as session:
            await asyncio.sleep(10)
        where = ("/default", session.id)
        assert await anext(stream) == events.SessionAttached(*where)
        renewed = await anext(stream)
        assert isinstance(renewed, events.Renewed)
        assert renewed.deadline == pytest.approx(session.deadline)
        assert await anext(stream) == events.Closed(*where)


async def test_it_tells_of_lost_and_regained_contact_and_of_the_end(world: World) -> None:
    client, engine = world.slow()
    async with client, client.events() as stream:
        session = await client.session()
        engine.sessions[0].detached()
        engine.sessions[0].attached()
        await turns()
        await world.end_sessions()
        await turns()
        told = list(stream._events)
        where = ("/default", session.id)
        assert told[:3] == [
            events.SessionAttached(*where),
            events.SessionDetached(*where),
            events.SessionAttached(*where),
        ]
        assert isinstance(told[-1], events.Expired)
        assert "administrator" in told[-1].reason


async def test_a_slow_reader_loses_the_oldest_and_they_are_counted(world: World) -> None:
    async with world.client() as client, client.session() as session, client.events(6) as stream:
        for _ in range(5):
            async with session.mutex("m").lock() as lease:
                pass
        assert stream.dropped == 9
        kinds = ["Requested", "Acquired", "Released"] * 2
        assert [type(event).__name__ for event in stream._events] == kinds
        assert isinstance(stream._events[-1], events.Released)
        assert stream._events[-1].fencing_token == lease.fencing_token


async def test_a_reader_may_wait_for_what_comes(world: World) -> None:
    async with world.client() as client, client.events() as stream:
        reading = asyncio.ensure_future(anext(stream))
        await turns()
        assert not reading.done()
        async with client.session():
            assert isinstance(await reading, events.SessionAttached)


async def test_it_ends_with_the_client_after_what_is_left_was_read(world: World) -> None:
    client = world.client()
    stream = client.events()
    async with client, client.session():
        pass
    assert [type(event).__name__ async for event in stream] == ["SessionAttached", "Closed"]
    with pytest.raises(SessionClosed):
        client.events()


async def test_a_break_leaks_nothing(world: World) -> None:
    async with world.client() as client, client.session() as session:
        async with client.events() as stream, session.mutex("m").lock():
            async for _ in stream:
                break
        assert client._core.listeners.streams == set()
        await stream.aclose()
        bare = client.events()
        async with session.mutex("m").lock():
            async for _ in bare:
                break
        del bare
        gc.collect()
        assert client._core.listeners.streams == set()
        async with session.mutex("m").lock():
            pass


async def test_a_stream_holds_at_least_one(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(InvalidArgument, match="at least 1"):
            client.events(0)
        with pytest.raises(InvalidArgument, match="at least 1, not '1'"):
            client.events("1")  # type: ignore[arg-type]


def test_only_who_listens_pays_for_their_import() -> None:
    program = """
import sys, tenure
assert "tenure.events" not in sys.modules
assert tenure.events.Acquired.__module__ == "tenure.events"
try:
    tenure.event
except AttributeError as error:
    assert "'event'" in str(error)
else:
    raise AssertionError("there is such a thing")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


async def test_an_event_whose_reader_was_interrupted_is_given_again(world: World) -> None:
    async with world.client() as client, client.events() as stream, client.session():
        attached = await anext(stream)
        stream._put_back(attached)
        assert await anext(stream) is attached
