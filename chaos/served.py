"""`tenure serve` for chaos: one server on an SQLite file, and clients behind a bad network.

The processes reach the server through a proxy, which cuts and silences; the server is killed, ended
and stopped. Nobody sees there that a client died: its sessions live for their window, and after a
restart of the server for their node's grace period on top of that.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from chaos.adapter import Engine, Fault, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults
from tenure.model import NodeConfig
from tests.hostile.target import Listener, Target

__all__ = ["OverYdb", "Served"]

_FLOODS: dict[Listener, tuple[str, ...]] = {
    "tenure": ("native-pings", "native-renewals", "connecting-silent"),
    "ydb": ("http2-settings", "http2-pings", "http2-rapid-resets", "http2-header-lists"),
}
"""Attacks of `tests.hostile`, by the listener; they leave no session behind."""


class Served(Engine):
    """`tenure serve` with tenure's own protocol."""

    name = "tenure"
    nodes = NodeConfig(
        session_grace_period=1.0
    )  # else everybody waits for the dead, and little is seen
    lingers = 5.0
    schemes: tuple[Listener, ...] = ("tenure",)

    def __init__(self, folder: Path) -> None:
        """Choose the ports; `start` starts the server."""
        super().__init__(folder)
        self._ports = _free(len(self.schemes))
        listening = zip(self.schemes, self._ports, strict=True)
        command = (
            *(sys.executable, "-m", "tenure", "serve", "--log-level", "warning"),
            *("--store", f"sqlite:///{folder}/store.db?durability=full"),
            *(
                word
                for scheme, port in listening
                for word in ("--listen", f"{scheme}://127.0.0.1:{port}")
            ),
        )
        # It listens in this order: where it does at the last one, it does at all.
        self._server = Server(command, self._ports[-1], folder / "log")
        self._network = Proxy(self._ports[0])

    @property
    def url(self) -> str:
        """URL of the native listener, behind the network."""
        return f"tenure://127.0.0.1:{self._network.port}"

    async def start(self) -> None:
        """Start the server and its network."""
        self.not_done["restart without data"] = "nothing is promised without the server's file"
        self.not_done["a full disk, a jumping clock"] = "done to the same store by --engine sqlite"
        await self._server.start()
        await self._network.start()

    async def stop(self) -> None:
        """Stop the network and the server."""
        await self._network.aclose()
        await self._server.stop()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the server and the network, and a flood."""
        flood = Fault("flood", "a hostile client floods the server", self._flood, (0.5, 2.0))
        return [*server_faults([self._server]), *network_faults([self._network]), flood]

    @asynccontextmanager
    async def _flood(self, scene: Scene) -> AsyncIterator[str]:
        """Run a process beside the proxy, with 16 connections of its own."""
        name = scene.random.choice([each for scheme in self.schemes for each in _FLOODS[scheme]])
        ports = zip(self.schemes, self._ports, strict=True)
        target = Target({scheme: f"{scheme}://127.0.0.1:{port}" for scheme, port in ports})
        attacker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.hostile.attacker", name, target.to_json()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,  # it may be cut off in any way
            cwd=Path(__file__).parents[1],
        )
        try:
            yield name
        finally:
            attacker.kill()
            await attacker.wait()


class OverYdb(Served):
    """The same, with YDB's API for the processes; it has no calls for what administrators do.

    Nor does it know a call that comes again after its answer was lost: an update may be written
    twice, with another one in between, and two processes may both be told that they deleted
    (docs/engines/ydb.md).
    """

    name = "ydb"
    schemes = ("ydb", "tenure")
    one_writer = True

    @property
    def url(self) -> str:
        """URL of the listener for YDB's clients, behind the network."""
        return f"ydb://127.0.0.1:{self._network.port}/local"

    @property
    def admin_url(self) -> str:
        """URL of the native listener, which has no network before it."""
        return f"tenure://127.0.0.1:{self._ports[1]}"

    async def start(self) -> None:
        """Start the server and its network."""
        self.not_done["sessions that are resumed elsewhere"] = "YDB's API has none"
        self.not_done["two that write a document"] = "a lost answer leaves open whose change it was"
        await super().start()


def _free(count: int) -> list[int]:
    """Ports of this host that nobody has."""
    with ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]
