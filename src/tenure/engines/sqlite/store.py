"""Resources of an open store: its connections, its turn, and this engine's participant.

A `Store` opens and closes them in the right order.

A forked child inherits these resources but must not use them. The child closes the files, but never
SQLite's connections: closing one would remove the log that the parent still writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from tenure.clock import Clock
from tenure.engines.contract import Answer
from tenure.engines.sqlite import protection, schema
from tenure.engines.sqlite.checkpoint import Checkpointer
from tenure.engines.sqlite.committer import Committer
from tenure.engines.sqlite.files import OpenFiles, prepare, share_side_files, system_error
from tenure.engines.sqlite.forking import Guard
from tenure.engines.sqlite.liveness import LivenessFile, LivenessFiles, boot_id
from tenure.engines.sqlite.notifier import DatagramNotifier
from tenure.engines.sqlite.protection import FileMarks, LogLocks
from tenure.engines.sqlite.transaction import Transaction, Turn, is_set_back
from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import EngineError, EngineUnavailable, TenureError

T = TypeVar("T")

log = logging.getLogger("tenure.sqlite")

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
            with system_error(f"cannot use the files in {self.place.folder}"):
                self.turn = Turn(self.place.turn, self.place.mode)
                undo.callback(self.turn.close)
                self.marks = FileMarks(self.place)
                undo.callback(self.marks.close)
                self.notifier = DatagramNotifier(self.place.folder, self.place.mode)
                undo.callback(self.notifier.close, loop)
            self.lives = LivenessFiles(self.place.folder, clock.now)
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

    def is_current(self) -> bool:
        """Return true if the file has its tables, and was last used during this boot."""
        with self.explained(), self.tx.guard:
            if not schema.is_ready(self.tx.connection, self.address.path):
                return False
            self.tx.ready = True
            return bool(self.tx.execute("SELECT boot FROM meta").fetchone() == (boot_id(),))

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


os.register_at_fork(after_in_child=_abandon_all)
