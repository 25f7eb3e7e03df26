"""Picture of the holders over time: a row for each process, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tenure.cli.demo.history import DemoHold

Cell = Literal["held", "waiting", "killed", "idle"]
IDLE: Cell = "idle"


@dataclass(frozen=True, slots=True)
class Row:
    """One process: a cell for each slice of time."""

    who: str
    cells: list[Cell]


def timeline(holds: Sequence[DemoHold], width: int) -> list[Row]:
    """Return the rows, in the order in which the processes first held; each `width` cells long."""
    if not holds:
        return []
    start = min(each.requested for each in holds)
    finite = [each.ended for each in holds if each.ended != float("inf")]
    end = max([*finite, *(each.granted for each in holds)])
    scale = width / max(end - start, 1e-9)
    rows = {each.who: Row(each.who, [IDLE] * width) for each in holds}
    for each in holds:
        cells = rows[each.who].cells
        first, granted, last = (
            min(int((at - start) * scale), width - 1)
            for at in (each.requested, each.granted, min(each.ended, end))
        )
        for at in range(first, granted):
            if cells[at] == "idle":
                cells[at] = "waiting"
        last = max(last, granted + 1)
        cells[granted:last] = ["held"] * (last - granted)
        if each.killed:
            cells[last - 1] = "killed"
    return list(rows.values())
