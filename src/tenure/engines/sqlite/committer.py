"""Execution of operations: inline where possible, grouped in a background thread otherwise.

Rules:

* Operations take effect in the order in which they were submitted.
* An operation commits immediately, on the caller's thread, when the turn is free. After several of
  these in a row, one is deferred to the next iteration of the event loop. If others have been
  deferred by then, all share one transaction, and later operations are grouped as well. If it is
  the only one, the next operations commit immediately again.
* While another process has the turn, one thread waits for it, and then runs all operations
  deferred meanwhile in one transaction. The event loop never waits for a lock or for a disk.
* Where commits are durable, the thread makes all of them. Each waits for the disk, which takes
  between a tenth of a millisecond and a second. Operations submitted meanwhile share the next
  commit.
* One thread at a time uses a connection: the loop's thread, or the background thread while `busy`.
* If a shared transaction fails, its operations run again in one transaction each, so that one
  failing operation does not fail the others.
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
"""Operations in a row that commit immediately before one is deferred."""
_PATIENCE = 5.0
"""Seconds for which a transaction is retried while another program has locked the database."""

_log = logging.getLogger("tenure.sqlite")

Work = Callable[..., Any]
Note = Callable[[Any], None]


class _Operation:
    """One deferred operation.

    `note` is called with the result, or with ``None`` after a failure, even if the caller no
    longer waits. `done` is set when the transaction was committed; the operation is not run again
    after that.
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
        tell: called on the loop, after a commit, with its messages.
        answered: called on the loop after the futures of deferred operations were resolved.
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
        """True if no operation is deferred, so that the loop may read with the connection."""
        return not self.busy and not self._queue

    def do(
        self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Answer[T]:
        """Run an operation; return its result, or a future if the operation was deferred."""
        assert not kwargs
        return self.do_and_note(None, work, *args)

    def do_and_note(
        self, note: Callable[[T | None], None] | None, work: Callable[..., T], *args: Any
    ) -> Answer[T]:
        """Run an operation; if it was deferred, call `note` with its result, ``None`` on failure.

        The result is returned as by `do`.
        """
        tx = self._tx
        if self._grouping or tx.durable or self._queue or self.busy or not self._turn.try_take():
            return self._put_off(note, work, args)
        self._alone += 1
        if self._alone >= _ALONE:
            self._grouping = True
        failure: TenureError | None = None
        tx.committed = False  # also if `begin` fails before it can say so
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
        """Pass on the messages of a commit, after those of earlier commits."""
        if self._telling.items:
            self._telling.put((told,))
        else:
            self._tell(told)

    def _tell_later(self, told: Told | None, error: Exception) -> None:
        """Report the error, and queue the messages of a commit again, as waiters need them."""
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

    # Deferred operations
    def _put_off(self, note: Note | None, work: Work, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.append(_Operation(work, args, future, note))
        if not self._flushing.armed and not self.busy:
            self._flushing.soon()
        return future

    def _flush(self) -> None:
        """Run all deferred operations, here or in the thread."""
        self._deliver()  # results whose delivery an error has interrupted
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
        except sqlite3.Error:  # locked by another program: the thread retries
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
        self._thread.start()  # if this fails, the flush is repeated after a pause
        self.busy = True
        self.stalled_since = self._clock.now()
        self._errands.put(self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        """Take the turn, without a time limit, and run all operations deferred by then.

        Runs in the thread.
        """
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
        if self._closed is not None:  # too late: the engine has been closed
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

        Their messages are added to `told`.

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
        tx.committed = False  # also if `begin` fails before it can say so
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
        """Resolve the futures of finished operations, then pass on their messages. On the loop.

        An error of one operation is logged, and the others continue. After any other interruption
        the next flush continues at the same place.
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
            return  # its caller was cancelled
        if error is None:
            future.set_result(operation.result)
        else:
            future.set_exception(error)
            future.exception()  # marks it as retrieved: the caller need not wait for the result

    # The thread

    def _run_thread(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand()

    def stop(self, error: TenureError) -> bool:
        """Stop, and fail all unfinished operations with `error`.

        Return whether a thread still waits for the turn. Such a thread is not joined; when it gets
        the turn, it closes the turn's file, which releases the lock.
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
                operation.future.exception()  # marks it as retrieved
