"""What a target is, and what counts as a finding."""

from __future__ import annotations

import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzzing.mutations import mutated

SLOW = 2.0
"""Seconds of this thread's processor time in which any input must be dealt with."""
MEMORY = 256
"""MiB by which the process may grow over one input."""

Run = Callable[[bytes, random.Random], None]


@dataclass(frozen=True)
class Target:
    """Something that reads what others wrote.

    Attributes:
        name: on the command line.
        run: reads one input. The randomness is for how it is delivered, never for what it is.
        seeds: well-formed inputs.
        refuses: the documented errors.
        weight: how many inputs it is given in a round.
    """

    name: str
    run: Run
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = ()
    weight: int = 100

    def inputs(self, seed: str) -> Iterator[bytes]:
        """Yield inputs without end: the seeds, and then changes of them."""
        yield from self.seeds
        chance = random.Random(f"{seed} {self.name}")
        while True:
            yield mutated(chance, self.seeds)


class Finding(Exception):
    """A target did not deal with an input as it should."""

    def __init__(self, target: Target, data: bytes, what: str) -> None:
        self.target = target
        self.data = data
        super().__init__(f"{target.name}: {what}")


def run_one(target: Target, data: bytes) -> None:
    """Give a target one input.

    Raises:
        Finding: it raised an undocumented error, or took too much time or memory.
    """
    before = _peak(anew=True)
    began = time.thread_time()
    try:
        target.run(data, random.Random(data))
    except target.refuses:
        pass
    except Exception:
        raise Finding(target, data, traceback.format_exc()) from None
    took = time.thread_time() - began
    grown = _peak() - before
    if took > SLOW:
        raise Finding(target, data, f"it took {took:.1f} s for {len(data):,} bytes")
    if grown > MEMORY:
        raise Finding(target, data, f"it took {grown:,} MiB for {len(data):,} bytes")


def _peak(*, anew: bool = False) -> int:
    """The most memory that this process has had, in MiB; 0 where the kernel does not tell.

    Args:
        anew: forget what it had before.
    """
    try:
        if anew:
            Path("/proc/self/clear_refs").write_text("5", "ascii")
        found = re.search(r"VmHWM:\s*([0-9]+) kB", Path("/proc/self/status").read_text("utf-8"))
    except OSError:
        return 0
    return int(found[1]) // 1024 if found else 0
