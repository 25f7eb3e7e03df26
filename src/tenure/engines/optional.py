"""Optional features of engines, with their defaults. `tenure.engines.contract` exports them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tenure.errors import Unsupported
from tenure.model import SemaphoreDescription, SessionDescription

__all__ = ["EngineDefaults", "Finding", "GuardStatement", "Level", "Pages", "SessionDefaults"]

Level: TypeAlias = Literal["ok", "warning", "failure"]
"""Severity of a finding; after a failure, the store cannot be used."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined (`tenure doctor`).

    Attributes:
        what: what was examined, in a word or two.
        found: what was found.
        remedy: how to mend it; empty when there is nothing to mend.
        absent: there is no store yet; the first use would make it, and an examination must not.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""
    absent: bool = False

    @classmethod
    def of_error(cls, what: str, error: Exception, prefix: str = "") -> Finding:
        """Return the failure that an error reports; the remedy follows the cause in its text."""
        found, *remedy = re.split(r"; |\. (?=[A-Z])", str(error), maxsplit=1)
        return cls("failure", what, prefix + found, "".join(remedy))


@dataclass(frozen=True, slots=True)
class GuardStatement:
    """Statement that fails in a caller's transaction of PostgreSQL, unless a lease is held.

    From its success until the transaction ends, the store grants the lease to no other request.

    Attributes:
        sql: has ``?`` for each value, and no other question mark.
        values: the values.
        refusal: SQLSTATE of its failure when the store says that the lease is not held.
    """

    sql: str
    values: tuple[object, ...]
    refusal: str


class Pages(Protocol):
    """Lists of a store in pages, for a server that must not be stopped by a long one.

    Each page is of one moment, and the list as a whole is not.
    """

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node, by id; fewer than `most` at the end of the list.

        Args:
            path: the node.
            after: the id of the last session of the page before; 0 for the first page.
            most: the number of sessions on a page.

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
            owners: describe the owners, too.
            waiters: describe the waiters, too.
            after: the name of the last semaphore of the page before; empty for the first page.
            most: semaphores and requests on a page, about; it has one semaphore at least.

        Raises:
            NodeNotFound: there is no such node.
        """
        ...


class EngineDefaults:
    """Defaults of the members of an `Engine` that few stores have."""

    @property
    def guarantees(self) -> str:
        """Weak points of the store in a few sentences for people; empty if there are none."""
        return ""

    def liveness_fd(self) -> int | None:
        """Return the descriptor whose lock says that this program is alive, if there is one.

        A child process that inherits it holds that lock too: the sessions of this program are not
        taken for dead as long as the child lives.
        """
        return None

    def diagnose(self) -> Iterable[Finding]:
        """Examine the store for `tenure doctor`.

        It is called once, outside of an event loop, on an engine that is used for nothing else. It
        works on a store that cannot be opened, changes nothing, raises nothing, and takes seconds
        at the most.
        """
        return ()

    def pages(self) -> Pages | None:
        """Return lists in pages; ``None`` if the store makes a list in one piece."""
        return None

    def guard(self, node: str, name: str, token: int) -> GuardStatement:  # noqa: ARG002
        """Return the statement that guards a lease in a transaction of a caller; takes no I/O.

        Args:
            node: the path of the node.
            name: the name of the semaphore.
            token: the fencing token of the lease.

        Raises:
            Unsupported: the store is in no database that has transactions of callers.
        """
        raise Unsupported(
            f"the lease of {name!r} on {node} cannot be guarded: its store is not in a database "
            "with your tables, as that of postgresql:// can be; use a fence of tenure.fencing",
            node=node,
            name=name,
        )


class SessionDefaults:
    """Defaults of the members of an `EngineSession` that few stores have."""

    __slots__ = ()

    def token_of(self, request_id: int) -> str | None:  # noqa: ARG002
        """Return the token by which the store's other clients know a grant.

        Returns:
            it is empty if the request is not an owner, and ``None`` where the store has no such
            tokens. `Lease.store_token` shows it.
        """
        return None
