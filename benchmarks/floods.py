"""Pings of a client that holds a lease, while other clients flood its server.

Each flood of `tests.hostile` runs over 16 connections at a time, or those of strangers over 300 and
1,500, all from the holder's address, against a server with listeners of all protocols. The figure
is the 99th percentile of the holder's pings, each a description of its mutex. The bound is 100 ms,
on an idle machine.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Measured, percentile
from tests.hostile.arena import arena
from tests.hostile.attacks import ATTACKS
from tests.hostile.target import LISTENERS

SECONDS = 5.0
_MOST = 0.1  # seconds
_FLOODS = (
    "native-pings",
    "native-renewals",
    "native-acquires",
    "dflockd-pings",
    "dflockd-nonsense",
    "http2-settings",
    "http2-pings",
    "http2-window-updates",
    "http2-empty-data",
    "http2-rapid-resets",
    "http2-continuations",
    "http2-header-lists",
    "http2-calls",
    "http2-small-messages",
    "http2-settings-tls",
    "tiny-records-tls",
    "handshakes-tls",
    *(f"strangers-{each}-{count}" for each in LISTENERS for count in (300, 1500)),
)


async def _measure(name: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        async with arena(ATTACKS[name], Path(folder)) as beside:
            await beside.hold(SECONDS)
            grown, took = beside.grown, beside.attackers_seconds
    p99 = percentile(beside.pings, 0.99)
    return Measured(
        f"p99 of a holder's pings during {name}",
        1000 * p99,
        "ms",
        "the bound",
        1000 * _MOST,
        p99 / _MOST,
        at_most=1.0,
        notes={
            "p50": 1000 * percentile(beside.pings, 0.5),
            "longest": 1000 * max(beside.pings),
            "MiB grown": grown,
            "seconds of the attacker": took,
        },
    )


def measure() -> Iterator[Measured]:
    """Measure all floods; those that fail are reported together, after the others.

    Raises:
        ExceptionGroup: some have failed; each error has a note with the name of its flood.
    """
    failed: list[Exception] = []
    for name in _FLOODS:
        try:
            yield asyncio.run(_measure(name))
        except Exception as error:
            error.add_note(f"during {name}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(_FLOODS)} floods failed", failed)


if __name__ == "__main__":
    for each in measure():
        notes = "  ".join(f"{name} {value:.0f}" for name, value in each.notes.items())
        print(f"{each.what}: {each.value:.0f} ms  {notes}")
