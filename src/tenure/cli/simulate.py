"""`tenure simulate`: search for defects of tenure itself, in thousands of simulated histories."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from tenure.cli.mistakes import Status
from tenure.cli.options import a_count, json_option
from tenure.cli.output import duration, is_terminal, print_json, say
from tenure.testing.history import dump
from tenure.testing.simulation import Outcome, smallest
from tenure.testing.simulation import simulate as simulated
from tenure.testing.simulation.batch import FEWEST_FAULTS, FEWEST_OPERATIONS, Tally, tallies

FEW = 3
"""Number of failing seeds after which the search ends."""


@click.command()
@click.option("--seeds", type=a_count, default="1000", metavar="N", help="Number of seeds (1000).")
@click.option("--first-seed", type=a_count, default="1", metavar="N", help="First seed (1).")
@click.option("--jobs", type=a_count, metavar="N", help="Number of processes (one per core).")
@click.option(
    "--history",
    "history_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the first failing history, or else the last, as JSON lines.",
)
@json_option
def simulate(
    *, seeds: int, first_seed: int, jobs: int | None, history_file: Path | None, as_json: bool
) -> int:
    """Search for defects of tenure in simulated time.

    Each seed is a history of processes that lock, wait, hold, campaign, write and read. Meanwhile
    they pause, crash, restart, lose their connections and are cancelled; the store becomes
    unreachable, clocks drift and are set, and administrators interfere. Each history is checked: no
    limit is exceeded, queues are FIFO, fencing tokens rise, data is linearizable, every loss is
    detected in time, and nothing is left behind.

    A failing history is shown with its seed, and reduced. The same seed produces the same history
    with the same version of tenure and of Python. Exits with 70 if one failed.
    """
    started = time.monotonic()
    total = Tally()
    for tally in tallies(first_seed, seeds, jobs or os.cpu_count() or 1):
        total.merge(tally)
        if is_terminal() and not as_json:
            rate = total.seeds / (time.monotonic() - started)
            click.echo(f"\r{total.seeds:,} of {seeds:,}, {rate:.0f} a second\x1b[K", nl=False)
        if len(total.failed) >= FEW:
            break
    if is_terminal() and not as_json:
        click.echo("\r\x1b[K", nl=False)
    total.failed.sort()
    failed = [simulated(seed) for seed in total.failed[:FEW]]
    if history_file is not None:
        kept = failed[0] if failed else simulated(first_seed + seeds - 1)
        dump(kept.records, history_file)
    took = time.monotonic() - started
    if as_json:
        print_json(_json(total, failed, took))
    else:
        for outcome in failed:
            _show(outcome)
        _sum_up(total, took)
    return Status.DEFECT if failed else Status.DONE


def _show(outcome: Outcome) -> None:
    seed = outcome.plan.seed
    say(f"seed {seed} fails; again: tenure simulate --first-seed {seed} --seeds 1", "bold red")
    small = smallest(outcome)
    for violation in small.violations or outcome.violations:
        say(str(violation))
    say(f"the smallest history with this failure, of {outcome.plan.steps} steps:")
    say(str(small.plan))
    say()


def _sum_up(total: Tally, took: float) -> None:
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(total.faults.items()))
    say(
        f"{total.seeds:,} histories, {total.operations:,} operations, {duration(total.length)} of "
        f"simulated time, in {took:.1f} s ({total.seeds / took:.0f} a second)"
    )
    say(f"{total.faults.total():,} faults: {kinds}")
    if total.short:
        say(
            f"{total.short} of the histories had fewer than {FEWEST_OPERATIONS} operations or "
            f"{FEWEST_FAULTS} faults"
        )
    if total.failed:
        say(f"{len(total.failed)} failed", "bold red")
    else:
        say("none failed", "bold green")


def _json(total: Tally, failed: list[Outcome], took: float) -> dict[str, object]:
    return {
        "seeds": total.seeds,
        "operations": total.operations,
        "faults": dict(sorted(total.faults.items())),
        "short": total.short,
        "simulated_seconds": total.length,
        "seconds": took,
        "failed": [
            {
                "seed": outcome.plan.seed,
                "violations": [
                    {"rule": violation.rule, "what": violation.what}
                    for violation in outcome.violations
                ],
            }
            for outcome in failed
        ],
    }
