"""Liveness of participants: the liveness file of each, and the functions that read it.

A participant (one open engine) has a file in the store's folder. The file is locked while the
participant lives: the kernel releases the lock when its process ends for any reason. The file
contains its own inode number, and then one heartbeat for each session: the time of its last
renewal. Writing it needs neither a transaction nor the turn.

Rules:

* A participant is dead if its lock can be taken. A process id or a boot id alone proves nothing: a
  process may be in another container.
* A session is *silent* when its heartbeat is older than its window. A checking process reads the
  clock first and the heartbeat second. The renewing process reads the clock again after writing,
  and has proven nothing if the window had passed by then. So a program never considers its session
  alive after another process may have found it silent.
* A participant whose file is missing renews nothing. Other participants treat its sessions as
  renewed at the time when they first found the file missing. The same applies to a file that was
  replaced, even by its copy (its inode number differs), truncated, or made inaccessible: the lock
  and the heartbeats of such a file prove nothing.
* The files are not mapped into memory: a program that accesses a truncated map is ended (SIGBUS).
* A forked child closes all of these files, otherwise its parent's death would not be noticed.

In portable mode the files are not locked, and no participant is found dead. Instead slot 0 has the
heartbeat of the participant itself, which shows whether it is *present*.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tenure.clock import SystemClock
from tenure.engines.sqlite.files import OPENING, UNIX, read_at, write_at
from tenure.errors import EngineError
from tenure.greenlets import close_descriptor

with contextlib.suppress(ImportError):  # Windows, which has the portable mode only
    import fcntl

_HEADER = struct.Struct("q")
_BEAT = struct.Struct("d")
_SLOTS = 511  # of a chunk: with the header, a page
_CLOCK = SystemClock()
_LARGEST = 2**63 - 1
_OPEN_FILES = 64
_NEVER = float("-inf")
_OWN = 0  # the slot of the participant itself, in portable mode
_PRESENT = 5.0
"""Seconds after its own heartbeat for which a participant is present. It beats with every tick."""
_LEFT_BEHIND = 86_400.0
"""Seconds without a heartbeat after which the files of a participant without sessions are removed.
Longer than every recovery window."""


def clock_id() -> str:
    """Name the clock, which all programs of a store in portable mode must have in common.

    It is system-wide. On Windows, Python 3.13 has another one than the versions before.
    """
    return SystemClock.name


def boot_id() -> str:
    """Return an id that differs after each start of the machine, and between time namespaces."""
    if not sys.platform.startswith("linux"):
        return _boot_id_of_macos()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError as error:
        raise EngineError(
            f"{error.filename} cannot be read ({error.strerror}): without it a restart of the "
            "machine cannot be noticed. Mount /proc (mount -t proc proc /proc)"
        ) from error
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/timens_offsets").read_text("ascii").splitlines():
            clock, *offset = line.split()
            if clock == "boottime" and offset != ["0", "0"]:
                boot += "+" + ".".join(offset)  # a time namespace: a separate clock
    return boot


def _boot_id_of_macos() -> str:
    import ctypes

    size = ctypes.c_size_t(64)
    value = ctypes.create_string_buffer(size.value)
    libc = ctypes.CDLL(None)
    if libc.sysctlbyname(b"kern.bootsessionuuid", value, ctypes.byref(size), None, 0) != 0:
        return f"{time.time() - SystemClock.now():.0f}"
    return value.value.decode("ascii")


def started(pid: int) -> str:
    """Return the start time of a process, in clock ticks since the boot; empty if unknown.

    Process ids are reused; together with the start time they identify one process.
    """
    return _status(pid, 19)


def is_stopped(pid: int) -> bool:
    """Return true if a process is stopped by a signal, or traced."""
    return _status(pid, 0) in {"T", "t"}


def _status(pid: int, field: int) -> str:
    """Return a field of ``/proc/PID/stat`` after the name; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[field].decode("ascii")
    except (OSError, IndexError):
        return ""


class LivenessFile:
    """Liveness file of this participant.

    Args:
        path: the path of the file, which must not exist.
        mode: the permissions.
        portable: whether the file is used in portable mode: not locked, and with slot 0 for the
            participant.
    """

    def __init__(self, path: str, mode: int, *, portable: bool = False) -> None:
        """Create and lock the liveness file at `path`."""
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPENING, mode)
        self._beats = array("d")
        self._writing = threading.RLock()  # while file and `_beats` differ
        self._free: list[int] = []
        self._used = _OWN + 1 if portable else 0
        self._mode = mode
        self._portable = portable
        try:
            if UNIX:
                os.fchmod(self.fd, mode)
            if not portable:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # On Windows, the two functions may name a device differently.
            status = os.fstat(self.fd) if UNIX else os.stat(path, follow_symlinks=False)
            self._identity = (status.st_dev, status.st_ino, status.st_uid)
            self._header = _header(self.fd)
            write_at(self.fd, self._header, 0)
            self._grow()
        except BaseException:
            self.remove()
            raise

    def __del__(self) -> None:
        """Close the file, unless it is closed."""
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def _grow(self) -> None:
        """Add room for more heartbeats: written, so that a full disk fails no heartbeat."""
        more = array("d", [_NEVER]) * _SLOTS
        with self._writing:
            write_at(self.fd, more.tobytes(), _offset(len(self._beats)))
            self._beats += more

    def new_slot(self, at: float) -> int:
        """Return a slot for the heartbeats of a new session."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._used
            if slot == len(self._beats):
                self._grow()
            self._used += 1
        self.beat(slot, at)
        return slot

    def free_slot(self, slot: int) -> None:
        """Free the slot of a session that has ended in the store."""
        self.stop_beating(slot)
        self._free.append(slot)

    def beat(self, slot: int, at: float) -> None:
        """Write a heartbeat: eight aligned bytes, which is atomic. From any thread."""
        with self._writing:
            write_at(self.fd, _BEAT.pack(at), _offset(slot))
            self._beats[slot] = at

    def show_presence(self, at: float) -> None:
        """Write the heartbeat of the participant itself, in portable mode."""
        if self._portable:
            self.beat(_OWN, at)

    def stop_beating(self, slot: int) -> None:
        """Mark the session as ended for every participant that checks it."""
        self.beat(slot, _NEVER)

    def last_beat(self, slot: int) -> float:
        """Return the time of the session's last heartbeat."""
        return self._beats[slot]

    @property
    def in_place(self) -> bool:
        """True if other participants find the file at its path, and can read it."""
        return not self._misplaced()

    def damage(self) -> str:
        """Return what was done to the file, as a participle; empty if nothing was."""
        if how := self._misplaced():
            return how
        with self._writing:
            size = _offset(len(self._beats))
            raw = read_at(self.fd, size, 0)
            if len(raw) < size:
                return "truncated"
            found = array("d", raw[_HEADER.size :])
            known = self._beats
            if not raw.startswith(self._header) or (
                found != known and any(map(float.__lt__, found, known))
            ):
                return "overwritten"
        return ""

    def _misplaced(self) -> str:
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except PermissionError:
            return "made inaccessible"
        except (FileNotFoundError, NotADirectoryError):
            return "removed"
        if (status.st_dev, status.st_ino) != self._identity[:2]:
            return "replaced"
        if (UNIX and self._mode & ~stat.S_IMODE(status.st_mode)) or status.st_uid != self._identity[
            2
        ]:
            return "made inaccessible"
        return "truncated" if status.st_size < _offset(len(self._beats)) else ""

    def remove(self) -> None:
        """Remove the file, after the store has removed this participant."""
        with contextlib.suppress(OSError):
            if self._misplaced() not in {"removed", "replaced"}:
                if self._portable:  # on Windows, no open file is removed
                    self.close()
                os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Close the file, which releases the lock. Safe to call twice.

        In a forked child this closes the copy; the parent keeps the lock.
        """
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            close_descriptor(fd)


def _header(fd: int) -> bytes:
    """Return the beginning of a liveness file, which shows that it is no copy."""
    return _HEADER.pack(os.fstat(fd).st_ino & _LARGEST)


def _offset(slot: int) -> int:
    return _HEADER.size + slot * _BEAT.size


_INACCESSIBLE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP)


class LivenessFiles:
    """Liveness files of other participants.

    Args:
        folder: the folder of the store.
        now: reads the clock.
        portable: whether the files are used in portable mode.
    """

    def __init__(
        self, folder: str, now: Callable[[], float] = _CLOCK.now, *, portable: bool = False
    ) -> None:
        self._folder = folder
        self._now = now
        self._portable = portable
        self._files: OrderedDict[int, int] = OrderedDict()
        self._missing: dict[int, float] = {}

    def path(self, participant: int) -> str:
        """Return the path of a participant's liveness file."""
        return os.path.join(self._folder, f"{participant}.live")

    def is_dead(self, participant: int) -> bool:
        """Return true if a participant's process has ended. In portable mode none is found."""
        if self._portable:
            return False
        fd = self._file(participant)
        if fd is None or not _is_original(fd):
            return False
        return self.is_unlocked(participant)

    def is_alive(self, participant: int) -> bool:
        """Return true if a participant lives, or in portable mode is present."""
        if self._portable:
            return not self._is_older(participant, _PRESENT)
        return self._file(participant) is not None and not self.is_unlocked(participant)

    def is_unlocked(self, participant: int) -> bool:
        """Return true if there is a file for a participant, and no process has it locked.

        In portable mode: if its participant was left behind.
        """
        fd = self._file(participant)
        if fd is None:
            return False
        if self._portable:
            return self.is_left_behind(participant)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.forget(participant)  # which releases the lock just taken
        return True

    def is_left_behind(self, participant: int) -> bool:
        """Return true if a participant in portable mode was absent for longer than any window.

        The same applies to one without a file: that ends its sessions, too.
        """
        missing = self._file(participant) is None
        return missing or self._is_older(participant, _LEFT_BEHIND)

    def _is_older(self, participant: int, seconds: float) -> bool:
        now = self._now()  # before the heartbeat: a later one is no older
        return now - self.presence(participant) > seconds

    def presence(self, participant: int) -> float:
        """Return when a participant in portable mode has last shown that it is present."""
        return self.last_beat(participant, _OWN)

    def last_beat(self, participant: int, slot: int) -> float:
        """Return when a session was last renewed."""
        fd = self._file(participant)
        if fd is not None:
            raw = read_at(fd, _BEAT.size, _offset(slot))
            # A file that was truncated has zeros where it has become longer again.
            if len(raw) == _BEAT.size and any(raw) and _is_original(fd):
                beat: float = _BEAT.unpack(raw)[0]
                return beat
        missing = self._missing.get(participant)
        if missing is None:  # the clock is read after the file: no later heartbeat is proof
            missing = self._missing[participant] = self._now()
        return missing

    def _file(self, participant: int) -> int | None:
        fd = self._files.get(participant)
        if fd is not None:
            self._files.move_to_end(participant)
            return fd
        flags = os.O_RDONLY | OPENING | getattr(os, "O_NONBLOCK", 0)
        try:
            fd = os.open(self.path(participant), flags)
        except OSError as error:
            if error.errno in _INACCESSIBLE:
                return None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            close_descriptor(fd)
            return None
        if len(self._files) >= _OPEN_FILES:
            close_descriptor(self._files.popitem(last=False)[1])
        self._files[participant] = fd
        return fd

    def forget(self, participant: int) -> None:
        """Close the file of a participant."""
        self._missing.pop(participant, None)
        fd = self._files.pop(participant, None)
        if fd is not None:
            close_descriptor(fd)

    def remove(self, participant: int) -> None:
        """Remove the files of a dead participant; the one by which it is found, last."""
        self.forget(participant)
        for name in (f"{participant}.sock", f"{participant}.live"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))

    def close(self) -> None:
        """Close everything."""
        for participant in list(self._files):
            self.forget(participant)


def _is_original(fd: int) -> bool:
    """Return true if a liveness file is the one that its participant has made."""
    return read_at(fd, _HEADER.size, 0) == _header(fd)
