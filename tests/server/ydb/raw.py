"""A server for a test, and a client that says exactly what it is told to, over grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.server.context import Anybody, Authenticator, Context
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
    context = Context(engine, limits or Limits(), authenticator or Anybody(), logger)
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


@contextlib.asynccontextmanager
async def channel(target: str, **how: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel; when it is closed, the tasks that its calls leave behind are waited for."""
    credentials = how.pop("credentials", None)
    options = how.pop("options", [])
    if credentials is None:
        made = grpc.aio.insecure_channel(target, options=options)
    else:
        made = grpc.aio.secure_channel(target, credentials, options=options)
    try:
        yield made
    finally:
        await made.close()
        await grpcs_own_tasks()


async def grpcs_own_tasks() -> None:
    """Wait for the tasks with which grpc.aio waits for each call's status."""
    while True:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        theirs = [each for each in running if "grpc/aio" in _file_of(each)]
        if not theirs:
            return
        await asyncio.wait(theirs)


def _file_of(task: asyncio.Task[Any]) -> str:
    code = getattr(task.get_coro(), "cr_code", None)
    return code.co_filename if code is not None else ""


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
        await self.call.write(Request(**what))

    async def receive(self) -> Any:
        """The next message but pings; ``None`` at the end of the stream."""
        while True:
            async with asyncio.timeout(PATIENCE):
                message = await self.call.read()
            if message is grpc.aio.EOF:
                return None
            if not message.HasField("ping"):
                return message
            self.pings.append(message.ping.opaque)
            if self.answers_pings:
                await self.send(pong=Request.PingPong(opaque=message.ping.opaque))

    async def expect(self, kind: str) -> Any:
        """The next message, which is of that kind."""
        message = await self.receive()
        assert message is not None, f"the stream has ended instead of {kind}"
        assert message.WhichOneof("response") == kind, message
        return getattr(message, kind)

    async def ends(self) -> None:
        """The stream ends with gRPC's OK, and nothing more is said."""
        assert await self.receive() is None
        async with asyncio.timeout(PATIENCE):
            assert await self.call.code() is grpc.StatusCode.OK

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


def stream(
    over: grpc.aio.Channel, *, metadata: Metadata = (), answers_pings: bool = True
) -> Client:
    """A stream on which nothing has been said."""
    method = over.stream_stream(
        SERVICE + "Session",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )
    return Client(method(metadata=tuple(metadata)), answers_pings=answers_pings)


async def session(
    over: grpc.aio.Channel, path: str = NODE, timeout: float = 30, **how: Any
) -> Client:
    """A stream with a session."""
    client = stream(over)
    await client.start(path, timeout, **how)
    return client


async def call(over: grpc.aio.Channel, name: str, metadata: Metadata = (), **request: Any) -> Any:
    """The operation with which a call that is no stream is answered."""
    service, messages = (
        (DISCOVERY, discovery) if hasattr(discovery, f"{name}Request") else (SERVICE, coordination)
    )
    request_type = getattr(messages, f"{name}Request")
    method = over.unary_unary(
        service + name,
        request_serializer=request_type.SerializeToString,
        response_deserializer=getattr(messages, f"{name}Response").FromString,
    )
    response = await method(request_type(**request), metadata=tuple(metadata), timeout=PATIENCE)
    return response.operation
