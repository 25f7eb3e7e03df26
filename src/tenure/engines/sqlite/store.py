"""Resources of an open store, and the `Committer`, which runs all operations on it.

A `Store` opens and closes its connections, its turn, and this engine's participant, in the right
order. A forked child inherits these resources but must not use them. The child closes the files,
but never SQLite's connections: closing one would remove the log that the parent still writes.

The `Committer` runs operations inline if possible, otherwise grouped in a background thread. Rules:

* Operations take effect in the order in which they were submitted.
* An operation commits immediately, on the caller's thread, if the turn is free. After several of
  these in a row, one is deferred to the next iteration of the event loop. If more operations are
  deferred by then, all share one transaction, and later operations are grouped as well. Otherwise
  the next operations commit immediately again.
* While another process has the turn, a thread waits for it, and then runs all operations deferred
  meanwhile in one transaction. So the event loop waits for no other process. It does wait for its
  own commits without a sync, in which SQLite may write back its log, and for the first opening of
  the loop's connection for reading.
* Durable commits are all made by the thread, because each waits for the disk, for between a tenth
  of a millisecond and a second. Operations submitted meanwhile share the next commit.
* Only one thread uses a connection: the loop's thread, or the background thread while `busy`.
* If a shared transaction fails, its operations run again in one transaction each, so that one
  failing operation does not fail the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from tenure.background import BackgroundQueue, BackgroundThread, BackgroundTimer, Failures
from tenure.clock import Clock
from tenure.engines.contract import Answer
from tenure.engines.sqlite import protection, schema
from tenure.engines.sqlite.checkpoint import Checkpointer
from tenure.engines.sqlite.files import OpenFiles, prepare, share_side_files, system_error
from tenure.engines.sqlite.forking import Guard
from tenure.engines.sqlite.liveness import LivenessFile, LivenessFiles, boot_id, clock_id
from tenure.engines.sqlite.notifier import DatagramNotifier, NoNotifier
from tenure.engines.sqlite.protection import FileMarks, LogLocks
from tenure.engines.sqlite.transaction import DatabaseTurn, Messages, Transaction, Turn, is_set_back
from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.greenlets import new_queue

T = TypeVar("T")

_ALONE = 16
"""Operations in a row that commit immediately before one is deferred."""
_LOCKED_TIMEOUT = 5.0
"""Seconds during which a transaction is retried while another program has locked the database."""

log = logging.getLogger("tenure.sqlite")

Work = Callable[..., Any]
Note = Callable[[Any], None]


class _Operation:
    """One operation; a deferred one has a future.

    `note` is called with the result, or with ``None`` after a failure, even if the caller no longer
    waits. `done` is set after its commit or its failure; it is not run again after that.
    """

    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: Exception | None = None
    done = False

    def __init__(self, work: Work, arguments: tuple[Any, ...], note: Note | None) -> None:
        self.work = work
        self.arguments = arguments
        self.note = note


class _Listener(Protocol):
    """The monitor, which the committer calls on the loop: after commits, and deferrals.

    `notify` is called after the commits of the thread, in it: the loop may be busy.
    """

    def committed(self, messages: Messages, /) -> None: ...

    def notify(self, messages: Messages, /) -> None: ...

    def keep_ticking(self) -> None: ...


class Committer:
    """Runs the operations of one engine.

    Attributes:
        listener: the monitor; set before the first operation.
        busy: whether the thread uses the connection, or waits for the turn.
        stalled_since: the time at which the thread began to wait for the turn, also for a moment.
    """

    listener: _Listener

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        turn: Turn | DatabaseTurn,
        tx: Transaction,
    ) -> None:
        self.busy = False
        self.stalled_since: float | None = None
        self._loop = loop
        self._clock = clock
        self._turn = turn
        self._tx = tx
        self._path = tx.place.path
        self._closed: TenureError | None = None
        self._grouping = False
        self._alone = 0
        self._queue: deque[_Operation] = deque()
        self._finished: deque[tuple[deque[_Operation], deque[Messages]]] = deque()
        self._failures = Failures(f"committing to {self._path}", log)
        self._flushing = BackgroundTimer(loop, clock.now, self._flush, self._failures)
        self._outgoing: BackgroundQueue[Messages] = BackgroundQueue(
            loop,
            clock.now,
            lambda messages: self.listener.committed(messages),  # noqa: PLW0108  it is set later
            self._failures,
        )
        self._thread = BackgroundThread("tenure-sqlite", self._run_thread)
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = new_queue()
        self._abandoned = False
        self._ending = threading.Lock()

    @property
    def idle(self) -> bool:
        """True if no operation is deferred, so that the loop may read with the connection."""
        return not self.busy and not self._queue

    def do(self, work: Callable[..., T], *args: Any, note: Note | None = None) -> Answer[T]:
        """Run an operation; return its result, or a future if the operation was deferred.

        Args:
            work: called with the transaction and `args`.
            *args: further arguments of `work`.
            note: called with the result, before the caller gets it; with ``None`` after a failure.
        """
        operation = _Operation(work, args, note)
        if self._grouping or self._tx.durable or self._queue or self.busy:
            return self._defer(operation)
        messages: list[Messages] = []
        try:
            if not self._run_together((operation,), messages, take=True):
                return self._defer(operation)
        except Exception as error:
            if schema.is_busy(error):
                return self._defer(operation)
            operation.error = schema.explained(error, self._path)
        except BaseException:
            self._outgoing.put(messages)  # the interrupt came after the commit
            raise
        self._alone += 1
        if self._alone >= _ALONE:
            self._grouping = True
        try:
            if note is not None:
                note(operation.result if operation.error is None else None)
            if messages:
                self._pass_on(messages[0])
        except Exception as problem:
            self._failures.report(problem)
            self._outgoing.put(messages)
        if operation.error is not None:
            raise operation.error
        result: T = operation.result
        return result

    def _pass_on(self, messages: Messages) -> None:
        """Pass on a commit's messages after earlier ones; after an error, queue them again."""
        try:
            if self._outgoing.items:
                self._outgoing.put((messages,))
            else:
                self.listener.committed(messages)
        except Exception as error:
            self._failures.report(error)
            self._outgoing.put_threadsafe(messages)

    def _defer(self, operation: _Operation) -> asyncio.Future[Any]:
        operation.future = future = self._loop.create_future()
        self._queue.append(operation)
        if not self._flushing.armed and not self.busy:
            self._flushing.soon()
        self.listener.keep_ticking()
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
        messages: list[Messages] = []
        locked = False
        try:
            self._run(operations, messages)
        except sqlite3.Error:  # by another program: the thread retries
            locked = True
        finally:  # after an interrupt, too
            self._queue.extendleft(each for each in reversed(operations) if not each.done)
            done = deque(each for each in operations if each.done)
            self._finished.append((done, deque(messages)))
            self._turn.release()
            if self._queue and not locked:
                self._flushing.soon()
            self._deliver()
        if locked:
            self._hand_over()

    def _take(self) -> list[_Operation]:
        put_off = self._queue
        return [put_off.popleft() for _ in range(len(put_off))]

    def _hand_over(self) -> None:
        self._thread.start()  # if this fails, the flush is repeated after a pause
        self.busy = True
        self.stalled_since = self._clock.now()
        self._errands.put(self._wait_for_turn)

    def _wait_for_turn(self) -> None:
        """Take the turn, in the thread, and run the deferred operations."""
        operations: list[_Operation] = []
        messages: list[Messages] = []
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
                    self._run_retrying(operations, messages)
                finally:
                    self._turn.release()
            for each in messages:
                self.listener.notify(each)
        except Exception as error:
            failure, self.stalled_since = error, None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._done, operations, messages, failure)

    def _run_retrying(self, operations: list[_Operation], messages: list[Messages]) -> None:
        until = time.monotonic() + _LOCKED_TIMEOUT
        while True:
            try:
                return self._run(operations, messages)
            except sqlite3.Error as error:
                if time.monotonic() >= until:
                    for operation in operations:
                        operation.error = schema.explained(error, self._path)
                    return None
            time.sleep(0.005)

    def _done(
        self, operations: list[_Operation], messages: list[Messages], failure: Exception | None
    ) -> None:
        self.busy = False
        if self._closed is not None:  # too late: the engine has been closed
            self._fail(operations, self._closed)
            return
        if failure is not None:
            for operation in operations:
                if not operation.done:
                    operation.error = operation.error or schema.explained(failure, self._path)
        self._finished.append((deque(operations), deque(messages)))
        with self._failures.contained():
            self._deliver()
        if failure is not None:
            self._flushing.at(self._clock.now() + self._failures.failed(failure))
        elif (self._queue or self._finished) and not self._flushing.armed:
            self._flushing.run()

    # In the turn, on either thread

    def _run(self, operations: list[_Operation], messages: list[Messages]) -> None:
        """Run operations in one transaction, or in one each if that fails.

        Their messages are added to `messages`.

        Raises:
            sqlite3.Error: another program has locked the database; nothing was done.
        """
        operations = [each for each in operations if not each.done]
        if not operations:
            return
        try:
            self._run_together(operations, messages)
        except Exception as error:
            if schema.is_busy(error):
                raise
            if len(operations) == 1:
                operations[0].error, operations[0].done = schema.explained(error, self._path), True
                return
        else:
            return
        for operation in operations:
            if operation.done:
                continue
            try:
                self._run_together([operation], messages)
            except Exception as error:
                if self._tx.place.portable and schema.is_busy(error):  # it has lost the turn
                    raise
                operation.error, operation.done = schema.explained(error, self._path), True

    def _run_together(
        self, operations: Sequence[_Operation], messages: list[Messages], *, take: bool = False
    ) -> bool:
        """Run operations in one transaction; with `take`, in a separate turn, if it is free."""
        tx = self._tx
        tx.committed = False  # also if `begin` fails before it can report so
        if take and not self._turn.try_take():
            return False
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
            if not (tx.committed and isinstance(error, Exception)):
                raise
            self._failures.report(error)
        finally:
            if tx.committed:
                for operation in operations:
                    operation.done = True
                sent = tx.messages
                if sent.pushes or sent.recipients or sent.removed:
                    messages.append(sent)
                    tx.messages = Messages()
            if take:
                self._turn.release()
        return True

    def _deliver(self) -> None:
        """Resolve the futures of finished operations, then pass on their messages. On the loop.

        After an interruption, the next flush continues at the same place.
        """
        while self._finished:
            operations, messages = self._finished[0]
            while operations:
                self._answer(operations[0])
                operations.popleft()
            while messages:
                self._pass_on(messages[0])
                messages.popleft()
            self._finished.popleft()

    def _answer(self, operation: _Operation) -> None:
        try:
            if operation.note is not None:
                operation.note(operation.result if operation.error is None else None)
        except Exception as problem:
            self._failures.report(problem)
        if operation.error is not None:
            self._fail((operation,), operation.error)
        elif operation.future is not None and not operation.future.done():
            operation.future.set_result(operation.result)

    # The thread

    def _run_thread(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand()

    def stop(self, error: TenureError) -> bool:
        """Stop, and fail all unfinished operations with `error`.

        Return true if the thread still waits for the turn. It is not joined then; when it gets the
        turn, it closes the turn's file, which releases the lock.
        """
        self._closed = error
        self._flushing.cancel()
        self._outgoing.clear()
        self._fail(self._take(), error)
        for operations, _ in self._finished:
            self._fail(operations, error)
        self._finished.clear()
        with self._ending:
            self._abandoned = self.stalled_since is not None
        if self._thread.alive:
            self._errands.put(None)
            if not self._abandoned:
                self._thread.join()
        return self._abandoned

    def _fail(self, operations: Iterable[_Operation], error: Exception) -> None:
        for operation in operations:
            future = operation.future
            if future is not None and not future.done():  # its caller may have been cancelled
                future.set_exception(error)
                future.exception()  # marks it as retrieved: the caller need not wait for it


_opening = Guard()
_open: weakref.WeakSet[Store] = weakref.WeakSet()


async def answered(answer: Answer[T]) -> T:
    """Wait for the result of an operation, if it was deferred."""
    return await answer if isinstance(answer, asyncio.Future) else answer


class Store:
    """Resources of an open engine.

    Attributes:
        forked: whether this process is a forked child; the resources belong to its parent.
    """

    def __init__(self, address: SqliteUrl, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.clock = clock
        self.loop = loop
        self.forked = False
        self._reader: Transaction | None = None
        # One at a time: no thread opens a file that another is just creating.
        with _opening, ExitStack() as undo:
            self.place = prepare(address)
            portable = address.portable
            self.turn: Turn | DatabaseTurn
            self.notifier: DatagramNotifier | NoNotifier
            with system_error(f"cannot use the files in {self.place.folder}"):
                self.turn = DatabaseTurn() if portable else Turn(self.place.turn, self.place.mode)
                undo.callback(self.turn.close)
                self.marks = FileMarks(self.place)
                undo.callback(self.marks.close)
                self.notifier = (
                    NoNotifier()
                    if portable
                    else DatagramNotifier(self.place.folder, self.place.mode)
                )
                undo.callback(self.notifier.close, loop)
            self.lives = LivenessFiles(self.place.folder, clock.now, portable=portable)
            with self.explained():
                connection = schema.connect(address)
            undo.callback(connection.close)
            with system_error(f"cannot protect the files of {self.place.path}"):
                self._log_locks = LogLocks(self.place, supported=self.marks.supported)
                undo.callback(self._log_locks.release)
                self._files = OpenFiles(self.place, self._log_locks.read)
            share_side_files(self.place, address)
            self._checkpointer = Checkpointer(address, self._check_in_place)
            self.tx = self._transaction(connection)
            if isinstance(self.turn, DatabaseTurn):
                self.turn.use(connection, self.tx.guard)
            self.tx.check_in_place()
            undo.pop_all()
        self.committer = Committer(loop, clock, self.turn, self.tx)
        _open.add(self)

    def _check_in_place(self) -> None:
        self.tx.check_in_place()

    def _transaction(self, connection: sqlite3.Connection) -> Transaction:
        return Transaction(
            *(connection, self.clock, self.place, self._files, self.lives, self._checkpointer),
            self.turn,
            durable=self.address.durability == "full",
        )

    @property
    def life(self) -> LivenessFile | None:
        """Liveness file of this engine, once it has sessions."""
        return self.tx.life

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert errors of SQLite and the system into ones that say what to do about them."""
        try:
            with system_error(f"cannot use the files of {self.address.path}"):
                yield
        except sqlite3.Error as error:
            raise schema.explain(error, self.address.path) from error

    def boot(self) -> str:
        """Return the id of this boot, or in portable mode of the clock."""
        return clock_id() if self.address.portable else boot_id()

    def is_current(self) -> bool:
        """Return true if the file has its tables, and was last used during this boot."""
        with self.explained(), self.tx.guard:
            connection, portable = self.tx.connection, self.address.portable
            if not schema.is_ready(connection, self.address.path, portable=portable):
                return False
            self.tx.ready = True
            return bool(self.tx.execute("SELECT boot FROM meta").fetchone() == (self.boot(),))

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Read the current state of the file. On the loop; without an await inside."""
        tx = self.tx if self.committer.idle else self._own_reader()
        with self.explained():
            try:
                tx.begin_reading()
                yield tx
            finally:
                tx.end_reading()

    def _own_reader(self) -> Transaction:
        """Return a second connection, for reading while the thread uses the first."""
        if self._reader is None:
            self.tx.check_in_place()  # the log is found by name: see `Checkpointer`
            with _opening:
                self._reader = self._transaction(schema.connect(self.address))
        self._reader.participant, self._reader.life = self.tx.participant, self.tx.life
        return self._reader

    def enter(self, participant: int, life: LivenessFile, notified: Callable[[], None]) -> None:
        """Register this engine as a participant."""
        self.tx.participant, self.tx.life = participant, life
        self.notifier.bind(participant, self.loop, notified)

    def mark_files(self) -> None:
        """Mark with which files this engine works, before it joins the participants.

        Raises:
            EngineUnavailable: a participant works with files that were removed or replaced.
        """
        self.marks.mark(self._files)
        try:
            self._files.check()
            if self.are_former_files_used():
                raise self.former_files()
            if self.marks.any_others():
                self.tx.check_progress(self.tx.progress, self.turn.recorded)
            self.tx.joined = True
        except BaseException:
            self.clear_marks()
            raise

    def clear_marks(self) -> None:
        """Stop marking that this engine works with its files."""
        self.tx.joined = False
        self.marks.clear()

    def are_former_files_used(self) -> bool:
        """Return true if a participant works with files that were removed or replaced."""
        return self.marks.any_others(self._files)

    def is_set_back(self) -> bool:
        """Return true if a participant has committed more than the store contains."""
        recorded = self.turn.recorded
        if recorded is None or not self.marks.any_others():
            return False
        with self.reading() as tx:
            found = schema.progress(tx.connection)
        return found is not None and is_set_back(found, recorded)

    def check_in_place(self) -> None:
        """Raise unless all files are those that were opened, this engine's liveness file too.

        Raises:
            EngineError: something was done to one of them.
        """
        self.tx.check_in_place()
        life = self.life
        if life is not None and (how := life.damage()):
            raise self._files.lost_error(life.path, how)

    def are_files_lost(self) -> bool:
        """Return true if the files of this engine were removed or replaced."""
        try:
            self._files.check()
        except EngineError:
            return True
        return False

    def stop_using_files(self, why: str) -> None:
        """Refuse to use the files from now on, even if they are put back."""
        self._files.lost = why

    def former_files(self) -> EngineUnavailable:
        """Return the error for participants that still work with former files."""
        former = protection.users_of(self.place.path, self._files.identities.values())
        users = former or protection.users_of(self.place.path)  # whose store was set back
        named = f": {users}" if users else ""
        return EngineUnavailable(
            f"another program still works with files of {self.place.path} that were removed, "
            "replaced or set back while in use, and its leases may be held. End that program, or "
            f"wait until it has noticed the loss{named}"
        )

    def close(self, error: TenureError, *, left: bool) -> None:
        """Close everything; unfinished operations fail with `error`.

        Args:
            error: raised by the operations that have not been carried out.
            left: whether the store has removed this participant; otherwise other participants find
                it dead.
        """
        _open.discard(self)
        left_behind = self.committer.stop(error)
        if not left_behind:
            self.turn.close()
        self.notifier.close(self.loop)
        if self.tx.life is not None:
            if left:
                self.tx.life.remove()
            else:
                self.tx.life.close()
        self.lives.close()
        self._checkpointer.close()
        # If the files were replaced, SQLite must not take this for the last connection: it would
        # copy the former log into the new database, and remove the new log.
        if not self.are_files_lost():
            self._log_locks.release()
        for tx in filter(None, (self._reader, self.tx)):
            with contextlib.suppress(sqlite3.Error), tx.guard:
                tx.connection.close()
        self._log_locks.release()
        self._log_locks.close_unused()
        self.marks.close()

    def abandon(self) -> None:
        """Close the files in a forked child."""
        import ctypes

        self.forked = True
        self.turn.close()
        self.marks.close()
        self.notifier.abandon()
        if self.tx.life is not None:
            self.tx.life.close()
        for tx in filter(None, (self._reader, self.tx)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tx.connection))


def _abandon_all() -> None:
    for store in list(_open):
        store.abandon()
    protection.abandon()


if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_abandon_all)
