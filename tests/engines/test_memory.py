"""What is special to ``memory://``: sharing by name, several loops and threads, timers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

import tenure
from tenure import blocking
from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.memory import MemoryEngine, connect
from tenure.errors import EngineUnavailable, InvalidArgument
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing.clock import VirtualClock
from tenure.testing.recorder import Recorder
from tests.guarantees import MEMORY, guarantee

T = TypeVar("T")


async def test_connections_of_one_name_share_a_store_and_others_do_not() -> None:
    async with (
        tenure.connect("memory://shared") as one,
        tenure.connect("memory://shared") as two,
        tenure.connect("memory://other") as other,
        tenure.connect("memory://") as nameless,
        one.mutex("x").lock(),
    ):
        assert await two.mutex("x").try_lock() is None
        for stranger in (other, nameless):
            lease = await stranger.mutex("x").try_lock()
            assert lease is not None
            await lease.release()


async def test_without_a_name_it_is_one_store_for_the_process() -> None:
    async with (
        tenure.connect("memory://") as one,
        tenure.connect("memory://") as two,
        one.mutex("x").lock(),
    ):
        assert await two.mutex("x").try_lock() is None
        with blocking_in_a_thread("memory://") as is_free:
            assert not await asyncio.to_thread(is_free, "x")
            assert await asyncio.to_thread(is_free, "y")


@contextmanager
def blocking_in_a_thread(url: str) -> Iterator[Callable[[str], bool]]:
    """Give a function that asks, in any thread, whether a mutex is free."""

    def is_free(name: str) -> bool:
        with blocking.connect(url) as client:
            return not client.mutex(name).locked()

    yield is_free


async def test_with_a_clock_of_its_own_it_is_the_store_of_that_clock() -> None:
    one, two = VirtualClock(), VirtualClock()
    async with (
        tenure.connect("memory://", clock=one) as client,
        tenure.connect("memory://", clock=one) as same,
        tenure.connect("memory://", clock=two) as other,
        tenure.connect("memory://") as real,
    ):
        await client.create_node("/here")
        assert "/here" in await same.list_nodes()
        assert "/here" not in await other.list_nodes()
        assert "/here" not in await real.list_nodes()


async def test_loops_of_several_threads_take_turns_without_a_name_too() -> None:
    tokens: list[int] = []
    inside = threading.Lock()

    async def contend() -> None:
        async with tenure.connect("memory://") as client:
            for _ in range(25):
                async with client.mutex("x") as lease:
                    assert inside.acquire(blocking=False)
                    tokens.append(lease.fencing_token)
                    await asyncio.sleep(0)
                    inside.release()

    async with tenure.connect("memory://"):
        joins = [in_another_thread(lambda: asyncio.run(contend())) for _ in range(4)]
        for join in joins:
            await asyncio.to_thread(join)
    assert len(tokens) == 100
    assert tokens == sorted(tokens)


async def test_a_lease_of_a_loop_that_is_closed_expires() -> None:
    left: list[tenure.Client] = []

    async def leave() -> None:
        client = tenure.connect("memory://")
        left.append(client)
        session = await client.session(recovery_window=1)
        left.append(await session.mutex("x").lock())  # type: ignore[arg-type]

    async with tenure.connect("memory://") as client:
        await asyncio.to_thread(in_another_thread(lambda: asyncio.run(leave())))
        async with client.mutex("x").lock(timeout=30):
            assert not left[1].held  # type: ignore[attr-defined]


PROGRAM = """
import os, sys
from tenure import blocking

held = blocking.connect("memory://").mutex("x").lock()
child = os.fork()
if child == 0:
    with blocking.connect("memory://") as client:
        os._exit(0 if client.mutex("x").try_lock() is not None else 1)
_, status = os.waitpid(child, 0)
with blocking.connect("memory://") as client:
    assert client.mutex("x").try_lock() is None
held.release()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_begins_with_an_empty_store() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, timeout=60)


async def test_a_named_store_lasts_as_long_as_anything_has_it_open() -> None:
    async with tenure.connect("memory://lasting") as one:
        await one.semaphore("pool").create(limit=2)
        async with tenure.connect("memory://lasting") as two:
            assert await two.semaphore("pool").count() == 0
    async with tenure.connect("memory://lasting") as anew:
        with pytest.raises(tenure.SemaphoreNotFound):
            await anew.semaphore("pool").count()


@pytest.mark.parametrize("url", ["memory://a?b=c", "memory://a#b", "memory://user@a"])
def test_a_url_with_more_than_a_name_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        connect(url, SystemClock())


async def test_an_engine_that_is_not_open_says_so() -> None:
    engine = connect("memory://", SystemClock())
    with pytest.raises(EngineUnavailable):
        await engine.list_nodes()
    await engine.aclose()
    await engine.open()
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineUnavailable):
        await engine.list_nodes()


@guarantee("none", "nothing leaks", "others proceed", on=MEMORY)
async def test_closing_a_client_releases_what_it_holds_to_the_others() -> None:
    async with tenure.connect("memory://closing") as other:
        holder = tenure.connect("memory://closing")
        pool = other.semaphore("pool")
        await pool.create(limit=1)
        _held = await holder.semaphore("pool").acquire()
        async with pool.enqueue() as ticket:
            assert not ticket.granted
            await holder.aclose()
            await ticket.wait(timeout=30)


async def test_a_timer_ends_when_nothing_is_attached_any_more() -> None:
    engine = connect("memory://", SystemClock())
    await engine.open()
    assert engine._timer is not None
    assert not engine._timer.armed
    await engine.aclose()


def in_another_thread(work: Callable[[], None]) -> Callable[[], None]:
    """Start it; what is returned waits for its end, and raises what it raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> None:
        thread.join(60)
        assert not thread.is_alive()
        if failures:
            raise failures[0]

    return join


async def test_loops_of_several_threads_take_turns() -> None:
    overlaps: list[int] = []
    tokens: list[int] = []
    inside = 0

    async def contend() -> None:
        nonlocal inside
        async with tenure.connect("memory://threads") as client, client.session() as session:
            for _ in range(50):
                async with session.mutex("x").lock(timeout=60) as lease:
                    inside += 1
                    overlaps.append(inside)
                    tokens.append(lease.fencing_token)
                    await asyncio.sleep(0)
                    inside -= 1

    async with tenure.connect("memory://threads"):  # keeps the store for as long as all run
        joins = [in_another_thread(lambda: asyncio.run(contend())) for _ in range(4)]
        for join in joins:
            await asyncio.to_thread(join)
    assert len(tokens) == 200
    assert set(overlaps) == {1}
    assert tokens == sorted(tokens)


async def test_a_grant_reaches_a_loop_in_another_thread() -> None:
    waiting = threading.Event()
    granted = threading.Event()

    async def wait_for_it() -> None:
        async with (
            tenure.connect("memory://far") as client,
            client.semaphore("x").enqueue() as ticket,
        ):
            waiting.set()
            await ticket.wait(timeout=60)
            granted.set()

    async with tenure.connect("memory://far") as client:
        await client.semaphore("x").create(limit=1)
        async with client.semaphore("x").acquire():
            join = in_another_thread(lambda: asyncio.run(wait_for_it()))
            await asyncio.to_thread(waiting.wait, 60)
            assert not granted.is_set()
        await asyncio.to_thread(join)
        assert granted.is_set()


class Elsewhere:
    """A program on a loop of its own in a thread, which can be held up, or abandoned."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._held_up = threading.Event()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def hold_up(self) -> None:
        self.loop.call_soon_threadsafe(self._held_up.wait)

    def let_go(self) -> None:
        self._held_up.set()

    def stop(self) -> None:
        """The loop turns no more, and is closed."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _holding_a_session(url: str) -> tuple[MemoryEngine, Attach]:
    """An engine with a session that holds a mutex, and how to take that over."""
    engine = connect(url, SystemClock())
    await engine.open()
    how = Attach("/default", 4.0, liveness="window", key=b"key")
    session = await engine.attach(how, Recorder())
    session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
    return engine, replace(how, session_id=session.id)


@guarantee("taken over", "one owner", on=MEMORY)
@pytest.mark.parametrize("how_it_is", ["held up", "closed"])
async def test_who_takes_over_waits_for_a_loop_that_is_held_up_but_not_for_a_closed_one(
    how_it_is: str,
) -> None:
    url = f"memory://taking-over-from-one-that-is-{how_it_is.replace(' ', '-')}"
    elsewhere = Elsewhere()
    former, how = elsewhere.run(_holding_a_session(url))
    if how_it_is == "closed":
        elsewhere.stop()
    else:
        elsewhere.hold_up()
    engine = connect(url, SystemClock())
    await engine.open()
    heard = Recorder()
    begun = engine.clock.now()
    session = await engine.attach(how, heard)
    took = engine.clock.now() - begun
    assert [each.granted for each in heard.found] == [True]
    if how_it_is == "closed":
        assert took < 2.0  # at once, though this machine may be busy
    else:
        assert took > 1.0  # what was left of the window of 4 s, though this machine may be busy
        elsewhere.let_go()
        elsewhere.run(former.aclose())
        elsewhere.stop()
    session.withdraw(1)
    await engine.aclose()
