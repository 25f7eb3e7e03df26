"""Ctrl-C, and whatever else a signal handler raises, while a thread waits in a call."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from tenure import blocking
from tenure.blocking import portal
from tenure.blocking.agent import Call
from tenure.blocking.portal import Portal
from tenure.errors import EngineError, LeaseReleased
from tests.blocking.helpers import Thread, is_free, is_held, until, waiting
from tests.guarantees import MEMORY, guarantee


class Alarm(Exception):
    """What the handler of a signal raises."""


def signal_main(number: int = signal.SIGUSR1) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


class Alarms:
    """A handler that raises in the main thread: once when armed, and only within a call."""

    def __init__(self) -> None:
        self.armed = False

    def handle(self, _: int, frame: FrameType | None) -> None:
        while self.armed and frame is not None:
            if frame.f_code is Portal._call.__code__:
                self.armed = False
                raise Alarm
            frame = frame.f_back

    @contextmanager
    def going_off(self) -> Iterator[None]:
        """The call inside is interrupted, at whatever moment of it."""

        def keep_on() -> None:
            while self.armed:
                signal_main()

        self.armed = True
        sender = Thread(keep_on)
        try:
            with pytest.raises(Alarm):
                yield
        finally:
            self.armed = False
            sender.result()


@pytest.fixture
def alarms() -> Iterator[Alarms]:
    alarms = Alarms()
    before = signal.signal(signal.SIGUSR1, alarms.handle)
    yield alarms
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def when(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Have a thread do something as soon as a condition holds."""

    def wait_and_act() -> None:
        until(condition)
        act()

    thread = Thread(wait_and_act)
    try:
        yield
    finally:
        thread.result()


def test_ctrl_c_during_lock_leaves_the_queue(client: blocking.Client, eye: blocking.Client) -> None:
    blocker = eye.mutex("a").lock()
    with (
        when(lambda: waiting(eye, "a") == 1, lambda: signal_main(signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        client.mutex("a").lock()
    assert waiting(eye, "a") == 0
    blocker.release()
    client.mutex("a").lock(timeout=5).release()


def test_an_exception_of_a_signal_handler_ends_any_wait(
    client: blocking.Client, eye: blocking.Client, alarms: Alarms
) -> None:
    pool = client.semaphore("pool")
    pool.create(limit=1)
    taken, leadership = eye.semaphore("pool").acquire(), eye.election("e").campaign()
    ticket, lease = pool.enqueue(), client.mutex("mine").lock()
    events = client.events()
    waits: list[Callable[[], object]] = [
        lambda: pool.acquire(timeout=60),
        lambda: client.election("e").campaign(),
        ticket.wait,
        lambda: list(events),
        lease.wait_lost,
    ]
    for wait in waits:
        for _ in range(10):
            with alarms.going_off():
                wait()
            assert [waiting(eye, name) for name in ("pool", "e")] == [1, 0]
    assert is_held(lease)
    leadership.resign()
    taken.release()
    assert ticket.wait(timeout=5).held  # its place was kept


@guarantee("cancelled", "nothing leaks", on=MEMORY)
def test_interruptions_at_any_moment_of_a_call_leave_nothing_behind(
    client: blocking.Client, eye: blocking.Client, alarms: Alarms
) -> None:
    mutex = client.mutex("a")
    for _ in range(100):
        with alarms.going_off():
            while True:
                mutex.lock(timeout=5).release()
    assert is_free(eye, "a")


def test_one_more_interruption_does_not_end_the_giving_back(
    client: blocking.Client, alarms: Alarms
) -> None:
    undone = []

    async def obtain() -> str:
        alarms.armed = True
        signal_main()
        return "it"

    def undo(what: str) -> None:
        alarms.armed = True
        signal_main()
        undone.append(what)

    with pytest.raises(Alarm) as told:
        client._portal.obtain(lambda *_: None, undo, obtain)
    assert undone == ["it"]
    assert told.value.__notes__ == ["and meanwhile: Alarm()"]


class RacingCall(Call):
    """A call during which Ctrl-C is pressed in the very moment in which it is over."""

    __slots__ = ("_is_over", "_pressed")
    _is_over: bool

    @property
    def over(self) -> bool:
        if self._is_over and threading.current_thread().name == "test-thread":
            self._is_over, self._pressed = False, True
            raise KeyboardInterrupt
        return self._is_over or getattr(self, "_pressed", False)

    @over.setter
    def over(self, over: bool) -> None:
        self._is_over = over


@pytest.fixture
def racing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, the calls of test threads are such ones."""
    return lambda: monkeypatch.setattr(portal, "Call", RacingCall)


@guarantee("cancelled", "nothing leaks", on=MEMORY)
@pytest.mark.parametrize(
    "obtain",
    [
        lambda client: client.mutex("a").lock(),
        lambda client: client.mutex("a").try_lock(),
        lambda client: client.semaphore("a").acquire(),
        lambda client: client.semaphore("a").try_acquire(),
        lambda client: client.semaphore("a").enqueue(),
        lambda client: client.election("a").campaign(),
    ],
)
def test_what_was_granted_in_the_moment_of_the_interruption_is_given_back(
    client: blocking.Client,
    eye: blocking.Client,
    racing: Callable[[], None],
    obtain: Callable[[blocking.Client], object],
    request: pytest.FixtureRequest,
) -> None:
    if "semaphore" in str(obtain.__code__.co_names):
        client.semaphore("a").create(limit=1)
    client.mutex("other").lock().release()
    racing()

    def get() -> None:
        with pytest.raises(KeyboardInterrupt):
            obtain(client)

    Thread(get).result()
    assert is_free(eye, "a")


def test_a_session_attached_in_the_moment_of_the_interruption_is_closed(
    client: blocking.Client, eye: blocking.Client, racing: Callable[[], None]
) -> None:
    session = client.session()
    attempt = next(iter(client.sessions()))
    racing()

    def get() -> None:
        with pytest.raises(KeyboardInterrupt):
            client.session()
        with pytest.raises(KeyboardInterrupt), session:
            raise AssertionError("the block must not begin")
        with pytest.raises(KeyboardInterrupt), attempt:
            raise AssertionError("the block must not begin")

    Thread(get).result()
    until(lambda: not eye.list_sessions())
    assert session.state == "closed"


def test_a_session_resumed_in_the_moment_of_the_interruption_can_be_resumed_again(
    client: blocking.Client, racing: Callable[[], None]
) -> None:
    if not client.capabilities.resume:
        pytest.skip("this engine cannot resume sessions")
    session = client.session(resumable=True)
    token = session.resume_token
    session.detach()
    racing()

    def get() -> None:
        with pytest.raises(KeyboardInterrupt):
            client.session(resume=token)

    Thread(get).result()
    with client.session(resume=token) as again:
        assert again.state == "attached"


def test_what_was_told_in_the_moment_of_the_interruption_is_told_again(
    client: blocking.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = client.semaphore("pool")
    pool.create(limit=1, data=b"v1")
    states = pool.watch(data=True)
    events = client.events()
    client.mutex("a").lock()
    monkeypatch.setattr(portal, "Call", RacingCall)

    def read() -> None:
        with pytest.raises(KeyboardInterrupt):
            next(states)
        with pytest.raises(KeyboardInterrupt):
            next(events)

    Thread(read).result()
    monkeypatch.undo()
    assert next(states).data == b"v1"
    assert next(events).node == "/default"
    states.close()
    events.close()


def test_a_ticket_entered_in_the_moment_of_the_interruption_is_withdrawn(
    client: blocking.Client, eye: blocking.Client, racing: Callable[[], None]
) -> None:
    pool = client.semaphore("pool")
    pool.create(limit=1)
    ticket = pool.enqueue()
    racing()

    def enter() -> None:
        with pytest.raises(KeyboardInterrupt), ticket:
            raise AssertionError("the block must not begin")

    Thread(enter).result()
    assert is_free(eye, "pool")


def test_a_handler_may_itself_use_the_library(
    client: blocking.Client, eye: blocking.Client
) -> None:
    lease = client.mutex("a").lock()

    def handle(*_: object) -> None:
        lease.release()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with when(lambda: waiting(eye, "a") == 1, signal_main):
            client.mutex("a").lock(timeout=30).release()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(LeaseReleased):
        lease.check()


def test_an_interruption_says_when_giving_back_failed(
    client: blocking.Client, racing: Callable[[], None]
) -> None:
    async def obtain() -> str:
        return "it"

    def undo(_: str) -> None:
        raise EngineError("no answer")

    racing()

    def get() -> BaseException:
        with pytest.raises(KeyboardInterrupt) as told:
            client._portal.obtain(lambda *_: None, undo, obtain)
        return told.value

    assert Thread(get).result().__notes__ == ["and giving back failed: no answer"]
