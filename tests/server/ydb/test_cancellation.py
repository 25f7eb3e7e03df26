"""Calls and reads that are cancelled wherever they wait: nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import wraps
from typing import Any

import pytest
from grpclib.client import UnaryUnaryMethod

from tenure.server.admission import source_at
from tenure.server.reads import Reader
from tenure.server.ydb.messages import Request, coordination
from tenure.server.ydb.transport import GrpcConnection
from tests.server.ydb.raw import (
    NODE,
    PATIENCE,
    SERVICE,
    Client,
    Over,
    Server,
    channel,
    eventually,
    serving,
    session,
    stream,
)

MOST = 100
"""Suspensions after which a call has certainly ended."""


class Cancelled:
    """Awaits some work, and has its task cancelled at one of its suspensions."""

    def __init__(self, work: Awaitable[Any], at: int, fired: asyncio.Event) -> None:
        self._work = work
        self._left = at
        self._fired = fired

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        task = asyncio.current_task()
        assert task is not None
        error: BaseException | None = None
        while True:
            try:
                awaited = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if not self._left:
                asyncio.get_running_loop().call_soon(task.cancel)
                self._fired.set()
            try:
                yield awaited
                error = None
            except BaseException as raised:
                error = raised


def cancelled_at(
    patch: pytest.MonkeyPatch, owner: type, name: str, at: int, last: int
) -> asyncio.Event:
    """Have the call of a method with that number cancelled; the event is set when it is."""
    fired = asyncio.Event()
    numbers = iter(range(1, MOST))
    method: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @wraps(method)
    async def call(*arguments: Any) -> Any:
        work = method(*arguments)
        return await (Cancelled(work, at, fired) if next(numbers) == last else work)

    patch.setattr(owner, name, call)
    return fired


async def either(fired: asyncio.Event, work: Awaitable[Any]) -> bool:
    """Wait for some work that ends unless `fired` is set first; returns whether it is."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(fired.wait())
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for each in (working, waiting):
        each.cancel()
    await asyncio.wait({working, waiting})
    if not fired.is_set():
        working.result()
    return fired.is_set()


async def all_is_well(server: Server, over: Over) -> None:
    """Check that nothing is left, and that the connection is served."""
    (connection,) = server.listener.connections

    async def quiet() -> bool:
        return not connection._operations and not server.context.reads.waiting

    await eventually(quiet)
    client = await session(over)
    await client.create("other", 1)
    assert (await client.described("other", include_owners=True)).limit == 1
    await client.send(session_stop=Request.SessionStop())
    await client.expect("session_stopped")


async def turn_of_another(server: Server, fired: asyncio.Event) -> None:
    """Have the reads of this machine wait for a moment."""
    async with Reader(server.context.reads, source_at("127.0.0.1")).turn():

        async def is_waited_for() -> bool:
            return fired.is_set() or server.context.reads.waiting > 0

        await eventually(is_waited_for)


async def test_a_description_of_a_node_is_cancelled_wherever_it_waits(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        async with serving(store) as server, channel(server.target) as over:
            with monkeypatch.context() as patch:
                fired = cancelled_at(patch, GrpcConnection, "_answer", at, last=1)
                method = UnaryUnaryMethod(
                    over.channel,
                    SERVICE + "DescribeNode",
                    coordination.DescribeNodeRequest,
                    coordination.DescribeNodeResponse,
                )
                request = coordination.DescribeNodeRequest(path=NODE)
                other = asyncio.create_task(turn_of_another(server, fired))
                goes_on = await either(fired, method(request))
                await other
            await all_is_well(server, over)
    assert 3 <= at < MOST, "it waits for its message, for its turn, and for the store"


async def test_a_session_is_cancelled_wherever_its_stream_waits(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(over: Over) -> None:
        client = await stream(over)
        await client.start()
        await client.create("s", 1)
        await client.described("s", include_owners=True)
        await client.send(session_stop=Request.SessionStop())
        await client.expect("session_stopped")
        await client.ends()

    at, goes_on = 0, True
    while goes_on:
        at += 1
        async with serving(store) as server, channel(server.target) as over:
            with monkeypatch.context() as patch:
                fired = cancelled_at(patch, GrpcConnection, "_answer", at, last=1)
                goes_on = await either(fired, serve(over))
            await all_is_well(server, over)
    assert 4 <= at < MOST, "it waits for its start, to be attached, for what it sends, and its end"


async def both_answers(one: Client, other: Client) -> None:
    for each in (one, other):
        await each.expect("describe_semaphore_result")


@pytest.mark.parametrize("last", [1, 2])
async def test_a_description_with_owners_is_cancelled_wherever_it_waits(
    store: str, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        async with serving(store) as server, channel(server.target) as over:
            clients = [await session(over), await session(over)]
            await clients[0].create("s", 1)
            with monkeypatch.context() as patch:
                fired = cancelled_at(patch, Reader, "describe", at, last)
                other = asyncio.create_task(turn_of_another(server, fired))
                for each in clients:
                    await each.describe("s", include_owners=True)
                goes_on = await either(fired, both_answers(*clients))
                await other
                for each in clients:
                    await each.call.cancel()
            await all_is_well(server, over)
    assert 2 <= at < MOST, "it waits for its turn"
