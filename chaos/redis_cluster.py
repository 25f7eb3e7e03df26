"""A cluster of Redis for chaos: three masters, each behind a network that can be broken.

A namespace is in one slot, and so on one node at a time. The slot is moved to another node, with
some of its keys on the way for a while. Each node writes everything to disk before it answers, so
that it may end at any moment. There are no replicas, because a failover loses by design what the
history would miss.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import redis

from chaos.adapter import Engine, Fault, Inflict, NotNow, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults
from tenure.model import NodeConfig
from tests.engines.redis import servers
from tests.engines.redis.clusters import Cluster, slot_of
from tests.ports import free_port

_NODES = 3
_PATIENCE = 30.0
"""Seconds in which a move that has begun comes to its end."""
_ONCE_MORE = 0.1
"""Seconds until a step of it that failed is tried again."""


class Node(servers.Server):
    """A node as administrators see it."""

    def tell(self, *words: str) -> object:
        """Return what it answers to a command, in bounded time."""
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            return client.execute_command(*words)


class RedisCluster(Engine):
    """Three masters with their data on the disk of the run's folder."""

    name = "redis-cluster"
    nodes = NodeConfig(session_grace_period=1.0)
    lingers = 5.0

    def __init__(self, folder: Path) -> None:
        """Choose the ports of the nodes."""
        super().__init__(folder)
        ports = [free_port() for _ in range(_NODES)]
        self._buses = [str(free_port()) for _ in range(_NODES)]
        self._network = [Proxy(port) for port in ports]
        self._servers: list[Server] = []
        self._cluster = Cluster([Node(folder, port=port) for port in ports], [])

    @property
    def url(self) -> str:
        """URL of the nodes, behind their networks."""
        places = ",".join(f"127.0.0.1:{each.port}" for each in self._network)
        return f"redis+cluster://{places}?fresh=true"

    async def start(self) -> None:
        """Start the nodes and their networks, and make a cluster of them."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise ValueError("no redis-server here (Debian: redis-server)")
        for number, node in enumerate(self._cluster.nodes):
            proxy = self._network[number]
            await proxy.start()
            folder = self.folder / f"n{number}"
            folder.mkdir()
            command = (
                *(program, "--port", str(node.port), "--dir", str(folder), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always"),
                *("--enable-debug-command", "yes", "--cluster-enabled", "yes"),
                *("--cluster-port", self._buses[number], "--cluster-node-timeout", "1000"),
                *("--cluster-require-full-coverage", "no"),
                *("--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", f"{proxy.port}"),
            )
            self._servers.append(Server(command, node.port, self.folder / f"n{number}.log"))
        await asyncio.gather(*(each.start() for each in self._servers))
        await asyncio.to_thread(self._cluster.join, _NODES, self._buses)
        self.not_done["failover"] = "tests/engines/redis/test_cluster.py has some"
        self.not_done["clock-jump"] = "the clocks of the nodes are the machine's"

    async def stop(self) -> None:
        """Stop the networks and the nodes."""
        for proxy in self._network:
            await proxy.aclose()
        for each in self._servers:
            await each.kill()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the nodes, their networks, and the cluster."""
        return [
            *server_faults(self._servers),
            *network_faults(self._network),
            Fault("move-slot", "the slot moves to another node, by and by", self._move, (0.1, 2.0)),
            Fault("kill-all", "kill -9 of all nodes", self._kill_all, (0.1, 1.0)),
            Fault(
                "kill-connections",
                "all connections are ended by the nodes",
                self._tell_all("CLIENT KILL TYPE pubsub", "CLIENT KILL TYPE normal"),
                (0.05, 0.2),
            ),
            Fault(
                "flush-scripts",
                "the nodes forget their scripts",
                self._tell_all("SCRIPT FLUSH"),
                (0.05, 0.2),
            ),
        ]

    @asynccontextmanager
    async def _move(self, scene: Scene) -> AsyncIterator[str]:
        try:
            source = await asyncio.to_thread(self._cluster.master_of, self.url)
            to = await asyncio.to_thread(self._cluster.other_than, source)
        except (redis.RedisError, StopIteration, AssertionError) as error:
            raise NotNow(f"the cluster does not do it: {error!r}") from error
        await asyncio.to_thread(self._carry_on, source, to, scene.random.randrange(20))
        try:
            yield f"from port {source.port} to port {to.port}"
        finally:
            async with asyncio.timeout(_PATIENCE):
                while not await asyncio.to_thread(self._carry_on, source, to):  # noqa: ASYNC110
                    await asyncio.sleep(_ONCE_MORE)

    def _carry_on(
        self, source: servers.Server, to: servers.Server, most: int | None = None
    ) -> bool:
        """Move so many keys of the slot, or all and then the slot; true if that succeeded."""
        slot, ids = str(slot_of(self.url)), self._cluster.id_of
        try:
            for node, how, other in ((to, "IMPORTING", source), (source, "MIGRATING", to)):
                with suppress(redis.ResponseError):  # it has happened before
                    node.tell("CLUSTER", "SETSLOT", slot, how, ids(other))
            if most is None:
                self._cluster.end_move(self.url, source, to)
            elif most:
                self._cluster.move_keys(self.url, source, to, most)
        except redis.RedisError:
            return False
        return True

    @asynccontextmanager
    async def _kill_all(self, scene: Scene) -> AsyncIterator[str]:  # noqa: ARG002
        try:
            for each in self._servers:
                await each.kill()
            yield "all nodes"
        finally:
            await asyncio.gather(*(each.start() for each in self._servers))

    def _tell_all(self, *commands: str) -> Inflict:
        @asynccontextmanager
        async def inflict(scene: Scene) -> AsyncIterator[str]:  # noqa: ARG001
            for node in self._cluster.nodes:
                for command in commands:
                    with suppress(redis.ConnectionError):  # it ended ours, too
                        await asyncio.to_thread(node.tell, *command.split())
            yield commands[0]

        return inflict
