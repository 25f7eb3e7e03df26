"""Attaching of a stream's session: a new one, or an existing one.

An existing session is taken over regardless of its former stream: a client that has its key is the
same program. Of two streams, the one with the higher sequence number gets the session, else the
later one.

As in YDB, a client without a key attaches its session by the id alone. Because ids are listed, this
is limited to one identity: the session is stored with a key of that identity
(`tenure.server.sessions.keys`), which no other listener accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tenure.core import rules
from tenure.engines.contract import Attach, EngineSession, SessionEvents
from tenure.errors import AuthenticationFailed, InvalidArgument, SessionExpired, TenureError
from tenure.identity import seen_from
from tenure.server.limits import LimitReached
from tenure.server.sessions.keys import check_new_key
from tenure.server.ydb.messages import Refused, Status, status_of
from tenure.server.ydb.paths import normalized

if TYPE_CHECKING:
    from tenure.server.auth.guard import GuardedEngine
    from tenure.server.auth.identity import Identity
    from tenure.server.context import Context
    from tenure.server.reads import Reader
    from tenure.server.ydb.registry import YdbSessionRegistry
    from tenure.server.ydb.returning import Client


class AttachingStream(SessionEvents, Protocol):
    """The stream to which a session is attached.

    Attributes:
        client: the stream's client.
        client_host: the address that the client connects from, where known.
        identity: the client's identity.
        engine: the store as the client's identity may use it.
        reader: the schedule of its costly reads.
    """

    client: Client
    client_host: str | None
    identity: Identity
    engine: GuardedEngine
    reader: Reader


class YdbAttachedSession(NamedTuple):
    """A session, and its timeout."""

    session: EngineSession
    timeout_millis: int


def check_number(sessions: int, most: int) -> None:
    """Raise `Refused` if the connection has reached its limit of sessions."""
    if sessions > most:
        raise Refused(
            Status.PRECONDITION_FAILED,
            f"this connection has as many sessions as the server's limit sessions_per_connection "
            f"= {most} allows; open another one",
        )


def node_at(path: str, node_of: Callable[[str], str | None]) -> str:
    """Find the node at a path that a client has sent.

    Args:
        path: the path as YDB reads it: slashes at the ends and repeated slashes are ignored.
        node_of: finds the node of a path; ``None`` if it is outside the database.

    Raises:
        Refused: there is no such node.
    """
    path = normalized(path)
    if path == "/":
        raise Refused(Status.BAD_REQUEST, "the path of a node is missing")
    node = node_of(path)
    if node is None:
        raise Refused(Status.NOT_FOUND, f"there is no node {path} in this database")
    try:
        rules.check_path(node)
    except InvalidArgument as error:
        raise Refused(Status.NOT_FOUND, str(error)) from error
    return node


async def attach(
    context: Context, registry: YdbSessionRegistry, node: str, start: Any, stream: AttachingStream
) -> YdbAttachedSession:
    """Attach the session named by `start` to `stream`.

    Raises:
        Refused: it cannot be attached.
    """
    window = max(rules.MIN_WINDOW, start.timeout_millis / 1000)  # the model has no shorter ones
    try:
        rules.check_window(window, node)
        rules.check_description(start.description, node)
        rules.check_key(start.protection_key, node)
        check_new_key(start.protection_key, node)
    except InvalidArgument as error:
        raise Refused(Status.BAD_REQUEST, str(error)) from error
    description = seen_from(start.description, stream.client_host)
    own_key = context.session_keys.of_identity(stream.identity)
    how = Attach(node, window, description, "window", start.protection_key or own_key)
    try:
        if start.session_id:
            return await _again(context, registry, how, start, stream)
        async with stream.reader.beginning():
            return await _new(context, registry, how, start, stream)
    except (LimitReached, InvalidArgument) as error:  # too many, in this server or on the node
        raise Refused(Status.PRECONDITION_FAILED, str(error)) from error
    except TenureError as error:
        raise Refused(status_of(error), str(error)) from error


async def _new(
    context: Context, registry: YdbSessionRegistry, how: Attach, start: Any, stream: AttachingStream
) -> YdbAttachedSession:
    session = await stream.engine.attach(how, stream)
    context.counts.sessions.take_anyway()
    registry.join(how.node, session.id, start.timeout_millis, start.seq_no, stream)
    return YdbAttachedSession(session, start.timeout_millis)


async def _again(
    context: Context, registry: YdbSessionRegistry, how: Attach, start: Any, stream: AttachingStream
) -> YdbAttachedSession:
    number, node = start.session_id, how.node
    try:
        stream.engine.check_session(node, number)
    except AuthenticationFailed as error:
        stream.reader.refused()
        raise Refused(Status.BAD_SESSION, str(error)) from error
    async with stream.reader.attaching(), registry.turn(node, number):
        member = registry.find(node, number)
        if member is not None and start.seq_no < member.seq_no:
            raise Refused(Status.BAD_SESSION, f"session {number}: a lower sequence number")
        can = context.engine.capabilities
        millis: int | None = start.timeout_millis
        if not can.adopt or how.recovery_window > can.longest_window:
            if member is None:
                millis = await registry.timeout_of(node, number, stream.reader)
            else:
                millis = member.timeout_millis
            how = replace(how, recovery_window=max(rules.MIN_WINDOW, (millis or 0) / 1000))
        if millis is None:
            raise rules.not_there_to_resume(node, number)
        try:
            session = await _take_over(context, how, number, stream)
        except SessionExpired:
            registry.over(node, number)
            raise
        except (AuthenticationFailed, InvalidArgument) as error:
            stream.reader.refused()
            raise Refused(Status.BAD_SESSION, str(error)) from error
        if registry.find(node, number) is None:
            context.counts.sessions.take_anyway()
        registry.join(node, number, millis, start.seq_no, stream)
        return YdbAttachedSession(session, millis)


async def _take_over(
    context: Context, how: Attach, number: int, stream: AttachingStream
) -> EngineSession:
    """Attach a session of the store, by any key if its client sent none.

    Servers before 0.2 stored such a session without a key.
    """
    own_key = context.session_keys.of_identity(stream.identity)
    keys = dict.fromkeys((how.key, own_key, b""))
    for key in keys:
        again = replace(how, key=key, session_id=number, assume_dead=True, adopt=True)
        try:
            async with stream.reader.looking_up():
                return await stream.engine.attach(again, stream)
        except AuthenticationFailed:
            if not key:
                raise
    raise AssertionError("one of the keys is tried last")
