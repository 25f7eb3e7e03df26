"""Cancellation of a block's body from outside, as `asyncio.timeout` does, for several reasons.

A `Scope` is a block that a task has entered: of a lease, of a session, or around an operation that
ends with its session. When the lease or session is lost, `trigger` cancels the task, and the block
turns that cancellation into its own error when the scope exits. Rules:

* A task's scopes form a stack. Only one cancellation is in progress at a time, for the innermost
  triggered scope. When that scope has exited and the program continues inside an outer triggered
  scope, the task is cancelled again for the outer one.
* A task is never cancelled while it runs, only in a later iteration of the loop. Then the task is
  either suspended inside the block and receives the cancellation there, or it has left the block
  and no cancellation is sent.
* Cancellation by the program wins: `exit` consumes a cancellation only if no other was requested
  since the scope was entered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from tenure.errors import Misuse


class Scope:
    """A block that a task may enter once.

    A task has its innermost scope as an attribute, and a scope refers to the one around it, so all
    are freed with the task.

    Attributes:
        owner: the object to which the block belongs, until it is left.
        around: the enclosing scope; set when this one is entered.
        triggered: whether the lease or session of the block is lost.
        delivered: whether the task has been cancelled for it.
    """

    __slots__ = ("_baseline", "_task", "around", "delivered", "owner", "triggered")

    def __init__(self, owner: object) -> None:
        self.owner: object = owner
        self._task: asyncio.Task[object] | None = None
        self.triggered = False
        self.delivered = False

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The task inside, or ``None``."""
        return self._task

    def enter(self, task: asyncio.Task[object] | None = None) -> None:
        """Enter in the current task, or in that of a thread that runs outside the loop."""
        inside: Any = task or asyncio.current_task()
        if inside is None:
            raise Misuse("a block can be entered only inside a task")
        self.around: Scope | None = getattr(inside, "tenure_scope", None)
        self._baseline = inside.cancelling()
        # No call stands between these two, so an interrupted thread is inside or it is not.
        self._task = inside
        inside.tenure_scope = self

    def trigger(self) -> None:
        """Cancel the body. On the loop's thread; does nothing when no task is inside."""
        task = self._task
        if task is not None and not self.triggered:
            self.triggered = True
            task.get_loop().call_soon(_deliver, task)

    def exit(self, error: BaseException | None) -> bool:
        """Leave; return true if `error` is only the cancellation that `trigger` requested."""
        task: Any = self._task
        if task is None:
            raise Misuse("a block is left once, after it was entered")
        self._task = None
        self.owner = None  # breaks a reference cycle
        around = self.around
        if getattr(task, "tenure_scope", None) is self:  # a thread may be interrupted as it enters
            task.tenure_scope = around
        else:
            self._step_out(task)
        if not self.delivered:
            return False
        if around is not None:  # an outer scope may be triggered
            task.get_loop().call_soon(_deliver, task)
        return task.uncancel() <= self._baseline and isinstance(error, asyncio.CancelledError)

    def _step_out(self, task: asyncio.Task[object]) -> None:
        """Leave out of order, as an exit stack used by hand may do."""
        for inner in entered_scopes(task):
            if inner.around is self:
                inner.around = self.around


def is_inside(task: asyncio.Task[object] | None) -> bool:
    """Return true if a task is inside a scope."""
    return getattr(task, "tenure_scope", None) is not None


def entered_scopes(task: asyncio.Task[object] | None) -> Iterator[Scope]:
    """Yield the scopes that a task is inside, innermost first."""
    scope: Scope | None = getattr(task, "tenure_scope", None)
    while scope is not None:
        yield scope
        scope = scope.around


def _deliver(task: asyncio.Task[object]) -> None:
    """Cancel the task for its innermost triggered scope, unless a cancellation is in progress."""
    for scope in entered_scopes(task):
        if scope.delivered:
            return
        if scope.triggered:
            scope.delivered = True
            task.cancel()
            return
