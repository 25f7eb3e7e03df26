"""The lines of the screen: a pure function of the snapshot and the view.

Only visible lines are made, so the cost does not depend on the size of the store. All text of the
store is escaped here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

import tenure
from tenure.cli.look import count, held, kind, owner, program, remark
from tenure.cli.output import GAP, Column, duration, fitted, safe, shortened, shown_data
from tenure.cli.top.snapshot import Row, Snapshot
from tenure.cli.top.view import View, chosen

KEYS = "q quit  ↑↓ select  Enter look inside  s sort  r reverse  n node"
KEYS_INSIDE = "q quit  ↑↓ scroll  Esc back"
HEAD, FOOT = 3, 1
"""Lines above the rows (two of summary, one of titles) and below them."""

NAME = Column("Name", style="bold", text=True, keep=True)
COLUMNS = (
    NAME,
    Column("Node", text=True),
    Column("Kind"),
    Column("Held", style="green", keep=True),
    Column("Waiting", style="yellow", right=True, keep=True),
    Column("New/s", right=True),
    Column("Since", right=True),
    Column("Owner", text=True),
    Column("Host", text=True),
    Column("Data", style="cyan", text=True),
)
NODE = 1
REQUESTS = (
    Column("", keep=True),
    Column("Token", right=True, keep=True),
    Column("Count", right=True),
    Column("Since", right=True, keep=True),
    Column("Process", right=True, keep=True),
    Column("Host", text=True),
    Column("Program", text=True),
    Column("Data", style="cyan", text=True),
    Column("Timeout", right=True),
    Column("Session", right=True),
    Column("Description", text=True),
)


def page_of(height: int) -> int:
    """Return the number of rows that fit on the screen, at least 1."""
    return max(1, height - HEAD - FOOT)


def render(snapshot: Snapshot, view: View, width: int, height: int, note: str = "") -> list[Text]:
    """Return the screen: `height` lines of at most `width` columns.

    Args:
        snapshot: the state of the store.
        view: settled (`tenure.cli.top.view.settled`).
        width: columns of the terminal.
        height: rows of the terminal.
        note: an error to show instead of the keys.
    """
    page = page_of(height)
    if view.inside is None:
        above = [_title(snapshot), _totals(snapshot, view)]
        rows = _rows(snapshot, view, width, page)
    else:
        above, rows = _inside(snapshot, view, width, page)
    rows += [Text()] * (page + 1 - len(rows))
    below = Text(safe(note), style="bold red") if note else _keys(view)
    lines = [*[*above, *rows][: max(0, height - FOOT)], below]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[-height:]


def _title(snapshot: Snapshot) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(snapshot.wall))
    title = Text("tenure top", style="bold blue")
    title.append(f"  {safe(snapshot.url)}  {at}", style="not bold default")
    slow = snapshot.took > 0.25
    return title.append(f"  (reading took {duration(snapshot.took)})" if slow else "", "yellow")


def _totals(snapshot: Snapshot, view: View) -> Text:
    rows = [row for row in snapshot.rows if view.node in {None, row.node}]
    sessions = sum(each.sessions or 0 for each in snapshot.nodes if view.node in {None, each.path})
    waiting = sum(row.semaphore.waiting or 0 for row in rows)
    owners = sum(len(row.semaphore.owners) for row in rows)
    where = view.node or _several(len(snapshot.nodes), "node")
    way = "ascending" if (view.sort == "name") != view.reverse else "descending"
    return Text(
        f"{where}, {_several(sessions, 'session')}, {_several(len(rows), 'semaphore')}, "
        f"{_several(owners, 'owner')}, {waiting:,} waiting; by {view.sort}, {way}"
    )


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _keys(view: View) -> Text:
    return Text(KEYS if view.inside is None else KEYS_INSIDE, style="reverse")


# The list


def _rows(snapshot: Snapshot, view: View, width: int, page: int) -> list[Text]:
    rows = chosen(snapshot, view)
    if not rows:
        return [Text(), Text("nothing is held, awaited or stored", style="dim")]
    shown = [cells_of(row) for row in rows[view.first : view.first + page]]
    columns = list(COLUMNS)
    if len(snapshot.nodes) == 1:  # the node's name would take the space of the owners' hosts
        del columns[NODE]
        for cells in shown:
            del cells[NODE]
    return _table(columns, shown, width, view.index - view.first)


def cells_of(row: Row) -> list[str]:
    """Return a semaphore in `COLUMNS`."""
    each = row.semaphore
    first = each.owners[0] if each.owners else None
    more = f" and {len(each.owners) - 1} more" if len(each.owners) > 1 else ""
    return [
        safe(each.name),
        safe(row.node),
        kind(each),
        held(each),
        "" if each.waiting is None else str(each.waiting or "-"),
        "" if row.rate is None else f"{row.rate:.1f}" if row.rate else "-",
        duration(first.since) if first else "",
        owner(first) + more if first else "",
        safe(first.host or "") if first else "",
        shown_data(first.data if first and first.data else each.data, 40),
    ]


# One semaphore


def _inside(snapshot: Snapshot, view: View, width: int, page: int) -> tuple[list[Text], list[Text]]:
    assert view.inside is not None
    node, name = view.inside
    title = Text(safe(name), style="bold blue")
    each = snapshot.inside
    if each is None:
        title.append(f"  on {safe(node)}", style="not bold default")
        return [title, Text("it has no holder and no waiter", style="dim")], [Text()]
    title.append(f"  {kind(each)} on {safe(node)}", style="not bold default")
    data = f"  data: {shown_data(each.data, 200)}" if each.data else ""
    requests = [("owns", request) for request in each.owners]
    requests += [("waits", waiter) for waiter in each.waiters]
    common, tokens = shortened([request.order_id for _, request in requests])
    begin = f", tokens {common}…" if common else ""
    about = Text(f"{held(each)}, {len(each.waiters) or 'no'} waiting{begin}{data}")
    rows = zip(requests, tokens, strict=True)
    shown = [
        _request(role, request, token)
        for (role, request), token in list(rows)[view.first : view.first + page]
    ]
    return [title, about], _table(REQUESTS, shown, width, None)


def _request(role: str, each: tenure.RequestDescription, token: str) -> list[str]:
    return [
        role,
        token,
        count(each),
        duration(each.since),
        "" if each.pid is None else str(each.pid),
        safe(each.host or ""),
        program(each),
        shown_data(each.data),
        duration(each.timeout),
        str(each.session_id),
        remark(each),
    ]


# Tables


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, cursor: int | None
) -> list[Text]:
    """Return the titles and the rows, one line each."""
    natural = [
        max(map(cell_len, [column.title, *(row[at] for row in rows)]))
        for at, column in enumerate(columns)
    ]
    widths = fitted(columns, natural, width)
    titles = _line(columns, [column.title for column in columns], widths, styled=False)
    titles.stylize("bold underline")
    lines = [titles]
    for at, row in enumerate(rows):
        line = _line(columns, row, widths, styled=at != cursor)
        if at == cursor:
            line.truncate(width, pad=True)
            line.stylize("reverse")
        lines.append(line)
    return lines


def _line(
    columns: Sequence[Column], cells: Sequence[str], widths: dict[int, int], *, styled: bool
) -> Text:
    line = Text(no_wrap=True)
    for at, width in widths.items():
        cell = Text(cells[at], style=columns[at].style if styled else "")
        cell.truncate(width, overflow="ellipsis")
        room = " " * (width - cell.cell_len)
        line.append_text(Text(room) + cell if columns[at].right else cell + Text(room))
        line.append(" " * GAP)
    line.right_crop(GAP)
    return line
