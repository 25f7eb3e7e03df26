"""Plan of a simulated history: the steps of each process, and the faults.

A plan is data. `draw` derives one from a seed. A plan without some of its parts is also a plan, so
that a failing plan can be shrunk (`tenure.testing.simulation.batch`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "lock",
    "try",
    "acquire",
    "ticket",
    "campaign",
    "all",
    "any",
    "share",
    "take",
    "create",
    "update",
    "delete",
    "read",
    "close",
]

FaultKind: TypeAlias = Literal[
    "pause",  # a process does not run for a while; it is stopped between any two callbacks
    "stall",  # its event loop does not run, while its keeper's thread does
    "crash",  # it is killed and started again, perhaps resuming its session
    "cancel",  # the current step of one of its tasks is cancelled
    "cut",  # messages to or from the store, or both, are lost without notice
    "lose",  # its connection is dropped
    "slow",  # its messages take ten times as long
    "restart",  # the store is down for a while, and all connections are dropped
    "wall",  # a wall clock is set: a process's, or the store's
    "evict",  # an administrator evicts a request from its queue
    "end",  # an administrator ends a session
    "drop",  # an administrator deletes a semaphore by force
    "resize",  # an administrator changes the limit of the shared semaphore
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
    "resize",
)
"""All kinds."""

LIMIT = 3
"""The limit with which the semaphore is created that the processes share."""

SHARED_LIMIT, PER_KEY, KEYS = 3, 2, ("a", "b")
"""The limits of the semaphore ``shared``, and its keys."""

RATE_LIMIT, RATE_PERIOD, RATE_BURST = 12, 1.2, 6
"""The rule of the rate ``rate``."""

PROCESSES, TASKS, STEPS, FEWEST_FAULTS, MOST_FAULTS, MOST_RESIZES = 4, 3, 15, 9, 12, 4
LIMIT_STEPS = 6  # of a further task, with several locks, keys and rates
LONG_HOLDS = 0.02


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a task.

    Attributes:
        kind: the operation.
        name: the name of the mutex, semaphore or election; of several mutexes, a letter for each;
            for "share", the key.
        hold: seconds for which the lease is held.
        timeout: seconds to wait for the grant; ``None`` waits for ever.
        count: the number of tokens of a semaphore or of a rate.
        enter: whether to enter the lease's block; otherwise `held` is checked and the lease
            released.
        pause: seconds to wait before the step.
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
    """Plan of one process.

    Attributes:
        window: the recovery window of its sessions, in seconds.
        resumable: true if its sessions can be resumed.
        rate: seconds that pass on its own clock in one true second.
        wall: the offset of its wall clock, in seconds.
        delay: the minimum and maximum delay of its messages, in seconds.
        seed: the seed of its own random numbers.
        tasks: the steps of each of its tasks.
    """

    window: float
    resumable: bool
    rate: float
    wall: float
    delay: tuple[float, float]
    seed: int
    tasks: tuple[tuple[PlanStep, ...], ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: the true time, in seconds since the beginning.
        kind: the kind of fault.
        process: the number of the affected process.
        length: its duration in seconds.
        which: a random number that selects a variant or a target, for kinds with a choice.
    """

    at: float
    kind: FaultKind
    process: int
    length: float = 0.0
    which: int = 0

    def __str__(self) -> str:
        """Return the fault as one line."""
        target = "the store" if self.kind == "restart" else f"process {self.process}"
        return f"{self.at:8.3f} s  {self.kind:8} {target}, {self.length:.3g} s, choice {self.which}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a whole history."""

    seed: int
    processes: tuple[ProcessPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> int:
        """Number of steps of all processes."""
        return sum(len(task) for process in self.processes for task in process.tasks)

    def __str__(self) -> str:
        """Return the plan as text: its processes, their steps and the faults."""
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


def _line(step: PlanStep) -> str:
    within = "" if step.timeout is None else f" within {step.timeout:.3g} s"
    count = f" {step.count}" if step.kind in {"acquire", "share", "take"} else ""
    return f"{step.kind}{count} {step.name}{within}, hold {step.hold:.3g} s"


def draw(seed: int) -> Plan:
    """Return the plan of a seed, which is always the same while this module is unchanged."""
    random = Random(seed)
    processes = tuple(_process(random) for _ in range(PROCESSES))
    number = random.randint(FEWEST_FAULTS, MOST_FAULTS)
    found = [_fault(random) for _ in range(number)]
    found += [_resize(random) for _ in range(random.randint(0, MOST_RESIZES))]
    faults = sorted(found, key=lambda fault: fault.at)
    processes = tuple(_with_limits(random, each) for each in processes)
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


def _step(random: Random) -> PlanStep:
    kind = random.choice(_KINDS)
    pause = random.uniform(0.0, 0.2)
    if kind in {"create", "update", "delete", "read"}:
        return PlanStep(kind, random.choice(("config", "other")), pause=pause)
    if kind == "close":
        return PlanStep("close", "", pause=pause)
    name, count = random.choice(("a", "a", "b")), 1
    if kind == "campaign":
        name = "leader"
    elif kind == "acquire" or (kind == "ticket" and random.random() < 0.5):
        name, count = "pool", random.choice((1, 1, 2, LIMIT))
    timeout = None if random.random() < 0.6 else random.choice((0.0, 0.05, 0.5, 2.0))
    hold = random.choice((0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 0.5)))
    if random.random() < LONG_HOLDS:
        hold = random.uniform(2.0, 7.0)  # longer than a lease stays valid without a proof
    return PlanStep(kind, name, hold, timeout, count, random.random() < 0.7, pause)


def _with_limits(random: Random, process: ProcessPlan) -> ProcessPlan:
    """Add a task with limits; these are drawn last, so that a seed keeps its other parts."""
    steps = tuple(_limit_step(random) for _ in range(LIMIT_STEPS))
    return replace(process, tasks=(*process.tasks, steps))


def _limit_step(random: Random) -> PlanStep:
    kind: Kind = random.choice(("all", "all", "any", "share", "share", "take"))
    name = "rate"
    count = random.choice((1, 1, PER_KEY))
    if kind in {"all", "any"}:
        name = "".join(random.sample("abxy", random.choice((2, 2, 3))))
    elif kind == "share":
        name = random.choice(KEYS)
    else:
        count = random.randint(1, RATE_BURST)
    timeout = None if random.random() < 0.6 else random.choice((0.0, 0.05, 0.5, 2.0))
    hold = random.choice((0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 0.5)))
    return PlanStep(kind, name, hold, timeout, count, pause=random.uniform(0.0, 0.5))


def _resize(random: Random) -> Fault:
    """Draw a change of a limit; these are drawn last, so that a seed keeps its other faults."""
    return Fault(random.uniform(0.2, 6.0), "resize", 0, which=random.getrandbits(16))


def _fault(random: Random) -> Fault:
    kind = random.choice(FAULTS[:-1])
    length = random.choice((random.uniform(0.0, 0.5), random.uniform(0.5, 3.0), 6.0))
    return Fault(
        at=random.uniform(0.2, 6.0),
        kind=kind,
        process=random.randrange(PROCESSES),
        length=length,
        which=random.getrandbits(16),
    )
