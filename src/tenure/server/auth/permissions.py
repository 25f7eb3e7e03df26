"""Permissions of an identity: its access to each node.

Access to a node has four levels, each of which includes those before it:

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
from dataclasses import dataclass
from enum import IntEnum

from tenure.core.rules import check_path
from tenure.errors import InvalidArgument


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
