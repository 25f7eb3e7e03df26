"""The command `tenure top`: reads, draws and listens to keys, or prints into a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import click

import tenure
from tenure.cli.look import node_json
from tenure.cli.mistakes import Status, after_signal
from tenure.cli.options import a_count, a_duration, complete, json_option, run_async, url_option
from tenure.cli.output import is_terminal, print_json_line, say, table
from tenure.cli.store import open_store
from tenure.cli.top.screen import COLUMNS, cells_of, page_of, render, totals
from tenure.cli.top.view import Key, Observer, Snapshot, View, chosen, pressed, settled

SHARE = 4
"""Reading takes at most one part in so many of the time."""
SHORTEST = 0.1


@click.command()
@click.option(
    "--interval",
    metavar="S",
    type=a_duration,
    default=1.0,
    help="Seconds between readings, 0.1 or more.  [default: 1]",
)
@click.option("--iterations", metavar="N", type=a_count, help="End after N readings.")
@click.option("--once", is_flag=True, help="Print one table, also on a terminal, and end.")
@click.option(
    "--node",
    metavar="PATH",
    help="This node only.  [default: all]",
    shell_complete=complete("nodes"),
)
@json_option
@url_option
def top(
    interval: float, iterations: int | None, node: str | None, *, once: bool, as_json: bool
) -> int:
    """Show holders and waiters, live.

    On a terminal it fills the screen; q ends it, and the last line lists the keys. In a pipe it
    prints one table for each reading, and with --json one object on a line.

    Longest is the longest wait for a semaphore. The key w shows why its waiters wait, as tenure why
    does. Inside a semaphore, the key w shows it for the selected waiter, and for a holder what its
    task waits for.

    New/s counts owners that the previous reading did not have. It is a lower bound: owners that
    appeared and disappeared between two readings are not counted.

    Exits with 130 after Ctrl-C.
    """
    if interval < SHORTEST:
        raise click.UsageError(
            f"--interval is {SHORTEST:g} or more, not {interval:g}", click.get_current_context()
        )
    live = is_terminal() and not (as_json or once)
    work = _live if live else _print
    return run_async(work(interval, 1 if once else iterations, node, as_json=as_json))


# On a terminal


async def _live(interval: float, iterations: int | None, node: str | None, *, as_json: bool) -> int:
    assert not as_json
    async with open_store() as client:
        return await Top(Observer(client, node), interval, iterations).run()


class Top:
    """One `tenure top` on a terminal, from start to exit code."""

    def __init__(self, observer: Observer, interval: float, iterations: int | None) -> None:
        self._observer = observer
        self._interval = interval
        self._left = iterations
        self._view = View()
        self._snapshot: Snapshot
        self._note = ""
        self._code: int | None = None
        self._refresh = asyncio.Event()

    async def run(self) -> int:
        """Run, and return the exit code."""
        from tenure.cli.top.screen import Notes, Screen

        # A failure here is reported in one line on stderr.
        self._snapshot = await self._observer.read()
        with Notes() as notes, Screen(self._press, self._draw, self._end) as self._screen:
            while self._code is None:
                self._draw()
                self._count_down()
                pause = max(self._interval, SHARE * self._snapshot.took)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0 if self._code is not None else pause):
                        await self._refresh.wait()
                if self._code is None:
                    self._refresh.clear()  # a key during the reading sets it again
                    await self._read()
                    self._note = self._note or notes.last
                    notes.last = ""
        return self._code

    def _count_down(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._code = Status.DONE

    async def _read(self) -> None:
        try:
            self._snapshot = await self._observer.read(*_detail(self._view))
            self._note = ""
        except tenure.TenureError as error:
            self._note = f"not up to date: {error}"

    def _page(self) -> int:
        return page_of(self._screen.size[1])

    def _draw(self) -> None:
        width, height = self._screen.size
        self._view = settled(self._view, self._snapshot, page_of(height))
        self._screen.show(render(self._snapshot, self._view, width, height, self._note))

    def _press(self, key: str) -> None:
        before = self._view
        self._view = pressed(before, key, self._snapshot, self._page())
        if self._view.quit:
            self._code = Status.DONE
        if self._code is not None or _detail(self._view) != _detail(before):
            self._refresh.set()  # now, not after the pause
        else:
            self._draw()

    def _end(self, number: int) -> None:
        self._code = after_signal(number)
        self._refresh.set()


def _detail(view: View) -> tuple[Key | None, Key | None]:
    """Return the semaphore to describe, and the one to explain."""
    return view.inside, None if view.explained is None else view.explained[0]


# In a pipe


async def _print(
    interval: float, iterations: int | None, node: str | None, *, as_json: bool
) -> int:
    from tenure.cli.look import output_gone

    async with open_store() as client:
        observer = Observer(client, node)
        with output_gone() as gone:
            done = 0
            while True:
                snapshot = await observer.read()
                if as_json:
                    print_json_line(_as_json(snapshot))
                else:
                    _print_table(snapshot)
                sys.stdout.flush()
                done += 1
                if done == iterations:
                    return Status.DONE
                await asyncio.wait([gone], timeout=max(interval, SHARE * snapshot.took))
                if gone.done():
                    raise BrokenPipeError


def _print_table(snapshot: Snapshot) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(snapshot.wall))
    say(f"{at}  {totals(snapshot, View())}")
    rows = chosen(snapshot, View())
    if rows:
        table(COLUMNS, [cells_of(row) for row in rows])
    else:
        say("nothing is held, awaited or stored")
    say()


def _as_json(snapshot: Snapshot) -> dict[str, Any]:
    nodes = []
    for node in snapshot.nodes:
        rows = [row for row in snapshot.rows if row.node == node.path]
        described = node_json(node, [row.semaphore for row in rows])
        for row, semaphore in zip(rows, described["semaphores"], strict=True):
            del semaphore["waiters"]  # not always read: only their number is known
            semaphore["longest_wait"] = row.longest
            semaphore["new_owners_per_second"] = row.rate
        nodes.append(described)
    return {"time": snapshot.wall, "nodes": nodes}
