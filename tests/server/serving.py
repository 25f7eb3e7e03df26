"""`tenure serve` as a process: started, listened to, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Any

from tests.ports import free_port

SERVE = [sys.executable, "-W", "error", "-m", "tenure", "serve"]
PATIENCE = 60.0
"""Seconds after which a server on a busy machine will not do any more what it should."""


class Served:
    """One server. Its log is read line by line, each an object.

    Attributes:
        lines: all that it has said.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[dict[str, Any]] = []
        self.raw = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        """Where it listens: its first address."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        (ready,) = (line for line in self.lines if line["event"] == "ready")
        found: list[str] = ready["addresses"].split()
        return found

    async def until(self, event: str) -> dict[str, Any]:
        """The next line that tells of this event."""
        assert self._process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            while line := await self._process.stderr.readline():
                self.raw += line
                told: dict[str, Any] = json.loads(line)
                self.lines.append(told)
                if told["event"] == event:
                    return told
        raise AssertionError(f"it ended without {event!r}; it said {self.raw.decode()}")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    async def end(self, number: int | None = SIGTERM) -> int:
        """Its exit code, after this signal if any."""
        if number is not None:
            self.send(number)
        async with asyncio.timeout(PATIENCE):
            _, rest = await self._process.communicate()
        self.raw += rest
        self.lines += map(json.loads, rest.splitlines())
        assert self._process.returncode is not None
        return self._process.returncode

    def told(self, event: str) -> list[dict[str, Any]]:
        """The lines so far that tell of this event."""
        return [line for line in self.lines if line["event"] == event]


@contextlib.asynccontextmanager
async def launched(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = SERVE,
    **more: Any,
) -> AsyncIterator[Served]:
    """A server that may or may not come up; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--log-format", "json", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder), **(environment or {})},
        limit=1 << 20,
        **more,
    )
    served = Served(process)
    try:
        yield served
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *options: str,
    listen: Sequence[str] = ("tenure://127.0.0.1:0",),
    **more: Any,
) -> AsyncIterator[Served]:
    """A server that is ready, by default on a free port and the default store.

    Port 0 is replaced, so that another server can listen at the same address afterwards.
    """
    where = []
    for url in listen:
        before, zero, after = url.partition("127.0.0.1:0")
        where += ["--listen", f"{before}127.0.0.1:{free_port()}{after}" if zero else url]
    async with launched(folder, *where, *options, **more) as served:
        await served.until("ready")
        yield served
