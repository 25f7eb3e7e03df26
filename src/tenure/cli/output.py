"""Output: tables for a terminal, plain lines for a pipe, JSON for a script.

Text from a store is always escaped (`safe`) for a terminal: other programs may have written control
sequences, which move the cursor or overwrite lines.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

DATA_WIDTH = 60
GAP = 2
_SHORTEST_TOKEN = 4
NARROWEST = 10
"""Number of characters that a shortened column must keep to be readable."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        right: whether it is aligned to the right.
        text: whether it may be shortened.
        keep: whether it is never omitted.
    """

    title: str
    style: str = ""
    right: bool = False
    text: bool = False
    keep: bool = False


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

    Optional columns are omitted from the right; texts are shortened.
    """
    widths = {
        at: min(width, max(NARROWEST, len(column.title))) if column.text else width
        for at, (column, width) in enumerate(zip(columns, natural, strict=True))
    }

    def spare() -> int:
        return room - sum(widths.values()) - GAP * (len(widths) - 1)

    for at in reversed(range(len(columns))):
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


def safe(text: str) -> str:
    """Text in which all characters that are not plainly visible are escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in named:
        return named[character]
    code = ord(character)
    if unicodedata.category(character) == "Cs":  # an undecodable byte, as a surrogate escape
        return f"\\x{code & 0xFF:02x}"
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )


def shown_data(data: bytes, width: int = DATA_WIDTH) -> str:
    """Return data as text if possible, shortened to the width."""
    text = safe(data[: 4 * width].decode("utf-8", errors="surrogateescape"))
    if len(text) <= width and len(data) <= 4 * width:
        return text
    return f"{text[:width]}… ({len(data):,} bytes)"


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


def data_json(data: bytes) -> dict[str, str | None]:
    """Return data for JSON: as text where it is valid UTF-8, else as base64."""
    try:
        return {"data": data.decode(), "data_base64": None}
    except UnicodeDecodeError:
        return {"data": None, "data_base64": base64.b64encode(data).decode()}


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units; empty when unknown."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
