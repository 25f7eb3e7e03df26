"""`tenure serve` for chaos: one server on a store, and clients behind a bad network.

The processes reach the server through a proxy, which cuts and silences; the server is killed, ended
and stopped. Nobody sees there that a client died: its sessions live for their window, and after a
restart of the server for their node's grace period on top of that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.adapter import Engine, Fault, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults
from tenure.model import NodeConfig
from tests.hostile.target import Listener, Target
from tests.ports import free_port

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
    behind: type[Engine] | None = None

    def __init__(self, folder: Path) -> None:
        """Choose the ports; `start` starts the server."""
        super().__init__(folder)
        self._ports = [free_port() for _ in self.schemes]
        self._network = Proxy(self._ports[0])
        self._server: Server | None = None
        self._store: Engine | None = None
        if self.behind is not None:
            (folder / "store").mkdir()
            self._store = self.behind(folder / "store")

    def _command(self) -> Sequence[str]:
        file = f"sqlite:///{self.folder}/store.db?durability=full"
        listening = zip(self.schemes, self._ports, strict=True)
        return (
            *(sys.executable, "-m", "tenure", "serve", "--log-level", "warning"),
            *("--store", file if self._store is None else self._store.url),
            *(
                word
                for scheme, port in listening
                for word in ("--listen", f"{scheme}://127.0.0.1:{port}")
            ),
        )

    @property
    def url(self) -> str:
        """URL of the native listener, behind the network."""
        return f"tenure://127.0.0.1:{self._network.port}"

    async def start(self) -> None:
        """Start the store, the server and its network."""
        if self._store is not None:
            await self._store.start()
        # It listens in this order: where it does at the last one, it does at all.
        self._server = Server(self._command(), self._ports[-1], self.folder / "log")
        self.not_done["restart without data"] = "nothing is promised without the server's file"
        self.not_done["a full disk, a jumping clock"] = "done to the same store by --engine sqlite"
        await self._server.start()
        await self._network.start()

    async def stop(self) -> None:
        """Stop the network, the server and the store."""
        await self._network.aclose()
        if self._server is not None:
            await self._server.stop()
        if self._store is not None:
            await self._store.stop()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the server and the network, and a flood; or those of the store.

        Behind a store with a server of its own, that one's faults are inflicted: two servers
        that are out of order in turn would leave no time for anything to be granted.
        """
        if self._store is not None:
            return self._store.faults()
        flood = Fault("flood", "a hostile client floods the server", self._flood, (0.5, 2.0))
        return [*server_faults([self.server]), *network_faults([self._network]), flood]

    @property
    def server(self) -> Server:
        """The server, after `start`."""
        assert self._server is not None
        return self._server

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
    """A server on an SQLite file, with YDB's API for the processes.

    That has no calls for what administrators do. Nor does it know a call that comes again after its
    answer was lost: an update may be written twice, with another one in between, and two processes
    may both be told that they deleted (docs/engines/ydb.md).
    """

    name = "ydb"
    schemes = ("ydb", "tenure")
    one_writer = True
    frugal = True
    shows_waits = False

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


def in_front_of(store: type[Engine], server: type[Served]) -> type[Served]:
    """Return the server in front of a store that has a server of its own."""
    facts = {
        "__doc__": f"{server.name} in front of {store.name}.",
        "name": f"{server.name}-{store.name}",
        "lingers": max(server.lingers, store.lingers),
        "behind": store,
    }
    return type(f"{server.__name__}InFrontOf{store.__name__}", (server,), facts)
