"""A thread's agent: the one task on the loop that carries out what the thread calls.

A thread waits while its call is carried out, so one task is enough for all its calls, and that
task is for the primitives what the thread is for the program: the blocks that the thread has
entered are this task's scopes. What the primitives do for a task (cancel what it waits for when
a lease is lost, notice that it would wait for itself) they thereby do for a thread.

Rules:

* The thread writes a call's first half, the loop its second (see `Call`).
* Every call ends, and the thread that made it waits until then, whatever interrupts it.
* A call that an exception interrupts (Ctrl-C, a signal handler that raises) is cancelled. What it
  had obtained all the same is undone, on the loop, before the exception goes on in the thread.
* Inside the block of a lost lease or an expired session, a call raises that loss. What gives back
  (a release, a close, the end of a block) is carried out all the same.
* A cancellation that finds the agent idle is for the thread's next call, which looks at the
  blocks anyway; so it is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tenure.blocking.bell import Bell
from tenure.errors import SessionClosed
from tenure.lease import Lease
from tenure.scope import entered_scopes
from tenure.session import Session

__all__ = ["Agent", "Call", "loss_around"]


class Call:
    """One call of a thread.

    Attributes:
        function: what to call; it returns something to await.
        undo: called on the loop with a result that the thread will never have.
        gives_back: whether it is carried out inside the block of a lost lease, too.
        result, error: how it ended; final once it is `over`.
        settled: made by a thread that has been interrupted, and set when nothing is left.
        failure: why `undo` failed.
    """

    __slots__ = (
        "abandoned",
        "error",
        "failure",
        "function",
        "gives_back",
        "over",
        "result",
        "settled",
        "undo",
    )

    def __init__(
        self,
        function: Callable[[], Awaitable[Any]],
        *,
        undo: Callable[[Any], object] | None = None,
        gives_back: bool = False,
    ) -> None:
        self.function = function
        self.undo = undo
        self.gives_back = gives_back
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = False
        self.abandoned = False
        self.settled: threading.Event | None = None
        self.failure: Exception | None = None

    def settle(self) -> None:
        """Nobody wants the result: undo it, and tell the thread. On the loop."""
        assert self.settled is not None
        try:
            if self.undo is not None and self.error is None:
                self.undo(self.result)
        except Exception as failure:
            self.failure = failure
        finally:
            self.settled.set()


class Agent:
    """The task of one thread. Everything here but `__init__` runs on the loop.

    Attributes:
        task: the task, from its start on.
        bell: what the thread waits for while a call is under way.
    """

    def __init__(self, finished: Callable[[Call], None]) -> None:
        self.task: asyncio.Task[None]
        self.bell = Bell()
        self._finished = finished
        self._call: Call | None = None
        self._running: Call | None = None
        self._wake: asyncio.Future[None] | None = None
        self._ended = False

    def start(self) -> None:
        """Begin to wait for calls. Before anything else."""
        self.task = asyncio.get_running_loop().create_task(self._serve(), name="tenure-agent")

    def take(self, call: Call) -> None:
        """Carry a call out. The thread makes one at a time."""
        self._call = call
        self._rouse()

    def abandon(self, call: Call) -> None:
        """The thread that made the call has been interrupted."""
        call.abandoned = True
        if call.over:
            call.settle()
        elif self._running is call:
            self.task.cancel()
        elif self._call is not call:  # it was interrupted before it was handed in
            call.error = asyncio.CancelledError()
            self._over(call)

    def end(self) -> None:
        """The thread has ended."""
        self._ended = True
        self._rouse()

    def stop(self) -> None:
        """The program ends: so does the call, if there is one."""
        self.end()
        if self._running is not None:
            self.task.cancel()

    def _rouse(self) -> None:
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._call is None:
                if self._ended:
                    return
                self._wake = loop.create_future()
                try:
                    await self._wake
                except asyncio.CancelledError:
                    continue  # see the rules
            self._running = call = self._call
            self._call = None
            try:
                if call.abandoned:
                    call.error = asyncio.CancelledError()
                else:
                    await self._carry_out(call)
            finally:
                self._running = None
            self._over(call)

    async def _carry_out(self, call: Call) -> None:
        cancelled_before = self.task.cancelling()
        try:
            if not call.gives_back:
                loss = loss_around(self.task)
                if loss is not None:
                    raise loss
            call.result = await call.function()
        except asyncio.CancelledError:
            call.error = loss_around(self.task) or SessionClosed("the client was closed meanwhile")
        except GeneratorExit:  # the loop is gone, and the thread with it
            raise
        except BaseException as error:
            call.error = error
        while call.abandoned and self.task.cancelling() > cancelled_before:
            self.task.uncancel()

    def _over(self, call: Call) -> None:
        call.over = True
        self._finished(call)
        if call.abandoned:
            call.settle()
        else:
            self.bell.ring()


def loss_around(task: asyncio.Task[object]) -> Exception | None:
    """The loss of the innermost lost block that the task is inside, to raise. From any thread."""
    for scope in entered_scopes(task):
        owner = scope.owner
        if isinstance(owner, Lease):
            # A ticket's block has a scope too, and is not about the lease being held.
            if owner._scope is scope and owner.loss is not None:
                return owner._why_not_held()
        elif isinstance(owner, Session) and owner._scope is scope and owner.state == "expired":
            return owner._end_error()
    return None
