"""A loop that stands still keeps its leases, up to `max_stall`: a thread renews beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.native import connect
from tenure.testing.recorder import Recorder
from tests.engines.stores import a_file
from tests.guarantees import guarantee
from tests.server.served import served

WINDOW = 3.0


def stand_still(clock: SystemClock, seconds: float) -> None:
    """Hold up the loop that calls this, as a long computation does."""
    end = clock.now() + seconds
    while clock.now() < end:
        time.sleep(0.01)


@pytest.fixture
def store() -> Iterator[str]:
    with a_file() as url:
        yield url


@pytest.mark.exhaustive
@guarantee("stalled", "one owner", "kept", on="tenure")
async def test_a_loop_that_stands_still_keeps_its_lease(store: str) -> None:
    with served(store) as server:
        async with (
            tenure.connect(store) as other,
            tenure.connect(server.address) as client,
            client.session(recovery_window=WINDOW, max_stall=20 * WINDOW) as session,
        ):
            lease = await session.mutex("m").lock()
            stand_still(SystemClock(), 1.5 * WINDOW)
            assert lease.held
            assert await other.mutex("m").try_lock() is None
            await lease.release()


@pytest.mark.exhaustive
async def test_the_server_that_has_the_session_is_found_among_several(store: str) -> None:
    with served(store) as one, served(store) as two:
        places = [each.address.rpartition("/")[2] for each in (one, two)]
        address = f"tenure://127.0.0.1:1,{','.join(places)}"
        async with (
            tenure.connect(address) as client,
            client.session(recovery_window=WINDOW, max_stall=20 * WINDOW) as session,
        ):
            lease = await session.mutex("m").lock()
            stand_still(SystemClock(), 1.5 * WINDOW)
            assert lease.held


@pytest.mark.exhaustive
@guarantee("stalled", "loss reported", on="tenure")
async def test_a_loop_that_stands_still_for_too_long_loses_its_lease(store: str) -> None:
    with served(store) as server:
        async with tenure.connect(server.address) as client:
            session = await client.session(recovery_window=WINDOW, max_stall=0.1)
            lease = await session.mutex("m").lock()
            stand_still(SystemClock(), 1.5 * WINDOW)
            assert not lease.held
            assert session.state == "expired"


async def test_a_proof_comes_while_the_loop_stands_still(store: str) -> None:
    with served(store) as server:
        engine = connect(server.address, SystemClock())
        await engine.open()
        heard = Recorder()
        session = await engine.attach(Attach("/default", WINDOW), heard)
        before = len(heard.proofs)
        proven = threading.Event()

        def renew_and_look() -> None:
            session.renew()
            deadline = time.monotonic() + 30
            while len(heard.proofs) == before and time.monotonic() < deadline:
                time.sleep(0.005)
            proven.set()

        thread = threading.Thread(target=renew_and_look)
        thread.start()
        assert proven.wait(60)  # the loop does not turn meanwhile
        thread.join()
        assert len(heard.proofs) > before
        await asyncio.sleep(0)
        await engine.aclose()
        names = {each.name for each in threading.enumerate()}
        assert "tenure-native-heartbeat" not in names
