"""What becomes of leases when somebody sets the clock of the server, and not those of holders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import tenure
from tenure.fencing import Fence, StaleToken
from tests.clean_up import clean_up_with
from tests.engines.redis.helpers import PATIENCE, is_waited_for, until
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import Server, a_folder
from tests.guarantees import REDIS, broken, guarantee

_LIBRARIES = (
    *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib/faketime").glob("libfaketimeMT.so.1"),
    *Path("/usr/local/lib/faketime").glob("libfaketimeMT.so.1"),
)


class Clocked(Server):
    """A server whose wall clock can be set; what counts elapsed time in it goes on."""

    def __init__(self, folder: Path) -> None:
        if not _LIBRARIES:
            pytest.skip("no libfaketime here: apt-get install faketime")
        self._ahead = folder / "ahead"
        environment = {
            # The allocator of Redis asks for the time before libfaketime can tell it: it gets none.
            "LD_PRELOAD": f"{_LIBRARIES[0]}:libc.so.6",
            "FAKETIME_TIMESTAMP_FILE": str(self._ahead),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        super().__init__(folder, environment=environment)
        self.set(0)

    def step(self, seconds: int) -> None:
        """Set the clock to so much from the machine's."""
        before = self.now()
        self.set(seconds)
        assert abs(self.now() - before) > 1000

    def now(self) -> int:
        told = self.tell("TIME")
        assert isinstance(told, tuple | list)
        return int(told[0])

    def set(self, seconds: int) -> None:
        """Set the clock, whether or not the server is running."""
        new = self._ahead.with_name("ahead.new")
        new.write_text(f"{seconds:+d}s\n")
        new.replace(self._ahead)


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    with a_folder() as folder:
        server = Clocked(folder)
        with clean_up_with(server.kill):
            server.start()
            yield server


@broken("wall clock", "kept", on=REDIS)
@guarantee("wall clock", "loss reported", "tokens rise", on=REDIS)
async def test_a_step_forward_ends_sessions_and_their_holders_are_told(clocked: Clocked) -> None:
    fence, former = Fence("the data"), []
    async with tenure.connect(clocked.url) as one, tenure.connect(clocked.url) as other:
        session = await one.session(recovery_window=6)
        entered = asyncio.Event()

        async def write() -> None:
            """On and on, until the lease is lost, or the data has seen a newer one."""
            async with session.mutex("m").lock() as lease:
                former.append(lease)
                while True:
                    fence.admit(lease.fencing_token)
                    entered.set()
                    await asyncio.sleep(0.01)

        writing = asyncio.create_task(write())
        await entered.wait()
        clocked.step(3600)
        async with asyncio.timeout(PATIENCE), other.mutex("m").lock() as lease:
            fence.admit(lease.fencing_token)
            with suppress(tenure.LeaseLost, StaleToken):
                await writing
            lost = await former[0].wait_lost()
            assert isinstance(lost, tenure.LeaseLost)
            assert one.clock.now() < former[0].deadline  # by the server's word, and not at the end
            assert lease.held
            assert lease.fencing_token > former[0].fencing_token
            with pytest.raises(StaleToken):
                fence.admit(former[0].fencing_token)


@guarantee("wall clock", "tokens rise", on=REDIS)
async def test_a_step_back_takes_nothing_away(clocked: Clocked) -> None:
    async with tenure.connect(clocked.url) as one, tenure.connect(clocked.url) as other:
        session = await one.session(recovery_window=1)
        async with session.mutex("m").lock() as lease:
            waiting = asyncio.ensure_future(other.mutex("m").lock())
            await is_waited_for(one, "m")
            clocked.step(-3600)
            until = one.clock.now() + 1.5  # longer than the window
            while one.clock.now() < until:
                await asyncio.sleep(0.05)
                lease.check()
        async with asyncio.timeout(PATIENCE), await waiting as later:
            assert later.fencing_token > lease.fencing_token
        await session.aclose()


async def test_who_watches_misses_nothing_when_the_clock_is_set(clocked: Clocked) -> None:
    async with (
        tenure.connect(f"{clocked.url}&max_window=1800") as one,
        tenure.connect(f"{clocked.url}&max_window=1800") as other,
        one.session(recovery_window=1800) as writer,
        other.session(recovery_window=1800) as reader,
    ):
        await writer.semaphore("s").create(1)
        watches = [each.semaphore("s").watch(data=True) for each in (writer, reader)]
        for states in watches:
            assert (await anext(states)).data == b""
        clocked.step(
            1200
        )  # changes are not published any more, until somebody says that he watches
        await writer.semaphore("s").update(b"new")
        async with asyncio.timeout(PATIENCE):
            for states in watches:
                assert (await anext(states)).data == b"new"
                await states.aclose()


# What is stored is bounded when the clock is set back

DAY = 86400


@pytest.mark.exhaustive
async def test_a_first_contact_a_day_ahead_does_not_freeze_the_namespace(clocked: Clocked) -> None:
    clocked.step(DAY)
    url = f"redis+unix://{clocked.socket}?max_window=6"
    async with tenure.connect(url) as client, client.session(recovery_window=6) as session:
        clocked.step(0)
        async with session.mutex("m").lock(timeout=PATIENCE) as lease:
            assert lease.held
    async with (
        tenure.connect(url) as client,
        client.session(recovery_window=6) as session,
        session.mutex("m").lock(timeout=1),
    ):
        pass


async def test_a_dead_session_ends_with_its_window_when_the_clock_is_set_back(
    clocked: Clocked,
) -> None:
    clocked.step(DAY)
    async with tenure.connect(clocked.url) as client, tenure.connect(clocked.url) as other:
        session = await client.session(recovery_window=2, resumable=True)
        _held = await session.mutex("m").lock()
        await session.detach()
        clocked.step(0)
        async with other.mutex("m").lock(timeout=PATIENCE) as lease:
            assert lease.held


@pytest.mark.exhaustive
async def test_the_deadline_of_a_cut_off_waiter_passes_when_the_clock_is_set_back(
    clocked: Clocked,
) -> None:
    clocked.step(DAY)
    url = f"{clocked.url}&max_window=600"
    async with (
        Proxy(clocked.socket, f"{clocked.socket}.proxy") as proxy,
        tenure.connect(url) as client,
        client.session() as session,
    ):
        await session.semaphore("s").create(limit=2)
        far = tenure.connect(f"{proxy.url}&max_window=600")
        waiter = await far.session(recovery_window=600)
        async with session.semaphore("s").acquire(1):
            waiting = asyncio.ensure_future(waiter.semaphore("s").acquire(2, timeout=4))
            await is_waited_for(client, "s")
            proxy.refuses = True
            proxy.cut()
            clocked.step(0)
            with suppress(tenure.TenureError):
                await waiting
            async with session.semaphore("s").acquire(1, timeout=PATIENCE) as lease:
                assert lease.held
        proxy.refuses = False
        await far.aclose()


@pytest.mark.exhaustive
async def test_a_take_over_ends_when_the_clock_is_set_back(clocked: Clocked) -> None:
    clocked.step(DAY)
    async with Proxy(clocked.socket, f"{clocked.socket}.proxy") as proxy:
        former = tenure.connect(proxy.url)
        session = await former.session(recovery_window=3, resumable=True)
        _held = await session.mutex("m").lock()
        proxy.refuses = True
        proxy.cut()
        async with tenure.connect(clocked.url) as client:
            resuming = asyncio.ensure_future(client.session(resume=session.resume_token))
            key = f"{{tenure}}:s:{session.id}"

            def is_under_way() -> bool:
                fields = clocked.tell("HKEYS", key)
                return isinstance(fields, list) and any(each[:1] == b"B" for each in fields)

            await until(is_under_way)
            clocked.step(0)
            async with asyncio.timeout(PATIENCE):
                resumed = await resuming
            await resumed.aclose()
        proxy.refuses = False
        await former.aclose()


async def test_an_uptime_that_follows_the_clock_is_not_relied_on(
    clocked: Clocked, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = clocked.tell("INFO", "memory")
    assert isinstance(allocator, dict)
    if not str(allocator["mem_allocator"]).startswith("jemalloc"):
        pytest.skip("the allocator of this server does not know its age")
    clocked.kill()
    clocked.set(-DAY)
    clocked.start()
    clocked.step(0)  # the clock is right now; the server seems to have been up for a day
    told = clocked.tell("INFO", "server")
    assert isinstance(told, dict)
    assert told["uptime_in_seconds"] > DAY - 60
    async with tenure.connect(clocked.url.partition("?")[0]) as client:
        with pytest.raises(tenure.AcquireTimeout, match="started less than"):
            await client.mutex("m").try_lock()
