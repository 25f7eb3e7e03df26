"""Costly reads: few at a time for each client, in turn, in slices, and gone with their client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tenure.engines.contract import Attach as StoreAttach
from tenure.engines.memory import MemoryEngine
from tenure.errors import AuthenticationFailed, SemaphoreNotFound
from tenure.model import RequestDescription, SemaphoreDescription, SessionDescription
from tenure.server.admission import Source
from tenure.server.auth.identity import ANONYMOUS, Identity
from tenure.server.dflockd.listener import Deaf
from tenure.server.limits import Limits
from tenure.server.reads import SLICE, Places, Reader, ReadSchedule, converted, reader_of
from tenure.testing import VirtualClock
from tenure.wire.messages import (
    DescribeSemaphore,
    Enqueue,
    ListSemaphores,
    ListSessions,
    Ping,
    Placed,
    Pong,
    SemaphoreDescribed,
    SemaphoresListed,
    SessionsListed,
)
from tests.server.talking import linked, serving

pytestmark = pytest.mark.usefixtures("loop_factory")


class Slices:
    """Slices under way, as they begin and end.

    Attributes:
        begun: names of those that have begun, in order.
        most: how many were under way at a time, at the most.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.most = 0
        self._under_way = 0

    async def slice(self, reader: Reader, name: str, seconds: float = 0.0) -> None:
        """A slice, which waits for its store for so long."""
        async with reader.turn():
            await self._wait(name, seconds)

    async def describe(self, reader: Reader, requests: int) -> None:
        """A description of so many waiters, for which the store takes a second."""

        async def read() -> SemaphoreDescription:
            await self._wait("", 1.0)
            return description(requests)

        await reader.describe(read)

    async def _wait(self, name: str, seconds: float) -> None:
        self.begun.append(name)
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await asyncio.sleep(seconds)
        self._under_way -= 1


def description(requests: int) -> SemaphoreDescription:
    """A semaphore with so many waiters."""
    waiter = RequestDescription(1, 1, 1, b"")
    return SemaphoreDescription("name", b"", 1, 0, False, (), (waiter,) * requests)


async def test_a_client_has_one_slice_at_a_time_on_all_its_connections() -> None:
    reads, slices = ReadSchedule(), Slices()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            reader = Reader(reads, "client")
            tasks.create_task(slices.slice(reader, "", 1.0))
    assert slices.most == 1
    assert reads.waiting == 0


async def test_small_descriptions_of_a_client_are_read_side_by_side(clock: VirtualClock) -> None:
    reads, slices, begun = ReadSchedule(), Slices(), clock.now()
    async with asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(slices.describe(Reader(reads, f"client {number % 2}"), 2))
    assert slices.most == 2 * 8
    assert clock.now() - begun < 12  # one after the other, each client's take 50 s
    assert reads.waiting == 0


async def test_a_client_that_reads_long_descriptions_reads_one_at_a_time() -> None:
    reads, slices = ReadSchedule(), Slices()
    reader = Reader(reads, "client")
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(slices.describe(reader, 300))
    assert slices.most == 1


async def test_a_long_description_takes_back_what_small_ones_allowed() -> None:
    reads, slices, after = ReadSchedule(), Slices(), Slices()
    reader = Reader(reads, "client")
    async with asyncio.TaskGroup() as tasks:
        small = [tasks.create_task(slices.describe(reader, 1)) for _ in range(20)]
        await asyncio.wait(small)
        await slices.describe(reader, 300)
        for _ in range(5):
            tasks.create_task(after.describe(reader, 300))
    assert (slices.most, after.most) == (8, 1)


async def test_brief_descriptions_do_not_wait_for_other_work(clock: VirtualClock) -> None:
    reads, begun = ReadSchedule(), list[float]()
    reader, other = Reader(reads, "client"), Reader(reads, "other")

    async def describe(requests: int) -> None:
        async def read() -> SemaphoreDescription:
            begun.append(clock.now())
            await asyncio.sleep(0)
            return description(requests)

        await reader.describe(read)

    async def busy() -> None:
        async with other.turn():
            clock.advance(0.04)  # it computes

    await describe(16)
    computing = asyncio.create_task(busy())
    await asyncio.sleep(0)
    computed = clock.now()
    await describe(16)
    await describe(17)  # the last one that does not wait
    assert begun[1:] == [computed] * 2
    await computing
    await busy()
    await describe(16)
    assert begun[-1] > computed + 0.07  # after as much time as the other one took
    assert reads.waiting == 0


async def test_brief_descriptions_begin_in_the_same_iteration_of_the_loop() -> None:
    reads, begun = ReadSchedule(), [0]
    reader = Reader(reads, "client")

    async def read() -> SemaphoreDescription:
        begun[-1] += 1
        await asyncio.sleep(1.0)
        return description(1)

    for _ in range(8):
        await reader.describe(read)
    begun.append(0)
    reading = [asyncio.create_task(reader.describe(read)) for _ in range(20)]
    await asyncio.sleep(0)
    assert begun[-1] == 8
    await asyncio.sleep(1.5)
    assert begun[-1] == 16
    await asyncio.wait(reading)


async def test_few_brief_descriptions_begin_in_an_iteration_of_the_loop() -> None:
    reads, begun = ReadSchedule(), [0]
    reader = Reader(reads, "client")

    async def read() -> SemaphoreDescription:
        begun[-1] += 1
        return description(1)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(100):
            tasks.create_task(reader.describe(read))
        while sum(begun) < 100:
            await asyncio.sleep(0)
            begun.append(0)
    assert max(begun) == 8
    assert reads.waiting == 0


async def test_descriptions_of_what_is_missing_are_read_side_by_side() -> None:
    reads, begun = ReadSchedule(), 0

    async def fail() -> SemaphoreDescription:
        nonlocal begun
        begun += 1
        await asyncio.sleep(1.0)
        raise SemaphoreNotFound("there is none")

    reader = Reader(reads, "client")
    missing = [asyncio.create_task(reader.describe(fail)) for _ in range(30)]
    await asyncio.sleep(3.5)
    assert begun == 1 + 2 + 4 + 8
    await asyncio.wait(missing)
    assert all(isinstance(each.exception(), SemaphoreNotFound) for each in missing)


async def test_a_description_that_fails_or_is_cancelled_leaves_its_place() -> None:
    reads = ReadSchedule()
    reader = Reader(reads, "client")

    async def fail() -> SemaphoreDescription:
        raise SemaphoreNotFound("there is none")

    with pytest.raises(SemaphoreNotFound):
        await reader.describe(fail)
    waiting = [asyncio.create_task(Slices().describe(reader, 1)) for _ in range(3)]
    await asyncio.sleep(0.5)
    for each in waiting[:2]:
        each.cancel()
    await asyncio.wait(waiting)
    assert not waiting[2].cancelled()
    assert reads.waiting == 0


async def test_slices_of_two_clients_wait_for_their_stores_at_the_same_time() -> None:
    reads, slices = ReadSchedule(), Slices()
    async with asyncio.TaskGroup() as tasks:
        for client in "ab":
            tasks.create_task(slices.slice(Reader(reads, client), client, 1.0))
    assert slices.most == 2


async def test_clients_and_their_connections_take_turns() -> None:
    reads, slices = ReadSchedule(), Slices()
    greedy, second, other = (Reader(reads, each) for each in ("a", "a", "b"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(slices.slice(greedy, "first", 1.0))
        await asyncio.sleep(0.1)
        for _ in range(3):
            tasks.create_task(slices.slice(greedy, "greedy", 1.0))
        tasks.create_task(slices.slice(second, "second", 1.0))
        tasks.create_task(slices.slice(other, "other", 1.0))
    assert slices.begun == ["first", "other", "greedy", "second", "greedy", "greedy"]


async def test_at_most_one_slice_begins_in_an_iteration_of_the_loop() -> None:
    reads, begun = ReadSchedule(), [0]

    async def read(reader: Reader) -> None:
        async with reader.turn():
            begun[-1] += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(read(Reader(reads, f"client {number}")))
        while sum(begun) < 20:
            await asyncio.sleep(0)
            begun.append(0)
    assert max(begun) == 1


async def test_other_work_has_as_much_time_as_a_slice_took(clock: VirtualClock) -> None:
    reads, begun = ReadSchedule(), list[float]()

    async def read(reader: Reader) -> None:
        async with reader.turn():
            begun.append(clock.now())
            clock.advance(0.01)  # it computes

    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(read(Reader(reads, f"client {number}")))
    assert [later - earlier for earlier, later in pairwise(begun)] == [
        pytest.approx(0.02, abs=0.002)
    ] * 2


async def test_a_slice_that_is_cancelled_leaves_its_place() -> None:
    reads, slices = ReadSchedule(), Slices()
    tasks = [
        asyncio.create_task(slices.slice(Reader(reads, "client"), str(number), 1.0))
        for number in range(4)
    ]
    await asyncio.sleep(0.5)
    tasks[1].cancel()
    await asyncio.sleep(0.6)  # the third one has its turn
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert slices.begun == ["0", "2", "3"]
    assert reads.waiting == 0


@pytest.mark.parametrize("iterations", range(4))
async def test_a_turn_that_comes_with_a_cancellation_goes_to_the_next(iterations: int) -> None:
    reads, slices = ReadSchedule(), Slices()
    first, second, third = (
        asyncio.create_task(slices.slice(Reader(reads, "client"), name, 0.0)) for name in "123"
    )
    for _ in range(iterations):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second, third])
    assert slices.begun[-1] == "3"
    assert reads.waiting == 0


async def test_a_long_sequence_is_converted_in_slices() -> None:
    reads = ReadSchedule()
    reader = Reader(reads, "client")
    assert await converted(reader, range(3 * SLICE + 1), str) == [
        str(each) for each in range(3 * SLICE + 1)
    ]


def test_a_client_is_an_identity_or_a_source() -> None:
    reads, here, there = ReadSchedule(), Source("10.0.0.1"), Source("10.0.0.2")
    token = Identity("billing", "token")
    clients = {
        name: reader_of(reads, identity, source)._client
        for name, identity, source in (
            ("token here", token, here),
            ("token there", token, there),
            ("nobody here", ANONYMOUS, here),
            ("nobody there", ANONYMOUS, there),
        )
    }
    assert clients["token here"] == clients["token there"]
    assert len(set(clients.values())) == 3


async def test_sessions_are_attached_in_turn_once_one_was_refused() -> None:
    reads = ReadSchedule()
    honest, guessing = Reader(reads, "client"), Reader(reads, "client")
    with pytest.raises(AuthenticationFailed):
        async with guessing.attaching_session():
            raise AuthenticationFailed("another key")

    async def attach(reader: Reader) -> None:
        async with reader.attaching_session():
            pass

    async with asyncio.TaskGroup() as tasks, Reader(reads, "client").turn():
        await attach(honest)
        waits = tasks.create_task(attach(guessing))
        await asyncio.sleep(1)
        assert reads.waiting == 1
        assert not waits.done()
    assert reads.waiting == 0


async def test_few_sessions_of_a_connection_are_attached_at_once() -> None:
    reads, attaching = ReadSchedule(), 0
    reader = Reader(reads, "client")

    async def attach() -> None:
        nonlocal attaching
        async with reader.attaching_session():
            attaching += 1
            await asyncio.sleep(10)

    async with asyncio.TaskGroup() as tasks:
        async with Reader(reads, "client").turn():
            for _ in range(100):
                tasks.create_task(attach())
            await asyncio.sleep(1)
            assert (attaching, reads.waiting) == (32, 68)
        await asyncio.sleep(1)
        assert attaching == 100


async def test_few_sessions_begin_at_a_time_and_all_do() -> None:
    reads, beginning, most, begun = ReadSchedule(), 0, 0, 0

    async def begin(reader: Reader) -> None:
        nonlocal beginning, most, begun
        async with reader.opening_session():
            beginning += 1
            most = max(most, beginning)
            await asyncio.sleep(1)
            beginning -= 1
            begun += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            reader = Reader(reads, "client")
            for _ in range(100):
                tasks.create_task(begin(reader))
    assert begun == 400
    assert most == 64


@pytest.mark.parametrize("kind", ["opening_session", "looking_up_session"])
async def test_sessions_of_a_client_do_not_wait_for_all_those_of_another(
    clock: VirtualClock, kind: str
) -> None:
    reads, begun = ReadSchedule(), clock.now()

    async def attach(reader: Reader) -> None:
        async with getattr(reader, kind)():
            await asyncio.sleep(1)

    greedy = [Reader(reads, "greedy") for _ in range(20)]
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(attach(each)) for each in greedy for _ in range(32)]
        await asyncio.sleep(0.1)
        await attach(Reader(reads, "other"))
        assert clock.now() - begun == pytest.approx(2, abs=0.1)
        assert sum(not each.done() for each in waiting) >= 500
    assert clock.now() - begun < 12


async def test_places_of_cancelled_sessions_go_to_the_next() -> None:
    places, taken = Places(1), list[int]()

    async def take(number: int) -> None:
        async with places.taken("client", "connection"):
            taken.append(number)

    async with places.taken("client", "connection"):
        tasks = [asyncio.create_task(take(number)) for number in range(3)]
        await asyncio.sleep(1)
        tasks[0].cancel()  # while it waits
        await asyncio.wait(tasks[:1])
    tasks[1].cancel()  # at the moment of its turn
    await asyncio.wait(tasks)
    assert taken == [2]
    async with asyncio.timeout(1), places.taken("another", "connection"):
        pass


async def test_hundreds_of_sessions_return_within_seconds(clock: VirtualClock) -> None:
    reads, begun = ReadSchedule(), clock.now()

    async def attach(reader: Reader) -> None:
        async with reader.attaching_session(), reader.looking_up_session():
            await asyncio.sleep(0.1)

    readers = [Reader(reads, "client") for _ in range(20)]
    async with asyncio.TaskGroup() as tasks:
        for number in range(600):
            tasks.create_task(attach(readers[number % 20]))
    assert clock.now() - begun < 1.5


# The native protocol


class Counting(MemoryEngine):  # a store without pages
    """A store that takes a second for a list.

    Attributes:
        lists: how many it was asked for.
        most: how many at a time.
    """

    lists = most = _now = 0

    def pages(self) -> None:  # type: ignore[override]  # the memory engine has them
        return None

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        self.lists += 1
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(1)
            return await super().list_sessions(path)
        finally:
            self._now -= 1


async def test_lists_of_a_client_are_made_one_at_a_time_and_others_are_served(
    clock: VirtualClock,
) -> None:
    engine = Counting("", clock)
    await engine.open()
    async with serving(engine=engine) as listener, linked(listener) as greedy:
        greedy.say(*(ListSessions(rid, "/default") for rid in range(1, 1001)))
        assert not greedy.is_read()
        async with linked(listener) as other:
            other.say(Ping())
            await other.hear(Pong)
            await other.attach()
        await asyncio.sleep(10.5)
        assert len([each for each in greedy.heard if isinstance(each, SessionsListed)]) == 10
        assert engine.most == 1
    await asyncio.sleep(5)
    assert engine.lists == 11
    assert listener.context.reads.waiting == 0
    await engine.aclose()


async def test_a_long_list_is_told_in_parts_that_are_made_when_they_are_read(
    clock: VirtualClock,
) -> None:
    engine = MemoryEngine("", clock)
    await engine.open()
    for _ in range(2 * SLICE + 50):
        await engine.attach(StoreAttach("/default", 1000.0), Deaf())
    async with serving(engine=engine) as listener, linked(listener) as client:
        client.reads = False
        client.say(ListSessions(1, "/default"))
        await asyncio.sleep(1)
        client.read_again()
        parts = [await client.hear(SessionsListed) for _ in range(3)]
        assert [len(each.sessions) for each in parts] == [SLICE, SLICE, 50]
        assert [each.more for each in parts] == [True, True, False]
        assert len({each.id for part in parts for each in part.sessions}) == 2 * SLICE + 50
    await engine.aclose()


async def test_a_list_of_large_semaphores_is_told_in_parts_that_no_limit_cuts_off(
    clock: VirtualClock,
) -> None:
    engine, size = MemoryEngine("", clock), 2**20
    await engine.open()
    session = await engine.attach(StoreAttach("/default", 1000.0), Deaf())
    for number in range(20):
        await session.create_semaphore(f"s{number}", 1, bytes(size), exist_ok=False)
    limits = Limits()
    assert 20 * size > limits.output_bytes
    async with serving(engine=engine, limits=limits) as listener, linked(listener) as client:
        client.say(ListSemaphores(1, "/default", False, False))
        found, more = 0, True
        while more:
            part = await client.hear(SemaphoresListed)
            found, more = found + len(part.semaphores), part.more
        assert found == 20
    await engine.aclose()


async def test_a_long_queue_is_described_in_slices(clock: VirtualClock) -> None:
    engine = MemoryEngine("", clock)
    await engine.open()
    async with serving(engine=engine) as listener, linked(listener) as client:
        await client.attach()
        for hold in range(1, SLICE + 100):
            client.say(Enqueue(client.next_rid(), 1, hold, "m", 2**64 - 1, b"", None, True))
            await client.hear(Placed)
        client.say(DescribeSemaphore(client.next_rid(), 1, "m", True, True))
        found = (await client.hear(SemaphoreDescribed)).semaphore
        assert len(found.owners) == 1
        assert len(found.waiters) == SLICE + 98
        assert [each.order_id for each in found.waiters] == sorted(
            each.order_id for each in found.waiters
        )
    await engine.aclose()
