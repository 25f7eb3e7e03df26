"""etcd for chaos: three members of ours, each behind a network that can be broken.

A member, or two of them, or all, are killed and stopped. One is cut off from the clients, or from
the other members, whom the clients go on reaching: then it knows nothing new, and may say nothing.
All of the history is compacted away under the watches. With two of three away there is no quorum:
nobody is granted anything, and nobody may lose what it can still prove.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.adapter import Engine, Fault, Inflict, NotNow, Scene
from chaos.network import Proxy, network_faults
from chaos.peers import Peers
from chaos.servers import Server, server_faults
from tenure.model import NodeConfig
from tests.ports import free_port

_MEMBERS = 3

_PATIENCE = 60.0
"""Seconds in which the members find each other on a busy machine."""


class Etcd(Engine):
    """Three members, with their data on the disk of the run's folder.

    Attributes:
        ports: of the members themselves; clients find the network in front of them.
    """

    name = "etcd"
    nodes = NodeConfig(session_grace_period=1.0)
    lingers = 10.0
    """The longest window, rounded up; once more from the choice of a leader; and that choice."""

    def __init__(self, folder: Path) -> None:
        """Choose the ports of three members."""
        super().__init__(folder)
        self.ports = [free_port() for _ in range(_MEMBERS)]
        self._peer_ports = [free_port() for _ in range(_MEMBERS)]
        self._network = [Proxy(port) for port in self.ports]
        self._peers = Peers(self._peer_ports)
        self._members: list[Server] = []

    @property
    def url(self) -> str:
        """URL of the members, behind their networks."""
        return f"etcd://{','.join(f'127.0.0.1:{each.port}' for each in self._network)}"

    async def start(self) -> None:
        """Start the members and wait until they are healthy."""
        program = shutil.which("etcd")
        if program is None:
            raise ValueError("no etcd here (Debian: etcd-server)")
        await self._peers.start()
        known = [f"http://127.0.0.1:{port}" for port in self._peers.ports]
        cluster = ",".join(f"m{number}={url}" for number, url in enumerate(known))
        for number, port in enumerate(self.ports):
            client = f"http://127.0.0.1:{port}"
            peer = f"http://127.0.0.1:{self._peer_ports[number]}"
            command = (
                *(program, "--name", f"m{number}", "--data-dir", str(self.folder / f"m{number}")),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", known[number]),
                *("--initial-cluster", cluster, "--logger", "zap", "--log-outputs", "stderr"),
                *("--log-level", "warn"),
            )
            self._members.append(Server(command, port, self.folder / f"m{number}.log"))
        await asyncio.gather(*(member.start() for member in self._members))
        async with asyncio.timeout(_PATIENCE):
            for port in self.ports:
                while not await asyncio.to_thread(healthy, port):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        for proxy in self._network:
            await proxy.start()
        self.not_done["lose-data"] = "a member without its data is replaced by an administrator"
        self.not_done["clock-jump"] = "leases go by the members' monotonic clocks"

    async def stop(self) -> None:
        """Kill the members."""
        for proxy in self._network:
            await proxy.aclose()
        for member in self._members:
            await member.kill()
        await self._peers.aclose()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of members and networks."""
        return [
            *server_faults(self._members),
            *network_faults(self._network),
            Fault("kill-two", "kill -9 of two members", self._killed(2), (0.1, 2.0)),
            Fault("kill-all", "kill -9 of all members", self._killed(_MEMBERS), (0.1, 1.0)),
            Fault("pause-two", "SIGSTOP of two members", self._pause_two, (0.3, 4.0)),
            Fault("isolate", "a member is cut off from the others", self._isolate, (0.5, 5.0)),
            Fault("compact", "the history is compacted away", self._compact, (0.05, 0.2)),
        ]

    def _killed(self, number: int) -> Inflict:
        @asynccontextmanager
        async def inflict(scene: Scene) -> AsyncIterator[str]:
            some = scene.random.sample(self._members, number)
            try:
                for member in some:
                    await member.kill()
                yield f"{number} members"
            finally:
                await asyncio.gather(*(member.start() for member in some))

        return inflict

    @asynccontextmanager
    async def _pause_two(self, scene: Scene) -> AsyncIterator[str]:
        some = scene.random.sample(self._members, 2)
        try:
            for member in some:
                member.pause()
            yield "two members"
        finally:
            for member in some:
                member.resume()

    @asynccontextmanager
    async def _isolate(self, scene: Scene) -> AsyncIterator[str]:
        number = scene.random.randrange(_MEMBERS)
        try:
            await self._peers.isolate(number)
            yield f"m{number}"
        finally:
            self._peers.mend()

    @asynccontextmanager
    async def _compact(self, scene: Scene) -> AsyncIterator[str]:
        port = scene.random.choice(self.ports)
        try:
            done = await asyncio.to_thread(_compact, port)
        except (OSError, http.client.HTTPException) as error:
            raise NotNow(f"the member on port {port} does not do it: {error}") from error
        yield done


def healthy(port: int) -> bool:
    """Whether the member with this port for clients answers, and knows of a leader."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            told: object = json.load(answer)["health"]
            return told == "true"
    except (OSError, http.client.HTTPException):
        return False


def _ask(port: int, path: str, request: dict[str, object]) -> dict[str, dict[str, str]]:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/v3/{path}", json.dumps(request).encode()
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        told: dict[str, dict[str, str]] = json.load(answer)
        return told


def _compact(port: int) -> str:
    """Compact to the newest revision; what was done."""
    newest = _ask(port, "kv/range", {"key": "AA==", "count_only": True})["header"]["revision"]
    _ask(port, "kv/compaction", {"revision": newest, "physical": True})
    return f"to revision {newest}"
