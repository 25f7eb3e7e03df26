"""What can be done to any engine's clients, and what an administrator can do: no engine's help.

A pause is shorter than a third of the window, so that nothing may be lost for it, or longer than
the window, so that others must go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import tenure
from chaos.adapter import Fault, NotNow, Scene
from chaos.crew import Member, Slot
from chaos.work import (
    ELECTION,
    HIGHEST_LIMIT,
    MUTEXES,
    NODE,
    POOLS,
    RESIZED,
    SEVERAL,
    SHARED,
    label_in,
)

_SETBACK = 0.1
"""Seconds after which a store that is out of order is tried again."""

_TRIES = 50
"""So many moments are tried, at the most, to find one that is fit for a fault."""


def everywhere() -> Sequence[Fault]:
    """Return the faults that need no help of the engine."""
    return (
        Fault("pause", "a process is stopped, and goes on within its window", _pause, (0.05, 0.3)),
        Fault("long-pause", "a process is stopped for longer than its window", _long, (3.0, 4.5)),
        Fault("stall", "an event loop is stuck", _stall, (0.3, 1.0)),
        Fault("kill", "kill -9 of a process, which starts again", _kill, (0.05, 1.5)),
        Fault("kill-several", "kill -9 of some at once, which start again", _several, (0.05, 1.5)),
        Fault("boot", "kill -9 of all at once: nobody has the store open", _boot, (0.2, 1.0)),
        Fault(
            "supplant",
            "a successor while the process is only stopped",
            _supplant,
            (0.5, 3.0),
        ),
        Fault("evict", "an administrator takes requests out of a queue", _evict, (0.1, 0.3)),
        Fault("end-session", "an administrator ends a session", _end_session, (0.1, 0.3)),
        Fault("delete", "an administrator deletes a semaphore by force", _delete, (0.3, 0.8)),
    )


def resizing() -> Sequence[Fault]:
    """Return what an administrator does all the time, whatever else is broken."""
    return (Fault("resize", "an administrator changes a limit", _resize, (0.05, 0.5)),)


# Processes


@asynccontextmanager
async def stopped(scene: Scene, member: Member) -> AsyncIterator[None]:
    """Stop a process for the block."""
    scene.crew.pause(member)
    try:
        while _state(member.pid) not in "TZX":  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0)
        yield
    finally:
        scene.crew.resume(member)


@asynccontextmanager
async def killed(scene: Scene, slots: Sequence[Slot]) -> AsyncIterator[None]:
    """Kill the processes in these slots for the block; they have successors after it."""
    dead = [scene.crew.kill(slot) for slot in slots]
    try:
        for member in dead:
            if member is not None:
                await member.end()
        yield
    finally:
        for slot in slots:
            await scene.crew.start(slot)


@asynccontextmanager
async def _pause(scene: Scene) -> AsyncIterator[str]:
    async with scene.crew.one(scene.random) as slot:
        assert slot.member is not None
        async with stopped(scene, slot.member):
            yield slot.member.label


@asynccontextmanager
async def _long(scene: Scene) -> AsyncIterator[str]:
    """At a moment that lets the others go on; the other moments are a fault of their own."""
    async with scene.crew.one(scene.random) as slot:
        assert slot.member is not None
        for _ in range(_TRIES):
            async with stopped(scene, slot.member):
                if not scene.engine.holds_up_all(slot.member.pid):
                    yield slot.member.label
                    return
            await asyncio.sleep(_SETBACK / 10)
        raise NotNow(f"{slot.member.label} would have held up the others each time")


@asynccontextmanager
async def _stall(scene: Scene) -> AsyncIterator[str]:
    async with scene.crew.one(scene.random) as slot:
        assert slot.member is not None
        slot.member.tell("stall", seconds=round(scene.random.uniform(0.2, 1.0), 3))
        yield slot.member.label


@asynccontextmanager
async def _kill(scene: Scene) -> AsyncIterator[str]:
    async with scene.crew.one(scene.random) as slot:
        assert slot.member is not None
        label = slot.member.label
        async with killed(scene, [slot]):
            yield label


@asynccontextmanager
async def _several(scene: Scene) -> AsyncIterator[str]:
    async with scene.crew.all() as slots:
        some = scene.random.sample(slots, max(1, len(slots) // 2))
        async with killed(scene, some):
            yield f"{len(some)} processes"


@asynccontextmanager
async def _boot(scene: Scene) -> AsyncIterator[str]:
    async with scene.crew.all() as slots, killed(scene, slots):
        yield f"{len(slots)} processes"


@asynccontextmanager
async def _supplant(scene: Scene) -> AsyncIterator[str]:
    """Continue a stopped process, and kill it only after it has had time to look around."""
    async with scene.crew.one(scene.random) as slot:
        former = slot.member
        assert former is not None
        async with stopped(scene, former):
            slot.member = None
            try:
                await scene.crew.start(slot)
                yield former.label
            except BaseException:
                await scene.crew.bury(former)
                raise
        former.tell("freeze")
        if not await former.until("frozen"):
            scene.crew.fail(former, "did not go on after its stop")
        await scene.crew.bury(former)


# Administrators


@asynccontextmanager
async def _evict(scene: Scene) -> AsyncIterator[str]:
    name = scene.random.choice((*MUTEXES, *SEVERAL, *POOLS, RESIZED, SHARED, SHARED, ELECTION))
    async with tenure.connect(scene.engine.admin_url) as admin:
        try:
            found = await admin.describe_semaphore(name, NODE)
        except tenure.SemaphoreNotFound:
            raise NotNow(f"nobody has or wants {name}") from None
        requests = [*found.owners[:2], *found.waiters[:1]]
        if not requests:
            raise NotNow(f"nobody has or wants {name}")
        for request in requests:
            label = label_in(request.data)
            scene.journal.revokes(request=label)
            if name == SHARED:
                scene.journal.revokes(request=f"{label}/key")  # its program releases it
            with suppress(tenure.SemaphoreNotFound):  # a mutex that nobody wants any more
                await admin.evict(NODE, name, request.order_id)
    yield f"{len(requests)} requests for {name}"


@asynccontextmanager
async def _end_session(scene: Scene) -> AsyncIterator[str]:
    async with tenure.connect(scene.engine.admin_url) as admin:
        sessions = [each for each in await admin.list_sessions(NODE) if scene.crew.knows(each)]
        if not sessions:
            raise NotNow("there are no sessions")
        session = scene.random.choice(sessions)
        labels = scene.crew.successors(session.description)
        # Said again afterwards, for what was asked for in between.
        for label in labels:
            scene.journal.revokes(session_of=label, node=NODE)
        await admin.end_session(NODE, session.id)
        for label in labels:
            scene.journal.revokes(session_of=label, node=NODE)
    yield session.description


@asynccontextmanager
async def _delete(scene: Scene) -> AsyncIterator[str]:
    """Remove it and put it back; nothing is granted in between."""
    name, limit = scene.random.choice(list(POOLS.items()))
    try:
        async with tenure.connect(scene.engine.admin_url) as admin, admin.session(NODE) as session:
            scene.journal.revokes(node=NODE, name=name)
            await session.semaphore(name).delete(force=True)
        yield name
    finally:
        scene.journal.revokes(node=NODE, name=name)  # what was asked for in between
        await create(scene.engine.admin_url, name, limit)


@asynccontextmanager
async def _resize(scene: Scene) -> AsyncIterator[str]:
    """Change a limit; the session's queue of operations carries it out during an outage, too."""
    limit = scene.random.randint(1, HIGHEST_LIMIT)
    async with tenure.connect(scene.engine.admin_url) as admin, admin.session(NODE) as session:
        try:
            await scene.journal.resize(session.semaphore(RESIZED), limit)
        except tenure.SemaphoreNotFound:
            raise NotNow(f"there is no {RESIZED}") from None
        except tenure.Unsupported as error:
            raise NotNow(str(error)) from None
    yield f"{RESIZED} to {limit}"


async def create(url: str, name: str, limit: int) -> None:
    """Create a semaphore, however long the store is out of order."""
    while True:
        try:
            async with tenure.connect(url) as admin, admin.session(NODE) as session:
                await session.semaphore(name).create(limit, exist_ok=True)
                return
        except (tenure.EngineError, tenure.EngineUnavailable, tenure.SessionExpired):
            await asyncio.sleep(_SETBACK)


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; X when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
