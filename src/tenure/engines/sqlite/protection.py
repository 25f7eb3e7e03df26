"""Protection of a store's files while programs use them.

SQLite's locks belong to the process, and the kernel drops all of them when the process closes any
descriptor of the file: ``open("jobs.db").read()``, a checksum, a second SQLite library. The next
program that closes the store then takes itself for the last one, and removes the log of those that
still use it. Two programs with a log each can both be granted the same lock.

The locks here belong to an open file (``F_OFD_SETLK``). No other descriptor drops them.

* `LogLocks` prevents it: SQLite cannot get the exclusive locks with which it removes the log, or
  clears its index.
* `FileMarks` makes new participants wait if files were removed or replaced nevertheless. A
  participant marks in the store's folder with which files it works. It clears its mark when it has
  noticed the loss and ended its sessions. A participant with other files joins only after that.

Both are inert where the kernel has no such locks (macOS), and in portable mode. The check of the
names (`OpenFiles`) remains.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass

from tenure.engines.sqlite.files import Identity, OpenFiles, StoreFiles
from tenure.engines.sqlite.forking import Guard
from tenure.greenlets import close_descriptor

with contextlib.suppress(ImportError):  # Windows, which has the portable mode only
    import fcntl

_SHARED = (0x4000_0002, 510)  # of the database; SQLite locks it to change the mode of the log
_INDEX_IN_USE = (128, 1)  # of the log's index; SQLite locks it to clear the index
_NUMBERS = 2**31
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def _lock(kind: int, start: int, length: int) -> bytes:
    """Return a ``struct flock``."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, start, length, 0)


class FileMarks:
    """Marks, in the folder of a store, of the files with which its participants work.

    A mark is a shared lock of one byte of the folder. The offset depends on the name of the store
    and the files. It ends with its process, and with the last of two programs that forked.

    Attributes:
        supported: whether there are such locks.
    """

    def __init__(self, place: StoreFiles) -> None:
        self._marked: int | None = None
        self._fd = -1
        self.supported = False
        if place.portable:
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self._fd = os.open(os.path.dirname(place.path), flags)
        except PermissionError:  # it may be used, but not listed
            self._fd = os.open(place.folder, flags)
        self._base = _number(os.fsencode(os.path.basename(place.path))) * _NUMBERS
        self.supported = hasattr(fcntl, "F_OFD_SETLK")
        try:
            self.supported = self.supported and self._is_free(0, _NUMBERS) in {True, False}
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                close_descriptor(self._fd)
                raise
            self.supported = False

    @property
    def marked(self) -> bool:
        """True if this program has a mark."""
        return self._marked is not None

    def mark(self, files: OpenFiles) -> None:
        """Mark that this program works with these files."""
        if self.supported:
            self._marked = _number_of(files)
            self._set(fcntl.F_RDLCK, self._marked)

    def clear(self) -> None:
        """Clear the mark. Safe to call twice."""
        if self._marked is not None:
            self._set(fcntl.F_UNLCK, self._marked)
            self._marked = None

    def any_others(self, files: OpenFiles | None = None) -> bool:
        """Return true if a program works with other files than these, or with any."""
        if not self.supported:
            return False
        if files is None:
            return not self._is_free(0, _NUMBERS)
        mine = _number_of(files)
        return not (self._is_free(0, mine) and self._is_free(mine + 1, _NUMBERS))

    def _set(self, kind: int, number: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(kind, self._base + number, 1))

    def _is_free(self, first: int, end: int) -> bool:
        if first == end:  # a length of 0 would mean all of the rest
            return True
        wanted = _lock(fcntl.F_WRLCK, self._base + first, end - first)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, wanted)
        return bool(struct.unpack_from("h", answer)[0] == fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the folder, which clears the mark. In a forked child the parent keeps it."""
        if self._fd >= 0:
            close_descriptor(self._fd)


def _number(value: bytes) -> int:
    return int.from_bytes(hashlib.sha256(value).digest()[:4], "big") % _NUMBERS


def _number_of(files: OpenFiles) -> int:
    return _number(repr(list(files.identities.values())).encode())


@dataclass(slots=True)
class _Descriptor:
    """Descriptor for the locks of one file, shared by all engines of this process."""

    fd: int
    users: int = 0


_descriptors: dict[Identity, _Descriptor] = {}
_guard = Guard()


class LogLocks:
    """Locks that keep SQLite's log in place for one engine.

    Rule: closing a descriptor drops SQLite's locks, too. So all engines of a process share one for
    each file. It is closed when no other descriptor of the file is open in the process.

    Args:
        place: the store's files, with the log.
        supported: whether the kernel has such locks; otherwise there are none.
    """

    def __init__(self, place: StoreFiles, *, supported: bool) -> None:
        self._held: list[Identity] = []
        self._paths: dict[str, Identity] = {}
        if not supported:
            return
        try:
            for path, area in ((place.path, _SHARED), (place.log[1], _INDEX_IN_USE)):
                self._take(path, area)
        except BaseException:
            self.release()
            raise

    def _take(self, path: str, area: tuple[int, int]) -> None:
        with _guard:
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if identity not in _descriptors:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                _descriptors[identity] = _Descriptor(fd)
            self._held.append(identity)
            self._paths[path] = identity
            descriptor = _descriptors[identity]
            descriptor.users += 1
            fcntl.fcntl(descriptor.fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, *area))

    def read(self, path: str, size: int) -> bytes:
        """Read the beginning of the database, or of the log's index. Empty without locks."""
        identity = self._paths.get(path)
        found = _descriptors.get(identity) if identity is not None else None
        return os.pread(found.fd, size, 0) if found else b""  # none after a fork

    def release(self) -> None:
        """Release the locks, unless another engine of this process needs them."""
        with _guard:
            self._paths.clear()
            while self._held:
                descriptor = _descriptors[self._held.pop()]
                descriptor.users -= 1
                if descriptor.users == 0:
                    whole = _lock(fcntl.F_UNLCK, 0, 0)
                    fcntl.fcntl(descriptor.fd, fcntl.F_OFD_SETLK, whole)

    @staticmethod
    def close_unused() -> None:
        """Close the descriptors without a user, where that drops no lock of SQLite."""
        with _guard:
            unused = {each: found.fd for each, found in _descriptors.items() if found.users == 0}
            if not unused:
                return
            try:
                used = set(_open_files(set(unused.values())))
            except FileNotFoundError:  # no /proc: unknown, so they stay open
                return
            for identity in set(unused) - used:
                close_descriptor(_descriptors.pop(identity).fd)


def _open_files(but: set[int]) -> list[Identity]:
    """Return the files that this process has open, except through these descriptors."""
    found = []
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        if int(name) not in but:
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                found.append((status.st_dev, status.st_ino))
    return found


def users_of(path: str, but: Collection[Identity] = ()) -> str:
    """Name the other processes that have files of a store open: "pid 7 (python)".

    Args:
        path: the database.
        but: files that do not count.

    Returns:
        The processes that this user may see, as a list; empty if there are none.
    """
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    names = {real, f"{real}-wal", f"{real}-shm"}
    others = {int(each) for each in _listed("/proc") if each.isdecimal()} - {os.getpid()}
    users = [pid for pid in sorted(others) if _uses(f"/proc/{pid}/fd", names, but)]
    return ", ".join(f"pid {pid} ({_program(pid)})" for pid in users[:10])


def _uses(folder: str, names: Collection[str], but: Collection[Identity]) -> bool:
    for name in _listed(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            each = os.path.join(folder, name)
            if os.readlink(each).removesuffix(" (deleted)") in names:
                status = os.stat(each)
                if (status.st_dev, status.st_ino) not in but:
                    return True
    return False


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # it has ended, belongs to another user, or the system has no such folder
        return []


def _program(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended meanwhile"


def abandon() -> None:
    """Close the descriptors in a forked child; the parent keeps its locks."""
    for descriptor in _descriptors.values():
        close_descriptor(descriptor.fd)
    _descriptors.clear()
