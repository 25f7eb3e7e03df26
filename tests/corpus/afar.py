"""The pains once more, across a network to a server: late answers, lost ones, half-open ways.

What the other themes ask with an engine that is slow within the program is asked here of the
engines themselves, with the real protocol on a real socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

import tenure
from tenure._client import lease
from tenure._client.client import Client
from tenure._client.request import Request
from tenure.engines import connect_engine
from tenure.engines.contract import Withdrawn
from tenure.engines.native.attachment import NativeOperationQueue, NativeWatches
from tenure.engines.native.connection import NativeConnection
from tenure.engines.native.session import NativeSession
from tenure.engines.redis.commands import Command
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.ydb.members import GroupSession
from tenure.engines.ydb.protocol import YdbProtocol
from tests.corpus.asking import leave_late
from tests.corpus.losing import believes_for_ever
from tests.corpus.rows import does_nothing, replacing, row, together
from tests.corpus.subjects import Scene, SystemClockThatSteps
from tests.engines.redis.proxy import Proxy
from tests.engines.ydb.behind import Server
from tests.primitives.helpers import is_held
from tests.server.served import served

SERVERS = ("native", "ydb")

DELAY = 0.05
"""Seconds that everything takes, in each direction, where answers are to be late."""


@row(3, replacing(Request, "withdraw_because", does_nothing), on=(*SERVERS, "dflockd"))
async def an_acquire_that_is_cancelled_before_its_late_answer_leaves_nothing(scene: Scene) -> None:
    client, network = scene.afar()
    async with client, client.session() as session:
        network.delay(DELAY)
        for share in (0.2, 0.8, 1.2, 1.8, 2.2):  # of the way there, and of the way back
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(share * DELAY):
                    lease = await session.mutex("x").lock()
                    await lease.release()
        await scene.queued("x", 0)


@row(4, replacing(Request, "leave", leave_late), on=(*SERVERS, "dflockd"))
async def a_release_that_is_cancelled_before_its_late_answer_takes_effect(scene: Scene) -> None:
    client, network = scene.afar()
    async with client, client.session() as session:
        lease = await session.mutex("x").lock()
        network.delay(DELAY)
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await scene.queued("x", 0)


class _FirstComeFirstServed(dict[int, Any]):
    """Calls that are answered in their order by whatever answer comes, as long as one waits."""

    def pop(self, rid: int, *default: Any) -> Any:
        waiting = (number for number, call in self.items() if not call.future.cancelled())
        return super().pop(next(waiting, rid), *default)


def _plant_answers_by_order(patch: pytest.MonkeyPatch) -> None:
    def begin(self: NativeConnection, *arguments: Any) -> None:
        begin_soundly(self, *arguments)
        self.calls = _FirstComeFirstServed()

    begin_soundly = NativeConnection.__init__
    patch.setattr(NativeConnection, "__init__", begin)


def _plant_answers_by_order_in_members(patch: pytest.MonkeyPatch) -> None:
    async def ask(self: GroupSession, kind: str, name: str, **fields: Any) -> Any:
        there_before = set(self.main.protocol._operations)
        try:
            return await ask_soundly(self, kind, name, **fields)
        except asyncio.CancelledError:
            for req_id in set(self.main.protocol._operations) - there_before:
                del self.main.protocol._operations[req_id]
            raise

    def answer(self: YdbProtocol, kind: str, body: Any) -> None:
        for req_id in list(self._operations):
            if self._operations[req_id].answered(kind, body):
                del self._operations[req_id]
            return

    ask_soundly = GroupSession.perform
    patch.setattr(GroupSession, "perform", ask)
    patch.setattr(YdbProtocol, "_answer", answer)


@row(
    5,
    {"native": _plant_answers_by_order, "ydb": _plant_answers_by_order_in_members},
    on=SERVERS,
    shows=("cancelled", ("others proceed",)),
)
async def the_answer_of_a_cancelled_command_goes_to_no_other(scene: Scene) -> None:
    client, network = scene.afar()
    async with client, client.session() as session:
        for limit, name in enumerate("abc", start=1):
            await session.semaphore(name).create(limit=limit)
        network.delay(DELAY)
        cancelled = asyncio.create_task(session.semaphore("a").update(b"new"))
        asked = [asyncio.create_task(session.semaphore(name).describe()) for name in "bc"]
        await asyncio.sleep(DELAY / 2)
        cancelled.cancel()
        answers = await scene.soon(asyncio.gather(*asked, return_exceptions=True))
        assert [getattr(answer, "name", None) for answer in answers] == ["b", "c"]


class _FirstWhoWaits(deque[Command]):
    """Commands that are answered in their order by whatever answer comes, as long as one waits."""

    def popleft(self) -> Command:
        for number, call in enumerate(self):
            if not _is_cancelled(call):
                del self[number]
                return call
        return super().popleft()


def _is_cancelled(call: Command) -> bool:
    """Whether a description is not waited for any more."""
    told = call.answered.args if isinstance(call.answered, partial) else ()
    return any(isinstance(each, asyncio.Future) and each.cancelled() for each in told)


def _plant_answers_by_order_on_a_wire(patch: pytest.MonkeyPatch) -> None:
    def begin(self: RedisConnection, *arguments: Any) -> None:
        begin_soundly(self, *arguments)
        self._pending = _FirstWhoWaits()

    begin_soundly = RedisConnection.__init__
    patch.setattr(RedisConnection, "__init__", begin)


@row(
    5,
    {"redis": _plant_answers_by_order_on_a_wire},
    on=("redis",),
    shows=("cancelled", ("others proceed",)),
)
async def the_late_answer_of_a_cancelled_command_goes_to_no_other(scene: Scene) -> None:
    server = urlsplit(scene.url).path
    async with Proxy(server, f"{server}.slow") as proxy:
        url = scene.url.replace(server, proxy.path)
        client = Client(connect_engine(url, scene.clock), scene.clock)
        async with client, client.session() as session:
            for limit, name in enumerate("abc", start=1):
                await session.semaphore(name).create(limit=limit)
            proxy.delay = DELAY
            asked = [asyncio.create_task(session.semaphore(name).describe()) for name in "abc"]
            await asyncio.sleep(DELAY / 2)
            asked[0].cancel()
            answers = await scene.soon(asyncio.gather(*asked[1:], return_exceptions=True))
            assert [getattr(answer, "name", None) for answer in answers] == ["b", "c"]
            proxy.delay = 0.0


def _insist(
    request: Request, answer: asyncio.Future[Withdrawn], error: BaseException | None
) -> None:
    if request.session.why is not None:
        raise request.session.error() from error
    answer.result()


@row(
    6,
    replacing(lease, "_report", _insist),
    on=SERVERS,
    seen_as=(tenure.TenureError,),  # in the place of the body's
)
async def the_bodys_error_is_raised_though_the_release_reaches_nobody(scene: Scene) -> None:
    client, network = scene.afar()
    async with client:
        session = await client.session(recovery_window=1)

        async def fail() -> None:
            async with session.mutex("x").lock():
                network.refuse()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await scene.soon(fail())
        await scene.queued("x", 0)
        network.start()


@row(7, believes_for_ever, on=SERVERS, shows=("cut off", ("loss reported", "kept")))
async def a_silence_costs_a_lease_at_its_deadline_and_not_before(scene: Scene) -> None:
    clock = scene.clock
    client, network = scene.afar()
    async with client:
        session = await client.session(recovery_window=scene.window)
        lease = await session.mutex("x").lock()
        before = lease.deadline
        network.stall()
        await asyncio.sleep(0.25 * scene.window)
        assert is_held(lease) or clock.now() >= lease.deadline  # one blip kills nobody
        network.flow()

        async def proven() -> bool:
            return lease.deadline > before or not is_held(lease)

        await scene.eventually(proven, "a proof after the silence")
        network.stall()
        while (left := lease.deadline - clock.now()) > 0:  # noqa: ASYNC110  it may still move
            await asyncio.sleep(left + 0.001)
        assert not is_held(lease)
        assert isinstance(await scene.soon(lease.wait_lost()), tenure.LeaseLost)
        network.flow()


@row(8, replacing(Request, "fail", does_nothing), on=SERVERS, shows=("cut off", ("loss reported",)))
async def a_waiter_learns_after_a_cut_that_its_session_is_over(scene: Scene) -> None:
    client, network = scene.afar()
    async with scene.client() as other, other.mutex("x").lock(), client:
        session = await client.session(description="victim", recovery_window=60)
        waiting = asyncio.create_task(session.mutex("x").lock())
        await scene.queued("x", 2)
        network.refuse()
        await scene.end_sessions("victim")
        network.start()
        with pytest.raises(tenure.SessionExpired):
            await scene.soon(waiting)


@row(
    9,
    together(believes_for_ever, replacing(NativeSession, "_expire", does_nothing)),
    on=SERVERS,
    shows=("cut off", ("one owner", "loss reported", "others proceed")),
)
async def a_leader_behind_a_half_open_connection_has_gone_when_the_next_one_leads(
    scene: Scene,
) -> None:
    client, network = scene.afar()
    async with scene.client() as other, client:
        session = await client.session(recovery_window=1)
        leadership = await session.election("x").campaign(b"old")
        following = asyncio.create_task(other.election("x").campaign(b"new"))
        await scene.queued("x", 2)
        network.stall(there=True, back=False)
        # It does not hear of its deadline: nothing but the clock says so.
        following_lease = await scene.soon(following)
        assert not is_held(leadership)
        network.flow()
        assert isinstance(await scene.soon(leadership.wait_lost()), tenure.LeaseLost)
        assert is_held(following_lease)
        assert not is_held(leadership)
        assert following_lease.fencing_token > leadership.fencing_token


def _sends_nothing_again(self: NativeOperationQueue, call: Any) -> bool:
    return False


def _forget_what_was_asked(self: YdbProtocol, session_id: int) -> None:
    if self.id:
        self._operations.clear()
    _start(self, session_id)


_start = YdbProtocol._start


@row(
    10,
    {
        "native": replacing(NativeOperationQueue, "_in_time", _sends_nothing_again),
        "ydb": replacing(YdbProtocol, "_start", _forget_what_was_asked),
    },
    on=SERVERS,
    shows=("cut off", ("nothing leaks",)),
)
async def a_contender_whose_answer_was_lost_leaves_when_it_gives_up(scene: Scene) -> None:
    client, network = scene.afar()
    async with client:
        session = await client.session(recovery_window=60)
        network.lose_answers()
        contending = asyncio.create_task(session.mutex("x").lock())
        await scene.queued("x", 1)  # it has it, and has not been told
        contending.cancel()
        network.refuse()
        network.start()
        await scene.queued("x", 0)
        await scene.soon(asyncio.wait([contending]))
        assert session.state != "expired"


@contextlib.contextmanager
def _a_server_with(clock: SystemClockThatSteps, like: str) -> Iterator[str]:
    """One more server, of the same kind, with a clock that can be set."""
    store = f"memory://{like.rpartition(':')[2].replace('/', '-')}-with-a-clock"
    if like.startswith("tenure:"):
        with served(store, clock=clock) as listener:
            yield listener.address
    else:
        server = Server(store, clock=clock)
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


@row(
    13,
    replacing(SystemClockThatSteps, "now", SystemClockThatSteps.wall),
    on=SERVERS,
    shows=("wall clock", ("kept", "tokens rise")),
)
async def a_step_of_the_servers_clock_ends_nothing(scene: Scene) -> None:
    clock = SystemClockThatSteps()
    with _a_server_with(clock, scene.url) as url:
        async with tenure.connect(url) as client, client.session(recovery_window=3) as session:
            lease = await session.mutex("x").lock()
            for step in (1e6, -2e6):
                clock.set_wall(clock.wall() + step)
                renewed = scene.clock.now() + 3 - 0.15  # unless the server disowns its proof

                async def so(renewed: float = renewed) -> bool:
                    return lease.deadline > renewed

                await scene.eventually(so, "a renewal that was asked for after the step")
                await session.semaphore(f"{step:g}").create(limit=1)
                assert is_held(lease)
                found = await session.semaphore("x").describe(owners=True)
                assert [owner.order_id for owner in found.owners] == [lease.fencing_token]
            await lease.release()
            again = await scene.soon(session.mutex("x").lock())
            assert again.fencing_token > lease.fencing_token


def _prove_from_arrival(self: NativeSession, at: float) -> None:
    _prove(self, self._now())


_prove = NativeSession._prove


def _prove_members_from_arrival(self: GroupSession) -> None:
    _member_proven(self)
    if not self.over:
        self.events.proven(self.now())


_member_proven = GroupSession.member_proven


@row(
    14,
    {
        "native": replacing(NativeSession, "_prove", _prove_from_arrival),
        "ydb": replacing(GroupSession, "member_proven", _prove_members_from_arrival),
    },
    on=SERVERS,
)
async def a_slow_network_extends_no_lease(scene: Scene) -> None:
    window, way = 4.0, 0.1
    client, network = scene.afar()
    async with client, client.session():
        network.delay(way)
        session = await client.session(recovery_window=window)
        lease = await session.mutex("x").lock()
        for _ in range(40):  # longer than it takes to renew
            latest = scene.clock.now() - 2 * way + window - 0.1  # asked two ways ago, less a margin
            assert lease.deadline <= latest
            await asyncio.sleep(0.05)
        assert is_held(lease)
        network.delay(0)


@row(
    24,
    {
        "native": replacing(NativeWatches, "resume", does_nothing),
        "ydb": replacing(YdbProtocol, "_start", _forget_what_was_asked),
    },
    on=SERVERS,
)
async def a_watch_ends_in_the_true_state_though_its_connection_is_cut(scene: Scene) -> None:
    client, network = scene.afar()
    async with scene.client() as other, client:
        config = other.semaphore("config")
        await config.create(limit=1, data=b"0")
        session = await client.session(recovery_window=60)
        seen: list[bytes] = []

        async def until(last: bytes) -> None:
            async with session.semaphore("config").watch(data=True) as states:
                async for state in states:
                    seen.append(state.data)
                    if state.data == last:
                        return

        watching = asyncio.create_task(until(b"9"))

        async def is_up_to_date() -> bool:
            return seen[-1:] == [state]

        for number in range(10):
            state = b"%d" % number
            cut = number in {3, 6}
            if cut:
                network.refuse()  # and this is changed while nobody is told
            await config.update(state)
            if cut:
                network.start()
            if cut or number == 0:
                await scene.eventually(is_up_to_date, "the state after the cut")
        await scene.soon(watching)
        assert seen == sorted(seen)
