"""The calls that are not streams: nodes, and discovery; who may call, and for which database."""

from __future__ import annotations

from typing import Any

import pytest
from grpclib.client import UnaryUnaryMethod
from grpclib.const import Status as GrpcStatus
from grpclib.exceptions import GRPCError

from tenure.server.auth import Authenticator
from tenure.server.ydb.messages import Request, Status, coordination, discovery
from tests.server.ydb.raw import NODE, call, channel, serving, session, stream

TOKEN = "a token that nobody guesses"


def described(operation: Any) -> Any:
    assert (operation.ready, operation.status) == (True, Status.SUCCESS), operation
    assert operation.result.type_url.endswith("/Ydb.Coordination.DescribeNodeResult")
    result = coordination.DescribeNodeResult()
    assert operation.result.Unpack(result)
    return result


# --- nodes


async def test_a_node_is_created_altered_described_and_dropped(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        config = coordination.Config(
            self_check_period_millis=1500,
            read_consistency_mode=coordination.CONSISTENCY_MODE_STRICT,
            rate_limiter_counters_mode=coordination.RATE_LIMITER_COUNTERS_MODE_DETAILED,
        )
        made = await call(over, "CreateNode", path="/local/a/b", config=config)
        assert (made.ready, made.status) == (True, Status.SUCCESS)
        assert "/a/b" in await server.context.engine.list_nodes()
        changed = coordination.Config(
            session_grace_period_millis=2500,
            attach_consistency_mode=coordination.CONSISTENCY_MODE_RELAXED,
        )
        altered = await call(over, "AlterNode", path="/local/a/b", config=changed)
        assert altered.status == Status.SUCCESS
        result = described(await call(over, "DescribeNode", path="/local/a/b"))
        assert (result.self.name, result.self.type) == ("b", 7)
        assert result.self.owner
        config.MergeFrom(changed)
        assert result.config == config
        assert (await call(over, "DropNode", path="/local/a/b")).status == Status.SUCCESS
        gone = await call(over, "DescribeNode", path="/local/a/b")
        assert gone.status == Status.SCHEME_ERROR


async def test_a_configuration_is_there_though_all_of_it_is_zero(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        result = described(await call(over, "DescribeNode", path="/local/n"))
        assert result.HasField("config")
        assert result.config == coordination.Config()


async def test_creating_a_node_that_exists_succeeds_and_changes_nothing(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        first = coordination.Config(self_check_period_millis=1500)
        second = coordination.Config(self_check_period_millis=9999)
        for config in (first, second):
            made = await call(over, "CreateNode", path="/local/n", config=config)
            assert made.status == Status.SUCCESS
        assert described(await call(over, "DescribeNode", path="/local/n")).config == first


@pytest.mark.parametrize(
    ("name", "path", "status"),
    [
        ("CreateNode", "/local", Status.BAD_REQUEST),
        ("CreateNode", "/remote/n", Status.BAD_REQUEST),
        ("CreateNode", "/locale/n", Status.BAD_REQUEST),
        *((name, "n", Status.BAD_REQUEST) for name in ("CreateNode", "DropNode")),
        *((name, "", Status.BAD_REQUEST) for name in ("AlterNode", "DescribeNode")),
        *((name, "/local/n/", Status.BAD_REQUEST) for name in ("CreateNode", "DescribeNode")),
        ("CreateNode", "/local/bad name", Status.SCHEME_ERROR),
        ("CreateNode", "/local//n", Status.SCHEME_ERROR),
        ("CreateNode", "/local/" + "n" * 256, Status.SCHEME_ERROR),
        *(
            (name, path, Status.SCHEME_ERROR)
            for name in ("AlterNode", "DropNode", "DescribeNode")
            for path in ("/local/missing", "/remote/n", "/local")
        ),
        ("DropNode", "/local/default", Status.PRECONDITION_FAILED),
    ],
)
async def test_a_path_that_is_no_node_is_refused(name: str, path: str, status: int) -> None:
    async with serving() as server, channel(server.target) as over:
        request: dict[str, Any] = {"path": path}
        if name == "AlterNode":
            request["config"] = coordination.Config()
        refused = await call(over, name, **request)
        assert (refused.ready, refused.status) == (True, status)
        assert refused.issues[0].message


async def test_a_configuration_that_is_missing_or_wrong_is_refused() -> None:
    async with serving() as server, channel(server.target) as over:
        with_path = coordination.Config(path="/local/n")
        for name in ("CreateNode", "AlterNode"):
            refused = await call(over, name, path=NODE, config=with_path)
            assert refused.status == Status.GENERIC_ERROR
        assert (await call(over, "AlterNode", path=NODE)).status == Status.GENERIC_ERROR
        unknown = coordination.Config.FromString(bytes([0x20, 9]))  # read_consistency_mode: 9
        refused = await call(over, "CreateNode", path="/local/n", config=unknown)
        assert refused.status == Status.BAD_REQUEST


async def test_a_node_with_an_attached_session_is_not_dropped(store: str) -> None:
    async with serving(store) as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        client = await session(over, "/local/n")
        dropped = await call(over, "DropNode", path="/local/n")
        assert dropped.status == Status.PRECONDITION_FAILED
        await client.send(session_stop=Request.SessionStop())
        await client.expect("session_stopped")
        assert (await call(over, "DropNode", path="/local/n")).status == Status.SUCCESS


async def test_another_database_has_other_paths() -> None:
    async with (
        serving(database="/ru/home") as server,
        channel(server.target) as over,
    ):
        assert (await call(over, "CreateNode", path="/local/n")).status == Status.BAD_REQUEST
        assert (await call(over, "CreateNode", path="/ru/home/n")).status == Status.SUCCESS
        await session(over, "/ru/home/n")


# --- discovery


async def test_discovery_names_the_address_that_the_client_has_reached() -> None:
    async with serving() as server, channel(server.target) as over:
        found = await call(over, "ListEndpoints", database="/local")
        result = discovery.ListEndpointsResult()
        assert (found.ready, found.status) == (True, Status.SUCCESS)
        assert found.result.Unpack(result)
        (endpoint,) = result.endpoints
        assert f"{endpoint.address}:{endpoint.port}" == server.target
        assert endpoint.ssl is False
        assert endpoint.node_id >= 1


async def test_discovery_names_the_address_that_it_is_told_to_advertise() -> None:
    async with (
        serving(advertise="coord.example:4000") as server,
        channel(server.target) as over,
    ):
        result = discovery.ListEndpointsResult()
        (await call(over, "ListEndpoints")).result.Unpack(result)
        (endpoint,) = result.endpoints
        assert (endpoint.address, endpoint.port) == ("coord.example", 4000)


async def test_who_am_i_says_who() -> None:
    authenticator = Authenticator({TOKEN: "deploy"})
    async with serving(authenticator=authenticator) as server, channel(server.target) as over:
        said = await call(over, "WhoAmI", [("x-ydb-auth-ticket", TOKEN)])
        result = discovery.WhoAmIResult()
        assert said.result.Unpack(result)
        assert result.user == "deploy"


# --- who may call


@pytest.mark.parametrize("metadata", [[], [("x-ydb-auth-ticket", "wrong")]])
async def test_who_shows_no_right_token_is_let_do_nothing(metadata: list[Any]) -> None:
    authenticator = Authenticator({TOKEN: "deploy"})
    async with serving(authenticator=authenticator) as server, channel(server.target) as over:
        for name in ("CreateNode", "AlterNode", "DropNode", "DescribeNode"):
            assert (await call(over, name, metadata, path=NODE)).status == Status.UNAUTHORIZED
        for name in ("ListEndpoints", "WhoAmI"):
            assert (await call(over, name, metadata)).status == Status.UNAUTHORIZED
        client = await stream(over, metadata=metadata)
        await client.fails(Status.UNAUTHORIZED)
        assert "access denied" in server.lines.events()
        assert not any("wrong" in str(facts) for _, _, facts in server.lines.seen)


async def test_who_shows_a_right_token_is_let_in() -> None:
    authenticator = Authenticator({TOKEN: "deploy"})
    async with serving(authenticator=authenticator) as server, channel(server.target) as over:
        client = await stream(over, metadata=[("x-ydb-auth-ticket", TOKEN)])
        await client.start()
        assert await client.acquired(await client.acquire("m", 1, ephemeral=True))


@pytest.mark.parametrize("database", ["/local/", "local", "local/", "//local"])
async def test_headers_that_are_not_known_and_a_token_that_nobody_asks_for_are_ignored(
    database: str,
) -> None:
    async with serving() as server, channel(server.target) as over:
        metadata = [("x-ydb-auth-ticket", "x"), ("x-ydb-database", database), ("x-other", "1")]
        assert (await call(over, "CreateNode", metadata, path=NODE)).status == Status.SUCCESS


async def test_a_database_that_is_not_here_is_not_found() -> None:
    async with serving() as server, channel(server.target) as over:
        metadata = [("x-ydb-database", "/remote")]
        refused = await call(over, "DescribeNode", metadata, path=NODE)
        assert refused.status == Status.NOT_FOUND
        client = await stream(over, metadata=metadata)
        assert "/remote" in await client.fails(Status.NOT_FOUND)


async def test_a_method_that_is_not_here_is_unimplemented() -> None:
    async with serving() as server, channel(server.target) as over:
        method = UnaryUnaryMethod(
            over.channel,
            "/Ydb.Table.V1.TableService/CreateSession",
            discovery.WhoAmIRequest,
            discovery.WhoAmIResponse,
        )
        with pytest.raises(GRPCError) as caught:
            await method(discovery.WhoAmIRequest())
        assert caught.value.status is GrpcStatus.UNIMPLEMENTED
