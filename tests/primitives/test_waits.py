"""Waits that last: what is logged of them, and a program that waits for itself."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import textwrap
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import tenure
from tenure import greenlets
from tenure._client.client import client_core
from tenure._client.waits import MOST_READINGS
from tenure.background import Failures, supervise
from tenure.errors import AcquireTimeout, EngineUnavailable, SelfDeadlock
from tenure.model import Capabilities
from tenure.testing import VirtualClock
from tests.engines.stores import BY_NAME
from tests.primitives.helpers import World, released_after, turns

HERE = re.escape(__file__)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> World:
    if request.param == "memory":
        return world
    return World(world.clock, f"sqlite:///{tmp_path / 'waits.db'}")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="tenure")
    return caplog


# A program that waits for itself


async def test_a_lease_without_a_block_is_waited_for_by_its_only_task(
    store: World, clock: VirtualClock
) -> None:
    async with store.client() as client:
        lease = await client.mutex("m").lock()
        began = clock.now()
        with pytest.raises(SelfDeadlock, match=rf"acquired at {HERE}:\d+, .* not re-entrant"):
            await client.mutex("m").lock()
        assert clock.now() - began < 3
        assert len(await store.queue("m")) == 1
        await lease.release()
    await store.close()


async def test_a_background_task_of_the_engine_releases_nothing(world: World) -> None:
    async def keep() -> None:
        await end.wait()

    async with world.client() as client:
        end = asyncio.Event()
        failures = Failures("keeping a connection", logging.getLogger("tenure"))
        keeping = asyncio.create_task(supervise(keep, failures))  # as a reconnector does
        lease = await client.mutex("m").lock()
        with pytest.raises(SelfDeadlock):
            await client.mutex("m").lock()
        await lease.release()
        end.set()
        await keeping


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "engine", ["redis", "postgresql", "etcd", "ydb", "tenure-sqlite", "dflockd"]
)
def test_on_an_engine_with_a_connection_it_is_one_too(engine: str) -> None:
    async def main(url: str) -> None:
        async with tenure.connect(url) as client:
            lease = await client.mutex("m").lock()
            with pytest.raises(SelfDeadlock):
                async with asyncio.timeout(20):
                    await client.mutex("m").lock()
            await lease.release()

    with BY_NAME[engine].make().empty() as url:
        asyncio.run(main(url))


async def test_through_another_client_of_the_store_it_is_one_too(world: World) -> None:
    async with world.client() as client, world.client() as other:
        lease = await client.mutex("m").lock()
        with pytest.raises(SelfDeadlock):
            await other.mutex("m").lock()
        await lease.release()


async def test_a_closed_client_holds_nothing(world: World) -> None:
    async with world.client() as client, world.client() as other:
        former = world.client()
        held = await former.mutex("m").lock()
        await former.aclose()
        assert held.loss is not None
        lease = await other.mutex("m").lock()
        await lease.release()
        await client.list_nodes()


async def test_a_ticket_s_lease_is_waited_for_and_the_place_is_kept(world: World) -> None:
    async with world.client() as client:
        pool = client.semaphore("s", ephemeral=True)
        lease = await client.mutex("s").lock()
        ticket = await pool.enqueue()
        with pytest.raises(SelfDeadlock):
            await ticket.wait()
        assert len(await world.queue("s")) == 2
        await lease.release()
        assert (await ticket.wait()).held
        await ticket.withdraw()


async def test_of_a_semaphore_it_is_one_when_the_program_holds_too_much(world: World) -> None:
    async with world.client() as client, world.client() as other:
        pool = client.semaphore("s")
        await pool.create(3)
        mine, also_mine = await pool.acquire(), await other.semaphore("s").acquire()
        fitting = await pool.acquire()
        with pytest.raises(SelfDeadlock):
            await pool.acquire()
        for lease in (mine, also_mine, fitting):
            await lease.release()


async def test_a_timeout_is_none(world: World) -> None:
    async with world.client() as client:
        lease = await client.mutex("m").lock()
        with pytest.raises(AcquireTimeout):
            await client.mutex("m").lock(timeout=5)
        await lease.release()


@pytest.mark.parametrize("inside", [False, True], ids=["in a variable", "in its block"])
async def test_a_timeout_around_the_call_does_not_prevent_the_error(
    world: World, clock: VirtualClock, inside: bool
) -> None:
    async with world.client() as client:
        lease = await client.mutex("m").lock()
        async with AsyncExitStack() as block:
            if inside:
                await block.enter_async_context(lease)
            began = clock.now()
            with pytest.raises(SelfDeadlock, match=rf"acquired at {HERE}:\d+"):
                async with asyncio.timeout(60):
                    await client.mutex("m").lock()
            assert clock.now() - began < 3
        if not inside:
            await lease.release()
        assert await world.queue("m") == []


async def test_a_timeout_that_passes_before_the_error_is_a_timeout(world: World) -> None:
    async with world.client() as client:
        lease = await client.mutex("m").lock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.mutex("m").lock()
        await lease.release()


async def test_wait_for_has_another_task_before_python_3_12(world: World) -> None:
    expected = SelfDeadlock if sys.version_info >= (3, 12) else TimeoutError
    async with world.client() as client:
        lease = await client.mutex("m").lock()
        with pytest.raises(expected):
            await asyncio.wait_for(client.mutex("m").lock(), 60)
        await lease.release()
        assert await world.queue("m") == []


@pytest.mark.parametrize(("seconds", "granted"), [(0.5, True), (5, False)])
async def test_a_release_by_a_callback_is_not_foreseen(
    world: World, seconds: float, granted: bool
) -> None:
    async with world.client() as client:
        lease = await client.mutex("m").lock()
        released: list[asyncio.Task[None]] = []
        asyncio.get_running_loop().call_later(
            seconds, lambda: released.append(asyncio.ensure_future(lease.release()))
        )
        if granted:
            await (await client.mutex("m").lock()).release()
        else:
            with pytest.raises(SelfDeadlock):
                await client.mutex("m").lock()
            await asyncio.sleep(seconds)
        await asyncio.gather(*released)
        assert len(released) == 1


async def test_another_task_may_release_it_and_so_it_is_logged(
    store: World, lines: pytest.LogCaptureFixture
) -> None:
    async with (
        store.client() as client,
        released_after(5, await client.mutex("m").lock()),
        client.mutex("m").lock(),
    ):
        pass
    line = r"waiting for a lease that this program holds: node=/default name='m' task=none "
    assert len(re.findall(rf"{line}acquired={HERE}:\d+", lines.text)) == 1
    await store.close()


async def test_another_greenlet_may_release_it_and_so_it_is_logged(
    store: World, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store.client() as client:
        lease = await client.mutex("m").lock()
        with monkeypatch.context() as patched:
            patched.setattr(greenlets, "are_used", lambda: True)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await client.mutex("m").lock()
        await lease.release()
    assert lines.text.count("waiting for a lease that this program holds") == 1
    await store.close()


async def test_a_child_task_that_waits_for_its_parent_s_block_is_logged(
    store: World, lines: pytest.LogCaptureFixture
) -> None:
    async def child() -> None:
        async with client.mutex("m").lock():
            pass

    async with store.client() as client:
        with pytest.raises(TimeoutError):
            async with client.mutex("m").lock(), asyncio.timeout(5):
                await asyncio.create_task(child(), name="child")
        assert await store.queue("m") == []
    assert re.search(r"this program holds: .* name='m' task=Task-\d+ acquired=", lines.text)
    await store.close()


async def test_one_line_is_logged_for_each_lease_and_not_for_each_waiter(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    async with world.client() as client:
        mutex = client.mutex("m")

        async def work() -> None:
            async with mutex.lock():
                await asyncio.sleep(3)

        await asyncio.gather(*(work() for _ in range(3)))
    # The last has nobody behind it; the second is seen by the last alone, which has been told.
    assert lines.text.count("this program holds") == 1


async def test_what_another_program_holds_is_no_lease_of_this_one(
    world: World, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure._client.waits.living_clients", list)
    async with (
        world.client() as client,
        world.client() as other,
        released_after(3, await other.mutex("m").lock()),
    ):
        await (await client.mutex("m").lock()).release()
    assert "this program holds" not in lines.text


def test_a_thread_without_others_is_told_that_it_waits_for_itself() -> None:
    done = run(
        """
        import threading, tenure
        from tenure import blocking
        with blocking.connect("memory://") as client:
            lease = client.mutex("m").lock()
            try:
                client.mutex("m").lock()
            except tenure.SelfDeadlock as error:
                print(error)
            client.mutex("n").lock()
            threading.Timer(2, lease.release).start()
            client.mutex("m").lock().release()
            print("another thread has released it")
        """
    )
    assert re.search(r"'m' on /default, acquired at <string>:5, and waits", done)
    assert done.endswith("another thread has released it\n")


def run(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


# Long waits


async def test_a_long_wait_is_logged_with_its_holder_and_place_and_at_its_end(
    store: World, lines: pytest.LogCaptureFixture
) -> None:
    async with store.client() as client, store.client() as other, store.client() as third:
        lease = await other.mutex("m").lock()
        first = asyncio.create_task(third.mutex("m").lock(timeout=60))
        await turns()
        async with released_after(15, lease):
            waiting = asyncio.create_task(client.mutex("m").lock())
            await asyncio.sleep(8)
            assert "still waiting" not in lines.text
            await asyncio.sleep(4)
            found = re.findall(
                r"still waiting: node=/default name='m' position=(\d) holder='.*pid \d+.*' "
                r"seconds=1[01]",
                lines.text,
            )
            assert sorted(found) == ["1", "2"]
            assert "wait ended" not in lines.text
        await (await first).release()
        await (await waiting).release()
    ended = re.findall(r"wait ended: node=/default name='m' state=held seconds=1\d\.\d", lines.text)
    assert len(ended) == 2
    assert lines.text.count("still waiting") == 2
    await store.close()


async def test_a_long_wait_that_is_given_up_ends_too(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    async with world.client() as client, client.mutex("m").lock():
        waiting = asyncio.create_task(client.mutex("m").lock())
        await asyncio.sleep(12)
        assert "holder=this session" in lines.text
        waiting.cancel()
        await asyncio.wait([waiting])
    assert "wait ended: node=/default name='m' state=waiting seconds=12.0" in lines.text


async def test_a_wait_of_less_than_ten_seconds_is_not_logged(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    async with (
        world.client() as client,
        world.client() as other,
        released_after(9, await other.mutex("m").lock()),
    ):
        await (await client.mutex("m").lock()).release()
    assert "wait ended" not in lines.text
    assert "still waiting" not in lines.text


async def test_a_silent_store_leaves_holder_and_place_unknown(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        lease = await other.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await asyncio.sleep(9.5)
        engine.fail("describe", EngineUnavailable("gone"))
        await asyncio.sleep(3)
        assert "position=unknown holder=unknown" in lines.text
        await lease.release()
        await (await waiting).release()


@pytest.mark.parametrize("sessions", [1, 20])
async def test_waiters_of_one_name_share_the_read(world: World, sessions: int) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        lease = await other.mutex("m").lock()
        theirs = [await client.session() for _ in range(sessions)]
        waiting = [asyncio.create_task(theirs[at % sessions].mutex("m").lock()) for at in range(20)]
        await asyncio.sleep(12)
        assert engine.calls.count("describe") == 1
        await lease.release()
        for each in waiting:
            await (await each).release()


async def test_waiters_of_many_names_cost_few_reads_a_second(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow(0)
    names = [f"m{at}" for at in range(3 * MOST_READINGS)]
    async with client, world.client() as other:
        leases = [await other.mutex(name).lock() for name in names]
        waiting = [asyncio.create_task(client.mutex(name).lock()) for name in names]
        await asyncio.sleep(12)
        assert engine.calls.count("describe") == MOST_READINGS
        assert lines.text.count("still waiting") == len(names)
        assert lines.text.count("holder=unknown") == len(names) - MOST_READINGS
        for lease in leases:
            await lease.release()
        for each in waiting:
            await (await each).release()


async def test_a_wait_that_ends_while_the_queue_is_read_is_not_logged(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow(0)
    async with client, world.client() as other:
        lease = await other.mutex("m").lock()
        waiting = asyncio.create_task(client.mutex("m").lock())
        await asyncio.sleep(9.5)
        engine.cut()
        await asyncio.sleep(1)
        assert list(client_core(client).readings) == [("/default", "m")]
        waiting.cancel()
        await asyncio.wait([waiting])
        engine.mend()
        await asyncio.sleep(2)
        await lease.release()
    assert "wait ended" not in lines.text
    assert "still waiting" not in lines.text


async def test_the_end_of_the_session_ends_a_wait_and_the_looks(world: World) -> None:
    async with world.client() as client, world.client() as other:
        lease = await other.mutex("m").lock()
        session = await client.session()
        waiting = asyncio.create_task(session.mutex("m").lock())
        await asyncio.sleep(3)
        await session.aclose()
        await asyncio.wait([waiting])
        assert waiting.exception() is not None
        await lease.release()


async def test_a_store_that_lists_no_holders_is_known_to_hold_a_mutex(
    world: World, lines: pytest.LogCaptureFixture
) -> None:
    client, engine = world.slow(0)
    engine.inner.capabilities = Capabilities(owners=False)  # type: ignore[misc]
    async with client, world.client() as other:
        lease = await client.mutex("m").lock()
        with pytest.raises(SelfDeadlock):
            await client.mutex("m").lock()
        pool = client.semaphore("s")
        await pool.create(1)
        token = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(12)
        assert "name='s' position=unknown holder=unknown" in lines.text
        await token.release()
        await (await waiting).release()
        await lease.release()
        await other.list_nodes()


async def test_the_only_task_waits_for_a_semaphore_whose_holders_are_unknown(world: World) -> None:
    client, engine = world.slow(0)
    engine.inner.capabilities = Capabilities(owners=False)  # type: ignore[misc]
    async with client:
        pool = client.semaphore("s")
        await pool.create(1)
        token = await pool.acquire()
        asyncio.get_running_loop().call_later(
            5, lambda: released.append(asyncio.ensure_future(token.release()))
        )
        released: list[asyncio.Future[None]] = []
        await (await pool.acquire()).release()
        await released[0]


async def test_a_task_that_is_a_call_of_tenure_is_the_programs(world: World) -> None:
    async with world.client() as client, world.client() as other:
        lease = await client.mutex("m").lock()
        waiting = asyncio.create_task(other.mutex("m").lock())
        waiting_too = asyncio.create_task(other.mutex("m").try_lock())
        await asyncio.sleep(3)
        assert not waiting.done()
        await lease.release()
        await (await waiting).release()
        assert await waiting_too is None
