"""`tenure demo`: plays the scenes, and shows them with the results of the checks."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import click

import tenure
from tenure.cli.demo.scenes import (
    SCENES,
    DemoHold,
    DemoStage,
    Finding,
    History,
    Scene,
    started_crew,
)
from tenure.cli.mistakes import Mistake, Status, after_signal
from tenure.cli.options import run_async
from tenure.cli.output import is_terminal, say, terminal

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


WORKERS = [f"w{number}" for number in range(1, 9)]
TIME_LIMIT = 60.0
"""Timeout of the whole demo in seconds; it takes a few."""

FINE: dict[object, str] = {
    "held": "█",
    "waiting": "░",
    "killed": "✗",
    "idle": " ",
    True: "✓",
    False: "✗",
}
PLAIN: dict[object, str] = {
    "held": "#",
    "waiting": ".",
    "killed": "X",
    "idle": " ",
    True: "ok",
    False: "FAILED",
}
STYLE = {"held": "green", "waiting": "yellow", "killed": "bold red", "idle": ""}


@click.command()
@click.option(
    "--history",
    "history_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Keep what the processes recorded, as JSON lines.",
)
def demo(history_file: Path | None) -> int:
    """Show processes that share locks and a leader.

    Starts real processes on a temporary SQLite file, records what each of them does, and checks
    the record: no two holders overlapped, fencing tokens rose, requests were granted in the
    order of arrival. Exits with 70 if a check fails. Nothing is left behind.
    """
    return run_async(_play_until_ended(history_file))


async def _play_until_ended(history_file: Path | None) -> int:
    """Play until the end, Ctrl-C or SIGTERM; a second signal does not interrupt the clean-up."""
    task = asyncio.current_task()
    assert task is not None
    signals: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        signals.append(number)
        if len(signals) == 1:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    history = History()
    try:
        async with asyncio.timeout(TIME_LIMIT):
            findings = await _play(history)
    except asyncio.CancelledError:
        if not signals:
            raise
        return after_signal(signals[0])
    except TimeoutError:
        raise Mistake(Status.DEFECT, f"the demo did not end within {TIME_LIMIT:g} s") from None
    finally:
        if history_file is not None:
            history.write(history_file)
    return Status.DONE if all(each.holds for each in findings) else Status.DEFECT


async def _play(history: History) -> list[Finding]:
    started = asyncio.get_running_loop().time()
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="tenure-demo-") as folder:
        url = f"sqlite:///{quote(folder)}/demo.db"
        signs = _signs()
        say(f"{len(WORKERS)} processes on {url}")
        say(f"{signs['held']} holds, {signs['waiting']} waits, time from left to right")
        async with (
            tenure.connect(url) as client,
            client.session(description="tenure demo") as session,
            started_crew(WORKERS, url, Path(folder), history) as crew,
        ):
            stage = DemoStage(client, session, crew, history)
            for scene in SCENES:
                say()
                say(scene.title, style="bold blue")
                await scene.play(stage)
                findings += _show(scene, history)
    took = asyncio.get_running_loop().time() - started
    _sum_up(findings, history, took)
    return findings


def _show(scene: Scene, history: History) -> Sequence[Finding]:
    """Return the picture of a scene, and the results of its checks."""
    for row in timeline(history.holds(scene.name), max(_width() - 8, 10)):
        _show_row(row)
    for line in scene.describe(history):
        _show_line("", line)
    findings = scene.check(history)
    for each in findings:
        figure = "" if each.figure is None else f": {each.figure * 1000:.1f} ms"
        style = "green" if each.holds else "bold red"
        _show_line(_signs()[each.holds], each.text + figure, style)
    return findings


def _show_row(row: Row) -> None:
    signs = _signs()
    if not is_terminal():
        say(f"  {row.who:<4}" + "".join(signs[cell] for cell in row.cells).rstrip())
        return
    from rich.text import Text

    line = Text(f"  {row.who:<4}")
    for cell in row.cells:
        line.append(signs[cell], style=STYLE[cell])
    terminal().print(line, no_wrap=True, crop=True)


def _show_line(sign: str, text: str, style: str = "") -> None:
    head = f"  {sign} " if sign else "  "
    for line in textwrap.wrap(
        text, _width(), initial_indent=head, subsequent_indent=" " * len(head)
    ):
        say(line, style)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)


@cache
def _signs() -> dict[object, str]:
    try:
        "".join(FINE.values()).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return PLAIN
    return FINE


def _sum_up(findings: Sequence[Finding], history: History, took: float) -> None:
    def count(what: str) -> int:
        return sum(each.what == what for each in history.events)

    failed = [each for each in findings if not each.holds]
    say()
    say(
        f"{count('granted')} grants, {count('killed')} process killed, "
        f"{count('seen')} states seen, {len(history.looks)} looks into queues, in {took:.1f} s"
    )
    if failed:
        say(f"{len(failed)} of {len(findings)} checks of the record FAILED", style="bold red")
    else:
        say(f"all {len(findings)} checks of the record hold", style="bold green")
