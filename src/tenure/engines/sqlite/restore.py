"""Backups of a store, and restoring one, so that no lease granted since is granted twice.

A backup is outdated: after it was taken, sessions ended, leases were granted, and tokens and
session ids were assigned (the *lost future*). So a restored store

* has the nodes, the lasting semaphores and their data of the backup, but no session or request;
* grants nothing until the longest recovery window has passed (`quarantine`);
* numbers sessions and requests above all that can have been assigned.

`_Lost` and `_numbers` determine the window and the numbers.

Rules:

* The content is prepared in a separate database, and replaces the store's in one transaction of
  SQLite. If the program is killed in it, SQLite restores the former content from its journal when
  the store is next opened.
* Meanwhile this program has exclusive access: it takes SQLite's exclusive lock, which fails while
  another program has the store open, and checks each liveness file in the store's folder (a command
  that outlives its `tenure run` keeps one). A program that opens the store meanwhile waits, and
  then finds the restored content.

**A backup** is one consistent copy, made while programs use the store. It is made in one SQLite
read transaction, so it is consistent, and writers do not wait for it. It is written to a partial
file in the target's folder, checked, synced, and renamed atomically. The target is always either a
complete backup or the previous file.

A backup has its own application id, so that programs refuse to open it as a store: without
`restore`, it could grant leases that other clients still hold.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tenure.core.rules import MAX_WINDOW
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.files import (
    OPENING,
    UNIX,
    StoreFiles,
    check_trusted,
    check_usable,
    prepare,
    system_error,
)
from tenure.engines.sqlite.liveness import LivenessFiles, boot_id
from tenure.engines.sqlite.protection import FileMarks
from tenure.engines.sqlite.url import SqliteUrl, parse
from tenure.errors import EngineError, InvalidArgument
from tenure.greenlets import close_descriptor

with contextlib.suppress(ImportError):  # Windows, whose open files cannot be removed anyway
    import fcntl

Progress = Callable[[int, int], None]
"""Called with the number of pages left to copy, and the total number of pages."""

PAGES = 1024  # copied per step; an interrupt of the program takes effect between steps
_PARTIAL = ".partial"


def backup(
    url: str, file: str, *, force: bool = False, progress: Progress | None = None
) -> tuple[str, int]:
    """Write a backup of a store into a file; return the file's absolute path and its size.

    Args:
        url: the store; programs may use it during the backup.
        file: the backup to create, readable only by its owner.
        force: whether to replace an existing file.
        progress: called after each step of the copy.

    Raises:
        EngineError: the store cannot be read, the copy is damaged, or the file cannot be written.
        AuthenticationFailed: this user may not use the store.
        InvalidArgument: the URL is malformed.
    """
    address = parse(url)
    target = os.path.abspath(file)
    if target == address.path:
        raise EngineError(f"{target} is the store itself. Name another file for the backup")
    _check_absent(target, force=force)
    with system_error(f"cannot use {address.path}"):
        check_trusted(address.path, os.lstat(address.path), address)
        check_usable(address.path)
    try:
        with contextlib.closing(schema.connect(address)) as source:
            if not schema.is_ready(source, address.path, portable=address.portable):
                raise EngineError(
                    f"{address.path} has no tables of this version. Any use of it creates them "
                    "('tenure ls'); then try again"
                )
            with _partial(target) as partial:
                _write(source, partial, progress)
                size = os.stat(partial).st_size
                _publish(partial, target, force=force)
    except sqlite3.Error as error:
        raise schema.explain(error, address.path) from error
    return target, size


def _check_absent(target: str, *, force: bool) -> None:
    if not force and os.path.lexists(target):
        raise EngineError(f"{target} exists. Name another file, or replace it with --force")


@contextmanager
def _partial(target: str) -> Iterator[str]:
    """Create the partial file that becomes the backup, and yield its path.

    Partial files that ended programs left behind are removed first.
    """
    path = f"{target}.{secrets.token_hex(4)}{_PARTIAL}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPENING
    with system_error(f"cannot write {target}"):
        _remove_abandoned(target)
        fd = os.open(path, flags, 0o600)
        try:
            if UNIX:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.fchmod(fd, 0o600)
            else:  # no open file can be renamed
                close_descriptor(fd)
            yield path
        finally:
            for each in (path, f"{path}-journal", f"{path}-wal"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each)
            if UNIX:
                close_descriptor(fd)


def _remove_abandoned(target: str) -> None:
    """Remove the partial backups of this name whose programs have ended."""
    folder, name = os.path.split(target)
    for entry in list(os.scandir(folder)):
        if not (entry.name.startswith(f"{name}.") and _PARTIAL in entry.name):
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, in use, or another user's
            if not UNIX:  # SQLite has it open while it is written, so that it is not removed
                os.unlink(entry.path)
                continue
            fd = os.open(entry.path, os.O_RDONLY | OPENING)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                close_descriptor(fd)


def _write(source: sqlite3.Connection, path: str, progress: Progress | None) -> None:
    copy = sqlite3.connect(schema.uri(path, "rw"), uri=True, isolation_level=None)
    with contextlib.closing(copy):
        # A failed copy is removed, and no other program opens this file: no journal is needed.
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
            copy.execute(f"PRAGMA {pragma}")
        # Inside one read transaction, commits of other programs do not restart the copy.
        now = time.time()
        source.execute("BEGIN")
        source.execute("SELECT id FROM meta").fetchone()  # starts the read transaction
        try:
            source.backup(copy, pages=PAGES, progress=step(progress))
        finally:
            source.execute("COMMIT")
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        copy.execute("PRAGMA journal_mode = OFF")
        copy.execute("UPDATE meta SET saved_at = ?", (now,))
        copy.execute(f"PRAGMA application_id = {schema.BACKUP_ID}")
        check_whole(copy, path)


def step(progress: Progress | None) -> Callable[[int, int, int], object]:
    """Adapt a progress callback to the signature of `sqlite3`."""
    return lambda _, left, all_pages: progress(left, all_pages) if progress else None


def check_whole(connection: sqlite3.Connection, path: str) -> None:
    """Check the integrity of a database.

    Raises:
        EngineError: the database is damaged.
    """
    try:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except UnicodeDecodeError:  # SQLite's message quotes bytes of the damaged file
        found = "it contains invalid text"
    if found != "ok":
        raise EngineError(
            f"{path} is damaged: {found}. Stop all programs that use it, then restore it from a "
            "backup"
        )


def _publish(partial: str, target: str, *, force: bool) -> None:
    """Sync the copy and rename it to its final name.

    Without `force`, a file that was created meanwhile is not replaced.
    """
    with open(partial, "rb+") as file:
        os.fsync(file.fileno())
    if force:
        os.replace(partial, target)
    else:
        try:
            os.link(partial, target, follow_symlinks=not UNIX)
        except OSError:  # it exists, or the file system has no hard links
            _check_absent(target, force=False)
            os.replace(partial, target)
    sync_folder(os.path.dirname(target))


def sync_folder(folder: str) -> None:
    """Sync a folder, so that its entries survive a power cut, if the file system supports it."""
    if not UNIX:
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        close_descriptor(fd)


_TOKENS_PER_SECOND = 1_000_000  # an order id is at least the wall clock's microseconds
_SESSIONS_PER_SECOND = 10_000
_SLACK = 86_400 * _TOKENS_PER_SECOND
"""Tokens to add, for a wall clock that was ahead by up to a day."""
_MORE_SESSIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Restored:
    """Outcome of a restore.

    Attributes:
        path: the store.
        saved_at: the wall-clock time of the backup, in seconds since 1970.
        progress: called with the progress of the copy.
        quarantine: seconds for which nothing is granted, from the first opening.
        reason: the reason of this duration.
        moved: the new path of the damaged store that was there before, or empty.
    """

    path: str
    saved_at: float
    quarantine: float
    reason: str
    moved: str


@dataclass(frozen=True, slots=True)
class _Lost:
    """The replaced store, if the backup was taken of it.

    Its counters are the end of the lost future. They are not known from a store of the same name
    that was created after the loss, or whose last commits a power cut may have undone.
    """

    identity: str
    last_order_id: int
    last_session_id: int
    longest_window: float
    quarantine: float
    is_complete: bool

    def knows_all_since(self, identity: str) -> bool:
        """Return true if it has recorded every session since the backup."""
        return self.is_complete and self.identity == identity


_NOTHING = _Lost("", 0, 0, 0.0, 0.0, is_complete=False)


def restore(
    url: str,
    file: str,
    *,
    force: bool = False,
    quarantine: float | None = None,
    progress: Progress | None = None,
) -> Restored:
    """Make a store from a backup.

    Args:
        url: the store. No program may have it open.
        file: the backup.
        force: whether to replace an existing store.
        progress: called with the progress of the copy.
        quarantine: seconds for which nothing is granted, if the caller knows that no recovery
            window was longer; by default, the longest that is known or possible.

    Raises:
        EngineError: the store exists or is in use, or the file is damaged or not a backup.
        AuthenticationFailed: this user may not use the store.
        InvalidArgument: the URL is wrong.
    """
    address = parse(url)
    if quarantine is not None and not 0 <= quarantine <= MAX_WINDOW:
        raise InvalidArgument(
            f"a quarantine lasts up to {MAX_WINDOW:g} s, the longest recovery window that there "
            f"is, not {quarantine:g}"
        )
    if not force and os.path.lexists(address.path):
        raise EngineError(
            f"{address.path} exists. Stop all programs that use it and replace it with --force, or "
            "name another store"
        )
    try:
        # An unnamed database: on disk if it is large, and removed when it is closed.
        with contextlib.closing(sqlite3.connect("", isolation_level=None)) as content:
            _read(os.path.abspath(file), content)
            return _replace(address, content, quarantine, progress)
    except sqlite3.Error as error:
        raise schema.explain(error, address.path) from error


def _read(file: str, content: sqlite3.Connection) -> None:
    """Read a backup, and bring it up to date."""
    try:
        with (
            system_error(f"cannot read {file}"),
            open(file, "rb"),  # for its errors, which say more than SQLite's
            contextlib.closing(
                sqlite3.connect(schema.uri(file, "ro"), uri=True, isolation_level=None)
            ) as backup,
        ):
            (application,) = backup.execute("PRAGMA application_id").fetchone()
            (version,) = backup.execute("PRAGMA user_version").fetchone()
            if application != schema.BACKUP_ID:
                raise EngineError(f"{file} is not a backup. 'tenure backup' makes one of a store")
            if version > schema.VERSION:
                raise EngineError(
                    f"{file} was made by a newer tenure (its schema is {version}, this one knows "
                    f"{schema.VERSION}): upgrade tenure here"
                )
            backup.backup(content)
            check_whole(content, file)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second from SQLite's reports
        raise EngineError(f"{file} is damaged, or not a backup: {error}") from error
    content.execute("BEGIN")
    if version < schema.VERSION:
        schema.upgrade(content)
    content.execute("COMMIT")


def _replace(
    address: SqliteUrl,
    content: sqlite3.Connection,
    quarantine: float | None,
    progress: Progress | None,
) -> Restored:
    moved = ""
    place = prepare(address)
    with system_error(f"cannot use the files in {place.folder}"):
        _check_no_participants(place, address)
    try:
        store, lost = _open_alone(address)
    except sqlite3.Error as error:
        if not schema.is_damage(error):
            raise
        moved = _move_away(address.path)
        prepare(address)
        store, lost = _open_alone(address)
    with contextlib.closing(store):
        _check_no_participants(place, address)
        saved_at, seconds, reason = _prepare(content, lost, quarantine)
        application = schema.application_id(portable=address.portable)
        content.execute(f"PRAGMA application_id = {application}")
        content.backup(store, pages=PAGES, progress=step(progress))
    sync_folder(os.path.dirname(address.path))
    return Restored(address.path, saved_at, seconds, reason, moved)


# The existing store


def _check_no_participants(place: StoreFiles, address: SqliteUrl) -> None:
    """Raise if a program that has sessions lives, or a command that has outlived its program.

    In portable mode, SQLite's exclusive lock alone shows it.
    """
    if place.portable:
        return
    with contextlib.closing(FileMarks(place)) as marks:
        if marks.any_others():
            raise _in_use(address)
    lives = LivenessFiles(place.folder)
    try:
        for name in os.listdir(place.folder):
            number, _, kind = name.partition(".")
            if kind == "live" and number.isdecimal() and not lives.is_unlocked(int(number)):
                raise _in_use(address)
    finally:
        lives.close()


def _in_use(address: SqliteUrl) -> EngineError:
    return EngineError(
        f"{address.path} is in use. Stop all programs that use it, the server too ('tenure doctor "
        f"--url sqlite:///{address.path}' names them), and restore it then"
    )


def _open_alone(address: SqliteUrl) -> tuple[sqlite3.Connection, _Lost]:
    """Open the store under SQLite's exclusive lock, and read what it shows of the lost future."""
    store = sqlite3.connect(
        schema.uri(address.path, "rw"), uri=True, timeout=0.0, isolation_level=None
    )
    try:
        # The first read takes the lock, which is kept until the connection is closed. To end the
        # log mode, SQLite copies the log into the database and removes its files.
        store.execute("PRAGMA locking_mode = EXCLUSIVE")
        store.execute("PRAGMA synchronous = EXTRA")
        store.execute("PRAGMA journal_mode = DELETE")
        store.execute("BEGIN EXCLUSIVE")
        lost = _read_lost(store, address)
        store.execute("COMMIT")
    except BaseException as error:
        store.close()
        if schema.is_busy(error):
            raise _in_use(address) from error
        raise
    return store, lost


def _read_lost(store: sqlite3.Connection, address: SqliteUrl) -> _Lost:
    (application,) = store.execute("PRAGMA application_id").fetchone()
    if application == schema.application_id(portable=not address.portable):
        raise schema.other_mode(address.path, portable=address.portable)
    if application != schema.application_id(portable=address.portable):
        tables = store.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application not in {0, schema.BACKUP_ID} or (tables and not application):
            raise EngineError(
                f"{address.path} is another program's SQLite database. Name another file"
            )
        return _NOTHING
    order_id, session_id = store.execute(
        "SELECT last_order_id, last_session_id FROM meta"
    ).fetchone()
    (version,) = store.execute("PRAGMA user_version").fetchone()
    if version < 3:
        return replace(_NOTHING, last_order_id=order_id, last_session_id=session_id)
    identity, window, pending, durable, boot = store.execute(
        "SELECT identity, longest_window, quarantine, durable, boot FROM meta"
    ).fetchone()
    # In portable mode, nothing shows whether the machine was restarted since the last commit.
    is_complete = bool(durable) or (not address.portable and boot == boot_id())
    return _Lost(identity, order_id, session_id, window, pending, is_complete)


def _move_away(path: str) -> str:
    """Move a damaged store away with SQLite's files; the database itself last."""
    moved = f"{path}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    with system_error(f"cannot move {path} away"):
        for suffix in ("-wal", "-shm", "-journal", ""):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path + suffix, moved + suffix)
    return moved


# The content


_EMPTY = (
    "DELETE FROM participants",
    "DELETE FROM sessions",
    "DELETE FROM requests",
    "DELETE FROM rates",
    "DELETE FROM watches",
    "DELETE FROM news",
    "UPDATE nodes SET sessions = 0",
    "UPDATE semaphores SET held = 0, whole = 0",
    "DELETE FROM contents WHERE (node, name) NOT IN (SELECT node, name FROM semaphores)",
)
"""Convert the content of a backup into that of a store without sessions."""


def _prepare(
    content: sqlite3.Connection, lost: _Lost, chosen: float | None
) -> tuple[float, float, str]:
    """Convert a backup into a store; return its time, the quarantine, and its reason."""
    row = content.execute(
        "SELECT identity, saved_at, longest_window, quarantine, last_order_id, last_session_id "
        "FROM meta"
    ).fetchone()
    if row is None or not all(type(each) in {int, float} and 0 <= each < 2**53 for each in row[1:]):
        raise EngineError("the backup is damaged: its counters are invalid. Restore another one")
    identity, saved_at, window, pending, order_id, session_id = row
    longest = max(window, lost.longest_window)
    if chosen is not None:
        seconds, reason = chosen, "as requested"
    elif lost.knows_all_since(identity):
        seconds = max(longest, pending, lost.quarantine)
        reason = "the longest recovery window of any session in the replaced store"
    else:
        seconds = MAX_WINDOW
        reason = (
            "the longest possible recovery window, because the windows of sessions after the "
            "backup are unknown"
        )
    order_id, session_id = _numbers(order_id, session_id, lost, time.time(), saved_at)
    content.execute("BEGIN")
    for statement in _EMPTY:
        content.execute(statement)
    content.execute(
        "UPDATE meta SET boot = '', watches = 0, quarantined_until = 0, saved_at = 0, "
        "quarantine = ?, longest_window = ?, last_order_id = ?, last_session_id = ?",
        (seconds, longest, order_id, session_id),
    )
    content.execute("COMMIT")
    return saved_at, seconds, reason


def _numbers(
    order_id: int, session_id: int, lost: _Lost, now: float, saved_at: float
) -> tuple[int, int]:
    """Return the last numbers of requests and sessions, above all that can have been assigned.

    A token was at least the wall clock's microseconds, else one more than the last one: since the
    backup, a store has assigned fewer than one per microsecond. Sessions are numbered
    consecutively. Both also hold for several restores of one backup, unless the clock is set back
    between them. The counters of the replaced store do not depend on the clock.
    """
    age = max(0.0, now - saved_at)
    tokens = max(order_id + int(age * _TOKENS_PER_SECOND), int(now * _TOKENS_PER_SECOND)) + _SLACK
    sessions = session_id + int(age * _SESSIONS_PER_SECOND) + _MORE_SESSIONS
    return max(tokens, lost.last_order_id), max(sessions, lost.last_session_id)
