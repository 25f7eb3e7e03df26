"""Simulation of many seeds, in one process or several, with their totals.

Shrinking of a failing plan: removes parts that are not needed for the failure.

Faults are removed first, then all tasks of a process, then steps. Faults and steps are removed in
halves, quarters and so on. The caller decides which failures count as the same. Every attempt is a
simulation, so the number of attempts is bounded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,  # noqa: TID251  with the fork server as its context
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tenure.testing.simulation.plan import Plan, PlanStep, draw
from tenure.testing.simulation.world import Outcome, run

T = TypeVar("T")

ATTEMPTS = 400
"""Maximum number of simulations of one shrinking."""


def shrink(plan: Plan, fails: Callable[[Plan], bool], attempts: int = ATTEMPTS) -> Plan:
    """Return the smallest failing plan that was found by removing parts.

    Args:
        plan: the failing plan.
        fails: returns true if a plan still fails in the same way.
        attempts: the maximum number of plans to try.
    """
    left = attempts
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(plan):
            if not left:
                return plan
            left -= 1
            if fails(smaller):
                plan, shrunk = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    for faults in _without_parts(plan.faults):
        yield replace(plan, faults=tuple(faults))
    for number, process in enumerate(plan.processes):
        if any(process.tasks):  # the process keeps its number, without steps
            yield _with_tasks(plan, number, tuple(() for _ in process.tasks))
    for number, process in enumerate(plan.processes):
        for index, steps in enumerate(process.tasks):
            for fewer in _without_parts(steps):
                tasks = list(process.tasks)
                tasks[index] = tuple(fewer)
                yield _with_tasks(plan, number, tuple(tasks))


def _with_tasks(plan: Plan, number: int, tasks: tuple[tuple[PlanStep, ...], ...]) -> Plan:
    processes = list(plan.processes)
    processes[number] = replace(processes[number], tasks=tasks)
    return replace(plan, processes=tuple(processes))


def _without_parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items without a part of them: without all, each half, each quarter, and so on."""
    length = len(items)
    while length:
        for start in range(0, len(items), length):
            yield [*items[:start], *items[start + length :]]
        length //= 2


FEWEST_OPERATIONS, FEWEST_FAULTS = 200, 5
"""Minimum numbers for a seed; below them it counts as short."""

_BETWEEN_COLLECTIONS = 25
_BATCH = 20


@dataclass
class Tally:
    """Totals of many histories.

    Attributes:
        seeds: the number of histories.
        operations: the number of their operations.
        records: the number of their records.
        length: the true time simulated, in seconds.
        short: the number of seeds with fewer than `FEWEST_OPERATIONS` operations, or fewer than
            `FEWEST_FAULTS` faults.
        faults: the number of faults that took effect, by kind.
        failed: the seeds of the histories with violations.
    """

    seeds: int = 0
    operations: int = 0
    records: int = 0
    length: float = 0.0
    short: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Add one history."""
        faults = sum(outcome.faults.values())
        self.seeds += 1
        self.operations += outcome.operations
        self.records += len(outcome.records)
        self.length += outcome.length
        self.short += outcome.operations < FEWEST_OPERATIONS or faults < FEWEST_FAULTS
        self.faults.update(outcome.faults)
        if outcome.violations:
            self.failed.append(outcome.plan.seed)

    def merge(self, other: Tally) -> None:
        """Add all histories of another tally."""
        self.seeds += other.seeds
        self.operations += other.operations
        self.records += other.records
        self.length += other.length
        self.short += other.short
        self.faults.update(other.faults)
        self.failed += other.failed


def tallies(first: int, seeds: int, jobs: int) -> Iterator[Tally]:
    """Yield the totals of consecutive seeds, one tally per small batch, as batches are done.

    Args:
        first: the first seed.
        seeds: the number of seeds.
        jobs: the number of worker processes; with 1, this process does the work.
    """
    batches = [
        range(at, min(at + _BATCH, first + seeds)) for at in range(first, first + seeds, _BATCH)
    ]
    if jobs == 1:
        yield from map(_tally, batches)
        return
    # A worker forked from this process would inherit its objects, without threads that some of them
    # need. The fork server has neither, and starts workers as quickly.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_follow_the_parent) as pool:
        waiting: set[Future[Tally]] = set()
        try:
            while batches or waiting:
                while batches and len(waiting) < 2 * jobs:
                    waiting.add(pool.submit(_tally, batches.pop(0)))
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in done:
                    yield each.result()
        finally:
            for each in waiting:
                each.cancel()


def _tally(seeds: Iterable[int]) -> Tally:
    tally = Tally()
    for outcome in outcomes(seeds):
        tally.add(outcome)
    return tally


def _follow_the_parent() -> None:
    """Leave interrupts to the parent process, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def outcomes(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Yield the outcomes of some seeds, with rare garbage collections.

    A world is one large reference cycle. Automatic garbage collection would make a simulation a
    third slower.
    """
    with _rarely_collecting():
        for number, seed in enumerate(seeds):
            yield run(draw(seed))
            if number % _BETWEEN_COLLECTIONS == 0:
                gc.collect()


@contextmanager
def _rarely_collecting() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        gc.collect()
