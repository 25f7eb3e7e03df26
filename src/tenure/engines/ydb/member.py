"""One session on the server: its protocol, and the stream that carries it, again and again.

A member owns one task, which reads; that task owns another one for each stream, which writes.
Rules:

* After a loss it tries again, with pauses that grow and are drawn by lot, until the session is
  over or the member has to end. It does not try while the program is silent: attaching would keep
  the session alive, unless that is to be ended. Once the window has passed it asks what has become
  of the session.
* A server that does not answer for a sixth of the window, to an attachment or to what asks for a
  proof, is left, connection and all. One that is only slow, because others hear of it over the same
  connection, is given three times as long, and then the stream alone is left: to leave them all
  would only make it slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from tenure.background import Failures
from tenure.engines._kit.backoff import LONGEST_PAUSE, backoff
from tenure.engines.ydb.channel import Channel, Stream
from tenure.engines.ydb.errors import OutOfReach
from tenure.engines.ydb.protocol import YdbProtocol
from tenure.errors import AuthenticationFailed
from tenure.wire.ydb import Message

__all__ = ["Member", "MemberEvents"]

_log = logging.getLogger("tenure")

LEAST_PATIENCE, MOST_PATIENCE = 0.5, 5.0
"""Seconds in which an answer is expected, whatever the window."""

MOST_EXCUSED = 2
"""Number of further periods that a server gets while its connection still answers."""

LINGER = 0.2
"""Delay after the recovery window before checking whether a silent session expired."""


class MemberEvents(Protocol):
    """Events of a member."""

    def member_started(self, member: Member) -> None:
        """The session is attached: anew, or again."""

    def member_detached(self) -> None:
        """An attached session's stream is over, though the session may not be."""

    def member_proven(self) -> None:
        """The session has a new proof."""

    def member_refused(self, member: Member, failure: Message) -> None:
        """The server has ended the stream, for a reason that may pass."""

    def member_failed(self, member: Member, error: Exception) -> None:
        """An attempt to reach the server has failed."""

    def member_over(self, member: Member, failure: Message | None) -> None:
        """The session has ended: stopped as asked (``None``), or by the store's word."""


class Member:
    """A session on the server.

    Attributes:
        protocol: its state, and what is to be sent.
        names: the semaphores for which it has a request.
        detached: its contact was lost, and is not back.
        stopping: it is to end, and takes no more requests.
        over: done when the session on the server has ended, or has no waiters left.
        idle_since: when its last request left, on the clock.
    """

    def __init__(
        self,
        channel: Channel,
        path: str,
        window: float,
        description: str,
        key: bytes,
        now: Callable[[], float],
        events: MemberEvents,
    ) -> None:
        """Start without a stream and without a session on the server."""
        self.protocol = YdbProtocol(path, window, description, key, now, self)
        self.names: set[str] = set()
        self.detached = False
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.idle_since = now()
        self._channel = channel
        self._now = now
        self._events = events
        self._stream: Stream | None = None
        self._beginning: asyncio.Timeout | None = None
        self._writing: asyncio.Task[None] | None = None
        self._to_write = asyncio.Event()
        self._word = asyncio.Event()
        self._was_attached = False  # through the stream that there is
        self._given_up = False
        self._failures = Failures("keeping a session stream", _log)
        self._silence: asyncio.TimerHandle | None = None
        self._silence_due = 0.0
        self._excused = 0
        self._proven_then = 0.0
        self._silent = False
        self._task = asyncio.create_task(self._run(), name="tenure-ydb-session")

    @property
    def id(self) -> int:
        """Id of the session in the store."""
        return self.protocol.id

    @property
    def known(self) -> bool:
        """True if the server may know of the session."""
        return bool(self.id) or self._stream is not None

    @property
    def patience(self) -> float:
        """Seconds in which an answer is expected."""
        return min(max(self.protocol.window / 6, LEAST_PATIENCE), MOST_PATIENCE)

    def drop(self, name: str) -> None:
        """Note that its request for that semaphore has left the queue."""
        self.names.discard(name)
        self.idle_since = self._now()

    def renew(self) -> None:
        """Note a sign of life of the program, and ask for a proof."""
        self.protocol.renew()
        self._word.set()

    # Ending

    def stop(self) -> None:
        """End the session on the server. Safe to call twice."""
        self.stopping = True
        self.protocol.stop()
        self._word.set()

    def give_up(self) -> None:
        """Try no more; the stream that there is may come to its end."""
        self._end()
        if not self.over.done():
            self.over.set_result(None)

    async def finish(self) -> None:
        """Wait until the stream has ended in good order, and end it if it does not."""
        self._end()
        if self._stream is not None:
            await asyncio.wait([self._task], timeout=self.patience)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def leave(self) -> None:
        """Leave the session to its window; return when the server has received all output."""
        self.protocol.renew()  # so that its window begins now
        self._end()
        if self._writing is not None and self._stream is not None:
            await asyncio.wait([self._writing], timeout=self.patience)
            stream = self._stream
            if stream is not None and self._writing is not None and self._writing.done():
                with contextlib.suppress(OutOfReach, TimeoutError):
                    async with asyncio.timeout(self.patience):
                        await stream.half_close()
        await self.finish()

    def _end(self) -> None:
        self._given_up = True
        self._word.set()
        self._to_write.set()
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    # YdbProtocolEvents

    def outgoing(self) -> None:
        """Write the messages of the protocol."""
        self._to_write.set()
        self._mind_silence()

    def started(self) -> None:
        """Report that the session is attached."""
        self.detached = False
        self._events.member_started(self)

    def proven(self, at: float) -> None:  # noqa: ARG002  the protocol knows
        """Report a proof."""
        self._events.member_proven()

    def refused(self, failure: Message) -> None:
        """Report that the server refused to attach."""
        self._events.member_refused(self, failure)

    def ended(self, failure: Message | None) -> None:
        """Stop, and report the end of the session."""
        self.give_up()
        self._events.member_over(self, failure)

    # The task

    async def _run(self) -> None:
        failures = 0
        while not self._given_up:
            self._was_attached = self._silent = False
            try:
                await self._connected()
            except (OutOfReach, AuthenticationFailed, TimeoutError) as error:
                self._events.member_failed(self, error)
            except Exception as error:  # whatever it is, the next stream may go on
                self._failures.report(error)
            finally:
                self.protocol.lost()
            if self._was_attached:
                failures = 0
                if not self._given_up:
                    self.detached = True
                    self._events.member_detached()
            await self._rest(backoff(failures, min(self.protocol.window / 10, LONGEST_PAUSE)))
            failures += 1

    async def _rest(self, pause: float) -> None:
        """Wait before the next attempt, and for a word of the program if it has been silent."""
        protocol = self.protocol
        until = self._loop.time() + pause
        while not self._given_up:
            left = until - self._loop.time()
            if left <= 0:
                if protocol.wants_contact or protocol.silent_for >= protocol.window + LINGER:
                    return
                left = protocol.window + LINGER - protocol.silent_for
            self._word.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._word.wait()

    async def _connected(self) -> None:
        """One stream, from its first message to its end."""
        protocol = self.protocol
        async with asyncio.timeout(self.patience):
            stream = await self._channel.stream()
        if self._given_up:
            stream.cut()
            return
        self._stream = stream
        self._mind_silence()
        ended = False
        try:
            # Cutting off a stream that has not begun does not wake its waiter.
            async with asyncio.timeout(None) as self._beginning:
                with contextlib.suppress(OutOfReach):  # what the server says then tells why
                    await stream.write(protocol.begin())
                message = await stream.read()
            self._beginning = None
            self._writing = asyncio.create_task(self._write(stream), name="tenure-ydb-write")
            while message is not None:
                protocol.receive(message)
                self._was_attached = self._was_attached or protocol.attached
                self._mind_silence()
                message = await stream.read()
            ended = True
        except (OutOfReach, TimeoutError):
            if self._silent:
                stream.condemn()
            raise
        finally:
            self._stream = self._beginning = None
            self._mind_silence()
            if not ended:
                stream.cut()
            if self._writing is not None:
                self._writing.cancel()
                await asyncio.wait([self._writing])
                self._writing = None

    async def _write(self, stream: Stream) -> None:
        """Write whatever there is, until the stream does not take it; its reader learns that."""
        protocol = self.protocol
        with contextlib.suppress(OutOfReach):
            while True:
                self._to_write.clear()
                outgoing, protocol.outgoing = protocol.outgoing, []
                for message in outgoing:
                    await stream.write(message)
                if protocol.outgoing:
                    continue
                if self._given_up:
                    return
                await self._to_write.wait()

    # Silence

    @property
    def _waits(self) -> bool:
        """True if the server owes an answer."""
        if self._stream is None or self._given_up:
            return False
        return self.protocol.waits_for_proof or not self._was_attached

    def _mind_silence(self) -> None:
        """See to it that a server which does not answer is left."""
        if not self._waits:
            self._excused = 0
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None
        elif self._silence is None:
            self._proven_then = self.protocol.last_proof
            self._silence_due = self._loop.time() + self.patience
            self._silence = self._loop.call_later(self.patience, self._look)

    def _look(self) -> None:
        try:
            self._look_for_silence()
        except Exception as error:
            self._failures.report(error)
            self._mind_silence()

    def _look_for_silence(self) -> None:
        self._silence = None
        assert self._stream is not None  # or else there would be no waiter
        if self._loop.time() - self._silence_due > self.patience / 2:
            self._mind_silence()  # it was this loop that stood still, and not the server
            return
        if self.protocol.last_proof > self._proven_then:
            self._excused = 0
            self._mind_silence()  # it owes only what it was asked since
            return
        heard = self._stream.connection_heard_since(self._silence_due - self.patience)
        if heard and self._excused < MOST_EXCUSED:
            self._excused += 1
            self._mind_silence()
            return
        self._silent = not heard
        if self._beginning is not None:
            self._beginning.reschedule(self._loop.time())
        else:
            self._stream.cut()
