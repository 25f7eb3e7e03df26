"""A group: its members with their data, and the events of joining and leaving.

In the model it is what a service registry is: requests of count 1 for an ephemeral semaphore,
whose data is the members'. The changes are computed from the states that a watch sees.
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

__all__ = ["Change", "Changes", "Group", "Joined", "Left", "Member", "Updated"]


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a group.

    Attributes:
        data: what it joined with, or updated to since.
        session_id: the session through which it is a member.
        token: the fencing token of its membership: it identifies the member.
        since: seconds that it has been a member, where known; two members that differ in
            nothing else are equal.
    """

    data: bytes
    session_id: int
    token: int
    since: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is there that was not."""

    member: Member


@dataclass(frozen=True, slots=True)
class Updated:
    """A member has changed its data."""

    member: Member
    before: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """A member is not there any more: it left, or its session ended. As it was last seen."""

    member: Member


Change: TypeAlias = "Joined | Updated | Left"


class Group:
    """The members of a group on a node.

    Example::

        from tenure.recipes import Group

        workers = Group(session, "workers")
        async with workers.join(b"host-1"):
            assert [each.data for each in await workers.members()] == [b"host-1"]

    A membership ends when it is released and when its session ends: with the process on an
    engine that notices its death, else with the recovery window.

    The oldest member, ``(await group.members())[0]``, is no leader: for a while two programs may
    see different ones. An election has one.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,024 bytes; it must not be that of a mutex (see `ServiceRegistry`).
    """

    def __init__(self, source: Source, name: str) -> None:
        """Describe the group; nothing is sent to the store."""
        self.name = name
        self._semaphore = source.semaphore(name, ephemeral=True)

    def __repr__(self) -> str:
        """Return the class and the name, for people."""
        return f"<Group {self.name!r}>"

    def join(self, data: bytes = b"", *, on_loss: OnLoss | None = None) -> Once[Lease]:
        """Become a member: ``async with group.join(b"host-1") as membership``, or ``await`` it.

        A membership is a lease. Its block raises `LeaseLost` when it is lost, and leaves the
        group at its end. ``await membership.update(b"busy")`` changes its data in place.

        Args:
            data: what the others see of this member, at most 1 MiB.
            on_loss: what a loss does beside being raised; the session's default if ``None``.

        Raises:
            InvalidArgument: a lasting semaphore has that name, or the data is too long.
            SessionExpired, SessionClosed: the session is over.
        """
        return self._semaphore.acquire(data=data, on_loss=on_loss)

    async def members(self) -> tuple[Member, ...]:
        """Return the members now, the oldest first.

        Raises:
            InvalidArgument: a lasting semaphore has that name.
            SessionExpired, SessionClosed: the session is over.
        """
        return _members(await self._semaphore.describe(owners=True))

    def watch(self) -> States[tuple[Member, ...]]:
        """Return the members now, and again after every change, the oldest first."""
        return States(self._semaphore.watch(owners=True), _members)

    def changes(self) -> Changes:
        """Stream the changes: the current members as `Joined`, then each change as it comes.

        A program that applies them all knows the members. But changes are merged when
        they come faster than they are read: a member that joined and left between two reads is
        not shown at all, and of several updates only the last.
        """
        return Changes(self.watch())


class Changes:
    """A stream of changes in a group: an async iterator and an async context manager."""

    def __init__(self, states: States[tuple[Member, ...]]) -> None:
        """Start with no known members: the first members count as changes."""
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
        """Give a change again, whose reader was interrupted."""
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
