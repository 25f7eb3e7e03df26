"""A barrier: parties wait until all of them have arrived, round after round.

It is a lasting semaphore whose limit is the number of parties. An arrival is a request of count 1.
When all places are owned by parties that have not passed yet, the round is full. Then the last
party to arrive writes the *mark* into the semaphore's data: the fencing tokens of all of them. A
party that finds its own token in the mark passes, and releases its place. Rules:

* Only a grant can make a round full, so a party checks only after its own grant.
* A party keeps its place until it has found itself in the mark. So the next round cannot be full
  before all have left this one, and no mark is overwritten before all have seen it. A party that
  arrives early for the next round waits in the queue.
* Checking and marking are one step, under a mutex of the same session. Otherwise a slow party could
  overwrite the mark of a round that was filled again meanwhile.
* When a party dies, its place is released: the round is no longer full, and the next party that
  gets the place checks again. A party in the mark counts as arrived, even if it dies later.
"""

from __future__ import annotations

import asyncio

from tenure.durations import Duration, timeout_seconds
from tenure.errors import AcquireTimeout, InvalidArgument, SemaphoreExists
from tenure.model import SemaphoreDescription
from tenure.recipes.base import Source

MOST_PARTIES = 60_000
"""The fencing tokens of so many parties fit into a semaphore's data."""


class Barrier:
    """A barrier on a node, where a number of parties wait for each other. It is reusable.

    No party passes before all have arrived in its round. A party that waits again takes part in the
    next round, and surplus parties wait for the round after it.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,016 bytes; the mutex ``<name>.marking`` is used, too.
        parties: the number of parties, 1 to 60,000; the same for all of them.
    """

    def __init__(self, source: Source, name: str, parties: int) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self.parties = parties
        self._places = source.semaphore(name)
        self._marking = source.mutex(f"{name}.marking")
        if not isinstance(parties, int) or not 1 <= parties <= MOST_PARTIES:
            raise self._invalid(
                f"a barrier has 1 to {MOST_PARTIES} parties, {name!r} on {self._places.node} "
                f"was given {parties!r}"
            )

    def __repr__(self) -> str:
        """Return the name and the number of parties."""
        return f"<Barrier {self.name!r} of {self.parties} parties>"

    async def wait(self, timeout: Duration | None = None) -> int:
        """Wait until all parties have arrived.

        A party that is cancelled, or out of time, or dies, before the round is full, leaves it:
        another must arrive instead. (At the instant in which the round becomes full, a leaving
        party may still be counted.)

        Args:
            timeout: seconds to wait, on the local clock; ``None``: until all have arrived.

        Returns:
            The position of this party's arrival in its round: 0 the first, `parties` - 1 the last.

        Raises:
            AcquireTimeout: not all arrived in time.
            InvalidArgument: a barrier for another number of parties, or another object, has that
                name.
            LeaseLost: the place in the round was lost before all had arrived.
            SessionExpired, SessionClosed: the session has ended.
        """
        limit = timeout_seconds(timeout)
        expiry = asyncio.timeout(limit)
        try:
            async with expiry:
                return await self._wait(expiry, limit)
        except TimeoutError:
            if not expiry.expired():
                raise
            raise AcquireTimeout(
                f"not all {self.parties} parties of the barrier {self.name!r} on "
                f"{self._places.node} arrived within {limit:g} s; this one has left again",
                node=self._places.node,
                name=self.name,
            ) from None

    async def _wait(self, expiry: asyncio.Timeout, limit: float | None) -> int:
        await self._create()
        # The expiry comes first. This timeout says that the waits do not last for ever.
        late = None if limit is None else limit + 1.0
        async with self._places.acquire(timeout=late) as place:
            if self._is_full(await self._places.describe(owners=True)):
                await self._mark(expiry, late)
            token = place.fencing_token
            async with self._places.watch(data=True) as states:
                while token not in (arrived := self._marked(await anext(states))):
                    pass
            expiry.reschedule(None)  # this party has passed
        return arrived.index(token)

    async def _mark(self, expiry: asyncio.Timeout, late: float | None) -> None:
        async with self._marking.lock(timeout=late):
            described = await self._places.describe(owners=True)
            if self._is_full(described):
                expiry.reschedule(None)  # all have arrived
                tokens = (owner.order_id for owner in described.owners)
                await self._places.update(" ".join(map(str, tokens)).encode())

    def _is_full(self, described: SemaphoreDescription) -> bool:
        """Return true if all places are taken by parties that have not passed yet."""
        passed = set(self._marked(described))
        waiting = [owner for owner in described.owners if owner.order_id not in passed]
        return len(waiting) == self.parties

    def _marked(self, described: SemaphoreDescription) -> list[int]:
        """Return the tokens of the parties of the last full round, in the order of arrival."""
        try:
            return [int(token) for token in described.data.split()]
        except ValueError:
            raise self._invalid(
                f"{self.name!r} on {self._places.node} has data that is not a barrier's; use "
                "another name for one of the two"
            ) from None

    async def _create(self) -> None:
        try:
            await self._places.create(self.parties, exist_ok=True)
        except SemaphoreExists as error:
            raise self._invalid(
                f"{self.name!r} on {self._places.node} is a semaphore of limit {error.limit}, and "
                f"is used here as a barrier of {self.parties} parties; all parties must give the "
                "same number, and a finished barrier can be deleted"
            ) from None

    def _invalid(self, message: str) -> InvalidArgument:
        return InvalidArgument(message, node=self._places.node, name=self.name)
