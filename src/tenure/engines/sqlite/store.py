"""An open file: its connections, its turn, and this engine's part in it.

A `Store` has what an engine needs, and opens and closes it in the right order.

A forked child inherits all of it and may use none of it. There everything is let go of without a
word to SQLite, whose connections are never closed: to close one would be to remove the log that
the parent still writes.
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

from tenure.clock import Clock
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.bell import Bell
from tenure.engines.sqlite.checkpoint import Checkpointer
from tenure.engines.sqlite.committer import Committer
from tenure.engines.sqlite.files import prepare, share_side_files, system_error
from tenure.engines.sqlite.forking import Guard
from tenure.engines.sqlite.life import Life, Lives, boot_id
from tenure.engines.sqlite.transaction import Transaction, Turn
from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import TenureError

__all__ = ["Store", "log"]

log = logging.getLogger("tenure.sqlite")

_opening = Guard()
_open: weakref.WeakSet[Store] = weakref.WeakSet()


class Store:
    """Resources of an open engine.

    Attributes:
        forked: this is a forked child, and all of it its parent's.
    """

    def __init__(self, address: SqliteUrl, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        """Open the files of the store, and create them if they are missing."""
        self.address = address
        self.clock = clock
        self.loop = loop
        self.forked = False
        self._reader: Transaction | None = None
        # One at a time: no thread looks at a file that another is just making.
        with _opening, ExitStack() as undo:
            self.place = prepare(address)
            with system_error(f"cannot use the files in {self.place.folder}"):
                self.turn = Turn(self.place.turn(), self.place.mode)
                undo.callback(self.turn.close)
                self.bell = Bell(self.place.folder, self.place.mode)
                undo.callback(self.bell.close, loop)
            self.lives = Lives(self.place.folder)
            with self.explained():
                connection = schema.connect(address)
            undo.callback(connection.close)
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
            *(connection, self.clock, self.place, self.lives, self._checkpointer),
            durable=self.address.durability == "full",
        )

    @property
    def life(self) -> Life | None:
        """This engine's sign of life, once it has sessions."""
        return self.tx.life

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of SQLite and the system into ones that say what to do about them."""
        try:
            with system_error(f"cannot use the files of {self.address.path}"):
                yield
        except sqlite3.Error as error:
            raise schema.explain(error, self.address.path) from error

    def is_current(self) -> bool:
        """Return whether the file has its tables, and was last used during this boot."""
        with self.explained(), self.tx.guard:
            if not schema.is_ready(self.tx.connection, self.address.path):
                return False
            self.tx.ready = True
            return bool(self.tx.execute("SELECT boot FROM meta").fetchone() == (boot_id(),))

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """A look at the file as it is now. On the loop; without an await inside."""
        tx = self.tx if self.committer.idle else self._own_reader()
        with self.explained():
            try:
                tx.begin_reading()
                yield tx
            finally:
                tx.end_reading()

    def _own_reader(self) -> Transaction:
        """For as long as the first connection is the thread's."""
        if self._reader is None:
            self.tx.check_in_place()  # the log is found by name: see `Checkpointer`
            with _opening:
                self._reader = self._transaction(schema.connect(self.address))
        self._reader.participant, self._reader.life = self.tx.participant, self.tx.life
        return self._reader

    def enter(self, participant: int, life: Life, rung: Callable[[], None]) -> None:
        """This engine is a participant now."""
        self.tx.participant, self.tx.life = participant, life
        self.bell.hang(participant)
        self.bell.listen(self.loop, rung)

    def close(self, error: TenureError, *, left: bool) -> None:
        """Let go of everything; what has not been done fails with `error`.

        Args:
            error: raised by the operations that have not been carried out.
            left: the store knows this participant no more. Else others will find it dead.
        """
        _open.discard(self)
        left_behind = self.committer.stop(error)
        if not left_behind:
            self.turn.close()
        self.bell.close(self.loop)
        if self.tx.life is not None:
            if left:
                self.tx.life.remove()
            else:
                self.tx.life.close()
        self.lives.close()
        self._checkpointer.close()
        for tx in filter(None, (self._reader, self.tx)):
            with contextlib.suppress(sqlite3.Error), tx.guard:
                tx.connection.close()

    def abandon(self) -> None:
        """In a forked child."""
        import ctypes

        self.forked = True
        self.turn.close()
        self.bell.abandon()
        if self.tx.life is not None:
            self.tx.life.close()
        for tx in filter(None, (self._reader, self.tx)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tx.connection))


def _abandon_all() -> None:
    for store in list(_open):
        store.abandon()


os.register_at_fork(after_in_child=_abandon_all)
