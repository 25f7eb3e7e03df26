"""A program with a session, told what to do line by line; see `worker`.

It uses the public API, and looks at `Lease.held` all the time: of each lease it says since when it
was held, and when it was last seen to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from typing import Any

import tenure
from tenure.errors import TenureError
from tests.engines.sqlite.worker import (
    PATIENCE,
    Worker,
    is_taking_over,
    look_no_more,
    now,
    say,
    serve,
)

_LOOK = 0.001  # seconds between two looks at a lease


class Holder(Worker):
    """A process of this module, as a test sees it."""

    module = "tests.engines.sqlite.holder"

    def beliefs(self, name: str) -> list[tuple[float, float]]:
        """From when to when it was seen to hold that name; for ever, if it still does."""
        begun = [each["at"] for each in self.heard("holds", name=name)]
        seen = [each["last"] for each in self.heard("lost", name=name)]
        return list(zip(begun, seen + [math.inf] * (len(begun) - len(seen)), strict=True))

    async def believes_no_more(self, name: str) -> None:
        """Wait until it has said of every lease of that name that it is lost."""
        async with asyncio.timeout(PATIENCE):
            while any(end == math.inf for _, end in self.beliefs(name)):
                self.news.clear()
                await self.news.wait()


class Program:
    """Carries out the commands."""

    session: tenure.Session

    def __init__(self, url: str) -> None:
        self.client = tenure.connect(url)
        self.leases: dict[str, tenure.Lease] = {}
        self.tasks: list[asyncio.Task[Any]] = []

    async def do_open(self) -> None:
        """So that a take-over takes nothing but its own time."""
        await self.client.session()

    async def do_look_no_more(self) -> None:
        look_no_more(self.client._core.engine)

    async def do_begin(self, window: float, resumable: bool = True) -> str:
        """Returns what resumes the session, if anything does."""
        self.session = await self.client.session(resumable=resumable, recovery_window=window)
        return self.session.resume_token if resumable else ""

    async def do_resume(self, token: str, assume_dead: bool = False) -> dict[str, Any]:
        asked = now()
        self.session = await self.client.session(resume=token, assume_dead=assume_dead)
        at = now()
        found = [[each.name, each.order_id, each.granted] for each in self.session.recovered]
        return {"took": at - asked, "at": at, "found": found}

    async def do_is_taking_over(self) -> bool:
        engine: Any = self.client._core.engine
        return engine._open and is_taking_over(engine)

    async def do_lock(self, name: str, timeout: float | None = None) -> int:
        lease = await self.session.mutex(name).lock(timeout=timeout)
        self._believe(name, lease)
        return lease.fencing_token

    async def do_line_up(self, name: str) -> None:
        """Wait for a mutex in the background; done when the request is in the queue."""
        self.tasks.append(asyncio.create_task(self._wait(name)))
        while True:
            holder = await self.session.mutex(name).inspect()
            if holder is not None and holder.waiting:
                return
            await asyncio.sleep(_LOOK)

    async def _wait(self, name: str) -> None:
        with contextlib.suppress(TenureError):
            self._believe(name, await self.session.mutex(name).lock())

    async def do_recover(self, name: str) -> int:
        """Take up what was recovered, and wait until it is held."""
        ticket = self.session.mutex(name).recover()
        assert ticket is not None
        lease = await ticket.wait()
        self._believe(name, lease)
        return lease.fencing_token

    async def do_release(self, name: str) -> None:
        await self.leases[name].release()

    async def do_detach(self) -> None:
        await self.session.detach()

    async def do_close(self) -> None:
        await self.client.aclose()

    def _believe(self, name: str, lease: tenure.Lease) -> None:
        self.leases[name] = lease
        at = now()
        if lease.held:
            say("holds", name=name, token=lease.fencing_token)
            self.tasks.append(asyncio.create_task(self._look(name, lease, at)))

    async def _look(self, name: str, lease: tenure.Lease, last: float) -> None:
        """See how long it is held; `last` is when it was seen to be."""
        while True:
            at, deadline = now(), lease.deadline
            if not lease.held:
                say("lost", name=name, last=last, deadline=deadline, why=str(lease.loss))
                return
            last = at
            await asyncio.sleep(_LOOK)

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.client.aclose()


if __name__ == "__main__":
    asyncio.run(serve(Program(sys.argv[1])))
