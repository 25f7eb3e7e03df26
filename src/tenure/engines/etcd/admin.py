"""Nodes, and the operations of administrators, which need no session.

Each is a read, and a transaction that succeeds only if the state has not changed since. An
operation without an answer is repeated with a new read, until a timeout.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenure.core import refusals, rules
from tenure.engines.contract import Orphan
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Answer, KeyValue, Refused
from tenure.engines.etcd.cluster import EtcdAttempts, EtcdCluster
from tenure.engines.etcd.keys import (
    EVICTED,
    Entry,
    Record,
    config_of,
    config_text,
    name_in,
    queues,
    taking_out,
)
from tenure.engines.etcd.semaphores import all_under, describe, described, descriptions
from tenure.errors import SemaphoreNotFound
from tenure.model import NodeConfig, NodeDescription, SemaphoreDescription, SessionDescription

_MOST_LEASES = 256
"""Largest number of leases that are queried to list sessions."""

P = ParamSpec("P")
T = TypeVar("T")


def _administers(
    operation: Callable[Concatenate[EtcdNodes, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[EtcdNodes, P], Coroutine[Any, Any, T]]:
    """Check that the engine is open, and the path if there is one, and translate a rejection."""

    @wraps(operation)
    async def administer(self: EtcdNodes, /, *args: P.args, **named: P.kwargs) -> T:
        self.check_open()
        path: Any = named.get("path", next(iter(args), None))
        if args or named:
            rules.check_path(path)
        try:
            return await operation(self, *args, **named)
        except Refused as refused:
            raise self.failure(refused, path) from refused

    return administer


def _records(found: Sequence[KeyValue], prefix: bytes) -> list[tuple[int, Record]]:
    return [
        (int(kv.key[len(prefix) :], 16), Record.read(kv.value))
        for kv in found
        if b"/" not in kv.key[len(prefix) :]
    ]


class EtcdNodes(EtcdCluster):
    """A cluster with the operations of administrators."""

    # Nodes

    @_administers
    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        key, serial, nonce = self.keys.node(path), self.keys.serial, secrets.token_hex(8)
        attempts = self.reader(path)
        while True:
            read = await attempts.read(wire.get(key), wire.get(serial))
            found, last = (part.first for part in read.parts)
            if found is not None:
                if exist_ok or config_of(found.value)[1] == nonce:
                    return
                raise refusals.node_exists(path)
            # With the serial, so that a late attempt detects that it is late.
            answer = await attempts.txn(
                wire.txn(
                    (
                        wire.created_at(key, wire.ABSENT),
                        wire.modified_at(serial, last.modified if last is not None else 0),
                    ),
                    (wire.put(key, config_text(config, nonce)), wire.put(serial, b"")),
                )
            )
            if answer is not None and answer.ok:
                return

    @_administers
    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        attempts = self.reader(path)
        while True:
            kv, _ = await self._read_node(attempts, path)
            old, nonce = config_of(kv.value)
            new = config_text(rules.merge_config(old, config), nonce)
            if new == kv.value:
                return
            put = wire.put(kv.key, new)
            answer = await attempts.txn(wire.txn((wire.modified_at(kv.key, kv.modified),), (put,)))
            if answer is not None and answer.ok:
                return

    async def _read_node(
        self, attempts: EtcdAttempts, path: str, *parts: bytes
    ) -> tuple[KeyValue, Answer]:
        """Read a node, and more at the same revision; the answer has the node first."""
        read = await attempts.read(wire.get(self.keys.node(path)), *parts)
        kv = read.parts[0].first
        if kv is None:
            raise refusals.node_not_found(path)
        return kv, read

    @_administers
    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        rules.check_droppable(path)
        keys, attempts = self.keys, self.reader(path)
        key, sessions = keys.node(path), keys.sessions(path)
        created: int | None = None
        while True:
            read = await attempts.read(wire.get(key), wire.get_all(sessions))
            kv = read.parts[0].first
            if kv is None and created is None:
                raise refusals.node_not_found(path)
            if kv is None or created not in {None, kv.created}:
                return  # an attempt whose answer was lost, or another client, has done it
            created = kv.created
            found = _records(read.parts[1].found, sessions)
            attached = sum(record.attached for _, record in found)
            if attached and not force:
                raise refusals.node_busy(path, attached)
            prefixes = (sessions, keys.queues(path), keys.data(path), keys.request_data(path))
            answer = await attempts.txn(
                wire.txn(
                    (
                        wire.created_at(key, created),
                        wire.modified_before(sessions, read.revision + 1),
                    ),
                    (wire.delete(key), *(wire.delete(each, wire.after(each)) for each in prefixes)),
                )
            )
            if answer is not None and answer.ok:
                # Nothing is left under these leases, which would also expire.
                for number, _ in found:
                    self.spawn(self.revoke(number, self.timeout))
                return

    @_administers
    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        keys = self.keys
        sessions, names = keys.sessions(path), keys.queues(path)
        reads = (wire.get_all(each, keys_only=True) for each in (sessions, names))
        kv, read = await self._read_node(self.reader(path), path, *reads)
        return NodeDescription(
            path,
            config_of(kv.value)[0],
            sum(b"/" not in each.key[len(sessions) :] for each in read.parts[1].found),
            len(
                {name_in(each.key[len(names) :].partition(b"/")[0]) for each in read.parts[2].found}
            ),
        )

    @_administers
    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        read = await self.reader(None).read(wire.get_all(self.keys.nodes, keys_only=True))
        return sorted(self.keys.path(kv.key) for kv in read.parts[0].found)

    @_administers
    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        keys, attempts = self.keys, self.reader(path)
        prefix, of_names, of_requests = keys.queues(path), keys.data(path), keys.request_data(path)
        sessions = keys.sessions(path)
        while True:
            _, read = await self._read_node(attempts, path, wire.get_all(prefix))
            found = queues(read.parts[1].found, prefix)
            try:
                data = await all_under(attempts, of_names, read.revision)
                more = owners or waiters
                request_data = await all_under(attempts, of_requests, read.revision) if more else {}
                there = await all_under(attempts, sessions, read.revision) if more else {}
            except Refused as refused:
                if refused.compacted:
                    continue
                raise
            by_name: dict[str, dict[bytes, bytes]] = {}
            for key, value in request_data.items():
                name, _, request = key[len(of_requests) :].partition(b"/")
                by_name.setdefault(name_in(name), {})[request] = value
            of_name = {name_in(key[len(of_names) :]): value for key, value in data.items()}
            return [
                described(
                    *(each, of_name.get(each.name, b""), by_name.get(each.name, {}), self.base),
                    owners=owners,
                    waiters=waiters,
                    descriptions=descriptions(there, sessions),
                )
                for each in found
            ]

    @_administers
    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_name(name, path)
        attempts, keys = self.reader(path), self.name(path, name)
        try:
            return await describe(attempts, self, keys, owners=owners, waiters=waiters)
        except SemaphoreNotFound:
            await self._read_node(attempts, path)
            raise

    # Sessions

    @_administers
    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        prefix = self.keys.sessions(path)
        _, read = await self._read_node(self.reader(path), path, wire.get_all(prefix))
        found = _records(read.parts[1].found, prefix)
        numbers = [number for number, _ in found[:_MOST_LEASES]]
        times = await asyncio.gather(*map(self.silent_for, numbers))
        silent = dict(zip(numbers, times, strict=True))
        return [
            SessionDescription(
                id=number,
                node=path,
                description=record.description,
                recovery_window=record.window,
                attached=record.attached,
                silent_for=silent.get(number),
            )
            for number, record in sorted(found, key=lambda each: each[0])
        ]

    @_administers
    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; return false if it did not exist."""
        session = wire.get(self.keys.session(path, session_id))
        _, read = await self._read_node(self.reader(path), path, session)
        if not read.parts[1].found:
            return False
        await self.revoke(session_id, self.address.connect_timeout)
        return True

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session whose program is dead, by the token of its attachment."""
        await self._end_orphan(orphan.node, orphan)

    @_administers
    async def _end_orphan(self, node: str, orphan: Orphan) -> None:
        session = wire.get(self.keys.session(node, orphan.session_id))
        _, read = await self._read_node(self.reader(node), node, session)
        kv = read.parts[1].first
        if kv is not None and Record.read(kv.value).token == orphan.credential:
            await self.revoke(orphan.session_id, self.address.connect_timeout)

    @_administers
    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; return false if it did not exist."""
        attempts, tried = self.reader(path), False
        found = self.keys.name(path, name)  # the cached names have been checked
        while True:
            _, read = await self._read_node(attempts, path, found.get_limit, found.queue)
            _, limit, queue = (part.found for part in read.parts)
            if not limit and not queue:
                rules.check_name(name, path)
                if tried:
                    return True
                raise refusals.semaphore_not_found(path, name)
            entry = next(
                (each for each in map(Entry, queue) if self.base + each.created == order_id), None
            )
            if entry is None:
                return tried
            session = self.keys.session(path, entry.session)
            there_still = wire.created_at(entry.key, entry.created)
            then = taking_out(found, entry, session, EVICTED)
            try:
                answer = await attempts.txn(wire.txn((there_still,), then))
            except Refused as refused:
                if refused.no_lease:
                    continue  # its session has just ended
                raise
            if answer is not None and answer.ok:
                return True
            tried = tried or answer is None
