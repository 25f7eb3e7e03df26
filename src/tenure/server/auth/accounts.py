"""Accounts: the usage of each identity on this server, against its quotas and its share.

Each counted limit of the server (`Quotas` names them) is an `AccountPool`. A single account has all
of the pool reserved. With several accounts, half of the pool is reserved in equal parts, and the
other half is first come, first served. So an account always gets its reserved part. Usage without
an account is taken from the shared half.

Rules:

* Counting takes constant time, and the common case is one addition and one comparison.
* Everything taken is released exactly once.
* An account exists as long as a connection or something counted refers to it. The number of parts
  is the number of accounts, rounded up to a power of two, so that parts rarely change. When parts
  shrink, an account keeps what it has.

**Revocation lists** name certificates that authorities have revoked (`RevocationLists`). OpenSSL
checks a list while it verifies a handshake. Open connections are checked here, by the issuer and
serial number of their certificates. The lists are the administrator's files, so only OpenSSL checks
their signatures.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TypeAlias
from weakref import WeakValueDictionary, finalize

from tenure.errors import InvalidArgument
from tenure.server.auth.identity import EVERYTHING, UNSET, Identity, Quotas
from tenure.server.limits import LimitReached, Limits

CertificateId: TypeAlias = tuple[bytes, bytes]
"""Issuer and serial number of a certificate, as their DER encodings."""

_INTEGER, _SEQUENCE, _VERSION = 0x02, 0x30, 0xA0
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RevocationLists:
    """Content of a file of revocation lists.

    Attributes:
        revoked: the revoked certificates.
        ends: the time at which the first of them expires. From then on OpenSSL rejects every client
            of its authority.
    """

    revoked: frozenset[CertificateId]
    ends: datetime | None


def read_revoked(path: str) -> RevocationLists:
    """Read the revocation lists of a PEM file.

    Raises:
        InvalidArgument: the file cannot be read, contains no list, or contains other objects.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            blocks = _BLOCK.findall(file.read())
    except OSError as error:
        raise InvalidArgument(
            f"the revocation list {path} cannot be read: {error.strerror}"
        ) from None
    if not blocks or any(label != "X509 CRL" for label, _ in blocks):
        raise InvalidArgument(
            f"the revocation list {path} contains "
            + ("other objects than revocation lists" if blocks else "no list in PEM form")
            + "; convert one with 'openssl crl -inform DER -in FILE'"
        )
    revoked: set[CertificateId] = set()
    ends: list[datetime] = []
    for _, body in blocks:
        try:
            entries, end = _parse(_decode(body))
        except (ValueError, IndexError, StopIteration, RuntimeError):
            raise InvalidArgument(
                f"the revocation list {path} is damaged; see 'openssl crl -in {path} -text'"
            ) from None
        revoked.update(entries)
        ends += [] if end is None else [end]
    return RevocationLists(frozenset(revoked), min(ends, default=None))


@lru_cache(maxsize=4096)
def certificate_id(der: bytes) -> CertificateId:
    """Return the issuer and serial number of a certificate that OpenSSL has verified."""
    fields = _items(der, *_inside(der, _inside(der, (0, len(der)))))
    tag, at, end = next(fields)
    if tag == _VERSION:
        tag, at, end = next(fields)
    serial = der[at:end]
    next(fields)  # the algorithm of the signature
    _, at, end = next(fields)
    return der[at:end], serial


def _parse(der: bytes) -> tuple[list[CertificateId], datetime | None]:
    """Return the certificates that a list revokes, and the date of the next list."""
    fields = _items(der, *_inside(der, _inside(der, (0, len(der)))))
    tag, at, end = next(fields)
    if tag == _INTEGER:
        next(fields)  # the algorithm, behind a version
    _, at, end = next(fields)
    issuer = der[at:end]
    next(fields)  # date of the list
    due = None
    for tag, at, end in fields:
        if tag in _TIMES:
            due = datetime.strptime(der[at:end].decode("ascii"), _TIMES[tag]).replace(tzinfo=UTC)
        elif tag == _SEQUENCE:
            entries = (next(_items(der, *entry)) for _, *entry in _items(der, at, end))
            return [(issuer, der[serial:serial_end]) for _, serial, serial_end in entries], due
        else:
            break
    return [], due


def _decode(body: str) -> bytes:
    pem = f"{ssl.PEM_HEADER}\n{body.strip()}\n{ssl.PEM_FOOTER}"
    return ssl.PEM_cert_to_DER_cert(pem)


# DER: tag, length, content


def _items(der: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the tag of each item, and the start and end of its content."""
    while at < end:
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        if at + length > end:
            raise ValueError("an item is longer than what contains it")
        yield tag, at, at + length
        at += length


def _inside(der: bytes, place: tuple[int, int]) -> tuple[int, int]:
    """Return the position of the content of the sequence that starts there."""
    for tag, at, end in _items(der, *place):
        if tag == _SEQUENCE:
            return at, end
        break
    raise ValueError("not a sequence")


_QUOTAS = fields(Quotas)


class AccountPool:
    """One limit of the server, divided among accounts.

    Attributes:
        limit: the limit's name.
        most: the limit's value.
        reserved: each account's part.
        shared: the part that is not reserved.
        beyond: usage of the shared half.
        unowned: usage without an account, which reduces both halves.
        alone: whether there is at most one account.
    """

    __slots__ = ("alone", "beyond", "limit", "most", "reserved", "shared", "unowned")

    def __init__(self, limit: str, most: int) -> None:
        self.limit = limit
        self.most = most
        self.beyond = 0
        self.reserved = most
        self.shared = 0
        self.unowned = 0
        self.alone = True

    def divide(self, parts: int) -> None:
        """Reserve parts for that many accounts."""
        self.alone = parts <= 1
        if self.alone:
            self.reserved, self.shared = max(0, self.most - self.unowned), 0
        else:
            self.reserved = max(1, self.most // (2 * parts))
            self.shared = max(0, self.most - self.most // 2 - self.unowned)


class Share:
    """The share of one account in one pool.

    Attributes:
        used: the current usage.
        quota: the maximum usage; ``None`` for no quota.
        assured: up to this usage only `used` changes; beyond it the pool counts, too.
    """

    __slots__ = ("_identity", "_pool", "assured", "quota", "used")

    def __init__(self, pool: AccountPool, identity: str) -> None:
        self._pool = pool
        self._identity = identity
        self.used = 0
        self.quota: int | None = None
        self.assured = pool.reserved

    def take(self, more: int = 1, *, node: str | None = None, name: str | None = None) -> None:
        """Add to the usage.

        Raises:
            LimitReached: the quota would be exceeded, or the server has no more for it.
        """
        used = self.used + more
        if used > self.assured:
            self._take_shared(more, node, name)
        self.used = used

    @property
    def alone(self) -> bool:
        """True if the account has the whole pool."""
        return self._pool.alone

    def check(self, *, node: str | None = None, name: str | None = None) -> None:
        """Raise `LimitReached` if one more is not allowed."""
        self.take(node=node, name=name)
        self.release()

    def take_anyway(self, more: int = 1) -> None:
        """Add to the usage what already exists."""
        before, self.used = self.used, self.used + more
        self._pool.beyond += self._excess(self.used) - self._excess(before)

    def release(self, less: int = 1) -> None:
        """Reduce the usage."""
        before, self.used = self.used, self.used - less
        assert self.used >= 0, f"more {self._pool.limit} released than were taken"
        if before > self.assured:
            self._pool.beyond -= self._excess(before) - self._excess(self.used)

    def limit_to(self, quota: int | None) -> None:
        """Set the quota. Current usage may exceed it."""
        self.quota = quota
        self.settle()

    def settle(self) -> None:
        """Recompute `assured`, after the quota or the pool's parts have changed."""
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
    """Usage of a pool without an account.

    Args:
        changed: called when it has grown or shrunk.
    """

    __slots__ = ("_changed",)

    def __init__(
        self, pool: AccountPool, identity: str, changed: Callable[[AccountPool], None]
    ) -> None:
        super().__init__(pool, identity)
        self._changed = changed

    def take_anyway(self, more: int = 1) -> None:
        self.used += more
        self._pool.unowned += more
        self._changed(self._pool)

    def release(self, less: int = 1) -> None:
        self.take_anyway(-less)


class Account:
    """Permissions and usage of one identity.

    Attributes:
        identity: its name.
        permissions, quotas: those of the last greeting.
        sessions, requests, semaphores, watches, nodes, stored_bytes: its usage, by quota.
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
        pools: dict[str, AccountPool],
        share: Callable[[AccountPool, str], Share] = Share,
    ) -> None:
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
        """All usage, by quota."""
        return {each.name: getattr(self, each.name) for each in _QUOTAS}


class Accounts:
    """The accounts of one server.

    Attributes:
        unowned: objects of an unknown identity, which the store had when the server started. They
            count against the limits, but against no quota.
    """

    def __init__(self, limits: Limits) -> None:
        self.pools = {
            each.name: AccountPool(each.name, getattr(limits, each.name)) for each in _QUOTAS
        }
        self._accounts: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._parts = 1
        self.unowned = Account("", self.pools, partial(_Unowned, changed=self._settle))

    def __len__(self) -> int:
        """Return the number of accounts."""
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        """Iterate over the current accounts."""
        return iter(list(self._accounts.values()))

    def of(self, identity: Identity) -> Account:
        """Return the account of an identity. The caller keeps it while it has usage there.

        The account takes the permissions and quotas of this identity, for all of its connections
        and sessions.
        """
        account = self._accounts.get(identity.owner)
        if account is None:
            account = Account(identity.group or identity.name, self.pools)
            # Called when the next assignment is undone.
            finalize(account, self._divide).atexit = False
            self._accounts[identity.owner] = account
            self._divide()
            _set(account, identity)
        elif (
            account.permissions is not identity.permissions or account.quotas is not identity.quotas
        ):
            _set(account, identity)
        return account

    def _divide(self) -> None:
        """Divide into as many parts as there are accounts, or a few more."""
        count = len(self._accounts)
        if count > 1 and self._parts // 4 < count <= self._parts:
            return
        parts = 1 << max(0, count - 1).bit_length()
        if parts == self._parts:
            return
        self._parts = parts
        for pool in self.pools.values():
            self._settle(pool)

    def _settle(self, pool: AccountPool) -> None:
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
