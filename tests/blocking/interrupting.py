"""Exceptions at each instruction of the calls of `tenure.blocking`, as signal handlers raise them.

A trace function raises one before the first instruction of a call, before the second, and so on.
This is more than a signal can do: Python looks for signals only when a function begins, after a
call of a function written in C, and on the way back in a loop.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from tenure import blocking
from tenure.blocking import recipes
from tests.blocking.helpers import is_free

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]


class Injected(BaseException):
    """The exception of a signal handler."""


class Interruption:
    """An exception before the n-th instruction that the calling thread executes in the library.

    Args:
        number: of the instruction, from 1.
        after: raise a second one, so many instructions later; 0 for none.

    Attributes:
        struck: the place, once it has been reached.
    """

    def __init__(self, number: int, after: int = 0) -> None:
        self.struck = ""
        self.struck_again = ""
        self._left = number
        self._after = after
        self.error = Injected(number)

    @contextmanager
    def expected(self) -> Iterator[None]:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            yield
        except BaseException as error:
            sys.settrace(before)
            if not self.struck or error is not self.error:
                raise
        else:
            sys.settrace(before)
            assert not self.struck, f"the exception at {self.struck} was lost"

    def _trace(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if not frame.f_globals.get("__name__", "").startswith("tenure.") or in_finalizer(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                place = f"{frame.f_code.co_qualname}:{frame.f_lineno}:{frame.f_lasti}"
                if not self.struck:
                    self.struck = place
                    self._left = self._after
                    raise self.error
                self.struck_again = place
                raise Injected("again")
        return self._trace


def in_finalizer(frame: FrameType | None) -> bool:
    """Tell whether Python would print an exception that is raised there, and lose it."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


Prepared: TypeAlias = Callable[[], Callable[[], object] | None]
"""A call to interrupt; returns the release of what it has obtained, if anything."""


def _release(client: blocking.Client) -> Prepared:
    lease = client.mutex("a").lock(timeout=10)
    return lease.release


def _lock(client: blocking.Client) -> Prepared:
    mutex = client.mutex("a")
    return lambda: mutex.lock(timeout=10).release


def _try_lock(client: blocking.Client) -> Prepared:
    mutex = client.mutex("a")

    def obtain() -> Callable[[], object]:
        lease = mutex.try_lock()
        assert lease is not None
        return lease.release

    return obtain


def _with_lock(client: blocking.Client) -> Prepared:
    mutex = client.mutex("a")

    def block() -> None:
        with mutex.lock(timeout=10) as lease:
            lease.check()

    return block


def _with_lease(client: blocking.Client) -> Prepared:
    lease = client.mutex("a").lock(timeout=10)

    def block() -> None:
        with lease:
            pass

    return block


def _with_raising_body(client: blocking.Client) -> Prepared:
    lease = client.mutex("a").lock(timeout=10)

    def block() -> None:
        try:
            with lease:
                raise KeyError("a")
        except KeyError:
            pass

    return block


def _pool(client: blocking.Client) -> blocking.Semaphore:
    pool = client.semaphore("a")
    pool.create(limit=1, exist_ok=True)
    return pool


def _acquire(client: blocking.Client) -> Prepared:
    pool = _pool(client)
    return lambda: pool.acquire(timeout=10).release


def _try_acquire(client: blocking.Client) -> Prepared:
    pool = _pool(client)

    def obtain() -> Callable[[], object]:
        lease = pool.try_acquire()
        assert lease is not None
        return lease.release

    return obtain


def _enqueue(client: blocking.Client) -> Prepared:
    pool = _pool(client)
    return lambda: pool.enqueue().withdraw


def _with_ticket(client: blocking.Client) -> Prepared:
    ticket = _pool(client).enqueue()

    def block() -> None:
        with ticket:
            ticket.wait(timeout=10)

    return block


def _withdraw(client: blocking.Client) -> Prepared:
    ticket = _pool(client).enqueue()
    return ticket.withdraw


def _campaign(client: blocking.Client) -> Prepared:
    election = client.election("a")
    return lambda: election.campaign(timeout=10).resign


def _resign(client: blocking.Client) -> Prepared:
    leadership = client.election("a").campaign(timeout=10)
    return leadership.resign


def _session(client: blocking.Client) -> Prepared:
    return lambda: client.session().close


def _with_session(client: blocking.Client) -> Prepared:
    session = client.session()
    lease = session.mutex("a").lock(timeout=10)

    def block() -> None:
        with session:
            lease.check()

    return block


def _close_session(client: blocking.Client) -> Prepared:
    session = client.session()
    lease = session.mutex("a").lock(timeout=10)

    def close() -> None:
        session.close()
        assert not lease.held

    return close


def _with_client(client: blocking.Client) -> Prepared:
    another = blocking.connect(client.url)
    lease = another.mutex("a").lock(timeout=10)

    def block() -> None:
        with another:
            lease.check()

    return block


def _close_client(client: blocking.Client) -> Prepared:
    another = blocking.connect(client.url)
    lease = another.mutex("a").lock(timeout=10)

    def close() -> None:
        another.close()
        assert not lease.held

    return close


def _with_mutex(client: blocking.Client) -> Prepared:
    mutex = client.mutex("a")

    def run() -> None:
        with mutex:
            pass

    return run


def _all_of(client: blocking.Client) -> Prepared:
    a, b = client.mutex("a"), client.mutex("b")

    def run() -> None:
        with client.all_of(a, b):
            pass

    return run


def _any_of(client: blocking.Client) -> Prepared:
    a, b = client.mutex("a"), client.mutex("b")
    return lambda: client.any_of(a, b).release()


def _resources(client: blocking.Client) -> recipes.Pool:
    return recipes.Pool(client, "a", {"x": b""})


def _acquire_item(client: blocking.Client) -> Prepared:
    pool = _resources(client)
    return lambda: pool.acquire(timeout=10).release


def _with_item(client: blocking.Client) -> Prepared:
    item = _resources(client).acquire(timeout=10)

    def block() -> None:
        with item:
            pass

    return block


def _release_item(client: blocking.Client) -> Prepared:
    item = _resources(client).acquire(timeout=10)
    return item.release


_outer: WeakKeyDictionary[blocking.Client, blocking.Lease] = WeakKeyDictionary()


def _with_inner_lease(client: blocking.Client) -> Prepared:
    mutex = recipes.ReentrantMutex(client, "outer")
    lease = _outer.setdefault(client, _outer.get(client) or mutex.lock(timeout=10))
    assert lease.held, "an interruption has released the outer lease"

    def block() -> None:
        with mutex.lock(holding=lease) as inner:
            inner.check()

    return block


def _enter_barrier(client: blocking.Client) -> Prepared:
    barrier = recipes.DoubleBarrier(client, "a", 1)
    return lambda: barrier.enter(timeout=10).release


OPERATIONS: dict[str, Callable[[blocking.Client], Prepared]] = {
    "mutex.lock()": _lock,
    "mutex.try_lock()": _try_lock,
    "with mutex.lock()": _with_lock,
    "with mutex": _with_mutex,
    "with lease": _with_lease,
    "with lease, whose body raises": _with_raising_body,
    "lease.release()": _release,
    "semaphore.acquire()": _acquire,
    "semaphore.try_acquire()": _try_acquire,
    "semaphore.enqueue()": _enqueue,
    "with ticket, and ticket.wait()": _with_ticket,
    "ticket.withdraw()": _withdraw,
    "with client.all_of()": _all_of,
    "client.any_of()": _any_of,
    "election.campaign()": _campaign,
    "leadership.resign()": _resign,
    "client.session()": _session,
    "with session": _with_session,
    "session.close()": _close_session,
    "with client": _with_client,
    "client.close()": _close_client,
    "pool.acquire()": _acquire_item,
    "with item": _with_item,
    "item.release()": _release_item,
    "with lock(holding=lease)": _with_inner_lease,
    "barrier.enter()": _enter_barrier,
}
"""The operations that are interrupted; each prepares a call."""


def interrupt_everywhere(
    operation: str, url: str, *, first: int = 1, step: int = 1, after: int = 0
) -> int:
    """Interrupt an operation before each instruction, or some; return how many were tried.

    After each exception, which is the one that is raised, the operation has left nothing in the
    store: no request, and no session. The client can be used and closed.

    Args:
        operation: one of `OPERATIONS`.
        url: an empty store.
        first: the first instruction.
        step: the distance between the instructions.
        after: raise a second exception that many instructions after the first.
    """
    prepare = OPERATIONS[operation]
    tried = 0
    with blocking.connect(url) as client, blocking.connect(url) as eye:
        client.mutex("mine").lock(timeout=10).release()
        eye.mutex("mine").lock(timeout=10).release()
        ours = len(eye.list_sessions())
        for number in itertools.count(first, step):
            interruption = Interruption(number, after)
            run, undo = prepare(client), None
            with interruption.expected():
                undo = run()
            if not interruption.struck:
                if undo is not None:
                    undo()
                assert number > 100, "the instructions were not counted"
                break
            tried += 1
            place = f"instruction {number}: {interruption.struck} {interruption.struck_again}"
            comes_true(lambda: is_free(eye, "a"), f"a request was left by {place}")
            comes_true(lambda: len(eye.list_sessions()) <= ours, f"a session was left by {place}")
            client.mutex("mine").lock(timeout=10).release()
    assert not [each for each in threading.enumerate() if each.name == "tenure-blocking"]
    return tried


def comes_true(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for the store to be told, which a session's end does in the background."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, otherwise
