"""Output: tables for a terminal, plain lines for a pipe, JSON for a script.

Text from a store is always escaped (`safe`) for a terminal: other programs may have written control
sequences, which move the cursor or overwrite lines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from tenure.shown import data_json, duration, safe, shown_data

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "GAP",
    "Column",
    "data_json",
    "duration",
    "fitted",
    "is_terminal",
    "print_json",
    "print_json_line",
    "safe",
    "say",
    "shortened",
    "shown_data",
    "table",
    "terminal",
]

GAP = 2
_SHORTEST_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        right: whether it is aligned to the right.
        text: whether it may be shortened.
        keep: whether it is never omitted.
        rank: columns of a higher rank are omitted before others.
        least: number of characters that it must keep to be readable when it is shortened.
    """

    title: str
    style: str = ""
    right: bool = False
    text: bool = False
    keep: bool = False
    rank: int = 0
    least: int = 10


def is_terminal() -> bool:
    """Return whether the standard output is a terminal other than a dumb one."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@cache
def terminal() -> Console:
    """Return the terminal; only if `is_terminal` is true."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def say(text: str = "", style: str = "") -> None:
    """Print a line."""
    if is_terminal():
        terminal().print(text, style=style or None)
    else:
        click.echo(text)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: on a terminal fitted to its width, else plain, with whole columns."""
    if is_terminal():
        _drawn_table(columns, rows)
        return
    lines = [[column.title.upper() for column in columns], *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for column, cell, width in zip(columns, line, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _drawn_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    natural = [
        max(map(cell_len, [column.title, *(row[at] for row in rows)]))
        for at, column in enumerate(columns)
    ]
    widths = fitted(columns, natural, terminal().width)
    drawn = Table(
        box=box.SIMPLE_HEAD,
        header_style="bold",
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for at, width in widths.items():
        drawn.add_column(
            columns[at].title,
            style=columns[at].style,
            justify="right" if columns[at].right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=width,
        )
    for row in rows:
        drawn.add_row(*(row[at] for at in widths))
    terminal().print(drawn)


def fitted(columns: Sequence[Column], natural: Sequence[int], room: int) -> dict[int, int]:
    """Return the columns that fit, and the width of each.

    Optional columns are omitted, by rank and from the right; texts are shortened.
    """
    widths = {
        at: min(width, max(column.least, len(column.title))) if column.text else width
        for at, (column, width) in enumerate(zip(columns, natural, strict=True))
    }

    def spare() -> int:
        return room - sum(widths.values()) - GAP * (len(widths) - 1)

    for at in sorted(widths, key=lambda at: (columns[at].rank, at), reverse=True):
        if spare() < 0 and not columns[at].keep:
            del widths[at]
    for at, width in widths.items():
        widths[at] = width + max(0, min(spare(), natural[at] - width))
    return widths


def print_json(value: Any) -> None:
    """JSON for scripts: one value."""
    click.echo(json.dumps(value, indent=2))


def print_json_line(value: Any) -> None:
    """JSON for scripts: one line of many."""
    click.echo(json.dumps(value))


def shortened(numbers: Sequence[int]) -> tuple[str, list[str]]:
    """Return fencing tokens without their common leading digits, and these digits.

    The rest still shows which token is greater. Tokens of different lengths are not shortened.
    """
    whole = [str(number) for number in numbers]
    least, greatest = str(min(numbers, default=0)), str(max(numbers, default=0))
    same = 0
    while same < len(least) - _SHORTEST_TOKEN and least[same] == greatest[same]:
        same += 1
    if same < _SHORTEST_TOKEN or len(least) != len(greatest):
        return "", whole
    return least[:same], [f"…{each[same:]}" for each in whole]
