"""Programs on one member of etcd that are killed and stopped; and a member that is full."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator

import pytest

import tenure
from tests.engines.etcd.contest import PATIENCE, contest
from tests.engines.etcd.servers import a_cluster, a_prefix, shared
from tests.engines.sqlite.holder import Holder
from tests.guarantees import ETCD, guarantee

WINDOW = 2.0


@pytest.fixture
def url() -> Iterator[str]:
    with a_prefix() as place:
        yield place


@contextlib.asynccontextmanager
async def holders(url: str, *windows: float) -> AsyncIterator[list[Holder]]:
    """Processes, each with a session of this window; gone afterwards."""
    started: list[Holder] = []
    try:
        for window in windows:
            started.append(await Holder.start(url, attach=False))
            await started[-1].do("begin", window=window, resumable=False)
        yield started
    finally:
        for holder in started:
            await holder.end()


@guarantee("killed", "one owner", "in order", "tokens rise", "others proceed", on=ETCD)
async def test_after_a_killed_holder_and_a_killed_waiter_the_next_in_line_is_granted(
    url: str,
) -> None:
    async with holders(url, 60, WINDOW, WINDOW, 60) as (last, holder, waiter, following):
        token = await holder.do("lock", name="m")
        for each in (waiter, following, last):
            await each.do("line_up", name="m")
        await waiter.kill()
        await holder.kill()
        next_token = (await following.hear("holds", name="m"))["token"]
        assert not last.has_heard("holds", name="m")
        await following.do("release", name="m")
        last_token = (await last.hear("holds", name="m"))["token"]
        assert token < next_token < last_token


@guarantee("killed", "nothing leaks", on=ETCD)
async def test_nothing_is_left_of_a_program_that_was_killed(url: str) -> None:
    prefix = f"{url.rpartition('=')[2]}/"
    async with tenure.connect(url) as client:
        async with client.mutex("m").lock():
            pass
        before = set(await asyncio.to_thread(shared().keys, prefix))
        async with holders(url, WINDOW) as (holder,):
            await holder.do("lock", name="m")
            assert set(await asyncio.to_thread(shared().keys, prefix)) > before
            await holder.kill()
        async with client.mutex("m").lock(timeout=PATIENCE):
            pass
        assert set(await asyncio.to_thread(shared().keys, prefix)) == before


@guarantee("stopped", "one owner", "tokens rise", "loss reported", "others proceed", on=ETCD)
async def test_a_stopped_holder_believes_no_more_when_the_next_one_holds(url: str) -> None:
    async with holders(url, WINDOW, 30) as (stopped, other):
        token = await stopped.do("lock", name="m")
        await other.do("line_up", name="m")
        stopped.stop()
        granted = await other.hear("holds", name="m")
        stopped.signal(signal.SIGCONT)
        lost = await stopped.hear("lost", name="m")
        assert lost["last"] < granted["at"]
        assert lost["deadline"] <= granted["at"], "it could still believe"
        assert granted["token"] > token


@guarantee("stopped", "kept", on=ETCD)
@guarantee("stuck peer", "in order", "kept", "others proceed", on=ETCD)
async def test_a_program_that_is_stopped_within_its_window_holds_up_nobody_and_loses_nothing(
    url: str,
) -> None:
    async with holders(url, 20) as (stopped,):
        await stopped.do("lock", name="m")
        async with contest(url) as seen:
            stopped.stop()
            await seen.turns()
            stopped.signal(signal.SIGCONT)
            await seen.turns()
        assert seen.sessions == 16
        await stopped.do("release", name="m")  # which raises of a lease that is lost


@guarantee("restarted", "kept", "answers stand", on=ETCD)
async def test_a_program_that_was_killed_is_resumed_with_what_it_had(url: str) -> None:
    async with tenure.connect(url) as client:
        holder = await Holder.start(url, attach=False)
        try:
            resume = await holder.do("begin", window=20, resumable=True)
            token = await holder.do("lock", name="m")
            await holder.kill()
        finally:
            await holder.end()
        async with client.session(resume=resume, assume_dead=True) as session:
            ticket = session.mutex("m").recover()
            assert ticket is not None
            async with await ticket.wait(timeout=PATIENCE) as lease:
                assert lease.fencing_token == token


@guarantee("disk full", "kept", "nothing leaks", "others proceed", "answers stand", on=ETCD)
async def test_a_member_without_space_grants_nothing_and_keeps_what_is_held() -> None:
    with a_cluster(1, "--quota-backend-bytes", str(4 << 20)) as cluster:
        async with tenure.connect(cluster.url) as client:
            session = await client.session(recovery_window=3)
            lease = await session.mutex("m").lock()
            await session.semaphore("text").create(1)

            async def fill() -> None:
                for number in range(100):
                    await session.semaphore("text").update(b"%d" % number * 250_000)

            with pytest.raises(tenure.EngineError, match="no space"):
                await fill()
            with pytest.raises(tenure.EngineError, match="no space"):
                await session.mutex("another").lock(timeout=PATIENCE)
            await asyncio.sleep(4)  # longer than the window
            assert lease.held
            await lease.release()
            await asyncio.to_thread(cluster.make_space)
            async with session.mutex("m").lock(timeout=PATIENCE) as later:
                assert later.fencing_token > lease.fencing_token


IN_A_CHILD = """
    import asyncio, os, signal, sys, warnings
    import tenure

    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of a fork among threads

    async def lock(name, then):
        async with tenure.connect(sys.argv[1]) as client, client.mutex(name).lock():
            return await then()

    async def nothing():
        return 0

    async def fork():
        if (child := os.fork()) == 0:
            signal.alarm(60)
            asyncio.events._set_running_loop(None)  # as multiprocessing's children have none
            os._exit(asyncio.run(lock("in the child", nothing)))
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        async with tenure.connect(sys.argv[1]) as client, client.mutex("afterwards").lock():
            return os.waitstatus_to_exitcode(status)

    sys.exit(asyncio.run(lock("in the parent", fork)))
"""


@guarantee("fork", "others proceed", on=ETCD)
async def test_a_child_of_a_program_with_an_open_client_connects_and_locks(url: str) -> None:
    program = (sys.executable, "-c", textwrap.dedent(IN_A_CHILD), url)
    process = await asyncio.create_subprocess_exec(*program)
    assert await process.wait() == 0
