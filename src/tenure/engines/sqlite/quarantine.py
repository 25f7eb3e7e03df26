"""The quarantine of a restored store: the time for which it grants nothing.

A backup does not know what was granted after it was taken. The holders of those leases consider
them held until their windows have passed since their last proof. A restored store therefore grants
nothing until the longest of these windows has passed, counted from its first opening: no program
had the former store open when it was restored (`restore`), so that every proof is older than that.

The clock of the store is that of one boot of the machine. ``meta.quarantine`` therefore keeps the
whole time until the quarantine has ended. It begins anew with each new boot, which is too long, and
never too short.
"""

from __future__ import annotations

from tenure.engines.sqlite.requests import settle
from tenure.engines.sqlite.transaction import Transaction

__all__ = ["begin", "describe", "end"]


def begin(tx: Transaction) -> None:
    """Begin the quarantine on the clock of this boot, if the store owes one."""
    (seconds,) = tx.execute("SELECT quarantine FROM meta").fetchone()
    tx.quarantined_until = tx.now + seconds if seconds else 0.0
    tx.quarantined = seconds > 0


def end(tx: Transaction) -> None:
    """Grant what the quarantine held up, once it is over."""
    if tx.quarantined or not tx.quarantined_until:
        return
    tx.quarantined_until = 0.0
    tx.execute("UPDATE meta SET quarantine = 0")
    for name in tx.execute(
        "SELECT DISTINCT node, name FROM requests INDEXED BY waiting WHERE granted_at IS NULL"
    ).fetchall():
        tx.affected.setdefault(name, (0, False))
    settle(tx)


def describe(path: str, left: float) -> str:
    """Say how long nothing is granted yet, and why."""
    return (
        f"nothing is granted in {path} for another {left:.1f} s: it was restored from a backup, "
        "and holders of leases granted after the backup may still consider them held"
    )
