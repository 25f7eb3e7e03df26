"""Cgroup for one command (Linux, cgroup v2), so that one write ends all its processes.

Rules:

* The cgroup is a child of the cgroup of `tenure run`, so that limits and service managers still
  apply to the command. Root may create it, and so may a user in a delegated cgroup (a unit of the
  user's systemd instance).
* `tenure run`, its watchdog and its guardian share a lock (``flock``) on the cgroup's folder. The
  kernel releases it with the last of them. If the lock of a tenure cgroup is free, the cgroup is
  *abandoned*: its processes have no holder, and the next `tenure run` in the same parent ends them
  (`end_abandoned`).
* ``cgroup.kill`` (Linux 5.14) reaches every process in it: daemons, processes of other users, and
  processes that are forking.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "tenure-run-"

_TIMEOUT = 1.0
"""Seconds to wait for the end of killed processes without a holder."""


_ATTEMPTS = 10
"""Attempts to lock a new cgroup, which another process may mistake for an abandoned one."""


class NoCgroup(Exception):
    """Error: a cgroup cannot be created here. The message says why."""


class Cgroup:
    """A cgroup that this process created, or inherited from its parent.

    Attributes:
        path: the cgroup's folder.
        lock: a descriptor of the folder, locked.
    """

    def __init__(self, path: Path, lock: int) -> None:
        """Take the cgroup at `path`, with the descriptor of its lock."""
        self.path = path
        self.lock = lock

    def enter(self) -> None:
        """Move this process into it. Raises OSError."""
        _write(self.path / "cgroup.procs", "0")

    def kill(self) -> None:
        """Kill every process in it. Safe when the cgroup does not exist; from any thread."""
        with contextlib.suppress(OSError):
            _write(self.path / "cgroup.kill", "1")

    def processes(self) -> list[int]:
        """List the processes in it and below, as far as they are visible."""
        found: list[int] = []
        for folder in (self.path, *_below(self.path)):
            with contextlib.suppress(OSError):
                found += map(int, (folder / "cgroup.procs").read_text().split())
        return [pid for pid in found if pid]  # 0: of another PID namespace

    @property
    def populated(self) -> bool:
        """True while a process lives in the cgroup."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text()
        except OSError:  # it does not exist any more
            return False

    def remove(self) -> None:
        """Remove it; surviving daemons move to the parent. Safe to call twice."""
        for _ in range(100):  # a process may fork while it is moved
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    _write(self.path.parent / "cgroup.procs", str(pid))
            if self.try_remove():
                return

    def try_remove(self) -> bool:
        """Remove it, unless it has processes; return false if it has."""
        try:
            for folder in _below(self.path):
                folder.rmdir()
            self.path.rmdir()
        except OSError as error:
            return error.errno != errno.EBUSY
        return True

    def close(self) -> None:
        """Close the descriptor; the lock stays with the other processes that have it."""
        os.close(self.lock)


def own_cgroup(mounts: str, cgroups: str) -> Path | None:
    """Find the folder of a process's own cgroup; ``None`` without cgroup v2.

    Args:
        mounts: the process's /proc/self/mountinfo.
        cgroups: the process's /proc/self/cgroup.
    """
    (own,) = re.findall(r"^0::(/.*)$", cgroups, re.MULTILINE) or ("",)
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if not own or not kind.startswith("cgroup2 "):
            continue
        root, point = (_unescaped(field) for field in fields.split(" ")[3:5])
        inside = own if root == "/" else own.removeprefix(root)
        if root != "/" and (inside == own or not f"{inside}/".startswith("/")):
            continue  # a part of the hierarchy that does not contain this process
        return Path(point + inside.rstrip("/"))
    return None


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which blanks are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def parent_of(process: str = "self") -> Path:
    """Return the cgroup of a process.

    Raises:
        NoCgroup: this machine has no cgroup v2.
    """
    try:
        mounts = Path(f"/proc/{process}/mountinfo").read_text()
        cgroups = Path(f"/proc/{process}/cgroup").read_text()
    except OSError:
        raise NoCgroup("this system has no cgroups") from None
    own = own_cgroup(mounts, cgroups)
    if own is None:
        raise NoCgroup("cgroup v2 is not mounted")
    return own


def make(parent: Path) -> Cgroup:
    """Create a cgroup below `parent`, and lock it.

    Raises:
        NoCgroup: it cannot be created.
    """
    for _ in range(_ATTEMPTS):
        path = parent / f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            path.mkdir()
        except OSError as error:
            raise NoCgroup(f"{parent} cannot be written: {error.strerror}") from None
        cgroup = _locked(path)
        if cgroup is None:
            continue  # another process mistook it for an abandoned one, before it was locked
        if not (path / "cgroup.kill").exists():
            cgroup.remove()
            cgroup.close()
            raise NoCgroup("this kernel's cgroups have no cgroup.kill (Linux 5.14 has)")
        return cgroup
    raise NoCgroup(f"the cgroups in {parent} cannot be locked")


def end_abandoned(parent: Path) -> list[str]:
    """End the processes in cgroups whose `tenure run`, watchdog and guardian were all killed.

    Returns:
        The names of the cgroups that contained a process.
    """
    ended = []
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*"):
            cgroup = _locked(path)
            if cgroup is not None:
                if cgroup.populated:
                    ended.append(path.name)
                _end(cgroup)
                cgroup.close()
    return ended


def _end(cgroup: Cgroup) -> None:
    until = time.monotonic() + _TIMEOUT
    cgroup.kill()
    while cgroup.populated and time.monotonic() < until:
        time.sleep(0.005)
    if not cgroup.populated:  # else a process is inside the kernel, and dies when it returns
        cgroup.try_remove()


def _locked(path: Path) -> Cgroup | None:
    """Return the cgroup at `path`, locked; ``None`` if it is in use or does not exist."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return Cgroup(path, lock)
    except OSError:
        pass
    os.close(lock)
    return None


def _below(folder: Path) -> Iterator[Path]:
    """Yield the cgroups below one, deepest first."""
    with contextlib.suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.is_dir() and not each.is_symlink():
                yield from _below(each)
                yield each


def _write(file: Path, text: str) -> None:
    with file.open("w") as opened:
        opened.write(text)
