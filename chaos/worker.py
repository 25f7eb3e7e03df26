"""A process that takes part: ``python -m chaos.worker PART``, a `chaos.work.Part` as JSON.

Many tasks and a thread lock, acquire, campaign, queue, time out, write and watch, as long as
nobody tells them to stop. It reads orders from its standard input and answers on its standard
output:

* ``freeze``: ask for nothing new, keep what is held; ``frozen``.
* ``finish``, or the end of the input: give everything back, and end.
* ``stall``: be stuck for ``seconds``, with the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import threading
import time
from random import Random
from typing import SupportsIndex

from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

import tenure
from chaos.data import Documents
from chaos.tasks import Hand, steadily
from chaos.threads import Threads
from chaos.work import POOLS, Part
from tenure import telemetry
from tenure.model import DEFAULT_NODE
from tenure.telemetry import prometheus
from tenure.telemetry.table import LEASES, WAITERS
from tenure.testing.history import AppendOnly, Continued, Journal, Paused

_SETBACK = 0.05
"""Seconds after which a store that could not be opened is tried again."""


class _Gauges:
    """The metrics of a client, whose gauges are 0 when no task works any more."""

    def __init__(self, client: tenure.Client) -> None:
        self._registry = CollectorRegistry()
        prometheus.instrument(client, registry=self._registry)
        telemetry.instrument(client, metrics=False, tracer_provider=TracerProvider())

    def check(self) -> None:
        """Raise `RuntimeError` if a request still waits or is held, by the metrics."""
        wrong = [
            sample
            for family in self._registry.collect()
            if family.name in (WAITERS.in_prometheus, LEASES.in_prometheus)
            for sample in family.samples
            if sample.value
        ]
        if wrong:
            raise RuntimeError(f"gauges that are not 0 at the end: {wrong}")


class Worker:
    """One process."""

    def __init__(self, part: Part, journal: Journal) -> None:
        self._part = part
        self._journal = journal
        self._go = asyncio.Event()
        self._go.set()
        random = Random(part.seed)
        self._hand = Hand(part, journal, random, self._go)
        self._documents = Documents(part, journal, random, self._go)
        self._threads = Threads(part, journal)

    async def work(self) -> None:
        """Work until the order to finish."""
        loop = asyncio.get_running_loop()
        orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
        async with await self._connected() as client:
            gauges = _Gauges(client)
            working = loop.create_task(self._all_tasks(client))
            thread = threading.Thread(target=self._threads.run, name="blocking")
            thread.start()
            say("ready")
            obeying = loop.create_task(self._obey(orders))
            try:
                await asyncio.wait([obeying, working], return_when=asyncio.FIRST_COMPLETED)
                obeying.cancel()
                self._journal.leaves()
                working.cancel()
                await asyncio.wait([obeying, working])
                for each in (obeying, working):
                    if not each.cancelled():
                        each.result()  # a defect ends the process, with its traceback
            finally:
                self._threads.stop()
                await asyncio.to_thread(thread.join)
                self._journal.leaves()  # all that is left, with the client
            gauges.check()

    async def _connected(self) -> tenure.Client:
        while True:
            client = tenure.connect(self._part.url)
            try:
                await client.describe_node(DEFAULT_NODE)
                if self._part.plain:
                    for name, limit in POOLS.items():
                        await client.semaphore(name).create(limit, exist_ok=True)
            except (tenure.EngineError, tenure.EngineUnavailable, tenure.SessionExpired):
                await client.aclose()
                await asyncio.sleep(_SETBACK)
            else:
                return client

    async def _all_tasks(self, client: tenure.Client) -> None:
        hand, documents = self._hand, self._documents
        tasks = [hand.sessions, hand.sessions, hand.implicit, hand.limits]
        if self._part.shows_waits:
            tasks.append(hand.tangle)
        if self._part.plain:
            tasks.append(hand.lingering)
        else:
            tasks += [hand.resumable, hand.lead, documents.write, documents.watch]
            tasks += [hand.rates, hand.rates]
        async with asyncio.TaskGroup() as group:
            for each in tasks:
                group.create_task(steadily(each, client))

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        while line := await orders.readline():
            order = json.loads(line)
            match order["do"]:
                case "freeze":
                    self._go.clear()
                    self._threads.freeze()
                    say("frozen")
                case "stall":
                    self._stall(order["seconds"])
                case "finish":
                    return

    def _stall(self, seconds: float) -> None:
        """Block the thread that turns the event loop, as a careless program does."""
        self._journal.record(Paused(self._journal.now(), self._part.label))
        time.sleep(seconds)
        self._journal.record(Continued(self._journal.now(), self._part.label))


def say(word: str) -> None:
    """Answer, in one system call."""
    os.write(1, word.encode() + b"\n")


def _sleep(seconds: float | SupportsIndex) -> None:
    """Sleep like `time.sleep`, by another call of the system."""
    select.select([], [], [], float(seconds))


def main() -> None:
    """Take part as the first argument says."""
    if "FAKETIME_TIMESTAMP_FILE" in os.environ:
        # libfaketime 0.9.10 refuses a sleep until an instant of a clock that it leaves alone.
        time.sleep = _sleep
    part = Part.from_json(sys.argv[1])
    file = AppendOnly(part.history)
    try:
        asyncio.run(Worker(part, Journal(part.label, file)).work())
    finally:
        file.close()


if __name__ == "__main__":
    main()
