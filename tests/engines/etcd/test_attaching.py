"""Take-overs that are cancelled while etcd is asked."""

from __future__ import annotations

import asyncio

from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.etcd import wire
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl, parse
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import a_prefix

KEY = b"0123456789abcdef"


class _Slow(Members):
    """Members whose transactions wait until a test lets them go on.

    Attributes:
        asked: one has come.
        gate: set while they may go on.
    """

    def __init__(self, address: EtcdUrl) -> None:
        super().__init__(address)
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        if method == wire.TXN:
            self.asked.set()
            await self.gate.wait()
        return await super().call(method, request, timeout)


async def test_a_cancelled_take_over_does_not_take_the_session_from_the_next() -> None:
    with a_prefix() as url:
        address = parse(url)
        members = _Slow(address)
        slow = EtcdEngine(address, SystemClock(), members)
        other = EtcdEngine(address, SystemClock(), Members(address))
        await slow.open()
        await other.open()
        try:
            new = Attach(DEFAULT_NODE, 30.0, liveness="window", key=KEY)
            session = await other.attach(new, Recorder())
            await session.detach()
            how = Attach(DEFAULT_NODE, 30.0, liveness="window", key=KEY, session_id=session.id)
            members.gate.clear()
            members.asked.clear()
            cancelled = asyncio.create_task(slow.attach(how, Recorder()))
            await members.asked.wait()
            cancelled.cancel()
            await asyncio.wait([cancelled])
            next_one = await other.attach(how, Recorder())
            members.gate.set()
            await slow.aclose()  # which waits for what was under way
            enqueued = next_one.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=0, ephemeral=True)
            await answer_of(enqueued)
        finally:
            members.gate.set()
            await slow.aclose()
            await other.aclose()
