"""The channel to a database: one connection at a time, and another one when it breaks.

Rules:

* Any host of the URL lists the database's servers, and one of them is drawn by lot. Without
  discovery, the hosts of the URL are the servers. A server is used once it has answered.
* All streams and calls share the connection. The first that finds it broken has it left; the next
  that needs one connects anew, and all others wait for that attempt.
* What fails on the way is an `OutOfReach`; what was lost is the caller's to try again.
* Everything that was begun here has ended when `aclose` returns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from tenure.engines.ydb.connection import COORDINATION, YdbConnection
from tenure.engines.ydb.credentials import Token, tls_of, token_of
from tenure.engines.ydb.errors import OutOfReach, as_out_of_reach, brief, code_of
from tenure.engines.ydb.url import YdbUrl
from tenure.wire.ydb import Message

__all__ = ["Channel", "Stream"]

T = TypeVar("T")

FINISHING = 1.0
"""Seconds that gRPC is given to finish what was cut off."""

_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class Stream:
    """One stream of the coordination service. It ends alone, unless its connection is broken."""

    def __init__(self, channel: Channel, connection: YdbConnection, call: Any) -> None:
        """Read and write the messages of `call`."""
        self._channel = channel
        self._connection = connection
        self._call = call
        # An iterator reads what has come before the end; `read` of a call that is done does not.
        self._messages = aiter(call)

    async def write(self, message: Message) -> None:
        """Raises `OutOfReach`."""
        with as_out_of_reach():
            await self._call.write(message)

    async def read(self) -> Message | None:
        """The next message; ``None`` when the server has ended the stream in good order.

        Raises:
            OutOfReach: it is broken.
            AuthenticationFailed: the server wants other credentials.
        """
        try:
            with as_out_of_reach():
                message = await anext(self._messages, None)
        except OutOfReach as error:
            if code_of(error.__cause__) in _BROKEN:
                self.condemn()
            raise
        self._connection.heard_at = asyncio.get_running_loop().time()
        return message

    def connection_heard_since(self, instant: float) -> bool:
        """Return true if anything has come over the connection since then, on the loop's clock."""
        return self._connection.heard_at >= instant

    async def half_close(self) -> None:
        """Nothing more will be written. Raises `OutOfReach`."""
        with as_out_of_reach():
            await self._call.done_writing()

    def cut(self) -> None:
        """End the stream at once; its reader is notified."""
        self._channel.cut_off = True
        self._call.cancel()

    def condemn(self) -> None:
        """Leave the connection, which is broken, with all its streams."""
        self.cut()
        self._channel.leave(self._connection)


class Channel:
    """Connections to one database, for one engine.

    Attributes:
        cut_off: whether a call has ended in another way than in good order.
    """

    def __init__(self, address: YdbUrl) -> None:
        """Prepare the channel; `open` connects."""
        self.cut_off = False
        self._address = address
        self._open = False
        self._token: Token
        self._tls: grpc.ChannelCredentials | None = None
        self._connection: YdbConnection | None = None
        self._connecting: asyncio.Task[YdbConnection] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect.

        Raises:
            OutOfReach: there is no answer.
            AuthenticationFailed: the server wants other credentials.
            InvalidArgument: a file that the URL names cannot be read.
            Unsupported: a package for the credentials is missing.
        """
        self._token = token_of(self._address)
        self._tls = tls_of(self._address)
        self._open = True
        try:
            await self._connected()
        except BaseException:
            self.cut_off = True
            await self.aclose()
            raise

    async def call(self, name: str, request: Message) -> Message:
        """Return the operation that a call of the coordination service answers with.

        Raises:
            OutOfReach, AuthenticationFailed
        """
        connection = await self._connected()
        try:
            return await connection.call(
                f"{COORDINATION}/{name}", f"Coordination.{name}Response", request
            )
        except BaseException as error:
            self.cut_off = True
            if code_of(error.__cause__) in _BROKEN:
                self.leave(connection)
            raise

    async def stream(self) -> Stream:
        """Begin a stream; its first answer tells whether the server has it.

        Raises:
            OutOfReach, AuthenticationFailed
        """
        connection = await self._connected()
        return Stream(self, connection, await connection.session())

    def leave(self, connection: YdbConnection) -> None:
        """Use a broken connection no more, and end it."""
        if self._connection is connection:
            self._connection = None
            task = asyncio.create_task(connection.aclose(), name="tenure-ydb-leave")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def aclose(self) -> None:
        """Leave, and wait until everything has ended. Safe to call twice."""
        self._open = False
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._connection is not None:
            self.leave(self._connection)
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        if self.cut_off:
            await _finished()

    # Connecting

    async def _connected(self) -> YdbConnection:
        if not self._open:
            raise OutOfReach("it is not open")
        if self._connection is not None:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="tenure-ydb-connect")
            self._connecting.add_done_callback(self._attempted)
        with as_out_of_reach():
            return await asyncio.shield(self._connecting)

    def _attempted(self, attempt: asyncio.Task[YdbConnection]) -> None:
        self._connecting = None
        if not attempt.cancelled() and attempt.exception() is None:
            self._connection = attempt.result()

    async def _connect(self) -> YdbConnection:
        """Connect to a server that answers. Raises as `call`."""
        limit = self._address.connect_timeout
        opened: list[YdbConnection] = []
        failures: list[str] = []
        chosen: YdbConnection | None = None
        try:
            async with asyncio.timeout(limit):
                chosen = await self._choose(opened, failures)
        except TimeoutError:
            failures.append(f"no answer within {limit:g} s")
        finally:
            for connection in opened:
                if connection is not chosen:
                    await connection.aclose()
        if chosen is None:
            raise OutOfReach(brief("; ".join(failures)))
        return chosen

    async def _choose(
        self, opened: list[YdbConnection], failures: list[str]
    ) -> YdbConnection | None:
        """Return a connection to a server that has answered, if there is one.

        Args:
            opened: gets all connections that are made.
            failures: gets a reason for each server that cannot be used.
        """

        async def answering(target: str, name: str = "") -> YdbConnection | None:
            connection = YdbConnection(self._address, target, name, self._token, self._tls)
            opened.append(connection)
            try:
                async with asyncio.timeout(share):
                    await connection.list_servers()
            except (OutOfReach, TimeoutError) as error:
                failures.append(f"{target}: {str(error) or f'no answer within {share:g} s'}")
                return None
            return connection

        share = self._address.connect_timeout / len(self._address.endpoints)
        for host in _shuffled(self._address.endpoints):
            first = await answering(host)
            if first is None:
                continue
            if not self._address.discovery:
                return first
            if not first.servers:
                failures.append(f"{host} lists no server {self._address.transport}")
            for target, name in _shuffled(first.servers):
                found = first if target == host else await answering(target, name)
                if found is not None:
                    return found
        return None


def _shuffled(candidates: Sequence[T]) -> list[T]:
    return random.sample(candidates, len(candidates))


async def _finished() -> None:
    """Wait until gRPC has finished what was cut off.

    Nothing leads from a call to the task that finishes it, so that all of this loop's are waited
    for; one of another user's stream may go on, so not for long.
    """
    ending = [
        task
        for task in asyncio.all_tasks()
        if getattr(task.get_coro(), "__qualname__", "").endswith("_handle_status_once_received")
    ]
    if ending:
        await asyncio.wait(ending, timeout=FINISHING)
