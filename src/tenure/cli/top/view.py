"""View of `tenure top`, and its changes by keys: a small state machine.

A view is an immutable value. `settled` fits it to the current snapshot, `pressed` applies a key.

Snapshot of a store, and the rate at which owners change between two snapshots.

The rate is the number of owners that the previous reading did not have, divided by the seconds
between the two readings. It is a lower bound: owners that appeared and disappeared between two
readings are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tenure
from tenure.cli.why import lines_of

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

    @property
    def longest(self) -> float | None:
        """Seconds that the longest wait has lasted; ``None`` without a waiter, or if unknown."""
        waits = (each.since for each in self.semaphore.waiters)
        return max((since for since in waits if since is not None), default=None)


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
        graph: the waits for the semaphore that is explained, if it exists.
    """

    url: str
    wall: float
    took: float
    nodes: Sequence[tenure.NodeDescription]
    rows: Sequence[Row]
    inside: tenure.SemaphoreDescription | None = None
    graph: tenure.WaitGraph | None = None


MOST_WAITERS = 5000
"""Waiters of a node beyond which they are counted, and their times are not read."""


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

    async def read(self, inside: Key | None = None, explained: Key | None = None) -> Snapshot:
        """Read the store.

        Args:
            inside: the only semaphore to read, with its waiters; the others are as last read.
            explained: the same, with the reason why these wait.
        """
        client, clock = self._client, self._client.clock
        began, wall = clock.now(), clock.wall()
        described = graph = None
        if explained is not None:
            with contextlib.suppress(tenure.NodeNotFound, tenure.SemaphoreNotFound):
                graph = await client.waits(explained[1], explained[0])
                described = graph.semaphores[0]
        elif inside is not None:
            with contextlib.suppress(tenure.NodeNotFound, tenure.SemaphoreNotFound):
                described = await client.describe_semaphore(inside[1], inside[0])
        else:
            await self._read_all(began)
        took = clock.now() - began
        return Snapshot(client.url, wall, took, self._nodes, self._rows, described, graph)

    async def _read_all(self, now: float) -> None:
        client, only = self._client, self._node
        nodes, rows = [], []
        for path in await client.list_nodes() if only is None else [only]:
            try:
                node = await client.describe_node(path)
                there = await client.list_semaphores(path, owners=True)
                if 0 < sum(each.waiting or 0 for each in there) <= MOST_WAITERS:
                    there = await client.list_semaphores(path, owners=True, waiters=True)
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


SORTS = ("name", "held", "waiting", "age", "rate")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in a list.

    Attributes:
        selected: the identity of the row to which the cursor was moved, and which it follows;
            ``None``: the cursor was not moved, and stays at the top.
        index: the position of the cursor.
        first: the first row on the screen.
    """

    selected: Hashable = None
    index: int = 0
    first: int = 0

    def settled(self, rows: Sequence[Hashable], page: int) -> Cursor:
        """Return the cursor on a row that exists, among the `page` rows shown."""
        if self.selected is None:
            return replace(self.moved(rows, 0, page), selected=None)
        index = rows.index(self.selected) if self.selected in rows else self.index
        return self.moved(rows, index, page)

    def moved(self, rows: Sequence[Hashable], index: int, page: int) -> Cursor:
        """Return the cursor at another position, or at the end that is nearest to it."""
        index = max(0, min(index, len(rows) - 1))
        page = max(1, page)
        first = max(min(self.first, index), index - page + 1)
        first = max(0, min(first, len(rows) - page))
        return Cursor(rows[index] if rows else None, index, first)


@dataclass(frozen=True, slots=True)
class View:
    """State of the view: order, filter, and the screens above the list.

    Attributes:
        sort: one of `SORTS`; descending, except for names.
        reverse: whether the order is reversed.
        node: the only node to show; ``None`` for all.
        cursor: the cursor in the list of semaphores, whose rows are keys.
        inside: the semaphore shown in detail.
        request: the cursor in its queue, whose rows are order ids.
        explained: the semaphore and the order id whose wait is explained, above the other screens;
            order id ``None``: all waiters.
        line: the first line of the explanation on the screen.
        quit: whether the program ends.
    """

    sort: str = "name"
    reverse: bool = False
    node: str | None = None
    cursor: Cursor = Cursor()
    inside: Key | None = None
    request: Cursor = Cursor()
    explained: tuple[Key, int | None] | None = None
    line: int = 0
    quit: bool = False


def _age(row: Row) -> float:
    ages = [owner.since for owner in row.semaphore.owners if owner.since is not None]
    return max(ages, default=-1.0)


_MEASURES: dict[str, Callable[[Row], Any]] = {
    "held": lambda row: row.semaphore.held,
    "waiting": lambda row: row.semaphore.waiting or 0,
    "age": _age,
    "rate": lambda row: row.rate or 0.0,
}


def chosen(snapshot: Snapshot, view: View) -> list[Row]:
    """Return the rows of the view, in its order."""
    rows = [row for row in snapshot.rows if view.node is None or row.node == view.node]
    rows.sort(key=lambda row: (row.semaphore.name, row.node))
    measure = _MEASURES.get(view.sort)
    if measure is not None:
        rows.sort(key=measure, reverse=not view.reverse)
    elif view.reverse:
        rows.reverse()
    return rows


def queue(snapshot: Snapshot) -> list[int]:
    """Return the order ids of the semaphore shown in detail: its owners, then its waiters."""
    there = snapshot.inside
    return [] if there is None else [each.order_id for each in (*there.owners, *there.waiters)]


def explanation(snapshot: Snapshot, view: View) -> list[tuple[str, str]]:
    """Return the lines that explain a wait, each with its style; none if they were not read."""
    graph, explained = snapshot.graph, view.explained
    if graph is None or explained is None or (graph.node, graph.name) != explained[0]:
        return []
    return list(lines_of(graph, explained[1]))


def settled(view: View, snapshot: Snapshot, page: int) -> View:
    """Return the view with its cursor on a row that exists, among the `page` rows shown."""
    if view.explained is not None:
        count = len(explanation(snapshot, view))
        return replace(view, line=max(0, min(view.line, count - page)))
    if view.inside is not None:
        if snapshot.inside is None:  # not read yet, or it has no request now
            return view
        return replace(view, request=view.request.settled(queue(snapshot), page))
    if view.node is not None and view.node not in {each.path for each in snapshot.nodes}:
        view = replace(view, node=None)
    return replace(view, cursor=view.cursor.settled(_keys(snapshot, view), page))


def _keys(snapshot: Snapshot, view: View) -> list[Key]:
    return [row.key for row in chosen(snapshot, view)]


def pressed(view: View, key: str, snapshot: Snapshot, page: int) -> View:
    """Return the view after a key; an unknown key changes nothing."""
    if key == "q":
        return replace(view, quit=True)
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -page, "pagedown": page}
    step = (steps | {"home": -(10**9), "end": 10**9}).get(key)
    if view.explained is not None:
        if key in {"escape", "backspace", "w"}:
            return settled(replace(view, explained=None), snapshot, page)
        return settled(replace(view, line=view.line + (step or 0)), snapshot, page)
    if view.inside is not None:
        return _pressed_inside(view, key, step, snapshot, page)
    keys = _keys(snapshot, view)
    if step is not None:
        return replace(view, cursor=view.cursor.moved(keys, view.cursor.index + step, page))
    top = replace(view, cursor=Cursor())
    match key:
        case "enter" | "w" if keys:
            cursor = view.cursor.moved(keys, view.cursor.index, page)
            here = keys[cursor.index]
            view = replace(view, cursor=cursor, line=0)
            if key == "w":
                return replace(view, explained=(here, None))
            return replace(view, inside=here, request=Cursor())
        case "s":
            following = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
            return settled(replace(top, sort=following), snapshot, page)
        case "r":
            return settled(replace(top, reverse=not view.reverse), snapshot, page)
        case "n":
            nodes = [None, *(each.path for each in snapshot.nodes)]
            at = nodes.index(view.node) if view.node in nodes else 0
            return settled(replace(top, node=nodes[(at + 1) % len(nodes)]), snapshot, page)
        case "escape" | "backspace":
            return settled(replace(view, node=None), snapshot, page)
    return view


def _pressed_inside(view: View, key: str, step: int | None, snapshot: Snapshot, page: int) -> View:
    assert view.inside is not None
    if key in {"escape", "backspace"}:
        return settled(replace(view, inside=None), snapshot, page)
    requests = queue(snapshot)
    cursor = view.request.moved(requests, view.request.index + (step or 0), page)
    if step is not None:
        return replace(view, request=cursor)
    if key == "w" and requests:
        here = requests[cursor.index]
        return replace(view, request=cursor, explained=(view.inside, here), line=0)
    return view


_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "pageup",
    b"\x1b[6~": "pagedown",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
}
_SINGLE = {b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\b": "backspace"}
_LONGEST = 16


class Keyboard:
    """Decoder of a terminal's bytes to keys.

    An Escape byte is the Escape key or the beginning of a sequence, whose rest may arrive later. So
    the reader calls `flush` after a short time.
    """

    def __init__(self) -> None:
        self._pending = b""

    @property
    def waiting(self) -> bool:
        """Return whether the beginning of a possible escape sequence is buffered."""
        return bool(self._pending)

    def feed(self, data: bytes) -> list[str]:
        """Add input, and return the keys that are complete."""
        self._pending += data
        keys = []
        while self._pending:
            taken, key = self._next()
            if not taken:
                break
            self._pending = self._pending[taken:]
            if key:
                keys.append(key)
        return keys

    def flush(self) -> list[str]:
        """Treat a lone Escape byte as the Escape key, because no sequence has followed."""
        pending, self._pending = self._pending, b""
        return ["escape"] if pending == b"\x1b" else []

    def _next(self) -> tuple[int, str]:
        """Return the length in bytes of the next key, and the key; 0 when it is incomplete."""
        pending = self._pending
        if pending[:1] != b"\x1b":
            single = pending[:1]
            return 1, _SINGLE.get(single, single.decode("ascii", "replace"))
        if len(pending) == 1:
            return 0, ""
        if pending[1:2] not in {b"[", b"O"}:
            return 1, "escape"
        for at in range(2, min(len(pending), _LONGEST)):
            if 0x40 <= pending[at] <= 0x7E:  # the last byte of a sequence
                return at + 1, _SEQUENCES.get(pending[: at + 1], "")
        return (len(pending), "") if len(pending) >= _LONGEST else (0, "")
