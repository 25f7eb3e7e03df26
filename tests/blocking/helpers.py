"""What the tests of the blocking API share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tenure import blocking
from tenure.errors import SemaphoreNotFound
from tenure.model import DEFAULT_NODE

T = TypeVar("T")


class Thread(Generic[T]):
    """A function that runs in a thread; `result` waits for what it gives or raises."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-thread")
        self._thread.start()

    @property
    def ident(self) -> int:
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]


def until(condition: Callable[[], object]) -> None:
    """Ask again and again; every question gives other threads their turn."""
    while not condition():
        pass


def waiting(client: blocking.Client, name: str) -> int:
    """How many wait for that name, as the store says."""
    try:
        return len(client.describe_semaphore(name).waiters)
    except SemaphoreNotFound:
        return 0


def is_free(client: blocking.Client, name: str) -> bool:
    try:
        found = client.describe_semaphore(name)
    except SemaphoreNotFound:
        return True
    return not found.owners and not found.waiters


def end_sessions(client: blocking.Client, path: str = DEFAULT_NODE, but: int = 0) -> None:
    """By the store's word, as an administrator would."""
    for session in client.list_sessions(path):
        if session.id != but:
            client.end_session(path, session.id)


def lose(eye: blocking.Client, lease: blocking.Lease) -> None:
    """Have the lease evicted, and wait until its holder knows."""
    assert eye.evict(lease.node, lease.name, lease.fencing_token)
    until(lambda: lease.loss is not None)


def is_held(lease: blocking.Lease) -> bool:
    """The same as asking the lease, without a type checker taking the answer for lasting."""
    return lease.held


def sleeps(process: int) -> bool:
    """True if the main thread of a program waits in the kernel, where a signal wakes it.

    A signal that comes just before is handled by Python when the wait ends by itself.
    """
    if not Path("/proc").is_dir():
        return True
    stat = Path(f"/proc/{process}/task/{process}/stat").read_text(encoding="utf-8")
    return stat.rpartition(")")[2].split()[0] == "S"
