"""The turn to write, the transaction in it, and its messages.

The turn is a lock of the kernel, which one process has at a time. SQLite's own lock is acquired by
polling, so a writer may starve; processes that wait for the turn sleep in the kernel and are woken.
The turn only orders writers: SQLite's lock, taken inside it, protects the data. In portable mode
that lock is the turn (`DatabaseTurn`).

The file of the turn also records how far the commits have come. A backup that is copied or restored
over the store sets the store back, but not this record, so that no program grants again what has
been granted since the backup. The first participant begins a new record.

Operations are functions of a `Transaction` (in ``requests``, ``sessions``, ``nodes``). Several of
them may share one. Rules for each:

* It checks everything before it changes anything. So an operation that raises a `TenureError` has
  changed nothing, and does not affect the others in the same transaction.
* It reads the clock through `now`, which does not change during a transaction.
* It sends messages to sessions and watchers through `send` and `changed`. For sessions of this
  engine a message becomes a push, for others a row of ``news`` and a notification. Both take effect
  only when the transaction has been committed.
"""

from __future__ import annotations

import contextlib
import operator
import os
import random
import sqlite3
import struct
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from tenure.clock import Clock
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.checkpoint import Checkpointer
from tenure.engines.sqlite.files import OPENING, OpenFiles, StoreFiles, explain, system_error
from tenure.engines.sqlite.forking import Guard
from tenure.engines.sqlite.liveness import LivenessFile, LivenessFiles
from tenure.errors import EngineError
from tenure.greenlets import close_descriptor

with contextlib.suppress(ImportError):  # Windows, which has the portable mode only
    from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

GRANTED, TIMED_OUT, DELETED, EVICTED, ENDED, CHANGED_DATA, CHANGED_OWNERS = range(7)
TAKEN_OVER, ACKNOWLEDGED, RESIZED = 7, 8, 9
"""Kinds of events. A `TAKEN_OVER` event stays until it is acknowledged: see `sessions`. A `RESIZED`
one has the new limit instead of the order id."""

DATA, OWNERS = 1, 2
"""Kinds of changes that can be watched, as bits."""

Push = tuple[int, int, int, int | None, str]
"""(kind, session, request id, order id, why); of a change (kind, node, 0, None, name)."""

Progress = tuple[int, int, int, str]
"""Last ids of requests, sessions and events of a store, and its identity. The ids only rise."""

_LOOK = 0.05  # seconds for which the files are assumed to be in place
_HOLDER = struct.Struct("<q")  # the beginning of the turn's file
_PROGRESS = struct.Struct("<3q32s")  # its rest, before a checksum
_PAUSE = (0.001, 0.005)
"""Least and greatest pause in seconds between two attempts to lock the database."""


class Turn:
    """The turn, for one engine.

    Args:
        path: the path of the lock's file, which is created if missing.
        mode: the permissions.

    Attributes:
        begun: false: the turn does not begin a transaction, as `DatabaseTurn` does.
    """

    def __init__(self, path: str, mode: int) -> None:
        self.begun = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | OPENING, mode)
        try:
            status = os.fstat(self._fd)
            if status.st_uid == os.geteuid() and status.st_mode & 0o777 != mode:
                os.fchmod(self._fd, mode)
        except BaseException:
            close_descriptor(self._fd)
            raise
        self._trouble = f"cannot take the turn at {path}"
        self._me = _HOLDER.pack(os.getpid())
        self._legible: tuple[bytes, Progress | None] = (b"", None)

    def try_take(self) -> bool:
        """Take the turn if it is free."""
        try:
            flock(self._fd, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise explain(self._trouble, error) from error
        self._sign()
        return True

    def take(self) -> None:
        """Wait for the turn, without a timeout."""
        with system_error(self._trouble):
            flock(self._fd, LOCK_EX)
        self._sign()

    def _sign(self) -> None:
        try:
            if os.pread(self._fd, _HOLDER.size, 0) != self._me:  # reading is cheaper
                os.pwrite(self._fd, self._me, 0)
        except OSError as error:
            flock(self._fd, LOCK_UN)
            raise explain(self._trouble, error) from error

    def release(self) -> None:
        """Release the turn."""
        flock(self._fd, LOCK_UN)

    @property
    def holder(self) -> int:
        """The process that took the turn last; 0 if that is unknown."""
        return int.from_bytes(os.pread(self._fd, _HOLDER.size, 0), "little")

    def record(self, progress: Progress) -> None:
        """Record what has been committed. In the turn."""
        content = _PROGRESS.pack(*progress[:3], progress[3].encode())
        raw = content + _checksum(content)
        with contextlib.suppress(OSError):  # then a store that is set back is found out later
            os.pwrite(self._fd, raw, _HOLDER.size)
            self._legible = (raw, progress)

    @property
    def recorded(self) -> Progress | None:
        """The latest record, if there is a legible one."""
        raw = os.pread(self._fd, _PROGRESS.size + 4, _HOLDER.size)
        known, progress = self._legible
        if raw != known:
            content = raw[: _PROGRESS.size]
            if len(content) < _PROGRESS.size or raw[_PROGRESS.size :] != _checksum(content):
                return None
            *numbers, identity = _PROGRESS.unpack(content)
            progress = (*numbers, identity.decode("ascii").rstrip("\0"))
            self._legible = (raw, progress)
        return progress

    def close(self) -> None:
        """Close the file; in a forked child the parent keeps its turn."""
        close_descriptor(self._fd)


class DatabaseTurn:
    """The turn in portable mode: a write transaction of SQLite.

    Processes that wait for it poll. They have no order, and it does not show which process has it.

    Attributes:
        begun: whether the turn's transaction has begun, and `Transaction.begin` has not continued
            it yet.
    """

    holder = 0
    recorded: Progress | None = None

    def __init__(self) -> None:
        self.begun = False
        self._connection: sqlite3.Connection | None = None
        self._guard = Guard()

    def use(self, connection: sqlite3.Connection, guard: Guard) -> None:
        """Take the turn through a connection from now on."""
        self._connection = connection
        self._guard = guard

    def try_take(self) -> bool:
        """Take the turn if it is free.

        Other problems than a locked database are left to `Transaction.begin`. It also ends a
        transaction whose end was interrupted.
        """
        connection = self._connection
        assert connection is not None
        try:
            with self._guard:
                if not connection.in_transaction:
                    connection.execute("BEGIN IMMEDIATE")
                    self.begun = True
        except sqlite3.Error as error:
            return not schema.is_busy(error)
        return True

    def take(self) -> None:
        """Wait for the turn, without a timeout; closing the connection ends the wait."""
        while not self.try_take():
            time.sleep(random.uniform(*_PAUSE))

    def release(self) -> None:
        """Release the turn, unless the end of its transaction has."""
        if self.begun:
            self.begun = False
            assert self._connection is not None
            with self._guard:
                self._connection.execute("ROLLBACK")

    def record(self, progress: Progress) -> None:
        """Do nothing: there is no file in which to record it."""

    def close(self) -> None:
        """Do nothing: the connection is closed by its owner."""


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


def is_set_back(found: Progress, recorded: Progress | None) -> bool:
    """Return true if a store is another one than recorded, or has fewer commits."""
    if recorded is None or found == recorded:
        return False
    *ids, identity = found
    *recorded_ids, recorded_identity = recorded
    return identity != recorded_identity or any(map(operator.lt, ids, recorded_ids))


@dataclass(slots=True)
class Messages:
    """Messages of a transaction, to be passed on after its commit.

    Attributes:
        pushes: pushes for sessions of this engine.
        recipients: participants to notify.
        removed: dead participants, whose files can be removed.
    """

    pushes: list[Push] = field(default_factory=list)
    recipients: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)


class Transaction:
    """State shared by the operations of one turn. One object serves all turns of an engine.

    Attributes:
        committed: whether the last transaction was committed, even if a later step failed. (SQLite
            also ends a transaction when the disk is full.)
        guard: the guard that a thread holds while it uses the connection.
        identity: the identity of the store.
        joined: whether this program is a participant, or just becoming one.
        durable: whether a commit is on disk before it is visible to any program. Once one program
            of a file has requested it, it applies to all, because leases pass between them. Each
            other program reads it at its next transaction, before it sends anything.
        now: the clock's time at its beginning.
        longest_window: the longest recovery window of any session that the store ever had.
        participant: this engine's number, or 0 while it has no sessions.
        quarantined: whether nothing is granted yet, because the store was restored from a backup.
        quarantined_until: the end of the quarantine; 0 once `participants.end_quarantine` has run.
        ready: whether the tables are known to exist.
        messages: the messages of the latest transaction, valid once it is committed.
        clock: reads the clock of `now`, which may be later by now.
        wall: reads the wall clock.
        affected: queues that requests have left: (node, name) to (released count, whether the
            owners have changed); `requests.settle` empties it.
        seen: the highest order id that this program has seen.
    """

    __slots__ = (  # used so often that slots are measurably faster
        "_checkpointer _counters _files _inside _checked_at _path _recorded _turn affected "
        "clock committed identity joined "
        "connection durable events_read execute guard last_news_id last_order_id last_session_id "
        "life lives longest_window messages now participant place quarantined quarantined_until "
        "ready seen wall watches"
    ).split()

    def __init__(
        self,
        connection: sqlite3.Connection,
        clock: Clock,
        place: StoreFiles,
        files: OpenFiles,
        lives: LivenessFiles,
        checkpointer: Checkpointer,
        turn: Turn | DatabaseTurn,
        *,
        durable: bool,
    ) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.place = place
        self.lives = lives
        self._checkpointer = checkpointer
        self._turn = turn
        self._recorded: Progress | None = None
        self.identity = ""
        self.joined = False
        self.durable = durable
        self.life: LivenessFile | None = None
        self.participant = 0
        self.ready = False
        self.events_read = 0
        self.seen = 0
        self.now = 0.0
        self.messages = Messages()
        self.affected: dict[tuple[int, str], tuple[int, bool]] = {}
        self.guard = Guard()
        self._inside = False
        self.committed = False
        self.wall = clock.wall
        self.clock = clock.now
        self._path = place.path
        self._files = files
        self._checked_at = float("-inf")
        self._counters: tuple[Any, ...] = ()
        self.longest_window = self.quarantined_until = 0.0
        self.quarantined = False
        self.last_order_id = self.last_session_id = self.last_news_id = self.watches = 0

    @property
    def progress(self) -> Progress:
        """The progress that has been committed, or is about to be."""
        return self.last_order_id, self.last_session_id, self.last_news_id, self.identity

    # Its beginning and its end

    def begin(self) -> None:
        """Begin a write transaction. The caller has the turn."""
        self.committed = False
        if not self._inside:  # as `_enter`, with one call less
            self.guard.acquire()
            self._inside = True
        begun = self._turn.begun
        if begun:
            self._turn.begun = False
        elif self.connection.in_transaction:  # an error has interrupted the end of the last one
            self.rollback()
            self._enter()
        self.now = now = self.clock()
        self._check_recently_in_place()
        if not begun:
            self.execute("BEGIN IMMEDIATE")
        if not self.ready:
            schema.create(self.connection, self._path, portable=self.place.portable)
        counters = self.execute(
            "SELECT last_order_id, last_session_id, last_news_id, watches, longest_window, "
            "quarantined_until, durable, identity FROM meta"
        ).fetchone()
        if counters is None:
            raise EngineError(
                f"{self._path} cannot be used: {schema.missing(self.connection)}. Restore a "
                "backup, or remove the file when no program uses it"
            )
        self._counters, self.identity = counters[:-1], counters[-1]
        (
            self.last_order_id,
            self.last_session_id,
            self.last_news_id,
            self.watches,
            self.longest_window,
            self.quarantined_until,
            durable,
        ) = self._counters
        if self.joined:
            self.check_progress(self.progress, self._turn.recorded)
        self.quarantined = now < self.quarantined_until
        if durable and not self.durable:
            self._become_durable()
            self.begin()
            return
        if self.events_read:
            self.execute(
                "DELETE FROM news WHERE participant = ? AND id <= ? AND kind <> ?",
                (self.participant, self.events_read, TAKEN_OVER),
            )

    def _become_durable(self) -> None:
        """Switch to durable commits, which is not possible inside a transaction."""
        self.execute("ROLLBACK")
        self.execute(f"PRAGMA synchronous = {schema.DURABLE}")
        self.durable = True

    def check_progress(self, found: Progress, recorded: Progress | None) -> None:
        """Raise if programs have committed more than the store contains.

        Args:
            found: the progress in the store.
            recorded: what was recorded before that was read.

        Raises:
            EngineError: a backup was copied or restored over the store.
        """
        if is_set_back(found, recorded):
            raise self._files.lost_error(self._path, "set back to an earlier state")

    def check_in_place(self) -> None:
        """Raise unless the files are still those that were opened."""
        try:
            self._files.check()
        except EngineError:
            self._checked_at = float("-inf")  # no transaction may rely on an earlier check
            raise

    def _check_recently_in_place(self) -> None:
        if self._files.lost or not 0 <= self.now - self._checked_at < _LOOK:
            self._checked_at = self.now
            self.check_in_place()

    def commit(self) -> None:
        """Commit the transaction."""
        counters = (
            *(self.last_order_id, self.last_session_id, self.last_news_id, self.watches),
            *(self.longest_window, self.quarantined_until, self.durable),
        )
        if counters != self._counters:
            self.execute(
                "UPDATE meta SET last_order_id = ?, last_session_id = ?, last_news_id = ?, "
                "watches = ?, longest_window = ?, quarantined_until = ?, durable = ?",
                counters,
            )
        try:
            self.execute("COMMIT")
            self.committed = True
        except Exception:
            raise
        except BaseException:  # an interrupt, before it or after it
            self.committed = not self.connection.in_transaction
            raise
        if self.joined and self._recorded != (progress := self.progress):
            self._turn.record(progress)
            self._recorded = progress
        self._inside = False
        self.guard.release()
        checkpointer = self._checkpointer
        checkpointer.left -= 1
        if checkpointer.left <= 0:
            checkpointer.start()
        self.ready = True
        self.events_read = 0

    def rollback(self) -> None:
        """Undo everything since `begin`."""
        self.affected = {}
        if not self.committed:
            self.messages = Messages()
        try:
            if self.connection.in_transaction:
                self.execute("ROLLBACK")
        finally:
            self._leave()

    def _enter(self) -> None:
        if not self._inside:
            self.guard.acquire()
            self._inside = True

    def _leave(self) -> None:
        if self._inside:
            self._inside = False
            self.guard.release()

    # Reading alone

    def begin_reading(self) -> None:
        """Begin to read the current state of the file. This takes no turn."""
        self._enter()
        if self.connection.in_transaction:  # an error has interrupted the end of the last one
            self.rollback()
            self._enter()
        self.now = self.clock()
        self._check_recently_in_place()
        self.execute("BEGIN")
        self.now = self.clock()

    def end_reading(self) -> None:
        """End the reading, or the attempt."""
        try:
            if self.connection.in_transaction:
                self.execute("COMMIT")
        finally:
            self._leave()

    # Messages

    def send(
        self,
        participant: int | None,
        kind: int,
        session: int,
        request_id: int = 0,
        order_id: int | None = None,
        why: str = "",
    ) -> None:
        """Send an event of a session or of one of its requests."""
        if participant == self.participant:
            self.messages.pushes.append((kind, session, request_id, order_id, why))
        elif participant is not None:
            self._write_event(participant, kind, session, request_id, order_id, why, None, None)

    def send_takeover(self, participant: int, session: int, attach_number: int, slot: int) -> None:
        """Write that a session was taken over; the row stays until it is acknowledged.

        So it is also written for this participant.
        """
        self._write_event(participant, TAKEN_OVER, session, attach_number, slot, "", None, None)

    def changed(self, node: int, name: str, *, data: bool, owners: bool) -> None:
        """Notify the watchers of a semaphore that its data or owners have changed."""
        if not self.watches:
            return
        watchers: list[tuple[int, int]] = self.execute(
            "SELECT participant, kinds FROM watches WHERE node = ? AND name = ?", (node, name)
        ).fetchall()
        for participant, kinds in watchers:
            for kind, concerned in (
                (CHANGED_DATA, data and kinds & DATA),
                (CHANGED_OWNERS, owners and kinds & OWNERS),
            ):
                if not concerned:
                    continue
                if participant == self.participant:
                    self.messages.pushes.append((kind, node, 0, None, name))
                else:
                    self._write_event(participant, kind, None, None, None, None, node, name)

    def count_watches(self) -> None:
        """Count the watches, after some were added or removed."""
        self.watches = self.execute("SELECT count(*) FROM watches").fetchone()[0]

    def _write_event(self, participant: int, *what: Any) -> None:
        # A change that repeats an unread one replaces it.
        self.last_news_id += 1
        self.execute(
            "INSERT OR REPLACE INTO news "
            "(participant, id, kind, session, hold, order_id, why, node, name) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (participant, self.last_news_id, *what),
        )
        self.messages.recipients.add(participant)
