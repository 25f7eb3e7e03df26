"""Participants: how they join and leave a store, and the effects of a reboot or a restore.

The effect on its sessions depends on the cause of a participant's end:

* A program that closes its engine ends all sessions attached through it.
* A program that dies ends its sessions of liveness ``process``. Those of liveness ``window`` are
  detached, as of their last heartbeat.

A detached session expires when its window has passed since its last contact. While no program has
the store open, no program can take over the session. So the first program that opens the store
again (`reopen`) grants it the node's grace period and its window, once, as recorded by the slot
`_GRACED`. After a reboot all of them get it, because the clock started again. Both only postpone an
end that no transaction has made yet: a session may live longer than promised, never shorter, and
nothing that it holds has been granted to another session.

A *quarantine* is the time for which a restored store grants nothing. A backup does not contain the
leases granted after it was taken. Their holders consider them held until their windows have passed
since their last proof. So a restored store grants nothing until the longest of these windows has
passed, counted from its first opening: no program had the former store open when it was restored
(`restore`), so every proof is older than that. Until the quarantine has ended, ``meta.quarantine``
contains its whole duration, which starts again with each boot.

In portable mode no participant is found dead: its sessions end when they are silent, and it is
removed when it was left behind (see the package). Only a *silent* session may be detached by
another program, which can never be renewed again by its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable

from tenure.core import rules
from tenure.engines.sqlite import rates
from tenure.engines.sqlite.expiry import Suspect, is_silent, last_contact
from tenure.engines.sqlite.liveness import LivenessFile, started
from tenure.engines.sqlite.nodes import config_of
from tenure.engines.sqlite.requests import remove_over, remove_sessions, settle
from tenure.engines.sqlite.sessions import acknowledge_for, detach_at
from tenure.engines.sqlite.transaction import ENDED, Transaction
from tenure.errors import EngineError

_GRACED = -1
"""Slot of a detached session that has had its grace period."""

_ROOM = 1.0
"""Seconds by which a reading of the clock may be later than a later one."""

_REMOVE_PARTICIPANT = (
    "DELETE FROM watches WHERE participant = ?",
    "DELETE FROM news WHERE participant = ?",
    "DELETE FROM participants WHERE id = ?",
)


def _participants(tx: Transaction) -> set[int]:
    return {number for (number,) in tx.execute("SELECT id FROM participants").fetchall()}


def register(tx: Transaction, mark_files: Callable[[], None]) -> tuple[int, LivenessFile]:
    """Add a participant with its liveness file, after removing the remains of dead ones.

    Args:
        tx: the transaction.
        mark_files: marks the files as in use, or raises.
    """
    mark_files()
    _sweep(tx)
    pid = os.getpid()
    while True:
        number = tx.execute(
            "INSERT INTO participants (pid, started) VALUES (?, ?)", (pid, started(pid))
        ).lastrowid
        assert number is not None
        try:
            path, mode = tx.lives.path(number), tx.place.current_mode
            life = LivenessFile(path, mode, portable=tx.place.portable)
            life.show_presence(tx.now)
            return number, life
        except FileExistsError:  # of a database that was here before this one
            tx.execute("DELETE FROM participants WHERE id = ?", (number,))


def _sweep(tx: Transaction) -> None:
    """Remove participants that have died, and the files of unknown participants."""
    known = _participants(tx)
    reap(tx, known, ())
    if tx.place.portable:
        _sweep_absent(tx, known)
    for entry in os.scandir(tx.place.folder):
        number, _, kind = entry.name.partition(".")
        if kind != "live" or not number.isdecimal() or int(number) in known:
            continue
        if tx.lives.is_unlocked(int(number)):
            tx.lives.remove(int(number))


def _sweep_absent(tx: Transaction, participants: Iterable[int]) -> None:
    """End the silent sessions of absent participants, and remove those that were left behind."""
    for participant in participants:
        if participant == tx.participant or tx.lives.is_alive(participant):
            continue
        of_it = ("SELECT id FROM sessions WHERE participant = ?", (participant,))
        reap(tx, (), [session for (session,) in tx.execute(*of_it).fetchall()])
        if tx.execute(*of_it).fetchone() is None and tx.lives.is_left_behind(participant):
            _remove(tx, [participant], None)
            tx.messages.removed.add(participant)


def unregister(tx: Transaction, unfinished: Collection[int]) -> None:
    """Remove this participant, and end the sessions attached through it.

    Args:
        tx: the transaction, in this participant's turn.
        unfinished: the sessions that it was taking over; they are left detached.
    """
    assert tx.life is not None
    for session, slot in tx.execute(
        "SELECT id, slot FROM sessions WHERE participant = ?", (tx.participant,)
    ).fetchall():
        if session in unfinished:
            detach_at(tx, session, tx.life.last_beat(slot))
    _remove(tx, [tx.participant], None)
    settle(tx)


def _remove(tx: Transaction, participants: Iterable[int], why: str | None) -> None:
    """Remove participants with their sessions, watches and events."""
    for participant in participants:
        remove_sessions(
            tx,
            tx.execute(
                "SELECT id, node, participant FROM sessions WHERE participant = ?", (participant,)
            ).fetchall(),
            why,
        )
        acknowledge_for(tx, participant)
        for statement in _REMOVE_PARTICIPANT:
            tx.execute(statement, (participant,))
    tx.count_watches()


def reap(tx: Transaction, participants: Iterable[int], sessions: Iterable[int]) -> bool:
    """End the expired ones of these sessions together; return true if there were any."""
    dead = [each for each in participants if each != tx.participant and tx.lives.is_dead(each)]
    for participant in dead:
        for session, slot in tx.execute(
            "SELECT id, slot FROM sessions WHERE participant = ? AND liveness = 'window'",
            (participant,),
        ).fetchall():
            detach_at(tx, session, tx.lives.last_beat(participant, slot))
    _remove(tx, dead, "its process has ended")
    suspects: list[Suspect] = []
    for number in sessions:
        suspects += tx.execute(
            "SELECT s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness "
            "FROM sessions AS s WHERE s.id = ?",
            (number,),
        )
    any_ended = remove_over(tx, suspects)
    tx.messages.removed.update(dead)
    return bool(dead) or any_ended


# A reboot, and the first opening after a pause


def new_boot(tx: Transaction, boot: str) -> None:
    """End what has not survived a reboot, or a move of the file to another machine.

    The clock has started again: the other sessions count as last contacted at its start.

    Raises:
        EngineError: a program with another clock currently uses the file.
    """
    (last_boot,) = tx.execute("SELECT boot FROM meta").fetchone()
    if last_boot == boot and not was_restarted(tx):
        return
    portable = tx.place.portable
    if portable and last_boot not in {"", boot}:
        raise EngineError(
            f"{tx.place.path} is used with another clock ({last_boot}) than this program's "
            f"({boot}): use the same Python and system for all programs of a store. To move it, "
            "end all programs that use it, then 'tenure backup' and 'tenure restore'"
        )
    (seconds,) = tx.execute("SELECT quarantine FROM meta").fetchone()
    tx.quarantined_until = tx.now + seconds if seconds else 0.0
    tx.quarantined = seconds > 0
    participants = _participants(tx)
    if not portable and any(map(tx.lives.is_alive, participants)):
        raise EngineError(
            f"{tx.place.path} is in use by a program under another kernel, or with a clock of its "
            "own (a virtual machine, a sandbox, a time namespace). Only programs that share a "
            "kernel can share an SQLite file"
        )
    tx.execute(
        "UPDATE requests SET joined_at = :now, deadline = deadline - joined_at + :now, "
        "granted_at = CASE WHEN granted_at IS NULL THEN NULL ELSE :now END",
        {"now": tx.now},
    )
    tx.execute(
        "UPDATE sessions SET participant = NULL, slot = NULL, contact = 0 WHERE liveness = 'window'"
    )
    rates.restart_clock(tx)
    _grant_grace(tx)
    _remove(tx, participants, None)
    remove_sessions(
        tx,
        tx.execute("SELECT id, node, NULL FROM sessions WHERE liveness = 'process'").fetchall(),
        None,
    )
    settle(tx)
    tx.messages.removed.update(participants)
    tx.execute("UPDATE meta SET boot = ?", (boot,))
    if last_boot:
        # A power cut may have lost the end of the file, with ids that were assigned.
        tx.last_session_id += 1_000_000


def was_restarted(tx: Transaction) -> bool:
    """Return true if the machine was restarted since the store was used, in portable mode.

    A reading of the clock in the store is then later than the clock. While the machine runs, none
    can be, because the clock is read after them here. Some room is left for clocks of several
    processors that are not quite equal.
    """
    if not tx.place.portable:
        return False
    (contact,) = tx.execute(
        "SELECT max(CASE WHEN slot = ? THEN contact - ? ELSE contact END) FROM sessions",
        (_GRACED, rules.MAX_WINDOW),
    ).fetchone()
    latest = max(map(tx.lives.presence, _participants(tx)), default=0.0)
    return max(contact or 0.0, latest) > tx.clock() + _ROOM


def is_reopened(tx: Transaction) -> bool:
    """Return true if no program has the store open, and sessions wait for their grace period."""
    if any(map(tx.lives.is_alive, _participants(tx))):
        return False
    row = tx.execute(
        "SELECT 1 FROM sessions WHERE liveness = 'window' AND slot IS NOT ? LIMIT 1", (_GRACED,)
    ).fetchone()
    return row is not None


def reopen(tx: Transaction) -> None:
    """Give detached sessions time to be taken over, if no program had the store open."""
    participants = _participants(tx)
    if not any(map(tx.lives.is_alive, participants)):
        reap(tx, participants, ())
        if tx.place.portable:
            _detach_silent(tx)
        _grant_grace(tx)


def _detach_silent(tx: Transaction) -> None:
    """Detach the silent sessions of liveness ``window``, whose programs are dead or have lost them.

    No program considers a silent session its own, even if it continues later. One that is not
    silent yet stays with its participant.
    """
    for suspect in tx.execute(
        "SELECT s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness "
        "FROM sessions AS s WHERE s.liveness = 'window' AND s.participant IS NOT NULL"
    ).fetchall():
        session, _, participant, slot, *_ = suspect
        if is_silent(tx, suspect):
            detach_at(tx, session, last_contact(tx, participant, slot, 0.0))
            tx.send(participant, ENDED, session, why="it was silent for its recovery window")


def _grant_grace(tx: Transaction) -> None:
    """Extend detached sessions by a grace period and their window from now."""
    # One whose program died while it closed it has no contact (-infinity), and has expired.
    most = rules.MAX_WINDOW if tx.place.portable else math.inf  # see `was_restarted`
    for (node,) in tx.execute(
        "SELECT DISTINCT node FROM sessions "
        "WHERE participant IS NULL AND slot IS NULL AND liveness = 'window'"
    ).fetchall():
        tx.execute(
            "UPDATE sessions SET contact = ?, slot = ? WHERE node = ? AND participant IS NULL "
            "AND slot IS NULL AND liveness = 'window' AND contact >= 0",
            (tx.now + min(rules.grace_period(config_of(tx, node)), most), _GRACED, node),
        )


# The quarantine


def end_quarantine(tx: Transaction) -> None:
    """Grant the requests delayed by the quarantine, once it has ended."""
    if tx.quarantined or not tx.quarantined_until:
        return
    tx.quarantined_until = 0.0
    tx.execute("UPDATE meta SET quarantine = 0")
    for name in tx.execute(
        "SELECT DISTINCT node, name FROM requests INDEXED BY waiting WHERE granted_at IS NULL"
    ).fetchall():
        tx.affected.setdefault(name, (0, False))
    settle(tx)


def describe_quarantine(path: str, left: float) -> str:
    """Return for how long nothing is granted yet, and the reason."""
    return (
        f"nothing is granted in {path} for another {left:.1f} s: it was restored from a backup, "
        "and holders of leases granted after the backup may still consider them held"
    )
