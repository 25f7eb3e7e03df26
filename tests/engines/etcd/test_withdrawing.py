"""Releases whose answers are lost: they may have been carried out, and are no loss."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Withdrawn
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Lost
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl, parse
from tenure.errors import SessionExpired
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import a_prefix


class _Forgetful(Members):
    """Members that carry out the next transactions, and lose the answers to them.

    Attributes:
        lost: how many answers are still to be lost.
        meanwhile: what happens before the program knows that one was.
    """

    def __init__(self, address: EtcdUrl) -> None:
        super().__init__(address)
        self.lost = 0
        self.meanwhile: asyncio.Event | None = None

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        if method != wire.TXN or not self.lost:
            return await super().call(method, request, timeout)
        self.lost -= 1
        await super().call(method, request, timeout)
        if self.meanwhile is not None:
            await self.meanwhile.wait()
        raise Lost("the test lost the answer")


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_release_whose_answer_was_lost_was_in_time(lost: int) -> None:
    with a_prefix() as url:
        address = parse(url)
        members = _Forgetful(address)
        engine = EtcdEngine(address, SystemClock(), members)
        await engine.open()
        try:
            session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
            await answer_of(
                session.enqueue(1, "m", EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
            )
            members.lost = lost
            assert await answer_of(session.withdraw(1)) is Withdrawn.LEFT
            assert await answer_of(session.withdraw(1)) is Withdrawn.MISSING
        finally:
            await engine.aclose()


async def test_a_release_before_the_end_of_the_session_was_in_time_though_its_answer_was_lost() -> (
    None
):
    with a_prefix() as url:
        address = parse(url)
        members = _Forgetful(address)
        engine = EtcdEngine(address, SystemClock(), members)
        await engine.open()
        heard = Recorder()
        try:
            session = await engine.attach(Attach(DEFAULT_NODE, 30.0), heard)
            for hold, name in ((1, "m"), (2, "n")):
                await answer_of(
                    session.enqueue(hold, name, EPHEMERAL_LIMIT, b"", timeout=None, ephemeral=True)
                )
            members.lost, members.meanwhile = 1, asyncio.Event()
            early = session.withdraw(1)
            async with tenure.connect(url) as eye:
                assert await eye.end_session(DEFAULT_NODE, session.id)
            await heard.wait_for(lambda heard: heard.end is not None, "the end")
            members.meanwhile.set()
            assert await answer_of(early) is Withdrawn.LEFT
            with pytest.raises(SessionExpired):
                await answer_of(session.withdraw(2))
        finally:
            await engine.aclose()
