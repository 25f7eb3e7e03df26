"""Connection to a Redis server: commands out, replies in the same order.

Rules:

* Only this protocol uses the socket. The caller sends a `Command`, which handles its reply, even if
  the reply no longer has a receiver.
* Concurrent operations of a session are one command, a `Batch`. Commands sent in one iteration of
  the loop are one write, or several when they are many, so that the server runs the first ones
  early. A program that sends one operation at a time does not wait for the end of the iteration.
* A reply of a server that cannot serve now (`UNSERVED`, or without its data) is not an answer, not
  even as a part of one: the connection is dropped, and unanswered commands are sent again on the
  next one.
* If the server has forgotten its scripts, they are loaded again, and then the commands that did not
  run are sent again, in order. If another client loads the scripts meanwhile, later commands of a
  session may have run first; they are sent again, after those that had not run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis

from tenure.busy_poll import BusyPoll
from tenure.engines._kit.commands.pipeline import Operation
from tenure.engines.redis.commands import (
    UNSERVED,
    AttachedSession,
    Command,
    Keys,
    PlainCommand,
    Refusal,
    Subscription,
    Word,
    advice_on_rights,
    code_of,
    is_denied,
    pack,
)
from tenure.engines.redis.lua import SCRIPTS

_log = logging.getLogger("tenure")

_OPERATE = SCRIPTS["operate"]
_NOTHING = object()
_ENOUGH = 16
"""Number of operations that are sent at once, before the end of the loop's iteration."""


class Batch(Command):
    """Operations of one session, in order, as one command."""

    __slots__ = ("operations", "session")

    session: AttachedSession

    def __init__(self, session: AttachedSession, operation: Operation[Any]) -> None:
        self.session = session
        self.operations = [operation]

    def packed(self, keys: Keys) -> bytes:
        """Return the bytes of one command that runs all operations."""
        session = self.session
        words: list[Word]
        words = ["EVALSHA", _OPERATE.digest, *keys, session.id, session.token]
        words.append(session.order_ids.highest)
        for operation in self.operations:
            words += operation.words
        return pack(tuple(words))

    def answered(self, reply: Any) -> None:
        """Pass to each operation its part of the reply."""
        operations = self.operations
        if type(reply) is not list or type(reply[0]) is bytes:  # the same for all
            for operation in operations:
                operation.answered(reply)
            return
        for operation, each in zip(operations, reply, strict=False):
            operation.answered(each)
        self._push(reply)

    def unserved(self, reply: list[Any]) -> str:
        """Return the error of a server that could not serve an operation, or an empty text."""
        # One operation may fail without the others: scripts go on after some errors.
        for each in (reply, *reply):
            if type(each) is Refusal:
                error = str(each)
            elif type(each) is list and len(each) > 1 and each[0] == b"error":
                error = each[1].decode("utf-8", "replace")
            else:
                continue
            if code_of(error) in UNSERVED:
                return error
        return ""

    def ran_early(self, reply: Any) -> None:
        """Send the operations again, because the script was not loaded."""
        if type(reply) is list and type(reply[0]) is not bytes:
            self._push(reply)
        for operation in self.operations:
            operation.again()

    def unanswered(self, why: str, *, ran: bool) -> list[Command]:  # noqa: ARG002
        """Return a batch for each operation, to be sent again."""
        if ran:
            for operation in self.operations:
                operation.again()
        return [Batch(self.session, each) for each in self.operations]

    def _push(self, reply: list[Any]) -> None:
        for message in reply[len(self.operations) :]:
            self.session.handle_push(message)


class RedisConnection(asyncio.Protocol):
    """Connection to a Redis server.

    Args:
        keys: the keys that scripts get.
        pushed: receives (channel, message) of each push.
        lost: called when the connection has ended, with the reason and the commands to send again.
        busy_poll: maximum seconds of busy polling for an answer.

    Attributes:
        over: whether the connection has ended.
        progress: counts received data.
    """

    def __init__(
        self,
        keys: Keys,
        pushed: Callable[[bytes, bytes], None],
        lost: Callable[[str, list[Command]], None],
        busy_poll: float,
    ) -> None:
        """Start idle; the transport comes with `connection_made`."""
        self.progress = 0
        self._keys = keys
        self._pushed = pushed
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._pending: deque[Command] = deque()
        self._out: list[bytes] = []
        self._batch: Batch | None = None  # open for the next operation
        self._flushing = False
        self._alone = True  # sent one operation at a time, when it was last idle
        self._loop = asyncio.get_running_loop()
        self._poll = BusyPoll(self._loop.call_soon, busy_poll)
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self._data_lost = False
        self.over = False
        self._unscripted: list[Command] = []
        self._held_back: list[Command] = []  # sent since then
        self._reloading = False

    # Sending

    @property
    def waits(self) -> bool:
        """True while a command has no answer."""
        return bool(self._pending) or self._batch is not None

    def send(self, call: Command) -> None:
        """Send a command."""
        if self.over:
            if again := list(call.unanswered(self._why, ran=False)):
                self._lost(self._why, again)
            return
        self._close_batch()
        if self._reloading:
            self._held_back.append(call)
        else:
            try:
                self._pack(call)
            except (TypeError, ValueError) as error:  # nothing is sent, and no reply will arrive
                call.answered(Refusal(f"it cannot be sent: {error}"))
            else:
                self._soon()

    def _pack(self, call: Command) -> None:
        """Encode a command for the next write."""
        packed = call.packed(self._keys)
        # All or none, or replies would be assigned to other commands.
        self._out.append(packed)
        self._pending.append(call)

    def operate(self, operation: Operation[Any]) -> None:
        """Send an operation, together with others of its session."""
        session: AttachedSession = operation.session
        batch = self._batch
        if batch is not None and batch.session is session:
            batch.operations.append(operation)
            self._alone = False
            if len(batch.operations) >= _ENOUGH:
                self._flush()
            return
        if self.over or self._reloading:
            self.send(Batch(session, operation))
            return
        if batch is not None:
            self._close_batch()
        batch = Batch(session, operation)
        if self._alone and not (self._pending or self._out):
            # Waiting for others would gain nothing.
            assert self._transport is not None  # it is connected before it is used
            self._transport.write(batch.packed(self._keys))
            self._pending.append(batch)
            self._poll.expect()
            return
        self._alone = not (self._pending or self._out)
        self._batch = batch
        self._soon()

    def _close_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if self._reloading:
            self._held_back.append(batch)
        else:
            try:
                self._pack(batch)
            except Exception as error:  # nothing is sent, and no reply will arrive
                batch.answered(Refusal(f"it cannot be sent: {error!r}"))

    def execute(self, *words: Word) -> asyncio.Future[Any]:
        """Send a plain command; return its reply."""
        reply = self._loop.create_future()
        self.send(PlainCommand(words, reply))
        return reply

    def run(self, name: str, *args: Word) -> asyncio.Future[Any]:
        """Run a script on this connection only; return its reply."""
        return self.execute("EVALSHA", SCRIPTS[name].digest, *self._keys, *args)

    async def load_missing_scripts(self) -> None:
        """Load the missing scripts."""
        digests = [each.digest for each in SCRIPTS.values()]
        there = await self.execute("SCRIPT", "EXISTS", *digests)
        missing = [each for each, known in zip(SCRIPTS.values(), there, strict=True) if not known]
        await asyncio.gather(*(self.execute("SCRIPT", "LOAD", each.text) for each in missing))

    def load_scripts(self) -> asyncio.Future[list[Any]]:
        """Load all scripts."""
        return asyncio.gather(
            *(self.execute("SCRIPT", "LOAD", each.text) for each in SCRIPTS.values())
        )

    def subscribe(self, *channels: str) -> asyncio.Future[Any]:
        """Subscribe to channels; done when the server has confirmed all."""
        confirmed = self._loop.create_future()
        self.send(Subscription(channels, confirmed))
        return confirmed

    def unsubscribe(self, channel: str) -> None:
        """Unsubscribe from a channel. There is no reply."""
        self._close_batch()
        self._out.append(pack(("UNSUBSCRIBE", channel)))
        self._soon()

    def drop(self, why: str) -> None:
        """Drop the connection. Safe to call twice."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def _soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._flushing = False
        self._flush()

    def _flush(self) -> None:
        try:
            self._close_batch()
            out, self._out = self._out, []
            if out and self._transport is not None and not self.over:
                self._transport.write(out[0] if len(out) == 1 else b"".join(out))
                self._poll.expect()
        except Exception as error:  # these commands are sent on the next connection
            _log.error("commands could not be sent: error=%r", error, exc_info=error)
            self.drop(f"commands could not be sent: {error!r}")

    # Receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit it

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss, with the commands to send again."""
        self.over = True
        why = self._why or (str(exc) if exc is not None else "the server closed the connection")
        self._why = why
        self._close_batch()
        unanswered = (*self._unscripted, *self._pending, *self._held_back)
        ran = not self._data_lost  # otherwise the scripts had no effect
        again = [each for call in unanswered for each in call.unanswered(why, ran=ran)]
        self._pending.clear()
        self._unscripted.clear()
        self._held_back.clear()
        self._lost(why, again)

    def data_received(self, data: bytes) -> None:
        """Handle the replies that these bytes complete."""
        self.progress += 1
        reader, pending = self._reader, self._pending
        reader.feed(data)
        while not self._why:
            try:
                reply = reader.gets()
            except hiredis.ProtocolError as error:
                self.drop(f"the server sent an invalid reply: {error}")
                return
            if reply is _NOTHING:
                self._poll.came(more=bool(pending))
                if not self._alone:
                    self._soon()  # after the receivers of these replies, which may send more
                return
            kind = type(reply)
            if kind is int and pending and not self._reloading:
                pending.popleft().answered(reply)
            elif kind is hiredis.PushNotification or (
                kind is list and (not pending or type(pending[0]) is Subscription)
            ):
                self._push(pending, reply)
            elif not pending:
                self.drop(f"the server sent a reply without a command: {reply!r}")
            elif kind is Refusal:
                self._refused(pending, reply)
            elif kind is list and reply and reply[0] == b"lost":
                self._data_lost = True
                self.drop("the server has lost its data")
            else:
                self._answer(pending, reply)

    def _push(self, pending: deque[Command], reply: list[Any]) -> None:
        if reply[0] == b"message":
            self._pushed(reply[1], reply[2])
        elif reply[0] == b"subscribe":
            call = pending[0]
            assert isinstance(call, Subscription)  # confirmed instead of a reply
            if call.confirmed():
                self._answer(pending, None)

    def _answer(self, pending: deque[Command], reply: Any) -> None:
        if type(reply) is list and type(pending[0]) is Batch:
            why = pending[0].unserved(reply)
            if why:
                self.drop(why)
                return
        call = pending.popleft()
        if self._reloading and call.session is not None and self._overtakes(call.session):
            call.ran_early(reply)
            self._unscripted.append(call)
        else:
            call.answered(reply)
        if self._reloading and not pending:
            self._reload()

    def _overtakes(self, session: AttachedSession) -> bool:
        """Return true if a command ran before an earlier one of its session."""
        return any(each.session is session for each in self._unscripted)

    def _refused(self, pending: deque[Command], refusal: Refusal) -> None:
        error = str(refusal)
        code = code_of(error)
        if code in UNSERVED:
            if isinstance(pending[0], PlainCommand):  # more specific than the end of the connection
                pending.popleft().answered(refusal)
            self.drop(error)
            return
        if code != "NOSCRIPT":
            if is_denied(error) and not isinstance(pending[0], PlainCommand):
                advice = advice_on_rights(error, self._keys[1].removesuffix("meta"))
                refusal = Refusal(f"{error.rstrip('.')}. {advice}")
            self._answer(pending, refusal)
            return
        self._unscripted.append(pending.popleft())
        self._reloading = True
        if not pending:
            self._reload()

    def _reload(self) -> None:
        """Load the scripts: every command is answered, or did not run without them."""
        self._close_batch()
        self._reloading = False
        calls = [*self._unscripted, *self._held_back]
        self._unscripted, self._held_back = [], []
        self.load_scripts().add_done_callback(self._loaded)
        for call in calls:
            self.send(call)

    def _loaded(self, scripts: asyncio.Future[list[Any]]) -> None:
        error = None if scripts.cancelled() else scripts.exception()
        if error is not None:  # without them, the same commands would be sent again for ever
            self.drop(str(error))
