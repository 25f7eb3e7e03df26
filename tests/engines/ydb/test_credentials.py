"""Who the program is: each kind of credentials that YDB's SDK names, with a real other side.

`tenure serve` knows tokens, and no users. Those are known to a front of ours, where a login is
answered with a token, as in YDB: a gRPC server that also tells where the database's server is. What
the machines of a cloud ask who they are is an HTTP server here.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
import ydb.credentials
import ydb.iam.auth
from ydb import _apis
from ydb._grpc.common.protos import ydb_auth_pb2  # type: ignore[import-not-found]  # made at run time

from tenure.clock import SystemClock
from tenure.engines.ydb import connect, database
from tenure.errors import AuthenticationFailed, EngineUnavailable
from tests.engines.ydb.behind import Server
from tests.engines.ydb.test_access import TOKEN, serving, use

USER, PASSWORD = "anna", "p@ss:word/with?signs"
IN_URL = "p%40ss%3Aword%2Fwith%3Fsigns"

VARIABLES = (
    *("YDB_SERVICE_ACCOUNT_KEY_FILE_CREDENTIALS", "YDB_USER", "YDB_PASSWORD"),
    *("YDB_ANONYMOUS_CREDENTIALS", "YDB_METADATA_CREDENTIALS"),
    *("YDB_ACCESS_TOKEN_CREDENTIALS", "YDB_OAUTH2_KEY_FILE"),
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(tokens={TOKEN: "anna"}) as server:
        yield server


class Front(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Logs users in, and says where their database is.

    Attributes:
        logins: who has tried.
        others: the ports of servers that it names beside the one that is there.
    """

    def __init__(self, server: Server) -> None:
        self.logins: list[str] = []
        self.others: list[int] = []
        self._server = server

    def service(self, handler_call_details: Any) -> Any:
        methods: dict[str, tuple[Any, Any]] = {
            "/Ydb.Auth.V1.AuthService/Login": (self.login, ydb_auth_pb2.LoginRequest),
            "/Ydb.Discovery.V1.DiscoveryService/ListEndpoints": (
                self.endpoints,
                _apis.ydb_discovery.ListEndpointsRequest,
            ),
        }
        if handler_call_details.method not in methods:
            return None
        answer, request = methods[handler_call_details.method]
        return grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=request.FromString,
            response_serializer=lambda response: response.SerializeToString(),
        )

    def login(self, request: Any, _context: Any) -> Any:
        self.logins.append(request.user)
        response = ydb_auth_pb2.LoginResponse()
        response.operation.ready = True
        if (request.user, request.password) == (USER, PASSWORD):
            response.operation.status = _apis.StatusIds.SUCCESS
            response.operation.result.Pack(ydb_auth_pb2.LoginResult(token=TOKEN))
        else:
            response.operation.status = _apis.StatusIds.UNAUTHORIZED
        return response

    def endpoints(self, _request: Any, context: Any) -> Any:
        response = _apis.ydb_discovery.ListEndpointsResponse()
        response.operation.ready = True
        if dict(context.invocation_metadata()).get("x-ydb-auth-ticket") != TOKEN:
            response.operation.status = _apis.StatusIds.UNAUTHORIZED
            return response
        response.operation.status = _apis.StatusIds.SUCCESS
        result = _apis.ydb_discovery.ListEndpointsResult()
        for port in (*self.others, self._server.port):
            result.endpoints.add(address="127.0.0.1", port=port, node_id=port)
        response.operation.result.Pack(result)
        return response


@contextmanager
def front(server: Server) -> Iterator[tuple[Front, str]]:
    """One before a server, and where it is."""
    handler = Front(server)
    serving = grpc.server(ThreadPoolExecutor(4))
    serving.add_generic_rpc_handlers((handler,))
    port = serving.add_insecure_port("127.0.0.1:0")
    serving.start()
    try:
        yield handler, f"127.0.0.1:{port}/local"
    finally:
        serving.stop(0).wait()


@contextmanager
def closed_ports(count: int) -> Iterator[list[int]]:
    """Ports that refuse every connection, and that nobody else gets meanwhile."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in sockets]


async def test_a_user_logs_in_with_the_password_of_the_url(
    server: Server, environment: object
) -> None:
    with front(server) as (seen, place):
        await use(f"ydb://{USER}:{IN_URL}@{place}")
        assert seen.logins == [USER]


async def test_servers_that_do_not_answer_are_passed_over(
    server: Server, environment: object
) -> None:
    with closed_ports(4) as ports, front(server) as (seen, place):
        seen.others = ports[:2]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[2:])
        await use(f"ydb://{USER}:{IN_URL}@{hosts},{place}")
        assert seen.logins == [USER]
        await use(f"ydb://{hosts},127.0.0.1:{server.port}/local?token={TOKEN}&discovery=off")
        with pytest.raises(EngineUnavailable, match=f"127.0.0.1:{ports[2]}"):
            await use(f"ydb://{hosts}/local?token={TOKEN}")


async def test_a_server_that_is_silent_is_passed_over(
    server: Server, environment: pytest.MonkeyPatch
) -> None:
    environment.setattr(database, "_shuffled", list)  # the silent one is tried first
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{server.port}"
        await use(f"ydb://{hosts}/local?token={TOKEN}&connect_timeout=4")


async def test_a_user_logs_in_with_the_password_of_the_environment(
    server: Server, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("YDB_USER", USER)
    environment.setenv("YDB_PASSWORD", PASSWORD)
    with front(server) as (seen, place):
        await use(f"ydb://{place}")
        assert seen.logins == [USER]
        with pytest.raises(AuthenticationFailed):
            await use(f"ydb://{place}?credentials=anonymous")
        assert seen.logins == [USER]


async def test_a_wrong_password_is_refused_and_not_repeated(
    server: Server, environment: object
) -> None:
    with front(server) as (_, place):
        with pytest.raises(AuthenticationFailed) as caught:
            await use(f"ydb://{USER}:wrong-{IN_URL}@{place}")
        assert "wrong" not in str(caught.value)


async def test_a_server_that_knows_no_users_is_told_apart_from_a_wrong_password(
    server: Server, environment: object
) -> None:
    url = server.url.replace("://", f"://{USER}:{IN_URL}@")
    with pytest.raises(AuthenticationFailed, match="use a token"):
        await use(url)


async def test_a_machine_of_a_cloud_is_who_its_metadata_say(
    server: Server, environment: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("requests", reason="the SDK asks with it: pip install requests")
    asked: list[str | None] = []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Metadata-Flavor"])
            body = json.dumps({"access_token": TOKEN, "expires_in": 3600}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            place = f"http://127.0.0.1:{service.server_port}/token"
            environment.setattr(ydb.iam.auth, "DEFAULT_METADATA_URL", place)
            await use(f"{server.url}?credentials=metadata")
            environment.setenv("YDB_METADATA_CREDENTIALS", "1")
            await use(server.url)
            assert asked == ["Google", "Google"]
        finally:
            service.shutdown()
            thread.join()


async def test_nobody_in_particular_is_who_says_so_or_says_nothing(
    environment: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        await use(server.url)
        await use(f"{server.url}?credentials=anonymous")
        environment.setenv("YDB_ANONYMOUS_CREDENTIALS", "1")
        environment.setenv("YDB_ACCESS_TOKEN_CREDENTIALS", "which comes second")
        await use(server.url)


def test_secrets_are_not_in_what_is_shown() -> None:
    engine = connect(f"ydb://{USER}:{IN_URL}@127.0.0.1:1/local", SystemClock())
    for secret in (IN_URL, PASSWORD):
        assert secret not in engine.url
        assert secret not in repr(engine)
