"""Dispatch of a server's messages to sessions and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from tenure.engines.contract import Withdrawn
from tenure.engines.native.calls import Call
from tenure.engines.native.session import NativeSession
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire

if TYPE_CHECKING:
    from tenure.engines.native.connection import Connection
    from tenure.engines.native.link import Link

__all__ = ["hearing"]

Handlers: TypeAlias = dict[type[Struct], Callable[[Any], None]]


def hearing(link: Link, connection: Connection) -> Handlers:
    """Return the handler of each message of a connection."""
    return _answers(link, connection) | _pushes(link, connection)


def _answers(link: Link, connection: Connection) -> Handlers:
    calls = connection.calls

    def landed(rid: int) -> Call | None:
        connection.useful = True
        return calls.pop(rid, None)

    def succeed(rid: int, result: object) -> None:
        call = landed(rid)
        if call is not None:
            if call.session is not None:
                call.session.landed(call)
            call.succeed(result)

    def placed(answer: wire.Placed) -> None:
        call = landed(answer.rid)
        if call is not None and call.session is not None:
            call.session.placed(call, answer)

    def done(answer: wire.Done) -> None:
        call = calls.get(answer.rid)
        if call is not None and isinstance(call.message, wire.Withdraw):
            # A server that came before this answer says nothing of it.
            was_there = answer.found is not False or call.perhaps_done
            succeed(answer.rid, Withdrawn.LEFT if was_there else Withdrawn.MISSING)
        else:
            succeed(answer.rid, answer.found)

    def failed(answer: wire.Failed) -> None:
        call = landed(answer.rid)
        if call is not None:
            link.refuse(call, from_wire(answer.error))

    def attached(answer: wire.Attached) -> None:
        call = landed(answer.rid)
        if call is None or call.future.done():
            return  # it was cancelled, and the server has been notified
        assert isinstance(call.message, wire.Attach)
        channel = call.message.channel
        session = link.sessions.get(channel)
        if session is not None:
            session.attached(answer, connection)
            call.succeed(None)
        else:  # its window has ended meanwhile, for the program
            rid = link.next_rid()
            connection.submit(Call(rid, wire.Close(rid, channel), link.loop.create_future()))

    def part(rid: int, found: list[Any], *, more: bool) -> None:
        call = calls.get(rid)
        if call is not None:
            call.parts += found
            if not more:
                succeed(rid, call.parts)

    def semaphores(answer: wire.SemaphoresListed) -> None:
        part(answer.rid, [each.model() for each in answer.semaphores], more=answer.more)

    def sessions(answer: wire.SessionsListed) -> None:
        part(answer.rid, [each.model() for each in answer.sessions], more=answer.more)

    return {
        wire.Placed: placed,
        wire.Done: done,
        wire.Failed: failed,
        wire.Attached: attached,
        wire.SemaphoreDescribed: lambda each: succeed(each.rid, each.semaphore.model()),
        wire.NodeDescribed: lambda each: succeed(each.rid, each.node.model()),
        wire.NodesListed: lambda each: part(each.rid, each.paths, more=each.more),
        wire.SemaphoresListed: semaphores,
        wire.SessionsListed: sessions,
        wire.StoreTime: lambda each: succeed(each.rid, each.seconds),
    }


def _pushes(link: Link, connection: Connection) -> Handlers:
    sessions = link.sessions

    def to(tell: Callable[[NativeSession, Any], None]) -> Callable[[Any], None]:
        def handle(push: Any) -> None:
            session = sessions.get(push.channel)
            if session is not None:
                tell(session, push)

        return handle

    tell_its_end = to(NativeSession.ended)

    def ended(push: wire.Ended) -> None:
        tell_its_end(push)
        connection.send(wire.Heard(push.channel))

    def nothing(_: Struct) -> None:
        """Ignore a message whose arrival is all that counts."""

    return {
        wire.Granted: to(NativeSession.granted),
        wire.Removed: to(NativeSession.removed),
        wire.Changed: to(NativeSession.changed),
        wire.WatchRefused: to(NativeSession.watch_refused),
        wire.Proven: to(NativeSession.proven),
        wire.Unproven: nothing,
        wire.Contact: to(NativeSession.contact),
        wire.Ended: ended,
        wire.Pong: nothing,
    }
