"""Sources of the sessions that primitives use, and the anchor that keeps a client.

An *anchor* stands between the program's handles of a client or a session and its core. The handles,
and the primitives, leases and watches made by them, refer to the anchor. The core does not. So an
anchor is garbage collected when the program can reach none of them, and ends what it kept. That of
a session is in `session_handle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tenure._client.client_core import ClientCore
from tenure._client.contact import Contact
from tenure._client.handles import CallSite, warn_dropped
from tenure._client.listeners import Listeners
from tenure._client.session_core import SessionCore


class SessionSource(Protocol):
    """Source of a primitive's session: a fixed session, or a client's implicit one."""

    @property
    def node(self) -> str: ...

    @property
    def recovery_window(self) -> float: ...

    @property
    def contact(self) -> Contact: ...

    @property
    def listeners(self) -> Listeners: ...

    def ready(self) -> SessionCore | None:
        """Return the session if it can be used at once."""

    def current(self) -> SessionCore | None:
        """Return the session that was used last, ended or not."""

    async def obtain(self) -> SessionCore:
        """Return the session, attaching it if needed."""
        ...


class ClientAnchor:
    """Closes a client that the program has dropped.

    Attributes:
        core: the client's state.
        site: where the program connected.
        close: schedules the closing, from any thread; ``None`` while nothing is open.
    """

    __slots__ = ("_close", "core", "site")

    def __init__(self, core: ClientCore, site: CallSite) -> None:
        self.core = core
        self.site = site
        self._close: Callable[[], None] | None = None

    def closed_by(self, close: Callable[[], None]) -> None:
        """Set the function that schedules the closing, from any thread."""
        self._close = close

    def __del__(self) -> None:
        core = self.core
        opened = core.loop is not None or self._close is not None
        if opened and not core.closed and core.is_running():
            if self._close is not None:
                self._close()
            else:
                core.soon(core.close_dropped)
            what = f"the client of {core.url}"
            warn_dropped(
                self, self.site, what, "It is closed now; close it, or enter it with 'with'."
            )
