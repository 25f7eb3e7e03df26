"""The I/O of one session: a stream, and another one whenever it breaks.

A `Line` carries what its `Strand` says to a server and back. It owns one task, which reads; that
task owns another one for each stream, which writes. Rules:

* After a loss it tries again, with pauses that grow and are drawn by lot, until the session is
  over or the line has to end. It does not try while the program is silent: attaching would keep the
  session alive, unless that is to be ended. Once the window has passed it asks what has become of
  the session.
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

from tenure.background import Failures
from tenure.engines._kit.backoff import LONGEST_PAUSE, backoff
from tenure.engines.ydb.channel import Channel, Stream
from tenure.engines.ydb.errors import OutOfReach
from tenure.engines.ydb.strand import Strand
from tenure.errors import AuthenticationFailed

__all__ = ["Line"]

_log = logging.getLogger("tenure")

LEAST_PATIENCE, MOST_PATIENCE = 0.5, 5.0
"""Seconds in which an answer is expected, whatever the window."""

MOST_EXCUSED = 2
"""How many times more a server may take as long, if its connection is heard of."""

LINGER = 0.2
"""Delay after the recovery window before checking whether a silent session expired."""


class Line:
    """The connection of one strand.

    Args:
        channel: the way to the servers.
        strand: what is said.
        lost: called when an attached session's stream is over, though the session may not be.
        failed: called with what went wrong with an attempt.
    """

    def __init__(
        self,
        channel: Channel,
        strand: Strand,
        *,
        lost: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._strand = strand
        self._lost = lost
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._beginning: asyncio.Timeout | None = None
        self._writing: asyncio.Task[None] | None = None
        self._to_write = asyncio.Event()
        self._word = asyncio.Event()
        self._was_attached = False  # through the stream that there is
        self._over = False
        self._failures = Failures("keeping a session stream", _log)
        self._silence: asyncio.TimerHandle | None = None
        self._silence_due = 0.0
        self._excused = 0
        self._proven_then = 0.0
        self._silent = False
        self._task = asyncio.create_task(self._run(), name="tenure-ydb-session")

    @property
    def patience(self) -> float:
        """Seconds in which an answer is expected."""
        return min(max(self._strand.window / 6, LEAST_PATIENCE), MOST_PATIENCE)

    @property
    def connected(self) -> bool:
        """True if there is a stream, so that the server may have received something."""
        return self._stream is not None

    def outgoing(self) -> None:
        """The strand has something to say."""
        self._to_write.set()
        self._mind_silence()

    def word(self) -> None:
        """Note a sign of life of the program."""
        self._word.set()

    def end(self) -> None:
        """Try no more; the stream that there is may come to its end."""
        self._over = True
        self._word.set()
        self._to_write.set()
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def finish(self) -> None:
        """Wait until the stream has ended in good order, and end it if it does not."""
        self.end()
        if self.connected:
            await asyncio.wait([self._task], timeout=self.patience)
        await self.aclose()

    async def leave(self) -> None:
        """Write all output, and end it; return when the server has received it."""
        self.end()
        if self._writing is not None and self._stream is not None:
            await asyncio.wait([self._writing], timeout=self.patience)
            stream = self._stream
            if stream is not None and self._writing is not None and self._writing.done():
                with contextlib.suppress(OutOfReach, TimeoutError):
                    async with asyncio.timeout(self.patience):
                        await stream.half_close()
        await self.finish()

    async def aclose(self) -> None:
        """End everything, at once. Safe to call twice."""
        self.end()
        self._task.cancel()
        await asyncio.wait([self._task])

    # The task

    async def _run(self) -> None:
        failures = 0
        while not self._over:
            self._was_attached = self._silent = False
            try:
                await self._connected()
            except (OutOfReach, AuthenticationFailed, TimeoutError) as error:
                self._failed(error)
            except Exception as error:  # whatever it is, the next stream may go on
                self._failures.report(error)
            finally:
                self._strand.lost()
            if self._was_attached:
                failures = 0
                if not self._over:
                    self._lost()
            await self._rest(backoff(failures, min(self._strand.window / 10, LONGEST_PAUSE)))
            failures += 1

    async def _rest(self, pause: float) -> None:
        """Wait before the next attempt, and for a word of the program if it has been silent."""
        strand = self._strand
        until = self._loop.time() + pause
        while not self._over:
            left = until - self._loop.time()
            if left <= 0:
                if strand.wants_contact or strand.silent_for >= strand.window + LINGER:
                    return
                left = strand.window + LINGER - strand.silent_for
            self._word.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._word.wait()

    async def _connected(self) -> None:
        """One stream, from its first message to its end."""
        strand = self._strand
        async with asyncio.timeout(self.patience):
            stream = await self._channel.stream()
        if self._over:
            stream.cut()
            return
        self._stream = stream
        self._mind_silence()
        ended = False
        try:
            # Cutting off a stream that has not begun does not wake its waiter.
            async with asyncio.timeout(None) as self._beginning:
                with contextlib.suppress(OutOfReach):  # what the server says then tells why
                    await stream.write(strand.begin())
                message = await stream.read()
            self._beginning = None
            self._writing = asyncio.create_task(self._write(stream), name="tenure-ydb-write")
            while message is not None:
                strand.receive(message)
                self._was_attached = self._was_attached or strand.attached
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
        strand = self._strand
        with contextlib.suppress(OutOfReach):
            while True:
                self._to_write.clear()
                outgoing, strand.outgoing = strand.outgoing, []
                for message in outgoing:
                    await stream.write(message)
                if strand.outgoing:
                    continue
                if self._over:
                    return
                await self._to_write.wait()

    # Silence

    @property
    def _waits(self) -> bool:
        """True if the server owes an answer."""
        if self._stream is None or self._over:
            return False
        return self._strand.waits_for_proof or not self._was_attached

    def _mind_silence(self) -> None:
        """See to it that a server which does not answer is left."""
        if not self._waits:
            self._excused = 0
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None
        elif self._silence is None:
            self._proven_then = self._strand.last_proof
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
        if self._strand.last_proof > self._proven_then:
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
