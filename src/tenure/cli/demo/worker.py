"""A participating process of the demo: ``python -m tenure.cli.demo.worker NAME URL``.

It reads orders from its standard input, one JSON object per line, carries them out in order, and
writes events to its standard output (`history.DemoEvent`). It ends when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import tenure
from tenure.cli.demo.scenes import DemoEvent, What
from tenure.clock import SystemClock

WINDOW = 10.0
"""Recovery window in seconds."""


class Worker:
    """One process."""

    def __init__(self, who: str, session: tenure.Session, orders: asyncio.StreamReader) -> None:
        """Work with `session`, on the lines of `orders`."""
        self._who = who
        self._session = session
        self._orders = orders
        self._clock = SystemClock()

    def note(
        self, what: What, name: str, token: int | None = None, count: int = 1, data: str = ""
    ) -> None:
        """Write an event in one system call, so that a killed process leaves only whole lines."""
        event = DemoEvent(self._clock.now(), self._who, what, name, token, count, data)
        os.write(1, event.to_json().encode() + b"\n")

    async def work(self) -> None:
        """Carry out orders until there are no more."""
        self.note("done", "start")
        while order := await self._next():
            await getattr(self, "do_" + order.pop("do"))(**order)
            self.note("done", "order")

    async def _next(self) -> dict[str, Any] | None:
        line = await self._orders.readline()
        return dict(json.loads(line)) if line else None

    async def do_lock(self, name: str, turns: int, hold: float, *, wait: bool) -> None:
        """Take a mutex several times; with `wait`, keep it the first time until the next order."""
        mutex = self._session.mutex(name)
        for turn in range(turns):
            self.note("requested", name)
            async with mutex.lock(data=self._who.encode()) as lease:
                self.note("granted", name, lease.fencing_token)
                if wait and turn == 0:
                    await self._next()
                await asyncio.sleep(hold)
                self.note("released", name, lease.fencing_token)

    async def do_share(self, name: str, turns: int, hold: float, count: int) -> None:
        """Take some of a semaphore's slots, several times."""
        pool = self._session.semaphore(name)
        for _ in range(turns):
            self.note("requested", name)
            async with pool.enqueue(count, data=self._who.encode()) as ticket:
                self.note("queued", name)
                lease = await ticket.wait()
                self.note("granted", name, lease.fencing_token, count)
                await asyncio.sleep(hold)
                self.note("released", name, lease.fencing_token, count)

    async def do_lead(self, name: str) -> None:
        """Be a candidate, and the leader until the order to resign."""
        self.note("requested", name)
        async with self._session.election(name).campaign(self._who.encode()) as leadership:
            self.note("granted", name, leadership.fencing_token)
            await self._next()
            self.note("released", name, leadership.fencing_token)

    async def do_watch(self, name: str, last: str) -> None:
        """Watch a semaphore's data until it is `last`."""
        async with self._session.semaphore(name).watch(data=True) as states:
            async for state in states:
                self.note("seen", name, data=state.data.decode())
                if state.data.decode() == last:
                    return


async def main(who: str, url: str) -> None:
    """Connect, and work."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    async with (
        tenure.connect(url) as client,
        client.session(recovery_window=WINDOW, description=f"demo {who}") as session,
    ):
        await Worker(who, session, orders).work()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
