"""Tasks that acquire and release for a while, whatever the store."""

from __future__ import annotations

import asyncio
import gc
import time

from benchmarks.redis_work import Pair, Pairs

SECONDS = 1.5
WARM_UP = 0.2
"""Seconds before measuring, in which a server prepares what it executes for the first time."""


async def work(tasks: int, pair: Pair) -> Pairs:
    """So many tasks, each with a number of its own."""
    gc.collect()
    gc.freeze()  # the modules of the peers, through which the collector would go
    pairs, began = Pairs([0] * tasks), time.perf_counter() + WARM_UP

    async def one(number: int) -> None:
        while (asked := time.perf_counter()) < began + SECONDS:
            granted = await pair(number)
            if asked >= began:
                pairs.waits.append(granted - asked)
                pairs.done[number] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(tasks):
            group.create_task(one(number))
    pairs.seconds = time.perf_counter() - began
    return pairs
