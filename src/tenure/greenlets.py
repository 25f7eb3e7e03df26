"""Threads, selectors and queues of the operating system where gevent has replaced them.

gevent replaces the parts of the standard library that block, so that greenlets of one thread take
turns. tenure renews leases and runs its event loop in threads of its own, which must be real ones:
a greenlet that computes for seconds would stop everything else in its thread.

Rules:

* gevent's locks work between threads. Its events, conditions and queues do not. So a thread of
  tenure waits with those of this module, which block that thread alone.
* A greenlet waits in its hub (`wait_readable`), so that the other greenlets go on.
* Each such thread destroys the hub that gevent has made for it, if any, when it ends. The hub never
  runs, so these threads close descriptors with `close_descriptor`.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import queue
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

T = TypeVar("T")


class Condition(Protocol):
    """The part of `threading.Condition` that tenure uses."""

    def __enter__(self) -> bool:
        """Acquire its lock."""

    def __exit__(self, *error: object) -> None:
        """Release its lock."""

    def wait_for(self, so: Callable[[], T], timeout: float | None = None) -> T:
        """Wait for a notification after which this is true, and return its result."""

    def notify(self) -> None:
        """Wake a waiting thread."""

    def notify_all(self) -> None:
        """Wake all waiting threads."""


class Event(Protocol):
    """The part of `threading.Event` that tenure uses."""

    def set(self) -> None:
        """Let all waiting threads go on, until it is cleared."""

    def clear(self) -> None:
        """Let threads wait again."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; false after a timeout."""


class Thread(Protocol):
    """The part of `threading.Thread` that tenure uses."""

    def start(self) -> None:
        """Start it. RuntimeError: the system has no more threads."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    def is_alive(self) -> bool:
        """Return true from its start until its end."""


def are_used() -> bool:
    """Return whether gevent has replaced threads in this process."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def new_thread(target: Callable[[], object], name: str) -> Thread:
    """Return a daemon thread of the operating system, which is not started yet."""
    if are_used():
        return _NativeThread(target)
    return threading.Thread(target=target, name=name, daemon=True)


def start_thread(target: Callable[[], object]) -> None:
    """Start a daemon thread of the operating system, in a signal handler for example.

    Unlike the start of a `threading.Thread` it takes no lock that the interrupted code may hold.

    Raises:
        RuntimeError: the system has no more threads.
    """
    start = _original("_thread", "start_new_thread") if are_used() else _thread.start_new_thread
    start(target, ())


def new_condition() -> Condition:
    """Return a condition for threads of tenure."""
    return _NativeCondition() if are_used() else cast(Condition, threading.Condition())


def new_event() -> Event:
    """Return an event for threads of tenure."""
    return _NativeEvent() if are_used() else threading.Event()


def new_selector() -> selectors.BaseSelector:
    """Return a selector that blocks the calling thread."""
    if not are_used():
        return selectors.DefaultSelector()
    original: type[selectors.BaseSelector] = _original("selectors", "DefaultSelector")
    return original()


def new_queue() -> queue.SimpleQueue[Any]:
    """Return a queue whose `get` blocks the calling thread."""
    if not are_used():
        return queue.SimpleQueue()
    original: type[queue.SimpleQueue[Any]] = _original("queue", "SimpleQueue")
    return original()


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor at once.

    `os.close` of gevent does that for regular files alone. It closes others when the thread's hub
    runs, and the hubs of tenure's threads do not.
    """
    close = _original("os", "close") if are_used() else os.close
    close(descriptor)


def original(module: str, name: str) -> Any:
    """Return a function of the standard library, even if gevent has replaced it."""
    return _original(module, name) if are_used() else getattr(import_module(module), name)


def wait_readable(descriptor: int) -> None:
    """Let other greenlets run until a descriptor can be read."""
    import_module("gevent.socket").wait_read(descriptor)


def in_thread(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Call a function in a thread of its own. On the loop, whose executor gevent has replaced."""
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    new_thread(run, "tenure-call").start()
    return future


class _NativeThread:
    def __init__(self, target: Callable[[], object]) -> None:
        self._target = target
        self._started = False
        self._runs = _new_lock()  # held while it runs

    def start(self) -> None:
        self._runs.acquire()
        try:
            _original("_thread", "start_new_thread")(self._run, ())
        except BaseException:
            self._runs.release()
            raise
        self._started = True

    def join(self, timeout: float | None = None) -> None:
        if self._runs.acquire(timeout=-1 if timeout is None else timeout):
            self._runs.release()

    def is_alive(self) -> bool:
        return self._started and self._runs.locked()

    def _run(self) -> None:
        try:
            self._target()
            import_module("gevent").get_hub().destroy(destroy_loop=True)
        finally:
            self._runs.release()


class _NativeCondition:
    def __init__(self) -> None:
        self._lock = _new_lock()
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait_for(self, so: Callable[[], T], timeout: float | None = None) -> T:
        end = None if timeout is None else time.monotonic() + timeout
        while not (result := so()):
            left = -1.0 if end is None else end - time.monotonic()
            if end is not None and left <= 0:
                break
            woken = _new_lock()
            woken.acquire()
            self._waiting.append(woken)
            self._lock.release()
            try:
                woken.acquire(timeout=left)
            finally:
                self._lock.acquire()
                with contextlib.suppress(ValueError):  # it was notified
                    self._waiting.remove(woken)
        return result

    def notify(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()

    def notify_all(self) -> None:
        while self._waiting:
            self.notify()


class _NativeEvent:
    def __init__(self) -> None:
        self._changed = _NativeCondition()
        self._set = False

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._set, timeout)


def _new_lock() -> threading.Lock:
    lock: threading.Lock = _original("_thread", "allocate_lock")()
    return lock


def _original(module: str, name: str) -> Any:
    return sys.modules["gevent.monkey"].get_original(module, name)
