"""One connection: bytes out, replies in, in the order in which they were asked for.

Rules:

* Only this protocol touches the connection. Whoever asks gives a `Call`, which hears its reply;
  that nobody wants the reply any more changes nothing here.
* Operations that a session asks for in one go are one command, a `Batch`. What is sent within one
  turn of the loop leaves in one write, or in pieces when it is much, so that the server does the
  first while others are made; but a program that asks for one thing at a time waits for no turn.
* A reply that says that the server cannot be used (a replica, one that is loading, one that has
  lost its data) is no answer: the connection is given up, and what was not answered is sent again
  on the next one.
* A server that has forgotten its scripts is given them again, and then what it did not run, in
  order. Another client may give them to it in the middle: what a session asked for later was then
  done first, and is sent again behind what was not done.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import hiredis

from tenure.busy_poll import BusyPoll
from tenure.engines.redis.commands import (
    Batch,
    Call,
    Once,
    Operation,
    Pending,
    Reading,
    Refusal,
    Subscription,
    Words,
    never,
    pack,
)
from tenure.engines.redis.scripts import SCRIPTS

if TYPE_CHECKING:
    from tenure.engines.redis.attachment import Attachment

__all__ = ["Wire"]

_log = logging.getLogger("tenure")

_UNUSABLE = frozenset({"READONLY", "LOADING", "MASTERDOWN", "BUSY", "UNBLOCKED"})
_NOTHING = object()
_ENOUGH = 16
"""Operations that are sent at once, though the turn of the loop is not over."""


class Wire(asyncio.Protocol):
    """One connection.

    Args:
        meta: the key that scripts are given.
        pushed: hears (channel, message) of what is published.
        lost: called when the connection is gone, with why and with what was not answered and is to
            be sent again.
        busy_poll: seconds that the loop stays awake for an answer, at the most.

    Attributes:
        over: the connection is gone.
        progress: rises with everything that arrives.
    """

    def __init__(
        self,
        meta: str,
        pushed: Callable[[bytes, bytes], None],
        lost: Callable[[str, list[Pending]], None],
        busy_poll: float,
    ) -> None:
        self.progress = 0
        self._meta = meta
        self._pushed = pushed
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._pending: deque[Pending] = deque()
        self._out: list[bytes] = []
        self._batch: Batch | None = None  # what the next operation may join
        self._flushing = False
        self._alone = True  # the last time that nothing was under way, one operation at a time was
        self._loop = asyncio.get_running_loop()
        self._poll = BusyPoll(self._loop.call_soon, busy_poll)
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self._data_lost = False
        self.over = False
        self._unscripted: list[Pending] = []
        self._held_back: list[Pending] = []  # what was asked for since then
        self._reloading = False

    # What is asked

    @property
    def waits(self) -> bool:
        """Whether something has not been answered yet."""
        return bool(self._pending) or self._batch is not None

    def send(self, call: Pending) -> None:
        """Send a command."""
        if self.over:
            self._again(call)
        elif self._reloading:
            self._close_batch()
            self._held_back.append(call)
        else:
            try:
                packed = call.packed(self._meta)
            except (TypeError, ValueError) as error:  # nothing is sent, and no reply will come
                call.answered(Refusal(f"it cannot be sent: {error}"))
                return
            self._close_batch()
            # Together, or replies would go to others than those who asked.
            self._out.append(packed)
            self._pending.append(call)
            self._soon()

    def operate(self, operation: Operation[Any]) -> None:
        """Send an operation, with others of its session."""
        session, batch = operation.session, self._batch
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
            assert self._transport is not None  # as soon as there is anybody who asks
            self._transport.write(batch.packed(self._meta))
            self._pending.append(batch)
            self._poll.expect()
            return
        self._alone = not (self._pending or self._out)
        self._batch = batch
        self._soon()

    def _close_batch(self) -> None:
        batch = self._batch
        if batch is None:
            return
        if self._reloading:
            self._held_back.append(batch)
        else:
            try:
                packed = batch.packed(self._meta)
            except Exception as error:  # nothing is sent, and no reply will come
                self._batch = None
                batch.answered(Refusal(f"it cannot be sent: {error!r}"))
                return
            self._out.append(packed)
            self._pending.append(batch)
        self._batch = None

    def ask(self, *words: str | bytes | int) -> asyncio.Future[Any]:
        """The reply to a plain command."""
        reply = self._loop.create_future()
        self.send(Words(words, reply))
        return reply

    def run(
        self, name: str, session: Attachment | None, *args: str | bytes | int
    ) -> asyncio.Future[Any]:
        """The reply of a script that is for this connection only."""
        reply = self._loop.create_future()
        self.send(Once(Call(SCRIPTS[name], session, args, never), reply))
        return reply

    async def load_missing_scripts(self) -> None:
        """Give the server the scripts that it does not have."""
        digests = [each.digest for each in SCRIPTS.values()]
        there = await self.ask("SCRIPT", "EXISTS", *digests)
        missing = [each for each, known in zip(SCRIPTS.values(), there, strict=True) if not known]
        await asyncio.gather(*(self.ask("SCRIPT", "LOAD", each.text) for each in missing))

    def load_scripts(self) -> asyncio.Future[list[Any]]:
        """Give the server all scripts."""
        return asyncio.gather(*(self.ask("SCRIPT", "LOAD", each.text) for each in SCRIPTS.values()))

    def subscribe(self, *channels: str) -> asyncio.Future[Any]:
        """Hear of what is published there; done when the server has confirmed that."""
        confirmed = self._loop.create_future()
        self.send(Subscription(channels, confirmed))
        return confirmed

    def unsubscribe(self, channel: str) -> None:
        self._write(pack(("UNSUBSCRIBE", channel)))

    def give_up(self, why: str) -> None:
        """Drop the connection. Safe to call twice."""
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        self._close_batch()
        self._out.append(data)
        self._soon()

    def _soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._flushing = False
        self._flush()

    def _flush(self) -> None:
        try:
            self._write_out()
        except Exception as error:  # what was to be sent is sent on the next connection
            _log.error("what was asked could not be sent: %r", error, exc_info=error)
            self.give_up(f"what was asked could not be sent: {error!r}")

    def _write_out(self) -> None:
        self._close_batch()
        out, self._out = self._out, []
        if out and self._transport is not None and not self.over:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            self._poll.expect()

    # What arrives

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def connection_lost(self, exc: Exception | None) -> None:
        self.over = True
        why = self._why or (str(exc) if exc is not None else "the server closed the connection")
        self._why = why
        self._close_batch()
        again: list[Pending] = []
        for call in (*self._unscripted, *self._pending, *self._held_back):
            if isinstance(call, Words):
                call.fail(why)
            elif isinstance(call, Batch):
                for operation in call.operations:
                    if not self._data_lost:  # or else the script did nothing
                        operation.again()
                    again.append(Batch(call.session, operation))
            elif isinstance(call, Reading) and call.broken():
                call.answered(
                    Refusal(
                        f"each time that this was asked the connection broke ({why}); is the "
                        "answer longer than 'client-output-buffer-limit pubsub' allows? With "
                        "?protocol=2 that does not matter"
                    )
                )
            else:
                again.append(call)
        self._pending.clear()
        self._unscripted.clear()
        self._held_back.clear()
        self._lost(why, again)

    def _again(self, call: Pending) -> None:
        """It comes too late for this connection."""
        if isinstance(call, Words):
            call.fail(self._why)
        else:
            self._lost(self._why, [call])

    def data_received(self, data: bytes) -> None:
        self.progress += 1
        reader, pending = self._reader, self._pending
        reader.feed(data)
        while not self._why:
            try:
                reply = reader.gets()
            except hiredis.ProtocolError as error:
                self.give_up(f"the server does not speak Redis's protocol: {error}")
                return
            if reply is _NOTHING:
                self._poll.came(more=bool(pending))
                if not self._alone:
                    self._soon()  # after whoever has been told now, who may ask for more
                return
            kind = type(reply)
            if kind is int and pending and not self._reloading:
                pending.popleft().answered(reply)
            elif kind is hiredis.PushNotification or (
                kind is list and (not pending or type(pending[0]) is Subscription)
            ):
                self._push(pending, reply)
            elif not pending:
                self.give_up(f"the server said what nobody had asked for: {reply!r}")
            elif kind is Refusal:
                self._refused(pending, reply)
            elif kind is list and reply and reply[0] == b"lost":
                self._data_lost = True
                self.give_up("the server has lost its data")
            else:
                self._answer(pending, reply)

    def _push(self, pending: deque[Pending], reply: list[Any]) -> None:
        if reply[0] == b"message":
            self._pushed(reply[1], reply[2])
        elif reply[0] == b"subscribe":
            call = pending[0]
            assert isinstance(call, Subscription)  # it is confirmed where its reply would be
            if call.confirmed():
                self._answer(pending, None)

    def _answer(self, pending: deque[Pending], reply: Any) -> None:
        call = pending.popleft()
        if self._reloading and isinstance(call, Batch | Call) and self._came_too_early(call):
            call.came_too_early(reply)
            self._unscripted.append(call)
        else:
            call.answered(reply)
        if self._reloading and not pending:
            self._reload()

    def _came_too_early(self, call: Batch | Call) -> bool:
        """Whether it was done before what its session had asked for earlier."""
        return call.session is not None and any(
            isinstance(each, Batch | Call) and each.session is call.session
            for each in self._unscripted
        )

    def _refused(self, pending: deque[Pending], refusal: Refusal) -> None:
        word = str(refusal).partition(" ")[0]
        if word in _UNUSABLE:
            if isinstance(pending[0], Words):  # it says more than the end of the connection
                pending.popleft().answered(refusal)
            self.give_up(str(refusal))
            return
        if word != "NOSCRIPT":
            self._answer(pending, refusal)
            return
        self._unscripted.append(pending.popleft())
        self._reloading = True
        if not pending:
            self._reload()

    def _reload(self) -> None:
        """Everything is answered, or was not run because the scripts are gone."""
        self._close_batch()
        self._reloading = False
        calls = [*self._unscripted, *self._held_back]
        self._unscripted, self._held_back = [], []
        self.load_scripts().add_done_callback(
            lambda loaded: loaded.cancelled() or loaded.exception()
        )
        for call in calls:
            self.send(call)
