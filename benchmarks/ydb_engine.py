"""The `ydb://` engine beside bare gRPC streams: what the engine costs a program.

Both ask the same server, from the same process and core, through the same gRPC library: acquire a
mutex, learn its order id, release it, with so many of these pairs under way at a time. The bare
stream asks for nothing else: no lease, no deadline, no watch on what it owns.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine

import grpc.aio

import tenure
from benchmarks.measure import Measured
from benchmarks.servers import CLIENT, on_core
from benchmarks.ydb_surface import METHOD, acquire_or_release, server
from tenure.server.ydb.messages import Request, Response

UNDER_WAY = (1, 16)
SECONDS, ROUNDS = 1.5, 5

_names = itertools.count()


async def _bare(port: int, under_way: int, fencing: bool) -> float:
    """Pairs a second on one stream."""
    first = next(_names) * 1000
    to_say: asyncio.Queue[Request | None] = asyncio.Queue()

    async def said() -> AsyncIterator[Request]:
        while (request := await to_say.get()) is not None:
            yield request

    def acquire(slot: int) -> None:
        to_say.put_nowait(acquire_or_release(slot, 0))
        if fencing:
            ask = Request.DescribeSemaphore(req_id=slot, name=f"mutex-{slot}", include_owners=True)
            to_say.put_nowait(Request(describe_semaphore=ask))

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = channel.stream_stream(
            METHOD,
            request_serializer=Request.SerializeToString,
            response_deserializer=Response.FromString,
        )
        start = Request.SessionStart(path="/local/default", timeout_millis=30_000)
        to_say.put_nowait(Request(session_start=start))
        call, pairs, begun, rate = stream(said()), 0, 0.0, 0.0
        async for heard in call:
            match heard.WhichOneof("response"):
                case "session_started":
                    begun = time.perf_counter()
                    for slot in range(first, first + under_way):
                        acquire(slot)
                case "ping":
                    pong = Request.PingPong(opaque=heard.ping.opaque)
                    to_say.put_nowait(Request(pong=pong))
                case "acquire_semaphore_result":
                    assert heard.acquire_semaphore_result.acquired
                    if not fencing:
                        slot = heard.acquire_semaphore_result.req_id
                        to_say.put_nowait(acquire_or_release(slot, 1))
                case "describe_semaphore_result":
                    found = heard.describe_semaphore_result
                    assert found.semaphore_description.owners[0].order_id > 0
                    to_say.put_nowait(acquire_or_release(found.req_id, 1))
                case "release_semaphore_result":
                    pairs += 1
                    took = time.perf_counter() - begun
                    if took < SECONDS:
                        acquire(heard.release_semaphore_result.req_id)
                    elif not rate:
                        rate = pairs / took
                        to_say.put_nowait(None)  # the server ends the stream then
        return rate


async def _engine(port: int, under_way: int, fencing: bool) -> float:
    """Pairs a second through one session."""
    options = "" if fencing else "?fencing=off"
    async with (
        tenure.connect(f"ydb://127.0.0.1:{port}/local{options}") as client,
        client.session() as session,
    ):
        begun = time.perf_counter()
        first = next(_names) * 1000

        async def pairs(name: str) -> int:
            done = 0
            while time.perf_counter() - begun < SECONDS:
                lease = await session.mutex(name).lock()
                await lease.release()
                done += 1
            return done

        names = [f"mutex-{slot}" for slot in range(first, first + under_way)]
        done = await asyncio.gather(*map(pairs, names))
        return sum(done) / (time.perf_counter() - begun)


def _run(what: Callable[[], Coroutine[object, object, float]]) -> float:
    with on_core(CLIENT):
        return asyncio.run(what())


def measure() -> list[Measured]:
    """Both, in turn, so that what else the machine does concerns both."""
    results = []
    with server("tenure memory://") as process:
        port = process.port
        for under_way, fencing in itertools.product(UNDER_WAY, (True, False)):
            rounds = [
                (
                    _run(lambda: _engine(port, under_way, fencing)),  # noqa: B023  used at once
                    _run(lambda: _bare(port, under_way, fencing)),  # noqa: B023
                )
                for _ in range(ROUNDS)
            ]
            results.append(
                Measured(
                    f"ydb:// pairs, {under_way} under way, {'with' if fencing else 'no'} tokens",
                    statistics.median(mine for mine, _ in rounds),
                    "pairs/s",
                    "a bare stream",
                    statistics.median(theirs for _, theirs in rounds),
                    statistics.median(mine / theirs for mine, theirs in rounds),
                    at_least=0.4,
                )
            )
    return results


if __name__ == "__main__":
    for result in measure():
        print(result)
