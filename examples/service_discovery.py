"""Find the live services, and move to another one when a service ends."""

from __future__ import annotations

import asyncio
import os

import tenure
from tenure.recipes import ServiceRegistry

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")


async def serve(endpoint: str, registered: asyncio.Event) -> None:
    """Serve under this endpoint until the task is cancelled."""
    async with (
        tenure.connect(STORE) as client,
        ServiceRegistry(client, "renderers").register(endpoint),
    ):
        registered.set()
        await asyncio.Event().wait()


async def start(endpoint: str) -> asyncio.Task[None]:
    registered = asyncio.Event()
    service = asyncio.create_task(serve(endpoint, registered))
    await registered.wait()
    return service


async def main() -> None:
    first = await start("10.0.0.1:80")
    second = await start("10.0.0.2:80")
    async with (
        tenure.connect(STORE) as client,
        ServiceRegistry(client, "renderers").watch() as states,
    ):
        async for endpoints in states:
            live = sorted(endpoint.text for endpoint in endpoints)
            print("live:", ", ".join(live))
            if len(live) == 1:
                print("using", live[0])
                break
            first.cancel()  # the machine is shut down
    second.cancel()
    await asyncio.wait([first, second])


if __name__ == "__main__":
    asyncio.run(main())
