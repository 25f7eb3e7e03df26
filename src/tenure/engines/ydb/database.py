"""Connection to a database: one server at a time, with automatic reconnect.

Rules:

* The kit's reconnector tries the hosts of the URL. Each host lists the servers of the database, of
  which one is chosen at random. Without discovery, the hosts are the servers. A server is used once
  it has answered.
* All streams and calls share the connection. The first that finds it broken reports that. Callers
  repeat lost operations.
* A failure of the connection is an `EngineUnavailable`.
* When `aclose` returns, no task or call is left.

**Credentials** are the token of a call, and the files for TLS. A password is exchanged for a token
by the database's login. Cloud credentials, and the SDK's environment variables, are handled by
YDB's SDK, which is imported only for them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from tenure.clock import Clock
from tenure.engines._kit.reconnect import LONGEST_PAUSE, Reconnector
from tenure.engines.ydb.errors import as_unavailable, brief, check, code_of
from tenure.engines.ydb.url import YdbUrl
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    InvalidArgument,
    TenureError,
    Unsupported,
)
from tenure.wire.ydb import Message, SessionRequest, SessionResponse, message_class, unpacked

T = TypeVar("T")

AGE = 30 * 60.0
"""Seconds for which the token of a login is used; YDB's own tokens live longer."""

_KEY_FILE = "YDB_SERVICE_ACCOUNT_KEY_FILE_CREDENTIALS"
_IN_ENVIRONMENT = (
    _KEY_FILE,
    "YDB_USER",
    "YDB_ANONYMOUS_CREDENTIALS",
    "YDB_METADATA_CREDENTIALS",
    "YDB_ACCESS_TOKEN_CREDENTIALS",
    "YDB_OAUTH2_KEY_FILE",
)

Login: TypeAlias = Callable[[Message], Awaitable[Message]]
"""Sends a login to a server, without a token, and returns the operation in its answer."""

Token: TypeAlias = Callable[[Login], Awaitable[str]]
"""Returns the token to send, or empty. Raises `EngineUnavailable`, `AuthenticationFailed`."""


def token_of(address: YdbUrl) -> Token:
    """Return the source of the tokens that a URL, or the environment, specifies.

    Raises:
        Unsupported: the SDK lacks a package that these credentials need.
    """
    kind, user, password = address.credentials, address.user, address.password
    if kind == "environment":
        if not any(name in os.environ for name in _IN_ENVIRONMENT):
            kind = "anonymous"  # the SDK would query a cloud's metadata service
        elif "YDB_USER" in os.environ and _KEY_FILE not in os.environ:
            kind, user = "static", os.environ["YDB_USER"]
            password = os.environ.get("YDB_PASSWORD", "")
    match kind:
        case "anonymous" | "token":
            return _constant(address.token)
        case "static":
            return _Password(user, password).token
        case _:
            return _from_sdk(address, in_cloud=kind == "metadata")


def _constant(token: str) -> Token:
    async def known(_: Login) -> str:
        return token

    return known


def _from_sdk(address: YdbUrl, *, in_cloud: bool) -> Token:
    try:
        import ydb.iam

        sdk: Any = ydb  # has no types here
        found = (
            sdk.iam.MetadataUrlCredentials() if in_cloud else sdk.credentials_from_env_variables()
        )
    except ImportError as error:
        raise Unsupported(
            f"{address.url}: YDB's SDK lacks a package for these credentials: {error}"
        ) from error

    async def fetched(_: Login) -> str:
        try:
            metadata = await asyncio.to_thread(found.auth_metadata)  # may fetch a token
        except sdk.issues.Error as error:
            raise EngineUnavailable(f"no token from the SDK's credentials: {error}") from error
        return "".join(token for _, token in metadata)

    return fetched


class _Password:
    """Token of a login with a password, renewed when it is old."""

    def __init__(self, user: str, password: str) -> None:
        self._request = message_class("Auth.LoginRequest")(user=user, password=password)
        self._lock = asyncio.Lock()
        self._token = ""
        self._obtained_at = 0.0

    async def token(self, login: Login) -> str:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if not self._token or loop.time() - self._obtained_at > AGE:
                self._token = await self._log_in(login)
                self._obtained_at = loop.time()
            return self._token

    async def _log_in(self, login: Login) -> str:
        try:
            operation = await login(self._request)
        except EngineUnavailable as error:
            if code_of(error.__cause__) is grpc.StatusCode.UNIMPLEMENTED:
                raise AuthenticationFailed(
                    "the server has no login with a password; use a token (?token=)"
                ) from error
            raise
        check(operation)
        return str(unpacked(operation, "Auth.LoginResult").token)


def tls_of(address: YdbUrl) -> grpc.ChannelCredentials | None:
    """Return the credentials of TLS, with the contents of its files."""
    tls = address.tls
    if tls is None:
        return None
    authorities = tls.ca or os.environ.get("YDB_SSL_ROOT_CERTIFICATES_FILE", "")
    if authorities:
        roots = _read(address, authorities)
    else:
        import ydb.default_pem

        roots = cast("Any", ydb).default_pem.load_default_pem()
    key, certificate = (_read(address, path) if path else None for path in (tls.key, tls.cert))
    return grpc.ssl_channel_credentials(roots, key, certificate)


def _read(address: YdbUrl, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgument(
            f"{address.url}: TLS file {path!r} cannot be read: {error}"
        ) from error


COORDINATION = "/Ydb.Coordination.V1.CoordinationService"
_OPTIONS: list[tuple[str, Any]] = [
    # A restarted server is found soon; connecting may still take long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 400),
    ("grpc.min_reconnect_backoff_ms", 5000),
    # A connection with streams is checked by pings.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64_000_000),
    ("grpc.max_send_message_length", 64_000_000),
]


class YdbConnection:
    """A connection to one server.

    Attributes:
        servers: the database's servers listed by this one, each with its name in TLS.
        received_at: time of the latest message, on the loop's clock.

    Args:
        target: the server's address in gRPC's form.
        name: the server's name in its certificate, if it differs from the target.
        token: source of the calls' token.
    """

    def __init__(
        self,
        address: YdbUrl,
        target: str,
        name: str,
        token: Token,
        tls: grpc.ChannelCredentials | None,
    ) -> None:
        """Open a gRPC channel to one server; it connects with the first call."""
        self.servers: list[tuple[str, str]] = []
        self.received_at = asyncio.get_running_loop().time()
        self._address = address
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", name)] if name else _OPTIONS
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options)
        else:
            self._channel = grpc.aio.secure_channel(target, tls, options)
        self._token = token

    async def call(self, path: str, answer: str, request: Message, *, login: bool = False) -> Any:
        """Return the operation in the answer to a call, a message of that class.

        Raises:
            EngineUnavailable, AuthenticationFailed
        """
        metadata = None if login else await self._metadata()
        with as_unavailable():
            response = await self._channel.unary_unary(
                path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=message_class(answer).FromString,
            )(request, timeout=self._address.connect_timeout, metadata=metadata)
        return response.operation

    async def session(self) -> Any:
        """Begin a stream of the coordination service. Raises as `call`."""
        metadata = await self._metadata()
        with as_unavailable():
            return self._channel.stream_stream(
                f"{COORDINATION}/Session",
                request_serializer=SessionRequest.SerializeToString,
                response_deserializer=SessionResponse.FromString,
            )(metadata=metadata)

    async def list_servers(self) -> None:
        """Discover the database's servers. Raises as `call`."""
        request = message_class("Discovery.ListEndpointsRequest")(database=self._address.database)
        operation = await self.call(
            "/Ydb.Discovery.V1.DiscoveryService/ListEndpoints",
            "Discovery.ListEndpointsResponse",
            request,
        )
        check(operation)
        for each in unpacked(operation, "Discovery.ListEndpointsResult").endpoints:
            if each.ssl == (self._address.tls is not None):
                numbers = [f"ipv6:[{ip}]" for ip in each.ip_v6]
                numbers += [f"ipv4:{ip}" for ip in each.ip_v4]
                name = each.ssl_target_name_override or (each.address if numbers else "")
                for host in numbers or [each.address]:
                    self.servers.append((f"{host}:{each.port}", name))

    async def _metadata(self) -> list[tuple[str, str]]:
        async def login(request: Message) -> Message:
            return await self.call(
                "/Ydb.Auth.V1.AuthService/Login", "Auth.LoginResponse", request, login=True
            )

        token = await self._token(login)
        metadata = [("x-ydb-database", self._address.database)]
        return [*metadata, ("x-ydb-auth-ticket", token)] if token else metadata

    async def aclose(self) -> None:
        """Close it, with all its calls."""
        await self._channel.close()


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


_READS = 4


class Database:
    """A database, as used by one engine.

    Args:
        windows: returns the recovery windows of the engine's sessions.

    Attributes:
        address: its parsed URL.
        siblings: the id of each sibling's session, by the sibling's id.
        cut_off: whether a call has ended abnormally.
        reads: held while a queue is described, of which few are in flight: a server cuts a client
            off for which too much output waits.
    """

    def __init__(
        self, address: YdbUrl, clock: Clock, windows: Callable[[], Iterable[float]]
    ) -> None:
        """Prepare the connection; `open` connects."""
        self.address = address
        self.clock = clock
        self.siblings: dict[int, int] = {}
        self.cut_off = False
        self.reads = asyncio.Semaphore(_READS)
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
