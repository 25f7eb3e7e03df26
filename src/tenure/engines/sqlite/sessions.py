"""Participants and their sessions: how they come, leave, and are ended when they are over.

What ends with a participant depends on who ends it. A program that closes its engine takes all
that is attached with it. One that has died takes its sessions of liveness ``process``; those of
liveness ``window`` are *detached*: on their own, as of their last heartbeat.

A session that is on its own is over when its window has passed since its last contact. While
no program had the store open, none could take it over, so it gets its window and its node's grace
period from when that is opened again (`reopen`), once: a slot of `_GRACED` says that it has had
that. After a new start of the machine all of them get it, because the clock began anew. Either
only postpones an end that no transaction has made yet: a session may live longer than it was
promised, never shorter, and nothing that it holds has been granted to another session.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from tenure.core import rules
from tenure.engines.contract import Attach
from tenure.engines.sqlite import quarantine
from tenure.engines.sqlite.life import Life, started
from tenure.engines.sqlite.nodes import config_of, find, sessions_of
from tenure.engines.sqlite.over import Attachment, Suspect, is_current, over_among
from tenure.engines.sqlite.requests import remove_over, remove_sessions, settle
from tenure.engines.sqlite.takeover import AttachedRow, acknowledge, tell_of_the_gone
from tenure.engines.sqlite.transaction import Transaction
from tenure.errors import EngineError, InvalidArgument

__all__ = [
    "attach",
    "close",
    "detach",
    "end",
    "end_on_node",
    "is_reopened",
    "new_boot",
    "over_on_node",
    "reap",
    "register",
    "reopen",
    "unregister",
    "watch",
]


_GRACED = -1
"""The slot of a detached session that has had its grace period."""

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
    """Remove participants that have died, and the files of unknown participants."""
    known = {number for (number,) in tx.execute("SELECT id FROM participants").fetchall()}
    reap(tx, known, ())
    for entry in os.scandir(tx.place.folder):
        number, _, kind = entry.name.partition(".")
        if kind != "live" or not number.isdecimal() or int(number) in known:
            continue
        if tx.lives.is_dead(int(number)):
            tx.lives.remove(int(number))


def unregister(tx: Transaction, unfinished: Collection[int]) -> None:
    """Remove this participant, and end the sessions that are attached through it.

    Args:
        tx: the transaction, in this participant's turn.
        unfinished: the sessions that it was taking over; they are left detached.
    """
    assert tx.life is not None
    for session, slot in tx.execute(
        "SELECT id, slot FROM sessions WHERE participant = ?", (tx.participant,)
    ).fetchall():
        if session in unfinished:
            _detach(tx, session, tx.life.last_beat(slot))
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
        tell_of_the_gone(tx, participant)
        for statement in _REMOVE_PARTICIPANT:
            tx.execute(statement, (participant,))
    _count_watches(tx)


def _detach_from(tx: Transaction, participants: Iterable[int]) -> None:
    """Leave the sessions of the dead that outlive them on their own."""
    for participant in participants:
        for session, slot in tx.execute(
            "SELECT id, slot FROM sessions WHERE participant = ? AND liveness = 'window'",
            (participant,),
        ).fetchall():
            _detach(tx, session, tx.lives.last_beat(participant, slot, tx.now))


def _detach(tx: Transaction, session: int, contact: float) -> None:
    tx.execute(
        "UPDATE sessions SET participant = NULL, slot = NULL, contact = ? WHERE id = ?",
        (contact, session),
    )


def reap(tx: Transaction, participants: Iterable[int], sessions: Iterable[int]) -> bool:
    """End those of these that are over, all together; whether there were any."""
    dead = [each for each in participants if each != tx.participant and tx.lives.is_dead(each)]
    _detach_from(tx, dead)
    _remove_participants(tx, dead, "its process has ended")
    suspects: list[Suspect] = []
    for number in sessions:
        suspects += tx.execute(
            "SELECT s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness "
            "FROM sessions AS s WHERE s.id = ?",
            (number,),
        )
    any_over = remove_over(tx, suspects)
    tx.told.buried.update(dead)
    return bool(dead) or any_over


def new_boot(tx: Transaction, boot: str) -> None:
    """The machine was started anew, or the file was moved here: what lived with it has ended.

    What remains was not heard of on this clock, on which nothing happened before now.

    Raises:
        EngineError: a program that has another clock uses the file right now.
    """
    (last_boot,) = tx.execute("SELECT boot FROM meta").fetchone()
    if last_boot == boot:
        return
    quarantine.begin(tx)
    participants = {number for (number,) in tx.execute("SELECT id FROM participants").fetchall()}
    for participant in participants:
        if tx.lives.is_alive(participant):
            raise EngineError(
                f"{tx.place.path} is in use by a program under another kernel, or with a clock of "
                "its own (a virtual machine, a sandbox, a time namespace); only programs that "
                "share a kernel can share an SQLite file"
            )
    tx.execute(
        "UPDATE requests SET joined_at = :now, deadline = deadline - joined_at + :now, "
        "granted_at = CASE WHEN granted_at IS NULL THEN NULL ELSE :now END",
        {"now": tx.now},
    )
    tx.execute(
        "UPDATE sessions SET participant = NULL, slot = NULL, contact = 0 WHERE liveness = 'window'"
    )
    _grant_grace(tx)
    _remove_participants(tx, participants, None)
    remove_sessions(
        tx,
        tx.execute("SELECT id, node, NULL FROM sessions WHERE liveness = 'process'").fetchall(),
        None,
    )
    settle(tx)
    tx.told.buried.update(participants)
    tx.execute("UPDATE meta SET boot = ?", (boot,))
    if last_boot:
        # A power cut may have taken the end of the file, and with it ids that were given out.
        tx.last_session_id += 1_000_000


def is_reopened(tx: Transaction) -> bool:
    """Return whether no program has the store open, and sessions wait for their grace period."""
    if _living(tx):
        return False
    row = tx.execute(
        "SELECT 1 FROM sessions WHERE liveness = 'window' AND slot IS NOT ? LIMIT 1", (_GRACED,)
    ).fetchone()
    return row is not None


def _living(tx: Transaction) -> bool:
    """Return whether any participant lives, as far as that can be seen."""
    return any(
        tx.lives.is_alive(number)
        for (number,) in tx.execute("SELECT id FROM participants").fetchall()
    )


def reopen(tx: Transaction) -> None:
    """Give detached sessions time to be taken over, if no program had the store open."""
    if not _living(tx):
        reap(tx, [number for (number,) in tx.execute("SELECT id FROM participants")], ())
        _grant_grace(tx)


def _grant_grace(tx: Transaction) -> None:
    """Sessions that are on their own live for a grace period and their window from now on."""
    # One whose program died while it closed it has no contact (-infinity), and is over.
    for (node,) in tx.execute(
        "SELECT DISTINCT node FROM sessions "
        "WHERE participant IS NULL AND slot IS NULL AND liveness = 'window'"
    ).fetchall():
        tx.execute(
            "UPDATE sessions SET contact = ?, slot = ? WHERE node = ? AND participant IS NULL "
            "AND slot IS NULL AND liveness = 'window' AND contact >= 0",
            (tx.now + rules.grace_period(config_of(tx, node)), _GRACED, node),
        )


# Sessions


def attach(tx: Transaction, how: Attach, slot: int) -> AttachedRow:
    """A new session of this participant."""
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


def detach(tx: Transaction, me: Attachment, contact: float) -> bool:
    """Leave a session on its own, unless another attachment has it; true, as for `acknowledge`."""
    if not is_current(tx, me):
        return acknowledge(tx, me)
    _detach(tx, me[0], contact)
    return True


def close(tx: Transaction, me: Attachment) -> bool:
    """End a session, unless another attachment has it; true, as for `acknowledge`."""
    return end(tx, me[0], None, None) if is_current(tx, me) else acknowledge(tx, me)


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


def over_on_node(
    tx: Transaction, node: int, after: int = 0, most: int = -1
) -> tuple[list[int], list[int]]:
    """Participants that are dead, and sessions that are silent, among those of `sessions_of`."""
    return over_among(tx, sessions_of(tx, node, after, most))


def watch(tx: Transaction, node: int, name: str, kinds: int) -> None:
    """Set which kinds of changes this participant watches of a name; 0 ends the watch."""
    where = (node, name, tx.participant)
    if kinds:
        tx.execute("INSERT OR REPLACE INTO watches VALUES (?, ?, ?, ?)", (*where, kinds))
    else:
        tx.execute("DELETE FROM watches WHERE node = ? AND name = ? AND participant = ?", where)
    _count_watches(tx)


def _count_watches(tx: Transaction) -> None:
    tx.watches = tx.execute("SELECT count(*) FROM watches").fetchone()[0]
