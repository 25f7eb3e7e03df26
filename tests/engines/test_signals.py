"""Programs that SIGTERM ends: their leases pass on at once, on each engine."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

import tenure
from tenure import blocking
from tenure._client.internals import session_core
from tenure.errors import Unsupported
from tests.engines.stores import BY_NAME

SYNCHRONOUS = """
import signal, sys, time
from tenure import blocking

with blocking.connect(sys.argv[1]) as client, blocking.connect(sys.argv[1]) as another:
    client.release_on_signals()
    another.release_on_signals()
    with client.mutex("a").lock(), another.mutex("b").lock():
        print("held", flush=True)
        while True:  # Python may notice a signal only when a wait ends
            time.sleep(0.1)
"""

IN_A_THREAD = """
import sys, threading, time
from tenure import blocking

client = blocking.connect(sys.argv[1])
client.release_on_signals()

def work():
    with client.mutex("a").lock(), client.mutex("b").lock():
        print("held", flush=True)
        time.sleep(600)

thread = threading.Thread(target=work)
thread.start()
while thread.is_alive():  # Python may notice a signal only when a wait ends
    thread.join(0.1)
"""

ASYNCHRONOUS = """
import asyncio, sys
import tenure

async def main():
    async with tenure.connect(sys.argv[1]) as client, tenure.connect(sys.argv[1]) as another:
        client.release_on_signals()
        another.release_on_signals()
        async with client.mutex("a").lock(), another.mutex("b").lock():
            print("held", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""

WITHOUT_BLOCKS = """
import asyncio, sys
import tenure

async def main():
    client = tenure.connect(sys.argv[1])
    client.release_on_signals()
    leases = await client.mutex("a").lock(), await client.mutex("b").lock()
    print("held", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

AT_THE_TOP = """
import asyncio, sys
import tenure

async def main():
    client = tenure.connect(sys.argv[1])
    client.release_on_signals()
    async with client.mutex("a").lock(), client.mutex("b").lock():
        print("held", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())  # the loss leaves it before the client is closed
"""

PROGRAMS = {
    "synchronous": SYNCHRONOUS,
    "in a thread": IN_A_THREAD,
    "asynchronous": ASYNCHRONOUS,
    "without blocks": WITHOUT_BLOCKS,
    "at the top": AT_THE_TOP,
}


@contextmanager
def program(text: str, url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", text, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def ends_by_sigterm(text: str, url: str) -> None:
    with program(text, url) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "held\n", process.stderr.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert process.stderr.read() == ""


BY_A_SERVER = ["tenure-sqlite", "ydb", "dflockd"]


def all_are_free(url: str) -> None:
    """They pass on much sooner than after a recovery window."""
    with blocking.connect(url) as client:
        with client.mutex("a").lock(timeout=20), client.mutex("b").lock(timeout=20):
            pass
        with suppress(Unsupported):
            assert len(client.list_sessions()) == 1


@pytest.mark.parametrize(
    "engine",
    [
        *("sqlite", "redis", "postgresql", "etcd"),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in BY_A_SERVER),
    ],
)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_leases_of_a_program_that_sigterm_ends_pass_on_at_once(kind: str, engine: str) -> None:
    with BY_NAME[engine].make().empty() as url:
        ends_by_sigterm(PROGRAMS[kind], url)
        all_are_free(url)


@pytest.mark.parametrize("engine", ["sqlite", "redis", "postgresql", "etcd", *BY_A_SERVER])
def test_a_close_is_completed_when_the_program_has_ended(engine: str) -> None:
    async def main(url: str, iterations: int) -> None:
        client = tenure.connect(url)
        leases.append(await client.mutex("a").lock(timeout=20))
        leases.append(await client.mutex("b").lock(timeout=20))
        closing.append(asyncio.ensure_future(client.aclose()))
        for _ in range(iterations):
            await asyncio.sleep(0)

    leases: list[tenure.Lease] = []
    closing: list[asyncio.Future[None]] = []
    with BY_NAME[engine].make().empty() as url:
        for iterations in (1, 2, 3, 5, 8, 12):
            asyncio.run(main(url, iterations))
        all_are_free(url)


@pytest.mark.parametrize("what", ["client", "session"])
@pytest.mark.parametrize("engine", ["sqlite", "redis", "postgresql", "etcd", *BY_A_SERVER])
def test_a_close_that_begins_as_the_program_ends_is_completed(engine: str, what: str) -> None:
    async def close(url: str, iterations: int, held: asyncio.Event, stop: asyncio.Event) -> None:
        client = tenure.connect(url)
        session = await client.session()
        leases.append(await session.mutex("a").lock(timeout=20))
        leases.append(await session.mutex("b").lock(timeout=20))
        held.set()
        await stop.wait()
        for _ in range(iterations):
            await asyncio.sleep(0)
        try:
            if what == "session":
                try:
                    await session.aclose()
                finally:
                    left.append(session_core(session)._leaving.task)
        finally:
            await client.aclose()

    async def main(url: str, iterations: int) -> None:
        held, stop = asyncio.Event(), asyncio.Event()
        closing.append(asyncio.create_task(close(url, iterations, held, stop)))
        async with asyncio.timeout(30):
            await held.wait()
        asyncio.get_running_loop().call_soon(stop.set)
        await stop.wait()

    leases: list[tenure.Lease] = []
    closing: list[asyncio.Task[None]] = []
    left: list[asyncio.Task[None]] = []
    with BY_NAME[engine].make().empty() as url:
        for iterations in (0, 1):  # with more, the task is cancelled before it closes anything
            asyncio.run(main(url, iterations))
        all_are_free(url)
    assert not any(each.cancelled() or each.exception() for each in left)


IN_HASTE = """
import tenure._client.signals
tenure._client.signals.ACTION_TIMEOUT = 0.3
"""

STUCK = """
import asyncio, sys, time
import tenure

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        client.release_on_signals()
        async with client.mutex("a").lock():
            print("held", flush=True)
            while True:  # the loop stands still
                time.sleep(0.1)

asyncio.run(main())
"""

STOPPED = """
import asyncio, sys, time
import tenure

async def main():
    client = tenure.connect(sys.argv[1])
    client.release_on_signals()
    return await client.mutex("a").lock()

loop = asyncio.new_event_loop()
lease = loop.run_until_complete(main())
print("held", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("text", [STUCK, STOPPED], ids=["stuck", "stopped"])
def test_a_loop_that_does_not_run_does_not_keep_the_action(text: str) -> None:
    ends_by_sigterm(IN_HASTE + text, "memory://")


def test_the_handler_of_a_program_whose_loop_is_stuck_is_called() -> None:
    own = "import signal, os\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n"
    with program(own + IN_HASTE + STUCK, "memory://") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
