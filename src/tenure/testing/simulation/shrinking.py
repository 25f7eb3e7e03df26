"""Making a failing plan small: what is not needed for the failure is taken out.

Faults first, then whole processes' tasks, then steps; each in halves, quarters and so on, and the
outcome counts as the same failure when the same rule is violated. Every attempt is a simulation,
so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tenure.testing.simulation.plan import Plan, Step

__all__ = ["ATTEMPTS", "shrink"]

T = TypeVar("T")

ATTEMPTS = 400
"""How many simulations one shrinking may cost."""


def shrink(plan: Plan, fails: Callable[[Plan], bool], attempts: int = ATTEMPTS) -> Plan:
    """The smallest plan found, of those made by leaving something out, that still fails."""
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
        if any(process.tasks):  # a process keeps its number, and does nothing
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
    """The items without a part of them: without all, without each half, each quarter, ..."""
    length = len(items)
    while length:
        for start in range(0, len(items), length):
            yield [*items[:start], *items[start + length :]]
        length //= 2
