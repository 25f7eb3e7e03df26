"""Shrinking of a failing plan: removes parts that are not needed for the failure.

Faults are removed first, then all tasks of a process, then steps. Faults and steps are removed in
halves, quarters and so on. The caller decides which failures count as the same. Every attempt is a
simulation, so the number of attempts is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tenure.testing.simulation.plan import Plan, Step

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


def _with_tasks(plan: Plan, number: int, tasks: tuple[tuple[Step, ...], ...]) -> Plan:
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
