"""Draw the pictures of README.md from a real run: `python -m tools.pictures [FOLDER]`.

- demo.svg: the timelines of `tenure demo`, from the history that its processes record.
- top.svg: the screen of `tenure top`, on a terminal, over a store that real processes use.
- takeover.svg: three processes, and the shell that kills and stops them, as it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

import tenure
from tenure.cli.demo.scenes import SCENES, DemoHold, History, parse

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
TENURE = [sys.executable, "-m", "tenure"]
STORE = "sqlite:///jobs.db"
TIMELINES = ("nightly", "gpu", "primary")

# Sizes in pixels: of the whole picture, of a row, and of the column with the names.
WIDTH, ROW, NAMES, MARGIN = 860, 18, 40, 16
STYLE = """\
.ground { fill: #ffffff } text { font: 13px sans-serif; fill: #24292f } .title { font-weight: bold }
.held { fill: #2da44e } .waiting { fill: #eac54f } .killed { stroke: #cf222e; stroke-width: 3 }
@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #e6edf3 } }
"""

COLUMNS, LINES = 120, 12
PROGRAMS = (
    "run --lock nightly --data db-1 -- sleep 600",
    "run --lock nightly --data db-2 -- sleep 600",
    "run --lock nightly --data db-3 -- sleep 600",
    "run --semaphore gpu --limit 2 --data training -- sleep 600",
    "run --semaphore gpu --limit 2 --data rendering -- sleep 600",
    "run --semaphore gpu --limit 2 --data training -- sleep 600",
    "run --elect scheduler --data 10.0.0.7:80 -- sleep 600",
)

# The program of the recording. `print` shows what a reader of the picture sees.
JOB = """\
import asyncio, tenure

async def main():
    async with tenure.connect("sqlite:///jobs.db") as client:
        async with client.session(recovery_window=2) as session:
            print("waits", flush=True)
            try:
                async with session.mutex("nightly") as lease:
                    print(f"holds, with token {lease.fencing_token}", flush=True)
                    await asyncio.sleep(600)
            except tenure.LeaseLost:
                print("LeaseLost: its block was cancelled", flush=True)

asyncio.run(main())
"""
PANE, LINE, PANE_LINES = 410, 17, 6
RECORDING_STYLE = """\
.pane { fill: #161b22; stroke: #30363d }
text { font: 12.5px monospace; fill: #e6edf3; white-space: pre }
.title { fill: #9198a1 } .act { fill: #ff7b72 } .note { fill: #7ee787 }
@media (prefers-reduced-motion: reduce) { text { animation: none !important } }
"""


def draw_demo(folder: Path) -> str:
    """Run the demo, and draw the timelines of its record."""
    record = folder / "demo.jsonl"
    subprocess.run(
        [*TENURE, "demo", "--history", record], check=True, stdout=subprocess.DEVNULL, cwd=folder
    )
    history = History()
    history.events = [parse(line) for line in record.read_text(encoding="utf-8").splitlines()]
    titles = {scene.name: scene.title for scene in SCENES}
    parts: list[str] = []
    top = MARGIN
    for name in TIMELINES:
        lines, top = _timeline(titles[name], history.holds(name), top)
        parts += lines
    legend = [("held", "holds"), ("waiting", "waits")]
    for at, (kind, text) in enumerate(legend):
        left = MARGIN + NAMES + 100 * at
        parts.append(f'<rect class="{kind}" x="{left}" y="{top}" width="24" height="10"/>')
        parts.append(f'<text x="{left + 30}" y="{top + 10}">{text}</text>')
    left = MARGIN + NAMES + 100 * len(legend)
    parts.append(_cross(left + 10, top + 5))
    parts.append(f'<text x="{left + 30}" y="{top + 10}">killed with kill -9</text>')
    height = top + 10 + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _timeline(title: str, holds: list[DemoHold], top: int) -> tuple[list[str], int]:
    """Draw one scene below `top`, and return its elements and where the next one begins."""
    begin = min(each.requested for each in holds)
    ends = [each.ended for each in holds if each.ended != float("inf")]
    end = max([*ends, *(each.granted for each in holds)])
    scale = (WIDTH - 2 * MARGIN - NAMES) / (end - begin)
    parts = [f'<text class="title" x="{MARGIN}" y="{top + 12}">{escape(title)}</text>']
    top += 20
    rows: dict[str, int] = {}
    for each in holds:
        rows.setdefault(each.who, top + ROW * len(rows))

    def bar(kind: str, each: DemoHold, first: float, last: float) -> str:
        left = MARGIN + NAMES + (first - begin) * scale
        width = max((last - first) * scale, 1)
        return (
            f'<rect class="{kind}" x="{left:.1f}" y="{rows[each.who] + 3}" width="{width:.1f}" '
            f'height="{ROW - 6}"/>'
        )

    for who, row in rows.items():
        parts.append(f'<text x="{MARGIN}" y="{row + 13}">{escape(who)}</text>')
    for each in holds:
        parts.append(bar("waiting", each, each.requested, each.granted))
        parts.append(bar("held", each, each.granted, min(each.ended, end)))
    for each in holds:
        if each.killed:
            at = MARGIN + NAMES + (each.ended - begin) * scale
            parts.append(_cross(at, rows[each.who] + ROW / 2))
    return parts, top + ROW * len(rows) + 14


def _cross(x: float, y: float) -> str:
    return f'<path class="killed" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"/>'


def draw_top(folder: Path) -> str:
    """Draw the last screen of `tenure top` while programs hold and wait."""
    with _programs(folder):
        screen = _last_screen(folder)
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for line in screen:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    drawn = console.export_svg(title="tenure top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # no font from elsewhere


@contextlib.contextmanager
def _programs(folder: Path) -> Iterator[None]:
    """Run the programs, each after the one before has its place in the queue."""
    with contextlib.ExitStack() as stack:
        for number, arguments in enumerate(PROGRAMS, start=1):
            program = subprocess.Popen(
                [*TENURE, *arguments.replace("run", "run --quiet", 1).split()],
                cwd=folder,
                env=_environment(),
                stderr=subprocess.DEVNULL,
            )
            stack.callback(program.wait)
            stack.callback(program.terminate)
            asyncio.run(_until(folder, number))
        asyncio.run(_until(folder, len(PROGRAMS), slots=2))
        yield


async def _until(folder: Path, requests: int, slots: int = 0) -> None:
    """Wait until the programs have so many requests, and hold so many slots."""
    async with tenure.connect(f"sqlite:///{folder / 'jobs.db'}") as client, asyncio.timeout(60):
        while True:
            found = {"request": 0, "slot": 0}
            for each in await client.list_semaphores(owners=True, waiters=True):
                kind = "slot" if "/slot/" in each.name else "request"
                found[kind] += len(each.owners) + len(each.waiters)
            if found["request"] >= requests and found["slot"] >= slots:
                return
            await asyncio.sleep(0.02)


def _environment() -> dict[str, str]:
    return {**os.environ, "TENURE_URL": STORE, "TERM": "xterm-256color", "COLORTERM": ""}


def _last_screen(folder: Path) -> list[str]:
    """Run `tenure top` on a terminal, and return the lines that it drew last."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with subprocess.Popen(
        [*TENURE, "top", "--iterations", "3", "--interval", "0.3"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=_environment(),
    ):
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # EIO: the program has ended
            while part := os.read(ours, 65536):
                drawn += part
        os.close(ours)
    frames = re.split(r"\x1b\[H", drawn.decode())
    last = re.split(r"\x1b\[\?", frames[-1])[0]
    last = last.replace(str(folder), "/srv")
    host = socket.gethostname()  # of the machine that draws
    return last.replace(f" {host} ", f" {'db-1'.ljust(len(host))[: len(host)]} ").splitlines()


class Recording:
    """What each terminal showed, and when: lines of programs, and of the shell."""

    def __init__(self, folder: Path) -> None:
        """Record programs that run in this folder."""
        self._folder = folder
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self.lines: list[tuple[float, int, str, str]] = []  # when, pane, class, text
        (folder / "job.py").write_text(JOB, encoding="utf-8")

    def show(self, pane: int, kind: str, text: str) -> float:
        """Append a line to a terminal, and return when."""
        with self._changed:
            now = time.monotonic() - self._began
            self.lines.append((now, pane, kind, text))
            self._changed.notify_all()
        return now

    def until(self, pane: int, beginning: str) -> float:
        """Wait until a terminal shows a line that begins so, and return when it came."""

        def found() -> float | None:
            times = [
                when
                for when, at, _, text in self.lines
                if at == pane and text.startswith(beginning)
            ]
            return times[-1] if times else None

        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, 60):
                raise TimeoutError(f"terminal {pane} did not show {beginning!r}")
            return found() or 0.0

    @contextlib.contextmanager
    def program(self, pane: int) -> Iterator[subprocess.Popen[str]]:
        """Run the job in a terminal, and show what it prints."""
        self.show(pane, "", "$ python job.py")
        with subprocess.Popen(
            [sys.executable, "job.py"], cwd=self._folder, stdout=subprocess.PIPE, text=True
        ) as program:

            def read() -> None:
                for line in program.stdout or ():
                    self.show(pane, "", line.rstrip())

            reader = threading.Thread(target=read)
            reader.start()
            try:
                yield program
            finally:
                program.kill()
                reader.join()


def record_takeover(folder: Path) -> Recording:
    """Kill the first of three processes, and stop the second for longer than its window."""
    recording = Recording(folder)
    with contextlib.ExitStack() as stack:
        programs: list[subprocess.Popen[str]] = []
        for number in range(3):
            programs.append(stack.enter_context(recording.program(number)))
            asyncio.run(_until(folder, number + 1))
        first, second, _ = programs

        def act(command: str, program: subprocess.Popen[str], number: signal.Signals) -> float:
            time.sleep(1.2)  # for those who read the picture
            when = recording.show(3, "act", f"$ kill -{command} {program.pid}")
            program.send_signal(number)
            return when

        when = act("9", first, signal.SIGKILL)
        taken = recording.until(1, "holds") - when
        recording.show(0, "act", "Killed")
        recording.show(3, "note", f"# the next one holds {1000 * taken:.0f} ms later")
        when = act("STOP", second, signal.SIGSTOP)
        recording.show(1, "act", "Stopped")
        taken = recording.until(2, "holds") - when
        recording.show(3, "note", f"# and the third {taken:.1f} s later")
        act("CONT", second, signal.SIGCONT)
        recording.until(1, "LeaseLost")
        recording.show(3, "note", "# the second does not go on working")
    return recording


def draw_takeover(folder: Path) -> str:
    """Draw the recording: each line appears when it did, and all begins anew some seconds later."""
    lines = record_takeover(folder).lines
    length = lines[-1][0] + 4
    height = MARGIN + LINE * (PANE_LINES + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * height + MARGIN}">',
        f"<style>{RECORDING_STYLE}",
    ]
    for index, (when, *_) in enumerate(lines):
        at = 100 * when / length
        parts.append(
            f"@keyframes k{index} {{ 0%, {at:.2f}% {{ opacity: 0 }} "
            f"{at + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
        )
    parts.append("</style>")
    rows = [0] * 4
    for pane, title in enumerate(("terminal 1", "terminal 2", "terminal 3", "the operator")):
        left, top = MARGIN + (pane % 2) * (PANE + 8), MARGIN + (pane // 2) * height
        parts.append(
            f'<rect class="pane" x="{left}" y="{top}" width="{PANE}" height="{height - 8}" rx="6"/>'
        )
        parts.append(f'<text class="title" x="{left + 12}" y="{top + LINE}">{title}</text>')
    for index, (_, pane, kind, text) in enumerate(lines):
        rows[pane] += 1
        left, top = MARGIN + (pane % 2) * (PANE + 8), MARGIN + (pane // 2) * height
        parts.append(
            f'<text class="{kind}" x="{left + 12}" y="{top + LINE * (rows[pane] + 1) + 4}" '
            f'style="animation: k{index} {length:.1f}s linear infinite">{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


DRAWINGS = {"demo.svg": draw_demo, "top.svg": draw_top, "takeover.svg": draw_takeover}


def main(folder: Path) -> None:
    """Draw the pictures into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        with tempfile.TemporaryDirectory(prefix="tenure-pictures-") as scratch:
            (folder / name).write_text(draw(Path(scratch)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
