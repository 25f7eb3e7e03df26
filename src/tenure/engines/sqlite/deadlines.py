"""Deadlines of waiters in the store.

The program that made a request ends its wait on time. If that program is detached, stopped or
dead, any other program that looks at the queue ends the wait (`requests.time_out`).
"""

from __future__ import annotations

from tenure.engines.sqlite.transaction import Transaction

__all__ = ["deadline_of", "earliest", "unattended"]


def deadline_of(tx: Transaction, session: int, hold: int) -> float | None:
    """Return the deadline of a request; ``None`` if it has none, or is not waiting."""
    row = tx.execute(
        "SELECT deadline FROM requests WHERE session = ? AND hold = ?", (session, hold)
    ).fetchone()
    until: float | None = None if row is None else row[0]
    return until


def earliest(tx: Transaction) -> float | None:
    """Return the earliest deadline of all requests in the store."""
    row = tx.execute(
        "SELECT deadline FROM requests INDEXED BY deadlines "
        "WHERE deadline IS NOT NULL ORDER BY deadline LIMIT 1"
    ).fetchone()
    first: float | None = None if row is None else row[0]
    return first


def unattended(tx: Transaction, node: int, name: str) -> float | None:
    """Return the deadline of a queue's first waiter, if that one's session is detached."""
    row = tx.execute(
        "SELECT r.deadline, s.participant "
        "FROM requests AS r INDEXED BY waiting JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.granted_at IS NULL ORDER BY r.order_id LIMIT 1",
        (node, name),
    ).fetchone()
    return row[0] if row is not None and row[1] is None else None
