"""An engine that does not hear some answers: it was done, or was not, or is yet to be done."""

from __future__ import annotations

import asyncio
import random

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Lost
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl, parse

_SHARE = 0.2
_LATE = 0.02


class _Losing(Members):
    """Members that lose the answers to some transactions; the same ones in every run."""

    def __init__(self, address: EtcdUrl) -> None:
        super().__init__(address)
        self._random = random.Random(address.prefix)
        self._late: set[asyncio.Task[bytes]] = set()

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        if method != wire.TXN or self._random.random() > _SHARE:
            return await super().call(method, request, timeout)
        match self._random.choice(("not done", "done", "done late")):
            case "done":
                await super().call(method, request, timeout)
            case "done late":
                task = asyncio.create_task(self._call_later(method, request, timeout))
                self._late.add(task)
        raise Lost("the test lost the answer")

    async def _call_later(self, method: str, request: bytes, timeout: float) -> bytes:
        await asyncio.sleep(self._random.uniform(0, _LATE))
        return await super().call(method, request, timeout)

    async def aclose(self) -> None:
        await asyncio.gather(*self._late, return_exceptions=True)  # refused is as good as done
        await super().aclose()


def losing_answers(url: str, clock: Clock) -> Engine:
    """A connector."""
    address = parse(url)
    return EtcdEngine(address, clock, _Losing(address))
