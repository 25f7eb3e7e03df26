"""Handles that the program drops while they hold something."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import tenure
from tenure import recipes
from tenure._client.client import Client
from tenure._client.client_core import ClientCore
from tenure._client.semaphore import Semaphore
from tenure.clock import Clock, SystemClock
from tenure.errors import Unsupported
from tenure.testing import VirtualClock
from tenure.testing.clock import VirtualLoop
from tests.engines.stores import BY_NAME
from tests.primitives.helpers import World, is_held, this_task, turns

HERE = re.escape(__file__)
NIGHTLY = pytest.mark.exhaustive
NETWORKED = ("redis", "postgresql", "etcd", "tenure-sqlite", "ydb", "dflockd")


def engines(*without: str) -> list[Any]:
    """Each engine but these; one with a server has its own, in real time."""
    networked = [each for each in NETWORKED if each not in without]
    return ["memory", "sqlite", *(pytest.param(each, marks=NIGHTLY) for each in networked)]


RESUMING = pytest.mark.parametrize("engine", engines("ydb", "dflockd"), indirect=True)
WITH_SESSIONS = pytest.mark.parametrize("engine", engines("dflockd"), indirect=True)
"""A dflockd server has no sessions, so that none can be seen or ended there."""


@pytest.fixture(params=engines())
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> Clock:
    return SystemClock() if _networked(request) else VirtualClock()


@pytest.fixture
def loop_factory(
    request: pytest.FixtureRequest, clock: Clock
) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if _networked(request):
        return None
    assert isinstance(clock, VirtualClock)
    return lambda: VirtualLoop(clock)


def _networked(request: pytest.FixtureRequest) -> bool:
    return "engine" in request.fixturenames and request.getfixturevalue("engine") in NETWORKED


async def others_end() -> None:
    """Wait for the clients that close in the background."""
    while others := asyncio.all_tasks() - {this_task()}:
        await asyncio.wait(others)


@pytest.fixture
def store(engine: str, world: World) -> Iterator[World]:
    """A world on each engine."""
    if engine == "memory":
        yield world
    else:
        stores = BY_NAME[engine].slow_stores
        with stores.empty() as url:
            yield World(world.clock, url, stores.connector)


@contextmanager
def dropped(*subjects: str) -> Iterator[None]:
    """The body drops these, and each warning names a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        gc.collect()
    caught = [each for each in caught if "was dropped by the program" in str(each.message)]
    told = [str(each.message) for each in caught]
    assert len(told) == len(subjects), told
    for subject in subjects:
        assert any(
            re.search(rf"{subject} was dropped .* obtained it at {HERE}:\d+\.", each)
            for each in told
        ), told
    assert all(each.filename == __file__ for each in caught)


async def until_free(world: World, *names: str) -> None:
    """Wait until those queues are empty."""
    for name in names:
        while await world.queue(name):
            await turns(1)


async def until_sessions_end(world: World) -> None:
    with suppress(Unsupported):  # on dflockd, which has none
        while await world.sessions():
            await turns(1)


def pool_of(client: Client) -> Semaphore:
    """A semaphore, of the kind that a mutex of the same name is."""
    if client.capabilities.lasting:
        return client.semaphore("m", ephemeral=True)
    return client.semaphore("m", limit=1)


async def locked(client: Client) -> Any:
    return await client.mutex("m").lock()


async def tried(client: Client) -> Any:
    return await client.mutex("m").try_lock()


async def acquired(client: Client) -> Any:
    return await pool_of(client).acquire()


async def leading(client: Client) -> Any:
    return await client.election("m").campaign()


async def run_begun(client: Client) -> Any:
    return await client.once("m", per=60)


async def registered(client: Client) -> Any:
    return await recipes.ServiceRegistry(client, "m").register("10.0.0.1:80")


async def writing(client: Client) -> Any:
    return await recipes.RWLock(client, "m").write()


async def in_pool(client: Client) -> Any:
    return await recipes.Pool(client, "m", {"x": b""}).acquire()


async def inside(client: Client) -> Any:
    return await recipes.DoubleBarrier(client, "m", 1).enter()


async def queued(client: Client) -> Any:
    return await pool_of(client).enqueue()


async def entered_by_hand(client: Client) -> Any:
    return await (await client.mutex("m").lock()).__aenter__()


LEASES = [
    *(locked, tried, acquired, leading, run_begun, registered, writing, queued, in_pool, inside),
    entered_by_hand,
]
WITH_DATA = {run_begun, registered, in_pool, inside}


@pytest.mark.parametrize("obtain", LEASES)
async def test_a_lease_that_no_variable_refers_to_is_released(
    store: World, obtain: Callable[[Client], Awaitable[Any]]
) -> None:
    if obtain in WITH_DATA and not store.client().capabilities.data:
        pytest.skip("this engine's requests have no data")
    async with store.client() as client:
        held = await obtain(client)
        await client.list_nodes()
        assert len(await store.queue("m")) == 1
        kind: dict[object, str] = {
            leading: "election",
            locked: "mutex",
            tried: "mutex",
            run_begun: "mutex",
        }
        kind |= {entered_by_hand: "mutex", in_pool: "resource", inside: "barrier"}
        name = "m/x" if obtain is in_pool else "m"
        with dropped(f"the lease of {kind.get(obtain, 'semaphore')} '{name}' on /default"):
            del held
        await until_free(store, "m")
        async with client.mutex("other").lock():  # the client is as good as before
            pass
    await store.close()


async def test_a_place_in_a_queue_is_withdrawn(store: World) -> None:
    async with store.client() as client, store.client() as other:
        pool = pool_of(client)
        async with other.mutex("m").lock():
            ticket = await pool.enqueue()
            assert not ticket.granted
            with dropped("the place in the queue of semaphore 'm' on /default"):
                del ticket
            while len(await store.queue("m")) > 1:
                await turns(1)
    await store.close()


async def test_the_warning_names_what_was_dropped_when_it_is_withdrawn_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a program with threads, where the event loop runs beside the finalizer.
    monkeypatch.setattr(ClientCore, "soon", lambda _, call: call())
    async with world.client() as client, client.mutex("m").lock():
        ticket = await client.semaphore("m", ephemeral=True).enqueue()
        with dropped("the place in the queue of semaphore 'm' on /default"):
            del ticket


@RESUMING
async def test_a_claimed_request_of_a_resumed_session_is_withdrawn(store: World) -> None:
    async with store.client() as first, store.client() as second:
        session = await first.session(resumable=True)
        lease = await session.mutex("m").lock()
        token = session.resume_token
        await session.detach()
        async with second.session(resume=token) as resumed:
            ticket = resumed.mutex("m").recover()
            with dropped("the lease of mutex 'm' on /default"):
                del ticket
            await until_free(store, "m")
        assert lease.loss is not None
    await store.close()


async def test_a_ticket_is_dropped_and_its_lease_kept(store: World) -> None:
    async with store.client() as client:
        ticket = await pool_of(client).enqueue()
        lease = await ticket.wait()
        with dropped():
            del ticket
        await turns()
        assert is_held(lease)
        await lease.release()
    await store.close()


async def test_a_session_is_closed_with_everything_in_it(store: World) -> None:
    async with store.client() as client:
        session = await client.session()
        lease = await session.mutex("m").lock()
        with dropped("the session on /default", "the lease of mutex 'm' on /default"):
            del session, lease
        await until_free(store, "m")
        await until_sessions_end(store)
    await store.close()


@WITH_SESSIONS
@pytest.mark.parametrize("kept", ["lease", "mutex", "recipe", "watch"])
async def test_a_session_lives_while_something_of_it_does(store: World, kept: str) -> None:
    async with store.client() as client:
        session = await client.session()
        semaphore = session.semaphore("m", ephemeral=True)
        of_it: Any = {
            "lease": await semaphore.acquire(),
            "mutex": session.mutex("n"),
            "recipe": recipes.RWLock(session, "n"),
            "watch": semaphore.watch(owners=True),
        }
        only = of_it[kept]
        lease = of_it["lease"] if kept == "lease" else None
        leases = () if kept == "lease" else ("the lease of semaphore 'm' on /default",)
        with dropped(*leases):
            del session, semaphore, of_it
        await turns()
        assert len(await store.sessions()) == 1
        if lease is not None:
            assert lease.session.state == "attached"
        lost = ("the lease of semaphore 'm' on /default",) if kept == "lease" else ()
        with dropped("the session on /default", *lost):
            del only, lease
        await until_sessions_end(store)
    await store.close()


@RESUMING
async def test_a_resumable_session_is_detached(store: World) -> None:
    async with store.client() as first, store.client() as second:
        session = await first.session(resumable=True)
        lease = await session.mutex("m").lock()
        token = session.resume_token
        with dropped("the session on /default", "the lease of mutex 'm' on /default"):
            del session, lease
        await turns()
        async with second.session(resume=token) as resumed:
            assert [each.name for each in resumed.recovered] == ["m"]
    await store.close()


@RESUMING
async def test_what_was_detached_is_not_released(store: World) -> None:
    async with store.client() as first, store.client() as second:
        session = await first.session(resumable=True)
        lease = await session.mutex("m").lock()
        token = session.resume_token
        await session.detach()
        with dropped():
            del session, lease
        await turns()
        async with second.session(resume=token) as resumed:
            assert [each.name for each in resumed.recovered] == ["m"]
    await store.close()


async def test_a_client_is_closed_with_its_leases(store: World) -> None:
    client = store.client()
    lease = await client.mutex("m").lock()
    helpers = re.escape(World.__init__.__code__.co_filename)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del client, lease
        gc.collect()
    told = " ".join(sorted(str(each.message) for each in caught))
    assert re.search(rf"the client of \S+ was dropped .* at {helpers}:\d+\.", told)
    assert re.search(rf"the lease of mutex 'm' on /default was dropped .* at {HERE}:", told)
    await until_free(store, "m")
    await until_sessions_end(store)
    await store.close()
    await others_end()


async def test_a_client_lives_while_a_lease_or_a_session_of_it_does(store: World) -> None:
    lease = await store.client().mutex("m").lock()
    session = await store.client().session()
    with dropped():
        gc.collect()
    await turns()
    assert is_held(lease)
    assert session.state == "attached"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del lease, session
        gc.collect()
    await until_sessions_end(store)
    await store.close()
    await others_end()


async def test_a_client_that_was_never_used_is_dropped_silently(world: World) -> None:
    client = world.client()
    with dropped():
        del client


@WITH_SESSIONS
async def test_what_has_ended_is_dropped_silently(store: World) -> None:
    async with store.client() as client:
        session = await client.session()
        async with session.mutex("m").lock() as left:
            pass
        released = await session.mutex("m").lock()
        await released.release()
        lost = await session.mutex("m").lock()
        await store.end_sessions()
        while is_held(lost):
            await turns(1)
    with dropped():
        del left, released, lost, session, client
    await store.close()


async def test_a_block_without_a_variable_holds_until_its_end(store: World) -> None:
    async with store.client() as client:
        with dropped():
            async with client.session() as session, session.mutex("m").lock():
                gc.collect()
                await turns()
                assert len(await store.queue("m")) == 1
            async with pool_of(client).enqueue():
                gc.collect()
                assert len(await store.queue("m")) == 1
            del session
    await store.close()


async def test_a_block_in_a_dropped_generator_ends_silently(store: World) -> None:
    async def generate(client: Client) -> Any:
        async with client.session() as session, session.mutex("m").lock() as lease:
            yield lease.held

    async with store.client() as client:
        with dropped():
            generator = generate(client)
            assert await anext(generator)
            del generator
        await until_free(store, "m")
    await store.close()


async def test_a_task_that_acquires_by_itself_names_the_call(store: World) -> None:
    async with store.client() as client:
        task = asyncio.create_task(client.mutex("m").lock())
        await asyncio.wait([task])
        with dropped("the lease of mutex 'm' on /default"):
            del task
        await until_free(store, "m")
    await store.close()


async def test_a_release_that_fails_is_sent_again(world: World) -> None:
    client, engine = world.slow(0)
    async with client:
        lease = await client.mutex("m").lock()
        engine.fail("withdraw", tenure.EngineError("the disk is full"))
        with dropped("the lease of mutex 'm' on /default"):
            del lease
        await asyncio.sleep(1)
        assert await world.queue("m") == []


async def test_a_close_that_fails_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    client, engine = world.slow(0)
    await client.list_nodes()
    engine.fail("aclose", tenure.EngineError("the disk is full"))
    with pytest.warns(ResourceWarning, match="the client of memory://"):
        del client
    await turns()
    assert "could not close a client: error=the disk is full" in caplog.text


def test_a_call_without_a_line_of_the_program_names_none() -> None:
    done = run(
        """
        import _thread, threading, warnings
        from tenure import blocking
        warned = threading.Event()
        def show(message, *_):
            print(message)
            warned.set()
        warnings.showwarning = show
        with blocking.connect("memory://") as client:
            _thread.start_new_thread(client.mutex("m").lock, ())  # which drops the lease
            warned.wait()
        """
    )
    assert "obtained it at an unknown line" in done.stdout


async def test_it_may_be_collected_in_another_thread(store: World) -> None:
    async with store.client() as client:
        held = [await client.mutex("m").lock()]
        with dropped("the lease of mutex 'm' on /default"):
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        await until_free(store, "m")
    await store.close()


async def test_a_cycle_with_a_lease_in_it_is_collected(store: World) -> None:
    async with store.client() as client:
        cycle: list[Any] = [await client.mutex("m").lock()]
        cycle.append(cycle)
        with dropped("the lease of mutex 'm' on /default"):
            del cycle
        await until_free(store, "m")
    await store.close()


def test_on_a_closed_loop_nothing_is_said(world: World) -> None:
    async def main() -> tuple[Any, ...]:
        client = world.client()
        session = await client.session()
        return client, session, await session.mutex("m").lock(), await client.mutex("n").lock()

    left = asyncio.run(main())
    with dropped():
        del left


async def test_asyncios_debug_mode_shows_the_calls_around_it(world: World) -> None:
    async def acquire_in_a_function(client: Client) -> object:
        return await client.mutex("m").lock()

    async with world.client() as client:
        lease: object = await acquire_in_a_function(client)
        session: object = await client.session()
        with pytest.warns(ResourceWarning) as caught:
            del lease, session
    for each, line in zip(caught, ["acquire_in_a_function", "client.session()"], strict=True):
        assert "Most recent call last:" in str(each.message)
        assert line in str(each.message)


@pytest.mark.no_debug
async def test_outside_debug_mode_the_line_alone_is_shown(world: World) -> None:
    async with world.client() as client:
        lease: object = await client.mutex("m").lock()
        with pytest.warns(ResourceWarning, match=rf"at {HERE}:\d+\. It is released now") as caught:
            del lease
        assert "\n" not in str(caught[0].message)


def run(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_at_the_interpreters_exit_nothing_is_said() -> None:
    done = run(
        """
        import asyncio, tenure
        async def main():
            global client, lease
            client = tenure.connect("memory://")
            lease = await client.mutex("m").lock()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        print("ran")
        """
    )
    assert done.stdout == "ran\n"
    assert "tenure" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_drops_what_its_parent_holds_silently() -> None:
    done = run(
        """
        import asyncio, gc, os, tenure
        async def main():
            client = tenure.connect("memory://")
            session = await client.session()
            lease = await session.mutex("m").lock()
            child = os.fork()
            if child == 0:
                del client, session, lease
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            await asyncio.sleep(0)
            assert lease.held
            await session.aclose()
            await client.aclose()
        asyncio.run(main())
        print("held")
        """
    )
    assert done.stdout == "held\n", done.stderr
    assert "ResourceWarning" not in done.stderr
