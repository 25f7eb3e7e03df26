"""Slots: numbers below the limit that distinguish the holders of one semaphore.

Slot *i* of the semaphore ``gpu`` is the mutex ``gpu/slot/i`` on the same node. A lease takes as
many of them as its count, the lowest that are free, through its own session. So a slot has one
holder for the same reasons as any mutex, on every engine, and ends with the session of its lease.

* A lease takes its slots when a program first reads them, and keeps them until it ends.
* It releases its slots before its place in the semaphore's queue. The next holder therefore finds
  enough free ones; only a lease that was evicted may still hold its slots for a moment.
* A lease whose count shrinks keeps its lowest slots, and releases the others.
"""

from __future__ import annotations

import asyncio
import contextlib

from tenure._client.acquire import as_it_is, join, try_acquire
from tenure._client.options import RequestOptions
from tenure._client.request import Request
from tenure._client.request_states import WAITING
from tenure._client.watch import described_now
from tenure.errors import InvalidArgument
from tenure.model import EPHEMERAL_LIMIT

__all__ = ["MOST_SLOTS", "Slots"]

MOST_SLOTS = 1024
"""The highest limit of a semaphore whose leases have slots."""


class Slots:
    """The slots of one lease, on its session's loop."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._taking = asyncio.Lock()
        self._taken: dict[int, Request] = {}

    async def take(self) -> tuple[int, ...]:
        """Take the slots that are missing, and return all. Cancelled, it keeps what it has.

        Raises:
            AcquireTimeout, EngineUnavailable: the store does not answer.
            InvalidArgument: the semaphore has no limit up to `MOST_SLOTS`.
            LeaseLost, LeaseReleased: the lease is not held.
        """
        request = self._request
        async with self._taking:
            request.check()
            if len(self._taken) < request.count:
                limit = await self._limit()
                while len(self._taken) < request.count:
                    number, slot = await self._lowest(limit)
                    self._taken[number] = slot
                    if not request.held:
                        self.release()
                        request.check()
                self.shrink(request.count)  # which may have shrunk meanwhile
            return tuple(sorted(self._taken))

    def release(self) -> None:
        """Release all. A release that the store refuses is sent again."""
        self.shrink(0)

    def shrink(self, count: int) -> None:
        """Release all but the lowest."""
        for number in sorted(self._taken)[count:]:
            _release(self._taken.pop(number))

    async def _limit(self) -> int:
        request = self._request
        session = request.session
        described = await session.contact.answered(
            f"limit of semaphore {request.name!r} on {request.node}",
            described_now(session, request.name, ephemeral=False, owners=False),
        )
        if described.limit > MOST_SLOTS:
            raise InvalidArgument(
                f"{request.name!r} on {request.node} has no slots: they need a lasting semaphore "
                f"with a limit of at most {MOST_SLOTS:,}",
                node=request.node,
                name=request.name,
            )
        return described.limit

    def _options(self, number: int) -> RequestOptions[Request]:
        name = f"{self._request.name}/slot/{number}"
        # A slot is part of its lease, whose own policy says what a loss does.
        return RequestOptions(
            "slot",
            name,
            EPHEMERAL_LIMIT,
            handle=as_it_is,
            ephemeral=True,
            on_loss="cancel",
        )

    async def _lowest(self, limit: int) -> tuple[int, Request]:
        """Return the lowest free slot, or the first that becomes free."""
        free = [number for number in range(limit) if number not in self._taken]
        for number in free:
            slot = await try_acquire(self._request.session, self._options(number))
            if slot is not None:
                return number, slot
        return await self._first(free)

    async def _first(self, numbers: list[int]) -> tuple[int, Request]:
        """Wait in the queues of several slots, and keep the lowest of the first granted."""
        queued: dict[int, Request] = {}
        kept: int | None = None
        try:
            for number in numbers:
                queued[number] = await join(self._request.session, self._options(number))
            while True:
                kept = next((number for number, slot in queued.items() if slot.held), None)
                if kept is not None:
                    return kept, queued[kept]
                self._request.check()
                gone = [number for number, slot in queued.items() if slot.state is not WAITING]
                if gone:  # evicted, or deleted by force
                    for number in gone:
                        queued[number] = await join(self._request.session, self._options(number))
                    continue
                changes = [each.change() for each in (self._request, *queued.values())]
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for number, slot in queued.items():
                if number != kept:
                    _release(slot)


def _release(slot: Request) -> None:
    # After an error the release is sent again. The lease's own release must not fail by it.
    with contextlib.suppress(Exception):
        slot.withdraw()
