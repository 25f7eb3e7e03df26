"""A program with one engine and one session, told what to do line by line.

``python -m tests.engines.sqlite.worker URL`` reads a command per line from standard input, as JSON,
and writes what came of it, and everything that the engine tells the session, to standard output.
`Worker` is its other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from tenure.clock import SystemClock
from tenure.engines.contract import Attach, EngineSession, Enqueued, Removal, Withdrawn
from tenure.engines.sqlite import connect, monitor
from tenure.engines.sqlite.session import SqliteSession
from tenure.errors import Misuse, SessionExpired, TenureError
from tenure.model import EPHEMERAL_LIMIT, Liveness, Recovered
from tenure.testing.program import answer_of

PATIENCE = 30.0
"""Seconds after which something that a test waits for is taken to be lost."""


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Refused(Exception):
    """What was asked for raised an error: the name of its class, and its text."""


class Worker:
    """A worker process, as a test sees it. `start` makes one."""

    module = "tests.engines.sqlite.worker"
    """What the process runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._numbers = itertools.count()
        self._heard: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        url: str,
        *,
        window: float = 30.0,
        renew: bool = True,
        attach: bool = True,
        through: Sequence[str] = (),
    ) -> Self:
        """Start one; `through` is a command that runs the command at its end."""
        process = await asyncio.create_subprocess_exec(
            *(*through, sys.executable, "-W", "error", "-m", cls.module, url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = cls(process)
        if attach:
            await worker.do("attach", window=window, renew=renew)
        return worker

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, what: str, **arguments: Any) -> int:
        """Tell it to do something, without waiting for the outcome."""
        number = next(self._numbers)
        line = json.dumps({"number": number, "do": what, **arguments})
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        return number

    async def outcome(self, number: int) -> Any:
        """What came of something that was sent."""
        heard = await self.hear("outcome", number=number)
        if "error" in heard:
            raise Refused(heard["error"])
        return heard["result"]

    async def do(self, what: str, **arguments: Any) -> Any:
        """Have it do something, and return the outcome."""
        return await self.outcome(self.send(what, **arguments))

    async def hear(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Wait for something that it says, and return the first that fits."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for heard in self._heard:
                    if heard["kind"] == kind and facts.items() <= heard.items():
                        return heard
                self.news.clear()
                await self.news.wait()

    def holds(self) -> list[tuple[int, float, float]]:
        """(token, begin, end) of what `contend` has held; what was cut off has no end."""
        begins = {each["token"]: each["at"] for each in self._heard if each["kind"] == "begin"}
        ends = {each["token"]: each["at"] for each in self._heard if each["kind"] == "end"}
        return [(token, at, ends.get(token, math.inf)) for token, at in begins.items()]

    def heard(self, kind: str, **facts: Any) -> list[dict[str, Any]]:
        """What it has said that fits."""
        return [h for h in self._heard if h["kind"] == kind and facts.items() <= h.items()]

    def has_heard(self, kind: str, **facts: Any) -> bool:
        return bool(self.heard(kind, **facts))

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self._heard.append(json.loads(line))
            self.news.set()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is dead."""
        self.signal(signal.SIGKILL)
        await self.process.wait()

    def kill_unheard(self) -> None:
        """The same, but the event loop stands still, so that nothing here has heard of it yet."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # asyncio's own thread was faster
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    async def end(self) -> None:
        """See to it that it is gone."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        await self._listening
        assert self.process.stdin is not None
        self.process.stdin.close()


# In the process


def say(kind: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, "at": now(), **facts}) + "\n")
    sys.stdout.flush()


class Events:
    """Says everything that the engine tells, but for proofs."""

    proof = 0.0
    told_granted: Callable[[int], None] | None = None

    def proven(self, at: float) -> None:
        self.proof = at

    def resumed(self, requests: Sequence[Recovered]) -> None:
        say("resumed", requests=len(requests))

    def granted(self, hold: int, order_id: int | None) -> None:
        if self.told_granted is not None:
            self.told_granted(hold)
        else:
            say("granted", hold=hold, order_id=order_id)

    def removed(self, hold: int, why: Removal) -> None:
        say("removed", hold=hold, why=why.value)

    def detached(self, cause: BaseException | None = None) -> None:
        say("detached")

    def attached(self) -> None:
        say("attached")

    def ended(self, error: SessionExpired) -> None:
        say("ended", error=str(error))


class Program:
    """Carries out the commands."""

    session: EngineSession

    def __init__(self, url: str) -> None:
        self.engine: Any = connect(url, SystemClock())
        self.events = Events()
        self.stops: dict[str, Callable[[], None]] = {}
        self.children: list[int] = []

    async def do_open(self) -> None:
        await self.engine.open()

    async def do_attach(self, window: float, renew: bool, liveness: Liveness = "process") -> int:
        await self.engine.open()
        how = Attach("/default", window, liveness=liveness)
        self.session = await self.engine.attach(how, self.events)
        if renew:
            self._renew(window / 3)
        return self.session.id

    def _renew(self, interval: float) -> None:
        self.session.renew()
        asyncio.get_running_loop().call_later(interval, self._renew, interval)

    async def do_renew(self) -> bool:
        before = self.events.proof
        self.session.renew()
        return self.events.proof > before

    async def do_enqueue(
        self,
        hold: int,
        name: str,
        count: int = EPHEMERAL_LIMIT,
        timeout: float | None = None,
        ephemeral: bool = True,
    ) -> list[Any]:
        answer = self.session.enqueue(hold, name, count, b"", timeout=timeout, ephemeral=ephemeral)
        place = answer if isinstance(answer, Enqueued) else await answer
        return [place.place.name, place.order_id]

    async def do_withdraw(self, hold: int) -> bool:
        return await answer_of(self.session.withdraw(hold)) is Withdrawn.LEFT

    async def do_create(self, name: str, limit: int) -> None:
        await self.session.create_semaphore(name, limit, b"", exist_ok=True)

    async def do_update(self, name: str, data: str) -> None:
        await self.session.update_semaphore(name, data.encode())

    async def do_watch(self, name: str, data: bool, owners: bool) -> None:
        self.stops[name] = self.session.watch(
            name, data=data, owners=owners, changed=lambda: say("changed", name=name)
        )

    async def do_owners(self, name: str) -> list[int]:
        found = await self.session.describe_semaphore(name, owners=True, waiters=False)
        return [owner.session_id for owner in found.owners]

    async def do_close(self) -> None:
        await self.engine.aclose()

    async def do_read(self, path: str) -> None:
        """Open a file and close it, which drops all locks of `fcntl` of this process on it."""
        with open(path, "rb") as file:  # noqa: ASYNC230  nothing else runs here
            file.read()

    async def do_fork(self) -> int:
        """A child that lives on without any of this, and has let go of it already."""
        ready, say_ready = os.pipe()
        child = os.fork()  # noqa: TID251  a forked child is the subject
        if child == 0:
            try:
                os.close(sys.stdout.fileno())
                os.write(say_ready, b"x")
                signal.pause()
            finally:
                os._exit(0)
        os.read(ready, 1)
        os.close(ready)
        os.close(say_ready)
        return child

    async def do_use_in_a_child(self) -> int:
        """The exit status of a forked child that uses the engine and drops it: 0 if refused."""
        child = os.fork()  # noqa: TID251  a forked child is the subject
        if child == 0:
            status = 1
            try:
                self.engine._opened()
            except Misuse:
                connection = self.engine.store.tx.connection
                del self.engine, self.session
                del connection
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222  it ends at once

    async def do_inherit(self) -> int:
        """A child that keeps the sign of life, as the command of `tenure run` does."""
        fd = os.dup(self.engine.liveness_fd())
        os.set_inheritable(fd, True)
        child = os.posix_spawn(  # noqa: ASYNC221  it does not wait
            sys.executable,
            [sys.executable, "-c", "import signal; signal.pause()"],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)],
        )
        os.close(fd)
        return child

    async def do_contend(self, name: str, seconds: float) -> None:
        """Take and release a mutex for a while, and say what was held when."""
        granted: dict[int, asyncio.Event] = {}
        self.events.told_granted = lambda hold: granted[hold].set()
        until = now() + seconds
        for hold in itertools.count(1000):
            if now() > until:
                return
            granted[hold] = asyncio.Event()
            place, token = await self.do_enqueue(hold, name)
            if place == "WAITING":
                await granted[hold].wait()
            say("begin", token=token)
            await asyncio.sleep(0)
            say("end", token=token)
            await self.do_withdraw(hold)

    async def do_cpu(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    async def do_look_no_more(self) -> None:
        look_no_more(self.engine)

    async def do_deaf(self) -> None:
        """Hear no bell any more."""
        self.engine.monitor.notified = lambda: None
        store = self.engine.store
        store.loop.remove_reader(store.notifier._socket.fileno())

    async def do_exit(self) -> None:
        os._exit(0)

    async def aclose(self) -> None:
        await self.engine.aclose()


def look_no_more(engine: Any) -> None:
    """Notice in good time only what is told at once, and nothing by looking again and again."""
    monitor._TICK = monitor._TICK_WAITING = 3600.0
    SqliteSession.check_every = 3600.0
    engine.monitor._timer.cancel()


def is_taking_over(engine: Any) -> bool:
    """Whether a takeover by this engine has reached the store, and is not complete."""
    return any(each.early is not None for each in engine.monitor.delivery.sessions.values())


class Obedient(Protocol):
    """Has a method ``do_X`` for each command ``X``."""

    async def aclose(self) -> None: ...


async def obey(program: Obedient, command: dict[str, Any]) -> None:
    number, what = command.pop("number"), command.pop("do")
    try:
        result = await getattr(program, f"do_{what}")(**command)
    except TenureError as error:
        say("outcome", number=number, error=f"{type(error).__name__}: {error}")
    else:
        say("outcome", number=number, result=result)


async def serve(program: Obedient) -> None:
    """Do what standard input says, until it ends."""
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    tasks = set()
    while line := await reader.readline():
        task = asyncio.create_task(obey(program, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await program.aclose()


async def main(url: str) -> None:
    await serve(Program(url))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
