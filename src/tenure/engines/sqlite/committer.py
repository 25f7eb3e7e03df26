"""When operations run, and on which thread: inline when that is possible, together when not.

Rules:

* Operations take effect in the order in which they came.
* One at a time commits at once, on the caller's thread, when the turn is free. After some of
  these in a row one is put off to the next turn of the event loop. When others have come to stand
  beside it by then, all share a transaction, and so does what follows; when it is alone, the next
  are committed at once again.
* When the turn is somebody else's, one thread waits for it, and does all that has come meanwhile
  in one transaction. The event loop never waits for a lock or for a disk's acknowledgement.
* Where commits are durable every one of them waits for the disk, so that all are the thread's:
  an acknowledgement takes from a tenth of a millisecond to a second, and who knows which? What
  comes while one is awaited shares the next.
* A connection is used by one thread at a time: by the loop's, or by the waiting one while `busy`.
* One operation that the store fails does not fail those beside it: they are tried one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from tenure.background import BackgroundQueue, BackgroundThread, BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.engines.contract import Answer
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.files import explain
from tenure.engines.sqlite.transaction import Told, Transaction
from tenure.engines.sqlite.turn import Turn
from tenure.errors import TenureError

__all__ = ["Committer"]

P = ParamSpec("P")
T = TypeVar("T")

_ALONE = 16
"""Operations in a row that are committed at once before one is put off."""
_PATIENCE = 5.0
"""Seconds for which a database that another program has locked is tried again."""

_log = logging.getLogger("tenure.sqlite")

Work = Callable[..., Any]
Note = Callable[[Any], None]


class _Operation:
    """One operation that was put off.

    `note` hears its result, or ``None`` when it failed, whether or not the caller still waits.
    It is `done` when its transaction was committed, and is not run again then, whatever follows.
    """

    __slots__ = ("arguments", "done", "error", "future", "note", "result", "work")

    def __init__(
        self,
        work: Work,
        arguments: tuple[Any, ...],
        future: asyncio.Future[Any],
        note: Note | None,
    ) -> None:
        self.work = work
        self.arguments = arguments
        self.future = future
        self.note = note
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False


class Committer:
    """Runs the operations of one engine.

    Args:
        tell: called on the loop, after a commit, with what it has to tell.
        answered: called on the loop when operations that were put off have been answered.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        turn: Turn,
        tx: Transaction,
        path: str,
        tell: Callable[[Told], None],
        answered: Callable[[], None],
    ) -> None:
        self.busy = False
        self.stalled_since: float | None = None
        self._loop = loop
        self._clock = clock
        self._turn = turn
        self._tx = tx
        self._path = path
        self._tell = tell
        self._answered = answered
        self._closed: TenureError | None = None
        self._grouping = False
        self._alone = 0
        self._queue: deque[_Operation] = deque()
        self._carried_out: deque[tuple[deque[_Operation], deque[Told]]] = deque()
        self._failures = Failures(f"committing to {path}", _log)
        self._flushing = BackgroundTimer(loop, clock.now, self._flush, self._failures)
        self._telling = BackgroundQueue(loop, clock.now, tell, self._failures)
        self._thread = BackgroundThread("tenure-sqlite", self._run_thread)
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._abandoned = False
        self._ending = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether nothing has been put off, so that the connection is the loop's to read with."""
        return not self.busy and not self._queue

    def do(
        self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Answer[T]:
        """Run an operation: now, or in a while."""
        assert not kwargs
        return self.do_and_note(None, work, *args)

    def do_and_note(
        self, note: Callable[[T | None], None] | None, work: Callable[..., T], *args: Any
    ) -> Answer[T]:
        """The same; `note` hears the result of what was put off."""
        tx = self._tx
        if self._grouping or tx.durable or self._queue or self.busy or not self._turn.try_take():
            return self._put_off(note, work, args)
        self._alone += 1
        if self._alone >= _ALONE:
            self._grouping = True
        failure: TenureError | None = None
        try:
            tx.begin()
            try:
                result = work(tx, *args)
            except TenureError as error:
                failure = error
            tx.commit()
        except Exception as error:
            self._roll_back()
            if tx.committed:
                self._failures.report(error)
            elif schema.is_busy(error):
                return self._put_off(note, work, args)
            elif isinstance(error, (sqlite3.Error, OSError)):
                raise self._explain(error) from error
            else:
                raise
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._turn.release()
        told: Told | None = None
        try:
            told = tx.take_told()
            if told is not None:
                self._tell_now(told)
        except Exception as error:
            self._tell_later(told, error)
        if failure is not None:
            raise failure
        return result

    def _tell_now(self, told: Told) -> None:
        """Tell what a commit has to tell, after what earlier ones have."""
        if self._telling.items:
            self._telling.put((told,))
        else:
            self._tell(told)

    def _tell_later(self, told: Told | None, error: Exception) -> None:
        """Telling failed. What has been committed is told all the same, or waiters never hear."""
        self._failures.report(error)
        told = self._tx.take_told() if told is None else told
        if told is not None:
            self._telling.put_threadsafe(told)

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._tx.rollback()
        told = self._tx.take_told()
        if told is not None:  # the error came after the commit
            self._telling.put_threadsafe(told)

    # Put off

    def _put_off(self, note: Note | None, work: Work, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.append(_Operation(work, args, future, note))
        if not self._flushing.armed and not self.busy:
            self._flushing.soon()
        return future

    def _flush(self) -> None:
        """Do all that was put off, here or in the thread."""
        self._deliver()  # what an error has interrupted
        if self.busy or not self._queue:
            return
        if self._tx.durable or not self._turn.try_take():
            self._hand_over()
            return
        operations = self._take()
        self._grouping = len(operations) > 1
        self._alone = 0
        told: list[Told] = []
        try:
            self._run(operations, told)
        except sqlite3.Error:  # locked by another program: that takes patience
            self._queue.extendleft(reversed(operations))
            self._hand_over()
            return
        except BaseException:  # an interrupt
            self._queue.extendleft(each for each in reversed(operations) if not each.done)
            self._flushing.soon()
            self._carried_out.append((deque(each for each in operations if each.done), deque(told)))
            self._deliver()
            raise
        finally:
            self._turn.release()
        self._carried_out.append((deque(operations), deque(told)))
        self._deliver()

    def _take(self) -> list[_Operation]:
        put_off = self._queue
        return [put_off.popleft() for _ in range(len(put_off))]

    def _hand_over(self) -> None:
        self._thread.start()  # if that fails, this is tried again, after a pause
        self.busy = True
        self.stalled_since = self._clock.now()
        self._errands.put(self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        """In the thread: take the turn, however long that takes, and do what has come by then."""
        operations: list[_Operation] = []
        told: list[Told] = []
        failure: Exception | None = None
        try:
            self._turn.take()
            with self._ending:
                if self._abandoned:
                    self._turn.close()
                    return
                self.stalled_since = None
                try:
                    operations = self._take()
                    self._run_patiently(operations, told)
                finally:
                    self._turn.release()
        except Exception as error:
            failure, self.stalled_since = error, None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._done, operations, told, failure)

    def _run_patiently(self, operations: list[_Operation], told: list[Told]) -> None:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return self._run(operations, told)
            except sqlite3.Error as error:
                if time.monotonic() < until:
                    time.sleep(0.005)
                    continue
                for operation in operations:
                    operation.error = schema.explain(error, self._path)
                return None

    def _done(
        self, operations: list[_Operation], told: list[Told], failure: Exception | None
    ) -> None:
        self.busy = False
        if self._closed is not None:  # too late: nobody is there any more
            self._fail(operations, self._closed)
            return
        if failure is not None:
            for operation in operations:
                if not operation.done:
                    operation.error = operation.error or self._explain(failure)
        self._carried_out.append((deque(operations), deque(told)))
        with self._failures.contained():
            self._deliver()
        if failure is not None:
            self._flushing.at(self._clock.now() + self._failures.failed(failure))
        elif (self._queue or self._carried_out) and not self._flushing.armed:
            self._flushing.run()

    # In the turn, on either thread

    def _run(self, operations: list[_Operation], told: list[Told]) -> None:
        """Run operations in one transaction, or in one each if that fails.

        What they have to tell is added to `told`.

        Raises:
            sqlite3.Error: another program has locked the database; nothing was done.
        """
        if not operations:
            return
        try:
            self._run_together(operations, told)
        except Exception as error:
            if schema.is_busy(error):
                raise
            if len(operations) == 1:
                operations[0].error = self._explain(error)
                return
        else:
            return
        for operation in operations:
            try:
                self._run_together([operation], told)
            except Exception as error:
                operation.error = self._explain(error)

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.Error):
            return schema.explain(error, self._path)
        if isinstance(error, OSError) and not isinstance(error, TenureError):
            return explain(f"cannot write to the files of {self._path}", error)
        return error

    def _run_together(self, operations: list[_Operation], told: list[Told]) -> None:
        tx = self._tx
        afterwards: BaseException | None = None
        try:
            tx.begin()
            for operation in operations:
                operation.error = None
                try:
                    operation.result = operation.work(tx, *operation.arguments)
                except TenureError as error:
                    operation.error = error
            tx.commit()
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                tx.rollback()
            if not tx.committed:
                raise
            afterwards = error
        for operation in operations:
            operation.done = True
        try:
            each = tx.take_told()
            if each is not None:
                told.append(each)
        except Exception as error:
            self._tell_later(None, error)
        if isinstance(afterwards, Exception):
            self._failures.report(afterwards)
        elif afterwards is not None:
            raise afterwards

    def _deliver(self) -> None:
        """Answer what was carried out, and then tell. On the loop.

        What fails for one is logged; the others go on. After an error in here the next flush goes
        on where it came.
        """
        while self._carried_out:
            operations, told = self._carried_out[0]
            while operations:
                self._answer(operations[0])
                operations.popleft()
            while told:
                try:
                    self._tell_now(told[0])
                except Exception as problem:
                    self._tell_later(told[0], problem)
                told.popleft()
            self._carried_out.popleft()
            try:
                self._answered()
            except Exception as problem:
                self._failures.report(problem)

    def _answer(self, operation: _Operation) -> None:
        try:
            if operation.note is not None:
                operation.note(operation.result if operation.error is None else None)
        except Exception as problem:
            self._failures.report(problem)
        error, future = operation.error, operation.future
        if future.done():
            return  # its caller has left
        if error is None:
            future.set_result(operation.result)
        else:
            future.set_exception(error)
            future.exception()  # a caller that waits hears it; no caller has to

    # The thread

    def _run_thread(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand()

    def stop(self, error: TenureError) -> bool:
        """Stop: what has not been done fails with `error`.

        A thread that still waits for the turn is left alone; when it gets it, it gives it back,
        and closes it. Returns whether there is one.
        """
        self._closed = error
        self._flushing.cancel()
        self._telling.clear()
        self._fail(self._take(), error)
        for operations, _ in self._carried_out:
            self._fail(operations, error)
        self._carried_out.clear()
        with self._ending:
            self._abandoned = self.stalled_since is not None
        if self._thread.alive:
            self._errands.put(None)
            if not self._abandoned:
                self._thread.join()
        return self._abandoned

    def _fail(self, operations: Iterable[_Operation], error: TenureError) -> None:
        for operation in operations:
            if not operation.future.done():
                operation.future.set_exception(error)
                operation.future.exception()  # whoever waits for it hears it; nobody has to
