"""Permissions: each operation, with each level of access, on each listener."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tenure.core.rates import RateKind
from tenure.engines.contract import (
    Engine,
    EngineSession,
    RateAnswer,
    RateCall,
    RateRule,
    rate_answered,
)
from tenure.errors import TenureError
from tenure.model import EPHEMERAL_LIMIT, NodeConfig
from tenure.server.auth.identity import Access, Permissions
from tests.server.auth.several import Several, attached, rights, several

NODE = "/n"
NATIVE, BOTH = ("tenure",), ("tenure", "ydb")


class Stage:
    """One client with a level of access to `NODE`, and the store beside it.

    Attributes:
        other: a session of another identity, which has the mutex ``theirs``.
    """

    def __init__(self, store: Engine, client: Engine, other: EngineSession, order_id: int) -> None:
        self.store = store
        self.client = client
        self.other = other
        self.order_id = order_id

    async def rate(self, kind: RateKind) -> RateAnswer:
        call = RateCall(kind, RateRule(1, 1_000_000, 1))
        return await rate_answered(self.client.rate(NODE, "r", call))

    async def with_session(self, work: Callable[[EngineSession], Any]) -> Any:
        async with attached(self.client, NODE) as session:
            answer = work(session)
            return await answer if isinstance(answer, Awaitable) else answer


def lock(session: EngineSession) -> Any:
    return session.enqueue(
        session.attach_number << 32, "m", EPHEMERAL_LIMIT, b"", timeout=0, ephemeral=True
    )


async def watch(session: EngineSession) -> None:
    session.watch("s", data=True, owners=False, changed=lambda: None)()


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        least: the access that it needs.
        listeners: where clients have it.
        hidden: what it answers where the node may not be seen.
    """

    name: str
    least: Access
    work: Callable[[Stage], Awaitable[Any]]
    listeners: tuple[str, ...] = BOTH
    hidden: str = "NodeNotFound"


def on_session(work: Callable[[EngineSession], Any]) -> Callable[[Stage], Awaitable[Any]]:
    return lambda stage: stage.with_session(work)


READ, HOLD, ADMINISTER = Access.READ, Access.HOLD, Access.ADMINISTER
TABLE = (
    Row("describe node", READ, lambda s: s.client.describe_node(NODE)),
    Row("attach", READ, on_session(lambda _: None)),
    Row(
        "describe",
        READ,
        on_session(lambda s: s.describe_semaphore("s", owners=True, waiters=True)),
    ),
    Row(
        "describe without a session",
        READ,
        lambda s: s.client.describe_semaphore(NODE, "s", owners=False, waiters=False),
        NATIVE,
    ),
    Row("watch", READ, on_session(watch)),
    Row(
        "list semaphores",
        READ,
        lambda s: s.client.list_semaphores(NODE, owners=True, waiters=True),
        NATIVE,
    ),
    Row("list sessions", READ, lambda s: s.client.list_sessions(NODE), NATIVE),
    Row("lock", HOLD, on_session(lock)),
    Row("peek at a rate", READ, lambda s: s.rate("peek"), NATIVE),
    Row("take of a rate", HOLD, lambda s: s.rate("take"), NATIVE),
    Row("refund of a rate", HOLD, lambda s: s.rate("refund"), NATIVE),
    Row("resize of a rate", HOLD, lambda s: s.rate("resize"), NATIVE),
    Row("create", HOLD, on_session(lambda s: s.create_semaphore("c", 1, b"", exist_ok=True))),
    Row("update", HOLD, on_session(lambda s: s.update_semaphore("s", b"new"))),
    Row("resize", HOLD, on_session(lambda s: s.resize_semaphore("s", 2)), NATIVE),
    Row("delete", HOLD, on_session(lambda s: s.delete_semaphore("d", force=False))),
    Row("delete by force", ADMINISTER, on_session(lambda s: s.delete_semaphore("f", force=True))),
    Row(
        "create node",
        ADMINISTER,
        lambda s: s.client.create_node(f"{NODE}/inner", NodeConfig(), exist_ok=True),
        hidden="AuthenticationFailed",
    ),
    Row("alter node", ADMINISTER, lambda s: s.client.alter_node(NODE, NodeConfig())),
    Row(
        "end another's session",
        ADMINISTER,
        lambda s: s.client.end_session(NODE, 123456),
        NATIVE,
    ),
    Row(
        "evict another's request",
        ADMINISTER,
        lambda s: s.client.evict(NODE, "theirs", s.order_id),
        NATIVE,
    ),
    Row("drop node", ADMINISTER, lambda s: s.client.drop_node(f"{NODE}/old", force=False)),
)


def expected(row: Row, access: Access) -> str:
    """What the table says: ``ok``, or the name of the error."""
    if access is Access.NONE:
        return row.hidden
    return "ok" if access >= row.least else "AuthenticationFailed"


async def outcome(work: Awaitable[Any]) -> str:
    try:
        await work
    except TenureError as error:
        return type(error).__name__
    return "ok"


async def stage(server: Several, client: Engine, other: EngineSession) -> Stage:
    for name in ("s", "d", "f"):
        await other.create_semaphore(name, 1, b"data", exist_ok=True)
    await server.store.create_node(f"{NODE}/old", NodeConfig(), exist_ok=True)
    answer = other.enqueue(1, "theirs", EPHEMERAL_LIMIT, b"", timeout=0, ephemeral=True)
    assert not isinstance(answer, asyncio.Future)
    assert answer.order_id is not None
    return Stage(server.store, client, other, answer.order_id)


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("listener", BOTH)
async def test_an_operation_needs_the_access_that_the_table_says(
    listener: str, access: Access
) -> None:
    if listener == "ydb":
        pytest.importorskip("ydb")
    some = Permissions({"/default": Access.READ, NODE: access})
    async with several({"some": rights(some)}) as server:
        await server.store.create_node(NODE, NodeConfig(), exist_ok=False)
        async with (
            server.client(listener, "some") as client,
            attached(server.store, NODE) as other,
        ):
            ready = await stage(server, client, other)
            rows = [row for row in TABLE if listener in row.listeners]
            found = {row.name: await outcome(row.work(ready)) for row in rows}
            if access < ADMINISTER:  # what another has stays
                mine = await server.store.describe_semaphore(
                    NODE, "theirs", owners=True, waiters=False
                )
                assert [each.order_id for each in mine.owners] == [ready.order_id]
    assert found == {row.name: expected(row, access) for row in rows}


@pytest.mark.parametrize("access", Access)
async def test_a_dflockd_client_is_let_in_with_the_access_hold(access: Access) -> None:
    some = Permissions({"/dflockd": access})
    async with several({"some": rights(some)}) as server, server.lines("some") as ask:
        reply = await ask("l", "key", "1 10")
    assert reply.startswith("ok ") is (access >= HOLD), reply


async def test_lists_show_the_nodes_that_may_be_read() -> None:
    some = Permissions.parse({"/a": "read", "/a/secret": "none", "/b": "hold"})
    async with several({"some": rights(some), "all": rights()}) as server:
        for node in ("/a", "/a/b", "/a/secret", "/b", "/c"):
            await server.store.create_node(node, NodeConfig(), exist_ok=False)
        async with server.client("tenure", "some") as client:
            assert list(await client.list_nodes()) == ["/a", "/a/b", "/b"]
        async with server.client("tenure", "all") as client:
            assert len(await client.list_nodes()) == 7


async def test_a_refusal_says_what_is_missing() -> None:
    some = Permissions.parse({"/default": "read"})
    async with (
        several({"some": rights(some)}) as server,
        server.client("tenure", "some") as client,
        attached(client, "/default") as own,
    ):
        refused = await failure(own.create_semaphore("c", 1, b"", exist_ok=False))
        assert str(refused) == (
            "the identity some may not acquire, create and change on /default: this needs the "
            "permission hold, and it has read"
        )


async def test_a_node_that_may_not_be_read_is_answered_like_one_that_is_not_there() -> None:
    some = Permissions.parse({"/default": "read"})
    async with several({"some": rights(some)}) as server, server.client("tenure", "some") as client:
        await server.store.create_node("/hidden", NodeConfig(), exist_ok=False)
        answers = {
            str(await failure(client.describe_node(node))).replace(node, "NODE")
            for node in ("/hidden", "/missing")
        }
        assert len(answers) == 1


async def failure(work: Awaitable[Any]) -> TenureError:
    with pytest.raises(TenureError) as caught:
        await work
    return caught.value


async def test_own_sessions_are_ended_with_hold_and_those_of_others_are_not() -> None:
    some = Permissions.parse({"/default": "hold"})
    async with (
        several({"some": rights(some), "all": rights()}) as server,
        server.client("tenure", "some") as client,
        server.client("tenure", "all") as admin,
        attached(client, "/default") as own,
        attached(admin, "/default") as theirs,
    ):
        assert await outcome(client.end_session("/default", theirs.id)) == "AuthenticationFailed"
        assert await client.end_session("/default", own.id)
        assert [each.id for each in await server.store.list_sessions("/default")] == [theirs.id]


async def test_changed_permissions_apply_to_sessions_that_live() -> None:
    before = rights(Permissions.parse({"/default": "hold"}))
    after = rights(Permissions.parse({"/default": "read"}))
    async with (
        several({"some": before}) as server,
        server.client("tenure", "some") as client,
        attached(client, "/default") as own,
    ):
        await own.create_semaphore("c", 1, b"", exist_ok=False)
        server.set({"some": after})
        async with server.client("tenure", "some"):  # the newest connection has the newest
            work = own.create_semaphore("d", 1, b"", exist_ok=False)
            assert await outcome(work) == "AuthenticationFailed"
            assert (await own.describe_semaphore("c", owners=False, waiters=False)).limit == 1


async def test_creating_tells_nothing_about_a_node_that_may_not_be_seen() -> None:
    some = Permissions.parse({"/mine": "administer"})
    async with several({"some": rights(some)}) as server, server.client("tenure", "some") as client:
        await server.store.create_node("/there", NodeConfig(), exist_ok=False)
        there = await failure(client.create_node("/there", NodeConfig(), exist_ok=False))
        missing = await failure(client.create_node("/missing", NodeConfig(), exist_ok=False))
        assert str(there).replace("/there", "") == str(missing).replace("/missing", "")
        await client.create_node("/mine/new", NodeConfig(), exist_ok=False)
        assert list(await client.list_nodes()) == ["/mine/new"]
