"""Dispatch of a server's messages to sessions and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from tenure.engines.contract import Withdrawn
from tenure.engines.native.calls import NativeCall
from tenure.engines.native.connection import Handlers, NativeConnection
from tenure.errors import TenureError
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire


class Receiver(Protocol):
    """Session that messages are delivered to."""

    def attached(self, answer: wire.Attached, connection: NativeConnection) -> None:
        """Handle the answer to an attach over this connection."""

    def receive(self, message: Struct) -> None:
        """Handle a message that is not an answer."""


def dispatch(
    sessions: Mapping[int, Receiver],
    connection: NativeConnection,
    fail: Callable[[NativeCall, TenureError], None],
    close: Callable[[int, NativeConnection], object],
) -> Handlers:
    """Return the handler of each message of a connection.

    Args:
        sessions: the sessions by channel.
        connection: the connection of the messages.
        fail: fails a call.
        close: closes a session that was attached to an unknown channel.
    """
    calls = connection.calls

    def answered(rid: int) -> NativeCall | None:
        connection.useful = True
        return calls.pop(rid, None)

    def succeed(rid: int, result: object) -> None:
        call = answered(rid)
        if call is not None:
            if call.owner is not None:
                call.owner.answered(call)
            call.succeed(result)

    def placed(answer: wire.Placed) -> None:
        call = answered(answer.rid)
        if call is not None and call.owner is not None:
            call.owner.placed(call, answer)

    def done(answer: wire.Done) -> None:
        call = calls.get(answer.rid)
        if call is not None and isinstance(call.message, wire.Withdraw):
            # A server older than this field omits it.
            was_there = answer.found is not False or call.may_have_run
            succeed(answer.rid, Withdrawn.LEFT if was_there else Withdrawn.MISSING)
        else:
            succeed(answer.rid, answer.found)

    def failed(answer: wire.Failed) -> None:
        call = answered(answer.rid)
        if call is not None:
            fail(call, from_wire(answer.error))

    def attached(answer: wire.Attached) -> None:
        call = answered(answer.rid)
        if call is None or call.future.done():
            return  # it was cancelled, and the server has been notified
        assert isinstance(call.message, wire.Attach)
        channel = call.message.channel
        session = sessions.get(channel)
        if session is not None:
            session.attached(answer, connection)
            call.succeed(None)
        else:  # its window has passed meanwhile, for the program
            close(channel, connection)

    def part(rid: int, found: list[Any], *, more: bool) -> None:
        call = calls.get(rid)
        if call is not None:
            call.parts += found
            if not more:
                succeed(rid, call.parts)

    def semaphores_listed(answer: wire.SemaphoresListed) -> None:
        part(answer.rid, [each.model() for each in answer.semaphores], more=answer.more)

    def sessions_listed(answer: wire.SessionsListed) -> None:
        part(answer.rid, [each.model() for each in answer.sessions], more=answer.more)

    def deliver(push: Any) -> None:
        session = sessions.get(push.channel)
        if session is not None:
            session.receive(push)

    def ended(push: wire.Ended) -> None:
        deliver(push)
        connection.send(wire.EndReceived(push.channel))

    return {
        wire.Placed: placed,
        wire.Done: done,
        wire.Failed: failed,
        wire.Attached: attached,
        wire.SemaphoreDescribed: lambda each: succeed(each.rid, each.semaphore.model()),
        wire.NodeDescribed: lambda each: succeed(each.rid, each.node.model()),
        wire.NodesListed: lambda each: part(each.rid, each.paths, more=each.more),
        wire.SemaphoresListed: semaphores_listed,
        wire.SessionsListed: sessions_listed,
        wire.StoreTime: lambda each: succeed(each.rid, each.seconds),
        wire.Granted: deliver,
        wire.Removed: deliver,
        wire.Changed: deliver,
        wire.WatchRefused: deliver,
        wire.Proven: deliver,
        wire.Contact: deliver,
        wire.Ended: ended,
        wire.Unproven: _ignore,
        wire.Pong: _ignore,
    }


def _ignore(_: Struct) -> None:
    """Ignore a message that only shows that the server is alive."""
