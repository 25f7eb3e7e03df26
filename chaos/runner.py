"""A run from its beginning to its end: a store, processes, faults, peace, the truth, the histories.

The folder of a run holds a history of each process (``*.history``), what each complained about
(``*.err``), and ``run.json``: what was done. `chaos.report` makes figures of that, now or later.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import tenure
from chaos.adapter import Engine, Fault, Scene
from chaos.crew import Crew
from chaos.faults import create, everywhere, resizing
from chaos.nemesis import Nemesis
from chaos.work import (
    CONFIGS,
    ELECTION,
    IMPLICIT,
    KEYS,
    KNOT,
    KNOT_LIMIT,
    MUTEXES,
    NODE,
    POOLS,
    RESIZED,
    RESIZED_LIMIT,
    SEVERAL,
    SHARED,
    SHARED_LIMIT,
    TANGLED,
    of_key,
    resumable,
)
from tenure.model import DEFAULT_NODE, NodeConfig
from tenure.testing.history import AppendOnly, Journal, Truth

_WINDOWS = (1.5, 2.0, 2.5)
"""Seconds of recovery window, by slot: short, so that a pause may last longer."""

_SETTLING = 30.0
"""Seconds in which a healed store settles; what still changes then is no state to check."""

_QUIET = 0.25
"""Seconds between two looks at a store that settles; it has when four in a row are alike."""

_STUCK = 90.0
"""Seconds within which every request that is there when the faults end has left its queue.

The sessions of the dead expire first, and a queue is as long as there are tasks.
"""

Names = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do.

    Attributes:
        seconds: how long faults are inflicted; ``None``: until each has been, once.
        seed: of all choices.
        processes: how many.
        faults: the names of those to inflict; empty for all.
        program: the module that a process runs.
    """

    seconds: float | None = 60.0
    seed: int = 1
    processes: int = 5
    faults: tuple[str, ...] = ()
    program: str = "chaos.worker"


async def run(engine: Engine, plan: Plan, folder: Path) -> None:
    """Do it, and leave everything that is known of it in the folder.

    Raises:
        ValueError: a fault that the plan names is none of this engine's.
    """
    file = AppendOnly(folder / "nemesis.history")
    journal = Journal("nemesis", file)
    windows = [_WINDOWS[slot % len(_WINDOWS)] for slot in range(plan.processes)]
    crew = Crew(engine, folder, journal, windows, plan.seed, plan.program)
    facts: dict[str, object] = {"engine": engine.name, "seed": plan.seed, "windows": windows}
    try:
        await engine.start()
        scene = Scene(crew, engine, journal, Random(f"{plan.seed} nemesis"))
        nemesis = Nemesis(scene, _lanes(engine, plan.faults), plan.seed)
        if not engine.plain:
            await prepare(engine.admin_url, engine.nodes, journal)
        await crew.start_all()
        facts["begun"] = journal.now()
        if plan.seconds is None:
            await nemesis.torment_once()
        else:
            await nemesis.torment(plan.seconds)
        facts["ended"] = journal.now()
        await crew.start_all()
        stuck = await wait_for_progress(engine)
        await crew.order("freeze", "frozen")
        # The dead are still in their queues, rightly. So are, on every engine, resumable sessions
        # whose programs were killed before they had kept their tokens.
        await asyncio.sleep(max(engine.lingers, *windows))
        facts["settled"] = await _tell_the_truth(engine, journal, plan.processes)
        await crew.finish()
        facts["faults"] = [each.facts() for each in nemesis.inflicted]
    finally:
        await crew.end()
        await engine.stop()
        file.close()
    facts |= {"failures": [*crew.failures, *stuck], "not_done": engine.not_done}
    (folder / "run.json").write_text(json.dumps(facts, indent=1))


def _lanes(engine: Engine, names: Sequence[str]) -> list[list[Fault]]:
    """Return the engine's own faults, the rest, and changes of limits."""
    lanes = [
        list(engine.faults()),
        [fault for fault in everywhere() if fault.name not in engine.spares],
        [] if engine.plain else [*resizing()],
    ]
    known = {fault.name for lane in lanes for fault in lane}
    unknown = set(names) - known
    if unknown:
        raise ValueError(
            f"{engine.name} has no fault named {', '.join(sorted(unknown))} here; it has "
            f"{', '.join(sorted(known))}"
        )
    if names:
        lanes = [[fault for fault in lane if fault.name in names] for lane in lanes]
    return lanes


async def prepare(url: str, nodes: NodeConfig, journal: Journal) -> None:
    """Create what the processes compete for, in a store that has none of it."""
    async with tenure.connect(url) as client:
        await client.create_node(NODE, nodes)
        await client.alter_node(DEFAULT_NODE, nodes)
        async with client.session(NODE) as session:
            for name in CONFIGS:
                await journal.create(session.semaphore(name), 1, b"")
    limits = {**POOLS, ELECTION: 1, RESIZED: RESIZED_LIMIT, SHARED: SHARED_LIMIT, KNOT: KNOT_LIMIT}
    for name, limit in limits.items():
        await create(url, name, limit)


def _held_shortly(engine: Engine) -> list[tuple[str, str]]:
    """Return what is never held for long."""
    names = [*MUTEXES, *SEVERAL, *POOLS]
    if not engine.plain:
        names += [ELECTION, RESIZED, SHARED, *map(of_key, sorted({*KEYS}))]
    if engine.shows_waits:
        names += [*TANGLED, KNOT]
    return [(engine.seen_at, name) for name in names]


async def wait_for_progress(engine: Engine) -> list[str]:
    """Wait until all requests that are there now have left, and return what is stuck.

    So no waiters wait for each other, and none waits for a request without a program.
    """
    names = _held_shortly(engine)
    there: dict[tuple[str, str], set[int]] | None = None
    loop = asyncio.get_running_loop()
    until = loop.time() + _STUCK
    async with tenure.connect(engine.admin_url) as client:
        while there is None or any(there.values()):
            if there is not None and loop.time() > until:
                return [
                    f"{name!r} is stuck: {sorted(ids)} have been in its queue for {_STUCK:g} s"
                    for (_, name), ids in there.items()
                    if ids
                ]
            with suppress(tenure.EngineError, tenure.EngineUnavailable):
                seen = {
                    place: {*owners, *waiters}
                    for place, (_, owners, waiters) in (await _look(client, names)).items()
                }
                there = {
                    place: ids if there is None else ids & there[place]
                    for place, ids in seen.items()
                }
            await asyncio.sleep(_QUIET)
    return []


async def _tell_the_truth(engine: Engine, journal: Journal, slots: int) -> bool:
    """Wait until the store has settled, and record what it says; false when it never did."""
    here = engine.seen_at
    names = [*_held_shortly(engine), *((here, resumable(number)) for number in range(slots))]
    if not engine.plain:
        names += [(here, name) for name in CONFIGS]
    if not engine.lingers:
        names.append((DEFAULT_NODE, IMPLICIT))  # else the dead are there for 30 s, implicitly
    async with tenure.connect(engine.admin_url) as client:
        before, alike = await _look(client, names), 0
        until = journal.now() + _SETTLING
        while alike < 3 and journal.now() < until:
            await asyncio.sleep(_QUIET)
            seen = await _look(client, names)
            alike = alike + 1 if seen == before else 0
            before = seen
    if alike < 3:
        return False
    at = journal.now()
    for (node, name), (data, owners, waiters) in before.items():
        known = DEFAULT_NODE if engine.plain else node
        journal.record(Truth(at, known, name, data, owners, waiters))
    return True


State = tuple[bytes | None, tuple[int, ...], tuple[int, ...]]


async def _look(client: tenure.Client, names: Names) -> dict[tuple[str, str], State]:
    """Every semaphore as the store says."""
    state: dict[tuple[str, str], State] = dict.fromkeys(names, (None, (), ()))
    for node in {node for node, _ in names}:
        for found in await client.list_semaphores(node, owners=True, waiters=True):
            if (node, found.name) in state:
                state[node, found.name] = (
                    found.data,
                    tuple(owner.order_id for owner in found.owners),
                    tuple(waiter.order_id for waiter in found.waiters),
                )
    return state
