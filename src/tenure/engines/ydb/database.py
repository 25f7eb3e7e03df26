"""Connection to a database: one server at a time, with automatic reconnect.

Rules:

* The kit's reconnector tries the hosts of the URL. Each host lists the servers of the database, of
  which one is chosen at random. Without discovery, the hosts are the servers. A server is used once
  it has answered.
* All streams and calls share the connection. The first that finds it broken reports that. Callers
  repeat lost operations.
* A failure of the connection is an `EngineUnavailable`.
* When `aclose` returns, no task or call is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from tenure.clock import Clock
from tenure.engines._kit.backoff import LONGEST_PAUSE
from tenure.engines._kit.reconnect import Reconnector
from tenure.engines.ydb.connection import COORDINATION, YdbConnection
from tenure.engines.ydb.credentials import Token, tls_of, token_of
from tenure.engines.ydb.errors import as_unavailable, brief, code_of
from tenure.engines.ydb.url import YdbUrl
from tenure.errors import EngineUnavailable, TenureError
from tenure.wire.ydb import Message

T = TypeVar("T")

FINISHING = 1.0
"""Seconds within which gRPC finishes calls that were cut off."""

LONGEST_CALL_WAIT = 5.0
"""Longest wait of a call for a connection, in seconds."""

_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class Stream:
    """One stream of the coordination service. It ends alone, unless its connection is broken."""

    def __init__(self, database: Database, connection: YdbConnection, call: Any) -> None:
        """Read and write the messages of `call`."""
        self._database = database
        self._connection = connection
        self._call = call
        # An iterator reads all messages before the end; `read` of a finished call does not.
        self._messages = aiter(call)

    async def write(self, message: Message) -> None:
        """Write a message. Raises `EngineUnavailable`."""
        with as_unavailable():
            await self._call.write(message)

    async def read(self) -> Message | None:
        """Return the next message; ``None`` when the server has ended the stream normally.

        Raises:
            EngineUnavailable: it is broken.
            AuthenticationFailed: the server rejects the credentials.
        """
        try:
            with as_unavailable():
                message = await anext(self._messages, None)
        except EngineUnavailable as error:
            if code_of(error.__cause__) in _BROKEN:
                self.condemn(error)
            raise
        self._connection.received_at = asyncio.get_running_loop().time()
        return message

    def connection_active_since(self, instant: float) -> bool:
        """Return true if the connection has received anything since then, on the loop's clock."""
        return self._connection.received_at >= instant

    async def half_close(self) -> None:
        """End the output. Raises `EngineUnavailable`."""
        with as_unavailable():
            await self._call.done_writing()

    def cut(self) -> None:
        """End the stream at once; its reader is notified."""
        self._database.cut_off = True
        self._call.cancel()

    def condemn(self, why: TenureError) -> None:
        """Drop the broken connection, with all its streams."""
        self.cut()
        self._database.lost(self._connection, why)


class Database:
    """A database, as used by one engine.

    Args:
        windows: returns the recovery windows of the engine's sessions.

    Attributes:
        address: its parsed URL.
        siblings: the id of each sibling's session, by the sibling's id.
        cut_off: whether a call has ended abnormally.
    """

    def __init__(
        self, address: YdbUrl, clock: Clock, windows: Callable[[], Iterable[float]]
    ) -> None:
        """Prepare the connection; `open` connects."""
        self.address = address
        self.clock = clock
        self.siblings: dict[int, int] = {}
        self.cut_off = False
        self._windows = windows
        self._token: Token
        self._tls: grpc.ChannelCredentials | None = None
        self._reconnector = Reconnector[str, YdbConnection](
            address.url, _shuffled(address.endpoints), self
        )
        self._ending: set[asyncio.Task[Any]] = set()

    def path_of(self, node: str) -> str:
        """Return a node's path in the database."""
        return self.address.database + node

    async def open(self) -> None:
        """Connect.

        Raises:
            EngineUnavailable: there is no answer.
            AuthenticationFailed: the server rejects the credentials.
            InvalidArgument: a file in the URL cannot be read.
            Unsupported: a package for the credentials is missing.
        """
        self._token = token_of(self.address)
        self._tls = tls_of(self.address)
        try:
            await self._reconnector.open()
        except BaseException:
            self.cut_off = True
            await self.aclose()
            raise

    async def call(self, name: str, request: Message) -> Message:
        """Return the operation in the answer to a call of the coordination service.

        Raises:
            EngineUnavailable, AuthenticationFailed
        """
        wait = min(LONGEST_CALL_WAIT, self.address.connect_timeout)
        connection = await self._reconnector.connected(wait)
        try:
            return await connection.call(
                f"{COORDINATION}/{name}", f"Coordination.{name}Response", request
            )
        except BaseException as error:
            self.cut_off = True
            if isinstance(error, TenureError) and code_of(error.__cause__) in _BROKEN:
                self.lost(connection, error)
            raise

    async def stream(self, wait: float) -> Stream:
        """Begin a stream; its first answer shows whether the server accepts it.

        Args:
            wait: longest wait for a connection, in seconds.

        Raises:
            EngineUnavailable, AuthenticationFailed
        """
        connection = await self._reconnector.connected(wait)
        return Stream(self, connection, await connection.session())

    def lost(self, connection: YdbConnection, why: TenureError) -> None:
        """Replace a broken connection."""
        self._reconnector.lost(connection, why, first=None)

    def complete(self, ending: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it to its end before the database is closed, with or without its caller."""
        task = asyncio.create_task(ending, name="tenure-ydb-ending")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def aclose(self) -> None:
        """Wait for the tasks to complete, and disconnect. Safe to call twice."""
        await self._completed()
        await self._reconnector.aclose()
        await self._completed()
        if self.cut_off:
            await _finished()

    async def _completed(self) -> None:
        while self._ending:
            await asyncio.wait(list(self._ending))

    # For the reconnector

    async def connect(self, host: str) -> YdbConnection:
        """Connect to a server that answers: the host itself, or one that it lists."""
        limit = self.address.connect_timeout
        share = limit / len(self.address.endpoints)
        opened: list[YdbConnection] = []
        failures: list[str] = []
        chosen: YdbConnection | None = None

        async def answering(target: str, name: str = "") -> YdbConnection | None:
            connection = YdbConnection(self.address, target, name, self._token, self._tls)
            opened.append(connection)
            try:
                async with asyncio.timeout(share):
                    await connection.list_servers()
            except TimeoutError:
                failures.append(f"{target}: no answer within {share:g} s")
            except EngineUnavailable as error:
                failures.append(f"{target}: {error}")
            else:
                return connection
            return None

        try:
            async with asyncio.timeout(limit):
                first = await answering(host)
                if first is not None and not self.address.discovery:
                    chosen = first
                elif first is not None:
                    if not first.servers:
                        failures.append(f"{host} lists no server {self.address.transport}")
                    for target, name in _shuffled(first.servers):
                        chosen = first if target == host else await answering(target, name)
                        if chosen is not None:
                            break
        except TimeoutError:
            failures.append(f"no answer within {limit:g} s")
        finally:
            for connection in opened:
                if connection is not chosen:
                    self.complete(connection.aclose())
        if chosen is None:
            raise EngineUnavailable(brief("; ".join(failures)))
        return chosen

    def up(self, connection: YdbConnection) -> None:
        """Pass a new connection to the streams that wait for it."""

    def down(self, connection: YdbConnection, why: TenureError) -> None:  # noqa: ARG002  logged
        """Close a connection, with its streams."""
        self.complete(connection.aclose())

    def longest_pause(self) -> float:
        """Return the longest pause between two attempts, in seconds."""
        return min([LONGEST_PAUSE, *(window / 10 for window in self._windows())])


def _shuffled(candidates: Sequence[T]) -> list[T]:
    return random.sample(candidates, len(candidates))


async def _finished() -> None:
    """Wait until gRPC has finished the calls that were cut off.

    gRPC does not expose the task that finishes a call. So this waits for all such tasks of the
    loop, with a short timeout, because other users may have long streams.
    """
    ending = [
        task
        for task in asyncio.all_tasks()
        if getattr(task.get_coro(), "__qualname__", "").endswith("_handle_status_once_received")
    ]
    if ending:
        await asyncio.wait(ending, timeout=FINISHING)
