"""Ctrl-C, and whatever else a signal handler raises, while a thread waits in a call."""

from __future__ import annotations

import _thread
import ctypes
import inspect
import operator
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest

from tenure import blocking
from tenure.blocking import portal
from tenure.blocking.portal import Portal
from tenure.blocking.workers import Call
from tenure.errors import EngineError, LeaseReleased
from tests.blocking.helpers import Thread, is_free, is_held, until, waiting
from tests.blocking.interrupting import OPERATIONS, interrupt_everywhere
from tests.engines.stores import BY_NAME
from tests.guarantees import MEMORY, guarantee

untraced = pytest.mark.skipif(
    sys.version_info < (3, 12) and sys.gettrace() is not None,
    reason="a trace function, as of coverage, is set: Python 3.11 then places an exception that "
    "comes as a function begins outside of it, and spins while one is set in another thread",
)


class Alarm(Exception):
    """What the handler of a signal raises."""


def signal_main(number: int = signal.SIGUSR1) -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


Handler: TypeAlias = Callable[[int, FrameType | None], object]

LOSES = frozenset({"_weakrefset", "coverage", "hypothesis", "weakref"})
"""Packages whose functions Python calls in between, and whose exceptions are lost or do harm."""


def would_be_lost(frame: FrameType | None) -> bool:
    """Tell whether an exception that is raised there would not arrive in the test.

    Python ignores what is raised in ``__del__``, in a callback of a weak reference (or a set of
    them) and in one of the garbage collector, as Hypothesis has it. One that is raised in what
    measures coverage leaves a lock taken, and with it the whole test run.
    """
    while frame is not None and frame.f_code.co_name in {"handle_outside", "signal_main"}:
        frame = frame.f_back  # the handler of the signal before
    while frame is not None:
        package = str(frame.f_globals["__name__"]).partition(".")[0]
        if package == "tests":
            return False
        if package in LOSES or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def handling(number: int, handle: Handler) -> Iterator[None]:
    """A signal is handled so in the block, as soon as an exception would arrive in the test."""

    def handle_outside(number: int, frame: FrameType | None) -> None:
        if would_be_lost(frame):
            # Sent by this thread, it would be handled at once, and still in the wrong place.
            _thread.start_new_thread(signal_main, (number,))
        else:
            handle(number, frame)

    before = signal.signal(number, handle_outside)
    try:
        yield
    finally:
        signal.signal(number, before)


def first_try(function: Callable[..., object]) -> int:
    """The number of the line of a function's first ``try``."""
    lines, first = inspect.getsourcelines(function)
    return first + [line.strip() for line in lines].index("try:")


class Alarms:
    """A handler that raises in the main thread: once when armed, and only within a call.

    An interruption before the first line of the call is one before the call.
    """

    def __init__(self) -> None:
        self.armed = False
        self._begins = first_try(Portal._carry_out)

    def handle(self, _: int, frame: FrameType | None) -> None:
        while self.armed and frame is not None:
            if frame.f_code is Portal._carry_out.__code__ and frame.f_lineno > self._begins:
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
    with handling(signal.SIGUSR1, alarms.handle):
        yield alarms


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
        handling(signal.SIGINT, signal.default_int_handler),
        when(lambda: waiting(eye, "a") == 1, lambda: signal_main(signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        client.mutex("a").lock()
    until(lambda: waiting(eye, "a") == 0)
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
    ticket.withdraw()
    lease.release()


@guarantee("cancelled", "nothing leaks", on=MEMORY)
def test_interruptions_at_any_moment_of_a_call_leave_nothing_behind(
    client: blocking.Client, eye: blocking.Client, alarms: Alarms
) -> None:
    mutex = client.mutex("a")
    for _ in range(100):
        with alarms.going_off():
            while True:
                mutex.lock(timeout=5).release()
    until(lambda: is_free(eye, "a"))


def no_loop_is_left() -> bool:
    return "tenure-blocking" not in [thread.name for thread in threading.enumerate()]


COMPOSED = {
    *("with client.all_of()", "client.any_of()", "with lock(holding=lease)"),
    *("barrier.enter()", "with item", "pool.acquire()"),
}
"""Operations that consist of others: interrupted at a third of their many instructions."""


@guarantee("cancelled", "nothing leaks", on=MEMORY)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_exception_at_any_instruction_leaves_nothing_behind(operation: str) -> None:
    with BY_NAME["memory"].make().empty() as url:
        step = 3 if operation in COMPOSED else 1
        assert interrupt_everywhere(operation, url, step=step) > 100


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_exception_at_some_instructions_leaves_nothing_on_sqlite(
    operation: str, tmp_path: Path
) -> None:
    interrupt_everywhere(operation, f"sqlite:///{tmp_path / 'x.db'}", first=3, step=11)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("engine", ["sqlite", "redis", "postgresql", "etcd", "tenure"])
def test_an_exception_at_any_instruction_leaves_nothing_on_any_engine(
    engine: str, operation: str
) -> None:
    with BY_NAME[engine].make().empty() as url:
        interrupt_everywhere(operation, url)


@pytest.mark.parametrize("after", [2, 17])
@pytest.mark.parametrize(
    "operation", ["mutex.lock()", "lease.release()", "with lease", "session.close()"]
)
def test_a_second_exception_leaves_nothing_behind(operation: str, after: int) -> None:
    with BY_NAME["memory"].make().empty() as url:
        interrupt_everywhere(operation, url, step=3, after=after)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_second_exception_at_any_distance_leaves_nothing_behind(operation: str) -> None:
    for after in range(1, 150):
        with BY_NAME["memory"].make().empty() as url:
            interrupt_everywhere(operation, url, first=1 + after % 3, step=3, after=after)


def pressed_before(call: Callable[[], object]) -> None:
    """Call a function while Ctrl-C has been pressed: Python looks for it when that begins."""
    with handling(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        # No instruction of Python is executed between the two.
        list(map(operator.call, [_thread.interrupt_main, call]))


@untraced
def test_ctrl_c_as_a_release_begins_does_not_stop_it(
    client: blocking.Client, eye: blocking.Client
) -> None:
    lease = client.mutex("a").lock()
    pressed_before(lease.release)
    until(lambda: is_free(eye, "a"))
    lease = client.mutex("a").lock().__enter__()
    pressed_before(partial(lease.__exit__, None, None, None))
    until(lambda: is_free(eye, "a"))
    lease = client.mutex("a").lock()
    pressed_before(lease.__enter__)
    until(lambda: is_free(eye, "a"))
    pool = client.semaphore("b")
    pool.create(limit=1)
    ticket = pool.enqueue()
    pressed_before(ticket.__enter__)
    until(lambda: is_free(eye, "b"))
    session = client.session()
    lease = session.mutex("a").lock()
    pressed_before(session.close)
    until(lambda: is_free(eye, "a"))
    assert not lease.held


def test_ctrl_c_as_the_client_closes_does_not_stop_it(url: str, eye: blocking.Client) -> None:
    client = blocking.connect(url)
    lease = client.mutex("a").lock()
    pressed_before(client.close)
    until(lambda: is_free(eye, "a"))
    assert not lease.held


def raise_in(thread: Thread[Any], error: type[BaseException]) -> None:
    ident = ctypes.c_ulong(thread.ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error)) == 1


@untraced
def test_an_exception_that_is_set_in_a_waiting_thread_ends_its_wait(
    client: blocking.Client, eye: blocking.Client
) -> None:
    with eye.mutex("a").lock():
        thread = Thread(lambda: client.mutex("a").lock(timeout=60))
        until(lambda: waiting(eye, "a") == 1)
        raise_in(thread, Alarm)
        with pytest.raises(Alarm):
            thread.result()
        until(lambda: waiting(eye, "a") == 0)


@untraced
@pytest.mark.exhaustive
@guarantee("cancelled", "nothing leaks", on=MEMORY)
def test_exceptions_that_are_set_in_a_working_thread_leave_nothing_behind(
    client: blocking.Client, eye: blocking.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutex = client.mutex("a")
    begun = threading.Event()

    def work() -> None:
        while True:
            with mutex.lock(timeout=5):
                begun.set()

    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)  # Python loses one in a finalizer
    for _ in range(50):
        begun.clear()
        thread = Thread(work)
        begun.wait()
        raise_in(thread, Alarm)
        while thread.running:
            if lost:
                lost.clear()
                raise_in(thread, Alarm)
        with pytest.raises(Alarm):
            thread.result()
        until(lambda: is_free(eye, "a"))


@pytest.mark.parametrize("started", [False, True])
def test_an_interruption_while_the_thread_is_started_leaves_no_doubt_whether_it_runs(
    client: blocking.Client, url: str, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    lease = client.mutex("a").lock()
    client.close()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            blocking.connect(url)
    until(no_loop_is_left)
    assert not is_held(lease)
    with blocking.connect(url) as another:
        another.mutex("a").lock(timeout=10).release()


def test_a_signal_that_does_not_end_the_systems_wait_ends_the_call(
    client: blocking.Client, eye: blocking.Client, alarms: Alarms
) -> None:
    """As one does that comes just before the wait; here another thread receives it."""
    alarms.armed = True
    with eye.mutex("a").lock():

        def send() -> None:
            until(lambda: waiting(eye, "a") == 1)
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

        sender = Thread(send)
        with pytest.raises(Alarm):
            client.mutex("a").lock(timeout=60)
        sender.result()
        until(lambda: waiting(eye, "a") == 0)


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
    until(lambda: is_free(eye, "a"))


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
    held = client.mutex("a").lock()
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
    held.release()
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
    until(lambda: is_free(eye, "pool"))


def test_a_handler_may_itself_use_the_library(
    client: blocking.Client, eye: blocking.Client
) -> None:
    lease = client.mutex("a").lock()

    def handle(*_: object) -> None:
        lease.release()

    with (
        handling(signal.SIGUSR1, handle),
        when(lambda: waiting(eye, "a") == 1, signal_main),
    ):
        client.mutex("a").lock(timeout=30).release()
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

    assert Thread(get).result().__notes__ == ["and the release failed: no answer"]
