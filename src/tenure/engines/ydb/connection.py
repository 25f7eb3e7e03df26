"""Connection to one server of a database: its calls, and its streams."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from tenure.engines.ydb.credentials import Token
from tenure.engines.ydb.errors import as_unavailable, check
from tenure.engines.ydb.url import YdbUrl
from tenure.wire.ydb import Message, SessionRequest, SessionResponse, message_class, unpacked

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
