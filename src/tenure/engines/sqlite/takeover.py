"""Takeover of a session: a new attachment waits until the former one considers nothing held.

A takeover is three transactions, the second of which the former attachment's program makes:

1. `take_over`: the session is this participant's from now on, under a higher attach number, and
   the store refuses whatever the former attachment still sends. It is notified by a row of
   ``news``, which stays until
2. `acknowledge`: the former attachment's program has been notified, and considers nothing held any
   more. Its own participant removes the row, or goes itself and takes the row with it.
3. `begin`: no former attachment considers a lease held; these are the session's requests.

No former attachment believes once `believed_until` has passed. Its program may go on
writing heartbeats into its slot after the take-over, because that takes no transaction, and it
believes until its last one that was *proof*, plus the window, less a margin. A mark in that slot
would not stop it: a heartbeat that is just being written would overwrite it. So the row remembers
the slot, and the slot is read again and again: the clock first, and the heartbeat then. If that is
older than the window, no heartbeat after it is proof any more, by the rule for renewals
(`SqliteSession.beat`: the heartbeat before must not be older than the window when the clock is
read *after* writing). So that side
considers its leases held for as long as a silent one would, and never again afterwards. A side
that is notified acknowledges. A side that is stopped writes no heartbeat. A side whose loop is
stuck while its thread renews does hold until it is notified or stops, and is waited for.

The wait is for *every* row of the session: an attachment that was superseded while it waited
has left the row of the one before it. Of those rows, one whose participant is dead says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tenure.core import rules
from tenure.engines.contract import Attach
from tenure.engines.sqlite import requests
from tenure.engines.sqlite.nodes import find
from tenure.engines.sqlite.over import Attachment, check_alive, is_dead, last_contact, why_over
from tenure.engines.sqlite.schema import from_column
from tenure.engines.sqlite.transaction import ACKNOWLEDGED, TAKEN_OVER, Transaction
from tenure.identity import retold
from tenure.model import Recovered

__all__ = [
    "AttachedRow",
    "Found",
    "acknowledge",
    "begin",
    "believed_until",
    "take_over",
    "tell_of_the_gone",
]


class AttachedRow(NamedTuple):
    """A session as the store has it when it has just been attached."""

    session: int
    node: int
    attach_number: int
    window: float


class Found(NamedTuple):
    """A request of a session that was taken over, and how long it waits."""

    request: Recovered
    deadline: float | None


# Transactions


def take_over(tx: Transaction, how: Attach, slot: int) -> AttachedRow:
    """Make a session this participant's."""
    assert how.session_id is not None
    path, number = how.node, how.session_id
    node = find(tx, path)
    row = tx.execute(
        "SELECT s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness, "
        "s.attach_number, s.key, s.description FROM sessions AS s WHERE s.id = ? AND s.node = ?",
        (number, node),
    ).fetchone()
    if row is None or why_over(tx, row[:7]):
        raise rules.not_there_to_resume(path, number)
    _, _, former, former_slot, window, _, liveness, attach_number, key, description = row
    rules.check_resumable(liveness, key, how.key, path, number)
    if former is not None and not is_dead(tx, former):
        tx.tell_of_take_over(former, number, attach_number, former_slot)
    if how.adopt:
        rules.check_window(how.recovery_window, path)
        window, description = how.recovery_window, how.description
    else:
        description = retold(description, how.description)
    assert tx.life is not None
    tx.life.beat(slot, tx.now)  # from now on, other participants read this slot
    tx.execute(
        "UPDATE sessions SET participant = ?, slot = ?, contact = ?, attach_number = ?, "
        "description = ?, recovery_window = ? WHERE id = ?",
        (tx.participant, slot, tx.now, attach_number + 1, description, window, number),
    )
    return AttachedRow(number, node, attach_number + 1, window)


def acknowledge(tx: Transaction, me: Attachment) -> bool:
    """Record that the program of a former attachment considers nothing held any more.

    Returns true: the caller reports a success.
    """
    session, attach_number = me
    tx.execute(
        "DELETE FROM news WHERE participant = ? AND kind = ? AND session = ? AND hold <= ?",
        (tx.participant, TAKEN_OVER, session, attach_number),
    )
    _tell_successor(tx, session)
    return True


def tell_of_the_gone(tx: Transaction, participant: int) -> None:
    """Notify the new attachments of takeovers that a leaving participant has not acknowledged."""
    for (session,) in tx.execute(
        "SELECT DISTINCT session FROM news WHERE participant = ? AND kind = ?",
        (participant, TAKEN_OVER),
    ).fetchall():
        _tell_successor(tx, session)


def _tell_successor(tx: Transaction, session: int) -> None:
    row = tx.execute("SELECT participant FROM sessions WHERE id = ?", (session,)).fetchone()
    if row is not None:
        tx.tell(row[0], ACKNOWLEDGED, session)


def begin(tx: Transaction, me: Attachment, path: str) -> list[Found]:
    """The take-over is complete: what the session has in queues, in the order of the order ids."""
    check_alive(tx, me, path)
    requests.time_out(tx)
    rows = tx.execute(
        "SELECT r.hold, r.name, r.order_id, r.count, r.data, m.node IS NULL, "
        "r.granted_at IS NOT NULL, r.deadline FROM requests AS r "
        "LEFT JOIN semaphores AS m ON m.node = r.node AND m.name = r.name "
        "WHERE r.session = ? ORDER BY r.order_id",
        me[:1],
    ).fetchall()
    return [
        Found(
            Recovered(
                request_id, name, order_id, from_column(count), data, bool(ephemeral), bool(granted)
            ),
            deadline,
        )
        for request_id, name, order_id, count, data, ephemeral, granted, deadline in rows
    ]


def believed_until(
    tx: Transaction, session: int, window: float, watch: Callable[[Transaction, int], None]
) -> float:
    """Return until when a former attachment may still consider the session its own.

    `watch` is called with each participant whose death ends the wait.
    """
    until = float("-inf")
    for participant, slot in tx.execute(
        "SELECT participant, order_id FROM news WHERE kind = ? AND session = ?",
        (TAKEN_OVER, session),
    ).fetchall():
        if not is_dead(tx, participant):
            until = max(until, last_contact(tx, participant, slot, 0.0) + window)
            watch(tx, participant)
    return until
