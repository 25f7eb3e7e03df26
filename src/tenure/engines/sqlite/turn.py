"""The turn to write: a lock of the kernel, taken by one process after the other.

SQLite's own lock is taken by trying again and again, so that of several writers one may starve.
Those who wait for this one sleep in the kernel and are woken. It orders writers and nothing more:
what keeps the data whole is SQLite's lock, which is taken inside the turn.

The lock's file also says who has it, so that a process that was stopped in its turn can be named.
"""

from __future__ import annotations

import mmap
import os
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

from tenure.engines.sqlite.files import explain, system_error

__all__ = ["Turn"]

_SIZE = 16
_NOW = LOCK_EX | LOCK_NB


class Turn:
    """The turn, as one engine takes it.

    Args:
        path: of the lock's file, which is made when missing.
        mode: its permissions.
    """

    def __init__(self, path: str, mode: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, mode)
        try:
            status = os.fstat(self._fd)
            if status.st_uid == os.geteuid() and status.st_mode & 0o777 != mode:
                os.fchmod(self._fd, mode)
            if status.st_size < _SIZE:
                # Written, not just made longer: a page without a block would be a bus error on
                # a full disk.
                os.pwrite(self._fd, bytes(_SIZE), 0)
            self._map = mmap.mmap(self._fd, _SIZE)
        except BaseException:
            os.close(self._fd)
            raise
        self._trouble = f"cannot take the turn at {path}"
        self._holder = memoryview(self._map).cast("q")
        self._pid = os.getpid()

    def try_take(self) -> bool:
        """Take the turn if it is free."""
        try:
            flock(self._fd, _NOW)
        except BlockingIOError:
            return False
        except OSError as error:
            raise explain(self._trouble, error) from error
        self._holder[0] = self._pid
        return True

    def take(self) -> None:
        """Wait for the turn, however long that takes."""
        with system_error(self._trouble):
            flock(self._fd, LOCK_EX)
        self._holder[0] = self._pid

    def release(self) -> None:
        """Release the turn."""
        flock(self._fd, LOCK_UN)

    @property
    def holder(self) -> int:
        """The process that took the turn last."""
        return self._holder[0]

    def close(self) -> None:
        """Close the file; in a forked child that leaves the parent its turn."""
        self._holder.release()
        self._map.close()
        os.close(self._fd)
