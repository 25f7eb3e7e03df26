"""A server for a test, and a client that says exactly what it is told to.

The client is grpclib's, because grpc.aio overwrites a call's status when something is written after
the server has ended it. The official SDK, whose gRPC is the other one, has tests of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.limits import Limits
from tenure.server.ydb import YdbListener
from tenure.server.ydb.messages import Request, Response, coordination, discovery

SERVICE = "/Ydb.Coordination.V1.CoordinationService/"
DISCOVERY = "/Ydb.Discovery.V1.DiscoveryService/"
NODE = "/local/default"
FOREVER = 2**64 - 1
PATIENCE = 20.0
_numbers = itertools.count()


class Lines(logging.Handler):
    """What was logged: (level, event, facts)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = getattr(record, "facts", {})
        self.seen.append((record.levelno, record.getMessage(), facts))

    def events(self) -> list[str]:
        return [event for _, event, _ in self.seen]


class Server:
    """A listener with its context and its log."""

    def __init__(self, listener: YdbListener, context: Context, lines: Lines) -> None:
        self.listener = listener
        self.context = context
        self.lines = lines

    @property
    def target(self) -> str:
        return self.listener.address.partition("://")[2].partition("/")[0]


@contextlib.asynccontextmanager
async def serving(
    store: str = "memory://",
    *,
    url: str = "ydb://127.0.0.1:0",
    limits: Limits | None = None,
    authenticator: Authenticator | None = None,
    tls: ssl.SSLContext | None = None,
    **how: Any,
) -> AsyncIterator[Server]:
    """A server on that store."""
    engine = connect_engine(store, SystemClock())
    await engine.open()
    logger, lines = logging.getLogger(f"tests.server.ydb.{next(_numbers)}"), Lines()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(lines)
    context = Context(
        engine,
        limits or Limits(),
        Authenticator() if authenticator is None else authenticator,
        logger,
    )
    listener = YdbListener(context, url, tls=tls, **how)
    await listener.open()
    try:
        yield Server(listener, context, lines)
    finally:
        await listener.aclose()
        await engine.aclose()
    counts = context.counts
    left = (counts.connections.taken, counts.greetings.taken, counts.sessions.taken)
    assert left == (0, 0, 0), f"still counted: connections, greetings, sessions {left}"
    assert counts.semaphores._queues == {}, "requests are still counted"


async def eventually(so: Callable[[], Awaitable[bool]]) -> None:
    """Return when it is so: what another end has to find out by itself cannot be waited for."""
    async with asyncio.timeout(PATIENCE):
        while not await so():  # noqa: ASYNC110  (there is no event at this end)
            await asyncio.sleep(0.01)


class Over:
    """A connection to a server, and the calls on it."""

    def __init__(self, target: str, **how: Any) -> None:
        host, _, port = target.rpartition(":")
        self.channel = Channel(host, int(port), **how)
        self.calls = contextlib.AsyncExitStack()


@contextlib.asynccontextmanager
async def channel(target: str, **how: Any) -> AsyncIterator[Over]:
    """A connection. At its end the calls that are still open are cut off with it."""
    over = Over(target, **how)
    try:
        yield over
    finally:
        over.channel.close()
        with contextlib.suppress(StreamTerminatedError, GRPCError):
            await over.calls.aclose()


class Client:
    """One stream. Pings of the server are answered, and are not among what is received."""

    def __init__(self, call: Any, *, answers_pings: bool) -> None:
        self.call = call
        self.session_id = 0
        self.timeout_millis = 0
        self.pings: list[int] = []
        self.answers_pings = answers_pings
        self._next = 0

    def next_id(self) -> int:
        self._next += 1
        return self._next

    async def send(self, **what: Any) -> None:
        await self.call.send_message(Request(**what))

    async def hear(self) -> Any:
        """The next message; ``None`` at the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            return await self.call.recv_message()

    async def receive(self) -> Any:
        """The next message but pings; ``None`` at the end of the stream."""
        while True:
            message = await self.hear()
            if message is None or not message.HasField("ping"):
                return message
            self.pings.append(message.ping.opaque)
            if self.answers_pings and not self.call._end_done:
                await self.send(pong=Request.PingPong(opaque=message.ping.opaque))

    async def receive_ping(self) -> None:
        """Answer the next message, which is a ping."""
        message = await self.hear()
        assert message is not None
        assert message.HasField("ping"), message
        await self.send(pong=Request.PingPong(opaque=message.ping.opaque))

    async def status(self) -> Status:
        """How the call has ended for gRPC, when nothing more is received."""
        try:
            assert await self.receive() is None
            await self.call.end()
            await self.call.recv_trailing_metadata()
        except GRPCError as error:
            return error.status
        return Status.OK

    async def expect(self, kind: str) -> Any:
        """The next message, which is of that kind."""
        message = await self.receive()
        assert message is not None, f"the stream has ended instead of {kind}"
        assert message.WhichOneof("response") == kind, message
        return getattr(message, kind)

    async def ends(self) -> None:
        """The stream ends with gRPC's OK, and nothing more is said."""
        assert await self.status() is Status.OK

    async def fails(self, status: int) -> str:
        """A Failure with that status, and then the end; returns what it says."""
        failure = await self.expect("failure")
        assert failure.status == status, failure
        await self.ends()
        return "; ".join(each.message for each in failure.issues)

    async def start(self, path: str = NODE, timeout: float = 30, **how: Any) -> Any:
        start = Request.SessionStart(path=path, timeout_millis=int(timeout * 1000), **how)
        await self.send(session_start=start)
        started = await self.expect("session_started")
        self.session_id, self.timeout_millis = started.session_id, started.timeout_millis
        return started

    # Asking

    async def acquire(self, name: str, count: int = 1, **how: Any) -> int:
        """Ask for it; returns the request id."""
        asked = how.pop("req_id", None) or self.next_id()
        how.setdefault("timeout_millis", FOREVER)
        ask = Request.AcquireSemaphore(req_id=asked, name=name, count=count, **how)
        await self.send(acquire_semaphore=ask)
        return asked

    async def release(self, name: str) -> int:
        asked = self.next_id()
        await self.send(release_semaphore=Request.ReleaseSemaphore(req_id=asked, name=name))
        return asked

    async def create(self, name: str, limit: int = 1, data: bytes = b"") -> Any:
        ask = Request.CreateSemaphore(req_id=self.next_id(), name=name, limit=limit, data=data)
        await self.send(create_semaphore=ask)
        return await self.expect("create_semaphore_result")

    async def update(self, name: str, data: bytes) -> int:
        asked = self.next_id()
        ask = Request.UpdateSemaphore(req_id=asked, name=name, data=data)
        await self.send(update_semaphore=ask)
        return asked

    async def delete(self, name: str, *, force: bool = False) -> int:
        asked = self.next_id()
        ask = Request.DeleteSemaphore(req_id=asked, name=name, force=force)
        await self.send(delete_semaphore=ask)
        return asked

    async def describe(self, name: str, **how: bool) -> int:
        asked = self.next_id()
        ask = Request.DescribeSemaphore(req_id=asked, name=name, **how)
        await self.send(describe_semaphore=ask)
        return asked

    # Asking, and what is answered

    async def acquired(self, asked: int) -> bool:
        """The result of an acquire."""
        result = await self.expect("acquire_semaphore_result")
        assert (result.req_id, result.status) == (asked, 400000), result
        return bool(result.acquired)

    async def pending(self, asked: int) -> None:
        assert (await self.expect("acquire_semaphore_pending")).req_id == asked

    async def refused(self, asked: int, kind: str = "acquire_semaphore_result") -> int:
        """The status of a result that is none."""
        result = await self.expect(kind)
        assert result.req_id == asked, result
        assert result.issues or result.status == 400000, "nothing says why"
        return int(result.status)

    async def released(self, asked: int) -> bool:
        result = await self.expect("release_semaphore_result")
        assert (result.req_id, result.status) == (asked, 400000), result
        return bool(result.released)

    async def described(self, name: str, **how: bool) -> Any:
        asked = await self.describe(name, **how)
        result = await self.expect("describe_semaphore_result")
        assert (result.req_id, result.status) == (asked, 400000), result
        return result.semaphore_description

    async def changed(self, asked: int) -> tuple[bool, bool]:
        """Whether the data, and whether the owners have changed."""
        told = await self.expect("describe_semaphore_changed")
        assert told.req_id == asked, told
        return told.data_changed, told.owners_changed


Metadata = Sequence[tuple[str, str]]


async def stream(over: Over, *, metadata: Metadata = (), answers_pings: bool = True) -> Client:
    """A stream on which nothing has been said."""
    call = over.channel.request(
        SERVICE + "Session", Cardinality.STREAM_STREAM, Request, Response, metadata=metadata
    )
    await over.calls.enter_async_context(call)
    await call.send_request()
    return Client(call, answers_pings=answers_pings)


async def session(over: Over, path: str = NODE, timeout: float = 30, **how: Any) -> Client:
    """A stream with a session."""
    client = await stream(over)
    await client.start(path, timeout, **how)
    return client


async def call(over: Over, name: str, metadata: Metadata = (), **request: Any) -> Any:
    """The operation with which a call that is no stream is answered."""
    service, messages = (
        (DISCOVERY, discovery) if hasattr(discovery, f"{name}Request") else (SERVICE, coordination)
    )
    request_type = getattr(messages, f"{name}Request")
    method = UnaryUnaryMethod(
        over.channel, service + name, request_type, getattr(messages, f"{name}Response")
    )
    response = await method(request_type(**request), metadata=metadata, timeout=PATIENCE)
    return response.operation


async def known(server: Server, number: int) -> bool:
    """Whether the store has a session."""
    sessions = await server.context.engine.list_sessions("/default")
    return number in {each.id for each in sessions}


async def detached(server: Server, number: int) -> None:
    """Return when the store says that the session is detached."""

    async def so() -> bool:
        sessions = await server.context.engine.list_sessions("/default")
        return any(each.id == number and each.attached is False for each in sessions)

    await eventually(so)


async def waiting(store_is: Client, waiter: Client) -> int:
    """`waiter` waits for 2 of `s`, of whose 3 the other one has 2."""
    await store_is.create("s", 3)
    await store_is.acquired(await store_is.acquire("s", 2))
    waits = await waiter.acquire("s", 2, data=b"a")
    await waiter.pending(waits)
    return waits
