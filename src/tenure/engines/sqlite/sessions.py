"""Sessions: the transactions that attach, take over, detach and end them.

A takeover is three transactions, the second of which is made by the former attachment's program:

1. `take_over`: this participant has the session from now on, under a higher attach number, and the
   store rejects operations of the former attachment. A row of ``news`` notifies it.
2. `acknowledge`: the former attachment's program no longer considers anything held. Its participant
   removes the row, or is removed together with the row.
3. `begin`: no former attachment considers a lease held; the new one gets the session's requests.

The program of a former attachment that has not been notified may continue to write heartbeats into
its slot, because that needs no transaction. It considers its leases held until its last heartbeat
that is *proof*, plus the window, less a margin. So the row contains the slot, and `held_until`
reads the clock and then the slot. If that heartbeat is older than the window, no later one is proof
(`SqliteSession.beat`). The wait covers all rows of the session, because an attachment that was
superseded while it waited has left the row of its predecessor. A row whose participant is dead does
not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tenure.core import refusals, rules
from tenure.engines.contract import Attach
from tenure.engines.sqlite import requests
from tenure.engines.sqlite.expiry import (
    Attachment,
    check_alive,
    is_current,
    is_dead,
    last_contact,
    why_over,
)
from tenure.engines.sqlite.nodes import find
from tenure.engines.sqlite.schema import from_column
from tenure.engines.sqlite.transaction import ACKNOWLEDGED, TAKEN_OVER, Transaction
from tenure.identity import retold
from tenure.model import Recovered


class AttachedRow(NamedTuple):
    """A session in the store just after its attach."""

    session: int
    node: int
    attach_number: int
    window: float


class Found(NamedTuple):
    """A request of a session that was taken over, and its deadline while it waits."""

    request: Recovered
    deadline: float | None


# Attaching and taking over


def attach(tx: Transaction, how: Attach, slot: int) -> AttachedRow:
    """Add a session of this participant."""
    path = how.node
    rules.check_path(path)
    rules.check_window(how.recovery_window, path)
    rules.check_description(how.description, path)
    rules.check_key(how.key, path)
    node = find(tx, path)
    count = tx.execute("SELECT sessions FROM nodes WHERE id = ?", (node,)).fetchone()[0]
    if count >= rules.SESSIONS_PER_NODE:
        raise refusals.node_full(path)
    tx.last_session_id += 1
    tx.longest_window = max(tx.longest_window, how.recovery_window)
    tx.execute(
        "INSERT INTO sessions (id, node, participant, slot, recovery_window, liveness, "
        "attach_number, key, contact, description) VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?, ?)",
        (
            *(tx.last_session_id, node, tx.participant, slot, how.recovery_window),
            *(how.liveness, how.key, tx.now, how.description),
        ),
    )
    tx.execute("UPDATE nodes SET sessions = sessions + 1 WHERE id = ?", (node,))
    return AttachedRow(tx.last_session_id, node, 1, how.recovery_window)


def take_over(tx: Transaction, how: Attach, slot: int) -> AttachedRow:
    """Make a session belong to this participant."""
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
        tx.send_takeover(former, number, attach_number, former_slot)
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
    """Record that the program of a former attachment no longer considers anything held.

    Return true, which the caller reports as a success.
    """
    session, attach_number = me
    tx.execute(
        "DELETE FROM news WHERE participant = ? AND kind = ? AND session = ? AND hold <= ?",
        (tx.participant, TAKEN_OVER, session, attach_number),
    )
    _notify_successor(tx, session)
    return True


def acknowledge_for(tx: Transaction, participant: int) -> None:
    """Notify the new attachments of takeovers that a leaving participant has not acknowledged."""
    for (session,) in tx.execute(
        "SELECT DISTINCT session FROM news WHERE participant = ? AND kind = ?",
        (participant, TAKEN_OVER),
    ).fetchall():
        _notify_successor(tx, session)


def _notify_successor(tx: Transaction, session: int) -> None:
    row = tx.execute("SELECT participant FROM sessions WHERE id = ?", (session,)).fetchone()
    if row is not None:
        tx.send(row[0], ACKNOWLEDGED, session)


def held_until(
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


def begin(tx: Transaction, me: Attachment, path: str) -> list[Found]:
    """Complete a takeover: return the requests of the session, by order id."""
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


# Leaving


def detach(tx: Transaction, me: Attachment, contact: float) -> bool:
    """Detach a session, unless another attachment has it; return true, as `acknowledge`."""
    if not is_current(tx, me):
        return acknowledge(tx, me)
    detach_at(tx, me[0], contact)
    return True


def detach_at(tx: Transaction, session: int, contact: float) -> None:
    """Detach a session whose last contact was at `contact`."""
    tx.execute(
        "UPDATE sessions SET participant = NULL, slot = NULL, contact = ? WHERE id = ?",
        (contact, session),
    )


def close(tx: Transaction, me: Attachment) -> bool:
    """End a session, unless another attachment has it; return true, as `acknowledge`."""
    if not is_current(tx, me):
        return acknowledge(tx, me)
    rows = tx.execute("SELECT id, node, participant FROM sessions WHERE id = ?", me[:1]).fetchall()
    requests.remove_sessions(tx, rows, None)
    requests.settle(tx)
    return True


def end(tx: Transaction, path: str, session: int, why: str) -> bool:
    """End a session of a node; return false if it does not exist."""
    rows = tx.execute(
        "SELECT id, node, participant FROM sessions WHERE id = ? AND node = ?",
        (session, find(tx, path)),
    ).fetchall()
    requests.remove_sessions(tx, rows, why)
    requests.settle(tx)
    return bool(rows)


def watch(tx: Transaction, node: int, name: str, kinds: int) -> None:
    """Set which kinds of changes this participant watches of a name; 0 ends the watch."""
    where = (node, name, tx.participant)
    if kinds:
        tx.execute("INSERT OR REPLACE INTO watches VALUES (?, ?, ?, ?)", (*where, kinds))
    else:
        tx.execute("DELETE FROM watches WHERE node = ? AND name = ? AND participant = ?", where)
    tx.count_watches()
