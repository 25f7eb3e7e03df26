"""Worker tasks of all threads that call one portal.

A thread has one worker, and another for each call that a signal handler makes during a call.
Rules:

* A worker is created in the calling thread, and dismissed on the loop once the thread has ended.
* Python handles a signal between two instructions of the main thread. A signal during a system call
  interrupts the call, but a signal just before the call is handled only after it. An exception that
  another thread sets (``PyThreadState_SetAsyncExc``) interrupts no system call at all. So waiting
  threads are woken every `REMINDER` seconds.

Notifier: wakes a thread, or an event loop, from another thread.

Waking a thread through a file descriptor takes half the time of waking it through a lock, because
the kernel runs it on the same core. An event loop can wait for it as well.

Worker of a thread: the task on the loop that carries out its calls.

A thread waits while its call is carried out, so one task is enough for all its calls. For the
primitives this task represents the thread: the blocks that the thread has entered are the task's
scopes. So the primitives' features for tasks (cancellation after a loss, detection of
self-deadlocks) also work for threads.

Rules:

* The thread writes a call's first half, the loop its second (see `Call`).
* A call runs in a copy of its thread's context (`contextvars`), so that telemetry finds the span
  that is current in the thread.
* Every call ends, and its thread waits until then, even when it is interrupted.
* A call that an exception interrupts (Ctrl-C, a signal handler that raises) is cancelled. If it
  obtained something nevertheless, that is undone, on the loop, before the exception continues in
  the thread. An interrupted release is still started, as in a task, and is not sent a second time.
* Inside the block of a lost lease or an expired session, a call raises that loss, except for a
  release, a close and the end of a block.
* A cancellation of an idle worker is dropped, because the thread's next call checks the blocks
  anyway.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from tenure._client.request import Request
from tenure._client.scope import entered_scopes
from tenure._client.session_core import SessionCore
from tenure.background import BackgroundTimer, Failures
from tenure.errors import SessionClosed
from tenure.greenlets import are_used, close_descriptor, wait_readable

_ONE = (1).to_bytes(8, sys.byteorder)


class Notifier:
    """Merges several notifications before a wait. A signal handler that raises ends a wait."""

    __slots__ = ("_greenlets", "_post", "_read", "_sockets", "_take")

    def __init__(self) -> None:
        self._greenlets = are_used()
        if sys.platform == "linux":
            self._sockets: tuple[socket.socket, ...] = ()
            self._read = os.eventfd(0)
            self._post = partial(os.write, self._read, _ONE)
            self._take = partial(os.read, self._read, len(_ONE))
        else:  # an event loop on Windows waits for sockets alone
            receiving, sending = self._sockets = socket.socketpair()
            self._read = receiving.fileno()
            self._post = partial(sending.send, _ONE)
            self._take = partial(receiving.recv, 4096)

    def fileno(self) -> int:
        """Return the descriptor that an event loop can wait for."""
        return self._read

    def notify(self) -> None:
        """Wake the waiting thread or loop. From any thread."""
        self._post()

    def wait(self) -> None:
        """Wait for a notification. Only one thread may wait."""
        if self._greenlets:
            wait_readable(self._read)
        self.clear()

    def clear(self) -> None:
        """Forget the notifications, of which there is one. On a loop that waits for `fileno`."""
        self._take()

    def close(self) -> None:
        """Close the descriptors, after the last notification and the last wait."""
        if not self._sockets:
            close_descriptor(self._read)
        for each in self._sockets:
            each.close()


class Call:
    """One call of a thread.

    Attributes:
        function: the function to call, which returns an awaitable.
        context: the context of the thread, in which it is carried out.
        undo: called on the loop with a result that the thread will never get.
        releases: whether it is carried out even inside the block of a lost lease, like a release.
        result, error: its outcome, final once it is `over`.
        settled: nothing is left to do for the interrupted thread.
        failure: the error of `undo`.
    """

    __slots__ = (
        "abandoned",
        "context",
        "error",
        "failure",
        "function",
        "over",
        "releases",
        "result",
        "settled",
        "undo",
    )

    def __init__(
        self,
        function: Callable[[], Awaitable[Any]],
        *,
        undo: Callable[[Any], object] | None = None,
        releases: bool = False,
    ) -> None:
        self.function = function
        self.context = copy_context()
        self.undo = undo
        self.releases = releases
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = False
        self.abandoned = False
        self.settled = False
        self.failure: Exception | None = None

    def settle(self) -> None:
        """Undo the result of an abandoned call. On the loop."""
        try:
            if self.undo is not None and self.error is None:
                self.undo(self.result)
        except Exception as failure:
            self.failure = failure
        finally:
            self.settled = True


class WorkerTask:
    """The task of one thread. Everything except `__init__` runs on the loop.

    Args:
        finished: called with each call that has ended.
        waits: called when the thread has to wait.

    Attributes:
        task: the task, after the first call.
        notifier: wakes the thread that waits for a pending call.
    """

    def __init__(self, finished: Callable[[Call], None], waits: Callable[[], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self.notifier = Notifier()
        self._finished = finished
        self._waits = waits
        self._call: Call | None = None
        self._rest: _Rest | None = None
        self._wake: asyncio.Future[None] | None = None
        self._ended = False
        self._name = threading.current_thread().name

    def take(self, call: Call) -> None:
        """Carry out a call: here as far as possible without waiting, and the rest in the task."""
        if call.over or call is self._call:
            return  # already abandoned
        loop = asyncio.get_running_loop()
        task = self.task
        if task is None:
            self.task = loop.create_task(self._serve(loop), name=self._name)
            # After its first step: a task that is cancelled before that never runs.
            loop.call_soon(self.take, call)
            return
        self._call = call
        cancelled = task.cancelling()
        work = self._carry_out(call, task)
        asyncio._enter_task(loop, task)  # noqa: SLF001  `asyncio.current_task` is used below
        try:
            waits_for = call.context.run(work.send, None)
        except StopIteration:
            return
        finally:
            asyncio._leave_task(loop, task)  # noqa: SLF001  as above
        # The end of a block may have revoked a cancellation.
        cancelled = min(cancelled, task.cancelling())
        self._rest = _Rest(work, waits_for, cancelled, call.context)
        self._rouse()
        self._waits()
        if call.abandoned:
            self._cancel()

    def remind(self) -> bool:
        """Wake the thread if it waits; return whether it does."""
        waits = self._call is not None
        if waits:
            self.notifier.notify()
        return waits

    def abandon(self, call: Call) -> None:
        """Cancel a call whose thread has been interrupted; settle it if it has ended."""
        if call.abandoned:
            return
        call.abandoned = True
        if call.over:
            call.settle()
            self.notifier.notify()
            self._finished(call)  # the thread may have been started for this
        elif self._call is call:
            self._cancel()
        elif call.releases:  # the thread was interrupted before the call was taken
            asyncio.get_running_loop().call_soon(self.take, call)
        else:
            call.error = asyncio.CancelledError()
            self._over(call)

    def end(self) -> None:
        """End the task: the thread has ended."""
        self._ended = True
        self._rouse()

    def stop(self) -> None:
        """End the pending call, if there is one: the program ends."""
        self.end()
        if self._call is not None:
            self._cancel()

    def forget(self) -> None:
        """In a forked child: abandon the task, which belongs to the parent."""
        if self.task is not None:
            # Set by asyncio itself for this purpose; otherwise it logs an error when the task is
            # collected.
            setattr(self.task, "_log_destroy_pending", False)  # noqa: B010  not in typeshed

    def _cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()

    def _rouse(self) -> None:
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            if self._rest is not None:
                rest, self._rest = self._rest, None
                await rest
            elif self._ended:
                return
            else:
                self._wake = loop.create_future()
                try:
                    await self._wake
                except asyncio.CancelledError:
                    self._cancelled_while_idle()

    def _cancelled_while_idle(self) -> None:
        """Drop a cancellation of an idle worker, unless it is for a call that is just arriving."""
        rest = self._rest
        if rest is not None and self.task is not None and self.task.cancelling() > rest.cancelled:
            rest.cancel()

    async def _carry_out(self, call: Call, task: asyncio.Task[None]) -> None:
        cancelled_before = task.cancelling()
        try:
            if not call.releases:
                loss = loss_around(task)
                if loss is not None:
                    raise loss
            call.result = await call.function()
        except asyncio.CancelledError:
            call.error = loss_around(task) or SessionClosed("the client was closed meanwhile")
        except GeneratorExit:  # the loop is gone, and the thread with it
            raise
        except BaseException as error:
            call.error = error
        while call.abandoned and task.cancelling() > cancelled_before:
            task.uncancel()
        self._over(call)

    def _over(self, call: Call) -> None:
        self._call = None
        call.over = True
        self._finished(call)
        if call.abandoned:
            call.settle()
        self.notifier.notify()


class _Rest:
    """Remainder of a coroutine that has run until it had to wait.

    Attributes:
        cancelled: number of pending cancellations of the task that are not for it.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, None],
        waits_for: asyncio.Future[Any] | None,
        cancelled: int,
        context: Context,
    ) -> None:
        self.cancelled = cancelled
        self._context = context
        self._work = work
        self._waits_for = waits_for
        self._cancelled = False

    def cancel(self) -> None:
        """Cancel what it waits for, as a task does, before a task has taken it over."""
        if self._waits_for is None or not self._waits_for.cancel():
            self._cancelled = True

    def __await__(self) -> Generator[Any, None, None]:
        work, waits_for, run = self._work, self._waits_for, self._context.run
        try:
            if self._cancelled:
                waits_for = run(work.throw, asyncio.CancelledError())
            while True:
                try:
                    yield waits_for
                except BaseException as error:
                    waits_for = run(work.throw, error)
                else:
                    waits_for = run(work.send, None)
        except StopIteration:
            return


def loss_around(task: asyncio.Task[object]) -> Exception | None:
    """Return the loss of the innermost lost block that the task is in. From any thread."""
    for scope in entered_scopes(task):
        owner = scope.owner
        if isinstance(owner, Request):
            # A ticket's block has a scope, too, which does not depend on the lease being held.
            if owner.scope is scope and not owner.held and owner.loss is not None:
                return owner.why_not_held()
        elif isinstance(owner, SessionCore) and owner.scope is scope and owner.state == "expired":
            return owner.error()
    return None


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
        # A copy, because threads add their workers meanwhile.
        reminded = [worker for worker in tuple(self.all) if worker.remind()]
        if reminded:
            self._remind_later()
