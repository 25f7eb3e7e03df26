"""Leases, places and quarantine when the clock of the server is set; the holders' clocks go on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tests.clean_up import clean_up_with
from tests.engines.postgresql.helpers import (
    PATIENCE,
    is_waited_for,
    queue_of,
    until_detached_and_back,
)
from tests.engines.postgresql.servers import PostgresServer
from tests.guarantees import POSTGRESQL, broken, guarantee

pytestmark = pytest.mark.exhaustive

_LIBRARIES = (
    *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib/faketime").glob("libfaketimeMT.so.1"),
    *Path("/usr/local/lib/faketime").glob("libfaketimeMT.so.1"),
)
_WINDOW = 2.0
_LONG_WINDOW = 10.0
"""Seconds; longer than a server takes to start on a busy machine."""
_SOON = 4.0
"""Seconds within which a waiter notices that its time has come, on a busy machine."""


class ClockedServer(PostgresServer):
    """A server whose wall clock can be set; its clock of elapsed time goes on."""

    def __init__(self, folder: Path) -> None:
        if not _LIBRARIES:
            pytest.skip("no libfaketime here: apt-get install faketime")
        super().__init__(folder)
        self._ahead = folder / "ahead"
        self.environment = {
            "LD_PRELOAD": str(_LIBRARIES[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._ahead),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        self._set(0)

    def step(self, seconds: int) -> None:
        """Set the clock to so much from the machine's."""
        before = self._now()
        self._set(seconds)
        assert abs(self._now() - before) > 1000

    def _now(self) -> float:
        ((now,),) = self.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
        assert isinstance(now, float)
        return now

    def _set(self, seconds: int) -> None:
        new = self._ahead.with_name("ahead.new")
        new.write_text(f"{seconds:+d}s\n")
        new.chmod(0o644)
        new.replace(self._ahead)


@pytest.fixture
def clocked() -> Iterator[ClockedServer]:
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    with clean_up_with(lambda: shutil.rmtree(folder, ignore_errors=True)):
        server = ClockedServer(folder)
        server.create()
        server.start()
        with clean_up_with(server.end):
            yield server


@broken("wall clock", "kept", on=POSTGRESQL)
@guarantee("wall clock", "loss reported", "tokens rise", on=POSTGRESQL)
async def test_a_step_forward_ends_sessions_and_their_holders_learn_of_it(
    clocked: ClockedServer,
) -> None:
    async with tenure.connect(clocked.url) as one, tenure.connect(clocked.url) as other:
        session = await one.session(recovery_window=6)
        lease = await session.mutex("m").lock()
        clocked.step(3600)
        async with other.mutex("m").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > lease.fencing_token
            async with asyncio.timeout(PATIENCE):
                lost = await lease.wait_lost()
            assert isinstance(lost, tenure.LeaseLost)
            assert one.clock.now() < lease.deadline  # the store has reported it
            assert later.held
            clocked.step(0)
            async with other.mutex("another").lock(timeout=PATIENCE) as last:
                assert last.fencing_token > later.fencing_token


@guarantee("wall clock", "tokens rise", on=POSTGRESQL)
async def test_a_step_back_costs_no_lease(clocked: ClockedServer) -> None:
    async with tenure.connect(clocked.url) as one, tenure.connect(clocked.url) as other:
        session = await one.session(recovery_window=_WINDOW)
        async with session.mutex("m").lock() as lease:
            waiting = asyncio.ensure_future(other.mutex("m").lock())
            await is_waited_for(one, "m")
            clocked.step(-3600)
            await asyncio.wait([waiting], timeout=2 * _WINDOW)
            assert not waiting.done()
            lease.check()
        async with asyncio.timeout(PATIENCE), await waiting as later:
            assert later.fencing_token > lease.fencing_token
        await session.aclose()


async def test_after_a_step_back_a_silent_session_expires_within_its_window(
    clocked: ClockedServer,
) -> None:
    async with tenure.connect(clocked.url) as one, tenure.connect(clocked.url) as other:
        session = await one.session(recovery_window=_WINDOW)
        _held = await session.mutex("m").lock()
        await session.detach()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(one, "m")
        clocked.step(-3600)
        stepped = one.clock.now()
        async with await waiting:
            # A look every ten seconds finds times that lie in the future.
            assert one.clock.now() < stepped + 10 + _WINDOW + _SOON


async def test_after_a_step_back_a_request_times_out_when_its_time_is_over(
    clocked: ClockedServer,
) -> None:
    async with (
        tenure.connect(clocked.url) as one,
        tenure.connect(clocked.url) as other,
        one.mutex("m").lock(),
        other.session() as session,
    ):
        begun = one.clock.now()
        waiting = asyncio.ensure_future(session.mutex("m").lock(timeout=_WINDOW))
        await is_waited_for(one, "m")
        clocked.step(-3600)
        with pytest.raises(tenure.AcquireTimeout):
            await waiting
        assert begun + _WINDOW <= one.clock.now() < begun + _WINDOW + _SOON
        assert await queue_of(one, "m") == (1, 0)


async def test_after_a_step_back_a_takeover_waits_no_longer_than_the_window(
    clocked: ClockedServer,
) -> None:
    async with tenure.connect(clocked.url) as one, tenure.connect(clocked.url) as other:
        session = await one.session(recovery_window=_WINDOW, resumable=True)
        lease = await session.mutex("m").lock()
        clocked.execute(
            "INSERT INTO tenure.former SELECT id, '0.0', clock_timestamp() FROM tenure.sessions"
            f" WHERE id = {session.id}"
        )
        clocked.step(-3600)
        begun = one.clock.now()
        async with asyncio.timeout(PATIENCE):
            again = await other.session(resume=session.resume_token)
        assert one.clock.now() < begun + 2 * _WINDOW + _SOON
        assert not lease.held
        await again.aclose()


async def test_after_a_step_back_a_quarantine_lasts_no_longer_than_the_window(
    clocked: ClockedServer,
) -> None:
    async with tenure.connect(f"{clocked.url}&durability=process") as client:
        events = client.events()
        session = await client.session(recovery_window=_LONG_WINDOW)
        lease = await session.mutex("m").lock()
        clocked.crash()
        await asyncio.to_thread(clocked.start)
        await until_detached_and_back(events)
        clocked.step(-3600)
        stepped = client.clock.now()
        async with client.mutex("free").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > lease.fencing_token
            assert client.clock.now() < stepped + 2 * _LONG_WINDOW + _SOON
        await session.aclose()
        await events.aclose()
