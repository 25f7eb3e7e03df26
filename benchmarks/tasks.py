"""Tasks that acquire and release for a while, whatever the store."""

from __future__ import annotations

import asyncio
import time

from benchmarks.redis_work import Pair, Pairs

__all__ = ["SECONDS", "work"]

SECONDS = 1.5


async def work(tasks: int, pair: Pair) -> Pairs:
    """So many tasks, each with a number of its own."""
    pairs, began = Pairs([0] * tasks), time.perf_counter()

    async def one(number: int) -> None:
        while (asked := time.perf_counter()) < began + SECONDS:
            pairs.waits.append(await pair(number) - asked)
            pairs.done[number] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(tasks):
            group.create_task(one(number))
    pairs.seconds = time.perf_counter() - began
    return pairs
