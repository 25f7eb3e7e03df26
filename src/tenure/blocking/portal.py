"""Portal: runs the event loop of `tenure.blocking` in a thread, and passes calls to it.

A process has one portal: an event loop, and a thread that runs it while a client is open or a call
is pending. A call after the last close starts the thread again, to get the answer of async code.

Rules:

* Only `call` and similar methods enter the loop. They reject the portal's own thread and a forked
  child.
* A call is registered in `_calls` before it checks the thread, which ends when there is no call and
  no client. A call during the end of the thread may be carried out
  by its last iteration; then no other thread is needed.
* The interpreter's exit closes open clients (`_at_exit`), for at most `EXIT_TIMEOUT`.
* A forked child forgets the portal, and never closes its loop: it shares the parent's selector.

**Checks of the callers.** A call blocks its thread until the portal's thread has answered. So the
portal's thread may not call, and a thread that runs an event loop blocks that loop. Where gevent
has replaced threads, a call blocks its greenlet alone (`tenure.greenlets`). eventlet's locks do not
work between threads.

**The thread** runs the event loop while the portal needs it:

* A lock guards the start and end of the thread. A caller registers its call before it checks the
  thread; ending the thread uses the opposite order. So no caller is left waiting.
* Only one thread runs the loop: the next one waits for the end of the previous one.
* The thread is a daemon.

Threads that compute in short slices would starve this one: a waiting thread requests the GIL only
after the switch interval, and a thread that releases and reacquires it every millisecond usually
wins. Renewals were seconds late in such a program. So the switch interval is at most
`SWITCH_INTERVAL` while the thread runs, and is restored afterwards.

A signal handler may raise between any two lines that run in a program's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, TypeVarTuple, Unpack

from tenure import fork, greenlets
from tenure._client.contact import shortened
from tenure._client.handles import note_failure
from tenure.background import BackgroundQueue, Failures
from tenure.blocking.covered import covered
from tenure.blocking.workers import Call, Notifier, WorkerTask, WorkerTasks, loss_around
from tenure.errors import Misuse, SessionClosed, TenureError, Unsupported

_warned = False


def check_threads() -> None:
    """Check that a library that replaces threads leaves a way to run the event loop.

    Raises:
        Unsupported: eventlet has replaced them, or gevent has replaced only a part.
    """
    eventlet, gevent = sys.modules.get("eventlet.patcher"), sys.modules.get("gevent.monkey")
    if eventlet is not None and any(map(eventlet.is_monkey_patched, ("thread", "select"))):
        raise Unsupported(
            "tenure.blocking needs threads of the operating system, and eventlet has replaced "
            "them: use gevent (gunicorn -k gevent, celery -P gevent), or call "
            "monkey_patch(thread=False, select=False) and use tenure.blocking in eventlet's "
            "thread pool: eventlet.tpool.execute(function)"
        )
    if gevent is not None and len(set(map(gevent.is_module_patched, ("threading", "select")))) > 1:
        raise Unsupported(
            "gevent has replaced only one of threading and select: call monkey.patch_all(), or "
            "monkey.patch_all(thread=False, select=False) and use tenure.blocking in gevent's "
            "thread pool: gevent.get_hub().threadpool.apply(function)"
        )


def check_event_loop(portals: asyncio.AbstractEventLoop) -> None:
    """Warn once if the calling thread runs an event loop, which the call will block.

    Args:
        portals: the portal's loop.

    Raises:
        Misuse: the caller runs on the portal's loop, which could never answer.
    """
    global _warned  # noqa: PLW0603  one warning for the process is the point
    running = asyncio._get_running_loop()  # noqa: SLF001  no error where none runs
    if running is None:
        return
    if running is portals:
        raise Misuse(
            "tenure.blocking was called on its own event loop (by a callback such as on_loss), "
            "where it would wait for itself: hand the call to another thread"
        )
    if not _warned:
        _warned = True
        warnings.warn(
            "tenure.blocking blocks this thread's event loop while it waits; in async code use "
            "tenure itself, or call this in a thread (asyncio.to_thread). In a notebook this is "
            "harmless. This warning is shown once",
            RuntimeWarning,
            stacklevel=_program_level(),
        )


def _program_level() -> int:
    """Return the stack level of the nearest frame outside tenure, for `warnings.warn` here."""
    level = 2
    frame = sys._getframe(2)  # noqa: SLF001  there is no other way to count from here
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tenure."):
        frame = frame.f_back
        level += 1
    return level


T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SWITCH_INTERVAL = 0.0005
"""Switch interval in seconds while the loop's thread runs (`sys.setswitchinterval`)."""


class Loop(asyncio.SelectorEventLoop):
    """Event loop that belongs to its process: a forked child must not close it."""

    def __init__(self) -> None:
        self._born = fork.generation
        super().__init__(greenlets.new_selector())

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[Unpack[Arguments]], T],
        *args: *Arguments,
    ) -> asyncio.Future[T]:
        """Call a function in a thread."""
        if executor is None and greenlets.are_used():
            return greenlets.in_thread(self, partial(func, *args))
        return super().run_in_executor(executor, func, *args)

    def close(self) -> None:
        """Close the loop, except in a forked child, which shares its selector."""
        if fork.generation == self._born:
            super().close()

    def __del__(self) -> None:
        """Close the loop, except in a forked child."""
        if fork.generation == self._born:
            super().__del__()

    def forget(self) -> None:
        """Close the sockets in a forked child, where they would warn that they are open."""
        for name in ("_ssock", "_csock"):
            if (each := getattr(self, name)) is not None:  # else it was closed
                each.close()


class LoopThread:
    """Thread that runs the loop after the previous thread has ended, until its `ended` is set."""

    def __init__(self, loop: Loop, before: LoopThread | None) -> None:
        """Prepare a thread that runs `loop` after the thread `before` has ended."""
        thread = greenlets.new_thread(self._run, "tenure-blocking")
        self.start, self.join, self.is_alive = thread.start, thread.join, thread.is_alive
        self._loop = loop
        self._before = before
        self._begun: bool | None = None
        self._beginning = threading.Lock()
        self.ended = False

    def begins(self, begun: bool) -> bool:
        """Decide whether it runs the loop; the first call decides, and each returns the decision.

        A caller that is interrupted while starting the thread cannot know whether it started.
        """
        with self._beginning:
            if self._begun is None:
                self._begun = begun
            return self._begun

    def _run(self) -> None:
        """Run the loop until `ended` is set."""
        if not self.begins(True):
            return
        if self._before is not None:
            self._before.join()
            self._before = None
        while not self.ended:  # it may have been meant for the previous one
            self._loop.run_forever()


class LoopRunner:
    """Start and end of the threads of one loop.

    Args:
        needed: returns true if the loop must run. Called under the lock.

    Attributes:
        thread: the running thread.
    """

    def __init__(self, loop: Loop, needed: Callable[[], bool]) -> None:
        """Start without a thread; `needed` says whether the loop has work."""
        self.thread: LoopThread | None = None
        self._loop = loop
        self._needed = needed
        self._lock = threading.RLock()  # re-entrant, because a signal handler may make a call
        self._before: LoopThread | None = None  # it may still be about to end
        self._interval_before = 0.0

    def start(self, call: Call | None = None) -> None:
        """Start the thread, unless it runs, or that call has ended: then nothing would end it."""
        if self.thread is not None:
            return
        with self._lock:
            if self.thread is not None or (call is not None and call.over):
                return
            thread = LoopThread(self._loop, self._before)
            self._interval_before = sys.getswitchinterval()
            try:
                self.thread = thread
                if self._interval_before > SWITCH_INTERVAL:
                    sys.setswitchinterval(SWITCH_INTERVAL)
                thread.start()
            except BaseException:  # there can be no more threads, or this one was interrupted
                if not thread.begins(False):
                    self.thread = None
                    self._restore_interval()
                raise

    def stop_if_idle(self) -> None:
        """End the thread if it is not needed. On the loop, where no signal interrupts it."""
        with self._lock:
            thread = self.thread
            if thread is None:
                return
            # First: a call that is too late to be noticed then sees that no thread runs.
            self.thread = None
            if self._needed():
                self.thread = thread
                return
            self._before = thread
            self._restore_interval()
            thread.ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)

    def ending(self) -> LoopThread | None:
        """Return the last thread, which may not have ended yet; ``None`` while one runs."""
        return self._before if self.thread is None else None

    def last(self) -> LoopThread | None:
        """Return the running thread, or the last one."""
        with self._lock:
            return self.thread or self._before

    def forget(self) -> None:
        """Forget the thread in a forked child: it runs in the parent, like the loop."""
        if self.thread is not None:
            self._restore_interval()
        self._loop.forget()

    def _restore_interval(self) -> None:
        """Restore the switch interval, unless the program has set it meanwhile."""
        if self._interval_before > SWITCH_INTERVAL == sys.getswitchinterval():
            sys.setswitchinterval(self._interval_before)


P = ParamSpec("P")
R = TypeVar("R")

Kind: TypeAlias = type[BaseException] | None
Error: TypeAlias = BaseException | None
Trace: TypeAlias = TracebackType | None

EXIT_TIMEOUT = 5.0
"""Longest time in seconds that the interpreter's exit waits for clients to close."""

LAG = 0.01
"""Seconds after which a closing thread checks again whether the loop is needed."""

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
        self._greenlets = greenlets.are_used()
        self._loop = Loop()
        self._runner = LoopRunner(self._loop, self._is_needed)
        self._clients: set[Served] = set()
        self._calls: set[Call] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._inbox: deque[_Received] = deque()
        self._failures = Failures("taking a call into the event loop", _log)
        self._again = BackgroundQueue(self._loop, self._loop.time, self._receive, self._failures)
        reminding = Failures("reminding the waiting threads", _log)
        self._workers = WorkerTasks(self._loop, self._finished, self._post, reminding)
        self._notifier = Notifier()
        self._loop.add_reader(self._notifier, self._notified)
        atexit.register(self._at_exit)

    # The clients

    def serve(self, client: Served) -> None:
        """Run the loop until that client is closed by `close`, or discarded."""
        self.check_caller()
        self._clients.add(client)
        self._runner.start()

    async def close(self, client: Served, close: Callable[[], Awaitable[T]]) -> T:
        """Close a client by that function, and forget it; with the last one the thread ends."""
        try:
            return await close()
        finally:
            closing = client.closing
            if closing is not None:
                if closing.done():
                    self._discard(client)
                else:  # this call was interrupted
                    closing.add_done_callback(lambda _: self._discard(client))

    def begin_closing(
        self,
        client: Served,
        close: Callable[[], Awaitable[object]],
        ended: Callable[[], None],
    ) -> None:
        """Close a client by that function in the background, and call `ended`, on the loop."""

        async def run() -> None:
            """Close it, and report the end."""
            try:
                await self.close(client, close)
            finally:
                ended()

        closing = client.closing
        if self._loop.is_closed() or (closing is not None and closing.done()):
            ended()
        else:
            self._post(self._in_background, run)

    def wait_for_end(self) -> None:
        """Wait for the end of the thread, unless a client or a call needs it."""
        while not self._is_needed():
            # A caller may be awake before the loop has seen that it is not needed any more.
            thread = self._runner.thread or self._runner.ending()
            if thread is None:
                return
            thread.join(LAG)
            if not thread.is_alive():
                return

    def discard(self, client: Served) -> None:
        """Forget a client that was never used."""
        self._post(self._discard, client)

    def close_dropped(self, client: Served) -> None:
        """Close a client that the program has dropped, in the background. From any thread."""
        self._post(self._in_background, partial(self._close, client))

    def _is_needed(self) -> bool:
        return bool(self._clients or self._calls)

    def _discard(self, client: Served) -> None:
        self._clients.discard(client)
        self._runner.stop_if_idle()

    # Calls, from any thread but the loop's

    def check_greenlets(self) -> None:
        """Raise `Unsupported` if gevent has replaced threads after the portal was made."""
        if self._greenlets != greenlets.are_used():
            raise Unsupported(
                "gevent has replaced threads after tenure.blocking was first used in this "
                "process: call gevent.monkey.patch_all() before that"
            )

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
        given: T = self._carry_out(Call(partial(function, *args, **kwargs)))
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

        Called in a method that is decorated with `tenure.blocking.wrapper.obtaining`, which claims
        the result.

        Args:
            handle: converts the function's result for the caller.
            undo: called on the loop with the result, after an exception interrupted the wait.
            function: the coroutine function.
            *args: its positional arguments.
            **kwargs: its keyword arguments.
        """
        call = Call(partial(function, *args, **kwargs), undo=undo)
        given: R = self._carry_out(call, handle)
        return given

    def release(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call like `call`, even inside the block of a lost lease.

        Once begun it is carried out, whenever an interruption occurs.
        """
        given: T = self._carry_out(Call(partial(function, *args, **kwargs), releases=True))
        return given

    def unclaimed(self) -> list[Call]:
        """Return what the calling thread has obtained and its callers have not claimed yet."""
        return self._workers.mine().unclaimed

    def undo(self, undo: Callable[[T], object], obtained: T) -> None:
        """Call a function that undoes something, after an exception interrupted a call."""

        async def run() -> None:
            """Undo it, in the form of a coroutine for the portal."""
            undo(obtained)

        self.release(run)

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

    @covered
    def _carry_out(
        self,
        call: Call,
        handle: Callable[[Portal, Any], Any] | None = None,
        worker: WorkerTask | None = None,  # for the handler, from the first instruction
    ) -> Any:
        try:
            self.check_caller()
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
            given = None
            if call.error is None:
                given = call.result if handle is None else handle(self, call.result)
                if call.undo is not None:
                    mine.unclaimed.append(call)
            mine.free.append(worker)
            if call.error is not None:
                if isinstance(call.error, TenureError):
                    shortened(call.error)  # of the loop's frames
                raise call.error
            return given
        except BaseException as error:
            if error is call.error:
                call.error = None  # breaks a reference cycle with this frame
            else:
                self._settle(call, worker, error)
            raise

    @covered
    def _settle(
        self,
        call: Call,
        worker: WorkerTask | None,
        interruption: BaseException,
        another: BaseException | None = None,
    ) -> None:
        """Wait for the end of a call whose thread was interrupted, also if it is so again."""
        try:
            if another is not None:
                interruption.add_note(f"and meanwhile: {another!r}")
            if worker is None and call.releases and self._may_call():
                worker = self._workers.mine().next()
            if worker is not None:
                self._abandon(call, worker, interruption, another)
        except BaseException as more:
            # Nothing is called before this `try` has been entered again.
            self._settle(call, worker, interruption, more)

    def _abandon(
        self,
        call: Call,
        worker: WorkerTask,
        interruption: BaseException,
        another: BaseException | None,
    ) -> None:
        mine = self._workers.mine()
        if call in mine.unclaimed:
            mine.unclaimed.remove(call)
        if not call.settled:
            if call not in self._calls and not call.over:  # in this order: see `_finished`
                self._calls.add(call)
            self._inbox.append((worker.abandon, call))  # does nothing the second time
            self._notifier.notify()
            if self._runner.thread is None and isinstance(another, RuntimeError):
                # No more threads can be started, as late in the interpreter's exit.
                call.over = True
                self._calls.discard(call)
                return
            self._runner.start()
            while not call.settled:
                worker.notifier.wait()
        if call.failure is not None:
            failure, call.failure = call.failure, None
            interruption.add_note(f"and the release failed: {failure}")
        if worker not in mine.free:
            mine.free.append(worker)

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
        self._notifier.clear()
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
        await asyncio.gather(*(self._close(client) for client in self._clients))

    async def _close(self, client: Served) -> None:
        try:
            await client.aclose()
        except Exception as failure:
            _log.warning("could not close a client: url=%s error=%s", client.url, failure)
        self._discard(client)

    async def _end_workers(self) -> None:
        await asyncio.gather(*self._workers.stop(), *self._background)


def has_settled(error: BaseException) -> bool:
    """Return true if the portal has seen to the end of the call that raised an error.

    That is, the error has passed through the portal's call, and was not raised in a signal handler
    before that began. Use it in a handler of the function that made the call.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals["__name__"].startswith("tenure."):
        if trace.tb_frame.f_code is _CARRY_OUT:
            return True
        trace = trace.tb_next
    return False


_CARRY_OUT = Portal._carry_out.__code__  # noqa: SLF001  the class is of this module

_portal: Portal | None = None
_making = threading.Lock()


def the_portal() -> Portal:
    """Return the portal of this process.

    Raises:
        Unsupported: threads have been replaced with greenlets in a way that cannot work.
    """
    global _portal  # noqa: PLW0603  one for the process is the point
    check_threads()
    with _making:
        if _portal is None:
            _portal = Portal()
        _portal.check_greenlets()
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
