"""Scenes of the demo, one after the other, each with real processes.

Recorded history of a demo, and the checks of it.

Every process records what it does, with times on the boot-time clock, which all processes of a host
share. It records a grant after receiving it, and a release before sending it. So a recorded lease
is never longer than the real one, and an overlap in the record is a real overlap.

Each check is computed from the record alone and returns a `Finding`. A check without data fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tenure
from tenure.cli.mistakes import Mistake, Status
from tenure.cli.output import shortened

What = Literal["requested", "queued", "granted", "released", "killed", "written", "seen", "done"]


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """Something that a process did or observed.

    Attributes:
        at: seconds, on the boot-time clock.
        who: the process.
        what: ``queued`` means that the request was known to be in the queue by then; ``killed`` and
            ``written`` are recorded just before the signal or the write.
        name: the name of the mutex, semaphore or election.
        token: the fencing token, where known.
        count: number of tokens of the semaphore.
        data: the data written or seen.
    """

    at: float
    who: str
    what: What
    name: str
    token: int | None = None
    count: int = 1
    data: str = ""

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self))


def parse(line: str | bytes) -> DemoEvent:
    """Return the event that `DemoEvent.to_json` has written."""
    return DemoEvent(**json.loads(line))


@dataclass(frozen=True, slots=True)
class Look:
    """State of a queue at one instant: each owner and each waiter as (token, count)."""

    name: str
    limit: int
    owners: tuple[tuple[int, int], ...]
    waiters: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DemoHold:
    """One request: when it was sent, known to be queued, granted, and ended."""

    who: str
    token: int
    count: int
    requested: float
    queued: float
    granted: float
    ended: float
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; `figure` is a measured duration in seconds."""

    holds: bool
    text: str
    figure: float | None = None


class History:
    """The record of a demo."""

    def __init__(self) -> None:
        self.events: list[DemoEvent] = []
        self.looks: list[Look] = []

    def about(self, name: str, *what: What) -> list[DemoEvent]:
        """Return the events of some kinds about one name, ordered by time."""
        found = [each for each in self.events if each.name == name and each.what in what]
        return sorted(found, key=lambda each: each.at)

    def write(self, file: Path) -> None:
        """Keep the events, as JSON lines."""
        file.write_text("".join(each.to_json() + "\n" for each in self.events), encoding="utf-8")

    def holds(self, name: str) -> list[DemoHold]:
        """Every granted request, in the order of the grants."""
        killed = {each.who: each.at for each in self.events if each.what == "killed"}
        found: list[DemoHold] = []
        mine = self.about(name, "requested", "queued", "granted", "released")
        for who in sorted({each.who for each in mine}):
            requested = queued = None
            for event in (each for each in mine if each.who == who):
                if event.what == "requested":
                    requested, queued = event, None
                elif event.what == "queued":
                    queued = event
                elif event.what == "granted":
                    assert requested is not None, "a grant follows a request"
                    assert event.token is not None, "a grant has a token"
                    found.append(
                        DemoHold(
                            who,
                            event.token,
                            event.count,
                            requested.at,
                            event.at if queued is None else queued.at,
                            event.at,
                            killed.get(who, float("inf")),
                            killed=who in killed,
                        )
                    )
                else:
                    found.append(replace(found.pop(), ended=event.at, killed=False))
        return sorted(found, key=lambda each: each.granted)

    # The checks

    def check_limit(self, name: str, limit: int) -> Finding:
        """Check that never more than the limit was held."""
        holds = self.holds(name)
        # A request that ends in the instant in which another begins does not overlap it.
        steps = sorted(
            step
            for each in holds
            for step in ((each.granted, each.count), (each.ended, -each.count))
        )
        most = max(itertools.accumulate((count for _, count in steps)), default=0)
        what = "overlaps" if limit == 1 else f"more than {limit} at once"
        if not holds or most > limit:
            return Finding(False, f"{name}: {most} held at once, of {limit}")
        return Finding(True, f"{name}: {len(holds)} grants, at most {most} at once; {what}: none")

    def check_tokens(self, name: str, limit: int) -> Finding:
        """Check that a request granted after the end of another has a higher token.

        A process may record its grant late. So two requests that fit into the limit together are
        compared only if one ended before the other was sent.
        """
        holds = self.holds(name)
        pairs = [
            (a, b)
            for a, b in itertools.permutations(holds, 2)
            if a.ended <= (b.granted if a.count + b.count > limit else b.requested)
        ]
        wrong = [(a, b) for a, b in pairs if a.token >= b.token]
        if wrong:
            before, after = wrong[0]
            return Finding(
                False,
                f"{name}: {after.who} has token {after.token}, after {before.who} with "
                f"{before.token}",
            )
        return Finding(bool(pairs), f"{name}: fencing tokens rise in all {len(pairs)} comparisons")

    def check_arrival(self, name: str) -> Finding:
        """Check that a request queued before another was sent is granted before it."""
        holds = self.holds(name)
        pairs = [(a, b) for a, b in itertools.permutations(holds, 2) if a.queued < b.requested]
        wrong = [(a, b) for a, b in pairs if a.token > b.token]
        if wrong:
            first, second = wrong[0]
            return Finding(
                False, f"{name}: {second.who} came after {first.who}, and was served before"
            )
        return Finding(
            bool(pairs), f"{name}: served in the order of arrival in all {len(pairs)} comparisons"
        )

    def check_looks(self, name: str) -> Finding:
        """Check that the owners were always the longest queue prefix within the limit."""
        looks = [each for each in self.looks if each.name == name]
        for look in looks:
            queue = sorted((*look.owners, *look.waiters))
            fitting = 0
            for position, (_, count) in enumerate(queue):
                fitting += count
                if fitting > look.limit:
                    queue = queue[:position]
                    break
            if sorted(look.owners) != queue:
                return Finding(False, f"{name}: owners {look.owners}, waiters {look.waiters}")
        busy = sum(bool(each.waiters) for each in looks)
        return Finding(
            bool(busy),
            f"{name}: in order, and never idle, in {busy} looks into a queue that waited",
        )

    def check_takeover(self, name: str) -> Finding:
        """Check that another process led after the leader was killed; the figure is the delay."""
        for kill in (each for each in self.events if each.what == "killed"):
            holds = self.holds(name)
            after = [each for each in holds if each.granted > kill.at and each.who != kill.who]
            if any(each.who == kill.who for each in holds) and after:
                gap = after[0].granted - kill.at
                text = f"{name}: {after[0].who} took over from {kill.who} after its kill -9"
                return Finding(True, text, gap)
        return Finding(False, f"{name}: no process took over from a killed leader")

    def check_watchers(self, name: str, watchers: Iterable[str]) -> Finding:
        """Check that all watchers saw states in order, up to the last; the figure is the delay."""
        written = self.about(name, "written")
        order = {each.data: number for number, each in enumerate(written)}
        when = {each.data: each.at for each in written}
        delays: list[float] = []
        for who in watchers:
            seen = [each for each in self.about(name, "seen") if each.who == who]
            numbers = [order.get(each.data, -1) for each in seen]
            wrong = -1 in numbers or numbers != sorted(set(numbers))
            if wrong or not seen or numbers[-1] != len(written) - 1:
                states = [each.data for each in seen]
                return Finding(False, f"{name}: {who} has seen {states}")
            delays += [each.at - when[each.data] for each in seen if each.data in when]
        if not delays:
            return Finding(False, f"{name}: no process has seen anything")
        text = (
            f"{name}: every watcher saw the last of {len(written)} states, none went back; median"
        )
        return Finding(True, f"{text} delay", statistics.median(delays))


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


SLOTS = 4
STATES = [f"version {number}" for number in range(1, 6)]


@dataclass(slots=True)
class DemoStage:
    """Client, session, workers and history of a scene."""

    client: tenure.Client
    session: tenure.Session
    crew: list[DemoWorker]
    history: History

    def note(self, event: DemoEvent) -> None:
        """Record an action of the demo itself."""
        self.history.events.append(event)

    async def look(self, name: str) -> tenure.SemaphoreDescription | None:
        """Read a queue and record its state; ``None`` when it does not exist."""
        try:
            seen = await self.session.semaphore(name).describe(owners=True, waiters=True)
        except tenure.SemaphoreNotFound:
            return None
        self.history.looks.append(
            Look(
                name,
                seen.limit,
                tuple((each.order_id, each.count) for each in seen.owners),
                tuple((each.order_id, each.count) for each in seen.waiters),
            )
        )
        return seen

    async def while_looking(
        self, name: str, works: Iterable[Coroutine[object, object, object]]
    ) -> None:
        """Read a queue repeatedly until all the works are done."""
        async with asyncio.TaskGroup() as group:
            working = {group.create_task(work) for work in works}
            while working:
                await self.look(name)
                _, working = await asyncio.wait(working, timeout=0.01)


@dataclass(frozen=True, slots=True)
class Scene:
    """One scene: its title, its actions, and its checks."""

    name: str
    title: str
    play: Callable[[DemoStage], Awaitable[None]]
    check: Callable[[History], Sequence[Finding]]
    describe: Callable[[History], Sequence[str]] = lambda _: ()


async def _hand_round(stage: DemoStage) -> None:
    """Let six processes queue for one mutex, one after the other, twice."""
    first, *others = stage.crew[:6]
    order = {"do": "lock", "name": "nightly", "turns": 2, "hold": 0.03}
    first.send(**order, wait=True)
    await first.until(lambda events: any(each.what == "granted" for each in events))
    for place, member in enumerate(others, start=1):
        member.send(**order, wait=False)
        seen = await stage.look("nightly")
        while seen is None or len(seen.waiters) < place:
            await asyncio.sleep(0.002)
            seen = await stage.look("nightly")
        now = stage.client.clock.now()
        token = seen.waiters[-1].order_id
        stage.note(DemoEvent(now, member.who, "queued", "nightly", token))
    first.send(go=True)
    await stage.while_looking("nightly", [each.finish() for each in [first, *others]])


def _check_mutex(history: History) -> list[Finding]:
    return [
        history.check_limit("nightly", 1),
        history.check_tokens("nightly", 1),
        history.check_arrival("nightly"),
        history.check_looks("nightly"),
    ]


async def _share(stage: DemoStage) -> None:
    """Let eight processes share four slots; every fourth of them takes two at a time."""
    await stage.session.semaphore("gpu").create(limit=SLOTS)
    for number, member in enumerate(stage.crew):
        count = 2 if number % 4 == 3 else 1
        member.send(do="share", name="gpu", turns=3, hold=0.05, count=count)
    await stage.while_looking("gpu", [each.finish() for each in stage.crew])


def _describe_order(history: History) -> list[str]:
    holds = history.holds("nightly")
    common, tokens = shortened([each.token for each in holds])
    begin = f" (all begin with {common})" if common else ""
    return [
        "order: " + " ".join(each.who for each in holds),
        f"fencing tokens: {tokens[0]} to {tokens[-1]}{begin}",
    ]


def _check_slots(history: History) -> list[Finding]:
    return [
        history.check_limit("gpu", SLOTS),
        history.check_tokens("gpu", SLOTS),
        history.check_arrival("gpu"),
        history.check_looks("gpu"),
    ]


async def _elect(stage: DemoStage) -> None:
    """Let four candidates campaign; the leader is killed, and the next one leads."""
    candidates = stage.crew[:4]
    clock = stage.client.clock
    for member in candidates:
        member.send(do="lead", name="primary")
    async with stage.session.election("primary").observe() as leaders:
        killed: DemoWorker | None = None
        async for leader in leaders:
            if leader is None:
                continue
            leading = next(each for each in candidates if each.who == leader.data.decode())
            stage.note(DemoEvent(clock.now(), "observer", "seen", "primary", leader.term))
            if killed is not None and leading is not killed:
                break
            if killed is None:
                await _until_candidates(stage, len(candidates) - 1)
                await leading.until(_has_led)  # the store knows it before the process has said so
                killed = leading
                stage.note(DemoEvent(clock.now(), leading.who, "killed", "primary"))
                leading.kill()
    assert killed is not None
    stage.crew.remove(killed)
    for member in candidates:
        if member is not killed:
            member.send(go="resign")
    for member in stage.crew:
        if member in candidates:
            await member.finish()


def _has_led(events: list[DemoEvent]) -> bool:
    return any(each.what == "granted" and each.name == "primary" for each in events)


async def _until_candidates(stage: DemoStage, waiting: int) -> None:
    """Wait until so many candidates wait."""
    seen = await stage.look("primary")
    while seen is None or len(seen.waiters) < waiting:
        await asyncio.sleep(0.002)
        seen = await stage.look("primary")


def _check_election(history: History) -> list[Finding]:
    return [
        history.check_takeover("primary"),
        history.check_limit("primary", 1),
        history.check_tokens("primary", 1),
    ]


async def _configure(stage: DemoStage) -> None:
    """Let all processes watch a semaphore's data, which changes."""
    config = stage.session.semaphore("config")
    await config.create(limit=1, data=STATES[0].encode())
    stage.note(DemoEvent(stage.client.clock.now(), "demo", "written", "config", data=STATES[0]))
    for member in stage.crew:
        member.send(do="watch", name="config", last=STATES[-1])
    for member in stage.crew:
        await member.until(lambda events: any(each.name == "config" for each in events))
    for state in STATES[1:]:
        stage.note(DemoEvent(stage.client.clock.now(), "demo", "written", "config", data=state))
        await config.update(state.encode())
        await asyncio.sleep(0.05)
    for member in stage.crew:
        await member.finish()


def _check_config(history: History) -> list[Finding]:
    seen = {each.who for each in history.about("config", "seen")}
    return [history.check_watchers("config", sorted(seen))]


def _describe_changes(history: History) -> list[str]:
    lines: list[str] = []
    for change in history.about("config", "written"):
        seen = [each.at for each in history.about("config", "seen") if each.data == change.data]
        if seen and change.data != STATES[0]:  # the first one may precede the watchers
            late = (max(seen) - change.at) * 1000
            lines.append(f"{change.data} seen by {len(seen)}, the last after {late:.1f} ms")
    return lines


SCENES = (
    Scene(
        "nightly",
        "One mutex, six processes, in the order of arrival",
        _hand_round,
        _check_mutex,
        _describe_order,
    ),
    Scene("gpu", "Four slots, eight processes; two of them take two slots", _share, _check_slots),
    Scene("primary", "One leader of four; kill -9 the leader", _elect, _check_election),
    Scene(
        "config",
        "Data changed under a watch, and seen by all",
        _configure,
        _check_config,
        _describe_changes,
    ),
)
