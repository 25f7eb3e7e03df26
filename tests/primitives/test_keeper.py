# ruff: noqa: ASYNC251, PT012  the loop is to be stalled; what raises is a block, with its body
"""Renewal that a busy event loop cannot starve, and a wedged program cannot have for ever.

The first part runs on virtual time, and calls what the thread calls. The second has real threads
and real time, and stalls the loop in earnest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import tenure
from tenure import events
from tenure._client import client_core
from tenure._client.client_core import Keeper
from tenure.background import BackgroundThread
from tenure.clock import SystemClock
from tenure.errors import LeaseLost
from tenure.testing.clock import VirtualClock, VirtualLoop
from tests.guarantees import MEMORY, guarantee
from tests.primitives.helpers import for_ever, turns

ERRORS = (OSError("too many open files"), MemoryError(), RuntimeError("no"))


class Fake:
    """A session, as a keeper sees it; renewals are answered at once while `answering`."""

    def __init__(self, clock: VirtualClock, window: float = 9.0, max_stall: float = 20.0) -> None:
        self.clock = clock
        self.span = window
        self.max_stall = max_stall
        self.proof = self.asked = clock.now()
        self.answering = True
        self.renewals: list[float] = []
        self.lapses = 0
        self.kept_by: Keeper | None = None

    @property
    def renew_interval(self) -> float:
        return self.span / 3

    @property
    def renew_at(self) -> float:
        return max(self.proof + self.span / 3, self.asked + self.span / 12)

    @property
    def deadline(self) -> float:
        return self.proof + self.span

    def renew(self) -> None:
        self.asked = self.clock.now()
        self.renewals.append(self.asked)
        if self.answering:
            self.proof = self.asked

    def lapse(self) -> None:
        self.lapses += 1
        if self.kept_by is not None:
            self.kept_by.discard(self)


@pytest.fixture
def loop_factory(
    clock: VirtualClock, request: pytest.FixtureRequest
) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if request.node.get_closest_marker("no_debug") is not None:
        return None
    return lambda: VirtualLoop(clock)


def make(clock: VirtualClock, stalls: list[float] | None = None) -> Keeper:
    loop = asyncio.get_running_loop()
    return Keeper(clock, loop, (stalls if stalls is not None else []).append)


# On the loop


async def test_the_loop_renews_when_it_is_due(clock: VirtualClock) -> None:
    kept, session = make(clock), Fake(clock)
    kept.add(session)
    await asyncio.sleep(9.5)
    assert session.renewals == pytest.approx([1003, 1006, 1009])
    await kept.aclose()
    await asyncio.sleep(10)
    assert len(session.renewals) == 3
    kept.reschedule()  # changes nothing any more
    await asyncio.sleep(10)
    assert len(session.renewals) == 3
    await kept.aclose()


async def test_what_is_not_answered_is_asked_again_until_the_deadline(clock: VirtualClock) -> None:
    kept, session = make(clock), Fake(clock)
    session.answering = False
    session.kept_by = kept
    kept.add(session)
    await asyncio.sleep(20)
    assert session.renewals == pytest.approx([1003 + 0.75 * n for n in range(8)])
    assert session.lapses == 1
    await kept.aclose()


async def test_several_sessions_have_their_own_times(clock: VirtualClock) -> None:
    kept, quick, slow = make(clock), Fake(clock, 3.0), Fake(clock, 30.0)
    kept.add(quick)
    kept.add(slow)
    await asyncio.sleep(10.5)
    assert (len(quick.renewals), len(slow.renewals)) == (10, 1)
    kept.discard(quick)
    kept.discard(quick)
    await asyncio.sleep(10)
    assert (len(quick.renewals), len(slow.renewals)) == (10, 2)
    await kept.aclose()


async def test_a_session_more_is_not_a_look_at_all_the_others(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def deadline(session: Fake) -> float:
        nonlocal looks
        looks += 1
        return session.proof + session.span

    monkeypatch.setattr(Fake, "deadline", property(deadline))
    kept = make(clock)
    first = Fake(clock)
    kept.add(first)
    for _ in range(100):
        kept.add(Fake(clock))
    assert looks < 400
    soonest = Fake(clock, window=0.6)
    kept.add(soonest)
    await asyncio.sleep(0.5)
    assert soonest.renewals == pytest.approx([1000.2, 1000.4])
    await asyncio.sleep(3)
    assert len(first.renewals) == 1
    await kept.aclose()


async def test_a_deadline_that_comes_nearer_is_seen_when_the_keeper_is_told(
    clock: VirtualClock,
) -> None:
    kept, session = make(clock), Fake(clock, 9.0)
    kept.add(session)
    session.span = 1.5
    kept.reschedule()
    await asyncio.sleep(0.6)
    assert session.renewals == pytest.approx([1000.5])
    await kept.aclose()


async def test_the_end_of_a_suspension_is_noticed_within_a_second(clock: VirtualClock) -> None:
    kept, session = make(clock), Fake(clock, 900.0)
    session.kept_by = kept
    kept.add(session)
    await turns(2)
    clock.advance(3600)
    await asyncio.sleep(1)
    assert session.lapses == 1
    await kept.aclose()


async def test_on_virtual_time_there_is_no_thread(clock: VirtualClock) -> None:
    kept = make(clock)
    kept.add(Fake(clock))
    assert kept._thread is None
    await kept.aclose()


# What the thread does


async def test_the_thread_leaves_the_loop_a_head_start(clock: VirtualClock) -> None:
    kept, session = make(clock), Fake(clock)
    clock.advance(3.7)
    assert kept._watch_sessions([session]) == pytest.approx(0.05)
    assert session.renewals == []
    clock.advance(0.05)
    assert kept._watch_sessions([session]) == pytest.approx(0.75)
    assert session.renewals == [clock.now()]


async def test_the_thread_looks_once_a_second_at_least_and_not_all_the_time(
    clock: VirtualClock,
) -> None:
    kept, session = make(clock), Fake(clock, 900.0)
    assert kept._watch_sessions([session]) == client_core.TICK
    session.proof = clock.now() - 900.0 + 1e-9
    session.answering = False
    assert kept._watch_sessions([session]) == client_core.SHORTEST


async def test_the_thread_stops_when_the_loop_has_not_turned_for_max_stall(
    clock: VirtualClock,
) -> None:
    kept, session = make(clock), Fake(clock, max_stall=5.0)
    clock.advance(4.9)
    kept._watch_sessions([session])
    assert len(session.renewals) == 1
    clock.advance(4.9)
    kept._watch_sessions([session])
    assert len(session.renewals) == 1
    assert session.lapses == 0
    clock.advance(4.9)
    kept._watch_sessions([session])
    assert session.lapses == 1


async def test_a_stall_is_told_of_once_and_when_the_loop_turns_again(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    stalls: list[float] = []
    kept, session = make(clock, stalls), Fake(clock)
    with caplog.at_level(logging.WARNING, logger="tenure"):
        for _ in range(3):
            clock.advance(4)
            kept._watch_sessions([session])
        assert len(session.renewals) == 3
        assert len(caplog.records) == 1
        assert "the event loop has not turned for 4.0 s" in caplog.text
        kept.reschedule()
        kept.reschedule()
    assert stalls == [12.0]


async def test_a_short_stall_is_not_worth_telling(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    kept, session = make(clock), Fake(clock, 3.0)
    clock.advance(1.5)
    kept._watch_sessions([session])
    assert len(session.renewals) == 1
    assert caplog.records == []


def test_on_a_closed_loop_sessions_run_out_and_are_forgotten(clock: VirtualClock) -> None:
    loop = VirtualLoop(clock)
    session = Fake(clock)

    async def begin() -> Keeper:
        kept = make(clock)
        kept.add(session)
        return kept

    kept = loop.run_until_complete(begin())
    loop.close()
    clock.advance(5)
    kept._watch_sessions([session])
    assert session.renewals == []
    clock.advance(5)
    kept._watch_sessions([session])
    assert session.lapses == 1
    assert kept._sessions == {}


class Failing(Fake):
    """A session whose renewals fail while `error` is set."""

    error: Exception | None = None

    def renew(self) -> None:
        super().renew()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_renewal_that_fails_is_logged_and_costs_no_other_session_its_own(
    clock: VirtualClock, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    kept, failing, other = make(clock), Failing(clock), Fake(clock)
    failing.error = error
    kept.add(failing)
    kept.add(other)
    await asyncio.sleep(8)
    assert len(other.renewals) == 2
    assert [each.getMessage() for each in caplog.records] == [
        f"background task failed: task='renewing sessions' error={error!r}"
    ]
    failing.error = None
    before = len(failing.renewals)
    await asyncio.sleep(4)
    assert len(failing.renewals) > before
    assert (failing.lapses, other.lapses) == (0, 0)
    await kept.aclose()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_the_thread_renews_others_when_one_renewal_fails(
    clock: VirtualClock, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    kept, failing, other = make(clock), Failing(clock), Fake(clock)
    failing.error = error
    clock.advance(5)
    kept._watch_sessions([failing, other])
    assert len(other.renewals) == 1
    assert caplog.text.count("task='renewing sessions'") == 1
    await kept.aclose()


async def test_renewals_that_fail_do_not_put_off_the_end_at_the_deadline(
    clock: VirtualClock,
) -> None:
    kept, failing = make(clock), Failing(clock, window=9.3)
    failing.error, failing.answering, failing.kept_by = OSError("too many open files"), False, kept
    kept.add(failing)
    await asyncio.sleep(9.29)
    assert failing.lapses == 0
    assert kept._watch_sessions([failing]) == pytest.approx(0.01)
    await asyncio.sleep(0.02)
    assert failing.lapses == 1
    await kept.aclose()


@pytest.mark.no_debug
async def test_a_keeper_closes_though_its_thread_has_died_and_no_other_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object) -> float:
        raise MemoryError

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    kept = Keeper(SystemClock(), asyncio.get_running_loop(), lambda _: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(kept, "_watch_sessions", no_memory)
        kept.add(Fake(VirtualClock()))
        assert kept._thread is not None
        await asyncio.to_thread(kept._thread.join)
        patch.setattr(threading.Thread, "start", no_thread)
        kept.reschedule()
    async with asyncio.timeout(30):
        await kept.aclose()


@pytest.mark.no_debug
async def test_a_thread_that_cannot_be_started_is_started_at_a_later_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start
    refused = 0

    def no_thread(thread: threading.Thread) -> None:
        nonlocal refused
        refused += 1
        if refused < 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(client_core, "TICK", 0.01)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    async with tenure.connect("memory://") as client, client.mutex("x").lock():
        async with asyncio.timeout(30):
            while refused < 3:  # noqa: ASYNC110  nothing tells when to look again
                await asyncio.sleep(0.01)
    assert "can't start new thread" in caplog.text


async def test_a_thread_may_end_only_with_nothing_to_keep(clock: VirtualClock) -> None:
    kept, session = make(clock), Fake(clock)
    kept._thread = BackgroundThread("tenure-keeper", for_ever)
    kept.add(session)
    assert not kept._may_end()
    kept.discard(session)
    assert [kept._may_end(), kept._thread] == [True, None]
    await kept.aclose()
    assert not kept._may_end()  # then it ends anyway, and says so


# With real threads, in real time


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tenure-keeper"]


@pytest.fixture
def no_keeper_stays() -> Iterator[None]:
    before = keepers()
    yield
    assert [thread for thread in keepers() if thread not in before] == []


real_time = [pytest.mark.no_debug, pytest.mark.usefixtures("no_keeper_stays")]


def in_real_time(test: Callable[..., object]) -> Callable[..., object]:
    for mark in real_time:
        test = mark(test)
    return test


def busy(seconds: float) -> None:
    """Python that gives nobody a turn, but for the interpreter's own switching."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.exhaustive
@guarantee("stalled", "kept", on=MEMORY)
@in_real_time
@pytest.mark.parametrize("stall", [time.sleep, busy])
async def test_a_loop_stuck_in_one_call_keeps_its_lease(stall: Callable[[float], None]) -> None:
    async with tenure.connect("memory://") as client:
        session = await client.session(recovery_window=2, max_stall=60)
        async with session.mutex("m").lock() as lease:
            stall(4.5)
            assert lease.held
        assert session.state == "attached"


@pytest.mark.exhaustive
@guarantee("stalled", "kept", on=MEMORY)
@in_real_time
async def test_a_loop_busy_in_slices_of_a_millisecond_keeps_its_lease() -> None:
    async with tenure.connect("memory://") as client:
        session = await client.session(recovery_window=2)
        async with session.mutex("m").lock() as lease:
            end = time.monotonic() + 4.5
            while time.monotonic() < end:
                busy(0.001)
                await asyncio.sleep(0)
            assert lease.held


@pytest.mark.exhaustive
@guarantee("stalled", "loss reported", on=MEMORY)
@in_real_time
async def test_a_wedged_program_loses_its_lease_and_the_policy_acts_in_time() -> None:
    acted: list[tuple[float, threading.Thread]] = []

    def act(_: LeaseLost) -> None:
        acted.append((time.monotonic(), threading.current_thread()))

    async with tenure.connect("memory://") as client:
        session = await client.session(recovery_window=1, max_stall=1, on_loss=act)
        with pytest.raises(LeaseLost):
            async with session.mutex("m").lock() as lease:
                started = time.monotonic()
                time.sleep(5)
                assert not lease.held
                assert lease.loss is not None
                await for_ever()
    ((when, thread),) = acted
    assert thread.name == "tenure-keeper"
    assert when - started < 4.5


@in_real_time
async def test_a_stall_that_the_thread_bridged_is_told_as_an_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_core, "TICK", 0.2)
    async with tenure.connect("memory://") as client, client.events() as stream:
        _held = await client.session(recovery_window=2)
        time.sleep(2)
        async for event in stream:
            if isinstance(event, events.LoopStalled):
                assert event.seconds > 1
                break
        assert "has not turned" in caplog.text


@in_real_time
async def test_the_thread_ends_with_the_client() -> None:
    async with tenure.connect("memory://") as client:
        _held = await client.session()
        _held_2 = await client.session()
        assert len(keepers()) == 1
    assert keepers() == []


@in_real_time
async def test_a_thread_with_nothing_to_keep_ends_and_the_next_session_starts_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_core, "IDLE", 0.01)
    async with tenure.connect("memory://") as client:
        for _ in range(3):
            async with client.session():
                (thread,) = keepers()
            client._core.keeper.reschedule()  # it looks, and finds nothing
            await asyncio.to_thread(thread.join)
            assert client._core.keeper._thread is None
        async with client.session():
            assert len(keepers()) == 1


@pytest.mark.usefixtures("no_keeper_stays")
def test_a_program_that_closes_its_loop_and_not_its_client_is_not_renewed_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_core, "IDLE", 0.01)
    lost = threading.Event()

    async def begin() -> tenure.Lease:
        client = tenure.connect("memory://")
        session = await client.session(recovery_window=1, on_loss=lambda _: lost.set())
        return await session.mutex("m").lock()

    lease = asyncio.run(begin())
    (thread,) = keepers()
    assert lost.wait(30)
    assert not lease.held
    thread.join(30)


@in_real_time
async def test_a_close_does_not_wait_in_the_loop_for_a_policy_that_needs_it() -> None:
    loop = asyncio.get_running_loop()
    asked = threading.Event()

    def act(_: LeaseLost) -> None:
        asked.set()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(30)

    async with tenure.connect("memory://") as client:
        session = await client.session(recovery_window=1, max_stall=0, on_loss=act)
        _held = await session.mutex("m").lock()
        while not asked.is_set():
            time.sleep(0.05)  # the loop is stuck until the thread has given up
    assert SystemClock.virtual is False
