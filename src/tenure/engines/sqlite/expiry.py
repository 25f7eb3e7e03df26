"""Expiry of sessions and waits: detection of those that are still in the store.

Rules:

* A session of liveness ``process`` has expired when its process has ended, or when it was not
  renewed for its window. One of liveness ``window`` has expired only when it was not renewed:
  another process may take it over.
* A waiter times out at its deadline. The program of the request ends its wait on time. If that
  program is detached, stopped or dead, any other program that reads the queue does so
  (`requests.time_out`).
* Only a transaction *ends* a session, and it checks again. Until then, nothing that the session
  holds has been granted to others, so its time can be extended (`participants.reopen`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from tenure.core import refusals, rules
from tenure.engines.sqlite.schema import from_column
from tenure.engines.sqlite.transaction import Transaction
from tenure.errors import SessionExpired
from tenure.model import EPHEMERAL_LIMIT, Liveness

END = 2**62
"""Greater than every order id."""

_HEAD = 256
"""Requests at the head of a queue that are checked for damage."""

Attachment = tuple[int, int]
"""(session, attach number) of the caller. After a takeover its operations are rejected."""

Suspect = tuple[int, int, int | None, int | None, float, float, Liveness]
"""A session that may have expired: (id, node, participant, slot, recovery window, contact,
liveness)."""


def standing_before(tx: Transaction, node: int, name: str, order_id: int, most: int) -> list[Any]:
    """Return the last `most` requests before a place, nearest first: (order id, *suspect)."""
    return tx.execute(
        "SELECT r.order_id, "
        "s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness "
        "FROM requests AS r "
        "JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.order_id < ? ORDER BY r.order_id DESC LIMIT ?",
        (node, name, order_id, most),
    ).fetchall()


def suspects_in_queue(tx: Transaction, node: int, name: str) -> set[Any]:
    """Return the sessions of the last requests in a queue."""
    return {tuple(suspect) for _, *suspect in standing_before(tx, node, name, END, 256)}


def over_in_queue(tx: Transaction, node: int, name: str) -> tuple[list[int], list[int]]:
    """Return `over_among` of the sessions of a queue."""
    return over_among(tx, suspects_in_queue(tx, node, name))


def why_over(tx: Transaction, suspect: Suspect) -> str:
    """Return why a session in the store has expired; empty if it lives."""
    _, _, participant, _, window, _, liveness = suspect
    if liveness == "process" and is_dead(tx, participant):
        return "its process has ended"
    if is_silent(tx, suspect):
        return f"it was silent for its recovery window of {window:g} s"
    return ""


def is_dead(tx: Transaction, participant: int | None) -> bool:
    """Return true if there is a participant whose process has ended."""
    if participant is None or participant == tx.participant:
        return False
    return tx.lives.is_dead(participant)


def is_attached(tx: Transaction, suspect: Suspect) -> bool:
    """Return true if a live program has the session."""
    participant = suspect[2]
    return participant is not None and not is_dead(tx, participant) and not is_silent(tx, suspect)


def is_silent(tx: Transaction, suspect: Suspect) -> bool:
    """Return true if a session was not renewed in time."""
    _, _, participant, slot, window, contact, _ = suspect
    return last_contact(tx, participant, slot, contact) + window < tx.now


def last_contact(
    tx: Transaction, participant: int | None, slot: int | None, contact: float
) -> float:
    """Return when a session was last renewed; without a participant, that is `contact`."""
    if participant is None:
        return contact
    assert slot is not None
    if participant == tx.participant and tx.life is not None:
        return tx.life.last_beat(slot)
    return tx.lives.last_beat(participant, slot)


def over_among(tx: Transaction, suspects: Iterable[Suspect]) -> tuple[list[int], list[int]]:
    """Return the dead participants and the silent sessions among suspects."""
    living = {tx.participant: True}
    silent = []
    for suspect in suspects:
        session, _, participant, *_, liveness = suspect
        if participant is not None and participant not in living:
            living[participant] = not tx.lives.is_dead(participant)
        ends_alone = liveness == "window" or participant is None or living[participant]
        if ends_alone and is_silent(tx, suspect):
            silent.append(session)
    return [participant for participant, lives in living.items() if not lives], silent


# Attachments


def session_over(tx: Transaction, me: Attachment, path: str) -> SessionExpired:
    """Return the error for a session that has ended, or was taken over."""
    row = tx.execute("SELECT attach_number FROM sessions WHERE id = ?", me[:1]).fetchone()
    if row is not None and row[0] > me[1]:
        return rules.taken_over(path)
    return refusals.session_over(path)


def is_current(tx: Transaction, me: Attachment) -> bool:
    """Return true if the session is in the store, and was not taken over."""
    row = tx.execute("SELECT 1 FROM sessions WHERE id = ? AND attach_number = ?", me).fetchone()
    return row is not None


def check_alive(tx: Transaction, me: Attachment, path: str) -> None:
    """Raise `SessionExpired` unless the session is in the store, and was not taken over."""
    if not is_current(tx, me):
        raise session_over(tx, me, path)


def requests_of(tx: Transaction, me: Attachment) -> Mapping[int, bool] | None:
    """Return whether a session owns each of its requests; ``None`` if it is not in the store."""
    row = tx.execute("SELECT attach_number FROM sessions WHERE id = ?", me[:1]).fetchone()
    if row is None or row[0] < me[1]:
        return None
    found = tx.execute(
        "SELECT hold, granted_at IS NOT NULL FROM requests WHERE session = ?", me[:1]
    )
    return {request_id: bool(granted) for request_id, granted in found}


class Damage(NamedTuple):
    """Records of a queue that were deleted, but not by a program.

    Attributes:
        sessions: the ids of its sessions that are not in the store.
        held: what is held of it by requests that are not in the store.
        first: the order id of its first request.
    """

    sessions: Collection[int]
    held: int
    first: int


def damage(tx: Transaction, node: int, name: str) -> Damage | None:
    """Return the damage of a queue outside of a quarantine, at its head; ``None`` without any."""
    rows = tx.execute(
        "SELECT r.order_id, r.session, r.count, r.granted_at IS NOT NULL, s.id IS NULL "
        "FROM requests AS r LEFT JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? ORDER BY r.order_id LIMIT ?",
        (node, name, _HEAD),
    ).fetchall()
    if not rows:
        return None
    level = tx.execute(
        "SELECT held FROM semaphores WHERE node = ? AND name = ?", (node, name)
    ).fetchone()
    owned = [from_column(count) for _, _, count, granted, _ in rows if granted]
    missing = 0
    if level is None:
        missing = 0 if owned else EPHEMERAL_LIMIT
    elif len(owned) < _HEAD:
        missing = max(0, from_column(level[0]) - sum(owned))
    sessions = {session for _, session, _, _, absent in rows if absent}
    return Damage(sessions, missing, rows[0][0]) if missing or sessions else None


# Deadlines


def deadline_of(tx: Transaction, session: int, request_id: int) -> float | None:
    """Return the deadline of a request; ``None`` if it has none, or does not wait."""
    row = tx.execute(
        "SELECT deadline FROM requests WHERE session = ? AND hold = ?", (session, request_id)
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
    """Return the deadline of a queue's first waiter, if its session is detached."""
    row = tx.execute(
        "SELECT r.deadline, s.participant "
        "FROM requests AS r INDEXED BY waiting JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.granted_at IS NULL ORDER BY r.order_id LIMIT 1",
        (node, name),
    ).fetchone()
    return row[0] if row is not None and row[1] is None else None
