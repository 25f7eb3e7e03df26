"""Cancelling the body of a block from outside it, as `asyncio.timeout` does, for several reasons.

A `Scope` is a block that a task has entered: that of a lease or of a session. When the reason for
the block is gone, `trigger` cancels the task, and the block turns that cancellation into its own
error when the scope exits. Rules:

* A task's scopes form a stack. However many of them are triggered, one cancellation is under way
  at a time, for the innermost triggered scope. When that one has exited and the program goes on
  inside an outer triggered scope, the task is cancelled again for that one.
* A task is never cancelled from within itself: a `trigger` by the task's own code takes effect
  at the task's next suspension, if the scope is still entered by then.
* Cancellation from outside wins: `exit` claims a cancellation only when nobody else has asked
  for one since the scope was entered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tenure.errors import Misuse

__all__ = ["Scope", "entered_scopes"]

_innermost: dict[asyncio.Task[object], Scope] = {}
"""Each task's innermost scope; a scope leads to the one around it."""


def entered_scopes(task: asyncio.Task[object] | None) -> Iterator[Scope]:
    """The scopes that a task is inside, innermost first."""
    scope = None if task is None else _innermost.get(task)
    while scope is not None:
        yield scope
        scope = scope._around


def _deliver(task: asyncio.Task[object]) -> None:
    """Cancel the task for its innermost triggered scope, unless it is being cancelled for one."""
    for scope in entered_scopes(task):
        if scope._delivered:
            return
        if scope._triggered:
            scope._delivered = True
            task.cancel()
            return


class Scope:
    """One block that a task may enter once. `owner` is what the block is of (a lease, a session)."""

    __slots__ = ("_around", "_baseline", "_delivered", "_task", "_triggered", "owner")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self._task: asyncio.Task[object] | None = None
        self._around: Scope | None = None
        self._baseline = 0
        self._triggered = False
        self._delivered = False

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The task that is inside, or ``None``."""
        return self._task

    def enter(self) -> None:
        """Enter, in the current task."""
        task = asyncio.current_task()
        if task is None:
            raise Misuse("a block can be entered only inside a task")
        self._task = task
        self._around = _innermost.get(task)
        self._baseline = task.cancelling()
        _innermost[task] = self

    def trigger(self) -> None:
        """Cancel the body, on the loop's thread. Does nothing when no task is inside."""
        task = self._task
        if task is None or self._triggered:
            return
        self._triggered = True
        inside = asyncio.current_task()
        if inside is not None and inside == task:
            task.get_loop().call_soon(_deliver, task)
        else:
            _deliver(task)

    def exit(self, error: BaseException | None) -> bool:
        """Leave; true when `error` is the cancellation that `trigger` asked for, and no other."""
        task = self._task
        assert task is not None, "a scope is exited once, after it was entered"
        self._task = None
        self._unlink(task)
        around = self._around
        while around is not None:
            if around._triggered and not around._delivered:
                task.get_loop().call_soon(_deliver, task)
                break
            around = around._around
        if not self._delivered:
            return False
        return task.uncancel() <= self._baseline and isinstance(error, asyncio.CancelledError)

    def _unlink(self, task: asyncio.Task[object]) -> None:
        innermost = _innermost[task]
        if innermost is self:
            if self._around is None:
                del _innermost[task]
            else:
                _innermost[task] = self._around
            return
        # Left out of order (an exit stack used by hand): take it out of the middle.
        for scope in entered_scopes(task):
            if scope._around is self:
                scope._around = self._around
                return
