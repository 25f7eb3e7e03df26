"""Backups of a store: one consistent copy, made while programs use the store.

The copy is one read transaction of SQLite, so it is the store as it was at one moment, and no
writer waits for it. It is written beside its final name, checked and synced, and then given that
name in one step: under that name there is a whole backup, or what was there before.

A backup has an application id of its own. A program that is pointed at one by mistake refuses it:
without `restore`, a backup would grant what others still hold.
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

__all__ = ["PAGES", "Progress", "backup", "check_whole", "sync_folder", "told"]

Progress = Callable[[int, int], None]
"""Called with the pages that are left to copy, and with all of them."""

PAGES = 1024  # copied at a time; an interrupt of the program takes effect in between
_PARTIAL = ".partial"


def backup(
    url: str, file: str, *, force: bool = False, progress: Progress | None = None
) -> tuple[str, int]:
    """Write a backup of a store into a file; return the file's absolute path and its size.

    Args:
        url: the store, which programs may use meanwhile.
        file: is made, readable by its owner alone.
        force: replace a file that exists.

    Raises:
        EngineError: the store cannot be read, the copy is damaged, or the file cannot be written.
        AuthenticationFailed: this user may not use the store.
        InvalidArgument: there is something wrong with the URL.
    """
    address = parse(url)
    target = os.path.abspath(file)
    if target == address.path:
        raise EngineError(f"{target} is the store itself; name another file for the backup")
    _check_absent(target, force=force)
    with system_error(f"cannot use {address.path}"):
        check_trusted(address.path, os.lstat(address.path), address)
        check_usable(address.path)
    try:
        with contextlib.closing(schema.connect(address)) as source:
            if not schema.is_ready(source, address.path):
                raise EngineError(
                    f"{address.path} has no tables of this version; any use of it makes them "
                    "('tenure ls'), then try again"
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
        raise EngineError(f"{target} exists; name another file, or replace it with --force")


@contextmanager
def _partial(target: str) -> Iterator[tuple[str, int]]:
    """The file that becomes the backup, and its descriptor; what ended programs left is removed."""
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
        with contextlib.suppress(OSError):  # it has gone, or is another user's
            fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


def _write(source: sqlite3.Connection, path: str, progress: Progress | None) -> None:
    copy = sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True, isolation_level=None)
    with contextlib.closing(copy):
        # A failed copy is dropped, and no other program opens this one.
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
            copy.execute(f"PRAGMA {pragma}")
        # Within one transaction of the source, commits of others do not make the copy begin anew.
        now = time.time()
        source.execute("BEGIN")
        source.execute("SELECT id FROM meta").fetchone()  # begins the reading
        try:
            source.backup(copy, pages=PAGES, progress=told(progress))
        finally:
            source.execute("COMMIT")
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        copy.execute("PRAGMA journal_mode = OFF")
        copy.execute("UPDATE meta SET saved_at = ?", (now,))
        copy.execute(f"PRAGMA application_id = {schema.BACKUP_ID}")
        check_whole(copy, path)


def told(progress: Progress | None) -> Callable[[int, int, int], object]:
    """Adapt a callback to what `sqlite3` calls."""
    return lambda _, left, all_pages: progress(left, all_pages) if progress else None


def check_whole(connection: sqlite3.Connection, path: str) -> None:
    """Raise unless a database is undamaged."""
    try:
        (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except UnicodeDecodeError:  # of a finding that names what the file contains
        said = "it contains text that is none"
    if said != "ok":
        raise EngineError(f"{path} is damaged: {said}")


def _publish(partial: str, fd: int, target: str, *, force: bool) -> None:
    """Give the copy its final name, on disk. A file that appeared meanwhile is not replaced."""
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
    """Have the names in a folder survive a power cut, where its file system can do that."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
