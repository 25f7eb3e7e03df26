"""Snapshot of a store, and the rate at which owners change between two snapshots.

The rate is the number of owners that the previous reading did not have, divided by the seconds
between the two readings. It is a lower bound: owners that appeared and disappeared between two
readings are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import tenure

Key = tuple[str, str]
"""The path of a node, and the name of a semaphore on it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One semaphore.

    Attributes:
        rate: new owners seen per second; ``None`` at the first reading.
    """

    node: str
    semaphore: tenure.SemaphoreDescription
    rate: float | None = None

    @property
    def key(self) -> Key:
        """Identity of the row, from one reading to the next."""
        return self.node, self.semaphore.name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Result of one reading.

    Attributes:
        url: the store's URL.
        wall: the wall-clock time, to show.
        took: duration of the reading in seconds.
        nodes: the nodes.
        rows: the semaphores of the nodes, by node and name.
        inside: the semaphore shown in detail, with its waiters, if it exists.
    """

    url: str
    wall: float
    took: float
    nodes: Sequence[tenure.NodeDescription]
    rows: Sequence[Row]
    inside: tenure.SemaphoreDescription | None = None


class Observer:
    """Reads a store repeatedly.

    Args:
        node: the only node to read; ``None`` for all.
    """

    def __init__(self, client: tenure.Client, node: str | None) -> None:
        """Set the node to read; ``None`` for all."""
        self._client = client
        self._node = node
        self._owners: dict[Key, frozenset[int]] = {}
        self._read_at: float | None = None
        self._nodes: Sequence[tenure.NodeDescription] = ()
        self._rows: Sequence[Row] = ()

    async def read(self, inside: Key | None = None) -> Snapshot:
        """Read the store.

        Args:
            inside: the only semaphore to read, with its waiters; the others are as last read.
        """
        client, clock = self._client, self._client.clock
        began, wall = clock.now(), clock.wall()
        described = None
        if inside is None:
            await self._read_all(began)
        else:
            with contextlib.suppress(tenure.NodeNotFound, tenure.SemaphoreNotFound):
                described = await client.describe_semaphore(inside[1], inside[0])
        took = clock.now() - began
        return Snapshot(client.url, wall, took, self._nodes, self._rows, described)

    async def _read_all(self, now: float) -> None:
        client, only = self._client, self._node
        nodes, rows = [], []
        for path in await client.list_nodes() if only is None else [only]:
            try:
                node = await client.describe_node(path)
                there = await client.list_semaphores(path, owners=True)
            except tenure.NodeNotFound:
                if only is not None:
                    raise
                continue  # dropped just now
            nodes.append(node)
            rows += [Row(path, each) for each in there]
        self._nodes, self._rows = nodes, self._rated(rows, now)

    def _rated(self, rows: Sequence[Row], now: float) -> list[Row]:
        elapsed = None if self._read_at is None else now - self._read_at
        before, self._read_at = self._owners, now
        self._owners = {
            row.key: frozenset(each.order_id for each in row.semaphore.owners) for row in rows
        }
        if not elapsed:
            return list(rows)
        return [
            Row(
                row.node,
                row.semaphore,
                len(self._owners[row.key] - before.get(row.key, frozenset())) / elapsed,
            )
            for row in rows
        ]
