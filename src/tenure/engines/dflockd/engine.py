"""Engine on dflockd servers, among which the keys are divided."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from tenure.background import BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.core import refusals, rules
from tenure.engines._kit.url import selector_loop
from tenure.engines.advice import on_connecting
from tenure.engines.contract import Attach, EngineDefaults, SessionEvents
from tenure.engines.dflockd.connection import Kind
from tenure.engines.dflockd.semaphores import DeclaredSemaphores
from tenure.engines.dflockd.session import DflockdHeartbeat, DflockdSession
from tenure.engines.dflockd.shard import Shard, cannot
from tenure.engines.dflockd.url import DflockdUrl
from tenure.errors import (
    EngineUnavailable,
    InvalidArgument,
    SemaphoreNotFound,
    SessionClosed,
    TenureError,
)
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

Sharding: TypeAlias = Callable[[str, int], int]
"""Function from a key and the number of servers to the number of the key's server."""

TICK = 1.0
"""Longest pause between two checks of all connections, in seconds."""

SLOW = 0.5
"""Seconds after which a missing reply is reported as the cause of a timeout."""

WINDOWS_PER_READ_TIMEOUT = 6
"""Longest window, as a multiple of read timeouts: a longer one could not be renewed in time."""

_log = logging.getLogger("tenure")


def crc32_shard(key: str, servers: int) -> int:
    """Return the shard by CRC-32 (IEEE), as dflockd's clients in other languages do."""
    return zlib.crc32(key.encode()) % servers


class DflockdEngine(EngineDefaults):
    """One program's connections to dflockd servers.

    Attributes:
        sharding: chooses the server for a key; it may be replaced before the first request.
        semaphores: the semaphores declared by this program.
        heartbeat: reads the answers to renewals while the loop is stuck.
    """

    def __init__(self, address: DflockdUrl, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        self.url = address.url
        self.clock = clock
        self.address = address
        self.sharding: Sharding = crc32_shard
        self.semaphores = DeclaredSemaphores(self.shard_of)
        self.heartbeat: DflockdHeartbeat
        self.loop: asyncio.AbstractEventLoop
        self._thread = 0
        self._open = False
        self._shards: list[Shard] = []
        self._sessions: dict[DflockdSession, None] = {}
        self._failures = Failures(f"looking after the sessions on {self.url}", _log)
        self._ticking: BackgroundTimer | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Features of these servers; fencing is known once they have been reached."""
        kinds = {shard.kind for shard in self._shards} - {None}
        return Capabilities(
            fencing=kinds == {Kind.FENCING},
            watch=False,
            data=False,
            lasting=False,
            resume=False,
            since=False,
            waiter_timeout=False,
            durable=False,
            waiter_order=False,
            one_step=False,
            removal_reason=False,
            owners=False,
            descriptions=False,
            store_time=False,
        )

    @property
    def guarantees(self) -> str:
        """Limitations of these servers, for people."""
        fenced = "" if self.capabilities.fencing else " These servers have no fencing tokens."
        return (
            "A lease ends with its connection. When that breaks, the server grants the lock to "
            "the next waiter at once, and the holder may notice the loss later. A waiter whose "
            "connection breaks loses its place and joins the queue again at its end. Tokens rise "
            "for each key, not over several servers. A server may forget all leases when it "
            f"restarts.{fenced}"
        )

    def use(self, *, sharding: Sharding | None = None, tls: ssl.SSLContext | None = None) -> None:
        """Set options that a URL cannot express, before the engine is opened."""
        if sharding is not None:
            self.sharding = sharding
        if tls is not None:
            self.address = replace(self.address, tls=tls)

    def is_in_loop(self) -> bool:
        """Return true on the thread of the loop."""
        return threading.get_ident() == self._thread

    def shard_of(self, name: str) -> Shard:
        """Return the server of a key."""
        number = self.sharding(name, len(self._shards))
        if not isinstance(number, int) or not 0 <= number < len(self._shards):
            raise InvalidArgument(
                f"the sharding function returned {number!r} for {name!r}. Return a number from 0 "
                f"to {len(self._shards) - 1}.",
                name=name,
            )
        return self._shards[number]

    # Life

    async def open(self) -> None:
        """Connect to all servers; at least one must be reachable."""
        if self._open:
            return
        self.loop = selector_loop("dflockd")
        self._thread = threading.get_ident()
        self.heartbeat = DflockdHeartbeat(self.clock)
        self._shards = [
            Shard(self.address, endpoint, self.clock, self._report_contact)
            for endpoint in self.address.endpoints
        ]
        try:
            await asyncio.gather(*(shard.open() for shard in self._shards))
            self._check_reached()
        except BaseException:
            await self._stop_shards()
            raise
        self._open = True
        self._expect(TICK)

    def _check_reached(self) -> None:
        failures = [shard.failure for shard in self._shards if shard.failure is not None]
        for failure in failures:
            if not isinstance(failure, EngineUnavailable):
                raise failure
        if len(failures) == len(self._shards):
            tls = "without" if self.address.tls is None else "with"
            advice = on_connecting(failures[0].__cause__, "dflockd")
            raise EngineUnavailable(
                f"no server of {self.url} can be reached ({'; '.join(map(str, failures))})"
                + (advice or f"; check that a dflockd server runs there, {tls} TLS")
            ) from failures[0]

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        for session in list(self._sessions):
            await session.close()
        self._open = False
        if self._ticking is not None:
            self._ticking.cancel()
        await self._stop_shards()
        if self._thread:
            await self.heartbeat.aclose()

    async def _stop_shards(self) -> None:
        for shard in self._shards:
            await shard.stop()

    def _opened(self) -> None:
        if not self._open:
            raise SessionClosed(f"{self.url} is not open")

    # Contact

    def trouble(self, name: str | None = None) -> TenureError | None:
        """Return the reason why the store currently grants nothing, if known."""
        if not self._open:
            return None
        shards = self._shards if name is None else [self.shard_of(name)]
        for shard in shards:
            if shard.shared is not None and shard.shared.is_silent(SLOW):
                return EngineUnavailable(f"{self.url} has not answered for at least {SLOW:g} s")
        return _lost(shards)

    def _report_contact(self) -> None:
        trouble = _lost(self._shards)
        for session in list(self._sessions):
            session.contact(trouble)

    # Time

    def _expect(self, delay: float) -> None:
        due = self.clock.now() + delay
        if self._ticking is None:
            self._ticking = BackgroundTimer(self.loop, self.clock.now, self._tick, self._failures)
        self._ticking.by(due)

    def _tick(self) -> None:
        for shard in self._shards:
            with self._failures.contained():
                shard.look_after()
        now = self.clock.now()
        for session in list(self._sessions):
            if now >= session.expires_at:
                with self._failures.contained():
                    session.expire()
        nearest = min((session.expires_at - now for session in self._sessions), default=TICK)
        if self._open:
            self._expect(max(min(nearest, TICK, self.address.read_timeout / 8), 0.001))

    # Sessions

    async def attach(self, how: Attach, events: SessionEvents) -> DflockdSession:
        """Attach a session, or take one over."""
        self._opened()
        rules.check_path(how.node)
        rules.check_window(how.recovery_window, how.node)
        rules.check_description(how.description, how.node)
        rules.check_key(how.key, how.node)
        _check_node(how.node)
        if how.session_id is not None or how.liveness == "window":
            raise cannot("resume a session: it ends with its connections", how.node)
        most = WINDOWS_PER_READ_TIMEOUT * self.address.read_timeout
        if how.recovery_window > most:
            raise cannot(
                f"keep a session with a window of {how.recovery_window:g} s, only of {most:g} s: "
                f"its servers close a connection after {self.address.read_timeout:g} s of silence "
                "(set ?read_timeout= to theirs)",
                how.node,
            )
        at = await self._proof_of_life(how.node)
        session = DflockdSession(self, how, events, secrets.randbits(62) + 1, at)
        self._sessions[session] = None
        self._expect(0.0)
        session.prove(at)
        return session

    async def _proof_of_life(self, node: str) -> float:
        """Return the time of a request that a server answered."""
        limit = self.address.connect_timeout + self.address.answer_timeout
        waiting = [asyncio.ensure_future(shard.prove_life()) for shard in self._shards]
        try:
            done, _ = await asyncio.wait(
                waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
        for each in done:
            return each.result()
        raise EngineUnavailable(
            f"{self.url} did not answer within {limit:g} s "
            f"({'; '.join(str(shard.failure) for shard in self._shards if shard.failure)})",
            node=node,
        )

    def forget(self, session: DflockdSession) -> None:
        """Forget a session that has ended."""
        self._sessions.pop(session, None)

    # Nodes: only the default one

    async def create_node(
        self,
        path: str,
        config: NodeConfig,  # noqa: ARG002  it has none
        *,
        exist_ok: bool,
    ) -> None:
        """Accept the default node, which exists; dflockd has no others."""
        rules.check_path(path)
        _check_node(path)
        if not exist_ok:
            raise refusals.node_exists(path)

    async def alter_node(self, path: str, config: NodeConfig) -> None:  # noqa: ARG002
        """Raise `Unsupported`: the servers have no nodes to configure."""
        rules.check_path(path)
        raise cannot("configure a node", path)

    async def drop_node(self, path: str, *, force: bool) -> None:  # noqa: ARG002
        """Raise an error: the default node cannot be dropped, and there are no others."""
        rules.check_path(path)
        rules.check_droppable(path)
        _check_node(path)

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe the default node; dflockd has no others."""
        rules.check_path(path)
        _check_node(path)
        return NodeDescription(path, NodeConfig())

    async def list_nodes(self) -> Sequence[str]:
        """Return the path of the default node."""
        return [DEFAULT_NODE]

    async def store_time(self) -> float:
        """Return the local wall clock, since the protocol has no time."""
        return self.clock.wall()

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Raise `Unsupported`: the servers do not list sessions."""
        rules.check_path(path)
        raise cannot("list sessions", path)

    async def end_session(self, path: str, session_id: int) -> bool:  # noqa: ARG002
        """Raise `Unsupported`: the servers cannot end a session."""
        rules.check_path(path)
        raise cannot("end another program's session", path)

    async def evict(self, path: str, name: str, order_id: int) -> bool:  # noqa: ARG002
        """Raise `Unsupported`: the servers cannot evict a request."""
        rules.check_path(path)
        raise cannot("evict a request", path, name)

    # Descriptions

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the keys of all servers, without owners and waiters."""
        self._opened()
        rules.check_path(path)
        _check_node(path)
        if owners or waiters:
            raise cannot("name holders and waiters", path)
        found = await asyncio.gather(*(shard.semaphores() for shard in self._shards))
        return sorted((each for some in found for each in some), key=lambda each: each.name)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a key, without owners and waiters."""
        self._opened()
        rules.check_path(path)
        _check_node(path)
        rules.check_name(name, path)
        if owners or waiters:
            raise cannot("name holders and waiters", path, name)
        found = await self.semaphores.find(name)
        if found is None:
            raise SemaphoreNotFound(f"{name!r} on {path} is not in use", node=path, name=name)
        return found


def _lost(shards: Sequence[Shard]) -> TenureError | None:
    """Return the failure of the first unconnected server; ``None`` if all are connected."""
    return next((shard.failure for shard in shards if shard.failure is not None), None)


def _check_node(path: str) -> None:
    if path != DEFAULT_NODE:
        raise cannot(f"have another node than {DEFAULT_NODE}", path)
