"""Deterministic simulation: thousands of histories, each replayable from its seed.

A seed is a history: four processes with drifting clocks go through their steps (locking,
acquiring, queueing, campaigning, holding what they get, writing and reading data) on the memory
engine, over ways that are slow and break, while processes pause, stall, crash, are taken over and
have tasks cancelled, the store goes away, wall clocks are set and administrators interfere. What
they see is checked by `tenure.testing.history`. The core, the engine and the primitives are the
real ones; only time, chance and the network are simulated::

    outcome = simulate(7)
    assert not outcome.violations

`tenure simulate` runs many. The parts: `scheduler` (time and event loops), `plan` (a history
before it happens), `process` (what a process does), `nemesis` (what befalls it), `world` (all of
it), `shrinking` (a failing plan made small), and `tenure.testing.faults` (the network).
"""

from __future__ import annotations

from tenure.testing.simulation.plan import Plan, draw
from tenure.testing.simulation.shrinking import shrink
from tenure.testing.simulation.world import Outcome, run

__all__ = ["Outcome", "Plan", "draw", "run", "shrink", "simulate", "smallest"]


def simulate(seed: int) -> Outcome:
    """The history of a seed."""
    return run(draw(seed))


def smallest(outcome: Outcome) -> Outcome:
    """A smaller history that violates the same rule, found by leaving out what is not needed."""
    rules = {violation.rule for violation in outcome.violations}

    def fails(plan: Plan) -> bool:
        return any(violation.rule in rules for violation in run(plan).violations)

    return run(shrink(outcome.plan, fails))
