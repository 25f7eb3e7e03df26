"""Sources of the sessions that primitives use, and the anchors that keep clients and sessions.

An *anchor* stands between the program's handles of a client or a session and its core. The handles,
and the primitives, leases and watches made by them, refer to the anchor. The core does not. So an
anchor is garbage collected when the program can reach none of them, and ends what it kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import ref

from tenure._client.client_core import ClientCore
from tenure._client.contact import Contact
from tenure._client.handles import CallSite, warn_dropped
from tenure._client.listeners import Listeners
from tenure._client.session_core import SessionCore
from tenure._client.session_life import LIVING

if TYPE_CHECKING:
    from tenure._client.session_handle import SessionHandle


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


class SessionAnchor:
    """Ends a session that the program has dropped, and is the source of its primitives' session.

    A resumable session is detached: a program with its token can still take it over.

    Attributes:
        core: the session's state.
        client: keeps the client.
        site: where the program obtained it; ``None`` for the implicit session of a client.
        ready: returns the session if it can be used, else raises.
    """

    __slots__ = ("__weakref__", "_class", "_handle", "client", "core", "ready", "site")

    def __init__(self, core: SessionCore, client: ClientAnchor, site: CallSite | None) -> None:
        self.core = core
        self.client = client
        self.site = site
        self.ready = core.alive
        self._class: Any = None
        self._handle: Callable[[], SessionHandle | None] = lambda: None
        core.anchor = ref(self)

    @property
    def node(self) -> str:
        return self.core.node

    @property
    def recovery_window(self) -> float:
        return self.core.recovery_window

    @property
    def contact(self) -> Contact:
        return self.core.contact

    @property
    def listeners(self) -> Listeners:
        return self.core.listeners

    def current(self) -> SessionCore:
        """Return the session."""
        return self.core

    async def obtain(self) -> SessionCore:
        """Return the session, if it can be used."""
        return self.core.alive()

    # The program's handle

    def handled_by(self, handle: SessionHandle) -> None:
        """Set the program's handle, which refers to this anchor."""
        self._handle = ref(handle)
        self._class = type(handle)

    def handle(self) -> SessionHandle:
        """Return the program's handle, or another one if the program has dropped it."""
        return self._handle() or cast("SessionHandle", self._class(self))

    def __del__(self) -> None:
        core = self.core
        site = self.site
        if site is not None and core.phase in LIVING and core.client.is_running():
            core.client.soon(core.end_dropped)
            resumable = core.how.liveness == "window"
            warn_dropped(
                self,
                site,
                f"the session on {core.node}",
                f"It is {'detached' if resumable else 'closed'} now; "
                f"{'detach or ' if resumable else ''}close it, or enter it with 'with'.",
            )
