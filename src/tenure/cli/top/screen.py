"""The terminal that `tenure top` uses exclusively, restored in any case.

Rules:

* All changes (alternate screen, cursor, key input) are made in `enter`, and undone in `leave`,
  which runs after a key, an error or a signal.
* Ctrl-Z leaves before stopping, and enters again after continuing. Only SIGKILL leaves the terminal
  changed (`reset` repairs it).

The lines of the screen: a pure function of the snapshot and the view.

Only visible lines are made, so the cost does not depend on the size of the store. All text of the
store is escaped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.text import Text

import tenure
from tenure.cli.look import count, held, program, remark
from tenure.cli.output import GAP, Column, duration, fitted, safe, shortened, shown_data, terminal
from tenure.cli.top.view import Keyboard, Row, Snapshot, View, chosen, explanation
from tenure.shown import kind

KEYS = "q quit  ↑↓ select  Enter look inside  w why  s sort  r reverse  n node"
KEYS_INSIDE = "q quit  ↑↓ select  w why this request  Esc back"
KEYS_WHY = "q quit  ↑↓ scroll  Esc back"
HEAD, FOOT = 3, 1
"""Lines above the rows (two of summary, one of titles) and below them."""

COLUMNS = (
    Column("Name", style="bold", text=True, keep=True),
    Column("Node", text=True),
    Column("Kind", rank=2),
    Column("Held", style="green", keep=True),
    Column("Waiting", style="yellow", right=True, keep=True),
    Column("Longest", style="yellow", right=True, rank=1),
    Column("New/s", right=True, rank=1),
    Column("Since", right=True),
    Column("Host", text=True),
    Column("Program", text=True, least=16),
    Column("Process", right=True, rank=3),
    Column("Data", style="cyan", text=True, rank=4),
)
NODE = 1
REQUESTS = (
    Column("", keep=True),
    Column("Token", right=True, keep=True),
    Column("Count", right=True),
    Column("Since", right=True, keep=True),
    Column("Process", right=True, keep=True),
    Column("Host", text=True),
    Column("Program", text=True, least=16),
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
    if view.explained is not None:
        above, rows = _explained(snapshot, view, page, failed=bool(note))
    elif view.inside is not None:
        above, rows = _inside(snapshot, view, width, page)
    else:
        above = [_title(snapshot, view), Text(totals(snapshot, view))]
        rows = _rows(snapshot, view, width, page)
    rows += [Text()] * (page + 1 - len(rows))
    below = Text(safe(note), style="bold red") if note else _keys(view)
    lines = [*[*above, *rows][: max(0, height - FOOT)], below]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[-height:]


def _title(snapshot: Snapshot, view: View) -> Text:
    title = Text("tenure top", style="bold blue")
    title.append(time.strftime("  %H:%M:%S", time.localtime(snapshot.wall)), "not bold default")
    slow = snapshot.took > 0.25
    title.append(f"  (reading took {duration(snapshot.took)})" if slow else "", "yellow")
    way = "ascending" if (view.sort == "name") != view.reverse else "descending"
    where = f"  by {view.sort}, {way}  {safe(snapshot.url)}"
    return title.append(where, "not bold default")


def totals(snapshot: Snapshot, view: View) -> str:
    """Return the numbers of the view in one line."""
    rows = [row for row in snapshot.rows if view.node in {None, row.node}]
    sessions = sum(each.sessions or 0 for each in snapshot.nodes if view.node in {None, each.path})
    waiting = sum(row.semaphore.waiting or 0 for row in rows)
    owners = sum(len(row.semaphore.owners) for row in rows)
    longest = max((row.longest for row in rows if row.longest is not None), default=None)
    rates = [row.rate for row in rows if row.rate is not None]
    changing = [
        _several(owners, "owner"),
        f"{waiting:,} waiting" + ("" if longest is None else f" (longest {duration(longest)})"),
        f"{sum(rates):.1f} new/s" if rates else "",
    ]
    lasting = [
        _several(len(rows), "semaphore"),
        _several(sessions, "session"),
        "" if view.node else _several(len(snapshot.nodes), "node"),
    ]
    about = "; ".join(", ".join(filter(None, facts)) for facts in (changing, lasting))
    return f"{view.node}: {about}" if view.node else about


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _keys(view: View) -> Text:
    keys = KEYS if view.inside is None else KEYS_INSIDE
    return Text(keys if view.explained is None else KEYS_WHY, style="reverse")


# The list


def _rows(snapshot: Snapshot, view: View, width: int, page: int) -> list[Text]:
    rows = chosen(snapshot, view)
    if not rows:
        return [Text(), Text("nothing is held, awaited or stored", style="dim")]
    cursor = view.cursor
    shown = [cells_of(row) for row in rows[cursor.first : cursor.first + page]]
    columns = list(COLUMNS)
    if len(snapshot.nodes) == 1:  # the node's name would take the space of the owners' hosts
        del columns[NODE]
        for cells in shown:
            del cells[NODE]
    return _table(columns, shown, width, cursor.index - cursor.first)


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
        duration(row.longest),
        "" if row.rate is None else f"{row.rate:.1f}" if row.rate else "-",
        duration(first.since) if first else "",
        safe(first.host or "") if first else "",
        _program(first) + more if first else "",
        str(first.pid) if first and first.pid is not None else "",
        shown_data(first.data if first and first.data else each.data, 40),
    ]


def _program(owner: tenure.RequestDescription) -> str:
    name, about = program(owner), remark(owner)
    if name and about:
        return f"{name} ({about})"
    return name or about or f"session {owner.session_id}"


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
    cursor = view.request
    shown = [
        _request(role, request, token)
        for (role, request), token in list(rows)[cursor.first : cursor.first + page]
    ]
    return [title, about], _table(REQUESTS, shown, width, cursor.index - cursor.first)


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


# The reason of a wait


def _explained(
    snapshot: Snapshot, view: View, page: int, *, failed: bool
) -> tuple[list[Text], list[Text]]:
    assert view.explained is not None
    (node, name), order_id = view.explained
    title = Text(safe(name), style="bold blue")
    what = "why its waiters wait" if order_id is None else f"request {order_id}"
    title.append(f"  on {safe(node)}: {what}", style="not bold default")
    lines = explanation(snapshot, view)
    if not lines:
        missing = "" if failed else "it has no holder and no waiter"
        return [title, Text(missing, style="dim")], [Text()]
    shown = lines[view.line : view.line + page]
    return [title, Text()], [Text(line, style=style) for line, style in shown]


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


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ESCAPE_TIME = 0.05
"""Timeout in seconds for the rest of an escape sequence."""


class Screen:
    """The terminal, for the duration of the ``with`` block.

    Args:
        key: called with each key.
        redraw: called when the screen has another size, or was left and entered again.
        ended: called with the signal that ends the process.
    """

    def __init__(
        self,
        key: Callable[[str], None],
        redraw: Callable[[], None],
        ended: Callable[[int], None],
    ) -> None:
        """Prepare the screen; the terminal is changed only when the block is entered."""
        self._loop = asyncio.get_running_loop()
        self._key, self._redraw, self._ended = key, redraw, ended
        self._keyboard = Keyboard()
        self._live = Live(
            console=terminal(),
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._fd = _keyboard()
        self._settings: list[Any] | None = None
        self._entered = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        return terminal().size

    def __enter__(self) -> Screen:
        """Switch the terminal to the screen, and handle its signals."""
        try:
            self.enter()
            for number in ENDING:
                self._loop.add_signal_handler(number, self._ended, number)
            self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
            self._loop.add_signal_handler(signal.SIGWINCH, self._redraw)
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal and the signals."""
        self.leave()
        for number in (*ENDING, signal.SIGTSTP, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        if self._fd is not None and self._fd != 0:
            os.close(self._fd)

    def enter(self) -> None:
        """Take the terminal."""
        self._entered = True
        if self._fd is not None:
            self._settings = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
            self._loop.add_reader(self._fd, self._read)
        self._live.start()

    def leave(self) -> None:
        """Restore the terminal. Safe to call twice."""
        if not self._entered:
            return
        self._entered = False
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            self._live.stop()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            if self._settings is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._fd, termios.TCSADRAIN, self._settings)

    def show(self, lines: Sequence[Text]) -> None:
        """Show these lines, replacing the previous ones."""
        if self._entered:
            try:
                self._live.update(Group(*lines), refresh=True)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # The terminal is closed, and its signal is about to arrive.
                self._ended(signal.SIGHUP)

    def _suspend(self) -> None:
        self.leave()
        self._loop.remove_signal_handler(signal.SIGTSTP)  # now the signal stops the process
        os.kill(os.getpid(), signal.SIGTSTP)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)  # continues here
        self.enter()
        self._redraw()

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            self._ended(signal.SIGHUP)
            return
        self._press(self._keyboard.feed(data))
        if self._keyboard.waiting:
            self._loop.call_later(ESCAPE_TIME, lambda: self._press(self._keyboard.flush()))

    def _press(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._key(key)


class Notes(logging.Handler):
    """The last warning, which would otherwise overwrite the screen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()

    def __enter__(self) -> Notes:
        root = logging.getLogger()
        self._others, root.handlers = root.handlers, [self]
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().handlers = self._others


def _keyboard() -> int | None:
    """Return the descriptor to read keys from: standard input or /dev/tty, if one of them works."""
    if sys.stdin is not None and sys.stdin.isatty():
        return sys.stdin.fileno()
    with contextlib.suppress(OSError):
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    return None
