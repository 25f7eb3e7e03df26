"""One connection of the native protocol: the requests of its client, and their dispatch.

Ownership and cancellation:

* The connection owns its stream (`tenure.server.native.stream`), its channels, and the tasks of
  operations without a session. It owns no session: sessions belong to the registry.
* **Cancel.** A client cannot cancel an operation. When the connection is lost, operations without a
  session are cancelled, and so is attaching; operations of sessions continue.

**Without a session.** A command is one call of the engine, answered with one message. Lists and
descriptions are costly reads, in slices and in parts. Slices are scheduled by
`tenure.server.reads`, and a part is made only after the client has read the previous one. So a read
uses little memory, even if its client is slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from msgspec import Struct

from tenure.engines.contract import Engine, Pages, RateCall, RateRule, rate_answered
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    InvalidArgument,
    TenureError,
    Unsupported,
)
from tenure.model import SemaphoreDescription
from tenure.server.audit import Audit
from tenure.server.auth import ANONYMOUS, REFUSAL_DELAY, Verdict, peer_of
from tenure.server.auth.authenticator import UNKNOWN_PEER
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import Identity
from tenure.server.limits import LimitReached
from tenure.server.listener import Greeting
from tenure.server.native.stream import HEARTBEAT, ConnectionStage, NativeServerStream, OutOfOrder
from tenure.server.reads import (
    SLICE,
    Reader,
    pages_of_semaphores,
    pages_of_sessions,
    reader_of,
    requests_page,
    sessions_page,
)
from tenure.server.sessions.handoff import PendingAttach
from tenure.server.sessions.operations import (
    SESSION_HANDLERS,
    bytes_of,
    bytes_of_request,
    check_size,
    described,
    request_info,
    session_info,
)
from tenure.server.sessions.session import ServerSession
from tenure.wire.errors import to_wire
from tenure.wire.messages import (
    FEATURES,
    PAGES,
    READ_PRICE,
    VERSION,
    AlterNode,
    Attach,
    Changed,
    Close,
    CreateNode,
    Describe,
    DescribeNode,
    Detach,
    Done,
    DropNode,
    EndReceived,
    EndSession,
    Evict,
    Failed,
    Hello,
    ListNodes,
    ListSemaphores,
    ListSessions,
    NamesListed,
    NodeDescribed,
    NodesListed,
    Ping,
    Pong,
    Rate,
    RateDecided,
    ReadNames,
    ReadRequests,
    ReadSemaphores,
    ReadSessions,
    ReadStoreTime,
    Renew,
    RenewAside,
    RequestsListed,
    SemaphoreDescribed,
    SemaphoresListed,
    SessionsListed,
    StoreTime,
    Unproven,
    Watch,
    WatchRefused,
    Welcome,
)
from tenure.wire.values import Abilities, NodeInfo, SemaphoreInfo, SessionInfo

if TYPE_CHECKING:
    from tenure.server.context import Context
    from tenure.server.sessions.registry import SessionRegistry

T = TypeVar("T")


async def run_audited(
    engine: Engine, message: Any, audit: Audit, identity: Identity, peer: str
) -> Struct:
    """Carry out a command, and record it if it is an administrative action.

    Args:
        engine: the store as the client may use it.
        message: the command.
        audit: the server's audit log.
        identity: the client's identity.
        peer: the client's address.

    Raises the engine's errors.
    """
    command = _COMMANDS[type(message)]
    describe = _AUDITED.get(type(message))
    if describe is None:
        return await command(engine, message)
    event, facts = describe(message)
    with audit.action(event, identity, peer, **facts) as entry:
        answer = await command(engine, message)
        if isinstance(answer, Done) and answer.found is False:
            entry["outcome"] = None  # there was nothing to end
        return answer


async def _create_node(engine: Engine, message: CreateNode) -> Struct:
    await engine.create_node(message.path, message.config.model(), exist_ok=message.exist_ok)
    return Done(message.rid)


async def _alter_node(engine: Engine, message: AlterNode) -> Struct:
    await engine.alter_node(message.path, message.config.model())
    return Done(message.rid)


async def _drop_node(engine: Engine, message: DropNode) -> Struct:
    await engine.drop_node(message.path, force=message.force)
    return Done(message.rid)


async def _end_session(engine: Engine, message: EndSession) -> Struct:
    return Done(message.rid, await engine.end_session(message.path, message.session_id))


async def _evict(engine: Engine, message: Evict) -> Struct:
    return Done(message.rid, await engine.evict(message.path, message.name, message.order_id))


async def _read_store_time(engine: Engine, message: ReadStoreTime) -> Struct:
    return StoreTime(message.rid, await engine.store_time())


async def _rate(engine: Engine, message: Rate) -> Struct:
    rule = RateRule(message.limit, message.per, message.burst)
    call = RateCall(message.kind, rule, message.count, message.longest_wait, message.at)
    call.check(message.path, message.name)
    answer = await rate_answered(engine.rate(message.path, message.name, call))
    found = answer.rule
    return RateDecided(
        message.rid,
        found.limit,
        found.per,
        found.burst,
        answer.granted,
        answer.wait,
        answer.at,
        answer.free,
    )


_COMMANDS: dict[type[Struct], Callable[[Engine, Any], Awaitable[Struct]]] = {
    AlterNode: _alter_node,
    CreateNode: _create_node,
    DropNode: _drop_node,
    EndSession: _end_session,
    Evict: _evict,
    Rate: _rate,
    ReadStoreTime: _read_store_time,
}

_AUDITED: dict[type[Struct], Callable[[Any], tuple[str, dict[str, object]]]] = {
    AlterNode: lambda it: ("node altered", {"node": it.path}),
    CreateNode: lambda it: ("node created", {"node": it.path}),
    DropNode: lambda it: ("node dropped", {"node": it.path, "force": it.force}),
    EndSession: lambda it: ("session ended", {"node": it.path, "session": it.session_id}),
    Evict: lambda it: (
        "request evicted",
        {"node": it.path, "name": it.name, "order_id": it.order_id},
    ),
}

COMMANDS = frozenset(_COMMANDS)
"""Messages that this module answers."""


_PART = 256 * 1024  # bytes after which a list continues in another message
_NAMES = 1_000  # names in a message, of up to 1 KiB each


async def _list_nodes(
    engine: Engine, message: ListNodes, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader.turn():
        found = await engine.list_nodes()
    for part, more in _parts(found, lambda _: 300):
        yield NodesListed(message.rid, list(part), more)


async def _describe_node(
    engine: Engine, message: DescribeNode, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader.turn():
        found = await engine.describe_node(message.path)
    yield NodeDescribed(message.rid, NodeInfo.of(found))


async def _list_sessions(
    engine: Engine, message: ListSessions, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    infos: list[SessionInfo] | None = None
    async with aclosing(pages_of_sessions(engine, message.path, reader)) as pages:
        async for page in pages:
            if infos is not None:
                yield SessionsListed(message.rid, infos, True)
            infos = list(map(session_info, page))
    yield SessionsListed(message.rid, infos or [], False)


async def _list_semaphores(
    engine: Engine, message: ListSemaphores, most: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    infos: list[SemaphoreInfo] | None = None
    async with aclosing(
        pages_of_semaphores(
            engine, message.path, reader, owners=message.owners, waiters=message.waiters
        )
    ) as pages:
        async for page in pages:
            for part, _ in _parts(page, bytes_of):
                if infos is not None:
                    yield SemaphoresListed(message.rid, infos, True)
                infos = await _described(reader, part, message.path, most)
    yield SemaphoresListed(message.rid, infos or [], False)


async def _described(
    reader: Reader, found: Sequence[SemaphoreDescription], path: str, most: int
) -> list[SemaphoreInfo]:
    for each in found:
        check_size(each, path, most)
    return [await described(reader, each) for each in found]


async def _describe(
    engine: Engine, message: Describe, most: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    found = await reader.describe(
        lambda: engine.describe_semaphore(
            message.path, message.name, owners=message.owners, waiters=message.waiters
        )
    )
    check_size(found, message.path, most)
    yield SemaphoreDescribed(message.rid, await described(reader, found))


def _pages(engine: Engine) -> Pages:
    pages = engine.pages()
    if pages is None:
        raise Unsupported(f"{engine.url} has no pages of lists")
    return pages


async def _read_sessions(
    engine: Engine, message: ReadSessions, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    found = await sessions_page(_pages(engine), message.path, reader, message.after, message.most)
    for part, more in _parts(found, lambda _: 1000):
        yield SessionsListed(message.rid, list(map(session_info, part)), more)


async def _read_names(
    engine: Engine, message: ReadNames, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader.turn():
        found = await _pages(engine).names(
            message.path, after=message.after, most=min(message.most, _NAMES)
        )
    yield NamesListed(message.rid, list(found))


async def _read_semaphores(
    engine: Engine, message: ReadSemaphores, most: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    async with reader.turn():
        found = await _pages(engine).semaphores(
            message.path,
            owners=message.owners,
            waiters=message.waiters,
            after=message.after,
            most=min(message.most, SLICE),
        )
    for part, more in _parts(found, bytes_of):
        yield SemaphoresListed(
            message.rid, await _described(reader, part, message.path, most), more
        )


async def _read_requests(
    engine: Engine, message: ReadRequests, _: int, reader: Reader
) -> AsyncGenerator[Struct, None]:
    found = await requests_page(
        _pages(engine),
        *(message.path, message.name, reader),
        waiters=message.waiters,
        after=message.after,
        most=message.most,
    )
    for part, more in _parts(found, bytes_of_request):
        yield RequestsListed(message.rid, list(map(request_info, part)), more)


READS: dict[type[Struct], Callable[[Engine, Any, int, Reader], AsyncGenerator[Struct, None]]] = {
    Describe: _describe,
    DescribeNode: _describe_node,
    ListNodes: _list_nodes,
    ListSemaphores: _list_semaphores,
    ListSessions: _list_sessions,
    ReadNames: _read_names,
    ReadRequests: _read_requests,
    ReadSemaphores: _read_semaphores,
    ReadSessions: _read_sessions,
}
"""Generators of the parts of the answer to each message.

The arguments are the engine, the message, the maximum bytes of a part, and the connection's reader.
They raise `LimitReached` if a single item is longer, and the engine's errors.
"""


def _parts(found: Sequence[T], size: Callable[[T], int]) -> Iterator[tuple[Sequence[T], bool]]:
    """Yield a list in parts, each with a flag for more; one empty part for an empty list."""
    start, taken = 0, 0
    for here, each in enumerate(found):
        if taken >= _PART or here - start >= SLICE:
            yield found[start:here], True
            start, taken = here, 0
        taken += size(each)
    yield found[start:], False


_PONG = Pong()


class ConnectionOwner(Protocol):
    """The listener, as seen by its connections.

    Attributes:
        context: the server's context.
        registry: the server's sessions.
        farewell: the message that clients get when the listener drains.
    """

    context: Context
    registry: SessionRegistry
    farewell: EngineUnavailable | None

    def joined(self, connection: NativeServerConnection) -> None:
        """Add a connection."""

    def left(self, connection: NativeServerConnection) -> None:
        """Remove a connection."""


class NativeServerConnection(NativeServerStream):
    """Server end of one connection.

    Attributes:
        program: the client's program, after the greeting.
        identity: the client's identity, after the greeting.
        engine: the store as the identity may use it, after the greeting.
        reader: the schedule of its costly reads, after the greeting.
        peer: the client's address.
        stage: its state.
        gone: done when the connection is lost.
    """

    def __init__(self, listener: ConnectionOwner, greeting: Greeting) -> None:
        super().__init__(listener.context, greeting)
        self.program = b""
        self.identity = ANONYMOUS
        self.reader: Reader
        self.engine: GuardedEngine
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._shown = UNKNOWN_PEER
        self._refusing: asyncio.TimerHandle | None = None
        self._listener = listener
        self._registry = listener.registry
        self._counted = False
        self._channels: dict[int, ServerSession | PendingAttach] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection with its listener."""
        super().connection_made(transport)
        self._shown = peer_of(transport)
        self._listener.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Disconnect the client's sessions, which wait for a reconnect."""
        was = self.stage
        super().connection_lost(exc)
        if self._refusing is not None:
            self._refusing.cancel()
        if self._counted:
            self._counted = False
            self._registry.disconnected(self.program)
        channels, self._channels = self._channels, {}
        for each in channels.values():
            if isinstance(each, ServerSession):
                each.disconnect()
            else:
                self._registry.cancel(each)
        for task in self._tasks:
            task.cancel()
        self._listener.left(self)
        self.gone.set_result(None)
        if was is not ConnectionStage.GREETING:
            self._context.log(
                logging.DEBUG, "connection lost", peer=self.peer, why=exc, sessions=len(channels)
            )

    def end_unless_valid(self, verdict: Verdict) -> bool:
        """End the connection if its identity may not continue; its sessions are detached."""
        if self.stage > ConnectionStage.OPEN:
            return False
        why = verdict(
            None if self.stage is ConnectionStage.GREETING else self.identity, self._shown
        )
        if why is None:
            return False
        self._context.log(
            logging.WARNING, "connection ended", peer=self.peer, identity=self.identity, why=why
        )
        self._context.audit.record("connection ended", self.identity, self.peer, why=why)
        self.bye(AuthenticationFailed(f"the server has ended this connection: {why}"))
        return True

    def send_changed(self, channel: int, number: int) -> None:
        """Queue `Changed`, at most once until it is written."""
        self._changed[channel, number] = None
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _write_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for channel, number in changed:
            if channel in self._channels:
                self._unwritten += self._writer.add(Changed(channel, number))

    # Messages

    def _carry_out(self, message: Struct) -> None:
        kind = type(message)
        if self.stage is ConnectionStage.GREETING:
            if kind is not Hello:
                raise OutOfOrder("the first message must be Hello")
            self._greet(cast("Hello", message))
            return
        handler = SESSION_HANDLERS.get(kind)
        if handler is not None:
            session = self._channels.get(message.channel)  # type: ignore[attr-defined]
            if not isinstance(session, ServerSession) or session.error is not None:
                self._without_session(message, session)
            elif session.starting:
                session.defer(self, message, handler)
            else:
                handler(session, message)
        elif kind in READS:
            self._start(self._read(message), READ_PRICE)
        elif kind in COMMANDS:
            self._start(self._run(message), 1)
        elif kind is Ping:
            self.send(_PONG)
        else:
            self._others[kind](self, message)

    def _greet(self, hello: Hello) -> None:
        context = self._context
        if self._listener.farewell is not None:
            self.bye(self._listener.farewell, again=True)
            return
        try:
            if not hello.oldest <= VERSION <= hello.newest:
                raise Unsupported(
                    f"this server speaks version {VERSION} of the native protocol, and this client "
                    f"{hello.oldest} to {hello.newest}: install the same version of tenure on both"
                )
            if not 1 <= len(hello.program) <= 64:
                raise InvalidArgument("a program is named by 1 to 64 bytes")
            identity = context.authenticator.authenticate(hello.token, self._shown)
            returning = self._registry.admits_returning(hello.program)
            self._greeting.let_in(identity, returning=returning)
        except LimitReached as error:
            context.refused("connection refused", error.limit, peer=self.peer)
            self.bye(EngineUnavailable(str(error)), again=True)
            return
        except TenureError as error:
            wrong_token = isinstance(error, AuthenticationFailed)
            event = "wrong token" if wrong_token else "wrong greeting"
            context.log(logging.WARNING, event, peer=self.peer, why=error)
            if wrong_token:
                context.refused_login(self.peer, error, listener="tenure")
                self._refusing = self._loop.call_later(REFUSAL_DELAY, self.bye, error)
                self._stop_reading()
            else:
                self.bye(error)
            return
        self._counted = True
        self.program = hello.program
        self.identity = identity
        self.reader = reader_of(context.reads, identity, self._greeting.source)
        self.engine = GuardedEngine(context.guard, identity)
        self._registry.connected(hello.program)
        self.stage = ConnectionStage.OPEN
        self._reader.largest = self._limits.message_bytes
        context.log(logging.DEBUG, "connection greeted", peer=self.peer, identity=identity)
        features = FEATURES if self.engine.pages() is not None else FEATURES - {PAGES}
        self.send(
            Welcome(
                VERSION,
                sorted(features & set(hello.features)),
                HEARTBEAT,
                Abilities.of(context.engine.capabilities),
                self._limits.message_bytes,
                self._limits.operations_in_flight,
                self._limits.kept_answers,
            )
        )

    def _again_hello(self, _: Hello) -> None:
        raise OutOfOrder("Hello is sent once")

    def _attach(self, message: Attach) -> None:
        channel = message.channel
        if channel == 0 or channel in self._channels:
            raise OutOfOrder(f"channel {channel} of an Attach is invalid or in use")
        if message.kind != "again" and len(self._channels) >= self._limits.sessions_per_connection:
            most = self._limits.sessions_per_connection
            refusal = LimitReached(
                f"this connection has reached the server's limit sessions_per_connection = {most}",
                "sessions_per_connection",
                node=message.node,
            )
            self._context.refused("session refused", refusal.limit, peer=self.peer)
            self.send(Failed(message.rid, to_wire(refusal)))
            return
        arrival = self._registry.attach(self, message)
        if arrival is not None:
            self._channels[channel] = arrival

    def connect_channel(self, channel: int, session: ServerSession) -> None:
        """Deliver the messages of a channel to a session."""
        self._channels[channel] = session

    def forget_channel(self, channel: int) -> None:
        """Forget a channel: it has no session any more."""
        self._channels.pop(channel, None)

    def _renew_session(self, message: RenewAside) -> None:
        session = self._registry.of_program(self, message.node, message.session_id, message.key)
        if session is None:
            self.send(Unproven(0, message.number))
        else:
            session.renewals.renew(session.store, self, 0, message.number)

    def _end_received(self, message: EndReceived) -> None:
        session = self._channels.get(message.channel)
        if isinstance(session, ServerSession) and session.error is not None:
            session.disconnect()
            session.note_end_known()

    def _without_session(self, message: Any, session: ServerSession | PendingAttach | None) -> None:
        """Answer a message for a session that has ended, is not attached yet, or never existed."""
        kind = type(message)
        if kind is Close or kind is Detach:
            if isinstance(session, PendingAttach):
                self._registry.leave(session, message.rid, closing=kind is Close)
            else:
                if isinstance(session, ServerSession):
                    session.disconnect()
                    session.note_end_known()
                self.send(Done(message.rid))
        elif kind is Renew:
            self.send(Unproven(message.channel, message.number))
        elif isinstance(session, ServerSession):
            pass  # the client has been notified of its end
        elif kind is Watch or hasattr(message, "rid"):
            error = to_wire(EngineError(f"no session is attached to channel {message.channel}"))
            if kind is Watch:
                self.send(WatchRefused(message.channel, message.number, error))
            else:
                self.send(Failed(message.rid, error))

    _others: dict[type[Struct], Callable[[NativeServerConnection, Any], None]] = {  # noqa: RUF012
        Attach: _attach,
        EndReceived: _end_received,
        Hello: _again_hello,
        RenewAside: _renew_session,
    }

    # Operations without a session

    def _start(self, work: Coroutine[Any, Any, None], price: int) -> None:
        self.count_pending(price)
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, price))

    def _ended(self, price: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.uncount_pending(price)

    async def _run(self, message: Any) -> None:
        with self._failures_reported(message):
            context = self._context
            answer = await run_audited(
                self.engine, message, context.audit, self.identity, self.peer
            )
            self.send(answer)

    async def _read(self, message: Any) -> None:
        most = self._limits.output_bytes // 2
        with self._failures_reported(message):
            async with self.reader.lock:
                parts = READS[type(message)](self.engine, message, most, self.reader)
                async with aclosing(parts):
                    async for part in parts:
                        self.send(part)
                        await self._writable()

    @contextmanager
    def _failures_reported(self, message: Any) -> Iterator[None]:
        """Answer with the raised error."""
        try:
            yield
        except TenureError as error:
            if isinstance(error, LimitReached):
                self._context.refused("operation refused", error.limit, peer=self.peer)
            self.send(Failed(message.rid, to_wire(error)))
        except Exception as error:
            self._context.log(logging.ERROR, "the store failed", error=repr(error))
            self.send(Failed(message.rid, to_wire(error)))
