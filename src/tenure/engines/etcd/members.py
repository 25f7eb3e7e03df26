"""Members of a cluster, each with one channel for all calls.

Rules:

* A call is sent to the current member. If that does not answer, or has no leader, the next member
  becomes the current one for all callers, and the caller gets `Lost`.
* A channel connects when a call needs it; calls wait meanwhile. After a failed attempt, calls fail
  immediately with its reason until a pause has passed.
* A call has its own deadline. When it passes, or the caller is cancelled, only the call's stream is
  reset.
* A call that was certainly not carried out, because the member is shutting down, is repeated once
  on another connection.
* The token of an account is fetched when it is first needed, and again when it becomes invalid. A
  call that was rejected because of the token was not carried out, and is repeated.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from tenure.engines._kit.reconnect import backoff
from tenure.engines.etcd import answers, wire
from tenure.engines.etcd.answers import Lost, Refused, StaleToken, trouble_of
from tenure.engines.etcd.grpc import CallFailed, GrpcCall, GrpcConnection, StreamCall, UnaryCall
from tenure.engines.etcd.http2 import head
from tenure.engines.etcd.url import EtcdUrl
from tenure.errors import AuthenticationFailed

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_CONNECTING = 3.0
"""Timeout in seconds for connecting to a member and receiving its settings."""
_LONGEST_PAUSE = 1.0
_MOST_HEADS = 64
_HEADERS: Metadata = (
    ("content-type", "application/grpc"),
    ("te", "trailers"),
    ("user-agent", "tenure"),
)

_NO_TOKEN = "none"  # noqa: S105  it is no secret
"""Token of a cluster without accounts, which is not sent: old members would reject it."""


class Channel:
    """Calls to one member, on a connection that is made when needed.

    Args:
        endpoint: ``host:port``.
        secrets: the TLS context.
        server_name: the name in the member's certificate, if it is not its host.
    """

    def __init__(
        self, endpoint: str, secrets: ssl.SSLContext | None = None, server_name: str = ""
    ) -> None:
        """Prepare the channel; the first call connects."""
        host, _, port = endpoint.rpartition(":")
        self.endpoint = endpoint
        self._host, self._port = host.strip("[]"), int(port)
        self._secrets = secrets
        self._server_name = server_name or self._host
        self._authority = server_name or endpoint
        self._heads: dict[tuple[str, Metadata], bytes] = {}
        self._connection: GrpcConnection | None = None
        self._connections: set[GrpcConnection] = set()
        self._connecting: asyncio.Task[str] | None = None
        self._waiting: list[GrpcCall] = []
        self._failures = 0  # in a row
        self._not_before = 0.0
        self._trouble = ""
        self._closed = False

    async def aclose(self) -> None:
        """Close the connections; open calls fail. Safe to call twice."""
        self._closed = True
        self._connection = None
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])  # its waiters are notified of that first
        for connection in list(self._connections):
            await connection.aclose("the channel was closed")

    async def call(
        self, method: str, request: bytes, timeout: float, metadata: Metadata = ()
    ) -> bytes:
        """Send a request and return its answer.

        Raises:
            CallFailed
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        for is_last in (False, True):
            call = UnaryCall(self._head(method, metadata), request, loop.create_future())
            timer = loop.call_at(until, call.time_out)
            try:
                self._begin(call)
                return await call.answer
            except CallFailed as failed:
                if is_last or not failed.again:
                    raise
            except BaseException:
                call.cancel()
                raise
            finally:
                timer.cancel()
        raise AssertionError

    def converse(self, method: str, metadata: Metadata = ()) -> StreamCall:
        """Begin a call of messages both ways. The caller cancels it at the end."""
        call = StreamCall(self._head(method, metadata))
        self._begin(call)
        return call

    def _head(self, method: str, metadata: Metadata) -> bytes:
        found = self._heads.get((method, metadata))
        if found is None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()  # tokens change
            secure = self._secrets is not None
            found = head(method, self._authority, secure=secure, more=(*_HEADERS, *metadata))
            self._heads[method, metadata] = found
        return found

    def _begin(self, call: GrpcCall) -> None:
        connection = self._connection
        if connection is not None and not connection.protocol.draining:
            connection.begin(call)
            return
        if self._closed:
            call.lost("the channel was closed", again=False)
            return
        if self._connecting is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._not_before:
                call.lost(self._trouble, again=False)
                return
            connection = GrpcConnection(loop)
            connecting = self._connect(connection)
            self._connecting = loop.create_task(connecting, name="tenure-etcd-connect")
            self._connecting.add_done_callback(partial(self._connected, connection))
        self._waiting.append(call)

    async def _connect(self, connection: GrpcConnection) -> str:
        """Make a connection; return the cause of a failure, or an empty string."""
        try:
            async with asyncio.timeout(_CONNECTING):
                await asyncio.get_running_loop().create_connection(
                    *(lambda: connection, self._host, self._port),
                    ssl=self._secrets,
                    server_hostname=None if self._secrets is None else self._server_name,
                )
                self._connections.add(connection)
                connection.gone.add_done_callback(lambda _: self._connections.discard(connection))
                await connection.ready
        except OSError as error:  # a timeout is one, too
            return str(error) or "no answer"
        return ""

    def _connected(self, connection: GrpcConnection, connecting: asyncio.Task[str]) -> None:
        """Pass a new connection, or the reason for its failure, to the waiting calls."""
        self._connecting = None
        protocol = connection.protocol
        why = "it was closed" if connecting.cancelled() else connecting.result()
        why = why or protocol.over or ("it is leaving" if protocol.draining else "")
        waiting, self._waiting = self._waiting, []
        if not why:
            self._connection, self._failures = connection, 0
            for call in waiting:
                if not call.over:
                    self._begin(call)
            return
        pause = backoff(self._failures, _LONGEST_PAUSE)
        self._failures += 1
        self._not_before = connecting.get_loop().time() + pause
        self._trouble = f"{self.endpoint} cannot be reached: {why}"
        connection.end(self._trouble)
        for call in waiting:
            call.lost(self._trouble, again=False)


class Members:
    """The members named by the URL.

    Attributes:
        turn: number that increases when another member becomes the current one.
        moved: called when that happens.
        trouble: the reason why the latest call was lost.
    """

    def __init__(self, address: EtcdUrl) -> None:
        self._address = address
        self._channels: list[Channel] = []
        self._token = ""
        self._authenticating: asyncio.Lock | None = None
        self.turn = 0
        self.moved: Callable[[], None] = lambda: None
        self.trouble = ""

    def open(self) -> None:
        """Make the channels. Raises `InvalidArgument` if a file in the URL cannot be read."""
        tls, secrets, name = self._address.tls, None, ""
        if tls is not None:
            secrets, name = tls.context(), tls.server_name
            secrets.set_alpn_protocols(["h2"])
        self._authenticating = asyncio.Lock()
        self._channels = [Channel(each, secrets, name) for each in self._address.endpoints]

    async def aclose(self) -> None:
        """Close the channels; open calls are lost. Safe to call twice."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.aclose()

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._channels)

    def _channel(self, turn: int) -> Channel:
        if not self._channels:
            raise Lost("the engine is closed")
        return self._channels[turn % len(self._channels)]

    def leave(self, turn: int, why: str) -> None:
        """Make the next member the current one, unless that has happened since `turn`."""
        self.trouble = why
        if turn == self.turn:
            self.turn += 1
            self.moved()

    # Calls

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        """Call the current member.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        turn = self.turn
        try:
            if self._address.user:
                return await self.call_member(turn, method, request, timeout)
            return await self._call(turn, method, request, timeout, ())
        except Lost as lost:
            self.leave(turn, str(lost))
            raise

    async def call_member(self, turn: int, method: str, request: bytes, timeout: float) -> bytes:
        """Call the member of a turn.

        Raises:
            Lost, Refused, AuthenticationFailed
        """
        for _ in range(3):
            metadata = await self._metadata(turn)
            token = self._token
            try:
                return await self._call(turn, method, request, timeout, metadata)
            except StaleToken as stale:
                why = str(stale)
            except Refused as refused:
                if token != _NO_TOKEN or "user name" not in refused.reason:
                    raise
                why = str(refused)  # accounts were enabled a moment ago
            self.expire(token)
        raise Lost(why)

    async def _call(
        self, turn: int, method: str, request: bytes, timeout: float, metadata: Metadata
    ) -> bytes:
        try:
            return await self._channel(turn).call(method, request, timeout, metadata)
        except CallFailed as failed:
            raise trouble_of(failed) from failed

    async def converse(self, turn: int, method: str, *more: tuple[str, str]) -> StreamCall:
        """Begin a call of messages both ways with the member of a turn; reading may fail later.

        Raises:
            Lost, AuthenticationFailed: a token cannot be fetched.
        """
        metadata = await self._metadata(turn)
        return self._channel(turn).converse(method, (*metadata, *more))

    # Accounts

    async def _metadata(self, turn: int) -> Metadata:
        if not self._address.user:
            return ()
        if not self._token:
            assert self._authenticating is not None
            async with self._authenticating:
                if not self._token:
                    self._token = await self._authenticate(turn)
        return () if self._token == _NO_TOKEN else (("token", self._token),)

    def expire(self, token: str = "") -> None:
        """Drop a token that became invalid; without an argument, the current one."""
        if token in {self._token, ""}:
            self._token = ""

    async def _authenticate(self, turn: int) -> str:
        address = self._address
        request = wire.authenticate(address.user, address.password)
        try:
            answer = await self._call(turn, wire.AUTHENTICATE, request, address.timeout, ())
        except Refused as refused:
            if "not enabled" in refused.reason:
                return _NO_TOKEN
            raise AuthenticationFailed(
                f"{address.url} refused the user {address.user!r}: {refused.reason}. Check the "
                "user and the password in the URL"
            ) from refused
        except StaleToken as stale:
            raise Lost(str(stale)) from stale
        return answers.read_string(answer, 2)
