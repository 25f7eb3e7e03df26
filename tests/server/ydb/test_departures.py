"""Streams that their client leaves, and what the same client asks next."""

from __future__ import annotations

import asyncio

import pytest
from grpclib.client import UnaryUnaryMethod

from tenure.engines.memory import MemoryEngine
from tenure.errors import NodeBusy
from tenure.server.ydb.messages import Request, Status, coordination
from tests.server.ydb.raw import FOREVER, PATIENCE, SERVICE, call, channel, serving, session, stream

ROUNDS = 12


@pytest.mark.parametrize("how", ["cancel", "half-close"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with requests under way"])
async def test_a_node_can_be_dropped_right_after_its_session_was_left(
    store: str, how: str, busy: bool
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        for number in range(ROUNDS):
            path = f"/local/n{number}"
            await call(over, "CreateNode", path=path)
            client = await session(over, path)
            if busy:
                for name in ("a", "b", "c"):
                    await client.acquire(name, ephemeral=True)
            if how == "cancel":
                await client.call.cancel()
            else:
                await client.call.end()
            dropped = await call(over, "DropNode", path=path)
            assert dropped.status == Status.SUCCESS, (number, dropped)


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_node_can_be_dropped_while_the_session_that_was_left_is_being_attached(
    store: str, how: str
) -> None:
    async with serving(store) as server, channel(server.target) as over:
        for number in range(ROUNDS):
            path = f"/local/n{number}"
            await call(over, "CreateNode", path=path)
            client = await stream(over)
            await client.send(session_start=Request.SessionStart(path=path, timeout_millis=5000))
            await (client.call.cancel() if how == "cancel" else client.call.end())
            dropped = await call(over, "DropNode", path=path)
            assert dropped.status == Status.SUCCESS, (number, dropped)


async def test_a_node_can_be_dropped_right_before_its_session_is_seen_to_be_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = asyncio.Event()
    drop_node = MemoryEngine.drop_node

    async def refuse_first(engine: MemoryEngine, path: str, *, force: bool) -> None:
        try:
            await drop_node(engine, path, force=force)
        except NodeBusy:
            refused.set()
            raise

    monkeypatch.setattr(MemoryEngine, "drop_node", refuse_first)
    async with serving() as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        client = await session(over, "/local/n")
        path = SERVICE + "DropNode"
        request, response = coordination.DropNodeRequest, coordination.DropNodeResponse
        drop = UnaryUnaryMethod(over.channel, path, request, response)
        async with drop.open(timeout=PATIENCE) as dropping:
            await dropping.send_message(request(path="/local/n"), end=True)
            await refused.wait()
            await client.call.cancel()
            dropped = await dropping.recv_message()
        assert dropped is not None
        assert dropped.operation.status == Status.SUCCESS


async def test_a_drop_is_refused_for_a_session_that_nobody_left() -> None:
    async with serving() as server, channel(server.target) as over:
        await call(over, "CreateNode", path="/local/n")
        client = await session(over, "/local/n")
        assert (await call(over, "DropNode", path="/local/n")).status == Status.PRECONDITION_FAILED
        assert await client.acquired(await client.acquire("m", ephemeral=True))


async def test_a_session_that_was_left_with_a_timeout_of_zero_is_over_for_the_next_one() -> None:
    async with serving() as server, channel(server.target) as over:
        for _ in range(ROUNDS):
            client = await session(over, timeout=0)
            assert await client.acquired(await client.acquire("m", FOREVER, ephemeral=True))
            await client.call.cancel()
            after = await session(over)
            assert await after.acquired(
                await after.acquire("m", FOREVER, ephemeral=True, timeout_millis=0)
            )
            await after.released(await after.release("m"))
