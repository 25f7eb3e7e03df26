"""Session without its primitives, as leases return it, its anchor, and its resume token.

The handle refers to the anchor, and the anchor weakly to the handle (see `source`).

With a resume token a restarted program takes over its own session. It is printable text without
spaces. It contains the session's protection key, and any program that has it can take over the
session, so keep it like a password. The format is internal to tenure::

    tenure1.<base64 of: session id, recovery window, key, node, checksum of all that>
"""

from __future__ import annotations

import asyncio
import binascii
import os
import struct
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from weakref import ref

from tenure._client.contact import Contact
from tenure._client.handles import AsyncHandle, CallSite, note_failure, warn_dropped
from tenure._client.listeners import Listeners
from tenure._client.session_core import SessionCore
from tenure._client.session_life import LIVING, SessionState
from tenure._client.source import ClientAnchor
from tenure.core import rules
from tenure.errors import InvalidArgument, Misuse, SessionExpired, Unsupported
from tenure.model import Recovered

_PREFIX = "tenure1."
_FIXED = struct.Struct(f">Qd{rules.ATTACH_KEY_BYTES}s")
_CHECKSUM = struct.Struct(">I")
_SESSION_IDS = 1 << 63


def new_key() -> bytes:
    """Return a protection key that cannot be guessed."""
    return os.urandom(rules.ATTACH_KEY_BYTES)  # as `secrets` does, whose import takes long


class ResumeToken(NamedTuple):
    """Contents of a resume token."""

    node: str
    session_id: int
    recovery_window: float
    key: bytes

    def __str__(self) -> str:
        content = _FIXED.pack(self.session_id, self.recovery_window, self.key) + self.node.encode()
        content += _CHECKSUM.pack(zlib.crc32(content))
        return _PREFIX + urlsafe_b64encode(content).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> ResumeToken:
        """Read a token.

        Raises:
            InvalidArgument: the text is not a complete resume token.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"a resume token is a str, not {type(text).__name__}")
        try:
            if not text.startswith(_PREFIX):
                raise ValueError("another beginning")
            body = text[len(_PREFIX) :]
            read = urlsafe_b64decode(body + "=" * (-len(body) % 4))
            content, checksum = read[: -_CHECKSUM.size], read[-_CHECKSUM.size :]
            if _CHECKSUM.unpack(checksum) != (zlib.crc32(content),):
                raise ValueError("another checksum")
            session_id, window, key = _FIXED.unpack(content[: _FIXED.size])
            node = content[_FIXED.size :].decode()
            rules.check_path(node)
            rules.check_window(window)
            if not 0 < session_id < _SESSION_IDS:
                raise ValueError("no store numbers a session so")
        except (ValueError, binascii.Error, struct.error):
            raise InvalidArgument(
                "this is no resume token, or not the whole of one: take it from "
                "session.resume_token as it is"
            ) from None
        return cls(node, session_id, window, key)


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
        return self._handle() or cast(SessionHandle, self._class(self))

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


class SessionHandle(AsyncHandle):
    """A session without its primitives: its state, its block and its end.

    `Lease.session` has this type; the object is the `Session` of the lease.

    Attributes:
        node: the path of its node.
        recovery_window: seconds it survives without contact to the store.
        max_stall: seconds that the event loop may be stuck before the session is no longer renewed.
    """

    def __init__(self, anchor: SessionAnchor) -> None:
        core = anchor.core
        self.node = core.node
        self.recovery_window = core.recovery_window
        self.max_stall = core.max_stall
        self._anchor = anchor  # keeps the session
        self._core = core
        anchor.handled_by(self)

    def __repr__(self) -> str:
        return f"<Session {self.id} on {self.node}{'' if self._core.why is None else ' (over)'}>"

    # State

    @property
    def id(self) -> int:
        """The session's id: positive, never reused in a store."""
        return self._core.id

    @property
    def state(self) -> SessionState:
        """One of ``connecting, attached, detached, expired, closed``. Reads the clock."""
        return self._core.state

    @property
    def deadline(self) -> float:
        """Time until which the session is proven: seconds on the client's clock."""
        return self._core.deadline

    @property
    def resume_token(self) -> str:
        """Token with which a restarted program takes over this session (`Client.session`).

        Keep it like a password, in a place that survives a restart. It never changes.

        Raises:
            Unsupported: the session was not opened with ``resumable=True``.
        """
        how = self._core.how
        if how.liveness != "window":
            raise Unsupported(
                f"the session on {self.node} ends with its program; open a resumable one with "
                "client.session(..., resumable=True)",
                node=self.node,
            )
        return str(ResumeToken(self.node, self.id, self.recovery_window, how.key))

    @property
    def recovered(self) -> tuple[Recovered, ...]:
        """Unclaimed requests of a resumed session, in order.

        `Mutex.recover`, `Semaphore.recover` and `Election.recover` claim them. An unclaimed
        request keeps its place, or its tokens, until the session ends.
        """
        return tuple(self._core.recovered.values()) if self._core.is_proven() else ()

    # Actions

    async def aclose(self) -> None:
        """End the session: everything held through it is released, in one step.

        Safe to call twice, and when cancelled. Leases that other tasks are inside are lost, and
        their bodies cancelled; a block that the calling task itself is inside raises at its end.

        Raises:
            EngineError: the store failed; it will end the session when its recovery window has
                passed.
        """
        await self._core.close()

    async def detach(self) -> None:
        """Detach: the session keeps its requests until its recovery window has passed.

        Until then a program with its `resume_token`, if it has one, can take it over. This object
        has ended: its leases count as lost, because they are no longer proven.
        """
        await self._core.close(detach=True)

    async def __aenter__(self) -> Self:
        self._core.alive()
        if self._core.scope is not None:
            raise Misuse(
                f"the session on {self.node} has been entered already; a session is entered once",
                node=self.node,
            )
        self._enter()
        return self

    def _enter(self) -> None:
        self._core.enter()

    def _close_soon(self) -> None:
        self._core.close_soon()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope = self._core.scope
        if scope is None:
            raise Misuse(
                f"the session on {self.node} is left without having been entered",
                node=self.node,
            )
        cancelled = scope.exit(error)
        if isinstance(error, GeneratorExit):  # nothing can be awaited, in any thread
            self._core.client.soon(self._close_soon)
            return
        try:
            if self.state == "expired":
                pass
            elif isinstance(error, asyncio.CancelledError):
                self._core.close_soon()  # a cancelled task does not wait for the store
            else:
                await self.aclose()
        except Exception as failure:
            note_failure(error, failure, f"closing the session on {self.node}")
        if isinstance(self._core.why, SessionExpired) and (error is None or cancelled):
            raise self._core.error()
