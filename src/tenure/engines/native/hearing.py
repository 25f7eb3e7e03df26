"""Dispatch of a server's messages to sessions and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from tenure.engines.contract import Withdrawn
from tenure.engines.native.calls import Call
from tenure.engines.native.connection import Connection, Handlers
from tenure.errors import TenureError
from tenure.wire import messages as wire
from tenure.wire.errors import from_wire

__all__ = ["Receiver", "hearing"]


class Receiver(Protocol):
    """Session that messages are delivered to."""

    def attached(self, answer: wire.Attached, connection: Connection) -> None:
        """Handle the answer to an attach over this connection."""
        ...

    def granted(self, push: wire.Granted) -> None:
        """Handle a grant."""
        ...

    def removed(self, push: wire.Removed) -> None:
        """Handle a removal."""
        ...

    def changed(self, push: wire.Changed) -> None:
        """Handle a change of a watched semaphore."""
        ...

    def watch_refused(self, push: wire.WatchRefused) -> None:
        """Handle the refusal of a watch."""
        ...

    def proven(self, answer: wire.Proven) -> None:
        """Handle the proof that answers a renewal."""
        ...

    def contact(self, push: wire.Contact) -> None:
        """Handle the loss or the return of the server's contact to its store."""
        ...

    def ended(self, push: wire.Ended) -> None:
        """Handle the end of the session."""
        ...


def hearing(
    sessions: Mapping[int, Receiver],
    connection: Connection,
    refuse: Callable[[Call, TenureError], None],
    close: Callable[[int, Connection], object],
) -> Handlers:
    """Return the handler of each message of a connection.

    Args:
        sessions: by their channels.
        connection: the one that the messages come from.
        refuse: fails a call.
        close: closes what was attached to a channel without a session.
    """
    return {**_answers(sessions, connection, refuse, close), **_pushes(sessions, connection)}


def _answers(
    sessions: Mapping[int, Receiver],
    connection: Connection,
    refuse: Callable[[Call, TenureError], None],
    close: Callable[[int, Connection], object],
) -> Handlers:
    calls = connection.calls

    def landed(rid: int) -> Call | None:
        connection.useful = True
        return calls.pop(rid, None)

    def succeed(rid: int, result: object) -> None:
        call = landed(rid)
        if call is not None:
            if call.owner is not None:
                call.owner.landed(call)
            call.succeed(result)

    def placed(answer: wire.Placed) -> None:
        call = landed(answer.rid)
        if call is not None and call.owner is not None:
            call.owner.placed(call, answer)

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
            refuse(call, from_wire(answer.error))

    def attached(answer: wire.Attached) -> None:
        call = landed(answer.rid)
        if call is None or call.future.done():
            return  # it was cancelled, and the server has been notified
        assert isinstance(call.message, wire.Attach)
        channel = call.message.channel
        session = sessions.get(channel)
        if session is not None:
            session.attached(answer, connection)
            call.succeed(None)
        else:  # its window has ended meanwhile, for the program
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
    }


def _pushes(sessions: Mapping[int, Receiver], connection: Connection) -> Handlers:
    def to(tell: Callable[[Receiver, Any], None]) -> Callable[[Any], None]:
        def handle(push: Any) -> None:
            session = sessions.get(push.channel)
            if session is not None:
                tell(session, push)

        return handle

    tell_its_end = to(lambda session, push: session.ended(push))

    def ended(push: wire.Ended) -> None:
        tell_its_end(push)
        connection.send(wire.Heard(push.channel))

    def nothing(_: Struct) -> None:
        """Ignore a message whose arrival is all that counts."""

    return {
        wire.Granted: to(lambda session, push: session.granted(push)),
        wire.Removed: to(lambda session, push: session.removed(push)),
        wire.Changed: to(lambda session, push: session.changed(push)),
        wire.WatchRefused: to(lambda session, push: session.watch_refused(push)),
        wire.Proven: to(lambda session, push: session.proven(push)),
        wire.Unproven: nothing,
        wire.Contact: to(lambda session, push: session.contact(push)),
        wire.Ended: ended,
        wire.Pong: nothing,
    }
