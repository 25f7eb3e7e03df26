"""Optional features of engines, with their defaults. `tenure.engines.contract` exports them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from tenure.core.rates import RateAnswer, RateCall
from tenure.engines.values import LastWords, Orphan
from tenure.errors import SemaphoreNotFound, Unsupported
from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription

Level: TypeAlias = Literal["ok", "warning", "failure"]
"""Severity of a finding; after a failure, the store cannot be used."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check (`tenure doctor`).

    Attributes:
        what: the subject, in a word or two.
        found: the result.
        remedy: how to repair it; empty if there is nothing to repair.
        absent: whether the store does not exist yet; its first use creates it, but not a diagnosis.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""
    absent: bool = False

    @classmethod
    def of_error(cls, what: str, error: Exception, prefix: str = "") -> Finding:
        """Return a failure from an error, with the remedy from the end of its text."""
        found, *remedy = re.split(r"; |\. (?=[A-Z])", str(error), maxsplit=1)
        return cls("failure", what, prefix + found, "".join(remedy))


@dataclass(frozen=True, slots=True)
class GuardStatement:
    """Statement that fails in a caller's PostgreSQL transaction, unless a lease is held.

    From its success until the transaction ends, the store grants the lease to no other request.

    Attributes:
        sql: the text, with ``?`` for each value, and no other question mark.
        values: the values.
        refusal: SQLSTATE of its failure if the lease is not held.
    """

    sql: str
    values: tuple[object, ...]
    refusal: str


class Pages(Protocol):
    """Lists of a store in pages, for a server that a long list must not block.

    Each page is consistent, but the list as a whole is not.
    """

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node, by id; fewer than `most` at the end of the list.

        Args:
            path: the node.
            after: the id of the last session of the previous page; 0 for the first page.
            most: the number of sessions on a page.

        Raises:
            NodeNotFound: there is no such node.
        """
        ...

    async def names(self, path: str, *, after: str, most: int) -> Sequence[str]:
        """Return the next names of a node's semaphores, sorted; none at the end of the list.

        Args:
            path: the node.
            after: the last name of the previous page; empty for the first page.
            most: the number of names on a page, which may have fewer.

        Raises:
            NodeNotFound: there is no such node.
        """
        ...

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node, by name; none at the end of the list.

        Args:
            path: the node.
            owners: whether to describe the owners, too.
            waiters: whether to describe the waiters, too.
            after: the name of the last semaphore of the previous page; empty for the first page.
            most: approximate number of semaphores and requests on a page, which has at least one
                semaphore.

        Raises:
            NodeNotFound: there is no such node.
        """
        ...

    async def requests(
        self, path: str, name: str, *, waiters: bool, after: int, most: int
    ) -> Sequence[RequestDescription]:
        """Return the next owners of a semaphore, or its next waiters, by order id.

        A store that has no such list reads all of them.

        Args:
            path: the node.
            name: the semaphore.
            waiters: whether to return the waiters; else the owners.
            after: the order id of the last request of the previous page; 0 for the first page.
            most: the number of requests on a page.

        Raises:
            NodeNotFound, SemaphoreNotFound: the node or the semaphore does not exist.
        """
        ...


RateReply: TypeAlias = RateAnswer | Coroutine[Any, Any, RateAnswer] | asyncio.Future[RateAnswer]
"""Answer of `Engine.rate`, or what is awaited for it. A future's cancellation stops nothing."""


async def rate_answered(answer: RateReply) -> RateAnswer:
    """Return the answer of `Engine.rate`, awaiting it if needed."""
    return answer if isinstance(answer, RateAnswer) else await answer


class EngineDefaults:
    """Defaults of the rare members of an `Engine`."""

    @property
    def guarantees(self) -> str:
        """Limitations of the store in a few sentences for people; empty if there are none."""
        return ""

    def liveness_fd(self) -> int | None:
        """Return the descriptor whose lock shows that this program is alive, if there is one.

        A child process that inherits it also holds that lock: the sessions of this program count as
        alive while the child lives.
        """
        return None

    def diagnose(self) -> Iterable[Finding]:
        """Examine the store for `tenure doctor`.

        It is called once, outside of an event loop, on an engine that is not used otherwise. It
        works on a store that cannot be opened, changes nothing, raises nothing, and takes at most a
        few seconds.
        """
        return ()

    def pages(self) -> Pages | None:
        """Return lists in pages, or ``None`` if the store only has complete lists."""
        return None

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session whose program is dead, as its program would.

        It is called on an open engine, only for sessions with a credential. A session that does not
        exist, or does not match the credential, is left alone without an error.

        Raises:
            EngineUnavailable, EngineError: the store did not confirm it; it may be called again.
        """
        raise Unsupported(
            f"the store does not end the sessions of a dead program: {orphan.node}",
            node=orphan.node,
        )

    def rate(
        self,
        path: str,
        name: str,
        call: RateCall,  # noqa: ARG002
    ) -> RateReply:
        """Carry out an operation on a rate, in one step, by the store's clock.

        An operation whose answer was lost may be carried out twice. A rate without tokens in its
        window does not exist.

        Args:
            path: the path of the node.
            name: the name of the rate, in a namespace of its own.
            call: the operation, whose values are valid (`tenure.core.rates`).

        Returns:
            The answer, or what to await for it if it is not known at once. If its rule is another
            than the call's, nothing was done.

        Raises:
            NodeNotFound: there is no such node.
            InvalidArgument: the name is invalid.
            Unsupported: the store has no rates.
            EngineUnavailable, EngineError: the store cannot be reached, or failed.
        """
        raise Unsupported(
            f"the store has no rates, so there is no rate {name!r} on {path}: it has no clock that "
            "decides in one step. Use memory://, sqlite://, redis://, postgresql:// or tenure://",
            node=path,
            name=name,
        )

    def guard(self, node: str, name: str, token: int) -> GuardStatement:  # noqa: ARG002
        """Return the statement that guards a lease in a caller's transaction; does no I/O.

        Args:
            node: the path of the node.
            name: the name of the semaphore.
            token: the fencing token of the lease.

        Raises:
            Unsupported: the store is not in a database of the caller.
        """
        raise Unsupported(
            f"the lease of {name!r} on {node} cannot be guarded: its store is not in a database "
            "with your tables, as with postgresql://; use a fence of tenure.fencing",
            node=node,
            name=name,
        )


def position_in(described: SemaphoreDescription, order_id: int) -> int | None:
    """Return a request's position in a described queue, as `SessionDefaults.position` does."""
    if any(owner.order_id == order_id for owner in described.owners):
        return 0
    orders = [waiter.order_id for waiter in described.waiters]
    return orders.index(order_id) + 1 if order_id in orders else None


class _Describing(Protocol):
    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription: ...


class SessionDefaults:
    """Defaults of the rare members of an `EngineSession`."""

    __slots__ = ()

    async def position(self: _Describing, name: str, order_id: int) -> int | None:
        """Return a request's position in its queue: 0 for an owner, 1 for the first waiter.

        By default, it reads the whole queue.

        Args:
            name: the semaphore, of the session's node.
            order_id: the order id of the request.

        Returns:
            The position; ``None`` if the request is not in the queue, or there is no semaphore.
        """
        try:
            described = await self.describe_semaphore(name, owners=True, waiters=True)
        except SemaphoreNotFound:
            return None
        return position_in(described, order_id)

    def token_of(self, request_id: int) -> str | None:  # noqa: ARG002
        """Return the token by which other clients of the store identify a grant.

        Returns:
            The token, for `Lease.store_token`; empty if the request is not an owner, and ``None``
            if the store has no such tokens.
        """
        return None

    async def resize_semaphore(self, name: str, limit: int) -> None:  # noqa: ARG002
        """Change the limit of a lasting semaphore, if `Capabilities.resize` is true.

        Raises:
            Unsupported: the store cannot do that.
        """
        raise Unsupported(
            f"the limit of semaphore {name!r} cannot be changed: the store has no operation for "
            "that. Delete the semaphore while it is not in use, and create it with the new limit",
            name=name,
        )

    @property
    def credential(self) -> str | None:
        """Secret with which another process ends exactly this session (`Engine.end_orphan`).

        Each change is followed by `SessionEvents.attached`. ``None`` if the store has no use for
        it: it notices the death of a program itself, or no other process can end a session.
        """
        return None

    @property
    def last_words(self) -> LastWords | None:
        """Bytes that end the session at once, before `Engine.end_orphan` could.

        They end exactly this session, or nothing; their answers are not read, and `end_orphan`
        follows. They change with the credential. ``None`` where a server has to be answered, as
        for TLS.
        """
        return None

    @property
    def refusal(self) -> str:
        """The refusal of the latest renewal, as a clause, or empty. From any thread."""
        return ""
