"""Diagrams of the documents, drawn from the code: ``python -m tools.diagrams`` writes them.

States and transitions come from the tables of `tenure._client`, and the owners of the queue from a
store in memory. This file knows where the boxes are, and nothing else.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from html import escape
from math import hypot
from pathlib import Path
from typing import TypeVar

from tenure import blocking
from tenure._client import request, session_life

FOLDER = Path(__file__).parent.parent / "docs" / "diagrams"

Spot = tuple[float, float]

S = TypeVar("S", bound=Enum)

WIDTH, HEIGHT = 104, 36  # of a box, in pixels
COLUMN, ROW = 230, 110  # between the middles of two boxes
MARGIN, TOP = 90, 90

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2430;text-anchor:middle}"
    ".edge{fill:none;stroke:#5b6475;stroke-width:1.5;marker-end:url(#tip)}"
    ".label{font-size:12px;fill:#3d4657;paint-order:stroke;stroke:#f7f8fa;stroke-width:4px}"
    ".box{fill:#fff;stroke:#3f6fb5;stroke-width:1.5}"
    ".end{fill:#eceff4;stroke:#5b6475;stroke-width:1.5}"
    ".frame{fill:none;stroke:#9aa3b2;stroke-dasharray:5 4}"
    ".owner{fill:#d5e8d4;stroke:#4e8a4b;stroke-width:1.5}"
)

TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#5b6475"/></marker></defs>'
)

REQUEST = {"SENT": (0, 0), "WAITING": (1, 0), "HELD": (2, 0), "RELEASED": (3, 0)} | {
    "GONE": (0.5, 1),
    "LOST": (2.5, 1),
}
SESSION = {"CONNECTING": (0, 0), "ATTACHED": (1, 0), "DETACHED": (2, 0)} | {
    "EXPIRED": (0, 1.3),
    "CLOSED": (1, 1.3),
    "LEFT": (2, 1.3),
}
SESSION_EVENTS = {
    "attached": session_life.ATTACHED,
    "contact lost": session_life.CONTACT_LOST,
    "contact restored": session_life.CONTACT_RESTORED,
    "expired": session_life.EXPIRED,
    "closed": session_life.CLOSED,
    "left": session_life.LEFT,
}

QUEUE = [2, 1, 2, 1]
LIMIT = 4


def drawing(width: float, height: float, parts: Sequence[str]) -> str:
    """Return the text of an SVG file, on a light card that suits light and dark pages."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<style>{STYLE}</style>",
        TIP,
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="#f7f8fa"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _at(spot: Spot) -> Spot:
    return MARGIN + spot[0] * COLUMN, TOP + spot[1] * ROW


def _box(text: str, middle: Spot, style: str) -> str:
    x, y = middle
    return (
        f'<rect class="{style}" x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="8"/><text x="{x:g}" y="{y + 4:g}">{escape(text)}</text>'
    )


def _border(start: Spot, end: Spot) -> Spot:
    """Return where the line from `end` to the middle `start` leaves the box around `start`."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    share = min(
        WIDTH / 2 / abs(dx) if dx else float("inf"), HEIGHT / 2 / abs(dy) if dy else float("inf")
    )
    return start[0] + dx * share, start[1] + dy * share


def _label(x: float, y: float, *lines: str) -> str:
    return "".join(
        f'<text class="label" x="{x:.0f}" y="{y + 15 * number:.0f}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )


def _edge(start: Spot, end: Spot, names: Sequence[str], bend: float) -> str:
    """Return an arrow between two boxes; `bend` pixels to the left of its direction."""
    length = hypot(end[0] - start[0], end[1] - start[1])
    across = (end[1] - start[1]) / length, -(end[0] - start[0]) / length
    middle = (
        (start[0] + end[0]) / 2 + across[0] * bend,
        (start[1] + end[1]) / 2 + across[1] * bend,
    )
    control = (
        2 * middle[0] - (start[0] + end[0]) / 2,
        2 * middle[1] - (start[1] + end[1]) / 2,
    )
    below = 14 if start[0] > end[0] and bend else -5
    (x1, y1), (x2, y2) = _border(start, control), _border(end, control)
    label = _label(middle[0], middle[1] + below, *names)
    path = f"M{x1:.0f} {y1:.0f}Q{control[0]:.0f} {control[1]:.0f} {x2:.0f} {y2:.0f}"
    return f'<path class="edge" d="{path}"/>{label}'


def states(
    spots: Mapping[str, Spot], events: Mapping[str, Mapping[S, S]], ends: frozenset[str]
) -> str:
    """Return the diagram of a state machine: a box for each state, an arrow for each transition.

    Args:
        spots: the column and row of each state.
        events: the tables of transitions.
        ends: the final states. An event that leads from every other state to one of them is an
            arrow from a frame around the others.
    """
    living = frozenset(spots) - ends
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    from_all: dict[str, str] = {}
    for event, table in events.items():
        if {each.name for each in table} == living and len(set(table.values())) == 1:
            from_all[next(iter(table.values())).name] = event
            continue
        for before, after in table.items():
            arrows[before.name, after.name].append(event)
    if {name for pair in arrows for name in pair} | set(from_all) != set(spots):
        raise ValueError("a state has no place in its diagram, or is no state")

    def parts() -> Iterator[str]:
        if from_all:
            right = _at((max(spots[name][0] for name in living), 0))[0] + WIDTH / 2 + 18
            place = f'x="20" y="{TOP - 60}" width="{right - 20:g}" height="112"'
            yield f'<rect class="frame" {place} rx="12"/>'
        for after, event in from_all.items():
            x, y = _at(spots[after])
            top = y - HEIGHT / 2
            yield f'<path class="edge" d="M{x:g} {TOP + 52}L{x:g} {top:g}"/>'
            yield _label(x, (TOP + 52 + top) / 2, event)
        for (before, after), names in sorted(arrows.items()):
            start, end = _at(spots[before]), _at(spots[after])
            skips = start[1] == end[1] and abs(start[0] - end[0]) > COLUMN
            back = (after, before) in arrows
            bend = 48.0 if skips else 16.0 if back else 0.0
            yield _edge(start, end, sorted(names), bend)
        for name, spot in spots.items():
            yield _box(name.lower(), _at(spot), "end" if name in ends else "box")

    width = 2 * MARGIN + max(x for x, _ in spots.values()) * COLUMN
    height = TOP + max(y for _, y in spots.values()) * ROW + 50
    return drawing(width, height, list(parts()))


def queue() -> str:
    """Return the diagram of a queue, whose owners a real store chooses."""
    with blocking.connect("memory://") as client, ExitStack() as places:
        semaphore = client.semaphore("slots")
        semaphore.create(LIMIT)
        for count in QUEUE:
            places.enter_context(semaphore.enqueue(count))
        owners = len(semaphore.describe(owners=True).owners)
    parts = [
        f'<text x="{MARGIN + 195}" y="36">the queue of a semaphore of limit {LIMIT}</text>',
    ]
    for number, count in enumerate(QUEUE):
        owns = number < owners
        middle = MARGIN + number * 130, 80.0
        parts.append(_box(f"count {count}", middle, "owner" if owns else "end"))
        parts.append(_label(middle[0], 120, "owner" if owns else "waits"))
    return drawing(2 * MARGIN + 130 * (len(QUEUE) - 1), 145, parts)


def drawn() -> dict[Path, str]:
    """Return every diagram, by the file that it belongs to."""
    living = frozenset(state.name for state in session_life.LIVING)
    return {
        FOLDER / "request.svg": states(
            REQUEST, request.EVENTS, frozenset({"RELEASED", "GONE", "LOST"})
        ),
        FOLDER / "session.svg": states(SESSION, SESSION_EVENTS, frozenset(SESSION) - living),
        FOLDER / "queue.svg": queue(),
    }


def main() -> int:
    """Write the diagrams; with ``--check``, only tell whether they are up to date."""
    old = [path for path, text in drawn().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in old:
            sys.stderr.write(f"{path.name} is out of date; run: python -m tools.diagrams\n")
        return 1 if old else 0
    FOLDER.mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
