"""A server whose log no one reads, or that has no stderr at all: it serves and ends as ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import tenure

PATIENCE = 60.0

WITHOUT = """
import os, sys
os.close(1)
os.close(2)
os.execv(sys.executable, [sys.executable, "-m", "tenure", *sys.argv[1:]])
"""


@contextlib.asynccontextmanager
async def serving(
    folder: Path, *command: str, **more: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server that has told the service manager that it is ready, and its address."""
    address = f"tenure+unix://{folder}/tenure.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *command,
            *("serve", "--listen", address, "--log-level", "debug"),
            stdin=asyncio.subprocess.DEVNULL,
            env={
                **os.environ,
                "XDG_STATE_HOME": str(folder),
                "NOTIFY_SOCKET": str(folder / "notify"),
            },
            **more,
        )
        try:
            async with asyncio.timeout(PATIENCE):
                told = await asyncio.get_running_loop().sock_recv(manager, 4096)
            assert told.startswith(b"READY=1")
            yield process, address
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def serves_and_ends(process: asyncio.subprocess.Process, address: str) -> None:
    """It lets clients lock, and ends in order at SIGTERM."""
    for _ in range(30):  # each of them is lines of the log
        async with tenure.connect(address) as client, client.mutex("m").lock(timeout=PATIENCE):
            pass
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 0


async def test_a_stuck_reader_of_stderr_stops_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
        command = sys.executable, "-m", "tenure"
        async with serving(tmp_path, *command, stderr=writing) as (process, address):
            await serves_and_ends(process, address)
    finally:
        os.close(reading)
        os.close(writing)


async def test_a_server_without_stdout_and_stderr_serves_and_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, sys.executable, "-c", WITHOUT) as (process, address):
        if sys.platform == "linux":
            for file in (1, 2):
                assert os.readlink(f"/proc/{process.pid}/fd/{file}") == os.devnull
        await serves_and_ends(process, address)
