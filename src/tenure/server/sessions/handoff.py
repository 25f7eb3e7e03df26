"""Attaching of sessions to a server: opened, fetched from the store, or taken over.

**Former programs.** Unless it assumes them dead, a takeover waits until no former program can
consider the session its own. A program attached here does so until it has sent `EndReceived`,
`Detach` or `Close`, or until the window has passed since the last proof that this server can have
sent it (`ServerSession.may_hold_until`). Neither a notification from the store to *this server* nor
the death of a former server suffices: only the program counts.

A program may be unknown here because it was attached through another server or before a restart.
Then its last contact is assumed to be just before the store's takeover, and this takeover waits for
the whole window. The store's own value (`SessionDescription.silent_for`) may be outdated before the
takeover, and afterwards describes this attachment.

**Attach numbers** show whether all former programs are known here (`FormerAttachments`). For each
session that has ended here, the server remembers the number of its last attachment, and the
programs up to that one that may consider the session theirs. If the next attachment has the next
number, that record is complete. Otherwise an unknown client owned the session in between.

A cancelled attach closes a new session, and detaches a resumed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import Attach as StoreAttach
from tenure.errors import NodeNotFound, TenureError
from tenure.model import Liveness
from tenure.server.reads import session_by_id
from tenure.server.sessions.keys import check_new_key, check_shown_key
from tenure.server.sessions.session import NEVER, UNKNOWN, HolderConnection, ServerSession
from tenure.wire.messages import Attach

if TYPE_CHECKING:
    from tenure.server.context import Context


_REMEMBERED = 10_000  # number of remembered sessions that have ended here


class EndedSession(NamedTuple):
    """A session that has ended here.

    Attributes:
        attach_number: the number of its last attachment here.
        holders: attachments up to that one whose programs may consider the session theirs.
        remote_until: time until which unknown programs may (see `ServerSession.remote_until`).
        resumable, key: checked before it is resumed.
    """

    attach_number: int
    holders: list[ServerSession]
    remote_until: float
    resumable: bool = True
    key: bytes = b""


class FormerAttachments:
    """Memory of the latest `_REMEMBERED` sessions that have ended here."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._ended: OrderedDict[int, EndedSession] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        """Return whether a session is remembered."""
        return number in self._ended

    def get(self, number: int) -> EndedSession | None:
        """Return the record of a session, or ``None``."""
        return self._ended.get(number)

    def remember(self, session: ServerSession) -> None:
        """Remember an attachment that has ended here, or was replaced."""
        now, number = self._now(), session.store.id
        there = self._ended.get(number)
        if there is not None and there.attach_number > session.store.attach_number:
            return
        self._ended[number] = EndedSession(
            session.store.attach_number,
            [each for each in (session, *session.former) if each.may_hold_until() > now],
            session.remote_until,
            session.resumable,
            session.shown_key,
        )
        self._ended.move_to_end(number)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def before(self, session: ServerSession, former: ServerSession | None) -> EndedSession | None:
        """Return the holders before this attachment; ``None`` if they are unknown here.

        Args:
            session: the new attachment.
            former: the current attachment here, if there is one.
        """
        number = session.store.attach_number - 1
        if former is not None and former.store.attach_number == number:
            ended = EndedSession(number, [former, *former.former], former.remote_until)
        else:
            ended = self._ended.get(session.store.id, EndedSession(0, [], UNKNOWN))
        known = ended.attach_number == number and ended.remote_until != UNKNOWN
        return ended if known else None

    def note(
        self, session: ServerSession, former: ServerSession | None, *, former_notified: bool
    ) -> None:
        """Record with an attachment which other programs may consider the session theirs.

        Args:
            session: the new attachment.
            former: the current attachment here, if there is one.
            former_notified: whether the store guarantees that the former holder gets no more proof,
                even if it is unknown here.
        """
        now = self._now()
        known = self.before(session, former)
        if known is None:
            session.remote_until = now + session.window if former_notified else UNKNOWN
        else:
            session.remote_until = known.remote_until
            session.former = [each for each in known.holders if each.may_hold_until() > now]


class PendingAttach:
    """An `Attach` that is not answered yet.

    Attributes:
        came_at: arrival time of the message.
        leaving: the rid of the `Close` or `Detach` that arrived meanwhile, or 0.
        active: false once it is cancelled.
        uninterruptible: whether it must not be cancelled now; it checks `active` shortly.
    """

    __slots__ = (
        "active",
        "came_at",
        "closing",
        "connection",
        "leaving",
        "message",
        "task",
        "uninterruptible",
    )

    task: asyncio.Task[None]

    def __init__(self, connection: HolderConnection, message: Attach, came_at: float) -> None:
        self.connection = connection
        self.message = message
        self.came_at = came_at
        self.active = True
        self.uninterruptible = False
        self.leaving = 0
        self.closing = False


class SessionHandoff:
    """Attaching to one registry: makes sessions, and passes them to it.

    Args:
        context: the server's context.
        sessions: the sessions of the registry by id.
        make: makes a session, and counts it until its end.
        register: registers the session's attachment here, unless a later one is registered.

    Attributes:
        former: earlier attachments of the sessions that have ended here.
    """

    def __init__(
        self,
        context: Context,
        sessions: dict[int, ServerSession],
        make: Callable[[HolderConnection, Attach, float], ServerSession],
        register: Callable[[ServerSession], None],
    ) -> None:
        """Start without an attach in progress."""
        self.former = FormerAttachments(context.clock)
        self._context = context
        self._sessions = sessions
        self._make = make
        self._register = register
        self._taking: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._waiting: dict[ServerSession, asyncio.Event] = {}  # sessions that are being resumed

    def recheck_former(self) -> None:
        """Let the takeovers that wait for former programs check again."""
        for changed in self._waiting.values():
            changed.set()

    def over(self, session: ServerSession) -> None:
        """Remember an attachment that has ended, and end the wait for its former programs."""
        if hasattr(session, "store"):
            self.former.remember(session)
        if session in self._waiting:
            self._waiting[session].set()

    async def begin(self, pending: PendingAttach) -> ServerSession:
        """Open a session."""
        session = await self._attach(pending, pending.message.window, assume_dead=False)
        self._register(session)
        return session

    async def fetch(self, pending: PendingAttach) -> ServerSession:
        """Attach a session of the same program, which is in the store but not here."""
        message = pending.message
        try:
            session = await self._attach(pending, message.window, assume_dead=True)
        except NodeNotFound as error:
            raise rules.not_there_to_resume(message.node, message.session_id) from error
        session.came_at = self._context.clock.now()
        session.remote_until = session.came_at + session.window
        self._register(session)
        return session

    async def resume(self, pending: PendingAttach) -> ServerSession:
        """Attach a session of another program, after that program has lost it."""
        message = pending.message
        pending.connection.engine.check_session(message.node, message.session_id)
        former = self._sessions.get(message.session_id)
        if former is not None and former.node != message.node:
            former = None
        if former is None:
            window = await self._window_of(pending)
            ended = self.former.get(message.session_id)
            if window is not None and ended is not None:
                _check_resumable(message, ended.key, resumable=ended.resumable)
        else:
            _check_resumable(message, former.shown_key, resumable=former.resumable)
            window = former.window
        session = await self._take_over(pending, window or message.window)
        try:
            if not pending.active:
                raise asyncio.CancelledError
            if not message.assume_dead:
                await self._wait_for_former(session)
            if session.error is not None:
                raise session.error
        except BaseException:
            session.end(None)
            with contextlib.suppress(TenureError):
                await session.store.detach()
            raise
        return session

    async def _wait_for_former(self, session: ServerSession) -> None:
        """Keep a session alive until its end, or until no other program can consider it its own."""
        self._waiting[session] = changed = asyncio.Event()
        try:
            while session.error is None:
                changed.clear()
                holders = (each.may_hold_until() for each in session.former)
                last = max(session.remote_until, *holders, NEVER)
                wait = last - self._context.clock.now()
                if wait <= 0:
                    session.former.clear()
                    return
                session.store.renew()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(wait, session.window / 3)):
                        await changed.wait()
        finally:
            del self._waiting[session]

    async def _take_over(self, pending: PendingAttach, window: float) -> ServerSession:
        """Attach it in the store to this server, and reject operations of a former attachment.

        If the former attachment was here, its proofs are known here, and the store need not wait.
        Such takeovers are immediate; they run one after the other, and are not cancelled, so that
        each knows the attachment before it. If the former attachment was elsewhere, the store
        ensures that its holder is notified.
        """
        message, sessions = pending.message, self._sessions
        number = message.session_id
        if number in sessions or number in self.former or message.assume_dead:
            async with self._taking.setdefault(number, asyncio.Lock()):
                pending.uninterruptible = True
                try:
                    session = await self._attach(pending, window, assume_dead=True)
                    known = self.former.before(session, sessions.get(number))
                    if known is not None or message.assume_dead or not pending.active:
                        self._follow(session, former_notified=False)
                        return session
                finally:
                    pending.uninterruptible = False
            session.end(None)
        session = await self._attach(pending, window, assume_dead=False)
        self._follow(session, former_notified=True)
        return session

    def _follow(self, session: ServerSession, *, former_notified: bool) -> None:
        """Register the session's new attachment, and end the one before it.

        Args:
            session: the new attachment.
            former_notified: whether the store guarantees that the former holder gets no more proof.
        """
        sessions, number = self._sessions, session.store.id
        former = sessions.get(number)
        self.former.note(session, former, former_notified=former_notified)
        self._register(session)
        if former is not None and sessions[number] is session:
            former.end(rules.taken_over(former.node))  # before the store reports it

    async def _attach(
        self, pending: PendingAttach, window: float, *, assume_dead: bool
    ) -> ServerSession:
        """Attach a session in the store. After a failure nothing is left of it here."""
        connection, message = pending.connection, pending.message
        session = self._make(connection, message, window)
        try:
            how = StoreAttach(
                message.node,
                message.window,
                message.description,
                "window",
                _key_for_store(message),
                None if message.kind == "new" else message.session_id,
                assume_dead,
            )
            session.store = await connection.engine.attach(how, session)
        except BaseException:
            session.end(None)
            raise
        if session.error is not None:
            raise session.error
        return session

    async def _window_of(self, pending: PendingAttach) -> float | None:
        """Return the recovery window, in seconds, of a session that is not in this server.

        It is the window in the store, not the one that the client names. ``None`` if the session
        has ended, or will be found to have ended.
        """
        message, engine = pending.message, self._context.engine
        async with pending.connection.reader.looking_up_session():
            found = await session_by_id(engine, message.node, message.session_id)
        return None if found is None else found.recovery_window


def _key_for_store(message: Attach) -> bytes:
    """Return the key for the store: that of the client, or a reserved one.

    Raises:
        AuthenticationFailed: the key is missing; without it the session cannot be attached again.
        InvalidArgument: the key is reserved.
    """
    if message.kind == "new":
        check_new_key(message.key, message.node)
        return message.key or os.urandom(rules.ATTACH_KEY_BYTES)
    check_shown_key(message.key, message.node, message.session_id)
    return message.key


def _check_resumable(message: Attach, key: bytes, *, resumable: bool) -> None:
    liveness: Liveness = "window" if resumable else "process"
    rules.check_resumable(liveness, key, message.key, message.node, message.session_id)
