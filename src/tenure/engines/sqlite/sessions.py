"""Participants and their sessions: how they come, leave, and are ended when they are over."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tenure.core import rules
from tenure.engines.contract import Attach
from tenure.engines.sqlite.life import Life, started
from tenure.engines.sqlite.nodes import find, sessions_of
from tenure.engines.sqlite.requests import (
    Suspect,
    over_among,
    remove_sessions,
    settle,
    why_over,
)
from tenure.engines.sqlite.transaction import Transaction
from tenure.errors import EngineError, InvalidArgument

__all__ = [
    "attach",
    "detach",
    "end",
    "end_on_node",
    "new_boot",
    "over_on_node",
    "reap",
    "register",
    "unregister",
    "watch",
]


_REMOVE_PARTICIPANT = (
    "DELETE FROM watches WHERE participant = ?",
    "DELETE FROM news WHERE participant = ?",
    "DELETE FROM participants WHERE id = ?",
)

# Participants


def register(tx: Transaction) -> tuple[int, Life]:
    """A new participant, with its sign of life; what the dead have left is removed."""
    _sweep(tx)
    pid = os.getpid()
    while True:
        number = tx.execute(
            "INSERT INTO participants (pid, started) VALUES (?, ?)", (pid, started(pid))
        ).lastrowid
        assert number is not None
        try:
            return number, Life(tx.lives.path(number), tx.place.mode)
        except FileExistsError:  # of a database that was here before this one
            tx.execute("DELETE FROM participants WHERE id = ?", (number,))


def _sweep(tx: Transaction) -> None:
    """Remove participants that have died, and files that are nobody's."""
    known = {number for (number,) in tx.execute("SELECT id FROM participants").fetchall()}
    reap(tx, known, ())
    for entry in os.scandir(tx.place.folder):
        number, _, kind = entry.name.partition(".")
        if kind != "live" or not number.isdecimal() or int(number) in known:
            continue
        if tx.lives.is_dead(int(number)):
            tx.lives.remove(int(number))


def unregister(tx: Transaction) -> None:
    """This participant leaves, and what is attached through it ends."""
    _remove_participants(tx, [tx.participant], None)
    settle(tx)


def _remove_participants(tx: Transaction, participants: Iterable[int], why: str | None) -> None:
    """Take participants out, with all that is theirs."""
    for participant in participants:
        remove_sessions(
            tx,
            tx.execute(
                "SELECT id, node, participant FROM sessions WHERE participant = ?", (participant,)
            ).fetchall(),
            why,
        )
        for statement in _REMOVE_PARTICIPANT:
            tx.execute(statement, (participant,))
    _count_watches(tx)


def reap(tx: Transaction, participants: Iterable[int], sessions: Iterable[int]) -> bool:
    """End those of these that are over, all together; whether there were any."""
    dead = [each for each in participants if each != tx.participant and tx.lives.is_dead(each)]
    silent: dict[str, list[Suspect]] = {}
    for number in sessions:
        suspect = tx.execute(
            "SELECT s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact "
            "FROM sessions AS s WHERE s.id = ?",
            (number,),
        ).fetchone()
        if suspect is not None and suspect[2] not in dead and (why := why_over(tx, suspect)):
            silent.setdefault(why, []).append(suspect)
    _remove_participants(tx, dead, "its process has ended")
    for why, suspects in silent.items():
        remove_sessions(tx, suspects, why)
    settle(tx)
    tx.told.buried.update(dead)
    return bool(dead or silent)


def new_boot(tx: Transaction, boot: str) -> None:
    """The machine was started anew, or the file was moved here: everything has ended.

    Raises:
        EngineError: somebody who has another clock uses the file right now.
    """
    (last_boot,) = tx.execute("SELECT boot FROM meta").fetchone()
    if last_boot == boot:
        return
    participants = {number for (number,) in tx.execute("SELECT id FROM participants").fetchall()}
    for participant in participants:
        if not tx.lives.is_missing(participant) and not tx.lives.is_dead(participant):
            raise EngineError(
                f"{tx.place.path} is in use by a program under another kernel, or with a clock of "
                "its own (a virtual machine, a sandbox, a time namespace); only programs that "
                "share a kernel can share an SQLite file"
            )
    _remove_participants(tx, participants, None)
    remove_sessions(tx, tx.execute("SELECT id, node, NULL FROM sessions").fetchall(), None)
    settle(tx)
    tx.told.buried.update(participants)
    tx.execute("UPDATE meta SET boot = ?", (boot,))
    if last_boot:
        # A power cut may have taken the end of the file, and with it ids that were given out.
        tx.last_session_id += 1_000_000


# Sessions


def attach(tx: Transaction, how: Attach, slot: int) -> tuple[int, int]:
    """A new session of this participant: its id, and the number of its node."""
    path = how.node
    rules.check_path(path)
    rules.check_window(how.recovery_window, path)
    rules.check_description(how.description, path)
    rules.check_key(how.key, path)
    node = find(tx, path)
    count = tx.execute("SELECT sessions FROM nodes WHERE id = ?", (node,)).fetchone()[0]
    if count >= rules.SESSIONS_PER_NODE:
        raise InvalidArgument(
            f"the node {path} has {rules.SESSIONS_PER_NODE} sessions, which is the most", node=path
        )
    tx.last_session_id += 1
    tx.execute(
        "INSERT INTO sessions (id, node, participant, slot, recovery_window, liveness, "
        "attach_number, key, contact, description) VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?, ?)",
        (
            *(tx.last_session_id, node, tx.participant, slot, how.recovery_window),
            *(how.liveness, how.key, tx.now, how.description),
        ),
    )
    tx.execute("UPDATE nodes SET sessions = sessions + 1 WHERE id = ?", (node,))
    return tx.last_session_id, node


def detach(tx: Transaction, session: int, contact: float) -> None:
    """The session is on its own from now on."""
    tx.execute(
        "UPDATE sessions SET participant = NULL, slot = NULL, contact = ? WHERE id = ?",
        (contact, session),
    )


def end(tx: Transaction, session: int, node: int | None, why: str | None) -> bool:
    """End a session (of that node, if one is given); false when there was none."""
    row = tx.execute(
        "SELECT id, node, participant FROM sessions WHERE id = ?", (session,)
    ).fetchone()
    if row is None or node not in {None, row[1]}:
        return False
    remove_sessions(tx, [row], why)
    settle(tx)
    return True


def end_on_node(tx: Transaction, path: str, session: int, why: str) -> bool:
    """End a session of a node; false when there was none."""
    return end(tx, session, find(tx, path), why)


def over_on_node(tx: Transaction, node: int) -> tuple[list[int], list[int]]:
    """Participants that are dead, and sessions that are silent, among those of a node."""
    return over_among(tx, sessions_of(tx, node))


def watch(tx: Transaction, node: int, name: str, kinds: int) -> None:
    """What this participant watches of a name from now on."""
    where = (node, name, tx.participant)
    if kinds:
        tx.execute("INSERT OR REPLACE INTO watches VALUES (?, ?, ?, ?)", (*where, kinds))
    else:
        tx.execute("DELETE FROM watches WHERE node = ? AND name = ? AND participant = ?", where)
    _count_watches(tx)


def _count_watches(tx: Transaction) -> None:
    tx.watches = tx.execute("SELECT count(*) FROM watches").fetchone()[0]
