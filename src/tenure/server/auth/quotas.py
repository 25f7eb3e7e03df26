"""Quotas of an identity: its maximum usage on one server.

Without a quota, only the limits of the server apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

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
