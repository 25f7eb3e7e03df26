"""The listener for dflockd's clients: ``dflockd://host:port``, or ``dflockds://`` with TLS.

States: made ─open─► open ─drain─► draining ─aclose─► closed; and from each of them to closed.

Ownership: the listener owns its `Door`, its connections, its `Locks`, all their tasks, and two
timers: one checks deadlines, one ends leases.

* **Open.** The node is created if it is missing. Sessions that former listeners left there are
  taken over: their tokens stay valid until the leases end.
* **Drain.** The door is closed, and waiting clients get `error_draining`. Holders are still served.
* **Close.** Clients have `shutdown_time` to disconnect, then they are cut off. Their locks stay in
  the store until the leases end, or until another listener on the node releases them.
* **Cancel.** A cancelled close cuts off all clients at once, and does not change the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from tenure.background import BackgroundTimer, Failures
from tenure.core import rules
from tenure.engines.contract import Attach, Removal
from tenure.errors import (
    EngineError,
    InvalidArgument,
    SemaphoreBusy,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.identity import seen_from
from tenure.model import NodeConfig, Recovered
from tenure.server.addresses import bind_ports
from tenure.server.context import Context
from tenure.server.dflockd.claims import LAPSED, MARK, key_of
from tenure.server.dflockd.commands import COMMANDS
from tenure.server.dflockd.connection import DflockdServerConnection
from tenure.server.dflockd.locks import Locks
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.dflockd.remote import Orphans, RemoteTokens, session_text
from tenure.server.listener import Door, Greeting, Listener, peer_host
from tenure.server.reads import Reader, pages_of_semaphores

_WINDOW = 30.0


class Deaf:
    """Events of a session without requests (`SessionEvents`), all ignored."""

    def proven(self, at: float) -> None:
        """Ignore the proof."""

    def resumed(self, requests: Sequence[Recovered]) -> None:
        """Ignore the requests."""

    def granted(self, request_id: int, order_id: int | None) -> None:
        """Ignore the grant."""

    def removed(self, request_id: int, why: Removal) -> None:
        """Ignore the removal."""

    def detached(self, cause: BaseException | None = None) -> None:
        """Ignore the loss of contact."""

    def attached(self) -> None:
        """Ignore the return of contact."""

    def ended(self, error: SessionExpired) -> None:
        """Ignore the end."""


async def collect(locks: Locks, description: str) -> None:
    """Forget keys that have been unused for long, and delete their semaphores."""
    deadline = locks.now() - locks.options.gc_max_idle
    idle = [key for key in locks.keys.values() if not key.claims and key.used_at <= deadline]
    for key in idle:
        if key.limit == 1 or not key.made:
            locks.keys.forget(key)
    made = [key for key in idle if key.made]
    if made:
        node = locks.options.node
        how = Attach(node, _WINDOW, description)
        session = await locks.context.engine.attach(how, Deaf())
        try:
            for key in made:
                if key.claims:
                    continue
                try:
                    found = await session.describe_semaphore(
                        key.stored, owners=False, waiters=False
                    )
                    if found.data == MARK:
                        await session.delete_semaphore(key.stored, force=False)
                        locks.context.counts.semaphores.deleted(node, key.stored)
                        locks.context.guard.stored.deleted(node, key.stored)
                except SemaphoreBusy:
                    key.used_at = locks.now()  # another client uses it
                    continue
                except SemaphoreNotFound:
                    locks.context.counts.semaphores.deleted(node, key.stored)
                key.made = False
                locks.keys.forget(key)
        finally:
            await session.close()


async def know_leftovers(locks: Locks) -> None:
    """Find the semaphores of keys without clients; each is deleted when its time has come."""
    now = locks.now()
    context, node = locks.context, locks.options.node
    reader = Reader(context.reads, "the search for unused keys")
    async with aclosing(pages_of_semaphores(context.engine, node, reader)) as pages:
        async for page in pages:
            for each in page:
                if not each.ephemeral and each.data == MARK:
                    key = key_of(each.name)
                    if key is not None and key not in locks.keys:
                        locks.keys.found(key, each.limit, now)


T = TypeVar("T")

_FLUSHED_IN = 1.0  # seconds for a client to read its last reply
_LETTERS_EVERY = 0.9  # seconds between two looks for renewals that other listeners request
_ORPHANS_EVERY = 15.0  # seconds between two looks for sessions whose server has died


class DflockdListener(Listener[DflockdServerConnection]):
    """Serves dflockd's clients.

    Args:
        context, url, tls, sockets: see `Listener`.
        options: the further options of a dflockd server.

    Raises:
        InvalidArgument: the URL or the node is not valid.

    Attributes:
        locks: the tables of keys and claims.
        remote: the claims of the other listeners on the node.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
        options: DflockdOptions | None = None,
    ) -> None:
        super().__init__(context, url, tls=tls, sockets=sockets)
        self.options = options or DflockdOptions()
        rules.check_path(self.options.node)
        if self._address.protocol != "dflockd":
            raise InvalidArgument(
                f"dflockd's clients are listened to at dflockd://host:port, not {url!r}"
            )
        self._port = self._address.port
        self._accepted = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sweeps: BackgroundTimer | None = None
        self._sweep_due = 0.0
        self._failures = Failures("looking after connections", self.context.logger)
        self._interval = min(1.0, max(0.02, self.options.read_timeout / 8))
        self._kept_at = self._orphans_collected_at = context.clock.now()
        self.locks = Locks(context, self.options, self.start)
        self._orphans = Orphans(self.locks, self.start)
        self.remote = RemoteTokens(self.locks, self._orphans)
        self._answering: asyncio.Task[None] | None = None
        self._answered_at = context.clock.now()
        self._answer_failures = Failures("answering other listeners", context.logger)

    @property
    def address(self) -> str:
        """URL at which the listener accepts."""
        scheme = "dflockd" if self._tls is None else "dflockds"
        return f"{scheme}://{self._place}"

    @property
    def _place(self) -> str:
        host = self._address.host
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    def describe(self, peer: str) -> str:
        """Return the description of the session of a connection."""
        return seen_from(session_text(self._place, peer), peer_host(peer))

    async def open(self) -> None:
        """Bind, take over the sessions of former listeners, and accept."""
        can = self.context.engine.capabilities
        if not (can.fencing and can.lasting and can.data):
            raise Unsupported(
                f"dflockd's clients need a store with order ids, data and lasting semaphores, and "
                f"{self.context.engine.url} has not all of them; use sqlite:///FILE"
            )
        await self.context.counts.semaphores.count_once()
        await self.context.engine.create_node(self.options.node, NodeConfig(), exist_ok=True)
        given, self._given = self._given, []
        sockets = given or await bind_ports(self._address)
        if sockets[0].family in {socket.AF_INET, socket.AF_INET6}:
            self._port = sockets[0].getsockname()[1]
        self._door = Door(
            self.context, sockets, self._connection, self._tls, lambda _: b"", self.traffic
        )
        try:
            await self._orphans.take_over()
            await know_leftovers(self.locks)
        except BaseException:
            await self.aclose()
            raise
        self._door.open()
        self._start_timers()

    def _start_timers(self) -> None:
        self._tick()
        self._sweep_due = self.context.clock.now()
        self._sweeps = BackgroundTimer(
            asyncio.get_running_loop(),
            self.context.clock.now,
            self._sweep,
            Failures("ending leases", self.context.logger),
        )
        self._sweeps.soon()

    async def drain(self) -> None:
        """Accept no more connections, and end each after its last reply."""
        if self._door is None:
            return
        self._door.close()
        self.locks.draining = True
        for connection in list(self.connections):
            connection.drain()

    async def aclose(self) -> None:
        """Close all connections within the shutdown time."""
        self._close_given()
        door = self._door
        if door is None:
            return
        try:
            await self.drain()
            await door.aclose()
            await self._wait_for_connections(self.options.shutdown_time)
            self.locks.leaving = True
            for connection in list(self.connections):
                connection.leave(b"")
            await self._wait_for_connections(_FLUSHED_IN)
        finally:
            self._door = None
            self.locks.leaving = True
            if self._timer is not None:
                self._timer.cancel()
            if self._sweeps is not None:
                self._sweeps.cancel()
            self._orphans.cancel()
            for task in (self._keeping, self._answering):
                if task is not None:
                    task.cancel()
            self._cut_off_all()
        try:
            await self._wait_for_connections(None)
            while self._tasks:
                await asyncio.wait(set(self._tasks))
            await self._detach()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _wait_for_connections(self, seconds: float | None) -> None:
        """Wait until every connection is lost, or the time has passed."""
        lost = [connection.gone for connection in self.connections]
        if lost:
            await asyncio.wait(lost, timeout=seconds)

    async def _detach(self) -> None:
        ends = await asyncio.gather(
            *(self.locks.detach(each) for each in list(self.locks.holders)), return_exceptions=True
        )
        failed = [end for end in ends if isinstance(end, BaseException)]
        for error in failed:
            self.context.log(logging.ERROR, "a session could not be detached", why=error)
        if failed:
            raise EngineError(
                f"{len(failed)} sessions could not be detached in the store, which must not be "
                "closed in order now, since that would end them; the log says why"
            )

    def _connection(self, greeting: Greeting) -> DflockdServerConnection:
        self._accepted += 1
        return DflockdServerConnection(self, self.locks, greeting, self._accepted, COMMANDS)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Time

    def _sweep(self) -> None:
        """End the expired leases, twice in each interval.

        So a lease ends at most one interval late, even if the loop is busy. A late sweep does not
        delay the next one.
        """
        assert self._sweeps is not None
        now, interval = self.context.clock.now(), self.options.sweep_interval / 2
        self._sweep_due = max(self._sweep_due + interval, now)
        self._sweeps.by(self._sweep_due)
        self.locks.sweep(now)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)
        now = self.context.clock.now()
        for holder in list(self.locks.holders):
            with self._failures.contained():
                holder.tick(now)
                if holder.lapsed(now):
                    self.locks.lose(holder, LAPSED)
        for connection in list(self.connections):
            with self._failures.contained():
                connection.tick(now)
        idle = self._answering is None or self._answering.done()
        if idle and self.locks.held and now - self._answered_at >= _LETTERS_EVERY:
            self._answered_at = now
            self._answering = self.start(self._answer())
        idle = self._keeping is None or self._keeping.done()
        if idle and now - self._kept_at >= self.options.gc_interval:
            self._kept_at = now
            self._keeping = self.start(self._collect_garbage())

    async def _answer(self) -> None:
        with self._answer_failures.contained():
            await self.remote.answer()

    async def _collect_garbage(self) -> None:
        try:
            await collect(self.locks, f"housekeeping of dflockd {self._place}")
            if self._kept_at - self._orphans_collected_at >= _ORPHANS_EVERY:
                self._orphans_collected_at = self._kept_at
                await self._orphans.take_over()
        except TenureError as error:
            self.context.log(logging.ERROR, "the store failed", why=error)
