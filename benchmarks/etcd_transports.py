"""The etcd engine's transactions through three clients of gRPC: its own, grpclib's and grpc.aio.

``python -m benchmarks.etcd_transports [ROUNDS]`` prints two tables for one member on disk:

* bare pairs: the transaction that joins an empty queue, then the one that leaves it;
* pairs of the engine: ``async with mutex.lock()`` on distinct keys, with unary calls through that
  client. The watch and the keep-alives, which are idle here, stay on the engine's own.

All three send the bytes of `tenure.engines.etcd.wire`, so that the libraries have no cost of
messages. The ratio is to the engine's own client in the same round, of which the median counts.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from operator import truediv
from typing import Any, Protocol, TypeAlias

import grpc.aio
import grpclib.client
from grpclib.encoding.base import CodecBase

import tenure
from benchmarks.etcd_pairs import TASKS
from benchmarks.redis_work import Pairs
from benchmarks.tasks import SECONDS, work
from tenure.clock import Clock, SystemClock
from tenure.engines.contract import Engine
from tenure.engines.etcd import wire
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.keys import Keys, request_value
from tenure.engines.etcd.members import Channel, Members, Metadata
from tenure.engines.etcd.url import parse
from tests.engines.etcd.servers import a_cluster

ROUNDS = 7
TIMEOUT = 5.0


class Unary(Protocol):
    """A client of one member, for calls of one request and one response."""

    async def call(
        self, method: str, request: bytes, timeout: float, metadata: Metadata = ()
    ) -> bytes: ...

    async def aclose(self) -> None: ...


class _Raw(CodecBase):
    """Messages that are encoded already."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ARG002  as grpclib calls it
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ARG002  as grpclib calls it
        return data


class OfGrpclib:
    """grpclib's channel."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._channel = grpclib.client.Channel(host, int(port), codec=_Raw())
        self._methods: dict[str, Callable[..., Awaitable[bytes]]] = {}

    async def call(
        self, method: str, request: bytes, timeout: float, metadata: Metadata = ()
    ) -> bytes:
        # grpclib asks which task runs, while the engine takes its first step in its caller's.
        await asyncio.sleep(0)
        found = self._methods.get(method)
        if found is None:
            found = grpclib.client.UnaryUnaryMethod(self._channel, method, bytes, bytes)
            self._methods[method] = found
        return await found(request, timeout=timeout, metadata=metadata)

    async def aclose(self) -> None:
        self._channel.close()


class OfGrpcAio:
    """grpc.aio's channel."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint)
        self._methods: dict[str, Callable[..., Awaitable[bytes]]] = {}

    async def call(
        self, method: str, request: bytes, timeout: float, metadata: Metadata = ()
    ) -> bytes:
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = self._channel.unary_unary(method)
        return await found(request, timeout=timeout, metadata=metadata)

    async def aclose(self) -> None:
        await self._channel.close()


Client: TypeAlias = Callable[[str], Unary]

CLIENTS: dict[str, Client] = {
    "the engine's own": Channel,
    "grpclib": OfGrpclib,
    "grpc.aio": OfGrpcAio,
}


async def bare(client: Client, endpoint: str, tasks: int) -> Pairs:
    """Pairs of transactions as the engine sends them for a mutex without contention."""
    channel, keys = client(endpoint), Keys("bench/")
    session = keys.session("/default", 1)
    mine = wire.created_at(session, wire.ABSENT)
    try:

        async def pair(number: int) -> float:
            name = keys.name("/default", f"key-{number}")
            key = name.requests + b"%016x-%016x" % (1, number)
            get, put = wire.get(session), wire.put(key, request_value(1))
            absent = wire.created_at(key, wire.ABSENT)
            inner = wire.txn(
                (mine, name.absent, absent),
                (put, name.newest_two),
                (name.get_limit, wire.get(key), name.first_request),
            )
            join = wire.txn(
                (mine, name.absent, name.empty), (put, name.drop_data), (get, wire.nested(inner))
            )
            await channel.call(wire.TXN, join, TIMEOUT)
            granted = time.perf_counter()
            await channel.call(wire.TXN, wire.txn((mine,), (wire.delete(key),), (get,)), TIMEOUT)
            return granted

        return await work(tasks, pair)
    finally:
        await channel.aclose()


class _Members(Members):
    """One member, whose unary calls go through another client."""

    def __init__(self, url: str, client: Client) -> None:
        super().__init__(parse(url))
        self._client = client
        self._endpoint = parse(url).endpoints[0]
        self._unary: Unary | None = None

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        if self._unary is None:
            self._unary = self._client(self._endpoint)
        return await self._unary.call(method, request, timeout)

    async def aclose(self) -> None:
        if self._unary is not None:
            await self._unary.aclose()
        await super().aclose()


async def through_the_engine(client: Client, endpoint: str, tasks: int) -> Pairs:
    """Pairs of the engine."""

    def connect(url: str, clock: Clock) -> Engine:
        members = None if client is Channel else _Members(url, client)
        return EtcdEngine(parse(url), clock, members)

    clock = SystemClock()
    engine = connect(f"etcd://{endpoint}", clock)
    async with tenure.Client(engine, clock) as program, program.session() as session:

        async def pair(number: int) -> float:
            async with session.mutex(f"key-{number}").lock():
                return time.perf_counter()

        return await work(tasks, pair)


def main(rounds: int = ROUNDS) -> None:
    """Print the tables."""
    own = next(iter(CLIENTS))
    print(
        f"{rounds} rounds of {SECONDS:g} s: median pairs/s, its ratio to the engine's own client,"
    )
    print("processor time of the program in ms a pair, and its ratio")
    with a_cluster(on_disk=True) as cluster:
        endpoint = cluster.members[0].address
        for measure, tasks in itertools.product((through_the_engine, bare), (TASKS, 1)):
            rates: dict[str, list[float]] = {name: [] for name in CLIENTS}
            costs: dict[str, list[float]] = {name: [] for name in CLIENTS}
            for _ in range(rounds):
                for name, client in CLIENTS.items():
                    before = time.process_time()
                    pairs = asyncio.run(measure(client, endpoint, tasks))
                    costs[name].append((time.process_time() - before) / sum(pairs.done) * 1e3)
                    rates[name].append(pairs.rate)
            for name in CLIENTS:
                figures = (
                    f"{statistics.median(of[name]):10.{digits}f}"
                    f"{statistics.median(map(truediv, of[name], of[own])):8.2f}"
                    for of, digits in ((rates, 0), (costs, 2))
                )
                what = f"{measure.__name__}, {tasks} tasks"
                print(f"{what:32}{name:18}{''.join(figures)}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
