"""Source of the session that a primitive uses."""

from __future__ import annotations

from typing import Protocol

from tenure._client.contact import Contact
from tenure._client.session_core import SessionCore

__all__ = ["SessionSource"]


class SessionSource(Protocol):
    """Source of a primitive's session: a fixed session, or a client's implicit one."""

    @property
    def node(self) -> str: ...

    @property
    def recovery_window(self) -> float: ...

    @property
    def contact(self) -> Contact: ...

    def ready(self) -> SessionCore | None:
        """Return the session if it can be used at once."""

    def current(self) -> SessionCore | None:
        """Return the session that was used last, ended or not."""

    async def obtain(self) -> SessionCore:
        """Return the session, attaching it if needed."""
        ...
