"""Requests and their queues: *the owners are the longest prefix of the queue that fits*.

Every operation reads a constant number of rows. The end of a queue shows whether there are waiters:
if the last request is an owner, all are. The index ``waiting`` has the next request, and a lasting
semaphore's row the held count. For an ephemeral one, the first row of its queue shows whether
anything is held, and whether it is the whole limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tenure.core import refusals, rules
from tenure.engines.contract import Enqueued, Place, Withdrawn
from tenure.engines.sqlite.expiry import (
    Attachment,
    Suspect,
    check_alive,
    damage,
    session_over,
    suspects_in_queue,
    why_over,
)
from tenure.engines.sqlite.schema import from_column, to_column
from tenure.engines.sqlite.transaction import ENDED, GRANTED, TIMED_OUT, Transaction
from tenure.model import EPHEMERAL_LIMIT, UNCHANGED, Unchanged

_REFUSED = Enqueued(Place.REFUSED, None)
_EPHEMERAL = to_column(EPHEMERAL_LIMIT)
_INSERT = """
INSERT INTO requests
(node, name, order_id, session, hold, count, joined_at, granted_at, deadline, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_LOOK = """
SELECT s.node, m."limit", m.held, m.whole, r.order_id, r.granted_at, r.count
FROM sessions AS s
LEFT JOIN semaphores AS m ON m.node = s.node AND m.name = ?
LEFT JOIN requests AS r ON r.node = s.node AND r.name = ? AND r.order_id = (
    SELECT order_id FROM requests WHERE node = s.node AND name = ? ORDER BY order_id DESC LIMIT 1)
WHERE s.id = ? AND s.attach_number = ?
"""

_REQUEST = """
SELECT r.node, r.name, r.order_id, r.count, r.granted_at, r.data, r.deadline
FROM requests AS r JOIN sessions AS s ON s.id = r.session
WHERE r.session = ? AND s.attach_number = ? AND r.hold = ?
"""

_NEXT = """
SELECT r.order_id, r.count, r.hold, r.deadline,
    s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness
FROM requests AS r INDEXED BY waiting JOIN sessions AS s ON s.id = r.session
WHERE r.node = ? AND r.name = ? AND r.granted_at IS NULL ORDER BY r.order_id LIMIT 1
"""

_FIRST = """
SELECT granted_at, count FROM requests WHERE node = ? AND name = ? ORDER BY order_id LIMIT 1
"""

_LEVEL = """
SELECT m."limit", m.held, m.whole, r.order_id, r.granted_at, c.node
FROM (SELECT 1)
LEFT JOIN semaphores AS m ON m.node = ? AND m.name = ?
LEFT JOIN requests AS r ON r.node = ? AND r.name = ? AND r.order_id = (
    SELECT order_id FROM requests WHERE node = ? AND name = ? ORDER BY order_id DESC LIMIT 1)
LEFT JOIN contents AS c ON c.node = ? AND c.name = ?
"""

# Operations of sessions


def enqueue(
    tx: Transaction,
    me: Attachment,
    path: str,
    request_id: int,
    name: str,
    count: int,
    data: bytes,
    timeout: float | None,
    ephemeral: bool,
) -> Enqueued:
    """Add a request at the end of the queue."""
    rules.check_name(name, path)
    row = tx.execute(_LOOK, (name, name, name, *me)).fetchone()
    if row is None:
        raise session_over(tx, me, path)
    node, limit, held, whole, last, last_granted, last_count = row
    if timeout is not None:
        rules.check_timeout(timeout, path, name)
    if data != b"":
        rules.check_data(data, path, name)
    if limit is not None:
        limit, held = from_column(limit), from_column(held)
        rules.check_kind(ephemeral, False, path, name)
    else:
        limit, held, whole = EPHEMERAL_LIMIT, 0, 0
        if last is not None:
            rules.check_kind(ephemeral, True, path, name)
            held, whole = 1, last_count == _EPHEMERAL
        elif not ephemeral:
            raise refusals.semaphore_not_found(path, name)
    rules.check_count(count, limit, path, name)
    waits = last is not None and last_granted is None
    granted = not (waits or tx.quarantined) and rules.fits(held, whole, count, limit)
    if not granted and timeout == 0:
        # A rejection is final, so it must not be caused by dead sessions and overdue waiters.
        if not tx.quarantined:
            mend(tx, [(node, name)])
        if _end_the_dead(tx, node, name) or _time_out_first(tx, node, name):
            return enqueue(tx, me, path, request_id, name, count, data, timeout, ephemeral)
        return _REFUSED
    order_id = rules.next_order_id(tx.last_order_id, tx.seen, tx.wall())
    tx.last_order_id = tx.seen = order_id
    now = tx.now
    stored = _EPHEMERAL if count == EPHEMERAL_LIMIT else to_column(count)
    tx.execute(
        _INSERT,
        (
            *(node, name, order_id, me[0], request_id, stored, now),
            now if granted else None,
            None if granted or timeout is None else now + timeout,
            data,
        ),
    )
    if not granted:
        return Enqueued(Place.WAITING, order_id)
    if row[1] is not None:
        _set_level(tx, node, name, held + count, whole=count == limit)
    if tx.watches:
        appears = row[1] is None and last is None
        tx.changed(node, name, data=appears, owners=True)
    return Enqueued(Place.GRANTED, order_id)


def withdraw(tx: Transaction, me: Attachment, path: str, request_id: int) -> Withdrawn:
    """Take a request out of its queue."""
    row = tx.execute(_REQUEST, (*me, request_id)).fetchone()
    if row is None:
        check_alive(tx, me, path)
        return Withdrawn.MISSING
    leave(tx, *row[:5])
    settle(tx)
    return Withdrawn.LEFT


def alter(
    tx: Transaction,
    me: Attachment,
    path: str,
    request_id: int,
    count: int | None,
    data: bytes | None,
    timeout: float | Unchanged | None,
) -> None:
    """Shrink a request, change its data, or its timeout, in place."""
    row = tx.execute(_REQUEST, (*me, request_id)).fetchone()
    if row is None:
        check_alive(tx, me, path)
        raise refusals.request_over(path)
    node, name, order_id, old_count, granted_at, old_data, old_deadline = row
    old = from_column(old_count)
    if data is not None:
        rules.check_data(data, path, name)
    if count is not None:
        level = tx.execute(
            'SELECT "limit" FROM semaphores WHERE node = ? AND name = ?', (node, name)
        ).fetchone()
        limit = EPHEMERAL_LIMIT if level is None else from_column(level[0])
        rules.check_shrink(count, old, limit, path, name)
    if timeout is not UNCHANGED:
        rules.check_timeout(timeout, path, name)
    owns = granted_at is not None
    new = old if count is None else count
    new_data = old_data if data is None else data
    deadline = old_deadline
    if not owns and timeout is not UNCHANGED:
        deadline = tx.now + timeout if timeout else None
    if (new, new_data, deadline) != (old, old_data, old_deadline):
        tx.execute(
            "UPDATE requests SET count = ?, data = ?, deadline = ? "
            "WHERE node = ? AND name = ? AND order_id = ?",
            (to_column(new), new_data, deadline, node, name, order_id),
        )
    if new != old:
        tx.affected[node, name] = (old - new if owns else 0, owns)
        settle(tx)
    elif owns and new_data != old_data:
        tx.changed(node, name, data=False, owners=True)
    if not owns and timeout == 0:
        _withdraw_waiter(tx, node, name, order_id)


def _withdraw_waiter(tx: Transaction, node: int, name: str, order_id: int) -> None:
    """Withdraw a waiter whose timeout was set to 0, unless it can be granted."""
    _end_the_dead(tx, node, name)  # it does not leave because of them
    row = tx.execute(
        "SELECT r.count, r.session, r.hold, s.participant "
        "FROM requests AS r JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.order_id = ? AND r.granted_at IS NULL",
        (node, name, order_id),
    ).fetchone()
    if row is not None:
        count, session, request_id, participant = row
        leave(tx, node, name, order_id, count, None)
        tx.send(participant, TIMED_OUT, session, request_id)
        settle(tx)


def time_out(tx: Transaction) -> None:
    """Remove the waiters whose deadlines have passed, earliest first.

    The deadline is in the store: every program applies it.
    """
    first = (
        "SELECT r.node, r.name, r.order_id, r.count, r.session, r.hold, s.participant "
        "FROM requests AS r INDEXED BY deadlines JOIN sessions AS s ON s.id = r.session "
        "WHERE r.deadline <= ? ORDER BY r.deadline, r.order_id LIMIT 1"
    )
    while row := tx.execute(first, (tx.now,)).fetchone():
        node, name, order_id, count, session, request_id, participant = row
        leave(tx, node, name, order_id, count, None)
        tx.send(participant, TIMED_OUT, session, request_id)
        settle(tx)


# Parts shared by the operations


def exists(tx: Transaction, node: int, name: str) -> bool:
    """Return true if a lasting or ephemeral semaphore has that name."""
    row = tx.execute(
        "SELECT EXISTS (SELECT 1 FROM semaphores WHERE node = ? AND name = ?) "
        "OR EXISTS (SELECT 1 FROM requests WHERE node = ? AND name = ?)",
        (node, name, node, name),
    ).fetchone()
    return bool(row[0])


def leave(
    tx: Transaction,
    node: int,
    name: str,
    order_id: int,
    count: int | str,
    granted_at: float | None,
) -> None:
    """Take a request out of its queue; `settle` then grants what fits."""
    tx.execute(
        "DELETE FROM requests WHERE node = ? AND name = ? AND order_id = ?", (node, name, order_id)
    )
    freed, owners_left = tx.affected.get((node, name), (0, False))
    if granted_at is not None:
        freed, owners_left = freed + from_column(count), True
    tx.affected[node, name] = (freed, owners_left)


def resize(tx: Transaction, node: int, name: str, limit: int) -> None:
    """Change the limit of a lasting semaphore, and grant what fits now."""
    where = (node, name)
    (held,) = tx.execute(
        "SELECT held FROM semaphores WHERE node = ? AND name = ?", where
    ).fetchone()
    first = tx.execute(_FIRST, where).fetchone()
    whole = first is not None and first[0] is not None and first[1] == held == limit
    tx.execute('UPDATE semaphores SET "limit" = ? WHERE node = ? AND name = ?', (limit, *where))
    _set_level(tx, node, name, from_column(held), whole=whole)
    tx.affected.setdefault(where, (0, False))
    settle(tx)


def settle(tx: Transaction) -> None:
    """Grant what fits now, in every queue that requests have left."""
    while tx.affected:
        (node, name), (freed, owners_left) = tx.affected.popitem()
        _advance(tx, node, name, freed, owners_left)


def _advance(tx: Transaction, node: int, name: str, freed: int, owners_left: bool) -> None:
    where = (node, name)
    limit, held, whole, last, last_granted, content = tx.execute(
        _LEVEL, where + where + where + where
    ).fetchone()
    lasting = limit is not None
    if lasting:
        limit, held = from_column(limit), from_column(held) - freed
        whole = bool(whole) and not owners_left
    elif last is None:
        if content is not None:
            tx.execute("DELETE FROM contents WHERE node = ? AND name = ?", where)
        tx.changed(node, name, data=True, owners=True)
        return
    else:
        first_granted, first_count = tx.execute(_FIRST, where).fetchone()
        held = int(first_granted is not None)
        limit, whole = EPHEMERAL_LIMIT, bool(held) and first_count == _EPHEMERAL
    changed = owners_left
    if last is not None and last_granted is None and not tx.quarantined:
        while (granted := _grant_next(tx, node, name, limit, held, whole)) != 0:
            held += granted
            whole = granted == limit
            changed = True
    if lasting and (changed or freed):
        _set_level(tx, node, name, held, whole=whole)
    if changed:
        tx.changed(node, name, data=False, owners=True)


def _grant_next(tx: Transaction, node: int, name: str, limit: int, held: int, whole: bool) -> int:
    """Grant the first waiter if it fits; return its count, or 0. The dead are removed."""
    while True:
        row = tx.execute(_NEXT, (node, name)).fetchone()
        if row is None:
            return 0
        order_id, stored, request_id, deadline, *suspect = row
        count = from_column(stored)
        has_passed = deadline is not None and deadline <= tx.now
        if not (has_passed or rules.fits(held, whole, count, limit)):
            return 0
        session, _, participant, *_ = suspect
        if participant != tx.participant and (why := why_over(tx, suspect)):
            remove_sessions(tx, [suspect], why)
        elif has_passed:
            leave(tx, node, name, order_id, stored, None)
            tx.send(participant, TIMED_OUT, session, request_id)
        else:
            tx.execute(
                "UPDATE requests SET granted_at = ?, deadline = NULL "
                "WHERE node = ? AND name = ? AND order_id = ?",
                (tx.now, node, name, order_id),
            )
            tx.send(participant, GRANTED, session, request_id, order_id)
            return count


def _set_level(tx: Transaction, node: int, name: str, held: int, *, whole: bool) -> None:
    tx.execute(
        "UPDATE semaphores SET held = ?, whole = ? WHERE node = ? AND name = ?",
        (to_column(held), whole, node, name),
    )


# Requests of expired sessions, and late waiters


def _end_the_dead(tx: Transaction, node: int, name: str) -> bool:
    """End the expired sessions in a queue; return true if there were any."""
    return remove_over(tx, suspects_in_queue(tx, node, name))


def _time_out_first(tx: Transaction, node: int, name: str) -> bool:
    """Withdraw all overdue waiters if the first of this queue is one; return whether it was."""
    row = tx.execute(
        "SELECT deadline FROM requests INDEXED BY waiting "
        "WHERE node = ? AND name = ? AND granted_at IS NULL ORDER BY order_id LIMIT 1",
        (node, name),
    ).fetchone()
    if row is None or row[0] is None or row[0] > tx.now:
        return False
    time_out(tx)
    return True


def mend(tx: Transaction, names: Iterable[tuple[int, str]]) -> None:
    """Add substitutes for sessions and owners of queues that were deleted by hand.

    Their programs may still consider leases held: at most for the longest recovery window after
    their loops have stopped, for which a heartbeat thread renews for twice that time. Then the
    substitutes expire.
    """
    for node, name in names:
        found = damage(tx, node, name)
        if found is None:
            continue
        missing = set(found.sessions)
        if found.held:
            tx.last_session_id += 1
            missing.add(tx.last_session_id)
            tx.execute(
                _INSERT,
                (
                    *(node, name, found.first - 1, tx.last_session_id, 0),
                    _EPHEMERAL if found.held == EPHEMERAL_LIMIT else to_column(found.held),
                    *(tx.now, tx.now, None, b""),
                ),
            )
        for session in missing:
            tx.execute(
                "INSERT INTO sessions (id, node, recovery_window, liveness, attach_number, key, "
                "contact, description) VALUES (?, ?, ?, 'process', 0, ?, ?, ?)",
                (
                    *(session, node, 3 * tx.longest_window, b"", tx.now),
                    "a holder whose records were deleted",
                ),
            )


def remove_over(tx: Transaction, suspects: Iterable[Suspect]) -> bool:
    """End the expired sessions, and grant what fits; return true if there were any."""
    over: dict[str, list[Suspect]] = {}
    for suspect in suspects:
        if why := why_over(tx, suspect):
            over.setdefault(why, []).append(suspect)
    for why, sessions in over.items():
        remove_sessions(tx, sessions, why)
    settle(tx)
    return bool(over)


def remove_sessions(tx: Transaction, sessions: Iterable[Any], why: str | None) -> None:
    """Remove sessions with all their requests; `settle` then grants what fits.

    Each of `sessions` begins with its id, its node and its participant. With `why`, the
    participant is notified.
    """
    for session, node, participant, *_ in sessions:
        for row in tx.execute(
            "SELECT node, name, order_id, count, granted_at FROM requests WHERE session = ?",
            (session,),
        ).fetchall():
            leave(tx, *row)
        tx.execute("DELETE FROM sessions WHERE id = ?", (session,))
        tx.execute("UPDATE nodes SET sessions = sessions - 1 WHERE id = ?", (node,))
        if why is not None:
            tx.send(participant, ENDED, session, why=why)
