"""Cancelling the body of a block from outside it, as `asyncio.timeout` does, for several reasons.

A `Scope` is a block that a task has entered: that of a lease or of a session, or an operation that
the end of its session interrupts. When the reason for the block is gone, `trigger` has the task
cancelled, and the block turns that cancellation into its own error when the scope exits. Rules:

* A task's scopes form a stack. However many of them are triggered, one cancellation is under way
  at a time, for the innermost triggered scope. When that one has exited and the program goes on
  inside an outer triggered scope, the task is cancelled again for that one.
* A task is never cancelled while it runs, only at a later turn of the loop: it is suspended then,
  so that the cancellation arrives inside the block, or it has left the block, and none is sent.
* Cancellation from outside wins: `exit` claims a cancellation only when nobody else has asked
  for one since the scope was entered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from weakref import ref

from tenure.errors import Misuse

__all__ = ["Scope", "entered_scopes", "note_failure"]

# Each task's innermost scope, by the task's id; a scope leads to the one around it. Neither the
# task nor the scope is kept alive, so that a task abandoned inside a block can be collected.
_innermost: dict[int, ref[Scope]] = {}


class Scope:
    """One block that a task may enter once. `owner` is what the block is of, until it is left."""

    __slots__ = (
        "__weakref__",
        "_around",
        "_baseline",
        "_delivered",
        "_link",
        "_task",
        "_triggered",
        "owner",
    )

    def __init__(self, owner: object) -> None:
        self.owner: object = owner
        self._task: asyncio.Task[object] | None = None
        self._triggered = False
        self._delivered = False

    @property
    def task(self) -> asyncio.Task[object] | None:
        """The task that is inside, or ``None``."""
        return self._task

    def enter(self, task: asyncio.Task[object] | None = None) -> None:
        """Enter, in the current task, or in that of a thread that is on its own meanwhile."""
        task = task or asyncio.current_task()
        if task is None:
            raise Misuse("a block can be entered only inside a task")
        key, self._link = id(task), ref(self)
        self._around = _find(task)
        self._baseline = task.cancelling()
        # No call stands between these two: an interrupted thread is inside, or it is not.
        self._task = task
        _innermost[key] = self._link

    def trigger(self) -> None:
        """Have the body cancelled. On the loop's thread; does nothing when no task is inside."""
        task = self._task
        if task is not None and not self._triggered:
            self._triggered = True
            task.get_loop().call_soon(_deliver, task)

    def exit(self, error: BaseException | None) -> bool:
        """Leave; true when `error` is the cancellation that `trigger` asked for, and no other."""
        task = self._task
        if task is None:
            raise Misuse("a block is left once, after it was entered")
        self._task = None
        self.owner = None  # which has this scope: the two would wait for the garbage collector
        around = self._around
        if _innermost.get(id(task)) is not self._link:
            self._step_out(task)
        elif around is None:
            del _innermost[id(task)]
        else:
            _innermost[id(task)] = around._link
        if not self._delivered:
            return False
        if around is not None:  # perhaps its turn has come
            task.get_loop().call_soon(_deliver, task)
        return task.uncancel() <= self._baseline and isinstance(error, asyncio.CancelledError)

    def _step_out(self, task: asyncio.Task[object]) -> None:
        """Left out of order, by an exit stack used by hand: from between two others."""
        for inner in entered_scopes(task):
            if inner._around is self:
                inner._around = self._around


def entered_scopes(task: asyncio.Task[object] | None) -> Iterator[Scope]:
    """The scopes that a task is inside, innermost first."""
    scope = None if task is None else _find(task)
    while scope is not None:
        yield scope
        scope = scope._around


def _find(task: asyncio.Task[object]) -> Scope | None:
    known = _innermost.get(id(task))
    scope = known() if known is not None else None
    # A task that was abandoned has left its id to another one.
    return scope if scope is not None and scope._task is task else None


def _deliver(task: asyncio.Task[object]) -> None:
    """Cancel the task for its innermost triggered scope, unless it is being cancelled for one."""
    for scope in entered_scopes(task):
        if scope._delivered:
            return
        if scope._triggered:
            scope._delivered = True
            task.cancel()
            return


def note_failure(error: BaseException | None, failure: Exception, what: str) -> None:
    """What leaving a block does when that fails: the body's error is never hidden.

    Raises `failure` when there is no `error`, and else notes it on that one.
    """
    if error is None:
        raise failure
    error.add_note(f"and {what} failed: {failure}")
