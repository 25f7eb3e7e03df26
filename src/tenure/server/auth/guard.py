"""Guard: the only place that enforces permissions and quotas, for all listeners.

On behalf of a client, a listener uses the store only through the `GuardedEngine` of the
connection's identity. Rules:

* **Access.** Without ``read`` a node does not exist for the identity: the error is `NodeNotFound`.
  With too little access it is `AuthenticationFailed`, which names the missing permission.
* **Quotas.** An identity is charged before an operation is sent, and refunded if it is rejected.
* **Unknown outcomes**, after a cancellation or an inconclusive error. The possible effect stays
  charged until the store shows otherwise:

  * data that may have been written or deleted, until it is written again or read;
  * a node that may have been created or dropped, until the store's list of nodes is without it;
  * a request, until it is removed or withdrawn, or its session is attached again;
  * a session to be closed, detached or taken over, until its recovery window has passed.

  A cancelled attach leaves neither a session nor a charge.
* **Sessions.** A session belongs to the identity that opened it, or that attached it first since
  this server started; no other identity can attach it.

**Stored objects** (`Stored`): the nodes and the data of semaphores. Both are counted from their
creation by a client of this server. The store does not record the identity of their creators,
because every engine would have to, and other programs may write there, too. So objects that a
server finds at its start belong to `Accounts.unowned`: they count against the server's limits, but
against no identity's quota.

Rules for the data of one semaphore:

* A write is charged before it is sent. When the store confirms it, the charges for the data that
  existed when the write began are released.
* A write that the store rejects is released.
* A write without an answer (its caller was cancelled, or failed unexpectedly) may have taken
  effect. It stays charged, in addition to the previous data, until a later write or deletion is
  confirmed, the node is dropped, or the data is read again (`unanswered`, `read`). An account is
  charged for at most one such write of a semaphore, the largest.
* The data is read again in the background once there are many such writes. Only a client that has
  reached its quota waits for that, so that it is not rejected without need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection

from tenure.background import Failures
from tenure.core import refusals
from tenure.engines.contract import Engine
from tenure.errors import (
    AuthenticationFailed,
    InvalidArgument,
    NodeExists,
    NodeNotFound,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    TenureError,
    Unsupported,
)
from tenure.model import DEFAULT_NODE, NodeConfig, SemaphoreDescription
from tenure.server.auth.accounts import Account, Accounts
from tenure.server.auth.identity import Access
from tenure.server.auth.rates import RateCounts
from tenure.server.auth.tallies import Tallies
from tenure.server.limits import LimitReached, Limits
from tenure.server.log import LOGGER
from tenure.server.meter import Meter


class Write:
    """One write of a semaphore's data.

    Attributes:
        account: the charged account.
        size: the charged bytes.
        under_way: whether the write is still in progress.
        unanswered_at: the time at which its caller abandoned it; ``None``: it has an answer.
    """

    __slots__ = ("account", "name", "node", "size", "unanswered_at", "under_way")

    def __init__(self, node: str, name: str, account: Account, size: int) -> None:
        self.node = node
        self.name = name
        self.account = account
        self.size = size
        self.under_way = True
        self.unanswered_at: float | None = None


class Stored:
    """Nodes and semaphores' data that this server's clients have stored.

    Attributes:
        nodes: accounts by the paths of their nodes.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Account] = {}
        self._new_nodes: set[str] = set()  # created while the store's nodes are listed
        self._writes: dict[str, dict[str, list[Write]]] = {}  # by node, by name; oldest first
        self._unanswered: dict[Write, None] = {}  # oldest first

    # Data

    @property
    def without_answer(self) -> int:
        """Number of writes with an unknown outcome."""
        return len(self._unanswered)

    def found(self, node: str, name: str, account: Account, size: int) -> None:
        """Charge an account for the existing data of a semaphore, unless it is known."""
        if size and name not in self._writes.get(node, ()):
            account.stored_bytes.take_anyway(size)
            self._add(node, name, account, size).under_way = False

    def begin(self, node: str, name: str, account: Account, size: int) -> Write:
        """Charge a write to be sent. An empty write, or a deletion, is always allowed.

        Raises:
            LimitReached: the account would have too many bytes.
        """
        if size:
            account.stored_bytes.take(size, node=node, name=name)
        return self._add(node, name, account, size)

    def _add(self, node: str, name: str, account: Account, size: int) -> Write:
        write = Write(node, name, account, size)
        self._writes.setdefault(node, {}).setdefault(name, []).append(write)
        return write

    def wrote(self, write: Write) -> None:
        """Record that the store has confirmed a write."""
        write.under_way = False
        writes = self._writes[write.node][write.name]
        position = writes.index(write)
        for number, each in enumerate(list(writes)):
            later = number > position and each.unanswered_at is not None
            if not (each is write or each.under_way or later):
                self._remove(each)
        if not write.size:
            self._remove(write)

    def kept(self, write: Write, now: float) -> None:
        """Record that the store has answered a creation, which may have kept the existing data."""
        others = self._writes[write.node][write.name]
        before = [each for each in others if each is not write and not each.under_way]
        if any(each.unanswered_at is not None for each in before):
            self.abandoned(write, now)  # the previous data is not known either
        elif before:
            self._remove(write)
        else:
            self.wrote(write)

    def refused(self, write: Write) -> None:
        """Record that the store has rejected a write."""
        self._remove(write)

    def abandoned(self, write: Write, now: float) -> None:
        """Record that a write may have taken effect, and will have no answer."""
        write.under_way = False
        write.unanswered_at = now
        self._unanswered[write] = None
        for each in list(self._writes[write.node][write.name]):
            if each is not write and each.account is write.account and each in self._unanswered:
                write.size, each.size = max(write.size, each.size), min(write.size, each.size)
                self._remove(each)
        if len(self._writes[write.node][write.name]) == 1 and not write.size:
            self._remove(write)

    def unanswered(self, before: float, most: int) -> list[tuple[Write, ...]]:
        """Return the writes of semaphores that should be read again.

        Args:
            before: only writes abandoned before this time, which have certainly ended.
            most: maximum number of semaphores.
        """
        found: dict[tuple[Write, ...], None] = {}
        for each in self._unanswered:
            assert each.unanswered_at is not None
            if each.unanswered_at > before or len(found) == most:
                break
            writes = self._writes[each.node][each.name]
            if not any(other.under_way for other in writes):
                found[tuple(writes)] = None
        return list(found)

    def read(self, writes: tuple[Write, ...], size: int) -> None:
        """Record the size of the store's data, after a list of writes from `unanswered`.

        Does nothing if there was another write meanwhile. Data of another size than those writes
        was written through another server.
        """
        node, name = writes[0].node, writes[0].name
        if tuple(self._writes.get(node, {}).get(name, ())) != writes:
            return
        newest_first = writes[::-1]
        fitting = [each for each in newest_first if each.size == size] or [
            each for each in newest_first if each.size > size > 0
        ]
        for each in writes:
            if each not in fitting[:1] or not size:
                self._remove(each)
        if fitting and size:
            kept = fitting[0]
            kept.account.stored_bytes.release(kept.size - size)
            kept.size = size
            kept.unanswered_at = None
            self._unanswered.pop(kept, None)

    def deleted(self, node: str, name: str) -> None:
        """Record that a semaphore was deleted."""
        for each in list(self._writes.get(node, {}).get(name, ())):
            if not each.under_way:
                self._remove(each)

    def _remove(self, write: Write) -> None:
        """Release the charge of a write."""
        names = self._writes[write.node]
        writes = names[write.name]
        writes.remove(write)
        self._unanswered.pop(write, None)
        write.account.stored_bytes.release(write.size)
        if not writes:
            del names[write.name]
            if not names:
                del self._writes[write.node]

    # Nodes

    def found_node(self, node: str, account: Account) -> None:
        """Charge an account for an existing node, unless it is known."""
        if node not in self.nodes:
            account.nodes.take_anyway()
            self.nodes[node] = account

    def created(self, node: str, account: Account) -> None:
        """Record that an account has created a node, which is already counted."""
        self.dropped(node)
        self.nodes[node] = account
        self._new_nodes.add(node)

    def may_have_created(self, node: str, account: Account) -> None:
        """Record that an account may have created a node, which is already counted."""
        if node in self.nodes:
            account.nodes.release()  # it is counted there while it exists
        else:
            self.nodes[node] = account
            self._new_nodes.add(node)

    def dropped(self, node: str) -> None:
        """Record that a node was dropped, with its semaphores."""
        account = self.nodes.pop(node, None)
        self._new_nodes.discard(node)
        if account is not None:
            account.nodes.release()
        for name in list(self._writes.get(node, ())):
            self.deleted(node, name)

    def begin_list(self) -> None:
        """Record the nodes created from now on: the list may be older."""
        self._new_nodes.clear()

    def forget_missing(self, nodes: Collection[str]) -> None:
        """Uncount nodes that are not in a list of the store's nodes."""
        for node in {*self.nodes, *self._writes} - set(nodes) - self._new_nodes:
            self.dropped(node)


# Seconds between two comparisons with the store, and until a write has certainly ended.
_COMPARE_AFTER = 10.0
_MANY = 64  # with more unanswered writes, the store is read
_MOST_READ = 1000  # semaphores read in one comparison
REFUSALS = (
    InvalidArgument,
    Unsupported,
    NodeNotFound,
    NodeExists,
    SemaphoreNotFound,
    SemaphoreExists,
    SemaphoreBusy,
    AuthenticationFailed,
    LimitReached,
)
"""Errors after which the store is unchanged."""
_NEEDS = {
    Access.READ: "read",
    Access.HOLD: "acquire, create and change on",
    Access.ADMINISTER: "administer",
}


class Guard:
    """Permissions and quotas of one server.

    Its owner calls `aclose` before it closes the store.

    Args:
        store: the store, without permissions.
        limits: the limits of clients.
        logger: the logger of the server.
        meter: the counts for the metrics.

    Attributes:
        store: the store, without permissions.
        meter: the counts for the metrics.
        accounts: the usage of each identity.
        tallies: the sessions of each identity.
        stored: the nodes and the semaphores' data of each identity.
        rates: the rates of each identity.
    """

    def __init__(
        self,
        store: Engine,
        limits: Limits,
        logger: logging.Logger = LOGGER,
        meter: Meter | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.accounts = Accounts(limits)
        self.tallies = Tallies()
        self.stored = Stored()
        self.rates = RateCounts()
        self.store = store
        self._compared_at = float("-inf")
        self._comparing: asyncio.Task[None] | None = None
        self._failures = Failures("comparing the counts with the store", logger)

    async def aclose(self) -> None:
        """Cancel the comparison in the background. Safe to call twice."""
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.wait([self._comparing])

    def now(self) -> float:
        """Read the store's clock."""
        return self.store.clock.now()

    def refusal(
        self,
        account: Account,
        node: str,
        least: Access,
        name: str | None = None,
        *,
        hidden: bool = True,
    ) -> TenureError:
        """Return the error for too little access; `hidden`: report an invisible node as missing."""
        access = account.permissions.access(node)
        if access is Access.NONE and node == DEFAULT_NODE:  # it always exists: nothing to hide
            usable = account.permissions.usable
            return AuthenticationFailed(
                f"the identity {account.identity} may not use {node}; "
                + (f"it may use {', '.join(usable)}" if usable else "it may use no node"),
                node=node,
                name=name,
            )
        if hidden and access is Access.NONE:
            return refusals.node_not_found(node)
        return AuthenticationFailed(
            f"the identity {account.identity} may not {_NEEDS[least]} {node}: this needs the "
            f"permission {least.name.lower()}, and it has {access.name.lower()}",
            node=node,
            name=name,
        )

    async def write(
        self,
        account: Account,
        node: str,
        name: str,
        size: int,
        work: Callable[[], Awaitable[None]],
        *,
        keeps: bool = False,
    ) -> None:
        """Let `work` write `size` bytes to a semaphore, or delete it (0 bytes), and count that.

        If it exists and `keeps` is true, its data is not changed.

        Raises:
            LimitReached: the account would have too many bytes.
        """
        stored = self.stored
        try:
            write = stored.begin(node, name, account, size)
        except LimitReached:
            await self._compare()
            write = stored.begin(node, name, account, size)
        if stored.without_answer > _MANY:
            self._compare_soon()
        try:
            await work()
        except BaseException as error:
            if isinstance(error, REFUSALS):
                stored.refused(write)
            else:
                stored.abandoned(write, self.now())
            raise
        if keeps:
            stored.kept(write, self.now())
        else:
            stored.wrote(write)

    def found_node(self, node: str) -> None:
        """Count a node that the store had when the server started."""
        if node != DEFAULT_NODE:
            self.stored.found_node(node, self.accounts.unowned)

    def found(self, node: str, semaphore: SemaphoreDescription) -> None:
        """Count the data of a semaphore that the store had when the server started."""
        size = len(semaphore.data)
        self.stored.found(node, semaphore.name, self.accounts.unowned, size)

    async def create_node(
        self, account: Account, path: str, config: NodeConfig, *, exist_ok: bool
    ) -> None:
        """Create a node, and count it if it was created."""
        try:
            account.nodes.take(node=path)
        except LimitReached:
            await self._compare()
            if exist_ok and path in await self.store.list_nodes():
                return
            account.nodes.take(node=path)
        try:
            await self.store.create_node(path, config, exist_ok=False)
        except NodeExists:
            account.nodes.release()
            if not exist_ok:
                raise
        except REFUSALS:
            account.nodes.release()
            raise
        except BaseException:
            self.stored.may_have_created(path, account)
            raise
        else:
            self.stored.created(path, account)

    def _compare_soon(self) -> None:
        """Compare the counts with the store in the background, unless that was done recently."""
        if self._is_due and (self._comparing is None or self._comparing.done()):
            self._comparing = asyncio.get_running_loop().create_task(self._compare_in_background())

    async def _compare_in_background(self) -> None:
        """Compare for as long as no other comparison is due, which continues with the rest."""
        with self._failures.contained(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMPARE_AFTER):
                await self._compare()

    @property
    def _is_due(self) -> bool:
        return self.now() >= self._compared_at + _COMPARE_AFTER

    async def _compare(self) -> None:
        """Compare the counts with the store, unless that was done recently.

        Other servers may have dropped nodes, and writes without an answer may have had no effect.
        """
        if not self._is_due:
            return
        self._compared_at = now = self.now()
        stored = self.stored
        stored.begin_list()
        stored.forget_missing(await self.store.list_nodes())
        for writes in stored.unanswered(now - _COMPARE_AFTER, _MOST_READ):
            first = writes[0]
            try:
                found = await self.store.describe_semaphore(
                    first.node, first.name, owners=False, waiters=False
                )
            except (NodeNotFound, SemaphoreNotFound):
                stored.read(writes, 0)
            else:
                stored.read(writes, len(found.data))
