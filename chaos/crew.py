"""The processes, as the nemesis sees them: started, stopped, killed, restarted, heard, ended.

Rules:

* A *slot* is a place for a process; after a death its successor has the same slot, and another
  label. One fault at a time has a slot: `Crew.one` and `Crew.all` lend them.
* What a process said is all that is known of it: ``ready``, then an answer to each order. One that
  ends without having been killed or told to is a failure of the run, and kept in `Crew.failures`.
* A stop and a kill are written into the history before they happen, and a continuation after.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from chaos.adapter import Engine
from chaos.work import Part
from tenure.model import SessionDescription
from tenure.testing.history import Continued, Crashed, Journal, Paused

_ROOT = Path(__file__).parent.parent

_PATIENCE = 30.0
"""Seconds in which a process on a busy machine does what it is told; then it is a failure."""


class Member:
    """One process, from its start to its end."""

    def __init__(self, part: Part, process: asyncio.subprocess.Process, errors: Path) -> None:
        """Listen to a process that has been started."""
        self.part = part
        self.excused = False  # it may end
        self._process = process
        self._errors = errors
        self._said: list[str] = []
        self._heard = asyncio.Condition()
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    @property
    def label(self) -> str:
        """Its name in the history."""
        return self.part.label

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            async with self._heard:
                self._said.append(line.decode(errors="replace").strip())
                self._heard.notify_all()
        await self._process.wait()
        async with self._heard:
            self._heard.notify_all()

    def signal(self, number: int) -> None:
        """Send it a signal, if it still lives."""
        if not self._over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)  # what asyncio offers may reap it behind its back

    def tell(self, order: str, **details: float) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps({"do": order, **details}).encode() + b"\n")

    async def until(self, word: str) -> bool:
        """Wait until it has said that; false when it ended, or took too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE), self._heard:
                await self._heard.wait_for(lambda: word in self._said or self._over())
        return word in self._said

    async def ended(self) -> int | None:
        """Wait for its end, and return its exit status; ``None`` when it took too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await asyncio.shield(self._listening)
        return self._process.returncode

    def _over(self) -> bool:
        return self._process.returncode is not None

    def complaint(self) -> str:
        """Return the last line that it wrote to its standard error."""
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    async def end(self) -> None:
        """Kill it if it still lives, and reap it."""
        self.excused = True
        self.signal(signal.SIGKILL)
        await self._listening


class Slot:
    """A place for a process. Whoever has its `lock` may do something to the process in it."""

    def __init__(self, number: int) -> None:
        """Start empty."""
        self.number = number
        self.lock = asyncio.Lock()
        self.member: Member | None = None
        self.incarnation = 0


class Crew:
    """All processes of a run.

    Args:
        engine: says where the store is.
        folder: for histories, tokens, and what the processes complain about.
        journal: the nemesis's.
        windows: seconds of recovery window, one for each slot.
        seed: of the processes' choices.
        program: the module that a process runs.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        journal: Journal,
        windows: Sequence[float],
        seed: int,
        program: str,
    ) -> None:
        """Start with an empty slot for each recovery window."""
        self.slots = [Slot(number) for number in range(len(windows))]
        self.failures: list[str] = []
        self._engine = engine
        self._folder = folder
        self._journal = journal
        self._windows = windows
        self._seed = seed
        self._program = program

    @property
    def members(self) -> list[Member]:
        """Those that are there now."""
        return [slot.member for slot in self.slots if slot.member is not None]

    def successors(self, label: str) -> set[str]:
        """Return the labels under which a process may continue: its own, and its slot's now."""
        slot = label.partition(".")[0]
        return {label} | {m.label for m in self.members if m.label.partition(".")[0] == slot}

    def knows(self, session: SessionDescription) -> bool:
        """Whether it is a session that a process asked for; an engine may have opened others."""
        return session.description in {member.label for member in self.members}

    # Whose turn it is to suffer

    @asynccontextmanager
    async def one(
        self, random: Random, which: Callable[[Member], bool] = lambda _: True
    ) -> AsyncIterator[Slot]:
        """Return a slot without another fault, with a process that lives."""
        slots = [slot for slot in self.slots if slot.member is not None and which(slot.member)]
        free = [slot for slot in slots if not slot.lock.locked()]
        slot = random.choice(free or slots or self.slots)
        async with slot.lock:
            if slot.member is None:
                await self.start(slot)
            yield slot

    @asynccontextmanager
    async def all(self) -> AsyncIterator[Sequence[Slot]]:
        """Every slot."""
        async with contextlib.AsyncExitStack() as stack:
            for slot in self.slots:
                await stack.enter_async_context(slot.lock)
            yield self.slots

    # What can be done to a process

    async def start(self, slot: Slot) -> None:
        """Start a process in a slot that has none, and wait until it is ready."""
        assert slot.member is None
        slot.incarnation += 1
        label = f"p{slot.number}.{slot.incarnation}"
        part = Part(
            label=label,
            slot=slot.number,
            slots=len(self.slots),
            url=self._engine.url,
            folder=str(self._folder),
            window=self._windows[slot.number],
            seed=f"{self._seed} {label}",
            plain=self._engine.plain,
            one_writer=self._engine.one_writer,
            frugal=self._engine.frugal,
            keeps_rates=self._engine.keeps_rates,
            shows_waits=self._engine.shows_waits,
        )
        errors = self._folder / f"{label}.err"
        with errors.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._program, part.to_json()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **self._engine.environment(slot.number)},
                cwd=_ROOT,  # where this package is found
                start_new_session=True,  # Ctrl-C is for us, and we end it
            )
        slot.member = Member(part, process, errors)
        if not await slot.member.until("ready"):
            self.fail(slot.member, "did not become ready")

    def pause(self, member: Member) -> None:
        """SIGSTOP."""
        self._journal.record(Paused(self._journal.now(), member.label))
        member.signal(signal.SIGSTOP)

    def resume(self, member: Member) -> None:
        """SIGCONT."""
        member.signal(signal.SIGCONT)
        self._journal.record(Continued(self._journal.now(), member.label))

    def kill(self, slot: Slot) -> Member | None:
        """SIGKILL; the slot is empty afterwards. Whoever gets the process reaps it (`end`)."""
        member, slot.member = slot.member, None
        if member is not None:
            member.excused = True
            self._journal.record(Crashed(self._journal.now(), member.label))
            member.signal(signal.SIGKILL)
        return member

    async def bury(self, member: Member) -> None:
        """Kill a process that is in no slot any more, and reap it."""
        self._journal.record(Crashed(self._journal.now(), member.label))
        await member.end()

    # All of them together

    async def start_all(self) -> None:
        """Have a process in every slot."""
        empty = [slot for slot in self.slots if slot.member is None]
        await asyncio.gather(*(self.start(slot) for slot in empty))

    async def order(self, order: str, answer: str) -> None:
        """Give all of them an order, and wait until each has said that it is carried out."""
        for member in self.members:
            member.tell(order)
        for member in self.members:
            if not await member.until(answer):
                self.fail(member, f"did not carry out the order to {order}")

    async def finish(self) -> None:
        """Have all of them end by themselves."""
        for member in self.members:
            member.tell("finish")
        for slot in self.slots:
            if slot.member is not None and await slot.member.ended() != 0:
                self.fail(slot.member, "did not end well")

    async def end(self) -> None:
        """Whatever is still there ends now."""
        for slot in self.slots:
            if slot.member is not None:
                await slot.member.end()

    def check_alive(self) -> None:
        """Take note of those that have ended by themselves."""
        for member in self.members:
            if member._over() and not member.excused:
                self._journal.record(Crashed(self._journal.now(), member.label))
                self.fail(member, "ended by itself")

    def fail(self, member: Member, what: str) -> None:
        """Take note of a process that did what it should not, or did not do what it should."""
        member.excused = True
        status = member._process.returncode
        ending = "it still runs" if status is None else f"its exit status is {status}"
        self.failures.append(f"process {member.label} {what}: {ending}; {member.complaint()}")
