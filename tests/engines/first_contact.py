"""Processes that meet at a new store: all connect to it at the same moment.

The processes are started once, so that a meeting costs little more than the connections.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Lock
from typing import Any

import tenure

PATIENCE = 60.0

_spawning = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class _Shared:
    """What all processes see: the barriers by the size of a meeting, and who is inside the lock."""

    barriers: dict[int, Barrier]
    inside: Lock
    grants: Any


@dataclass(frozen=True)
class _Visit:
    """What one process saw: its tokens with their places in the order of all grants."""

    grants: Sequence[tuple[int, int]]
    failure: str = ""


class Meetings:
    """The processes, and how they are sent to a store."""

    def __init__(self, most: int) -> None:
        """Start the processes."""
        self._shared = _Shared(
            {count: _spawning.Barrier(count) for count in range(1, most + 1)},
            _spawning.Lock(),
            _spawning.Value("q", 0, lock=False),
        )
        self._ends: list[Connection] = []
        self._processes = []
        for _ in range(most):
            here, there = _spawning.Pipe()
            process = _spawning.Process(target=_work, args=(there, self._shared), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def meet(self, urls: Sequence[str], visits: int = 1) -> None:
        """Send a process to each URL of one new store; fail unless all share it in good order."""
        for end, url in zip(self._ends, urls, strict=False):
            end.send((url, len(urls), visits))
        seen: list[_Visit] = []
        for end in self._ends[: len(urls)]:
            assert end.poll(3 * PATIENCE), f"a process is stuck in {urls[0]}"
            seen.append(end.recv())
        failures = [each.failure for each in seen if each.failure]
        assert not failures, failures
        grants = sorted(grant for each in seen for grant in each.grants)
        tokens = [token for _, token in grants]
        assert len(grants) == len(urls) * visits
        assert tokens == sorted(set(tokens)), f"tokens out of order: {tokens}"

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.send(None)
            end.close()
        for process in self._processes:
            process.join()


@contextmanager
def meetings(most: int) -> Iterator[Meetings]:
    """Up to `most` processes, until the end of the block."""
    processes = Meetings(most)
    try:
        yield processes
    finally:
        processes.close()


def _work(orders: Connection, shared: _Shared) -> None:
    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(_visit(shared, *order)))


async def _visit(shared: _Shared, url: str, count: int, visits: int) -> _Visit:
    grants: list[tuple[int, int]] = []
    shared.barriers[count].wait()
    try:
        for _ in range(visits):
            async with (
                tenure.connect(url) as client,
                client.mutex("first").lock(timeout=PATIENCE) as lease,
            ):
                assert shared.inside.acquire(block=False), "another process is in the lock"
                shared.grants.value += 1
                grants.append((shared.grants.value, lease.fencing_token))
                await asyncio.sleep(0)
                shared.inside.release()
    except Exception:
        return _Visit(grants, traceback.format_exc())
    return _Visit(grants)
