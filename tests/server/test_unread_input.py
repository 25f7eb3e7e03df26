"""Input that is received and not carried out: its budget, its time, and that of strangers."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure.errors import InvalidArgument
from tenure.server.auth import Authenticator
from tenure.server.budget import InputBudget, UnreadInput
from tenure.server.limits import LimitReached, Limits
from tenure.server.ydb.calls import GrpcCall
from tenure.testing import VirtualClock
from tenure.wire.messages import VERSION, Bye, Hello, Ping
from tests.server.dflockd import talking as dflockd
from tests.server.talking import Direct, linked, serving
from tests.server.test_native_abuse import frame, is_well, lines

pytestmark = pytest.mark.usefixtures("loop_factory")

KIB = 1024
SMALL = Limits(
    data_bytes=4 * KIB,
    message_bytes=72 * KIB,
    identity_input_bytes=2 * 72 * KIB,
    input_bytes=3 * 72 * KIB,
)


def test_unread_input_counts_for_its_owner_and_for_the_server() -> None:
    budget = InputBudget(SMALL)
    one, same, other = (UnreadInput(budget) for _ in range(3))
    for each, owner in ((one, "a"), (same, "a"), (other, "b")):
        each.greeted(owner)
    one.set(140 * KIB)
    with pytest.raises(LimitReached, match="identity_input_bytes"):
        same.set(10 * KIB)
    with pytest.raises(LimitReached, match="limit input_bytes"):
        other.set(80 * KIB)
    assert (same.size, other.size) == (0, 0)
    one.set(0)
    same.set(10 * KIB)
    other.set(80 * KIB)
    for each in (one, same, other):
        each.set(0)
    assert budget.total == 0


def test_strangers_share_one_budget_until_they_are_greeted() -> None:
    budget = InputBudget(SMALL)
    one, other = UnreadInput(budget), UnreadInput(budget)
    one.set(140 * KIB)
    with pytest.raises(LimitReached, match="identity_input_bytes"):
        other.set(10 * KIB)
    other.set(4 * KIB)  # so little is not counted: an honest client gets through
    one.greeted("a")
    other.set(10 * KIB)


@pytest.mark.parametrize(
    "wrong", [{"identity_input_bytes": 1 << 20}, {"input_bytes": 1 << 20}, {"message_time": 0.0}]
)
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]


# The native protocol


def begun(size: int) -> bytes:
    """A frame that lacks its last byte."""
    return struct.pack(">I", size) + bytes(size - 1)


async def test_a_message_that_does_not_come_whole_in_time_ends_the_connection(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(clock=clock) as listener, linked(listener) as other:
        client = Direct(listener)
        await client.greet()
        client.write(begun(1000)[:500])
        for _ in range(40):
            if client.way.closed:
                break
            await asyncio.sleep(1)
            client.write(b"\x00")  # a byte now and then does not help
            other.say(Ping())
        assert client.way.closed
        assert "has not come whole within 30 s" in (await client.hear(Bye)).error.message
        await asyncio.sleep(1)  # the last answers arrive
        other.pass_over()
        await other.attach()
        await is_well(other)
    assert any("message_time" in each for each in lines(caplog))


async def test_a_client_that_always_has_begun_the_next_message_stays(clock: VirtualClock) -> None:
    async with serving(clock=clock) as listener, linked(listener) as client:
        ping = frame(Ping())
        client.write(ping[:3])
        for _ in range(100):
            await asyncio.sleep(1)
            client.write(ping[3:] + ping[:3])
        assert not client.way.closed


async def test_unfinished_frames_of_one_source_have_a_budget_over_all_connections(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(clock=clock, limits=SMALL) as listener:
        clients = [Direct(listener) for _ in range(3)]
        for client in clients:
            await client.greet()
            client.write(begun(70 * KIB))
        assert [each.way.closed for each in clients] == [False, False, True]
        bye = await clients[2].hear(Bye)
        assert "identity_input_bytes" in bye.error.message
        assert bye.again  # the client may return
        clients[0].write(b"\x00")  # which is no message, so that this one ends, too
        for client in clients:
            client.lose()
        assert listener.context.input.total == 0
    assert any("identity_input_bytes" in each for each in lines(caplog))


async def test_after_a_wrong_token_nothing_is_read(clock: VirtualClock) -> None:
    authenticator = Authenticator({"a token that nobody guesses": "someone"})
    async with serving(clock=clock, authenticator=authenticator) as listener:
        client = Direct(listener)
        hello = frame(Hello(VERSION, VERSION, [], "a guess", b"program"))
        client.write(hello + frame(Ping()) * 10_000)
        assert not client.is_read()
        await asyncio.sleep(1)
        assert "token" in (await client.hear(Bye)).error.message
        assert client.way.closed
        assert listener.context.input.total == 0


async def test_a_refused_client_is_read_in_its_turns_until_it_is_sent_away(
    clock: VirtualClock,
) -> None:
    authenticator = Authenticator({"a token that nobody guesses": "someone"})
    async with serving(clock=clock, authenticator=authenticator) as listener:
        client = Direct(listener)
        client.say(Hello(VERSION, VERSION, [], "a guess", b"program"))
        for _ in range(3):
            client.write(b"\x00")
            assert not client.is_read()
            await asyncio.sleep(0.01)
            assert client.is_read()
        assert "token" in (await client.hear(Bye)).error.message
        assert client.way.closed


# dflockd's protocol


async def test_after_a_wrong_token_nothing_is_read_of_dflockds_clients(
    clock: VirtualClock,
) -> None:
    authenticator = Authenticator({"a token that nobody guesses": "someone"})
    async with dflockd.serving(clock, authenticator=authenticator) as listener:
        client = dflockd.Client(listener)
        client.say(b"auth\n_\na guess\n" * 5000)
        assert await client.hears() == "error_auth\n"
        assert not client.reading
        assert listener.context.input.total == 0
        await asyncio.sleep(1)
        assert client.is_closed()


# YDB's API


class Acknowledged:
    """The connection of a call that is not read yet, as the call sees it."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(limits=Limits())
        self.choked: set[GrpcCall] = set()
        self.is_open, self.overloaded = True, False
        self.acknowledged = self.queued = self.partial = 0
        self.share = self

    used_up = False

    def acknowledge(self, _: int, size: int) -> None:
        self.acknowledged += size

    def count_queued(self, size: int) -> None:
        self.queued += size

    def account(self, size: int) -> None:
        self.partial += size

    def postpone(self, calls: Iterable[GrpcCall]) -> None:
        for each in calls:
            each.more()

    def decide(self, _: GrpcCall) -> None: ...


class Messages:
    """A receiver of a call's messages."""

    choked = False

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.received = self.got.append


def unread_call(connection: Acknowledged) -> GrpcCall:
    return GrpcCall(cast(Any, connection), cast(Any, SimpleNamespace(id=1)), [])


async def test_unread_frames_of_a_byte_cost_no_more_memory_than_their_bytes() -> None:
    call, size = unread_call(connection := Acknowledged()), 64 * KIB
    frames = [bytes([each % 256]) for each in range(size)]
    tracemalloc.start()
    for each in frames:
        call.add(each, 1)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert connection.queued == size
    assert grown < 2 * size
    assert call.unacked_size() == size
    assert connection.queued == 0


@given(
    st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9)), max_size=40),
)
async def test_messages_come_whole_and_all_their_bytes_are_acknowledged(
    sizes: list[int], cuts: list[tuple[int, int]]
) -> None:
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    stream = b"".join(b"\0" + struct.pack(">I", len(each)) + each for each in messages)
    call, receiver = unread_call(connection := Acknowledged()), Messages()
    sent = 0
    for number, (size, padding) in enumerate([*cuts, (len(stream), 3)]):
        if number == len(cuts) // 2:
            call.listen(cast(Any, receiver))
        piece, stream = stream[:size], stream[size:]
        call.add(piece, len(piece) + padding)
        sent += len(piece) + padding
        assert connection.acknowledged <= sent
    assert receiver.got == messages
    assert connection.acknowledged == sent
    assert (connection.queued, connection.partial) == (0, 0)
    call.closed()
