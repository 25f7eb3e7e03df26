"""When a stream is left, and when its connection too: on a virtual clock, and a peer without I/O.

A real server cannot be made to be slow by so much and no more; the peer here answers each message
after a time that the test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from tenure.engines.ydb.database import Database
from tenure.engines.ydb.members import Member
from tenure.errors import EngineUnavailable, TenureError
from tenure.testing import VirtualClock
from tenure.wire.ydb import Message, Status
from tenure.wire.ydb import SessionResponse as Response

pytestmark = pytest.mark.usefixtures("loop_factory")

WINDOW = 12.0
PATIENCE = WINDOW / 6


class Peer:
    """A server, and the way to it.

    Attributes:
        after: seconds in which each message is answered; ``None``: never.
        others: whether the other streams of its connection hear of it.
        streams: how many there have been.
        left: how many times a stream was left alone, and how many times the connection.
    """

    def __init__(self, after: float | None, *, others: bool) -> None:
        self.after = after
        self.others = others
        self.streams = 0
        self.left = {"stream": 0, "connection": 0}

    async def stream(self, wait: float) -> Conversation:
        self.streams += 1
        return Conversation(self)


class Conversation:
    """One stream."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._over = False

    async def write(self, message: Message) -> None:
        if self._peer.after is not None:
            self._loop.call_later(self._peer.after, self._answer, message)

    def _answer(self, message: Message) -> None:
        match message.WhichOneof("request"):
            case "session_start":
                answer = Response(session_started=Response.SessionStarted(session_id=7))
            case "ping":
                answer = Response(pong=Response.PingPong(opaque=message.ping.opaque))
            case "describe_semaphore":
                result = Response.DescribeSemaphoreResult(
                    req_id=message.describe_semaphore.req_id, status=Status.NOT_FOUND
                )
                answer = Response(describe_semaphore_result=result)
            case _:
                return
        self._said.put_nowait(answer)

    async def read(self) -> Message | None:
        message = await self._said.get()
        if message is None:
            raise EngineUnavailable("the connection was closed")
        return message

    def connection_active_since(self, instant: float) -> bool:
        return self._peer.others

    def cut(self) -> None:
        if not self._over:
            self._over = True
            self._peer.left["stream"] += 1
            self._said.put_nowait(None)

    def condemn(self, why: TenureError) -> None:
        self.cut()
        self._peer.left["connection"] += 1

    async def half_close(self) -> None:
        pass


class Program:
    """Whose session it is.

    Attributes:
        proofs: the instants of sending that were proven.
    """

    def __init__(self, clock: VirtualClock, peer: Peer) -> None:
        self.proofs: list[float] = []
        database = cast(Database, peer)
        self.member = Member(database, "/local/n", WINDOW, "me", b"key", clock.now, self)

    def member_started(self, member: Member) -> None:
        """Its proofs tell."""

    def member_detached(self) -> None:
        """The peer counts that."""

    def member_proven(self) -> None:
        self.proofs.append(self.member.protocol.last_proof)

    def member_refused(self, member: Member, failure: Message) -> None:
        raise AssertionError(failure)

    def member_failed(self, member: Member, error: Exception) -> None:
        """The peer counts that."""

    def member_ended(self, member: Member, failure: Message | None) -> None:
        raise AssertionError(failure)


@asynccontextmanager
async def attached(clock: VirtualClock, peer: Peer) -> AsyncIterator[Program]:
    program = Program(clock, peer)
    try:
        yield program
    finally:
        await program.member.finish()


async def test_a_connection_of_which_nothing_is_heard_is_left_while_attaching(
    clock: VirtualClock,
) -> None:
    peer = Peer(None, others=False)
    async with attached(clock, peer):
        await asyncio.sleep(0.9 * PATIENCE)
        assert peer.left == {"stream": 0, "connection": 0}
        await asyncio.sleep(0.2 * PATIENCE)
        assert peer.left == {"stream": 1, "connection": 1}


async def test_a_server_that_is_slow_to_attach_is_waited_for_if_others_hear_of_it(
    clock: VirtualClock,
) -> None:
    peer = Peer(2.5 * PATIENCE, others=True)
    async with attached(clock, peer) as program:
        await asyncio.sleep(2.6 * PATIENCE)
        assert program.member.protocol.attached
        assert (peer.streams, peer.left) == (1, {"stream": 0, "connection": 0})


async def test_who_never_answers_is_left_alone_if_others_hear_of_its_connection(
    clock: VirtualClock,
) -> None:
    peer = Peer(None, others=True)
    async with attached(clock, peer):
        await asyncio.sleep(2.9 * PATIENCE)
        assert peer.left == {"stream": 0, "connection": 0}
        await asyncio.sleep(0.2 * PATIENCE)
        assert peer.left == {"stream": 1, "connection": 0}


@pytest.mark.parametrize("others", [True, False])
async def test_a_server_that_proves_late_but_steadily_is_not_left(
    clock: VirtualClock, others: bool
) -> None:
    """There is always a proof that is awaited, and never the same one for long."""
    peer = Peer(0.9 * PATIENCE, others=others)
    async with attached(clock, peer) as program:
        await asyncio.sleep(PATIENCE)
        for _ in range(20):
            program.member.protocol.renew()
            await asyncio.sleep(PATIENCE / 2)
        assert len(program.proofs) > 15
        assert peer.left == {"stream": 0, "connection": 0}


async def test_a_server_that_ceases_to_prove_is_left_with_its_connection(
    clock: VirtualClock,
) -> None:
    peer = Peer(0.1, others=False)
    async with attached(clock, peer) as program:
        await asyncio.sleep(PATIENCE)
        peer.after = None
        program.member.protocol.renew()
        await asyncio.sleep(0.9 * PATIENCE)
        assert peer.left == {"stream": 0, "connection": 0}
        await asyncio.sleep(0.2 * PATIENCE)
        assert peer.left == {"stream": 1, "connection": 1}


@pytest.mark.no_debug  # which tells of a loop that stands still
async def test_a_loop_that_stood_still_does_not_blame_the_server(clock: VirtualClock) -> None:
    peer = Peer(0.1, others=False)
    async with attached(clock, peer) as program:
        await asyncio.sleep(PATIENCE)
        program.member.protocol.renew()
        await asyncio.sleep(0.05)
        clock.advance(3 * PATIENCE)
        await asyncio.sleep(2 * PATIENCE)
        assert len(program.proofs) == 2
        assert peer.left == {"stream": 0, "connection": 0}
