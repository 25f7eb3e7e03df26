"""Rates: a row for each that has tokens in its window."""

from __future__ import annotations

from tenure.core import rules
from tenure.core.rates import EXPIRED_AT_ONCE, MICROSECONDS, RateState, decide, decode, encode
from tenure.engines.contract import RateAnswer, RateCall
from tenure.engines.sqlite.nodes import find
from tenure.engines.sqlite.transaction import Transaction
from tenure.errors import EngineError


def carry_out(tx: Transaction, path: str, name: str, call: RateCall) -> RateAnswer:
    """Carry out an operation on a rate. A new rate removes some that are over."""
    rules.check_name(name, path)
    node, now = find(tx, path), int(tx.now * MICROSECONDS)
    before = _read(tx, node, name)
    state, answer = decide(before, call, now)
    if state is None:
        tx.execute("DELETE FROM rates WHERE node = ? AND name = ?", (node, name))
    elif state is not before:
        tx.execute(
            "INSERT OR REPLACE INTO rates (node, name, seen, expires, state) "
            "VALUES (?, ?, ?, ?, ?)",
            (node, name, state.seen, state.expires, encode(state)),
        )
        if before is None:
            tx.execute(
                "DELETE FROM rates WHERE (node, name) IN "
                "(SELECT node, name FROM rates WHERE expires <= ? LIMIT ?)",
                (now, EXPIRED_AT_ONCE),
            )
    return answer


def _read(tx: Transaction, node: int, name: str) -> RateState | None:
    row = tx.execute("SELECT state FROM rates WHERE node = ? AND name = ?", (node, name)).fetchone()
    if row is None:
        return None
    try:
        return decode(row[0])
    except ValueError as error:
        raise EngineError(
            f"the store is damaged: {error}. Stop all programs that use it, then restore it from a "
            "backup",
            name=name,
        ) from error


def restart_clock(tx: Transaction) -> None:
    """Move the ends of the windows to the clock of a new boot, as `decide` moves the rest."""
    now = int(tx.now * MICROSECONDS)
    tx.execute(
        "UPDATE rates SET expires = expires - seen + ?, seen = ? WHERE seen > ?", (now, now, now)
    )
