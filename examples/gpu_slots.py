"""Share two GPUs among jobs. Each job gets the number of a GPU that no other job uses.

Start this program in several terminals: all of them share the two GPUs, in the order of arrival.
"""

from __future__ import annotations

import asyncio
import os

import tenure

STORE = os.environ.get("TENURE_URL", "sqlite:///examples.db")
GPUS = 2


async def train(client: tenure.Client, job: int) -> None:
    async with client.semaphore("gpu").acquire(data=b"job %d" % job) as lease:
        gpu = await lease.slot()
        print(f"job {job} uses GPU {gpu}")
        await asyncio.sleep(0.02)  # the training, as a process with CUDA_VISIBLE_DEVICES={gpu}


async def main() -> None:
    async with tenure.connect(STORE) as client, asyncio.TaskGroup() as jobs:
        await client.semaphore("gpu").create(limit=GPUS, exist_ok=True)
        for job in range(1, 7):
            jobs.create_task(train(client, job))


if __name__ == "__main__":
    asyncio.run(main())
