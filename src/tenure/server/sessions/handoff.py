"""Arrival of sessions at a server: begun, fetched from the store, or taken over by another program.

**Former programs.** Unless it assumes them dead, a takeover waits until no former program can
believe that it has the session. A program that was hosted here believes so until it has sent
`Heard`, `Detach` or `Close`, or until the window has passed since the last proof that this server
can have sent it (`Hosted.believes_until`). A notification of the takeover from the store to *this
server* is not enough, and neither is the death of a former server: what counts is the program.

A program may be unknown here, since it was attached through another server or before a restart.
Then its last contact is taken to be the instant before the store took the session away from it, and
the takeover waits for the whole window. The store's own figure (`SessionDescription.silent_for`)
may be out of date before the takeover, and afterwards it describes this attachment. The attach
numbers show whether all former programs are known here (`tenure.server.sessions.predecessors`).

A cancelled arrival leaves nothing behind: a new session is not left, and one that was to be
resumed is detached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tenure.core import rules
from tenure.engines.contract import Attach as StoreAttach
from tenure.errors import NodeNotFound, TenureError
from tenure.model import Liveness
from tenure.server.reads import session_by_id
from tenure.server.sessions.connection import Switchboard
from tenure.server.sessions.keys import check_new_key, check_shown_key
from tenure.server.sessions.predecessors import Predecessors
from tenure.server.sessions.session import Hosted
from tenure.wire.messages import Attach

if TYPE_CHECKING:
    from tenure.server.sessions.registry import Hosting

__all__ = ["Arrival", "Arriving"]


class Arrival:
    """A session on its way to a channel.

    Attributes:
        came_at: when the `Attach` came.
        leaving: the rid of the `Close` or `Detach` that came meanwhile; 0 for none.
        wanted: it has not been cancelled.
        hurries: it is not cancelled just now, but looks at `wanted` in a moment.
    """

    __slots__ = (
        "came_at",
        "closing",
        "hurries",
        "leaving",
        "link",
        "message",
        "task",
        "wanted",
    )

    task: asyncio.Task[None]

    def __init__(self, link: Switchboard, message: Attach, came_at: float) -> None:
        self.link = link
        self.message = message
        self.came_at = came_at
        self.wanted = True
        self.hurries = False
        self.leaving = 0
        self.closing = False


class Arriving:
    """The ways in to one `Hosting`, which makes sessions, and keeps them from then on.

    Attributes:
        predecessors: earlier attachments of the sessions that are over here.
    """

    def __init__(self, hosting: Hosting) -> None:
        self.predecessors = Predecessors(hosting.context.clock)
        self._hosting = hosting
        self._sessions = hosting.sessions
        self._engine = hosting.context.engine
        self._now = hosting.context.clock.now
        self._taking: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._waiting: set[Hosted] = set()  # those that are being resumed

    def look(self) -> None:
        """Let the arrivals that wait for former programs check again."""
        for each in self._waiting:
            each.look()

    async def begin(self, link: Switchboard, message: Attach) -> Hosted:
        """A new session."""
        self._hosting.context.counts.sessions.take_anyway()
        hosted = self._hosting.make(link, message, message.window)
        hosted.strangers_until = float("-inf")
        return await self._attach(link, hosted, message, assume_dead=False)

    async def fetch(self, link: Switchboard, message: Attach) -> Hosted:
        """A session of this program, from the store."""
        self._hosting.context.counts.sessions.take_anyway()
        hosted = self._hosting.make(link, message, message.window)
        try:
            await self._attach(link, hosted, message, assume_dead=True)
        except NodeNotFound as error:
            raise rules.not_there_to_resume(message.node, message.session_id) from error
        hosted.came_at = self._now()
        hosted.strangers_until = hosted.came_at + hosted.window
        self._hosting.register(hosted)
        return hosted

    async def resume(self, arrival: Arrival) -> Hosted:
        """Attach a session of another program, and wait until no other program has it."""
        message = arrival.message
        former = self._sessions.get(message.session_id)
        if former is not None and former.node != message.node:
            former = None
        if former is None:
            window = await self._window_of(message)
            left = self.predecessors.get(message.session_id)
            if window is not None and left is not None:
                _check_resumable(message, left.key, resumable=left.resumable)
        else:
            _check_resumable(message, former.shown_key, resumable=former.resumable)
            window = former.window
        self._hosting.context.counts.sessions.take_anyway()
        hosted = await self._take_over(arrival, window or message.window)
        try:
            if not arrival.wanted:
                raise asyncio.CancelledError
            if not message.assume_dead:
                self._waiting.add(hosted)
                await hosted.until_nobody_believes()
            if hosted.error is not None:
                raise hosted.error
        except BaseException:
            hosted.end(None)
            with contextlib.suppress(TenureError):
                await hosted.store.detach()
            raise
        finally:
            self._waiting.discard(hosted)
        return hosted

    async def _take_over(self, arrival: Arrival, window: float) -> Hosted:
        """Have the store attach it to this server, and refuse what a former attachment still sends.

        If the former attachment was here, the proof that it got is known here, and the store need
        not wait. That takes no time; such takeovers run one after the other, and are not cancelled,
        so that each knows the attachment before it. If the former attachment was not here, the
        store makes sure that its holder has been notified.
        """
        link, message = arrival.link, arrival.message
        number = message.session_id
        hosted = self._hosting.make(link, message, window)
        if number in self._sessions or number in self.predecessors or message.assume_dead:
            lock = self._taking.setdefault(number, asyncio.Lock())
            try:
                await lock.acquire()
            except BaseException:
                hosted.end(None)
                raise
            arrival.hurries = True
            try:
                await self._attach(link, hosted, message, assume_dead=True)
                known = self.predecessors.before(hosted, self._sessions.get(number))
                if known is not None or message.assume_dead or not arrival.wanted:
                    self._follow(hosted, told=False)
                    return hosted
            finally:
                arrival.hurries = False
                lock.release()
            hosted.end(None)
            self._hosting.context.counts.sessions.take_anyway()
            hosted = self._hosting.make(link, message, window)
        await self._attach(link, hosted, message, assume_dead=False)
        self._follow(hosted, told=True)
        return hosted

    def _follow(self, hosted: Hosted, *, told: bool) -> None:
        """Register the session's new attachment, and end the one before it.

        Args:
            told: the store guarantees that the former holder gets no more proof.
        """
        former = self._sessions.get(hosted.store.id)
        self.predecessors.note(hosted, former, told=told)
        self._hosting.register(hosted)
        if former is not None and self._sessions[hosted.store.id] is hosted:
            former.end(rules.taken_over(former.node))  # before the store says so

    async def _attach(
        self, link: Switchboard, hosted: Hosted, message: Attach, *, assume_dead: bool
    ) -> Hosted:
        """Have the store attach it. If that fails nothing is left of it here."""
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
            hosted.store = await link.engine.attach(how, hosted)
        except BaseException:
            hosted.end(None)
            raise
        if hosted.error is not None:
            raise hosted.error
        if message.kind == "new":
            self._hosting.register(hosted)
        return hosted

    async def _window_of(self, message: Attach) -> float | None:
        """Return the recovery window, in seconds, of a session that is not in this server.

        It is the window that the store has, not the one that the client names. ``None`` if the
        session is over, or will be found to be.
        """
        found = await session_by_id(self._engine, message.node, message.session_id)
        return None if found is None else found.recovery_window


def _key_for_store(message: Attach) -> bytes:
    """Return the key for the store: that of the client, or one that no client knows.

    Raises:
        AuthenticationFailed: without its key the session cannot be attached again.
        InvalidArgument: the key is not one for clients.
    """
    if message.kind == "new":
        check_new_key(message.key, message.node)
        return message.key or os.urandom(rules.ATTACH_KEY_BYTES)
    check_shown_key(message.key, message.node, message.session_id)
    return message.key


def _check_resumable(message: Attach, key: bytes, *, resumable: bool) -> None:
    liveness: Liveness = "window" if resumable else "process"
    rules.check_resumable(liveness, key, message.key, message.node, message.session_id)
