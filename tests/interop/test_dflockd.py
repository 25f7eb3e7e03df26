"""The lock and the semaphore of dflockd's clients, on tenure's server and on an early dflockd."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import tenure
from tenure.interop.dflockd import DistributedLock, DistributedSemaphore, blocking
from tests.engines.dflockd.proxy import Proxy
from tests.engines.dflockd.servers import InThread, Server, early_server
from tests.test_documents import ROOT, read

PATIENCE = 30.0


@pytest.fixture
def ours() -> Iterator[InThread]:
    with InThread() as server:
        yield server


@pytest.fixture(params=["tenure", "dflockd 0.5.0"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "tenure":
        with InThread() as ours:
            yield ours
    else:
        with early_server() as early:
            yield early


def on(port: int, **more: Any) -> dict[str, Any]:
    return {"servers": [("127.0.0.1", port)], **more}


# Asynchronous


async def test_a_lock_is_held_by_one_and_has_the_facts_of_its_hold(server: Server) -> None:
    one = DistributedLock("m", **on(server.port, lease=10))
    two = DistributedLock("m", **on(server.port, acquire_timeout=0.05))
    assert (one.key, one.limit, one.lease, one.token) == ("m", 1, 10, None)
    assert await one.acquire()
    token = one.token
    assert token is not None
    assert len(token) == 32
    assert not await two.acquire()
    assert await one.release()
    assert (one.token, one.held) == (None, False)
    assert not await one.release()
    assert await two.acquire()
    await two.close()


async def test_an_object_is_one_holder_unless_it_is_forced(ours: InThread) -> None:
    lock = DistributedLock("m", **on(ours.port))
    assert await lock.acquire()
    before = lock.token
    with pytest.raises(tenure.Misuse, match="holds 'm' already"):
        await lock.acquire()
    assert lock.token == before
    assert await lock.acquire(force=True)
    assert lock.token not in {None, before}
    await lock.close()


async def test_two_phases_join_the_queue_and_wait(server: Server) -> None:
    one, two = (DistributedLock("m", **on(server.port)) for _ in range(2))
    assert await one.enqueue() == "acquired"
    assert await one.wait()
    assert await two.enqueue() == "queued"
    assert two.token is None
    waiting = asyncio.create_task(two.wait(PATIENCE))
    assert await one.release()
    assert await waiting
    assert two.held
    await two.close()


async def test_a_wait_that_takes_too_long_gives_up_the_place(server: Server) -> None:
    one, two = (DistributedLock("m", **on(server.port)) for _ in range(2))
    assert await one.acquire()
    assert await two.enqueue() == "queued"
    assert not await two.wait(0.05)
    with pytest.raises(tenure.Misuse, match="enqueue"):
        await two.wait(0.05)
    assert await one.release()
    assert await two.acquire()
    await two.close()


async def test_work_is_done_under_the_lock(server: Server) -> None:
    lock = DistributedLock("m", **on(server.port))
    hurried = DistributedLock("m", **on(server.port, acquire_timeout=0.05))
    other = DistributedLock("m", **on(server.port))

    async def work() -> str | None:
        assert not await hurried.acquire()
        with pytest.raises(tenure.AcquireTimeout):
            await hurried.with_lock(lambda: None)
        return lock.token

    token = await lock.with_lock(work)
    assert token is not None
    assert not lock.held
    assert await other.with_lock(lambda: other.held)


async def test_a_lost_lock_stops_the_work_and_tells_once(ours: InThread) -> None:
    told: list[tuple[str, str]] = []
    async with Proxy(ours.port) as proxy:
        lock = DistributedLock(
            "m", on_lock_lost=lambda *facts: told.append(facts), **on(proxy.port)
        )
        begun = asyncio.Event()
        tokens = []

        async def work() -> None:
            tokens.append(lock.token)
            begun.set()
            await asyncio.Event().wait()

        working = asyncio.create_task(lock.with_lock(work))
        await begun.wait()
        proxy.cut()
        with pytest.raises(tenure.LeaseLost, match="its connection"):
            await working
    assert told == [("m", tokens[0])]
    assert lock.token is None


async def test_a_semaphore_admits_as_many_as_its_limit(ours: InThread) -> None:
    pool = [DistributedSemaphore("p", 2, **on(ours.port, acquire_timeout=0.05)) for _ in range(3)]
    assert [await slot.acquire() for slot in pool] == [True, True, False]
    assert pool[0].limit == 2
    assert pool[0].fencing_token < pool[1].fencing_token
    await pool[0].release()
    assert await pool[2].acquire()
    for slot in pool:
        await slot.close()


async def test_a_cancelled_acquire_leaves_nothing(ours: InThread) -> None:
    one, two = (DistributedLock("m", **on(ours.port)) for _ in range(2))
    assert await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    async with tenure.connect(ours.url) as eye:
        async with asyncio.timeout(PATIENCE):
            while not (await eye.list_semaphores())[0].waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await eye.list_semaphores())[0].waiting == 0
    assert two.is_idle
    await one.close()


async def test_keys_are_sharded_and_the_function_may_be_given() -> None:
    with InThread() as first, InThread() as second:
        servers = [("127.0.0.1", first.port), ("127.0.0.1", second.port)]
        usual = DistributedLock("a", servers=servers)
        own = DistributedLock("a", servers=servers, sharding=lambda _key, _servers: 0)
        assert await usual.acquire()
        assert await own.acquire()
        async with tenure.connect(second.url) as eye:
            assert [each.name for each in await eye.list_semaphores()] == ["a"]
        await usual.close()
        await own.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"servers": []},
        {"lease": 0},
        {"lease": 1.5},
        {"acquire_timeout": -1},
        {"renew_ratio": 2},
        {"connect_timeout": 0},
    ],
)
def test_what_is_wrong_is_said_when_the_lock_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(tenure.InvalidArgument):
        DistributedLock("m", **wrong)
    with pytest.raises(tenure.InvalidArgument):
        DistributedSemaphore("m", 0)


async def test_a_token_stays_secret(ours: InThread) -> None:
    lock = DistributedLock("m", **on(ours.port, auth_token="sec/ret"))
    assert "ret" not in repr(lock) + repr(lock._options)
    with pytest.raises(tenure.AuthenticationFailed) as caught:
        await lock.acquire()
    assert "sec" not in str(caught.value)
    assert lock.is_idle


def test_the_example_prints_what_it_says(ours: InThread) -> None:
    [program] = [
        block.text
        for block in read(ROOT / "docs" / "how-to" / "interop.md")
        if block.language == "text" and "DFLOCKD_PORT" in block.text
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "DFLOCKD_PORT": str(ours.port)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "held: True\nin two phases: acquired True\ndone\n"


# For threads


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "tenure-blocking":
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.mark.usefixtures("no_thread_left")
def test_threads_take_turns(server: Server) -> None:
    inside: list[int] = []
    order: list[int] = []

    def work(number: int) -> None:
        with blocking.DistributedLock("m", **on(server.port, acquire_timeout=PATIENCE)) as lock:
            assert lock.held
            assert not inside
            inside.append(number)
            order.append(number)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(order) == list(range(6))


@pytest.mark.usefixtures("no_thread_left")
def test_the_same_for_threads(server: Server) -> None:
    one = blocking.DistributedLock("m", **on(server.port, lease=10))
    two = blocking.DistributedLock("m", **on(server.port, acquire_timeout=0.05))
    assert (one.key, one.limit, one.lease, one.token) == ("m", 1, 10, None)
    assert one.acquire()
    assert one.token is not None
    with pytest.raises(tenure.Misuse):
        one.acquire()
    assert one.held
    one.check()
    assert not two.acquire()
    assert two.enqueue() == "queued"
    assert not two.wait(0.05)
    assert one.acquire(force=True)
    assert one.release()
    assert not one.release()
    assert two.enqueue() == "acquired"
    assert two.wait()
    assert two.with_lock is not None
    two.close()
    assert one.with_lock(lambda: one.held)
    with pytest.raises(tenure.Misuse):
        one.check()


@pytest.mark.usefixtures("no_thread_left")
def test_a_semaphore_for_threads(ours: InThread) -> None:
    pool = [
        blocking.DistributedSemaphore("p", 2, **on(ours.port, acquire_timeout=0.05))
        for _ in range(3)
    ]
    assert [slot.acquire() for slot in pool] == [True, True, False]
    assert pool[1].fencing_token > pool[0].fencing_token
    for slot in pool:
        slot.close()


@pytest.mark.usefixtures("no_thread_left")
def test_a_thread_learns_of_a_loss_at_the_end_of_its_block() -> None:
    told = threading.Event()
    with InThread() as server:
        lock = blocking.DistributedLock(
            "m", on_lock_lost=lambda _key, _token: told.set(), **on(server.port)
        )
        lock.__enter__()
    assert told.wait(PATIENCE)
    assert not lock.held
    with pytest.raises(tenure.LeaseLost):
        lock.__exit__(None, None, None)


@pytest.mark.usefixtures("no_thread_left")
def test_who_cannot_connect_leaves_no_thread() -> None:
    with InThread() as server:
        port = server.port
    lock = blocking.DistributedLock("m", **on(port))
    with pytest.raises(tenure.EngineUnavailable):
        lock.acquire()
