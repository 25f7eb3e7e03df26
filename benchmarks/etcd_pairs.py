"""The etcd engine in one process, against bare puts through grpc.aio and other libraries' locks.

One member on disk, so that a commit costs what it costs. Beside the rates: how even 32 contenders
are served, and what a hand-off asks of etcd among 4 contenders and among 256, by etcd's own count.

`etcd3` blocks, and runs in a process of its own (`benchmarks.etcd_threads`). `tooz` has only its
driver for etcd's JSON gateway left, whose waiters poll: slower than both, and left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aetcd
import grpc.aio

import tenure
from benchmarks.measure import Measured, in_turn
from benchmarks.redis_work import Pairs
from benchmarks.tasks import SECONDS, work
from tests.engines.etcd.servers import Member, a_cluster

ROUNDS = 3
TASKS = 64
CONTENDERS = 32
FEW, MANY, PROGRAMS = 4, 256, 4
HAND_OFFS = 500


async def ours(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through tenure."""
    async with tenure.connect(f"etcd://127.0.0.1:{port}") as client, client.session() as session:

        async def pair(number: int) -> float:
            async with session.mutex("key" if one_key else f"key-{number}").lock():
                return time.perf_counter()

        return await work(tasks, pair)


async def of_aetcd(port: int, tasks: int, *, one_key: bool = False) -> Pairs:
    """Measure pairs through aetcd's lock."""
    async with aetcd.Client(host="127.0.0.1", port=port) as client:

        async def pair(number: int) -> float:
            lock = client.lock(b"a-key" if one_key else b"a-key-%d" % number, 60)
            await lock.acquire(timeout=None)
            granted = time.perf_counter()
            await lock.release()
            return granted

        return await work(tasks, pair)


def of_etcd3(port: int, threads: int, *, one_key: bool) -> Pairs:
    """By threads of another process, since its generated code needs protobuf's slow way."""
    command = [sys.executable, "-m", "benchmarks.etcd_threads", str(port), str(threads)]
    command += [str(SECONDS), str(int(one_key))]
    environment = os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return Pairs(**json.loads(told))


async def puts(port: int, tasks: int) -> Pairs:
    """Bare puts of small values, each task its own key after the other."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        put = channel.unary_unary("/etcdserverpb.KV/Put")

        async def one(number: int) -> float:
            key = b"put/%d" % number
            await put(b"\n%c%b\x12\x01x" % (len(key), key))
            return time.perf_counter()

        return await work(tasks, one)


@dataclass(frozen=True)
class Asked:
    """Traffic of one hand-off: calls to etcd, and messages of watch streams in both directions."""

    calls: float
    watches: float


async def asked_for_a_hand_off(member: Member, contenders: int) -> Asked:
    """Count the calls while some contenders, in four programs, take turns at one key."""
    url = f"etcd://127.0.0.1:{member.client}"
    all_in, done = asyncio.Event(), asyncio.Event()
    turns = 0

    async def take_turns(session: tenure.Session) -> None:
        nonlocal turns
        while turns < HAND_OFFS:
            async with session.mutex("turns").lock():
                await all_in.wait()
                turns += 1
                if turns == HAND_OFFS:
                    done.set()

    async with AsyncExitStack() as programs:
        sessions = []
        for _ in range(PROGRAMS):
            client = await programs.enter_async_context(tenure.connect(url))
            sessions.append(await client.session(recovery_window=60))
        async with asyncio.TaskGroup() as group:
            for number in range(contenders):  # each waits for one of another program
                group.create_task(take_turns(sessions[number % PROGRAMS]))
                while await _queued(sessions[0]) <= number:  # noqa: ASYNC110  nothing tells
                    await asyncio.sleep(0.001)
            before = _asked(member)
            all_in.set()
            await done.wait()
            after = _asked(member)  # the loop stands still meanwhile
    return Asked(
        (after.calls - before.calls) / HAND_OFFS, (after.watches - before.watches) / HAND_OFFS
    )


async def _queued(session: tenure.Session) -> int:
    try:
        found = await session.semaphore("turns").describe(owners=True, waiters=True)
    except tenure.SemaphoreNotFound:
        return 0
    return len(found.owners) + len(found.waiters)


def _asked(member: Member) -> Asked:
    def sum_of(name: str, *labels: str) -> float:
        return sum(member.metric(f"grpc_server_{name}_total", label) for label in labels)

    kv = 'grpc_service="etcdserverpb.KV"'
    watch = 'grpc_service="etcdserverpb.Watch"'
    return Asked(sum_of("started", kv), sum_of("msg_received", watch) + sum_of("msg_sent", watch))


def measure() -> list[Measured]:
    """Pairs a second, alone and contended, and what a hand-off asks of etcd."""
    with a_cluster(on_disk=True) as cluster:
        [member] = cluster.members
        port = member.client
        return [*_alone(port), *_contended(port), *_constant(member)]


def _alone(port: int) -> list[Measured]:
    results = []
    for tasks in (1, TASKS):
        what = "etcd, 1 task" if tasks == 1 else f"etcd, {tasks} tasks on distinct keys"
        rate, peer, ratio = in_turn(
            lambda: asyncio.run(ours(port, tasks)).rate,  # noqa: B023  it is called at once
            lambda: asyncio.run(of_aetcd(port, tasks)).rate,  # noqa: B023
            ROUNDS,
        )
        results.append(Measured(what, rate, "pairs/s", "aetcd's Lock", peer, ratio, at_least=1.5))
        rate, peer, ratio = in_turn(
            lambda: asyncio.run(ours(port, tasks)).rate,  # noqa: B023
            lambda: asyncio.run(puts(port, tasks)).rate,  # noqa: B023
            ROUNDS,
        )
        results.append(Measured(what, rate, "pairs/s", "bare puts", peer, ratio, at_least=0.3))
    return results


def _contended(port: int) -> list[Measured]:
    """32 tasks on one key: the rate, the shares, and the longest wait against the fair one."""
    what = f"etcd, {CONTENDERS} tasks on one key"
    runs: list[Pairs] = []
    others: list[dict[str, float]] = []

    def one() -> float:
        runs.append(asyncio.run(ours(port, CONTENDERS, one_key=True)))
        return runs[-1].rate

    def other() -> float:
        rates = {
            "aetcd": asyncio.run(of_aetcd(port, CONTENDERS, one_key=True)).rate,
            "etcd3": of_etcd3(port, CONTENDERS, one_key=True).rate,
        }
        others.append(rates)
        return max(rates.values())

    rate, peer, ratio = in_turn(one, other, ROUNDS)
    results = [
        Measured(
            *(what, rate, "pairs/s", "the best of aetcd and etcd3", peer, ratio),
            at_least=3.0,
            notes={"the others": others},
        )
    ]
    rate, peer, ratio = in_turn(one, lambda: asyncio.run(puts(port, 1)).rate, ROUNDS)
    results.append(
        Measured(what, rate, "pairs/s", "bare puts of 1 task", peer, ratio, at_least=0.3)
    )
    last = runs[-1]
    least, most = min(last.done), max(last.done)
    fair = CONTENDERS / last.rate
    return [
        *results,
        Measured(
            *("etcd, turns of the least favoured of them", least, "turns"),
            *("of the most favoured", most, least / most),
            at_least=(most - 1) / most,  # the time was over within somebody's round
        ),
        Measured(
            *("etcd, the longest wait of them", max(last.waits) * 1e3, "ms"),
            *("fair share", fair * 1e3, max(last.waits) / fair),
            at_most=2.0,
        ),
    ]


def _constant(member: Member) -> list[Measured]:
    """Show that the calls of a hand-off do not grow with the number of contenders."""
    few, many = (asyncio.run(asked_for_a_hand_off(member, number)) for number in (FEW, MANY))
    return [
        Measured(
            *(f"etcd, {what} a hand-off, {MANY} contenders", of_many, "calls" if kv else "words"),
            *(f"{FEW} contenders", of_few, of_many / of_few),
            at_most=1.2,
        )
        for what, of_many, of_few, kv in (
            ("reads and transactions", many.calls, few.calls, True),
            ("words on watch streams", many.watches, few.watches, False),
        )
    ]
