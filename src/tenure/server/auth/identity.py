"""Identity of a client, with its permissions and quotas.

**Quotas** are its maximum usage on one server. Without a quota, only the limits of the server
apply.

**Permissions** are its access to each node. Access to a node has four levels, each of which
includes those before it:

* ``none``: the node does not exist for this identity.
* ``read``: describe, list and watch; attach a session for that.
* ``hold``: acquire, campaign, register; create, update and delete semaphores.
* ``administer``: create, alter and drop the node, end sessions and evict requests of other
  identities, delete a semaphore that has owners or waiters.

Levels are given for prefixes of paths. A prefix covers whole components: ``/billing`` covers
``/billing`` and ``/billing/jobs``, and not ``/billing2``; ``/`` covers every node. **Only the
longest prefix that covers a node counts**, so a rule for a longer prefix may grant more or less.
Nodes without a prefix have the level ``none``. An identity without permissions may do everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Literal, TypeAlias

from tenure.core.rules import check_path
from tenure.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Maximum usage of one identity; ``None``: only the server's limit applies.

    Attributes:
        sessions: number of sessions.
        requests: number of requests, waiting or owning.
        semaphores: number of semaphores that it created, or whose first request was its own.
        watches: number of watches.
        nodes: number of existing nodes that it created.
        stored_bytes: bytes of data, on its requests and on semaphores that it wrote.

    Raises:
        InvalidArgument: a quota is not a whole number of at least 0.
    """

    sessions: int | None = None
    requests: int | None = None
    semaphores: int | None = None
    watches: int | None = None
    nodes: int | None = None
    stored_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the quotas.

        Raises:
            InvalidArgument: a quota is not a whole number of at least 0.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidArgument(
                    f"the quota {each.name} is a whole number of at least 0, not {value!r}"
                )

    @classmethod
    def parse(cls, given: Mapping[str, object] | None, *, where: str = "") -> Quotas:
        """Read quotas from a mapping, as in a TOML table.

        Args:
            given: numbers by attribute name; ``None`` sets no quota.
            where: the location of the mapping, for messages.

        Raises:
            InvalidArgument: a name is unknown, or a value is not a valid number.
        """
        if given is None:
            return UNSET
        place = f"{where}: " if where else ""
        known = [each.name for each in fields(cls)]
        named = {name.replace("-", "_"): value for name, value in given.items()}
        for name in named:
            if name not in known:
                raise InvalidArgument(
                    f"{place}there is no quota {name!r}; the quotas are {', '.join(known)}"
                )
        for name, value in named.items():
            if value is None:
                raise InvalidArgument(f"{place}the quota {name} has no value")
        try:
            return cls(**named)  # type: ignore[arg-type]  # checked by __post_init__
        except InvalidArgument as error:
            raise InvalidArgument(f"{place}{error}") from None


UNSET = Quotas()
"""No quotas: only the server's limits, which all share."""


class Access(IntEnum):
    """Level of access to a node. A level includes those below it."""

    NONE = 0
    READ = 1
    HOLD = 2
    ADMINISTER = 3


_LEVELS = {each.name.lower(): each for each in Access}


@dataclass(frozen=True, slots=True)
class Permissions:
    """Levels of access by prefix of path. The longest prefix that covers a node counts.

    Attributes:
        prefixes: the rules, as ``{"/billing": Access.HOLD}``.
    """

    prefixes: Mapping[str, Access]

    @classmethod
    def parse(cls, given: Mapping[str, object] | None, *, where: str = "") -> Permissions:
        """Read permissions from a mapping, as in a TOML table.

        Args:
            given: a level's name for each prefix, such as ``{"/billing": "hold"}``; ``None`` allows
                everything.
            where: the location of the mapping, for messages.

        Raises:
            InvalidArgument: a prefix is not a path, or a level is unknown.
        """
        if given is None:
            return EVERYTHING
        place = f"{where}: " if where else ""
        prefixes: dict[str, Access] = {}
        for prefix, level in given.items():
            if prefix != "/":
                try:
                    check_path(prefix)
                except InvalidArgument as error:
                    raise InvalidArgument(
                        f"{place}permissions are given for a node or '/', not for {prefix!r}: "
                        f"{error}"
                    ) from None
            access = _LEVELS.get(level) if isinstance(level, str) else None
            if access is None:
                raise InvalidArgument(
                    f"{place}the permission for {prefix!r} is one of {', '.join(_LEVELS)}, "
                    f"not {level!r}"
                )
            prefixes[prefix] = access
        return cls(prefixes)

    def access(self, node: str) -> Access:
        """Return the level of access to a node."""
        prefixes = self.prefixes
        prefix = node
        while prefix:
            found = prefixes.get(prefix)
            if found is not None:
                return found
            prefix = prefix.rpartition("/")[0]
        return prefixes.get("/", Access.NONE)

    @property
    def usable(self) -> list[str]:
        """The prefixes with any access, in order."""
        return sorted(prefix for prefix, access in self.prefixes.items() if access)


EVERYTHING = Permissions({"/": Access.ADMINISTER})
"""Permissions of an identity that has none of its own."""


IdentityKind: TypeAlias = Literal["token", "certificate", "uid", "anonymous"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of one or several connections.

    Attributes:
        name: the name in the log: a token's name, or its line in a file of plain tokens; the
            subject of a client certificate; ``uid 1000`` for a Unix peer; ``anonymous``.
        kind: the credential that established it.
        credential: digest of the token; empty for the other kinds. It identifies the token after a
            reload, and is not a secret: the key of the digest never leaves the process.
        permissions: its access to nodes.
        quotas: its maximum usage.
        group: the owner of its sessions, if it is not the identity itself: plain tokens have no
            names, and sessions survive the replacement of a token.
    """

    name: str
    kind: IdentityKind
    credential: bytes = field(default=b"", repr=False, compare=False)
    permissions: Permissions = field(default=EVERYTHING, repr=False, compare=False)
    quotas: Quotas = field(default=UNSET, repr=False, compare=False)
    group: str = field(default="", repr=False, compare=False)

    @property
    def owner(self) -> str:
        """Name under which its sessions and its usage are recorded."""
        return f"{self.kind} {self.group or self.name}"

    def __str__(self) -> str:
        """Return the name, for the log."""
        return self.name


ANONYMOUS = Identity("anonymous", "anonymous")
"""Identity of clients without credentials, where none are required."""

PLAIN = "plain tokens"
"""Group of all tokens without names. (A name contains no space.)"""
