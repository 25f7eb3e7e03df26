"""Slots: numbers below the limit that distinguish the holders of one semaphore.

Slot *i* of the semaphore ``gpu`` is the mutex ``gpu/slot/i`` on the same node. A lease takes the
lowest free slots, as many as its count, through its own session. So a slot has at most one holder,
like any mutex, and is released with the session of its lease.

* A lease takes its slots when the program first reads them, and keeps them until it ends.
* It releases its slots before its tokens, so the next holder finds enough free slots. Only an
  evicted lease may hold its slots a little longer.
* A lease whose count shrinks keeps its lowest slots, and releases the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from tenure._client.acquire import as_it_is, join, try_acquire
from tenure._client.options import RequestOptions
from tenure._client.request import Request
from tenure._client.request_states import WAITING
from tenure._client.session_core import session_of
from tenure._client.source import SessionSource
from tenure._client.watch import described_now
from tenure.errors import InvalidArgument
from tenure.model import EPHEMERAL_LIMIT

MOST_SLOTS = 1024
"""Highest limit of a semaphore with slots."""


class Slots:
    """The slots of one lease, on its session's loop."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._taking = asyncio.Lock()
        self._taken: dict[int, Request] = {}

    async def take(self) -> tuple[int, ...]:
        """Take the missing slots, and return all. When cancelled, it keeps the slots it has.

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
                self.shrink(request.count)  # the count may have shrunk meanwhile
            return tuple(sorted(self._taken))

    def release(self) -> None:
        """Release all. A release that fails is sent again."""
        self.shrink(0)

    def shrink(self, count: int) -> None:
        """Release all but the lowest."""
        for number in sorted(self._taken)[count:]:
            _release(self._taken.pop(number))

    async def _limit(self) -> int:
        request = self._request
        session = session_of(request)
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

    def _source(self) -> SessionSource:
        # The caller has the lease, which keeps the session.
        return cast(SessionSource, self._request.session.anchor())

    def _options(self, number: int) -> RequestOptions[Request]:
        name = f"{self._request.name}/slot/{number}"
        # A slot is part of its lease, whose own policy handles the loss.
        return RequestOptions(
            "slot",
            name,
            EPHEMERAL_LIMIT,
            handle=as_it_is,
            ephemeral=True,
            on_loss="cancel",
        )

    async def _lowest(self, limit: int) -> tuple[int, Request]:
        """Return the lowest free slot, or the first to become free."""
        free = [number for number in range(limit) if number not in self._taken]
        for number in free:
            slot = await try_acquire(self._source(), self._options(number), 0.0, None)
            if slot is not None:
                return number, slot
        return await self._first(free)

    async def _first(self, numbers: list[int]) -> tuple[int, Request]:
        """Wait in the queues of several slots, and keep the lowest of those granted first."""
        queued: dict[int, Request] = {}
        kept: int | None = None
        try:
            for number in numbers:
                queued[number] = await join(self._source(), self._options(number), None)
            while True:
                kept = next((number for number, slot in queued.items() if slot.held), None)
                if kept is not None:
                    return kept, queued[kept]
                self._request.check()
                gone = [number for number, slot in queued.items() if slot.state is not WAITING]
                if gone:  # evicted, or deleted by force
                    for number in gone:
                        queued[number] = await join(self._source(), self._options(number), None)
                    continue
                changes = [each.change() for each in (self._request, *queued.values())]
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for number, slot in queued.items():
                if number != kept:
                    _release(slot)


def _release(slot: Request) -> None:
    # After an error the release is sent again. It must not fail the lease's own release.
    with contextlib.suppress(Exception):
        slot.withdraw()
