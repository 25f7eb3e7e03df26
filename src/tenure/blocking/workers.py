"""Worker tasks of all threads that call one portal.

A thread has one worker, and another for each call that a signal handler makes during a call.
Rules:

* A worker is created in the calling thread, and dismissed on the loop once the thread has ended.
* Python handles a signal between two instructions of the main thread. A signal during a system call
  interrupts the call, but a signal just before the call is handled only after it. An exception that
  another thread sets (``PyThreadState_SetAsyncExc``) interrupts no system call at all. So waiting
  threads are woken every `REMINDER` seconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tenure.background import BackgroundTimer, Failures
from tenure.blocking.worker import Call, WorkerTask

REMINDER = 1.0
"""Seconds after which a waiting thread checks for signals and exceptions again."""


class ThreadWorkers:
    """The workers of one thread.

    Args:
        hire: creates a worker.
        retire: called with each worker once the thread has ended.

    Attributes:
        free: workers without a call; the last of them takes the next call.
        unclaimed: calls that have obtained something, until their callers have it.
    """

    def __init__(
        self, hire: Callable[[], WorkerTask], retire: Callable[[WorkerTask], None]
    ) -> None:
        """Start without workers; `hire` creates and `retire` ends one."""
        self._hire = hire
        self._retire = retire
        self._all: list[WorkerTask] = []
        self.free: list[WorkerTask] = []
        self.unclaimed: list[Call] = []

    def next(self) -> WorkerTask:
        """Return the worker of the next call; it stays among the free ones."""
        if not self.free:
            worker = self._hire()
            self._all.append(worker)
            self.free.append(worker)
        return self.free[-1]

    def __del__(self) -> None:
        """Retire the workers of a thread that has ended."""
        # The thread has ended; or this was interrupted while it was made.
        for worker in getattr(self, "_all", ()):
            self._retire(worker)


class _Thread(threading.local):
    workers: ThreadWorkers | None = None


class WorkerTasks:
    """All workers of one loop.

    Args:
        loop: the loop of their tasks.
        finished: called with each call that has ended.
        post: schedules a call on the loop, from any thread.
        failures: reports errors of a reminder.

    Attributes:
        all: the workers.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        finished: Callable[[Call], None],
        post: Callable[..., None],
        failures: Failures,
    ) -> None:
        """Start without workers on `loop`."""
        self.all: set[WorkerTask] = set()
        self._loop = loop
        self._finished = finished
        self._post = post
        self._reminder = BackgroundTimer(loop, loop.time, self._remind, failures)
        self._local = _Thread()

    def mine(self) -> ThreadWorkers:
        """Return the workers of the calling thread."""
        mine = self._local.workers
        if mine is None:
            mine = self._local.workers = ThreadWorkers(self._new, self._retire)
        return mine

    def task(self) -> asyncio.Task[None] | None:
        """Return the task of the calling thread's free worker, if it has one."""
        mine = self._local.workers
        return mine.free[-1].task if mine is not None and mine.free else None

    def forget(self) -> None:
        """In a forked child: leave the tasks to the parent."""
        for worker in self.all:
            worker.forget()

    def stop(self) -> list[asyncio.Task[None]]:
        """End all of them, and their calls; return the ending tasks."""
        for worker in self.all:
            worker.stop()
        return [worker.task for worker in self.all if worker.task is not None]

    def _new(self) -> WorkerTask:
        worker = WorkerTask(self._finished, self._remind_later)
        self.all.add(worker)
        return worker

    def _retire(self, worker: WorkerTask) -> None:
        self._post(self._dismiss, worker)

    def _dismiss(self, worker: WorkerTask) -> None:
        worker.end()
        self.all.discard(worker)
        worker.notifier.close()  # on the loop, which notifies it

    def _remind_later(self) -> None:
        if not self._reminder.armed:
            self._reminder.by(self._loop.time() + REMINDER)

    def _remind(self) -> None:
        """Let waiting threads handle what arrived as they began to wait."""
        reminded = [worker for worker in self.all if worker.remind()]
        if reminded:
            self._remind_later()
