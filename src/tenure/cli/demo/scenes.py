"""Scenes of the demo, one after the other, each with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

import tenure
from tenure.cli.demo.crew import DemoWorker
from tenure.cli.demo.history import DemoEvent, Finding, History, Look
from tenure.cli.output import shortened

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
