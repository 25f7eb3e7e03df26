"""The listener for YDB's clients, ``ydb://host:port`` or ``ydbs://`` with TLS, and node calls.

The calls about nodes (`NodeCalls`) create, alter, drop and describe. Each is answered with gRPC's
OK; the operation in the answer has the result.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

from tenure.core import rules
from tenure.engines.contract import Engine
from tenure.errors import AuthenticationFailed, InvalidArgument, NodeNotFound, TenureError
from tenure.model import Consistency, CountersMode, NodeConfig
from tenure.server.addresses import bind_ports
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.listener import Door, Greeting, Listener
from tenure.server.reads import Reader
from tenure.server.ydb.calls import GrpcCall, GrpcError, decoded, frame
from tenure.server.ydb.calls import Status as GrpcStatus
from tenure.server.ydb.http2 import refusal
from tenure.server.ydb.messages import (
    DATABASE,
    Database,
    Refused,
    Status,
    coordination,
    discovery,
    failure,
    operation,
    scheme,
    status_of,
)
from tenure.server.ydb.registry import YdbSessionRegistry
from tenure.server.ydb.session import SessionStream, serve_session
from tenure.server.ydb.transport import GrpcConnection, Method

if TYPE_CHECKING:
    from tenure.server.context import Context


_OWNER = "tenure"
_CONSISTENCY: tuple[Consistency, ...] = ("unset", "strict", "relaxed")
_COUNTERS: tuple[CountersMode, ...] = ("unset", "aggregated", "detailed")


_Method: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]


def _answered(method: _Method) -> _Method:
    """Make the call's operation from a method's result or error."""

    @wraps(method)
    async def answer(*args: Any) -> Any:
        try:
            return operation(Status.SUCCESS, result=await method(*args))
        except Refused as refused:
            return operation(refused.status, refused.text)
        except NodeNotFound as error:
            return operation(Status.SCHEME_ERROR, str(error))
        except TenureError as error:
            return operation(status_of(error), str(error))

    return answer


class NodeCalls:
    """Each method takes the call's request and its client's engine, and returns its operation.

    A read also takes the schedule of its connection's reads.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @_answered
    async def create(self, request: Any, engine: Engine) -> Any:
        """Create a node."""
        path = self._path(request.path)
        if not self._database.has(path):
            text = f"a node's path is inside the database {self._database.path}: {path!r}"
            raise Refused(Status.BAD_REQUEST, text)
        await engine.create_node(self._node(path), _config(request), exist_ok=True)

    @_answered
    async def alter(self, request: Any, engine: Engine) -> Any:
        """Change the settings of a node."""
        node = self._node(self._path(request.path))
        if not request.HasField("config"):
            raise Refused(Status.GENERIC_ERROR, "the configuration is missing")
        await engine.alter_node(node, _config(request))

    @_answered
    async def drop(self, request: Any, engine: Engine) -> Any:
        """Drop a node; never by force."""
        node = self._node(self._path(request.path))
        try:
            rules.check_droppable(node)
        except InvalidArgument as error:
            raise Refused(Status.PRECONDITION_FAILED, str(error)) from error
        await engine.drop_node(node, force=False)

    @_answered
    async def describe(self, request: Any, engine: Engine, reader: Reader) -> Any:
        """Describe a node."""
        path = self._path(request.path)
        node = self._node(path)
        async with reader.lock, reader.turn():
            found = await engine.describe_node(node)
        result = coordination.DescribeNodeResult()
        entry = result.self
        entry.name = path.rpartition("/")[2]
        entry.owner = _OWNER
        entry.type = scheme.Entry.COORDINATION_NODE
        result.config.SetInParent()  # it exists, even if all fields are zero
        _fill(result.config, found.config)
        return result

    @staticmethod
    def _path(path: str) -> str:
        if "/" not in path or path.endswith("/"):
            text = f"a path contains a '/', but not at its end: {path!r}"
            raise Refused(Status.BAD_REQUEST, text)
        return path

    def _node(self, path: str) -> str:
        node = self._database.node(path)
        if node is None:
            text = f"there is no {path!r} in the database {self._database.path}"
            raise Refused(Status.SCHEME_ERROR, text)
        try:
            rules.check_path(node)
        except InvalidArgument as error:
            raise Refused(Status.SCHEME_ERROR, str(error)) from error
        return node


def _config(request: Any) -> NodeConfig:
    given = request.config
    if given.path:
        raise Refused(Status.GENERIC_ERROR, "a configuration has no path")
    try:
        return NodeConfig(
            self_check_period=given.self_check_period_millis / 1000,
            session_grace_period=given.session_grace_period_millis / 1000,
            read_consistency=_CONSISTENCY[given.read_consistency_mode],
            attach_consistency=_CONSISTENCY[given.attach_consistency_mode],
            rate_limiter_counters_mode=_COUNTERS[given.rate_limiter_counters_mode],
        )
    except IndexError as error:
        raise Refused(Status.BAD_REQUEST, "the mode is unknown") from error


def _fill(config: Any, found: NodeConfig) -> None:
    config.self_check_period_millis = round(found.self_check_period * 1000)
    config.session_grace_period_millis = round(found.session_grace_period * 1000)
    config.read_consistency_mode = _CONSISTENCY.index(found.read_consistency)
    config.attach_consistency_mode = _CONSISTENCY.index(found.attach_consistency)
    config.rate_limiter_counters_mode = _COUNTERS.index(found.rate_limiter_counters_mode)


_COORDINATION = "/Ydb.Coordination.V1.CoordinationService/"
_DISCOVERY = "/Ydb.Discovery.V1.DiscoveryService/"
_ALPN = ["h2"]
_CANCELLED_IN = 0.3  # seconds in which a client's cancelled streams are seen to be cancelled
_FLUSHED_IN = 1.0  # seconds in which a client can read that the server is shutting down

_AUDITED = {
    "AlterNode": "node altered",
    "CreateNode": "node created",
    "DropNode": "node dropped",
}

Unary = Callable[[Any, GrpcCall, GrpcConnection], Awaitable[Any]]


class YdbListener(Listener[GrpcConnection]):
    """Serves YDB's coordination API.

    Args:
        context: the state shared by the server's listeners.
        url: ``ydb://host:port``, see `tenure.server.addresses`.
        tls: the TLS context for ``ydbs://``.
        sockets: bound sockets; then the URL is only their name.
        database: the database that contains tenure's nodes: the node ``/my-app`` is
            ``/local/my-app`` in the database ``/local``.
        advertise: ``host:port`` that discovery returns to clients; by default, the address that
            each of them used.

    Raises:
        InvalidArgument: the URL, the database or the address to advertise is invalid.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        sockets: Sequence[socket.socket] = (),
        database: str = DATABASE,
        advertise: str | None = None,
    ) -> None:
        super().__init__(context, url, tls=tls, sockets=sockets)
        if self._address.protocol != "ydb":
            raise InvalidArgument(f"YDB's clients are listened to at ydb://host:port, not {url!r}")
        self._port = self._address.port
        self._advertise = _authority(advertise) if advertise else None
        if advertise and self._advertise is None:
            raise InvalidArgument(f"an address to advertise is host:port, not {advertise!r}")
        self._database = Database(database)
        if tls is not None:
            tls.set_alpn_protocols(_ALPN)
        self._tasks: set[asyncio.Task[None]] = set()
        self._registry = YdbSessionRegistry(context)
        self._streams: set[SessionStream] = set()
        nodes = NodeCalls(self._database)
        self._methods: dict[str, Method] = {
            f"{_COORDINATION}Session": self._session,
            **self._unary(_COORDINATION, "CreateNode", coordination, self._on_nodes(nodes.create)),
            **self._unary(_COORDINATION, "AlterNode", coordination, self._on_nodes(nodes.alter)),
            **self._unary(_COORDINATION, "DropNode", coordination, self._drop(nodes)),
            **self._unary(_COORDINATION, "DescribeNode", coordination, self._read(nodes.describe)),
            **self._unary(_DISCOVERY, "ListEndpoints", discovery, self._list_endpoints),
            **self._unary(_DISCOVERY, "WhoAmI", discovery, self._describe_caller),
        }

    # The listener

    @property
    def address(self) -> str:
        """URL at which the listener accepts."""
        scheme = "ydb" if self._tls is None else "ydbs"
        return f"{scheme}://{_shown(self._address.host)}:{self._port}{self._database.path}"

    async def open(self) -> None:
        """Bind and accept."""
        given, self._given = self._given, []
        sockets = given or await bind_ports(self._address)
        if sockets[0].family in {socket.AF_INET, socket.AF_INET6}:
            self._port = sockets[0].getsockname()[1]
        self._door = Door(self.context, sockets, self._connection, self._tls, refusal, self.traffic)
        self._door.open()

    def renew_tls(self, tls: ssl.SSLContext, *, cut_handshakes: bool) -> None:
        """Use other certificates from now on."""
        tls.set_alpn_protocols(_ALPN)
        super().renew_tls(tls, cut_handshakes=cut_handshakes)

    async def drain(self) -> None:
        """Accept no more connections, and send the clients to another server."""
        if self._door is not None:
            self._door.close()
        for stream in list(self._streams):
            stream.redirect()
        for connection in list(self.connections):
            connection.drain()

    async def aclose(self) -> None:
        """End all streams and connections."""
        self._close_given()
        if self._door is None:
            return
        try:
            await self._close_down(self._door)
        finally:
            self._cut_off_all()
            for task in list(self._tasks):
                task.cancel()
            self._registry.forget()

    async def _close_down(self, door: Door) -> None:
        await self.drain()
        await door.aclose()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=_FLUSHED_IN)
        connections = list(self.connections)
        for connection in connections:
            connection.cut_off()
        for connection in connections:
            await connection.lost.wait()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._registry.settled()

    def _connection(self, greeting: Greeting) -> GrpcConnection:
        returning = self._registry.returning
        connections, tasks = self.connections, self._tasks
        return GrpcConnection(self.context, greeting, self._methods, returning, connections, tasks)

    # Authentication

    def _authenticate(self, call: GrpcCall, connection: GrpcConnection) -> None:
        """Determine the identity of a call. Raises `AuthenticationFailed` and `GrpcError`."""
        try:
            call.identity = self.context.authenticator.authenticate(
                call.metadata.get("x-ydb-auth-ticket", ""), connection.shown
            )
        except AuthenticationFailed as error:
            connection.log(logging.WARNING, "access denied", call=call.path)
            self.context.refused_login(connection.peer, error, listener="ydb")
            connection.refused()
            raise
        call.authenticated = True
        connection.greeted(call.identity)

    def _wrong_database(self, call: GrpcCall) -> str:
        """Return an error if the client names another database, else nothing."""
        named = call.metadata.get("x-ydb-database", "")
        if self._database.is_meant_by(named):
            return ""
        return f"there is no database {named!r} here; this one is {self._database.path}"

    # Calls

    async def _session(self, call: GrpcCall, connection: GrpcConnection) -> None:
        try:
            self._authenticate(call, connection)
        except AuthenticationFailed as error:
            await connection.delay_refusal()
            await call.send(_framed(failure(Status.UNAUTHORIZED, str(error))))
            return
        if text := self._wrong_database(call):
            await call.send(_framed(failure(Status.NOT_FOUND, text)))
            return
        node_of, streams = self._database.node, self._streams
        await serve_session(self._registry, call, connection, node_of, streams)

    def _unary(self, service: str, name: str, messages: Any, answer: Unary) -> dict[str, Method]:
        request_type = getattr(messages, f"{name}Request")
        response_type = getattr(messages, f"{name}Response")

        async def serve(call: GrpcCall, connection: GrpcConnection) -> None:
            try:
                self._authenticate(call, connection)
            except AuthenticationFailed as error:
                await connection.delay_refusal()
                await call.send(
                    _framed(response_type(operation=operation(Status.UNAUTHORIZED, str(error))))
                )
                return
            message = await call.message()
            if message is None:
                raise GrpcError(GrpcStatus.INVALID_ARGUMENT, "the call has no request")
            request, size = decoded(request_type, message), len(message)
            del message
            connection.operations(0, size)
            try:
                await connection.departures.settled()
                text = self._wrong_database(call)
                if text:
                    done = operation(Status.NOT_FOUND, text)
                elif name in _AUDITED:
                    done = await self._audited(_AUDITED[name], answer, request, call, connection)
                else:
                    done = await answer(request, call, connection)
            finally:
                connection.operations(0, -size)
            await call.send(_framed(response_type(operation=done)))

        return {service + name: serve}

    async def _audited(
        self, event: str, answer: Unary, request: Any, call: GrpcCall, connection: GrpcConnection
    ) -> Any:
        with self.context.audit.action(
            event, call.identity, connection.peer, node=request.path
        ) as entry:
            done = await answer(request, call, connection)
            if done.status != Status.SUCCESS:
                why = "; ".join(issue.message for issue in done.issues)
                entry.update(outcome="failed", why=why)
            return done

    def _on_nodes(self, method: Callable[[Any, Engine], Awaitable[Any]]) -> Unary:
        async def answer(request: Any, call: GrpcCall, _: GrpcConnection) -> Any:
            return await method(request, GuardedEngine(self.context.guard, call.identity))

        return answer

    def _drop(self, nodes: NodeCalls) -> Unary:
        async def answer(request: Any, call: GrpcCall, connection: GrpcConnection) -> Any:
            engine = GuardedEngine(self.context.guard, call.identity)
            done = await nodes.drop(request, engine)
            is_busy = done.status == Status.PRECONDITION_FAILED
            if is_busy and await connection.departures.expected(_CANCELLED_IN):
                done = await nodes.drop(request, engine)
            return done

        return answer

    def _read(self, method: Callable[[Any, Engine, Reader], Awaitable[Any]]) -> Unary:
        async def answer(request: Any, call: GrpcCall, connection: GrpcConnection) -> Any:
            engine = GuardedEngine(self.context.guard, call.identity)
            return await method(request, engine, connection.reader(call.identity))

        return answer

    async def _list_endpoints(self, _: Any, call: GrpcCall, __: GrpcConnection) -> Any:
        own = _shown(self._address.host), self._port
        host, port = self._advertise or _authority(call.authority) or own
        endpoint = discovery.EndpointInfo(
            address=host, port=port, ssl=self._tls is not None, node_id=1
        )
        result = discovery.ListEndpointsResult(endpoints=[endpoint])
        return operation(Status.SUCCESS, result=result)

    async def _describe_caller(self, _: Any, call: GrpcCall, __: GrpcConnection) -> Any:
        return operation(Status.SUCCESS, result=discovery.WhoAmIResult(user=call.identity.name))


def _framed(message: Any) -> bytes:
    return frame(message.SerializeToString())


def _shown(host: str) -> str:
    """Return a host for an address; the wildcard address is replaced by the machine's name."""
    return f"[{host}]" if ":" in host else host or "localhost"


def _authority(text: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port``; ``None`` for other texts."""
    host, _, port = text.rpartition(":")
    if (
        not host
        or not port.isdecimal()
        or len(port) > 5
        or "/" in host
        or not 0 < int(port) < 65536
    ):
        return None
    return host, int(port)
