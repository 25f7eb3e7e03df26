"""Requests while transactions have no answer, although the watches work."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Answer, Attach, Enqueued, Place, Withdrawn
from tenure.engines.etcd import wire
from tenure.engines.etcd.answers import Lost
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.members import Members
from tenure.engines.etcd.url import EtcdUrl, parse
from tenure.model import DEFAULT_NODE, EPHEMERAL_LIMIT
from tenure.testing.program import answer_of
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import PATIENCE, a_prefix

_TRIES = 100


class _Stuck(Members):
    """Members that answer no transaction, as with a disk that does not answer.

    Attributes:
        stuck: whether they do.
    """

    def __init__(self, address: EtcdUrl) -> None:
        super().__init__(address)
        self.stuck = False

    async def call(self, method: str, request: bytes, timeout: float) -> bytes:
        if method == wire.TXN and self.stuck:
            raise Lost("the test lost it")
        return await super().call(method, request, timeout)


@pytest.mark.parametrize("name", ["m", "another"])
async def test_requests_that_are_withdrawn_while_no_transaction_is_answered_are_dropped(
    name: str,
) -> None:
    with a_prefix() as url:
        address = parse(f"{url}&socket_timeout=0.1")
        members = _Stuck(address)
        engine = EtcdEngine(address, SystemClock(), members)
        await engine.open()
        try:
            session = await engine.attach(Attach(DEFAULT_NODE, 30.0), Recorder())
            numbers = itertools.count(1)

            def enqueue(name: str) -> tuple[int, Answer[Enqueued]]:
                number, whole = next(numbers), EPHEMERAL_LIMIT
                answer = session.enqueue(number, name, whole, b"", timeout=None, ephemeral=True)
                return number, answer

            members.stuck = True
            _, waiting = enqueue("m")
            async with asyncio.timeout(PATIENCE):
                while session.in_contact:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            before = len(engine.tasks)
            for _ in range(_TRIES):
                number, placed = enqueue(name)
                await asyncio.sleep(0)
                assert session.withdraw(number) is Withdrawn.LEFT
                assert await answer_of(placed) == Enqueued(Place.REFUSED, None)
            assert len(engine.tasks) < before + _TRIES / 2
            members.stuck = False
            async with asyncio.timeout(PATIENCE):
                assert (await answer_of(waiting)).place is Place.GRANTED
                _, last = enqueue(name)
                expected = Place.WAITING if name == "m" else Place.GRANTED
                assert (await answer_of(last)).place is expected
        finally:
            await engine.aclose()
