"""Checks for sessions that are over but still in the store: dead process, or silence.

Rules:

* A session of liveness ``process`` is over when its process has ended, and when nothing was heard
  of it for its window. One of liveness ``window`` is over only then, whatever became of the
  process: that is what lets another one take it up.
* It is *ended* by a transaction alone, which judges again. As long as none has, nothing of what it
  holds has been granted to others, so that it may still be given more time (`sessions.reopen`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenure.engines.sqlite.transaction import Transaction
from tenure.model import Liveness

__all__ = [
    "Suspect",
    "is_attached",
    "is_dead",
    "is_silent",
    "last_contact",
    "over_among",
    "standing_before",
    "why_over",
]

Suspect = tuple[int, int, int | None, int | None, float, float, Liveness]
"""A session that may be over: (id, node, participant, slot, recovery window, contact, liveness)."""


def standing_before(tx: Transaction, node: int, name: str, order_id: int, most: int) -> list[Any]:
    """The last requests (`most` of them) before a place, nearest first: (order id, *suspect)."""
    return tx.execute(
        "SELECT r.order_id, "
        "s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness "
        "FROM requests AS r "
        "JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.order_id < ? ORDER BY r.order_id DESC LIMIT ?",
        (node, name, order_id, most),
    ).fetchall()


def why_over(tx: Transaction, suspect: Suspect) -> str:
    """Return why a session in the store is over; empty if it lives."""
    _, _, participant, _, window, _, liveness = suspect
    if liveness == "process" and is_dead(tx, participant):
        return "its process has ended"
    if is_silent(tx, suspect):
        return f"nothing was heard of it for its window of {window:g} s"
    return ""


def is_dead(tx: Transaction, participant: int | None) -> bool:
    """Return whether there is a participant, and its process has ended."""
    if participant is None or participant == tx.participant:
        return False
    return tx.lives.is_dead(participant)


def is_attached(tx: Transaction, suspect: Suspect) -> bool:
    """Return whether a living program has the session."""
    participant = suspect[2]
    return participant is not None and not is_dead(tx, participant) and not is_silent(tx, suspect)


def is_silent(tx: Transaction, suspect: Suspect) -> bool:
    """Return whether a session was not renewed in time."""
    _, _, participant, slot, window, contact, _ = suspect
    return last_contact(tx, participant, slot, contact) + window < tx.now


def last_contact(
    tx: Transaction, participant: int | None, slot: int | None, contact: float
) -> float:
    """Return when a session was last renewed; `contact` counts if it has no participant."""
    if participant is None:
        return contact
    assert slot is not None
    if participant == tx.participant and tx.life is not None:
        return tx.life.last_beat(slot)
    return tx.lives.last_beat(participant, slot, tx.now)


def over_among(tx: Transaction, suspects: Iterable[Suspect]) -> tuple[list[int], list[int]]:
    """(participants that are dead, sessions that are silent) among suspects."""
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
