"""Deterministic simulation: thousands of histories, each reproducible from its seed.

A seed determines a history. Four processes with drifting clocks run their steps (locking,
acquiring, queueing, campaigning, holding leases, writing and reading data) on the memory engine,
over simulated networks that are slow and break. Meanwhile processes pause, stall and crash, their
sessions are taken over, their tasks are cancelled, the store becomes unreachable, wall clocks are
set, and administrators revoke requests and sessions. `tenure.testing.history` checks the records.
The core, the engine and the primitives are the real ones; only time, chance and the network are
simulated.

Example::

    from tenure.testing.simulation import simulate

    outcome = simulate(7)
    assert not outcome.violations

`tenure simulate` runs many seeds. The parts: `scheduler` (time and event loops), `plan` (the steps
and faults of a history), `process` (a simulated process), `nemesis` (the faults), `world` (one
whole history), `batch` (many seeds, and a failing plan made smaller), and
`tenure.testing.faults` (the network).
"""

from __future__ import annotations

from tenure.testing.simulation.batch import shrink
from tenure.testing.simulation.plan import Plan, draw
from tenure.testing.simulation.world import Outcome, run

__all__ = ["Outcome", "Plan", "draw", "run", "shrink", "simulate", "smallest"]


def simulate(seed: int) -> Outcome:
    """Simulate the history of a seed."""
    return run(draw(seed))


def smallest(outcome: Outcome) -> Outcome:
    """Return a smaller history that violates one of the same rules."""
    rules = {violation.rule for violation in outcome.violations}

    def fails(plan: Plan) -> bool:
        return any(violation.rule in rules for violation in run(plan).violations)

    return run(shrink(outcome.plan, fails))
