"""Source of the session that a primitive uses."""

from __future__ import annotations

from typing import Protocol

from tenure._client.contact import Contact
from tenure._client.session_core import SessionCore

__all__ = ["SessionSource"]


class SessionSource(Protocol):
    """The session of a primitive: one of its own, or a client's implicit session."""

    @property
    def node(self) -> str: ...

    @property
    def recovery_window(self) -> float: ...

    @property
    def contact(self) -> Contact: ...

    def ready(self) -> SessionCore | None:
        """Return the session, when there is one that can be used at once."""

    def current(self) -> SessionCore | None:
        """Return the session that was used last, whether or not it has ended."""

    async def obtain(self) -> SessionCore:
        """Return the session, attached if need be."""
        ...
