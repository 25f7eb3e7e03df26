"""Processes of the demo: start them, send orders, record their reports, and end them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tenure.cli.demo.history import DemoEvent, History, parse
from tenure.cli.mistakes import Mistake
from tenure.cli.status import Status


class DemoWorker:
    """One process. Its reports go into the history."""

    def __init__(
        self, who: str, process: asyncio.subprocess.Process, history: History, errors: Path
    ) -> None:
        self.who = who
        self.killed = False
        self._expected = 0  # the number of commands whose end it will report
        self._process = process
        self._history = history
        self._errors = errors
        self._reported = asyncio.Condition()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def listen(self) -> None:
        """Record its reports until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # a killed process may leave an incomplete line
                async with self._reported:
                    self._history.events.append(parse(line))
                    self._reported.notify_all()
        if not self.killed and await self._process.wait():
            said = self._errors.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise Mistake(Status.DEFECT, f"worker {self.who} failed: {said[-1]}")

    def send(self, **order: Any) -> None:
        """Send it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def until(self, enough: Callable[[list[DemoEvent]], bool]) -> None:
        """Wait until its reports satisfy a condition."""
        async with self._reported:
            await self._reported.wait_for(
                lambda: enough([each for each in self._history.events if each.who == self.who])
            )

    async def finish(self) -> None:
        """Wait until it has carried out one more order; its start counts as the first."""
        self._expected += 1
        expected = self._expected
        await self.until(lambda events: sum(each.what == "done" for each in events) >= expected)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        """Close its input, so that it exits."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def ended(self) -> None:
        """Wait for its end."""
        await self._process.wait()


@asynccontextmanager
async def started_crew(
    names: list[str], url: str, folder: Path, history: History
) -> AsyncIterator[list[DemoWorker]]:
    """Run processes for the length of a block."""
    crew: list[DemoWorker] = []
    try:
        for who in names:
            crew.append(await _start(who, url, folder, history))  # noqa: PERF401  each is ended
        async with asyncio.TaskGroup() as listening:
            for member in crew:
                listening.create_task(member.listen())
            for member in crew:
                await member.finish()  # it reports that it has started
            yield crew
            for member in crew:
                member.dismiss()
    except BaseExceptionGroup as several:
        raise _first(several) from None
    finally:
        for member in crew:
            member.kill()
        for member in crew:
            await member.ended()


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    first = several.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _start(who: str, url: str, folder: Path, history: History) -> DemoWorker:
    errors = folder / f"{who}.err"
    with errors.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenure.cli.demo.worker", who, url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is handled here, and ends it
        )
    return DemoWorker(who, process, history, errors)
