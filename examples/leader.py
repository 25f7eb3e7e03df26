"""Keep one scheduler active among several replicas.

Two replicas campaign. The first one leads until it is stopped, and the second one takes its place.
In a real service each replica is a process of its own.
"""

from __future__ import annotations

import asyncio
import os

import tenure

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")


class Replica:
    """One process of the service."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.leads = asyncio.Event()

    async def schedule(self, leadership: tenure.Leadership) -> None:
        """Work as the leader. The call is cancelled when the leadership is lost."""
        print(self.name, "leads")
        leadership.check()  # raises LeaseLost; for work in threads
        self.leads.set()
        await asyncio.Event().wait()  # the scheduler's work

    async def run(self) -> None:
        async with tenure.connect(STORE) as client:
            await client.lead("scheduler", self.schedule, data=self.name.encode())


async def main() -> None:
    first, second = Replica("first"), Replica("second")
    running = asyncio.create_task(first.run())
    await first.leads.wait()
    standing_by = asyncio.create_task(second.run())

    running.cancel()  # a new version of the first replica is installed
    await asyncio.wait([running])
    await second.leads.wait()
    async with tenure.connect(STORE) as client:
        leader = await client.election("scheduler").leader()
        print("clients see:", leader.data.decode() if leader else None)

    standing_by.cancel()
    await asyncio.wait([standing_by])


if __name__ == "__main__":
    asyncio.run(main())
