"""Diagnosis of a ``sqlite://`` store for `tenure doctor`: the file, its folder, its users.

Rules:

* The store is not changed, and missing files are not created. Trials run in a temporary folder next
  to the database, which is removed afterwards.
* No check waits longer than a fraction of a second. A check runs even if earlier ones failed,
  unless it depends on them.
* It runs before this process has opened the store, so that closing a second connection is harmless.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator

from tenure.clock import SystemClock
from tenure.engines.contract import Finding, Level
from tenure.engines.sqlite import schema
from tenure.engines.sqlite.checkpoint import examine_library
from tenure.engines.sqlite.files import (
    OPENING,
    UNIX,
    check_file_system,
    check_folders,
    check_trusted,
    check_usable,
    describe_layer,
    file_system,
    may_make_folder,
    no_folder,
    system_error,
    user,
)
from tenure.engines.sqlite.liveness import LivenessFiles, boot_id, clock_id, is_stopped
from tenure.engines.sqlite.notifier import LONGEST_FOLDER
from tenure.engines.sqlite.participants import describe_quarantine
from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import TenureError

with contextlib.suppress(ImportError):  # Windows, which has the portable mode only
    import fcntl

MIB = 1024 * 1024
LITTLE_SPACE = 64 * MIB
NO_SPACE = MIB
FEW_INODES = 100
INTEGRITY_UP_TO = 64 * MIB
"""A larger file is not read completely."""
STALL = 0.5
"""Seconds after which a process that keeps the turn is called stalled."""


def examine(address: SqliteUrl) -> Iterator[Finding]:
    """Yield the findings about the store at a URL. Raises nothing."""
    yield examine_library()
    if address.portable:
        yield Finding(
            "ok",
            "mode",
            "portable: leases of a dead process pass on after its recovery window, and waiters "
            "poll. All programs of the store use this mode",
        )
    folder = os.path.dirname(address.path)
    there = os.path.lexists(address.path)
    file = _file(address, there=there)
    yield file
    standing = folder
    while not os.path.isdir(standing):
        standing = os.path.dirname(standing)
    yield from _folder(folder, standing, address)
    yield from _space(standing)
    yield from _trials(standing, os.path.dirname(folder), portable=address.portable)
    if not address.portable:
        yield _sockets(address)
    if there and file.level == "ok":
        yield from _contents(address)
        if not address.portable:
            yield _check_turn(address)


# The file and its folder


def _file(address: SqliteUrl, *, there: bool) -> Finding:
    path = address.path
    if not there:
        found = f"{path} does not exist yet; the first use creates it"
        return Finding("ok", "file", found, absent=True)
    try:
        with system_error(f"cannot use {path}"):
            status = os.lstat(path)
            about = (
                f"{path}, {_size(status.st_size)}, mode {stat.S_IMODE(status.st_mode):04o}, "
                f"owner {user(status.st_uid)}"
            )
            check_trusted(path, status, address)
            check_usable(path)
    except TenureError as error:
        return Finding.of_error("file", error)
    return Finding("ok", "file", about)


def _folder(folder: str, standing: str, address: SqliteUrl) -> Iterator[Finding]:
    status = os.stat(standing)
    about = f"{standing}, mode {stat.S_IMODE(status.st_mode):04o}, owner {user(status.st_uid)}"
    if not os.access(standing, os.W_OK | os.X_OK):
        yield Finding(
            "failure",
            "folder",
            f"{about}: this user{f' ({user(os.geteuid())})' if UNIX else ''} may not write there",
            "SQLite creates files next to the database: choose your own folder, or have the "
            "owner share this one",
        )
    else:
        try:
            if standing != folder and not may_make_folder(folder):
                raise no_folder(folder, address)
            with system_error(f"cannot examine the folder {standing}"):
                check_folders(standing, address)
        except TenureError as error:
            yield Finding.of_error("folder", error)
        else:
            missing = "" if standing == folder else f"; {folder} will be created in it"
            yield Finding("ok", "folder", about + missing)
    kind = file_system(standing)
    try:
        check_file_system(standing)
    except TenureError as error:
        yield Finding.of_error("file system", error)
    else:
        layer = describe_layer(standing)
        if layer:
            yield Finding("warning", "file system", layer, "mount a folder of the host there")
        else:
            yield Finding("ok", "file system", kind or "unknown on this system")


def _space(folder: str) -> Iterator[Finding]:
    level: Level
    if not UNIX:
        free = shutil.disk_usage(folder).free
        level = "warning" if free < LITTLE_SPACE else "ok"
        yield Finding(level, "disk space", f"{_size(free)} free")
        return
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    remedy = "make room: a full disk stops every change, and nothing can be granted"
    if state.f_blocks == 0:
        yield Finding("ok", "disk space", "unknown on this file system")
    elif free < LITTLE_SPACE:
        level = "failure" if free < NO_SPACE else "warning"
        yield Finding(level, "disk space", f"only {_size(free)} free", remedy)
    else:
        yield Finding("ok", "disk space", f"{_size(free)} free")
    if state.f_files:  # some file systems do not count them
        few = state.f_favail < FEW_INODES
        yield Finding(
            "warning" if few else "ok",
            "inodes",
            f"{state.f_favail:,} free",
            "remove files: each participant needs two" if few else "",
        )


def _size(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} TiB"


# Trials of the file system


def _trials(folder: str, other: str, *, portable: bool) -> Iterator[Finding]:
    yield Finding("ok", "SQLite", f"{sqlite3.sqlite_version} (library of this Python)")
    place = next((each for each in (folder, other) if os.access(each, os.W_OK | os.X_OK)), None)
    if place is None:
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".tenure-doctor-", dir=place) as scratch:
            attempts = [("write-ahead log", _write_ahead_log)]
            if not portable:
                attempts += [("locks", _locks), ("shared memory", _shared_memory)]
            for what, attempt in attempts:
                yield _tried(what, attempt, os.path.join(scratch, what.replace(" ", "-")))
    except OSError as error:
        yield Finding("failure", "new files", f"cannot be made in {place}: {error.strerror}")


def _tried(what: str, attempt: Callable[[str], str], path: str) -> Finding:
    try:
        return Finding("ok", what, attempt(path))
    except (OSError, ValueError, sqlite3.Error) as error:
        return Finding("failure", what, f"does not work here: {error}", "use a local folder")


def _write_ahead_log(path: str) -> str:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise ValueError(f"SQLite made it {mode!r}")
        connection.execute("CREATE TABLE t (x)")
    return "works"


def _locks(path: str) -> str:
    first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "flock() keeps others out"
        raise ValueError("two files got the same lock of flock() at once")
    finally:
        os.close(first)
        os.close(second)


def _shared_memory(path: str) -> str:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, bytes(mmap.PAGESIZE), 0)
        with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
            mapped[:4] = b"beat"
            if os.pread(fd, 4, 0) != b"beat":
                raise ValueError("data written to mapped memory does not appear in the file")
    finally:
        os.close(fd)
    return "works"


def _sockets(address: SqliteUrl) -> Finding:
    """Check datagram sockets, whose paths are short (see `DatagramNotifier`)."""
    length = len(os.fsencode(address.path + ".tenure"))
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with left, right:
        left.send(b"!")
        right.recv(1)
    short = length <= LONGEST_FOLDER
    if short:
        return Finding("ok", "sockets", "datagrams work; the path is short enough")
    if os.path.isdir("/proc/self/fd"):
        return Finding("ok", "sockets", "datagrams work; the long path goes through /proc/self/fd")
    return Finding(
        "warning",
        "sockets",
        f"the path of {length} bytes is too long for a socket: notifications are delayed",
        "choose a shorter path",
    )


# Contents of the file


def _contents(address: SqliteUrl) -> Iterator[Finding]:
    path = address.path
    try:
        if os.path.getsize(path) == 0:
            yield Finding("ok", "contents", "none yet")
            return
        with contextlib.closing(schema.connect(address)) as connection:
            yield from _tables(connection, address)
    except TenureError as error:
        yield Finding.of_error("contents", error)
    except sqlite3.Error as error:
        yield Finding.of_error("contents", schema.explain(error, path))
    except OSError as error:
        yield Finding("failure", "contents", f"{path}: {error.strerror}")


def _tables(connection: sqlite3.Connection, address: SqliteUrl) -> Iterator[Finding]:
    path = address.path
    if not schema.is_ready(connection, path, portable=address.portable):
        yield Finding("ok", "contents", "no tables of this version yet; the first use creates them")
        return
    if os.path.getsize(path) <= INTEGRITY_UP_TO:
        (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            yield Finding(
                "failure",
                "contents",
                f"{path} is damaged: {result}",
                "stop all programs that use it; restore it from a copy, or remove it with its "
                "-wal and -shm and its folder .tenure",
            )
            return
    boot, last, pending, until = connection.execute(
        "SELECT boot, last_order_id, quarantine, quarantined_until FROM meta"
    ).fetchone()
    counts = [
        connection.execute(f"SELECT count(*) FROM {each}").fetchone()[0]  # noqa: S608  ours
        for each in ("nodes", "sessions", "requests")
    ]
    yield Finding(
        "ok",
        "contents",
        "schema {}; nodes: {}, sessions: {}, requests: {}".format(schema.VERSION, *counts),
    )
    current = clock_id() if address.portable else boot_id()
    yield _epoch(boot, last, current, portable=address.portable)
    left = until - SystemClock().now() if boot == current else pending
    if left > 0:
        yield Finding("warning", "quarantine", describe_quarantine(path, left), "wait for its end")
    yield _participants(connection, address)


def _epoch(boot: str, last: int, current: str, *, portable: bool) -> Finding:
    """Compare the store's boot with the current one, and its order ids with the wall clock."""
    ahead = last / 1e6 - time.time()
    if ahead > 60:
        return Finding(
            "warning",
            "tokens",
            f"are ahead of the wall clock by {ahead:,.0f} s: it was set back, or a program has "
            "had a wrong one, or the store was restored from a backup (a day ahead)",
            "correct the clock if it is wrong; tokens keep rising in either case",
        )
    if boot and boot != current and portable:
        return Finding(
            "failure",
            "clock",
            f"the store is used with another clock ({boot}) than this program's ({current})",
            "use the same Python and system for all programs of a store",
        )
    if portable:
        return Finding("ok", "clock", current)
    if boot and boot != current:
        return Finding(
            "ok", "boot", "the machine was restarted since; the next use ends old sessions"
        )
    return Finding("ok", "boot", "the store's clock is this machine's, of this boot")


def _participants(connection: sqlite3.Connection, address: SqliteUrl) -> Finding:
    """List the participants whose liveness files are locked, which means that they are alive.

    In portable mode, those that are present.
    """
    alive, dead = [], 0
    folder = address.path + ".tenure"
    with contextlib.closing(LivenessFiles(folder, portable=address.portable)) as lives:
        for number, pid in connection.execute("SELECT id, pid FROM participants ORDER BY id"):
            if lives.is_alive(number):
                alive.append(pid)
            else:
                dead += 1
    frozen = [pid for pid in alive if is_stopped(pid)]
    gone = f"; {dead} dead, which the next one removes" if dead else ""
    if address.portable and dead:
        gone = f"; {dead} absent: dead or stopped"
    used = f"by pid {_listed(alive)}" if alive else "by no other process"
    if frozen:
        return Finding(
            "warning",
            "in use",
            f"{used}{gone}; stopped: pid {_listed(frozen)}",
            "a stopped process keeps its leases until its recovery window has passed; "
            f"kill -CONT {frozen[0]} continues it",
        )
    return Finding("ok", "in use", used + gone)


def _listed(pids: list[int]) -> str:
    return ", ".join(map(str, pids[:10])) + (f" and {len(pids) - 10} more" if pids[10:] else "")


def _check_turn(address: SqliteUrl) -> Finding:
    """Check that no process keeps the turn, which would block all writers."""
    try:
        fd = os.open(
            os.path.join(address.path + ".tenure", "turn.lock"),
            os.O_RDONLY | OPENING,
        )
    except FileNotFoundError:
        return Finding("ok", "writers", "none so far")
    except OSError as error:
        return Finding("failure", "writers", f"the turn cannot be seen: {error.strerror}")
    try:
        until = time.monotonic() + STALL
        holders = set()
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holders.add(int.from_bytes(os.pread(fd, 8, 0), "little"))
            else:
                return Finding("ok", "writers", "take their turns")
            if time.monotonic() > until:
                break
            time.sleep(0.01)  # the kernel reports a free lock only to processes blocked on it
    finally:
        os.close(fd)
    if len(holders) > 1:
        return Finding("warning", "writers", f"are busy all the time: pid {_listed([*holders])}")
    (pid,) = holders
    if is_stopped(pid):
        remedy = f"nothing is granted until it continues (kill -CONT {pid}) or ends (kill -9 {pid})"
        return Finding("failure", "writers", f"pid {pid} was stopped in its turn", remedy)
    return Finding(
        "warning",
        "writers",
        f"{f'pid {pid}' if pid else 'a process'} has had the turn for more than {STALL:g} s",
        "check that process; nothing is granted meanwhile",
    )
