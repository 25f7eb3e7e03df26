"""Redis for chaos: one server of ours behind a network that can be broken.

`redis` writes everything to disk before it answers, and may end at any moment. `redis-memory` keeps
nothing: there an end of the server is not tried, because it loses by design what the history would
miss. Both are stopped, put to sleep, lose their scripts and have their connections killed.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis as Client

from chaos.adapter import Engine, Fault, Inflict, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults
from tenure.model import NodeConfig

__all__ = ["Redis", "RedisInMemory"]

_FATAL = frozenset({"kill-server", "restart-server"})
"""What a server without persistence does not survive."""


class Redis(Engine):
    """A server that survives its own end."""

    name = "redis"
    nodes = NodeConfig(session_grace_period=1.0)  # as for the server of our own
    lingers = 5.0
    persistence: tuple[str, ...] = ("--appendonly", "yes", "--appendfsync", "always")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server: Server | None = None
        self._proxy: Proxy | None = None

    @property
    def url(self) -> str:
        assert self._proxy is not None
        return f"redis://127.0.0.1:{self._proxy.port}?fresh=true"

    async def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise ValueError("no redis-server here (Debian: redis-server)")
        port = _free_port()
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
        if self._proxy is not None:
            await self._proxy.aclose()
        if self._server is not None:
            await self._server.stop()

    def faults(self) -> Sequence[Fault]:
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
        await super().start()
        self.not_done["kill-server, restart-server"] = "it would lose its data"

    def faults(self) -> Sequence[Fault]:
        return [fault for fault in super().faults() if fault.name not in _FATAL]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
