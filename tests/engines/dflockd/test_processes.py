"""A program that holds is killed, or stopped for longer than its lease."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import tenure
from tests.engines.dflockd.servers import Server
from tests.guarantees import DFLOCKD, guarantee

PATIENCE = 30.0

HOLDER = """
import asyncio, sys, tenure

async def main():
    async with tenure.connect(sys.argv[1]) as client:
        session = await client.session(recovery_window=2)
        try:
            async with session.mutex("m").lock():
                print("held", flush=True)
                await asyncio.Event().wait()
        except tenure.LeaseLost:
            print("lost", flush=True)

asyncio.run(main())
"""


@contextmanager
def a_holder(url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@guarantee("killed", "one owner", "others proceed", "nothing leaks", on=DFLOCKD)
async def test_the_lock_of_a_killed_program_passes_on_at_once(server: Server) -> None:
    with a_holder(server.url) as process:
        async with tenure.connect(server.url) as client:
            assert await client.mutex("m").try_lock() is None
            process.kill()
            async with client.mutex("m").lock(timeout=PATIENCE):
                pass


@guarantee("stopped", "one owner", "loss reported", "others proceed", on=DFLOCKD)
async def test_a_program_that_is_stopped_past_its_lease_learns_so_when_it_goes_on(
    server: Server,
) -> None:
    with a_holder(server.url) as process:
        assert process.stdout is not None
        async with tenure.connect(server.url) as client:
            process.send_signal(signal.SIGSTOP)
            async with client.mutex("m").lock(timeout=PATIENCE) as lease:
                process.send_signal(signal.SIGCONT)
                assert await asyncio.to_thread(process.stdout.readline) == "lost\n"
                assert lease.held
