"""Redis for chaos: one server of ours behind a network that can be broken.

`redis` writes everything to disk before it answers, and may end at any moment. `redis-memory` keeps
nothing: there an end of the server is not tried, because it loses by design what the history would
miss. `redis-lossy` loses everything, again and again: for the quarantine that its clients ask for
nobody may be granted what a former holder believes in yet, and tokens go on rising. All of them
are stopped, put to sleep, lose their scripts and have their connections killed.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from redis.asyncio import Redis as Client

import tenure
from chaos.adapter import Engine, Fault, Inflict, Scene
from chaos.network import Proxy, network_faults
from chaos.runner import prepare
from chaos.servers import Server, server_faults
from chaos.work import CONFIGS, NODE
from tenure.model import NodeConfig
from tests.ports import free_port

_FATAL = frozenset({"kill-server", "restart-server"})
"""What a server without persistence does not survive."""

_QUARANTINE = 30.0
"""Seconds; as long as the longest window, that of implicit sessions."""

_BEFORE = 2.0
"""So many seconds before the end of the quarantine nobody believes any more."""

_LASTS = (20.0, 40.0)
"""Seconds for which nothing else is done to the server after that, so that there is work."""


class _NoAnswer(Exception):
    """Nobody tells whether something was there that is gone now."""


class Redis(Engine):
    """A server that survives its own end."""

    name = "redis"
    nodes = NodeConfig(session_grace_period=1.0)  # as for the server of our own
    lingers = 5.0
    persistence: tuple[str, ...] = ("--appendonly", "yes", "--appendfsync", "always")

    def __init__(self, folder: Path) -> None:
        """Prepare the server; `start` starts it."""
        super().__init__(folder)
        self._server: Server | None = None
        self._proxy: Proxy | None = None

    @property
    def url(self) -> str:
        """URL of the server, behind the network."""
        assert self._proxy is not None
        return f"redis://127.0.0.1:{self._proxy.port}?fresh=true"

    async def start(self) -> None:
        """Start the server and its network."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise ValueError("no redis-server here (Debian: redis-server)")
        port = free_port()
        command = (
            *(program, "--port", str(port), "--dir", str(self.folder), "--save", ""),
            *("--enable-debug-command", "yes", *self.persistence),
        )
        self._server = Server(command, port, self.folder / "redis.log")
        await self._server.start()
        self._proxy = Proxy(port)
        await self._proxy.start()
        self.not_done["restart without data"] = (
            "what was told does not stand then; tests/engines/redis/test_faults.py has what does"
        )
        self.not_done["failover"] = "tests/engines/redis/test_sentinel.py has one"
        self.not_done["clock-jump"] = "the server's clock is the machine's"

    async def stop(self) -> None:
        """Stop the network and the server."""
        if self._proxy is not None:
            await self._proxy.aclose()
        if self._server is not None:
            await self._server.stop()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the server and the network."""
        assert self._server is not None
        assert self._proxy is not None
        return [
            *server_faults([self._server]),
            *network_faults([self._proxy]),
            Fault(
                "kill-connections",
                "all connections are ended by the server",
                self._tell(
                    ("CLIENT", "KILL", "TYPE", "pubsub"), ("CLIENT", "KILL", "TYPE", "normal")
                ),
                (0.05, 0.2),
            ),
            Fault(
                "flush-scripts",
                "the server forgets its scripts",
                self._tell(("SCRIPT", "FLUSH")),
                (0.05, 0.2),
            ),
            Fault("sleep", "the server sleeps", self._tell(("DEBUG", "SLEEP", "0.8")), (0.05, 0.1)),
        ]

    def _tell(self, *commands: tuple[str, ...]) -> Inflict:
        @asynccontextmanager
        async def inflict(scene: Scene) -> AsyncIterator[str]:  # noqa: ARG001
            assert self._server is not None
            async with asyncio.timeout(30), Client(port=self._server.port) as client:
                for command in commands:
                    await client.execute_command(*command)  # type: ignore[no-untyped-call]
            yield " ".join(commands[0])

        return inflict


class RedisInMemory(Redis):
    """A server that keeps nothing."""

    name = "redis-memory"
    persistence = ("--appendonly", "no")

    async def start(self) -> None:
        """Start the server, which is never ended by a fault."""
        await super().start()
        self.not_done["kill-server, restart-server"] = "it would lose its data"

    def faults(self) -> Sequence[Fault]:
        """Return the faults that keep the data."""
        return [fault for fault in super().faults() if fault.name not in _FATAL]


class RedisLossy(RedisInMemory):
    """A server that loses its data, and whose clients do not take it for a new one.

    Its nodes and semaphores are made anew before any client is let in, as an administrator would
    do it from a script.
    """

    name = "redis-lossy"
    keeps_rates = False

    @property
    def url(self) -> str:
        """URL of the server, behind the network, with a short quarantine."""
        assert self._proxy is not None
        return f"redis://127.0.0.1:{self._proxy.port}?max_window={_QUARANTINE:g}"

    @property
    def _direct_url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.port}?max_window={_QUARANTINE:g}"

    async def start(self) -> None:
        """Start the server and create its namespace."""
        await super().start()
        async with tenure.connect(f"{self._direct_url}&fresh=true") as client:
            await client.list_nodes()
        for name in ("restart without data", "kill-server, restart-server"):
            del self.not_done[name]

    def faults(self) -> Sequence[Fault]:
        """Return all faults, and those that lose the data."""
        return [
            *super().faults(),
            Fault("lose-data", "kill -9 of the server, which kept nothing", self._lose, _LASTS),
            Fault("flush-data", "FLUSHALL", self._flush("FLUSHALL"), _LASTS),
            Fault(
                "forget-all",
                "SCRIPT FLUSH and FLUSHALL: no witness of the loss is left",
                self._flush("SCRIPT FLUSH", "FLUSHALL"),
                _LASTS,
            ),
            Fault(
                "swap-data",
                "SWAPDB: the database is exchanged with an empty one",
                self._flush("SWAPDB 0 1", "SELECT 1", "FLUSHDB"),
                _LASTS,
            ),
        ]

    @asynccontextmanager
    async def _lose(self, scene: Scene) -> AsyncIterator[str]:
        assert self._server is not None
        async with self._without_clients(scene):
            await self._server.kill()
            await self._server.start()
        yield "the server ended"

    def _flush(self, *commands: str) -> Inflict:
        @asynccontextmanager
        async def inflict(scene: Scene) -> AsyncIterator[str]:
            assert self._server is not None
            async with self._without_clients(scene), Client(port=self._server.port) as client:
                for command in commands:
                    await client.execute_command(*command.split())  # type: ignore[no-untyped-call]
            yield ", ".join(commands)

        return inflict

    @asynccontextmanager
    async def _without_clients(self, scene: Scene) -> AsyncIterator[None]:
        """Lose the data for the block, and create nodes and semaphores again after it."""
        assert self._proxy is not None
        journal = scene.journal
        await self._proxy.cut()
        try:
            async with tenure.connect(self._direct_url) as client:
                session = await client.session(NODE)
                await session.aclose()
            with suppress(_NoAnswer), ExitStack() as stack:
                for name in CONFIGS:  # which perhaps is not there
                    stack.enter_context(journal.call(session.semaphore(name), "delete"))
                yield
                raise _NoAnswer
            await prepare(self._direct_url, self.nodes, journal)
        finally:
            await self._proxy.mend()
        # Nothing is granted until the quarantine is over. Only then it is said that whatever was
        # asked for may be gone: until then those who held something are taken to believe.
        await asyncio.sleep(_QUARANTINE - _BEFORE)
        journal.revokes()
