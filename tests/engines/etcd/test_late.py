"""Waiters that are late, and whose queue changes while another program takes them out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Place, Withdrawn
from tenure.engines.etcd import wire
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl, parse
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import a_prefix


class _Ahead(SystemClock):
    """A clock that a test puts forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class _Interrupted(Members):
    """Members that let something happen between the next transaction and the one after it.

    Attributes:
        between: what happens.
    """

    def __init__(self, address: EtcdUrl) -> None:
        super().__init__(address)
        self.between: Callable[[], Awaitable[object]] | None = None
        self._read = False

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        if method == wire.TXN and self.between is not None:
            if self._read:
                between, self.between = self.between, None
                await between()
            self._read = True
        return await super().call(method, request, timeout)


async def test_a_late_waiter_that_has_just_become_an_owner_is_not_taken_out() -> None:
    with a_prefix() as url:
        address, clock = parse(url), _Ahead()
        members = _Interrupted(address)
        engine, other = EtcdEngine(address, SystemClock()), EtcdEngine(address, clock, members)
        await engine.open()
        await other.open()
        try:
            heard = Recorder()
            session = await engine.attach(Attach(DEFAULT_NODE, 30.0), heard)
            await session.create_semaphore("s", 2, b"", exist_ok=False)
            places = [
                await answer_of(
                    session.enqueue(hold, "s", count, b"", timeout=timeout, ephemeral=False)
                )
                for hold, count, timeout in ((1, 1, None), (2, 2, None), (3, 1, 60.0))
            ]
            assert [each.place for each in places] == [Place.GRANTED, Place.WAITING, Place.WAITING]
            name = session.name("s")
            assert not await other.late.take_out(name)  # it has seen the queue
            clock.ahead = 100.0

            async def second_leaves() -> None:
                assert await answer_of(session.withdraw(2)) is Withdrawn.LEFT

            members.between = second_leaves
            assert not await other.late.take_out(name)
            await heard.wait_for(lambda heard: 3 in heard.grants, "the grant")
            found = await session.describe_semaphore("s", owners=True, waiters=True)
            assert (len(found.owners), heard.removals) == (2, {})
        finally:
            await engine.aclose()
            await other.aclose()


class _Slow(Members):
    """Members whose next answer to a transaction takes some seconds longer."""

    longer = 0.0

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        answer = await super().call(method, request, timeout)
        if method == wire.TXN and self.longer:
            longer, self.longer = self.longer, 0.0
            over = asyncio.Event()
            asyncio.get_running_loop().call_later(longer, over.set)
            await over.wait()
        return answer


async def test_a_timeout_that_passes_while_it_is_replaced_counts_no_more() -> None:
    with a_prefix() as url:
        address = parse(url)
        members = _Slow(address)
        engine = EtcdEngine(address, SystemClock(), members)
        await engine.open()
        seen = Recorder()
        try:
            session = await engine.attach(Attach(DEFAULT_NODE, 30.0), seen)
            for number, timeout in ((1, None), (2, 2.0)):
                await answer_of(
                    session.enqueue(
                        number, "m", EPHEMERAL_LIMIT, b"", timeout=timeout, ephemeral=True
                    )
                )
            members.longer = 2.1  # seconds: the former timeout passes meanwhile
            await answer_of(session.alter(2, count=None, data=None, timeout=None))
            found = await session.describe_semaphore("m", owners=True, waiters=True)
            assert len(found.waiters) == 1
            assert not seen.removals
            await answer_of(session.withdraw(1))
            await seen.wait_for(lambda seen: 2 in seen.grants, "the grant")
        finally:
            await engine.aclose()
