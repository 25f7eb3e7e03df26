"""Timelines: which programs held and awaited a semaphore in the last minutes, as bars.

Pure functions of the record. The picture is a table with a row for each session, so that its facts
can be read without seeing it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tenure.console.record import Span

WIDTH = 1000.0
"""Width of a timeline in its own unit; the page stretches it."""

NARROWEST = 2.0
"""Least width of a bar, so that a short lease is seen."""

WINDOWS = (60, 300)
"""Lengths of timelines in seconds, which a visitor can choose."""

ROWS = 12

State: TypeAlias = Literal["holds", "waits", "ended"]
_ORDER: dict[State, int] = {"holds": 0, "waits": 1, "ended": 2}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the time for which a request waited, or was an owner."""

    kind: Literal["held", "waiting"]
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The requests of one session.

    Attributes:
        state: the present state of the latest request.
        seconds: time for which it has been so; ``None`` is unknown.
        held: seconds for which the session has held in the window.
        waited: seconds for which it has waited in the window.
    """

    session_id: int
    label: str
    state: State
    seconds: float | None
    held: float
    waited: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of one semaphore.

    Attributes:
        window: its length in seconds; its right end is now.
        more: number of sessions that have no row.
    """

    window: float
    rows: tuple[TimelineRow, ...]
    more: int


def timeline(spans: Iterable[Span], now: float, window: float, most: int = ROWS) -> Timeline:
    """Return the timeline of a semaphore's requests.

    Holders come first, then waiters in order, then sessions whose requests have ended, the latest
    first.
    """
    start = now - window
    sessions: dict[int, list[Span]] = {}
    for each in spans:
        if each.ended is None or each.ended >= start:
            sessions.setdefault(each.session_id, []).append(each)
    ranked = sorted(sessions.values(), key=lambda found: _rank(found[-1]))
    rows = tuple(_row(found, now, start, WIDTH / window) for found in ranked[:most])
    return Timeline(window, rows, max(0, len(ranked) - most))


def _rank(span: Span) -> tuple[int, float]:
    state = _state(span)
    return _ORDER[state], -(span.ended or 0.0) if state == "ended" else span.order_id


def _state(span: Span) -> State:
    if span.ended is not None:
        return "ended"
    return "waits" if span.granted is None else "holds"


def _row(found: list[Span], now: float, start: float, scale: float) -> TimelineRow:
    bars: list[Bar] = []
    held = waited = 0.0
    for each in found:
        end = now if each.ended is None else each.ended
        granted = each.granted
        if granted is None and each.joined is None:
            granted = start  # an owner since before it was first seen
        wait_end = end if granted is None else min(granted, end)
        if each.joined is not None:
            waited += _add(bars, "waiting", each.joined, wait_end, start, scale)
        if granted is not None:
            held += _add(bars, "held", granted, end, start, scale)
    last = found[-1]
    state = _state(last)
    since = {"holds": last.granted, "waits": last.joined, "ended": last.ended}[state]
    seconds = None if since is None else max(0.0, now - since)
    return TimelineRow(last.session_id, last.label, state, seconds, held, waited, tuple(bars))


def _add(
    bars: list[Bar],
    kind: Literal["held", "waiting"],
    begin: float,
    end: float,
    start: float,
    scale: float,
) -> float:
    """Add a bar, and return its length in seconds."""
    begin = max(begin, start)
    if end <= begin:
        return 0.0
    width = max((end - begin) * scale, NARROWEST)
    left = min((begin - start) * scale, WIDTH - width)
    bars.append(Bar(kind, round(left, 1), round(width, 1)))
    return end - begin
