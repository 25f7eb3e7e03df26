"""A server, a holder that behaves well, and an attack beside it.

The holder has a mutex with a recovery window of `WINDOW` seconds, and renews and pings while the
attack goes on. Afterwards, whatever the attack was (`Arena.verify`):

* the lease was never lost, and the longest ping took a small part of the window;
* the memory of the server grew by no more than the attack's allowance;
* the server obeyed SIGTERM within its drain time, while the attack went on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import tenure
from tests.hostile.attacks import Attack
from tests.hostile.target import LISTENERS, Target
from tests.server.certificates import Authority
from tests.server.serving import Served, serving

WINDOW = 10.0
"""Seconds of the holder's recovery window."""

_LONGEST_PING = WINDOW / 3  # far more than a fair share takes, on a machine that is loaded too
_TOKEN = "0123456789abcdef0123456789abcdef"
_DRAIN_TIME = 10.0


class Arena:
    """A server under attack.

    Attributes:
        server: its process.
        target: the server as the attack sees it.
        pings: seconds that each ping of the holder took.
    """

    def __init__(self, server: Served, target: Target, attack: Attack) -> None:
        self.server = server
        self.target = target
        self.pings: list[float] = []
        self._attack = attack
        self._rss_before = _rss(server.pid)
        self._process: asyncio.subprocess.Process | None = None

    async def hold(self, seconds: float) -> None:
        """Hold a mutex for so long while the attack goes on, and ping.

        Raises:
            LeaseLost: the attack has cost the holder its lease.
        """
        query = f"?tls-ca={self.target.ca}" if self.target.ca else ""
        address = self.target.addresses["tenure"]
        if self._attack.tokens:
            address = address.replace("://", f"://{_TOKEN}@")
        async with (
            tenure.connect(address + query) as client,
            client.session(recovery_window=WINDOW) as session,
            session.mutex("held").lock(timeout=WINDOW) as lease,
        ):
            await self._begin()
            ends = time.monotonic() + seconds
            while (begun := time.monotonic()) < ends:
                mine = await session.semaphore("held").describe(owners=True)
                assert [each.order_id for each in mine.owners] == [lease.fencing_token]
                self.pings.append(time.monotonic() - begun)
                await asyncio.sleep(0.02)  # the pace of the pings
            assert lease.held

    @property
    def attackers_seconds(self) -> float:
        """Processor time of the attack until now."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def grown(self) -> int:
        """MiB by which the server has grown."""
        return _rss(self.server.pid) - self._rss_before

    async def verify(self) -> None:
        """Check that the server is well, and that it ends in order while the attack goes on."""
        assert self.grown < self._attack.memory, f"the server grew by {self.grown} MiB"
        assert max(self.pings) < _LONGEST_PING, f"a ping took {max(self.pings):.1f} s"
        assert self._process is not None
        assert self._process.returncode is None, "the attack has ended by itself"
        begun = time.monotonic()
        code = await self.server.end(signal.SIGTERM)
        took = time.monotonic() - begun
        assert code == 0, self.server.raw.decode()
        assert took < _DRAIN_TIME, f"SIGTERM was obeyed after {took:.1f} s"
        assert b"Traceback" not in self.server.raw, self.server.raw.decode()

    async def _begin(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.hostile.attacker"),
            *(self._attack.name, self.target.to_json()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"attacking\n"

    async def end(self) -> None:
        """End the attack. Safe to call twice."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.communicate()


@contextlib.asynccontextmanager
async def arena(attack: Attack, folder: Path, store: str = "") -> AsyncIterator[Arena]:
    """A server with a listener of each protocol, which is verified at the end of the block.

    Args:
        attack: beside the holder.
        folder: for its files.
        store: URL of its store; without one it is a file in the folder.
    """
    options = ["--drain-time", str(_DRAIN_TIME), *attack.options]
    if store:
        options += ["--store", store]
    ca, tls = "", ""
    if attack.tls:
        authority = Authority(folder)
        pair = authority.signs("server")
        ca, tls = authority.cert, "s"
        options += ["--tls-cert", pair.cert, "--tls-key", pair.key]
    if attack.tokens:
        tokens = folder / "tokens"
        tokens.touch(0o600)
        tokens.write_text(f"{_TOKEN}\n")
        options += ["--auth-token-file", str(tokens)]
    listen = [f"{each}{tls}://127.0.0.1:0" for each in LISTENERS]
    async with serving(folder, *options, listen=listen) as server:
        target = Target(dict(zip(LISTENERS, server.addresses, strict=True)), ca)
        beside = Arena(server, target, attack)
        try:
            yield beside
            await beside.verify()
        finally:
            await beside.end()


def _rss(pid: int) -> int:
    """MiB of memory that a process has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no VmRSS")
