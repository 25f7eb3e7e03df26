"""What a simulated history is made of: what each process does, and what befalls it.

A plan is data. `draw` makes one of a seed; whatever is left of it when parts are taken out is a
plan too, which is how a failing one is made small (`tenure.testing.simulation.shrinking`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

__all__ = [
    "FAULTS",
    "LIMIT",
    "Fault",
    "FaultKind",
    "Kind",
    "Plan",
    "ProcessPlan",
    "Step",
    "draw",
]

Kind: TypeAlias = Literal[
    "lock",
    "try",
    "acquire",
    "ticket",
    "campaign",
    "create",
    "update",
    "delete",
    "read",
    "close",
]

FaultKind: TypeAlias = Literal[
    "pause",  # a process does not run for a while, and is stopped between any two callbacks
    "stall",  # its event loop does not turn, and its keeper's thread does
    "crash",  # it is killed, and perhaps started again, perhaps with its session resumed
    "cancel",  # what one of its tasks does is cancelled
    "cut",  # nothing gets through between it and the store, one way or both, and nobody is told
    "lose",  # its connection breaks
    "slow",  # its messages take long
    "restart",  # the store is away for a while, and everybody's connection with it
    "wall",  # a wall clock is set: a process's, or the store's
    "evict",  # an administrator takes somebody's request out of its queue
    "end",  # an administrator ends somebody's session
    "drop",  # an administrator deletes the semaphore by force
]

FAULTS: tuple[FaultKind, ...] = (
    "pause",
    "stall",
    "crash",
    "cancel",
    "cut",
    "lose",
    "slow",
    "restart",
    "wall",
    "evict",
    "end",
    "drop",
)

LIMIT = 3
"""The limit of the semaphore that the processes share."""

PROCESSES, TASKS, STEPS, FEWEST_FAULTS, MOST_FAULTS = 4, 3, 15, 9, 12
LONG_HOLDS = 0.02


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a task does.

    Attributes:
        name: of the mutex, semaphore or election.
        hold: seconds for which it keeps what it has got.
        timeout: how long it waits for it; ``None``: for ever.
        count: tokens, of a semaphore.
        enter: whether it enters the lease's block, or asks `held` and releases.
        pause: seconds that it waits before.
    """

    kind: Kind
    name: str
    hold: float = 0.0
    timeout: float | None = None
    count: int = 1
    enter: bool = True
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process.

    Attributes:
        window: its sessions' recovery window.
        resumable: whether its sessions can be resumed.
        rate: seconds of its own clock in a true second.
        wall: how far its wall clock is off.
        delay: seconds that its messages take, at the least and at the most.
        seed: for all chance that is its own.
        tasks: what each of its tasks does.
    """

    window: float
    resumable: bool
    rate: float
    wall: float
    delay: tuple[float, float]
    seed: int
    tasks: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: the true time, in seconds since the beginning.
        process: whom it befalls.
        length: seconds until it is over.
        which: a choice, where the kind has one.
    """

    at: float
    kind: FaultKind
    process: int
    length: float = 0.0
    which: int = 0

    def __str__(self) -> str:
        whom = "the store" if self.kind == "restart" else f"process {self.process}"
        return f"{self.at:8.3f} s  {self.kind:8} {whom}, {self.length:.3g} s, choice {self.which}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole history, before it has happened."""

    seed: int
    processes: tuple[ProcessPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> int:
        return sum(len(task) for process in self.processes for task in process.tasks)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.steps} steps, {len(self.faults)} faults"]
        for number, process in enumerate(self.processes):
            resumable = ", resumable" if process.resumable else ""
            lines.append(
                f"  process {number}: window {process.window:g} s{resumable}, "
                f"clock rate {process.rate:.4f}"
            )
            for task in process.tasks:
                lines += [f"    {_line(step)}" for step in task]
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


def _line(step: Step) -> str:
    within = "" if step.timeout is None else f" within {step.timeout:.3g} s"
    count = f" {step.count}" if step.kind == "acquire" else ""
    return f"{step.kind}{count} {step.name}{within}, hold {step.hold:.3g} s"


def draw(seed: int) -> Plan:
    """The plan of a seed, the same for ever as long as this module is."""
    random = Random(seed)
    processes = tuple(_process(random) for _ in range(PROCESSES))
    number = random.randint(FEWEST_FAULTS, MOST_FAULTS)
    faults = sorted((_fault(random) for _ in range(number)), key=lambda fault: fault.at)
    return Plan(seed, processes, tuple(faults))


def _process(random: Random) -> ProcessPlan:
    quick = random.random() < 0.7
    return ProcessPlan(
        window=random.choice((2.0, 3.0, 5.0)),
        resumable=random.random() < 0.4,
        rate=random.uniform(0.99, 1.01),
        wall=random.choice((0.0, 0.0, -3600.0, 86400.0)),
        delay=(0.0005, 0.01) if quick else (0.001, 0.15),
        seed=random.getrandbits(32),
        tasks=tuple(tuple(_step(random) for _ in range(STEPS)) for _ in range(TASKS)),
    )


_KINDS: tuple[Kind, ...] = (
    *("lock",) * 7,
    *("acquire",) * 5,
    *("ticket",) * 3,
    *("try",) * 2,
    *("campaign",) * 2,
    *("update",) * 3,
    *("read",) * 3,
    "create",
    "delete",
    "close",
)


def _step(random: Random) -> Step:
    kind = random.choice(_KINDS)
    pause = random.uniform(0.0, 0.2)
    if kind in {"create", "update", "delete", "read"}:
        return Step(kind, random.choice(("config", "other")), pause=pause)
    if kind == "close":
        return Step("close", "", pause=pause)
    name, count = random.choice(("a", "a", "b")), 1
    if kind == "campaign":
        name = "leader"
    elif kind == "acquire" or (kind == "ticket" and random.random() < 0.5):
        name, count = "pool", random.choice((1, 1, 2, LIMIT))
    timeout = None if random.random() < 0.6 else random.choice((0.0, 0.05, 0.5, 2.0))
    hold = random.choice((0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 0.5)))
    if random.random() < LONG_HOLDS:
        hold = random.uniform(2.0, 7.0)  # for longer than a lease can be believed unproven
    return Step(kind, name, hold, timeout, count, random.random() < 0.7, pause)


def _fault(random: Random) -> Fault:
    kind = random.choice(FAULTS)
    length = random.choice((random.uniform(0.0, 0.5), random.uniform(0.5, 3.0), 6.0))
    return Fault(
        at=random.uniform(0.2, 6.0),
        kind=kind,
        process=random.randrange(PROCESSES),
        length=length,
        which=random.getrandbits(16),
    )
