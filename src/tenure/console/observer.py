"""Observer: reads the store for all browsers together, and keeps the record.

Rules:

* **One reader.** There is one observer of a store, however many pages are open.
* **Bounded work.** After each part that it has read, it rests for `REST` times as long as that
  took. On a large store a round takes longer, instead of costing more.
* **Waits.** A reading of a node's waits has bounds of its own (`reading.read_waits`).
* **Idle.** While no page is open, a round begins only once in `IDLE` seconds.
* **Outages.** An error is logged and shown, and the next round follows after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence

from tenure.background import Failures
from tenure.console.reading import answered, list_nodes, read_waits
from tenure.console.record import StoreRecord
from tenure.console.waits import NodeWaits
from tenure.core.deadlocks import WAITS, shows_waits
from tenure.engines.contract import Engine, Pages
from tenure.errors import NodeNotFound, SemaphoreNotFound, TenureError
from tenure.model import RequestDescription, SemaphoreDescription

INTERVAL = 1.0
IDLE = 10.0
IDLE_AFTER = 60.0
"""Seconds between two rounds, usually and while no page is open; and after which that is so."""

REST = 9.0
"""Rest after each part, as a multiple of the time that it took."""

SLICE = 200
"""Semaphores that are read at a time."""

QUEUES = 40
"""Semaphores whose first waiters are read in a round."""

WAITERS = 20
"""Number of first waiters that are read."""

WHOLE = 1_000
"""Longest queue that is read of a store that cannot return a part of it."""


class Observer:
    """Observer of one store.

    Args:
        store: the store, without permissions.
        logger: logs its errors.

    Attributes:
        record: what it has seen.
        waits: the waits of each node that has been read, if the store shows them.
        trouble: the error of its last round, while it lasts.
        round_took: duration of its last round in seconds.
    """

    def __init__(self, store: Engine, logger: logging.Logger) -> None:
        self.record = StoreRecord()
        self.waits: dict[str, NodeWaits] = {}
        self.trouble: TenureError | None = None
        self.round_took = 0.0
        self._store = store
        self._failures = Failures("observing the store for the console", logger)
        self._wanted_at = float("-inf")
        self._wake = asyncio.Event()
        self._attended: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._publishing: set[str] = set()  # nodes on which tasks have published waits
        self._first_round = asyncio.Event()

    async def run(self) -> None:
        """Read the store until it is cancelled."""
        while True:
            began = self._store.clock.now()
            try:
                await self._round()
                self.trouble = None
                self._failures.succeeded()
                pause = 0.0
            except Exception as error:
                self.trouble = error if isinstance(error, TenureError) else None
                pause = self._failures.failed(error)
            self._first_round.set()
            now = self._store.clock.now()
            self.round_took = now - began
            idle = now - self._wanted_at > IDLE_AFTER
            pause = max(pause, (IDLE if idle else INTERVAL) - self.round_took)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause)):
                    await self._wake.wait()

    def want(self) -> None:
        """Record that a page is being shown, so that rounds follow each other soon."""
        now = self._store.clock.now()
        if now - self._wanted_at > IDLE_AFTER:
            self._wake.set()
        self._wanted_at = now

    def attend(self, node: str, name: str) -> None:
        """Read the waiters of a semaphore in the next rounds, before those of others."""
        self._attended[node, name] = None
        self._attended.move_to_end((node, name))
        if len(self._attended) > QUEUES // 2:
            self._attended.popitem(last=False)

    async def first_round(self) -> None:
        """Wait for the end of the first round, for a short time only."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL):
                await self._first_round.wait()

    async def _round(self) -> None:
        """Read all nodes once."""
        store, record = self._store, self.record
        now = store.clock.now
        record.begin(now())
        paths = await list_nodes(store)
        record.saw_nodes(paths, now())
        self.waits = {path: self.waits[path] for path in paths if path in self.waits}
        self._publishing.intersection_update(paths)
        queues = QUEUES
        for path in paths:
            try:
                queues -= await self._node(path, queues)
                if shows_waits(store.capabilities):
                    await self._waits(path)
            except NodeNotFound:
                continue  # dropped just now
            record.finish(path, now())
        record.forget_old(now())

    async def _node(self, path: str, queues: int) -> int:
        """Read a node, and return of how many semaphores the waiters were read."""
        store, pages = self._store, self._store.pages()
        read = 0
        after = ""
        self._publishing.discard(path)
        while True:
            began = store.clock.now()
            if pages is None:
                listing = store.list_semaphores(path, owners=True, waiters=False)
            else:
                listing = pages.semaphores(
                    path, owners=True, waiters=False, after=after, most=SLICE
                )
            found = await answered(store, f"the list of semaphores on {path}", listing)
            at = store.clock.now()
            for number, each in enumerate(found):
                if each.name == WAITS:
                    self._publishing.add(path)
                    continue
                waiters = None
                if each.waiting and read < queues and self._is_wanted(path, each, queues - read):
                    waiters = await self._waiters(pages, path, each)
                    read += 1
                self.record.saw(path, each, at, waiters)
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
            await asyncio.sleep(REST * min(store.clock.now() - began, 1.0))
            if pages is None or not found:
                return read
            after = found[-1].name

    async def _waits(self, path: str) -> None:
        """Read the waits of a node, and the queues that pages show."""
        began = self._store.clock.now()
        shown = [self.record.find(*key) for key in self._attended if key[0] == path]
        first = [seen.name for seen in shown if seen is not None and seen.waiting]
        if not first and path not in self._publishing:
            self.waits[path] = NodeWaits(path, began)
            return
        self.waits[path] = await read_waits(self._store, path, first=first)
        await asyncio.sleep(REST * min(self._store.clock.now() - began, 1.0))

    def _is_wanted(self, path: str, each: SemaphoreDescription, left: int) -> bool:
        """Return true if the waiters of a semaphore are to be read."""
        return (path, each.name) in self._attended or left > len(self._attended)

    async def _waiters(
        self, pages: Pages | None, path: str, each: SemaphoreDescription
    ) -> Sequence[RequestDescription] | None:
        """Return the first waiters of a semaphore, if that costs little."""
        store, what = self._store, f"the queue of {each.name!r} on {path}"
        try:
            if pages is not None:
                reading = pages.requests(path, each.name, waiters=True, after=0, most=WAITERS)
                return await answered(store, what, reading)
            if (each.waiting or 0) > WHOLE:
                return None
            whole = store.describe_semaphore(path, each.name, owners=False, waiters=True)
            return (await answered(store, what, whole)).waiters[:WAITERS]
        except SemaphoreNotFound:
            return None  # deleted just now
