"""Backups of a store: one consistent copy, made while programs use the store.

The copy is made in one SQLite read transaction, so it is consistent, and writers do not wait for
it. It is written to a partial file in the target's folder, checked, synced, and renamed atomically.
The target is always either a complete backup or the previous file.

A backup has its own application id, so that programs refuse to open it as a store: without
`restore`, it could grant leases that other clients still hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

from tenure.engines.sqlite import schema
from tenure.engines.sqlite.files import check_trusted, check_usable, system_error
from tenure.engines.sqlite.url import parse
from tenure.errors import EngineError

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
            if not schema.is_ready(source, address.path):
                raise EngineError(
                    f"{address.path} has no tables of this version. Any use of it creates them "
                    "('tenure ls'); then try again"
                )
            with _partial(target) as (partial, fd):
                _write(source, partial, progress)
                _publish(partial, fd, target, force=force)
                size = os.fstat(fd).st_size
    except sqlite3.Error as error:
        raise schema.explain(error, address.path) from error
    return target, size


def _check_absent(target: str, *, force: bool) -> None:
    if not force and os.path.lexists(target):
        raise EngineError(f"{target} exists. Name another file, or replace it with --force")


@contextmanager
def _partial(target: str) -> Iterator[tuple[str, int]]:
    """Create the partial file that becomes the backup, and yield its path and descriptor.

    Partial files that ended programs left behind are removed first.
    """
    path = f"{target}.{secrets.token_hex(4)}{_PARTIAL}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with system_error(f"cannot write {target}"):
        _remove_abandoned(target)
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(fd, 0o600)
            yield path, fd
        finally:
            for each in (path, f"{path}-journal", f"{path}-wal"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each)
            os.close(fd)


def _remove_abandoned(target: str) -> None:
    """Remove the partial backups of this name whose programs have ended."""
    folder, name = os.path.split(target)
    for entry in list(os.scandir(folder)):
        if not (entry.name.startswith(f"{name}.") and _PARTIAL in entry.name):
            continue
        with contextlib.suppress(OSError):  # removed meanwhile, in use, or another user's
            fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


def _write(source: sqlite3.Connection, path: str, progress: Progress | None) -> None:
    copy = sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True, isolation_level=None)
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


def _publish(partial: str, fd: int, target: str, *, force: bool) -> None:
    """Sync the copy and rename it to its final name.

    Without `force`, a file that was created meanwhile is not replaced.
    """
    os.fsync(fd)
    if force:
        os.replace(partial, target)
    else:
        try:
            os.link(partial, target, follow_symlinks=False)
        except OSError:  # it exists, or the file system has no hard links
            _check_absent(target, force=False)
            os.replace(partial, target)
    sync_folder(os.path.dirname(target))


def sync_folder(folder: str) -> None:
    """Sync a folder, so that its entries survive a power cut, if the file system supports it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
