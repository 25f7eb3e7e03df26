"""The command: ``python -m tests.fuzzing [--seconds S] [--seed SEED] [TARGET...]``."""

# ruff: noqa: T201  it reports

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import logging
import secrets
import sys
import tempfile
import time

from tests.fuzzing.checks import Finding, Target, run_one
from tests.fuzzing.parsers import PARSERS
from tests.fuzzing.servers import serving
from tests.fuzzing.settings import FILES
from tests.fuzzing.stores import stores

SHOWN = 4096
"""Bytes of an input that are printed; more are written to a file."""


def main() -> int:
    """Fuzz until the time is over; return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", default=secrets.token_hex(4))
    parser.add_argument("--input", help="repeat one input: base64, or @FILE")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    given = parser.parse_args()
    logging.getLogger("tenure").setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as servers:
        damaged, copies = stores()
        targets = [*PARSERS, *FILES, copies]
        if damaged.name in given.targets:  # it is slow, and only a failing disk does that
            targets.append(damaged)
        if not given.targets or any(name.startswith("serve-") for name in given.targets):
            targets += servers.enter_context(serving())
        targets = [each for each in targets if not given.targets or each.name in given.targets]
        if not targets:
            parser.error("there is no such target")
        return _run(targets, given)


def _run(targets: list[Target], given: argparse.Namespace) -> int:
    try:
        if given.input is not None:
            data = _input(given.input)
            for target in targets:
                run_one(target, data)
            print("nothing is found")
        else:
            print(f"fuzzing {len(targets)} targets for {given.seconds:g} s, --seed {given.seed}")
            for name, count in _fuzz(targets, given.seed, given.seconds).items():
                print(f"{name:<20} {count:>8,} inputs")
    except Finding as finding:
        print(f"{finding}\nwith --seed {given.seed}; repeat it with")
        print(f"  python -m tests.fuzzing {finding.target.name} --input {_shown(finding)}")
        return 1
    return 0


def _fuzz(targets: list[Target], seed: str, seconds: float) -> dict[str, int]:
    """Give all targets inputs in turn, and return how many each had."""
    counts = dict.fromkeys((target.name for target in targets), 0)
    inputs = {target.name: target.inputs(seed) for target in targets}
    until = time.monotonic() + seconds
    for target in itertools.cycle(targets):
        for data in itertools.islice(inputs[target.name], target.weight):
            run_one(target, data)
            counts[target.name] += 1
        if time.monotonic() > until:
            break
    return counts


def _input(text: str) -> bytes:
    if text.startswith("@"):
        with open(text[1:], "rb") as file:
            return file.read()
    return base64.b64decode(text)


def _shown(finding: Finding) -> str:
    if len(finding.data) <= SHOWN:
        return base64.b64encode(finding.data).decode()
    prefix = f"fuzzing-{finding.target.name}-"
    with tempfile.NamedTemporaryFile(prefix=prefix, delete=False) as file:
        file.write(finding.data)
    return f"@{file.name}"


if __name__ == "__main__":
    sys.exit(main())
