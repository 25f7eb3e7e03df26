"""The core with a million waiters and a hundred thousand sessions: memory, and cost by size.

``python -m benchmarks.core_size`` does the measurement and prints it as JSON; `measure` runs it in
a process of its own, whose memory is the core's alone.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import Measured, percentile
from tenure.core.node import StoredSession
from tenure.core.store import Store
from tenure.model import EPHEMERAL_LIMIT

SESSIONS = 100_000
FEW, MANY = 100, 1_000_000
ROUNDS = 40
OPERATIONS = 250  # of each kind in a round
TIMEOUT = 3600.0  # of every second request, so that the heap of deadlines is there too


class Queue:
    """One mutex with an owner and waiters, of which every session has some."""

    def __init__(self, sessions: int, waiters: int) -> None:
        """Fill the queue of one mutex."""
        self.store = Store()
        self.sessions = [
            self.store.attach("/default", f"worker {number}", 30.0, "window", b"", 0.0)
            for number in range(sessions)
        ]
        self._numbers = itertools.count(1)
        self._chance = random.Random(waiters)
        self.owner = self._enqueue()
        self._waiting = [self._enqueue() for _ in range(waiters)]
        self._places = {number: place for place, number in enumerate(self._waiting)}

    def _session(self, number: int) -> StoredSession:
        return self.sessions[number % len(self.sessions)]

    def _enqueue(self) -> int:
        number = next(self._numbers)
        self.store.enqueue(
            *(self._session(number), number, "queue", EPHEMERAL_LIMIT, b"who I am"),
            *(TIMEOUT if number % 2 else None, True, 0.0, number),
        )
        return number

    def enqueue(self) -> Callable[[], object]:
        """One more at the end."""
        number = next(self._numbers)
        self._places[number] = len(self._waiting)
        self._waiting.append(number)
        session, timeout = self._session(number), TIMEOUT if number % 2 else None
        store = self.store
        return lambda: store.enqueue(
            session, number, "queue", EPHEMERAL_LIMIT, b"who I am", timeout, True, 0.0, number
        )

    def withdraw(self) -> Callable[[], object]:
        """One less, wherever it stands."""
        number = self._chance.choice(self._waiting)
        self._forget(number)
        session, store = self._session(number), self.store
        return lambda: store.withdraw(session, number, 0.0)

    def release(self) -> Callable[[], object]:
        """Release the owner, and grant the first waiter."""
        number, session, store = self.owner, self._session(self.owner), self.store
        return lambda: store.withdraw(session, number, 0.0)

    def granted(self) -> None:
        """Whoever was granted is the owner now."""
        ((_, _, request),) = self.store.effects
        self.store.effects.clear()
        self.owner = request.request_id
        self._forget(self.owner)

    def _forget(self, number: int) -> None:
        # The last one takes its place in the list, whose order does not matter.
        place, last = self._places.pop(number), self._waiting.pop()
        if last != number:
            self._waiting[place] = last
            self._places[last] = place


def _timed(operation: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    operation()
    return time.perf_counter_ns() - start


def _round(queue: Queue) -> Iterator[tuple[str, int]]:
    """As many come as go, so that the queue keeps its length."""
    for _ in range(OPERATIONS):
        yield "enqueue", _timed(queue.enqueue())
        yield "withdraw", _timed(queue.withdraw())
        yield "enqueue", _timed(queue.enqueue())
        yield "release", _timed(queue.release())
        queue.granted()


def _resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure both sizes and print the figures as JSON."""
    before = _resident()
    many = Queue(SESSIONS, MANY)
    memory = _resident() - before
    few = Queue(SESSIONS, FEW)  # as many sessions, so that the waiters alone make the difference
    taken: dict[str, dict[str, list[int]]] = {"few": {}, "many": {}}
    for _ in range(ROUNDS):
        for size, queue in (("few", few), ("many", many)):
            for operation, nanoseconds in _round(queue):
                taken[size].setdefault(operation, []).append(nanoseconds)
    print(
        json.dumps(
            {
                "memory": memory,
                "median_ns": {
                    size: {name: statistics.median(times) for name, times in kinds.items()}
                    for size, kinds in taken.items()
                },
                "p99_ns": {
                    size: {name: percentile(times, 0.99) for name, times in kinds.items()}
                    for size, kinds in taken.items()
                },
            }
        )
    )


def measure() -> list[Measured]:
    """Measure the memory of a large core, and the time of an operation in it."""
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.core_size"], check=True, stdout=subprocess.PIPE
    ).stdout
    found = json.loads(output)
    memory = found["memory"] / 2**20
    results = [
        Measured(
            "core: 1,000,000 waiters, 100,000 sessions",
            memory,
            "MiB",
            "1 GiB",
            1024,
            memory / 1024,
            at_most=1.0,
        )
    ]
    for name, what in (
        ("enqueue", "enqueue"),
        ("withdraw", "withdraw from the middle"),
        ("release", "release with hand-off"),
    ):
        few, many = (found["median_ns"][size][name] / 1000 for size in ("few", "many"))
        results.append(
            Measured(
                f"core: {what}, 1,000,000 waiters",
                many,
                "us",
                "100 waiters",
                few,
                many / few,
                at_most=2.0,
                notes={size: found["p99_ns"][size][name] / 1000 for size in ("few", "many")}
                | {"these are": "99th percentiles, us"},
            )
        )
    return results


if __name__ == "__main__":
    main()
