"""Descriptions of nodes, semaphores and sessions. Reading them takes no turn."""

from __future__ import annotations

import os
from typing import Any

from tenure.core import rules
from tenure.engines.sqlite.nodes import config_of
from tenure.engines.sqlite.over import last_contact
from tenure.engines.sqlite.requests import exists, not_found
from tenure.engines.sqlite.schema import from_column
from tenure.engines.sqlite.transaction import Transaction
from tenure.model import (
    EPHEMERAL_LIMIT,
    NodeDescription,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["node", "node_list", "semaphore", "semaphore_list", "semaphore_names", "session_list"]


_QUEUE = """
SELECT r.session, r.order_id, r.count, r.data, r.joined_at, r.granted_at, r.deadline,
    s.recovery_window, s.description, p.pid, s.participant, s.slot, s.contact
FROM requests AS r {index}
JOIN sessions AS s ON s.id = r.session
LEFT JOIN participants AS p ON p.id = s.participant
WHERE r.node = ? AND r.name = ? AND r.granted_at {granted}
ORDER BY r.order_id
"""
_OWNERS = _QUEUE.format(index="", granted="IS NOT NULL")
_WAITERS = _QUEUE.format(index="INDEXED BY waiting", granted="IS NULL")


def node(tx: Transaction, number: int, path: str) -> NodeDescription:
    """Describe a node as it is now."""
    (count,) = tx.execute("SELECT sessions FROM nodes WHERE id = ?", (number,)).fetchone()
    return NodeDescription(path, config_of(tx, number), count, len(semaphore_names(tx, number)))


def node_list(tx: Transaction) -> list[str]:
    """Return the paths of all nodes, sorted."""
    return [path for (path,) in tx.execute("SELECT path FROM nodes ORDER BY path").fetchall()]


def semaphore_names(tx: Transaction, node: int, after: str = "", most: int = -1) -> list[str]:
    """Return the sorted names of a node's semaphores.

    Args:
        tx: the transaction that reads.
        node: the number of the node.
        after: only names after this one.
        most: the highest number of names to return; -1 for all.
    """
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
    return names if most < 0 else names[:most]


def semaphore(
    tx: Transaction, node: int, path: str, name: str, owners: bool, waiters: bool
) -> SemaphoreDescription:
    """Describe a semaphore as it is now."""
    rules.check_name(name, path)
    if not exists(tx, node, name):
        raise not_found(name, path)
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
    tx: Transaction, statement: str, where: tuple[int, str]
) -> tuple[RequestDescription, ...]:
    host = os.uname().nodename
    return tuple(_request(tx, host, *row) for row in tx.execute(statement, where).fetchall())


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


def semaphore_list(
    tx: Transaction, node: int, path: str, owners: bool, waiters: bool
) -> list[SemaphoreDescription]:
    """Describe all semaphores of a node, sorted by name."""
    return [semaphore(tx, node, path, name, owners, waiters) for name in semaphore_names(tx, node)]


def session_list(
    tx: Transaction, node: int, path: str, after: int = 0, most: int = -1
) -> list[SessionDescription]:
    """Describe the sessions of a node, sorted by id.

    Args:
        tx: the transaction that reads.
        node: the number of the node.
        path: the path of the node.
        after: only sessions with a higher id.
        most: the highest number of sessions to return; -1 for all.
    """
    rows = tx.execute(
        "SELECT s.id, s.description, s.recovery_window, p.pid, s.participant, s.slot, s.contact "
        "FROM sessions AS s LEFT JOIN participants AS p ON p.id = s.participant "
        "WHERE s.node = ? AND s.id > ? ORDER BY s.id LIMIT ?",
        (node, after, most),
    ).fetchall()
    host = os.uname().nodename
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
