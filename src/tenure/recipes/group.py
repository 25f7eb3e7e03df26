"""A group: its members with their data, and events when members join and leave.

Like a service registry it is an ephemeral semaphore: a member is a request of count 1, with the
member's data. The events are computed from the states of a watch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from tenure._client.lease import Lease
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure.model import SemaphoreDescription
from tenure.recipes.base import Source, States


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group.

    Attributes:
        data: its current data.
        session_id: the session through which it is a member.
        token: the fencing token of its membership, which identifies the member.
        since: seconds of its membership, where known; ignored in comparisons.
    """

    data: bytes
    session_id: int
    token: int
    since: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """A new member."""

    member: Member


@dataclass(frozen=True, slots=True)
class Updated:
    """A member with changed data."""

    member: Member
    before: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """A former member, as last seen: it left, or its session ended."""

    member: Member


Change: TypeAlias = "Joined | Updated | Left"


class Group:
    """The members of a group on a node.

    Example::

        from tenure.recipes import Group

        workers = Group(session, "workers")
        async with workers.join(b"host-1"):
            assert [each.data for each in await workers.members()] == [b"host-1"]

    A membership ends when it is released or its session ends: with the process on an engine that
    notices its death, else after the recovery window.

    Do not use the oldest member, ``(await group.members())[0]``, as a leader: two programs may
    temporarily see different ones. Use an election.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,024 bytes; not the name of a mutex (see `ServiceRegistry`).
    """

    def __init__(self, source: Source, name: str) -> None:
        """Set the name; nothing is sent to the store."""
        self.name = name
        self._semaphore = source.semaphore(name, ephemeral=True)

    def __repr__(self) -> str:
        """Return the class and the name."""
        return f"<Group {self.name!r}>"

    def join(self, data: bytes = b"", *, on_loss: OnLoss | None = None) -> Once[Lease]:
        """Become a member: ``async with group.join(b"host-1") as membership``, or ``await`` it.

        A membership is a lease. Its block raises `LeaseLost` when it is lost, and leaves the group
        at its end. ``await membership.update(b"busy")`` changes its data.

        Args:
            data: the member's data, visible to the others, at most 1 MiB.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.

        Raises:
            InvalidArgument: a lasting semaphore has that name, or the data is too long.
            SessionExpired, SessionClosed: the session has ended.
        """
        return self._semaphore.acquire(data=data, on_loss=on_loss)

    async def members(self) -> tuple[Member, ...]:
        """Return the current members, oldest first.

        Raises:
            InvalidArgument: a lasting semaphore has that name.
            SessionExpired, SessionClosed: the session has ended.
        """
        return _members(await self._semaphore.describe(owners=True))

    def watch(self) -> States[tuple[Member, ...]]:
        """Return the current members, and again after every change, oldest first."""
        return States(self._semaphore.watch(owners=True), _members)

    def changes(self) -> Changes:
        """Stream the changes: the current members as `Joined`, then each change.

        A program that applies them all knows the members. Changes are merged when they are faster
        than the reader: a member that joined and left between two reads is not reported, and of
        several updates only the last.
        """
        return Changes(self.watch())


class Changes:
    """A stream of changes in a group: an async iterator and an async context manager."""

    def __init__(self, states: States[tuple[Member, ...]]) -> None:
        self._states = states
        self._known: dict[int, Member] = {}
        self._untold: deque[Change] = deque()

    async def __aenter__(self) -> Changes:
        """Enter the block that ends the watch at its end."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the watch."""
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching. Safe to call twice; a waiting ``async for`` ends."""
        self._untold.clear()
        await self._states.aclose()

    def __aiter__(self) -> Changes:
        """Return the stream itself."""
        return self

    async def __anext__(self) -> Change:
        """Wait for the next change and return it."""
        while not self._untold:
            self._compare(await anext(self._states))
        return self._untold.popleft()

    def _put_back(self, change: Change) -> None:
        """Return a change to the stream, after its reader was interrupted."""
        self._untold.appendleft(change)

    def _compare(self, members: tuple[Member, ...]) -> None:
        before, self._known = self._known, {member.token: member for member in members}
        self._untold += [Left(was) for token, was in before.items() if token not in self._known]
        for member in members:
            was = before.get(member.token)
            if was is None:
                self._untold.append(Joined(member))
            elif was.data != member.data:
                self._untold.append(Updated(member, was.data))


def _members(described: SemaphoreDescription) -> tuple[Member, ...]:
    return tuple(
        Member(owner.data, owner.session_id, owner.order_id, owner.since)
        for owner in described.owners
    )
