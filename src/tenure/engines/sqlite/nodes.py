"""Nodes, and the lasting semaphores on them."""

from __future__ import annotations

from tenure.core import refusals, rules
from tenure.engines.sqlite.expiry import Attachment, Suspect, check_alive, is_attached
from tenure.engines.sqlite.requests import exists, leave, remove_sessions, resize, settle
from tenure.engines.sqlite.schema import from_column, to_column
from tenure.engines.sqlite.transaction import DELETED, EVICTED, RESIZED, Transaction
from tenure.model import DEFAULT_NODE, NodeConfig

_EMPTY_NODE = (
    "DELETE FROM semaphores WHERE node = ?",
    "DELETE FROM contents WHERE node = ?",
    "DELETE FROM watches WHERE node = ?",
    "DELETE FROM rates WHERE node = ?",
)
_DELETE_SEMAPHORE = (
    "DELETE FROM requests WHERE node = ? AND name = ?",
    "DELETE FROM semaphores WHERE node = ? AND name = ?",
    "DELETE FROM contents WHERE node = ? AND name = ?",
)

_DEFAULT = 1
"""Id of the default node."""


def _columns(config: NodeConfig) -> tuple[float, float, str, str, str]:
    return (
        config.self_check_period,
        config.session_grace_period,
        config.read_consistency,
        config.attach_consistency,
        config.rate_limiter_counters_mode,
    )


def find(tx: Transaction, path: str) -> int:
    """Return the number of a node.

    Raises:
        NodeNotFound: there is no such node.
    """
    rules.check_path(path)
    row: tuple[int] | None = tx.execute("SELECT id FROM nodes WHERE path = ?", (path,)).fetchone()
    if row is None:
        raise refusals.node_not_found(path)
    return row[0]


def sessions_of(tx: Transaction, node: int, after: int = 0, most: int = -1) -> list[Suspect]:
    """Return at most `most` sessions of a node with ids above `after`; all for -1."""
    return tx.execute(
        "SELECT s.id, s.node, s.participant, s.slot, s.recovery_window, s.contact, s.liveness "
        "FROM sessions AS s WHERE s.node = ? AND s.id > ? ORDER BY s.id LIMIT ?",
        (node, after, most),
    ).fetchall()


def config_of(tx: Transaction, node: int) -> NodeConfig:
    """Return a node's configuration."""
    row = tx.execute(
        "SELECT self_check_period, session_grace_period, read_consistency, attach_consistency, "
        "rate_limiter_counters_mode FROM nodes WHERE id = ?",
        (node,),
    ).fetchone()
    return NodeConfig(*row)


def create_node(tx: Transaction, path: str, config: NodeConfig, exist_ok: bool) -> None:
    """Create a node; an existing one is not changed."""
    rules.check_path(path)
    if path == DEFAULT_NODE and is_default_missing(tx):
        restore_default(tx)  # it has an id of its own, which its sessions know
    if tx.execute("SELECT 1 FROM nodes WHERE path = ?", (path,)).fetchone() is not None:
        if not exist_ok:
            raise refusals.node_exists(path)
        return
    tx.execute(
        "INSERT INTO nodes (path, self_check_period, session_grace_period, read_consistency, "
        "attach_consistency, rate_limiter_counters_mode, sessions) VALUES (?, ?, ?, ?, ?, ?, 0)",
        (path, *_columns(config)),
    )


def restore_default(tx: Transaction) -> None:
    """Create the default node again, which was deleted by hand, with what is on it."""
    tx.execute(
        "INSERT OR IGNORE INTO nodes VALUES (?, ?, 0, 0, 'unset', 'unset', 'unset', 0)",
        (_DEFAULT, DEFAULT_NODE),
    )


def is_default_missing(tx: Transaction) -> bool:
    """Return true if the default node was deleted by hand."""
    return tx.execute("SELECT 1 FROM nodes WHERE id = ?", (_DEFAULT,)).fetchone() is None


def alter_node(tx: Transaction, path: str, config: NodeConfig) -> None:
    """Change the fields that are set in a configuration."""
    node = find(tx, path)
    merged = rules.merge_config(config_of(tx, node), config)
    tx.execute(
        "UPDATE nodes SET self_check_period = ?, session_grace_period = ?, read_consistency = ?, "
        "attach_consistency = ?, rate_limiter_counters_mode = ? WHERE id = ?",
        (*_columns(merged), node),
    )


def drop_node(tx: Transaction, path: str, force: bool) -> None:
    """Drop a node with everything on it."""
    rules.check_path(path)
    rules.check_droppable(path)
    node = find(tx, path)
    sessions = sessions_of(tx, node)
    attached = sum(is_attached(tx, each) for each in sessions)
    if attached and not force:
        raise refusals.node_busy(path, attached)
    remove_sessions(tx, sessions, f"the node {path} was dropped")
    settle(tx)
    for statement in _EMPTY_NODE:
        tx.execute(statement, (node,))
    tx.count_watches()
    tx.execute("DELETE FROM nodes WHERE id = ?", (node,))


def evict(tx: Transaction, path: str, name: str, order_id: int) -> bool:
    """Take one request out of its queue; return false if it is in none."""
    rules.check_name(name, path)
    node = find(tx, path)
    row = tx.execute(
        "SELECT r.session, r.hold, s.participant, r.count, r.granted_at FROM requests AS r "
        "JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.order_id = ?",
        (node, name, order_id),
    ).fetchone()
    if row is None:
        if not exists(tx, node, name):
            raise refusals.semaphore_not_found(path, name)
        return False
    session, request_id, participant, count, granted_at = row
    leave(tx, node, name, order_id, count, granted_at)
    tx.send(participant, EVICTED, session, request_id)
    settle(tx)
    return True


# Lasting semaphores


def create_semaphore(
    tx: Transaction,
    me: Attachment,
    node: int,
    path: str,
    name: str,
    limit: int,
    data: bytes,
    exist_ok: bool,
) -> None:
    """Create a lasting semaphore."""
    check_alive(tx, me, path)
    rules.check_name(name, path)
    rules.check_limit(limit, path, name)
    rules.check_data(data, path, name)
    row = tx.execute(
        'SELECT "limit" FROM semaphores WHERE node = ? AND name = ?', (node, name)
    ).fetchone()
    if row is not None:
        found = from_column(row[0])
        if exist_ok and found == limit:
            return
        raise refusals.semaphore_exists(path, name, found)
    rules.check_kind(False, exists(tx, node, name), path, name)
    if _count(tx, node) >= rules.SEMAPHORES_PER_NODE:
        raise refusals.semaphores_full(path, name)
    tx.execute("INSERT INTO semaphores VALUES (?, ?, ?, 0, 0)", (node, name, to_column(limit)))
    _set_data(tx, node, name, data)
    tx.changed(node, name, data=True, owners=True)


def _count(tx: Transaction, node: int) -> int:
    row: tuple[int] = tx.execute(
        "SELECT count(*) FROM semaphores WHERE node = ?", (node,)
    ).fetchone()
    return row[0]


def _set_data(tx: Transaction, node: int, name: str, data: bytes) -> None:
    if data:
        tx.execute("INSERT OR REPLACE INTO contents VALUES (?, ?, ?)", (node, name, data))
    else:
        tx.execute("DELETE FROM contents WHERE node = ? AND name = ?", (node, name))


def update_semaphore(
    tx: Transaction, me: Attachment, node: int, path: str, name: str, data: bytes
) -> None:
    """Replace a semaphore's data; equal bytes change nothing."""
    check_alive(tx, me, path)
    rules.check_name(name, path)
    rules.check_data(data, path, name)
    if not exists(tx, node, name):
        raise refusals.semaphore_not_found(path, name)
    row = tx.execute(
        "SELECT data FROM contents WHERE node = ? AND name = ?", (node, name)
    ).fetchone()
    if data != (b"" if row is None else row[0]):
        _set_data(tx, node, name, data)
        tx.changed(node, name, data=True, owners=False)


def resize_semaphore(
    tx: Transaction, me: Attachment, node: int, path: str, name: str, limit: int
) -> None:
    """Change the limit of a semaphore; waiters whose counts are above it leave the queue."""
    check_alive(tx, me, path)
    rules.check_name(name, path)
    rules.check_new_limit(limit, path, name)
    row = tx.execute(
        'SELECT "limit" FROM semaphores WHERE node = ? AND name = ?', (node, name)
    ).fetchone()
    if row is None:
        rules.check_kind(False, exists(tx, node, name), path, name)
        raise refusals.semaphore_not_found(path, name)
    found = from_column(row[0])
    rules.check_resizable(found, path, name, ephemeral=False)
    if found == limit:
        return
    too_large = tx.execute(
        "SELECT r.session, r.hold, s.participant, r.order_id, r.count FROM requests AS r "
        "JOIN sessions AS s ON s.id = r.session "
        "WHERE r.node = ? AND r.name = ? AND r.granted_at IS NULL AND r.count > ?",
        (node, name, limit),
    ).fetchall()
    for session, request_id, participant, order_id, count in too_large:
        leave(tx, node, name, order_id, count, None)
        tx.send(participant, RESIZED, session, request_id, limit)
    resize(tx, node, name, limit)
    tx.changed(node, name, data=True, owners=False)


def delete_semaphore(
    tx: Transaction, me: Attachment, node: int, path: str, name: str, force: bool
) -> None:
    """Delete a semaphore; by force with everything in its queue."""
    check_alive(tx, me, path)
    rules.check_name(name, path)
    if not exists(tx, node, name):
        raise refusals.semaphore_not_found(path, name)
    requests = tx.execute(
        "SELECT r.session, r.hold, s.participant FROM requests AS r "
        "JOIN sessions AS s ON s.id = r.session WHERE r.node = ? AND r.name = ?",
        (node, name),
    ).fetchall()
    if requests and not force:
        raise refusals.semaphore_busy(path, name)
    for session_id, request_id, participant in requests:
        tx.send(participant, DELETED, session_id, request_id)
    for statement in _DELETE_SEMAPHORE:
        tx.execute(statement, (node, name))
    tx.changed(node, name, data=True, owners=True)
