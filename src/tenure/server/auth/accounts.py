"""Accounts: what each identity has on this server, counted against its quotas and its share.

Each counted limit of the server (`Quotas` names them) is a `Pool`. While one identity has an
account, all of the pool is reserved for it. With several, half of the pool is reserved in equal
parts, and the other half is first come, first served. So an account always gets its reserved part.
Usage of no account is taken from the other half.

Rules:

* Counting takes constant time, and the common case is one addition and one comparison.
* What is taken is released once, in every case.
* An account exists as long as a connection or something counted refers to it. The number of parts
  is the number of accounts, rounded up to a power of two, so that parts rarely change.
  Parts that grow smaller take nothing away from an account that has more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from weakref import WeakValueDictionary, finalize

from tenure.server.auth.identity import Identity
from tenure.server.auth.permissions import EVERYTHING
from tenure.server.auth.quotas import UNSET, Quotas
from tenure.server.limits import LimitReached, Limits

__all__ = ["Account", "Accounts", "Pool", "Share"]

_QUOTAS = fields(Quotas)


class Pool:
    """One limit of the server, divided among accounts.

    Attributes:
        limit: the limit's name.
        most: its value.
        reserved: each account's part.
        shared: what is not reserved.
        beyond: how much of the shared half is taken.
        unowned: what belongs to no account, and is reserved and shared no more.
        alone: there is one account at most.
    """

    __slots__ = ("alone", "beyond", "limit", "most", "reserved", "shared", "unowned")

    def __init__(self, limit: str, most: int) -> None:
        """Start with a single account, which may have all of it."""
        self.limit = limit
        self.most = most
        self.beyond = 0
        self.reserved = most
        self.shared = 0
        self.unowned = 0
        self.alone = True

    def divide(self, parts: int) -> None:
        """Reserve for so many accounts."""
        self.alone = parts <= 1
        if self.alone:
            self.reserved, self.shared = max(0, self.most - self.unowned), 0
        else:
            self.reserved = max(1, self.most // (2 * parts))
            self.shared = max(0, self.most - self.most // 2 - self.unowned)


class Share:
    """The share of one account in one pool.

    Attributes:
        used: how much it has.
        quota: the most that it may have; ``None`` for no quota of its own.
        assured: up to here nothing but `used` changes; beyond it the pool counts, too.
    """

    __slots__ = ("_identity", "_pool", "assured", "quota", "used")

    def __init__(self, pool: Pool, identity: str) -> None:
        """Start with nothing used and without a quota."""
        self._pool = pool
        self._identity = identity
        self.used = 0
        self.quota: int | None = None
        self.assured = pool.reserved

    def take(self, more: int = 1, *, node: str | None = None, name: str | None = None) -> None:
        """Count so much more.

        Raises:
            LimitReached: it is more than the quota, or than the server has left for it.
        """
        used = self.used + more
        if used > self.assured:
            self._take_shared(more, node, name)
        self.used = used

    @property
    def alone(self) -> bool:
        """True if the account has the whole pool for itself."""
        return self._pool.alone

    def check(self, *, node: str | None = None, name: str | None = None) -> None:
        """Raise `LimitReached` if there must not be one more."""
        self.take(node=node, name=name)
        self.release()

    def take_anyway(self, more: int = 1) -> None:
        """Count so much more that exists already."""
        before, self.used = self.used, self.used + more
        self._pool.beyond += self._excess(self.used) - self._excess(before)

    def release(self, less: int = 1) -> None:
        """Count so much less."""
        before, self.used = self.used, self.used - less
        assert self.used >= 0, f"more {self._pool.limit} released than were taken"
        if before > self.assured:
            self._pool.beyond -= self._excess(before) - self._excess(self.used)

    def limit_to(self, quota: int | None) -> None:
        """Set the quota. What is used already stays, also when it is more."""
        self.quota = quota
        self.settle()

    def settle(self) -> None:
        """Compute what is assured, after the quota or the pool's parts have changed."""
        before = self._excess(self.used)
        reserved = self._pool.reserved
        self.assured = reserved if self.quota is None else min(reserved, self.quota)
        self._pool.beyond += self._excess(self.used) - before

    def _excess(self, used: int) -> int:
        return max(0, used - self.assured)

    def _take_shared(self, more: int, node: str | None, name: str | None) -> None:
        pool = self._pool
        used = self.used + more
        if self.quota is not None and used > self.quota:
            raise LimitReached(
                f"the identity {self._identity} has reached its quota {pool.limit} = {self.quota}; "
                "end something that it has, or have the quota raised",
                pool.limit,
                node=node,
                name=name,
            )
        excess = self._excess(used) - self._excess(self.used)
        if pool.beyond + excess > pool.shared:
            raise LimitReached(
                f"this server has reached its limit {pool.limit} = {pool.most}, and the identity "
                f"{self._identity} has more than its reserved share; try again later, or have the "
                "server's limit raised"
                if not pool.alone
                else f"this server has reached its limit {pool.limit} = {pool.most}; try again "
                "later, or have the server's limit raised",
                pool.limit,
                node=node,
                name=name,
            )
        pool.beyond += excess


class _Unowned(Share):
    """The part of a pool that belongs to no account.

    Args:
        changed: is called when it has grown or shrunk.
    """

    __slots__ = ("_changed",)

    def __init__(self, pool: Pool, identity: str, changed: Callable[[Pool], None]) -> None:
        super().__init__(pool, identity)
        self._changed = changed

    def take_anyway(self, more: int = 1) -> None:
        self.used += more
        self._pool.unowned += more
        self._changed(self._pool)

    def release(self, less: int = 1) -> None:
        self.take_anyway(-less)


class Account:
    """Rights and holdings of one identity.

    Attributes:
        identity: its name.
        permissions, quotas: as of the last greeting.
        sessions, requests, semaphores, watches, nodes, stored_bytes: what it has, by quota.
    """

    __slots__ = (
        "__weakref__",
        "identity",
        "nodes",
        "permissions",
        "quotas",
        "requests",
        "semaphores",
        "sessions",
        "stored_bytes",
        "watches",
    )

    def __init__(
        self,
        identity: str,
        pools: dict[str, Pool],
        share: Callable[[Pool, str], Share] = Share,
    ) -> None:
        """Start with all permissions, without quotas, and with nothing used."""
        self.identity = identity
        self.permissions = EVERYTHING
        self.quotas = UNSET
        self.sessions = share(pools["sessions"], identity)
        self.requests = share(pools["requests"], identity)
        self.semaphores = share(pools["semaphores"], identity)
        self.watches = share(pools["watches"], identity)
        self.nodes = share(pools["nodes"], identity)
        self.stored_bytes = share(pools["stored_bytes"], identity)

    @property
    def shares(self) -> dict[str, Share]:
        """All that is counted, by quota."""
        return {each.name: getattr(self, each.name) for each in _QUOTAS}


class Accounts:
    """The accounts of one server.

    Attributes:
        unowned: what the store had when the server started, and of which the server does not know
            which identity made it. It counts against the limits, and against no quota.
    """

    def __init__(self, limits: Limits) -> None:
        """Start with the pools of the limits and without identities."""
        self.pools = {each.name: Pool(each.name, getattr(limits, each.name)) for each in _QUOTAS}
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._parts = 1
        self.unowned = Account("", self.pools, partial(_Unowned, changed=self._settle))

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        """Iterate over the accounts that there are now."""
        return iter(list(self._accounts.values()))

    def of(self, identity: Identity) -> Account:
        """Return the account of an identity. The caller keeps it for as long as it counts there.

        From now on the account has the permissions and quotas of this identity, for all of its
        connections and sessions.
        """
        account = self._accounts.get(identity.owner)
        if account is None:
            account = Account(identity.group or identity.name, self.pools)
            finalize(account, self._divide).atexit = False  # called when the next line is undone
            self._accounts[identity.owner] = account
            self._divide()
            _set(account, identity)
        elif (
            account.permissions is not identity.permissions or account.quotas is not identity.quotas
        ):
            _set(account, identity)
        return account

    def _divide(self) -> None:
        """Make as many parts as there are accounts, or a few more."""
        count = len(self._accounts)
        if count > 1 and self._parts // 4 < count <= self._parts:
            return
        parts = 1 << max(0, count - 1).bit_length()
        if parts == self._parts:
            return
        self._parts = parts
        for pool in self.pools.values():
            self._settle(pool)

    def _settle(self, pool: Pool) -> None:
        """Compute the parts of a pool."""
        before = pool.reserved
        pool.divide(self._parts)
        if pool.reserved != before:
            for account in self._accounts.values():
                account.shares[pool.limit].settle()


def _set(account: Account, identity: Identity) -> None:
    account.permissions, account.quotas = identity.permissions, identity.quotas
    for name, share in account.shares.items():
        share.limit_to(getattr(identity.quotas, name))
