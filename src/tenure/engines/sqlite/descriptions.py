"""Descriptions of nodes, semaphores and sessions. Reading them takes no turn.

Sessions that have ended are removed before a description, if the turn is free in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tenure.core import refusals, rules
from tenure.engines.sqlite.expiry import (
    Attachment,
    check_alive,
    last_contact,
    over_among,
    over_in_queue,
)
from tenure.engines.sqlite.nodes import config_of, find, sessions_of
from tenure.engines.sqlite.participants import reap
from tenure.engines.sqlite.requests import exists
from tenure.engines.sqlite.schema import from_column
from tenure.engines.sqlite.store import Store, answered
from tenure.engines.sqlite.transaction import Transaction
from tenure.errors import TenureError
from tenure.model import (
    EPHEMERAL_LIMIT,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

ALL = sys.maxsize
"""Size of a page that contains the whole list."""

_READING = 1.0
"""Seconds that a description waits for the removal of dead participants and silent sessions."""

_QUEUE = """
SELECT r.session, r.order_id, r.count, r.data, r.joined_at, r.granted_at, r.deadline,
    s.recovery_window, s.description, p.pid, s.participant, s.slot, s.contact
FROM requests AS r {index}
JOIN sessions AS s ON s.id = r.session
LEFT JOIN participants AS p ON p.id = s.participant
WHERE r.node = ? AND r.name = ? AND r.granted_at {granted} AND r.order_id > ?
ORDER BY r.order_id LIMIT ?
"""
_OWNERS = _QUEUE.format(index="", granted="IS NOT NULL")
_WAITERS = _QUEUE.format(index="INDEXED BY waiting", granted="IS NULL")


def _names(tx: Transaction, node: int, after: str = "", most: int = ALL) -> list[str]:
    """Return at most `most` names of a node's semaphores after `after`, sorted."""
    # Goes from one name to the next through the index, however many requests each has.
    ephemeral = tx.execute(
        "WITH RECURSIVE names (name) AS ("
        "  SELECT min(name) FROM requests WHERE node = :node AND name > :after"
        "  UNION ALL"
        "  SELECT (SELECT min(name) FROM requests WHERE node = :node AND name > names.name)"
        "  FROM names WHERE names.name IS NOT NULL"
        ") SELECT name FROM names WHERE name IS NOT NULL LIMIT :most",
        {"node": node, "after": after, "most": most},
    ).fetchall()
    lasting = tx.execute(
        "SELECT name FROM semaphores WHERE node = ? AND name > ? ORDER BY name LIMIT ?",
        (node, after, most),
    ).fetchall()
    names = sorted({name for (name,) in ephemeral + lasting})
    return names[:most]


def _semaphore(
    tx: Transaction, node: int, path: str, name: str, owners: bool, waiters: bool
) -> SemaphoreDescription:
    """Describe a semaphore."""
    rules.check_name(name, path)
    if not exists(tx, node, name):
        raise refusals.semaphore_not_found(path, name)
    where = (node, name)
    level = tx.execute(
        'SELECT "limit", held FROM semaphores WHERE node = ? AND name = ?', where
    ).fetchone()
    content = tx.execute("SELECT data FROM contents WHERE node = ? AND name = ?", where).fetchone()
    waiting = tx.execute(
        "SELECT count(*) FROM requests INDEXED BY waiting "
        "WHERE node = ? AND name = ? AND granted_at IS NULL",
        where,
    ).fetchone()[0]
    if level is None:
        counts = tx.execute(
            "SELECT count FROM requests WHERE node = ? AND name = ? AND granted_at IS NOT NULL",
            where,
        )
        limit, held = EPHEMERAL_LIMIT, sum(from_column(count) for (count,) in counts.fetchall())
    else:
        limit, held = from_column(level[0]), from_column(level[1])
    return SemaphoreDescription(
        name,
        b"" if content is None else content[0],
        limit,
        held,
        level is None,
        _requests(tx, _OWNERS, where) if owners else (),
        _requests(tx, _WAITERS, where) if waiters else (),
        waiting,
    )


def _requests(
    tx: Transaction, statement: str, where: tuple[int, str], after: int = 0, most: int = ALL
) -> tuple[RequestDescription, ...]:
    host = socket.gethostname()
    rows = tx.execute(statement, (*where, after, most)).fetchall()
    return tuple(_request(tx, host, *row) for row in rows)


def _request(
    tx: Transaction,
    host: str,
    session: int,
    order_id: int,
    count: int | str,
    data: bytes,
    joined_at: float,
    granted_at: float | None,
    deadline: float | None,
    window: float,
    description: str,
    pid: int | None,
    *contact: Any,
) -> RequestDescription:
    now = tx.now
    return RequestDescription(
        session,
        order_id,
        from_column(count),
        data,
        since=now - (joined_at if granted_at is None else granted_at),
        timeout=None if deadline is None else max(0.0, deadline - now),
        remaining=max(0.0, window - _silent_for(tx, *contact)),
        session_description=description,
        pid=pid,
        host=host,
    )


def _silent_for(
    tx: Transaction, participant: int | None, slot: int | None, contact: float
) -> float:
    return max(0.0, tx.now - last_contact(tx, participant, slot, contact))


def _sessions(
    tx: Transaction, node: int, path: str, after: int, most: int
) -> list[SessionDescription]:
    """Describe the next sessions of a node, sorted by id."""
    rows = tx.execute(
        "SELECT s.id, s.description, s.recovery_window, p.pid, s.participant, s.slot, s.contact "
        "FROM sessions AS s LEFT JOIN participants AS p ON p.id = s.participant "
        "WHERE s.node = ? AND s.id > ? ORDER BY s.id LIMIT ?",
        (node, after, most),
    ).fetchall()
    host = socket.gethostname()
    return [
        SessionDescription(
            session,
            path,
            description,
            window,
            attached=participant is not None,
            silent_for=_silent_for(tx, participant, slot, contact),
            pid=pid,
            host=host,
        )
        for session, description, window, pid, participant, slot, contact in rows
    ]


class SqliteDescriptions:
    """Descriptions of one open store, whole and in pages.

    Args:
        store: the open store.
        do: runs an operation in the background; returns a future if it was deferred.
    """

    def __init__(self, store: Store, do: Callable[..., asyncio.Future[Any] | None]) -> None:
        """Read from `store`."""
        self._store = store
        self._do = do

    async def _remove(self, participants: Sequence[int], silent: Sequence[int]) -> None:
        """End dead participants and silent sessions, waiting at most `_READING` seconds.

        If the turn cannot be taken by then, they remain in the description.
        """
        if participants or silent:
            with contextlib.suppress(TenureError):
                answer = self._do(reap, participants, silent)
                if answer is not None:
                    await asyncio.wait([answer], timeout=_READING)

    async def node(self, path: str) -> NodeDescription:
        """Describe a node."""
        with self._store.reading() as tx:
            over = over_among(tx, sessions_of(tx, find(tx, path)))
        await self._remove(*over)
        with self._store.reading() as tx:
            node = find(tx, path)
            (count,) = tx.execute("SELECT sessions FROM nodes WHERE id = ?", (node,)).fetchone()
            return NodeDescription(path, config_of(tx, node), count, len(_names(tx, node)))

    async def nodes(self) -> list[str]:
        """Return the paths of all nodes, sorted."""
        with self._store.reading() as tx:
            return [path for (path,) in tx.execute("SELECT path FROM nodes ORDER BY path")]

    async def sessions(
        self, path: str, *, after: int = 0, most: int = ALL
    ) -> Sequence[SessionDescription]:
        """Describe the next sessions of a node, by id."""
        with self._store.reading() as tx:
            over = over_among(tx, sessions_of(tx, find(tx, path), after, most))
        await self._remove(*over)
        with self._store.reading() as tx:
            return _sessions(tx, find(tx, path), path, after, most)

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores, sorted."""
        with self._store.reading() as tx:
            return _names(tx, find(tx, path), after, most)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str = "", most: int = ALL
    ) -> Sequence[SemaphoreDescription]:
        """Describe the next semaphores of a node, by name."""
        dead: set[int] = set()
        silent: set[int] = set()
        with self._store.reading() as tx:
            node = find(tx, path)
            if most == ALL:
                found = [over_among(tx, sessions_of(tx, node))]
            elif owners or waiters:
                found = [over_in_queue(tx, node, name) for name in _names(tx, node, after, most)]
            else:
                found = []
            for participants, suspects in found:
                dead.update(participants)
                silent.update(suspects)
        await self._remove(sorted(dead), sorted(silent))
        page: list[SemaphoreDescription] = []
        size = 0
        with self._store.reading() as tx:
            node = find(tx, path)
            for name in _names(tx, node, after, most):
                page.append(_semaphore(tx, node, path, name, owners, waiters))
                size += 1 + len(page[-1].owners) + len(page[-1].waiters)
                if size >= most:
                    break
        return page

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Describe the next owners or waiters of a semaphore, by order id."""
        rules.check_name(name, path)
        with self._store.reading() as tx:
            node = find(tx, path)
            if not exists(tx, node, name):
                raise refusals.semaphore_not_found(path, name)
            return _requests(tx, _WAITERS if waiters else _OWNERS, (node, name), after, most)

    async def semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_name(name, path)
        with self._store.reading() as tx:
            over = over_in_queue(tx, find(tx, path), name)
        await self._remove(*over)
        with self._store.reading() as tx:
            return _semaphore(tx, find(tx, path), path, name, owners, waiters)

    async def semaphore_for(
        self, me: Attachment, node: int, path: str, name: str, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore for a session: after all its earlier operations."""
        store = self._store
        if owners or waiters:
            with store.reading() as tx:
                over = over_in_queue(tx, node, name)
            await self._remove(*over)

        def described(tx: Transaction) -> SemaphoreDescription:
            check_alive(tx, me, path)
            return _semaphore(tx, node, path, name, owners, waiters)

        if store.committer.idle:
            with store.reading() as tx:
                return described(tx)
        return await answered(store.committer.do(described))
