"""Portal: passes calls of threads to the event loop of `tenure.blocking`.

A process has one portal: an event loop, and a thread that runs it while a client is open or a call
is pending. A call after the last close starts the thread again, to get the answer of async code.

Rules:

* Only `call` and similar methods enter the loop. They reject the portal's own thread and a forked
  child (`tenure.blocking.callers`).
* A call is registered in `_calls` before it checks the thread, which ends when there is no call and
  no client (`tenure.blocking.loop_thread`). A call during the end of the thread may be carried out
  by its last iteration; then no other thread is needed.
* The interpreter's exit closes open clients (`_at_exit`), for at most `EXIT_TIMEOUT`.
* A forked child forgets the portal, and never closes its loop: it shares the parent's selector.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from tenure import fork
from tenure._client.scope import note_failure
from tenure.background import BackgroundQueue, Failures
from tenure.blocking.callers import check_event_loop, check_threads
from tenure.blocking.loop_thread import Loop, LoopRunner
from tenure.blocking.notifier import Notifier
from tenure.blocking.worker import Call, WorkerTask, loss_around
from tenure.blocking.workers import WorkerTasks
from tenure.errors import Misuse, SessionClosed

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

Kind: TypeAlias = type[BaseException] | None
Error: TypeAlias = BaseException | None
Trace: TypeAlias = TracebackType | None

__all__ = ["EXIT_TIMEOUT", "Portal", "Served", "the_portal"]

EXIT_TIMEOUT = 5.0
"""Longest time in seconds that the interpreter's exit waits for clients to close."""

_log = logging.getLogger("tenure")

_Received: TypeAlias = tuple[Callable[[Call], object], Call]  # the worker, and the call


class Served(Protocol):
    """A client, or another object that needs the loop until it is closed."""

    @property
    def url(self) -> str:
        """URL of its store, without secrets."""

    @property
    def closing(self) -> asyncio.Task[None] | None:
        """The task that closes the client; ``None`` until it is closed."""

    async def aclose(self) -> None:
        """Close it, and record the closing task."""


class Portal:
    """Passes calls of threads to its loop, and returns their results."""

    def __init__(self) -> None:
        """Create the event loop; its thread starts with the first call."""
        self._born = fork.generation
        self._loop = Loop()
        self._runner = LoopRunner(self._loop, self._is_needed)
        self._clients: set[Served] = set()
        self._calls: set[Call] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._inbox: deque[_Received] = deque()
        self._failures = Failures("taking a call into the event loop", _log)
        self._again = BackgroundQueue(self._loop, self._loop.time, self._receive, self._failures)
        reminding = Failures("reminding the main thread", _log)
        self._workers = WorkerTasks(self._loop, self._finished, self._post, reminding)
        self._notifier = Notifier()
        self._loop.add_reader(self._notifier, self._notified)
        atexit.register(self._at_exit)

    # The clients

    def serve(self, client: Served) -> None:
        """Run the loop until that client is closed, and `let_go` is called."""
        self.check_caller()
        try:
            self._clients.add(client)
            self._runner.start()
        except BaseException:
            self._discard(client)
            raise

    def let_go(self, client: Served) -> None:
        """Forget a client that is closed, or being closed; with the last one the thread ends."""
        closing = client.closing
        if closing is None:
            return
        let_go = False
        try:
            if closing.done():
                self._discard(client)
                let_go = True
                # Also if the call that closed it has already ended the thread.
                ended = self._runner.ending()
                if ended is not None:
                    ended.join()
        finally:
            if not let_go:  # this call, or the one that closes it, was interrupted
                self._post(closing.add_done_callback, lambda _: self._discard(client))

    def _is_needed(self) -> bool:
        return bool(self._clients or self._calls)

    def _discard(self, client: Served) -> None:
        self._clients.discard(client)
        self._runner.stop_if_idle()

    # Calls, from any thread but the loop's

    def check_caller(self) -> None:
        """Raise unless the calling thread may wait; warn if it runs an event loop.

        Raises:
            Misuse: it is the portal's own thread, or it is in a forked child.
            SessionClosed: the interpreter is exiting, and has closed all clients.
        """
        if fork.generation != self._born:
            fork.check(self._born, "what tenure.blocking made")
        if self._loop.is_closed():
            raise SessionClosed("this program ends, and its clients have been closed")
        check_event_loop(self._loop)

    def call(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a coroutine function on the loop, and return its result."""
        given: T = self._call(function, args, kwargs)
        return given

    def obtain(
        self,
        handle: Callable[[Portal, T], R],
        undo: Callable[[T], object],
        function: Callable[P, Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call like `call`, and undo the result if the caller will never get it.

        Args:
            handle: converts the function's result for the caller.
            undo: called on the loop with the result, after an exception interrupted the wait.
            function: the coroutine function.
            *args: its positional arguments.
            **kwargs: its keyword arguments.
        """
        # No call stands between the end of `_call` and the caller: no signal is handled there.
        given: R = self._call(function, args, kwargs, undo=undo, handle=handle)
        return given

    def release(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call like `call`, even inside the block of a lost lease.

        It is begun even if an interruption occurs before the loop has received it.
        """
        given: T = self._call(function, args, kwargs, releases=True)
        return given

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a plain function on the loop, for objects that belong to the loop."""

        async def run() -> T:
            """Call the function, in the form of a coroutine for the portal."""
            return function(*args, **kwargs)

        return self.call(run)

    def leave(
        self,
        leave: Callable[[Kind, Error, Trace], Coroutine[Any, Any, T]],
        kind: Kind,
        error: Error,
        trace: Trace,
    ) -> T | None:
        """Carry out the end of a block, by the asynchronous block's `__aexit__`."""
        if kind is GeneratorExit:
            # A discarded generator ends in any thread, and cannot wait.
            self._post(self._in_background, partial(leave, kind, error, trace))
            return None
        try:
            return self.release(leave, kind, error, trace)
        except Misuse as misuse:
            if self._may_call():
                raise  # the error concerns the block
            note_failure(error, misuse, "leaving the block")
            return None

    def _call(
        self,
        function: Callable[..., Awaitable[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        undo: Callable[[Any], object] | None = None,
        handle: Callable[[Portal, Any], Any] | None = None,
        releases: bool = False,
    ) -> Any:
        call: Call | None = None
        worker: WorkerTask | None = None
        given = None
        try:
            self.check_caller()
            call = Call(partial(function, *args, **kwargs), undo=undo, releases=releases)
            mine = self._workers.mine()
            worker = mine.next()
            mine.free.remove(worker)
            self._calls.add(call)
            self._inbox.append((worker.take, call))
            self._notifier.notify()
            if self._runner.thread is None:
                self._runner.start(call)
            while not call.over:  # an earlier interrupted call may have notified, too
                worker.notifier.wait()
            # The loop does so too, but perhaps later than a close looks for pending calls.
            self._calls.discard(call)
            if call.error is None:
                given = call.result if handle is None else handle(self, call.result)
            mine.free.append(worker)
        except BaseException as interruption:
            if releases and worker is None and self._may_call():
                call = call or Call(partial(function, *args, **kwargs), releases=True)
                worker = self._workers.mine().next()
            if call is not None and worker is not None:
                self._abandon(worker, call, interruption)
                free = self._workers.mine().free
                if worker not in free:
                    free.append(worker)
            raise
        error = call.error
        if error is None:
            return given
        try:
            raise error
        finally:
            del call, error  # breaks a reference cycle with this frame

    def _abandon(self, worker: WorkerTask, call: Call, interruption: BaseException) -> None:
        """Wait for the end of a call whose thread was interrupted."""
        while call.settled is None or not call.settled.is_set():
            try:
                if call.settled is None:
                    call.settled = threading.Event()
                if call not in self._calls and not call.over:  # in this order: see `_finished`
                    self._calls.add(call)
                self._inbox.append((worker.abandon, call))  # does nothing the second time
                self._notifier.notify()
                self._runner.start()
                call.settled.wait()
            except BaseException as another:
                # The first is already propagating, and leaves nothing behind.
                interruption.add_note(f"and meanwhile: {another!r}")
                if self._runner.thread is None:
                    # No more threads can be started, as late in the interpreter's exit.
                    call.over = True
                    self._calls.discard(call)
                    return
        if call.failure is not None:
            interruption.add_note(f"and the release failed: {call.failure}")

    def _may_call(self) -> bool:
        try:
            self.check_caller()
        except (Misuse, SessionClosed):
            return False
        return True

    # Blocks that a thread is inside

    def task(self) -> asyncio.Task[None]:
        """Return the calling thread's task, for a block that it enters."""
        task = self._workers.task()
        if task is None:
            self.call(asyncio.sleep, 0)  # any call makes the worker
            task = self._workers.task()
        assert task is not None
        return task

    def check_blocks(self) -> None:
        """Raise the loss of a block that the calling thread is inside, if there is one."""
        task = self._workers.task()
        loss = None if task is None else loss_around(task)
        if loss is not None:
            raise loss

    # Called on the loop, or to reach it

    def _notified(self) -> None:
        """Handle new calls in the inbox."""
        self._notifier.wait()
        while self._inbox:
            item = self._inbox.popleft()
            try:
                self._receive(item)
            except Exception as error:  # its thread waits for it, and so do later ones
                self._failures.report(error)
                self._again.put((item,))

    def _receive(self, item: _Received) -> None:
        receive, call = item
        receive(call)

    def _post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call on the loop. From any thread; does nothing once the loop is closed."""
        if fork.generation == self._born:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *arguments)

    def _in_background(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        task = self._loop.create_task(work())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _finished(self, call: Call) -> None:
        # It has ended: a call that is neither registered nor ended was not registered yet.
        self._calls.discard(call)
        if not self._clients:
            self._runner.stop_if_idle()

    # End

    def _at_exit(self) -> None:
        """Close the clients that are still open when the interpreter exits."""
        if fork.generation != self._born:
            return
        thread = self._runner.last()
        if thread is not None:
            self._post(self._in_background, self._close_all)
            thread.join(EXIT_TIMEOUT)
            if thread.is_alive():
                return
        self._loop.run_until_complete(self._end_workers())
        self._loop.close()
        self._notifier.close()

    def forget(self) -> None:
        """In a forked child: emit no warnings about objects of the parent."""
        self._runner.forget()
        self._workers.forget()

    async def _close_all(self) -> None:
        for client in list(self._clients):
            try:
                await client.aclose()
            except Exception as failure:
                _log.warning("could not close at exit: url=%s error=%s", client.url, failure)
            self._discard(client)

    async def _end_workers(self) -> None:
        await asyncio.gather(*self._workers.stop(), *self._background)


_portal: Portal | None = None
_making = threading.Lock()


def the_portal() -> Portal:
    """Return the portal of this process.

    Raises:
        Unsupported: threads have been replaced with greenlets.
    """
    global _portal  # noqa: PLW0603  one for the process is the point
    check_threads()
    with _making:
        if _portal is None:
            _portal = Portal()
        return _portal


def _forget_parents() -> None:
    """In a forked child: drop the portal, whose thread runs only in the parent."""
    global _portal, _making  # noqa: PLW0603
    _making = threading.Lock()  # another thread may have held it
    if _portal is not None:
        _portal.forget()
        _portal = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)
