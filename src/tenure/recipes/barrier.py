"""Barriers: parties wait until all of them have arrived, round after round.

A barrier is a lasting semaphore whose limit is the number of parties. An arrival is a request of
count 1. When all places are owned by parties that have not passed yet, the round is full. Then the
last party to arrive writes the *mark* into the semaphore's data: the fencing tokens of all of them.
A party that finds its own token in the mark passes. At a `Barrier` it releases its place then, at a
`DoubleBarrier` when it leaves. Rules:

* Only a grant can make a round full, so a party checks only after its own grant.
* A party keeps its place until it has found itself in the mark. So the next round cannot be full
  before all have left this one, and no mark is overwritten before all have seen it. A party that
  arrives early for the next round waits in the queue.
* Checking and marking are one step, under the mutex ``<name>.marking``. Otherwise a slow party
  could overwrite the mark of a round that was filled again meanwhile.
* When a party dies, its place is released: the round is no longer full, and the next party that
  gets the place checks again. A party in the mark counts as arrived, even if it dies later.

The data has a second part, the *break*: the fencing token of the mutex's lease in the latest
`Barrier.abort` or `Barrier.reset`, and which of them it was. Rules:

* A party that is not in the mark is broken if the barrier is aborted, or if the break is newer than
  the one that the party found when it came. This holds for parties in the queue, too.
* A place older than the break fills no round: its party is about to leave. Order ids rise with
  every request of the store, so they can be compared with the token.
* A mark keeps the break, so a party that is slow to read still finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from tenure._client.acquire import as_it_is, join, settled
from tenure._client.handles import CallSite, call_site
from tenure._client.internals import source_of
from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.request import WAITING, Request, RequestOptions
from tenure._client.scope import Scope
from tenure._client.watch import Watch
from tenure.durations import Duration, timeout_seconds
from tenure.errors import (
    AcquireTimeout,
    InvalidArgument,
    SemaphoreExists,
    SemaphoreNotFound,
    TenureError,
)
from tenure.model import SemaphoreDescription
from tenure.recipes.base import Source, write_under

MOST_PARTIES = 60_000
"""The fencing tokens of so many parties fit into a semaphore's data."""


class BrokenBarrier(TenureError, RuntimeError):
    """The barrier was aborted, or was reset while this party waited."""


class _State(NamedTuple):
    """The data of a barrier's semaphore.

    Attributes:
        passed: the tokens of the parties of the last full round, in the order of arrival.
        broken: the token of the latest abort or reset; 0: there was none.
        aborted: whether it was an abort.
    """

    passed: tuple[int, ...] = ()
    broken: int = 0
    aborted: bool = False

    def encode(self) -> bytes:
        words = [str(token) for token in self.passed]
        if self.broken:
            words += ["aborted" if self.aborted else "reset", str(self.broken)]
        return " ".join(words).encode()

    @classmethod
    def decode(cls, data: bytes) -> _State:
        """Decode it. Raises `ValueError` for other data."""
        words = data.split()
        if len(words) > 1 and words[-2] in (b"aborted", b"reset"):
            *tokens, how, broken = words
            return cls(tuple(map(int, tokens)), int(broken), how == b"aborted")
        return cls(tuple(map(int, words)))

    def is_full(self, described: SemaphoreDescription, parties: int) -> bool:
        """Return true if all places are taken by parties that wait for this round."""
        passed = set(self.passed)
        waiting = [
            owner
            for owner in described.owners
            if owner.order_id not in passed and owner.order_id > self.broken
        ]
        return not self.aborted and len(waiting) == parties


class _Rounds:
    """The rounds of a barrier.

    Args:
        source: a session or a client.
        name: of the semaphore.
        parties: the number of parties.
    """

    def __init__(self, source: Source, name: str, parties: int) -> None:
        self.name = name
        self.parties = parties
        self.places = source.semaphore(name)
        self._source = source_of(self.places)
        self._marking = source.mutex(f"{name}.marking")
        if not isinstance(parties, int) or not 1 <= parties <= MOST_PARTIES:
            raise self._invalid(
                f"a barrier has 1 to {MOST_PARTIES} parties, {name!r} on {self.node} "
                f"was given {parties!r}"
            )

    @property
    def node(self) -> str:
        return self.places.node

    async def arrive(
        self, limit: float | None, on_loss: OnLoss | None, stop_time: Duration, site: CallSite
    ) -> tuple[Request, tuple[int, ...]]:
        """Wait until all have arrived. Return the place, and the tokens of all in their order."""
        options = RequestOptions(
            "barrier",
            self.name,
            1,
            handle=as_it_is,
            ephemeral=False,
            on_loss=on_loss,
            stop_time=stop_time,
        )
        expiry = asyncio.timeout(limit)
        try:
            async with expiry:
                return await self._arrive(expiry, limit, options, site)
        except TimeoutError:
            if not expiry.expired():
                raise
            error = self.late(
                f"not all {self.parties} parties of the barrier {self.name!r} on {self.node} "
                f"arrived within {limit:g} s",
                "; this one has left again",
            )
            raise error from error.__cause__

    async def _arrive(
        self,
        expiry: asyncio.Timeout,
        limit: float | None,
        options: RequestOptions[Request],
        site: CallSite,
    ) -> tuple[Request, tuple[int, ...]]:
        await self.create()
        async with self.places.watch(data=True) as states:
            view = _View(self, states)
            await view.start()
            place = await join(self._source, options, site)
            try:
                if place.state is WAITING:
                    await view.granted(place, for_ever=limit is None)
                async with _while_held(place):
                    if await self._is_full():
                        await self._mark(expiry, None if limit is None else limit + 1.0)
                    assert place.order_id is not None  # it is granted, in a store with data
                    while place.order_id not in view.state.passed:
                        view.check()
                        await view.next()
            except BaseException as error:
                place.withdraw_because(error)
                raise
            return place, view.state.passed

    async def _is_full(self) -> bool:
        described = await self.places.describe(owners=True)
        return self.state(described).is_full(described, self.parties)

    async def _mark(self, expiry: asyncio.Timeout, late: float | None) -> None:
        # The expiry comes first. The timeout says that the wait does not last for ever.
        async with self._marking.lock(timeout=late) as lease:
            described = await self.places.describe(owners=True)
            state = self.state(described)
            if state.is_full(described, self.parties):
                expiry.reschedule(None)  # all have arrived
                tokens = tuple(owner.order_id for owner in described.owners)
                await write_under(lease, self.name, state._replace(passed=tokens).encode())

    async def break_(self, timeout: Duration | None, *, aborted: bool) -> None:
        """Break the current round."""
        async with self._marking.lock(timeout=timeout) as lease:
            await self.create()
            state = self.state(await self.places.describe())
            broken = state._replace(broken=lease.fencing_token, aborted=aborted)
            await write_under(lease, self.name, broken.encode())

    def state(self, described: SemaphoreDescription) -> _State:
        try:
            return _State.decode(described.data)
        except ValueError:
            raise self._invalid(
                f"{self.name!r} on {self.node} has data that is not a barrier's; use "
                "another name for one of the two"
            ) from None

    async def create(self) -> None:
        try:
            await self.places.create(self.parties, exist_ok=True)
        except SemaphoreExists as error:
            raise self._invalid(
                f"{self.name!r} on {self.node} is a semaphore of limit {error.limit}, and "
                f"is used here as a barrier of {self.parties} parties; all parties must give the "
                "same number, and a finished barrier can be deleted"
            ) from None

    def late(self, what: str, then: str) -> AcquireTimeout:
        """Return the error for a wait that took too long; during an outage it says so."""
        obstacle = self._source.contact.obstacle(self.name)
        because = "" if obstacle is None else f", because {obstacle.clause}"
        error = AcquireTimeout(f"{what}{because}{then}", node=self.node, name=self.name)
        error.__cause__ = None if obstacle is None else obstacle.cause
        return error

    def _invalid(self, message: str) -> InvalidArgument:
        return InvalidArgument(message, node=self.node, name=self.name)


class _View:
    """The state of a barrier, as one party sees it.

    Attributes:
        state: the newest state that the party has read.
    """

    def __init__(self, rounds: _Rounds, states: Watch[SemaphoreDescription]) -> None:
        self._rounds = rounds
        self._states = states
        self._broken = 0
        self.state = _State()

    async def start(self) -> None:
        """Read the state that the party finds when it comes."""
        await self.next()
        self._broken = self.state.broken
        self.check()

    async def next(self) -> None:
        """Wait for a change."""
        self.state = self._rounds.state(await anext(self._states))

    def check(self) -> None:
        """Raise `BrokenBarrier` if a party that has not passed is broken."""
        name, node = self._rounds.name, self._rounds.node
        if self.state.aborted:
            raise BrokenBarrier(
                f"the barrier {name!r} on {node} was aborted; reset() makes it usable again",
                node=node,
                name=name,
            )
        if self.state.broken > self._broken:
            raise BrokenBarrier(
                f"the barrier {name!r} on {node} was reset while this party waited; wait again",
                node=node,
                name=name,
            )

    async def granted(self, place: Request, *, for_ever: bool) -> None:
        """Wait until a place in the queue is granted, unless the barrier is broken before."""
        broken = asyncio.timeout(None)
        watching = asyncio.ensure_future(self._break(broken))
        try:
            async with broken:
                await settled(place, for_ever=for_ever)
        except TimeoutError:
            if not broken.expired():
                raise
            watching.result()
        finally:
            watching.cancel()
        await asyncio.wait([watching])  # it has left the stream of states
        place.check()

    async def _break(self, broken: asyncio.Timeout) -> None:
        try:
            while True:
                await self.next()
                self.check()
        except TenureError:
            broken.reschedule(0.0)
            raise


@asynccontextmanager
async def _while_held(place: Request) -> AsyncIterator[None]:
    """Cancel the body when the place is lost, as a lease's block does. The place is kept."""
    place.scope = scope = Scope(place)
    scope.enter()
    try:
        yield
    except BaseException as error:
        if scope.exit(error) and place.loss is not None:
            raise place.why_not_held() from None
        raise
    else:
        scope.exit(None)
    finally:
        place.scope = None


class Barrier:
    """A barrier on a node, where a number of parties wait for each other. It is reusable.

    Example::

        from tenure.recipes import Barrier

        loaded = Barrier(session, "loaded", parties=1)
        assert await loaded.wait(timeout=60) == 0

    No party passes before all have arrived in its round. A party that waits again takes part in the
    next round, and surplus parties wait for the round after it.

    Unlike `threading.Barrier`, it is not broken by a party that leaves: another one may arrive
    instead. `abort` breaks it.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,016 bytes; the mutex ``<name>.marking`` is used, too.
        parties: the number of parties, 1 to 60,000; the same for all of them.
    """

    def __init__(self, source: Source, name: str, parties: int) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self.parties = parties
        self._rounds = _Rounds(source, name, parties)

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
            AcquireTimeout: not all arrived in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            BrokenBarrier: the barrier is aborted, or was reset while this party waited.
            InvalidArgument: a barrier for another number of parties, or another object, has that
                name.
            LeaseLost: the place in the round was lost before all had arrived.
            SessionExpired, SessionClosed: the session has ended.
        """
        limit = timeout_seconds(timeout)
        place, arrived = await self._rounds.arrive(limit, None, 0.0, call_site())
        assert place.order_id is not None  # it was found among those that arrived
        await place.leave()
        return arrived.index(place.order_id)

    async def abort(self, *, timeout: Duration | None = None) -> None:
        """Break the barrier: its parties get `BrokenBarrier`, also later ones, until `reset`.

        Parties of a round that is full have passed, even if they do not know yet.

        Args:
            timeout: seconds to wait for a party that completes a round, on the local clock.

        Raises:
            AcquireTimeout: it took too long; nothing was changed.
            InvalidArgument: a barrier for another number of parties, or another object, has that
                name.
            LeaseLost, SessionExpired, SessionClosed: the session has ended, or the request for the
                mutex was evicted; it may have been aborted.
        """
        await self._rounds.break_(timeout, aborted=True)

    async def reset(self, *, timeout: Duration | None = None) -> None:
        """Begin a new round: the parties that wait now get `BrokenBarrier`, later ones do not.

        An aborted barrier can be used again. Arguments and errors are those of `abort`.
        """
        await self._rounds.break_(timeout, aborted=False)

    async def broken(self) -> bool:
        """Read whether the barrier is aborted.

        Raises:
            EngineUnavailable: the store cannot be reached, or does not answer.
            InvalidArgument: another object has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        try:
            return self._rounds.state(await self._rounds.places.describe()).aborted
        except SemaphoreNotFound:
            return False


class Party(Lease):
    """A party inside of a double barrier: the lease of its place. `DoubleBarrier.enter` returns it.

    The end of its block leaves without waiting for the others; `leave` waits.
    """

    __slots__ = ("_arrived", "_rounds")

    def __init__(self, request: Request, arrived: tuple[int, ...], rounds: _Rounds) -> None:
        super().__init__(request)
        self._arrived = arrived
        self._rounds = rounds

    @property
    def position(self) -> int:
        """The position of its arrival: 0 the first, and so on."""
        return self._arrived.index(self.fencing_token)

    async def leave(self, timeout: Duration | None = None) -> None:
        """Leave, and wait until all parties that entered together have left, or have died.

        Called again, for example after `AcquireTimeout`, it continues to wait.

        Args:
            timeout: seconds to wait, on the local clock; ``None``: until all have left.

        Raises:
            AcquireTimeout: not all left in time; this party has left. During an outage the message
                says so, and ``__cause__`` is the failure of the connection.
            LeaseLost: the place was lost before.
            SemaphoreNotFound: the barrier was deleted.
            SessionExpired, SessionClosed: the session has ended.
        """
        limit = timeout_seconds(timeout)
        inside = len(self._arrived)
        rounds, expiry = self._rounds, asyncio.timeout(limit)
        try:
            async with expiry:
                await self.release()
                async with rounds.places.watch(owners=True) as states:
                    while inside := self._inside(await anext(states)):
                        pass
        except TimeoutError:
            if not expiry.expired():
                raise
            error = rounds.late(
                f"not all parties of the barrier {rounds.name!r} on {rounds.node} left within "
                f"{limit:g} s",
                f": {inside} of {len(self._arrived)} were inside",
            )
            raise error from error.__cause__

    def _inside(self, described: SemaphoreDescription) -> int:
        arrived = set(self._arrived)
        return sum(owner.order_id in arrived for owner in described.owners)


class DoubleBarrier:
    """A barrier on a node that a number of parties enter together, and leave together.

    Example::

        from tenure.recipes import DoubleBarrier

        computing = DoubleBarrier(session, "computing", parties=1)
        async with computing.enter(timeout=60) as party:
            await work(party.position)
            await party.leave(timeout=60)

    No party enters before all have arrived, and `Party.leave` waits until all have left. It is
    reusable: the next round begins when all parties of this one have left.

    A party that dies, or leaves its block with an error, has left: the others do not wait for it. A
    party that loses its place gets `LeaseLost`, like the holder of any lease.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,016 bytes; the mutex ``<name>.marking`` is used, too.
        parties: the number of parties, 1 to 60,000; the same for all of them.
    """

    def __init__(self, source: Source, name: str, parties: int) -> None:
        """Set the options; nothing is sent to the store."""
        self.name = name
        self.parties = parties
        self._rounds = _Rounds(source, name, parties)

    def __repr__(self) -> str:
        """Return the name and the number of parties."""
        return f"<DoubleBarrier {self.name!r} of {self.parties} parties>"

    def enter(
        self,
        *,
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Party]:
        """Enter when all have arrived: ``async with barrier.enter() as party``, or ``await`` it.

        A party that is cancelled, or out of time, or dies, before all have arrived, is
        not counted: another must arrive instead. (At the instant in which the last one arrives, a
        leaving party may still be counted.)

        Args:
            timeout: seconds to wait, on the local clock; ``None``: until all have arrived.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                counts as lost that much earlier.

        Raises:
            AcquireTimeout: not all arrived in time. During an outage the message says so, and
                ``__cause__`` is the failure of the connection.
            InvalidArgument: a barrier for another number of parties, or another object, has that
                name.
            LeaseLost: the place was lost before all had arrived.
            SelfDeadlock: the calling task is inside already, so not all can arrive.
            SessionExpired, SessionClosed: the session has ended.
        """
        limit = timeout_seconds(timeout)
        what = f"the entry of the barrier {self.name!r}"
        return Once(what, self._enter, limit, on_loss, stop_time, call_site())

    async def _enter(
        self, limit: float | None, on_loss: OnLoss | None, stop_time: Duration, site: CallSite
    ) -> Party:
        place, arrived = await self._rounds.arrive(limit, on_loss, stop_time, site)
        return Party(place, arrived, self._rounds)
