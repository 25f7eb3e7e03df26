"""Apply a new setting in running workers, without a restart.

A worker watches the configuration. An administrator publishes three values; the worker applies
each value that it sees, and ends after the last one.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import tenure
from tenure.recipes import SharedConfig, dataclass_codec

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")


@dataclass(frozen=True)
class Limits:
    """Settings of the workers."""

    requests_per_second: int
    stop: bool = False


def limits_of(client: tenure.Client) -> SharedConfig[Limits]:
    return SharedConfig(client, "limits", codec=dataclass_codec(Limits))


async def work() -> None:
    async with tenure.connect(STORE) as client, limits_of(client).watch() as values:
        async for limits in values:
            if limits is None:
                print("nothing is published yet")
            elif limits.stop:
                print("stopped")
                break
            else:
                print("at most", limits.requests_per_second, "requests per second")


async def administer() -> None:
    async with tenure.connect(STORE) as client:
        config = limits_of(client)
        await config.set(Limits(10))
        await config.set(Limits(50))
        await config.set(Limits(50, stop=True))


async def main() -> None:
    worker = asyncio.create_task(work())
    await administer()
    await worker


if __name__ == "__main__":
    asyncio.run(main())
