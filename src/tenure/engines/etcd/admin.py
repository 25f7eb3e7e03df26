"""Nodes, and what administrators do: not in the name of a session.

Each is a reading, and a transaction that holds only if what was read is still so. What was not
answered is looked up, and tried again, until the engine's patience is over.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenure.core import rules
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import KeyValue
from tenure.engines.etcd.cluster import EtcdAttempts, EtcdCluster, no_node, not_found
from tenure.engines.etcd.keys import (
    EVICTED,
    Entry,
    Record,
    config_of,
    config_text,
    name_in,
    note,
    queues,
)
from tenure.engines.etcd.members import Lost, Refused
from tenure.engines.etcd.semaphores import all_under, describe, described, descriptions
from tenure.errors import NodeBusy, NodeExists, SemaphoreNotFound
from tenure.model import NodeConfig, NodeDescription, SemaphoreDescription, SessionDescription

__all__ = ["EtcdNodes"]

_MOST_ASKED_ABOUT = 256
"""How many leases are asked about when sessions are listed."""

P = ParamSpec("P")
T = TypeVar("T")


def _administers(
    operation: Callable[Concatenate[EtcdNodes, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[EtcdNodes, P], Coroutine[Any, Any, T]]:
    """Check that the engine is open, and make an error of a refusal."""

    @wraps(operation)
    async def administer(self: EtcdNodes, /, *args: P.args, **named: P.kwargs) -> T:
        self.check_open()
        try:
            return await operation(self, *args, **named)
        except Refused as refused:
            path: Any = named.get("path", next(iter(args), None))
            raise self.failure(refused, path) from refused

    return administer


def _everything(prefix: bytes) -> bytes:
    return wire.get(wire.range_(prefix, wire.after(prefix)))


def _records(found: Sequence[KeyValue], prefix: bytes) -> list[tuple[int, Record]]:
    return [
        (int(kv.key[len(prefix) :], 16), Record.read(kv.value))
        for kv in found
        if b"/" not in kv.key[len(prefix) :]
    ]


class EtcdNodes(EtcdCluster):
    """A cluster with what administrators do to it."""

    # Nodes

    @_administers
    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        rules.check_path(path)
        key, serial, nonce = self.keys.node(path), self.keys.serial, secrets.token_hex(8)
        patient = self.reader(path)
        while True:
            read = await patient.read(wire.get(wire.range_(key)), wire.get(wire.range_(serial)))
            found, last = (part.first for part in read.parts)
            if found is not None:
                if exist_ok or config_of(found.value)[1] == nonce:
                    return
                raise NodeExists(f"the node {path} exists already", node=path)
            # With the serial, so that an attempt that comes late finds that it is.
            answer = await patient.txn(
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
        rules.check_path(path)
        patient = self.reader(path)
        while True:
            kv = await self._node(patient, path)
            old, nonce = config_of(kv.value)
            new = config_text(rules.merge_config(old, config), nonce)
            if new == kv.value:
                return
            put = wire.put(kv.key, new)
            answer = await patient.txn(wire.txn((wire.modified_at(kv.key, kv.modified),), (put,)))
            if answer is not None and answer.ok:
                return

    async def _node(self, patient: EtcdAttempts, path: str) -> KeyValue:
        read = await patient.read(wire.get(wire.range_(self.keys.node(path))))
        kv = read.parts[0].first
        if kv is None:
            raise no_node(path)
        return kv

    @_administers
    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        rules.check_path(path)
        rules.check_droppable(path)
        keys, patient = self.keys, self.reader(path)
        key, sessions = keys.node(path), keys.sessions(path)
        created: int | None = None
        while True:
            read = await patient.read(wire.get(wire.range_(key)), _everything(sessions))
            kv = read.parts[0].first
            if kv is None and created is None:
                raise no_node(path)
            if kv is None or created not in {None, kv.created}:
                return  # an attempt whose answer was lost or another client has done it
            created = kv.created
            found = _records(read.parts[1].found, sessions)
            attached = sum(record.attached for _, record in found)
            if attached and not force:
                raise NodeBusy(
                    f"the node {path} has {attached} attached session(s); close them, or drop it "
                    "by force, which ends them",
                    node=path,
                )
            prefixes = (sessions, keys.queues(path), keys.data(path), keys.request_data(path))
            answer = await patient.txn(
                wire.txn(
                    (
                        wire.created_at(key, created),
                        wire.modified_before(sessions, read.revision + 1),
                    ),
                    (wire.delete(key), *(wire.delete(each, wire.after(each)) for each in prefixes)),
                )
            )
            if answer is not None and answer.ok:
                # Nothing is left under these leases; they would end by themselves.
                for number, _ in found:
                    self.spawn(self.revoke(number, self.patience))
                return

    @_administers
    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        rules.check_path(path)
        keys = self.keys
        sessions, names = keys.sessions(path), keys.queues(path)
        read = await self.reader(path).read(
            wire.get(wire.range_(keys.node(path))),
            wire.get(wire.range_(sessions, wire.after(sessions), keys_only=True)),
            wire.get(wire.range_(names, wire.after(names), keys_only=True)),
        )
        kv = read.parts[0].first
        if kv is None:
            raise no_node(path)
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
        nodes = self.keys.nodes
        range_ = wire.range_(nodes, wire.after(nodes), keys_only=True)
        read = await self.reader(None).read(wire.get(range_))
        return sorted(self.keys.path(kv.key) for kv in read.parts[0].found)

    @_administers
    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        rules.check_path(path)
        keys, patient = self.keys, self.reader(path)
        prefix, of_names, of_requests = keys.queues(path), keys.data(path), keys.request_data(path)
        sessions = keys.sessions(path)
        while True:
            read = await patient.read(wire.get(wire.range_(keys.node(path))), _everything(prefix))
            if not read.parts[0].found:
                raise no_node(path)
            found = queues(read.parts[1].found, prefix)
            try:
                data = await all_under(patient, of_names, read.revision)
                more = owners or waiters
                request_data = await all_under(patient, of_requests, read.revision) if more else {}
                there = await all_under(patient, sessions, read.revision) if more else {}
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
        rules.check_path(path)
        rules.check_name(name, path)
        patient, keys = self.reader(path), self.name(path, name)
        try:
            return await describe(patient, self, keys, owners=owners, waiters=waiters)
        except SemaphoreNotFound:
            await self._node(patient, path)
            raise

    # Sessions

    @_administers
    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        rules.check_path(path)
        patient, prefix = self.reader(path), self.keys.sessions(path)
        node = wire.get(wire.range_(self.keys.node(path)))
        read = await patient.read(node, _everything(prefix))
        if not read.parts[0].found:
            raise no_node(path)
        found = _records(read.parts[1].found, prefix)
        asked = [number for number, _ in found[:_MOST_ASKED_ABOUT]]
        silent = dict(zip(asked, await asyncio.gather(*map(self._silence, asked)), strict=True))
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

    async def _silence(self, number: int) -> float | None:
        """Seconds since a lease was renewed; etcd tells whole ones."""
        try:
            request = wire.time_to_live(number)
            answer = await self.members.call(wire.TIME_TO_LIVE, request, self.patience)
        except (Lost, Refused):
            return None
        lease = answers.read_lease(answer)
        return float(max(0, lease.granted - lease.left - 1)) if lease.left >= 0 else None

    @_administers
    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; returns false if there was none."""
        rules.check_path(path)
        node = wire.get(wire.range_(self.keys.node(path)))
        session = wire.get(wire.range_(self.keys.session(path, session_id)))
        read = await self.reader(path).read(node, session)
        if not read.parts[0].found:
            raise no_node(path)
        if not read.parts[1].found:
            return False
        await self.revoke(session_id, self.address.connect_timeout)
        return True

    @_administers
    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; returns false if there was none."""
        rules.check_path(path)
        patient, tried = self.reader(path), False
        node = wire.get(wire.range_(self.keys.node(path)))
        found = self.keys.name(path, name)  # the names that are kept have been checked
        while True:
            read = await patient.read(node, found.get_limit, found.queue)
            there, limit, queue = (part.found for part in read.parts)
            if not there:
                raise no_node(path)
            if not limit and not queue:
                rules.check_name(name, path)
                if tried:
                    return True
                raise not_found(name, path)
            entry = next(
                (each for each in map(Entry, queue) if self.base + each.created == order_id), None
            )
            if entry is None:
                return tried
            session = self.keys.session(path, entry.session)
            request = wire.txn(
                (wire.created_at(entry.key, entry.created),),
                (
                    wire.delete(entry.key),
                    wire.delete(found.data_of(entry.key)),
                    note(session, entry, EVICTED),
                ),
            )
            try:
                answer = await patient.txn(request)
            except Refused as refused:
                if refused.no_lease:
                    continue  # its session has just ended
                raise
            if answer is not None and answer.ok:
                return True
            tried = tried or answer is None
