"""Quotas of an identity: how much it may have at a time on one server.

A quota that is not set leaves the identity to the limits of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tenure.errors import InvalidArgument

__all__ = ["UNSET", "Quotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The most that one identity may have at a time; ``None`` leaves it to the server's limit.

    Attributes:
        sessions: sessions.
        requests: requests, waiting or owning.
        semaphores: semaphores that it has created, or had the first request for.
        watches: watches.
        nodes: nodes that it has created and that exist.
        stored_bytes: bytes of data, on its requests and on the semaphores that it has written.

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
            InvalidArgument: a quota is no whole number of at least 0.
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
        """Read quotas from a plain mapping, as a TOML table has it.

        Args:
            given: numbers by the names of the attributes; ``None`` sets no quota.
            where: the place of the mapping, for messages.

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
"""No quota of its own: the server's limits, shared."""
