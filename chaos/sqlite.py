"""SQLite for chaos: one file, on a small file system of its own that can be filled up.

What is broken beside the processes: the turn's owner stopped or killed in its turn, a write lock of
another program, a full disk, and the wall clock, which jumps for some of the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.adapter import Engine, Fault, NotNow, Scene
from chaos.crew import Slot
from chaos.faults import killed, stopped

_DISK = 48 << 20
"""Bytes of the file system: a few times what the store and its log ever take."""

_FAKETIME = (
    *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
    *Path("/usr/lib/faketime").glob("libfaketimeMT.so.1"),
    *Path("/usr/local/lib/faketime").glob("libfaketimeMT.so.1"),
)

_WRITE_LOCK = "120"
"""Byte of the log's index that SQLite locks for writing (WAL_WRITE_LOCK)."""

_PATIENCE = 2.0
"""Seconds for which a moment is looked for before that is given up for this time."""


class Sqlite(Engine):
    """One file, and no server."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        """Choose the paths of the disk and of the clock."""
        super().__init__(folder)
        self._disk = folder / "disk"
        self._mounted = False
        self._durability = "process"
        self._clock = folder / "faketime"

    @property
    def url(self) -> str:
        """URL of the file, with the present durability."""
        return f"sqlite:///{self._path}?durability={self._durability}"

    @property
    def _path(self) -> Path:
        return self._disk / "store.db"

    async def start(self) -> None:
        """Mount the disk, where that is permitted."""
        self._disk.mkdir(mode=0o700)
        self._clock.write_text("+0\n")
        self.not_done["restart without data"] = "SQLite promises nothing without its file"
        self.not_done["cut and half-open connections"] = "there are none: one host, one file"
        self.not_done["reboot of the machine"] = "a kill of all processes at once stands in for it"
        if not _FAKETIME:
            self.not_done["clock-jump"] = "libfaketime is not installed (Debian: faketime)"
        try:
            await _run(
                *("mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700"),
                "tenure-chaos",
                self._disk,
            )
        except OSError as error:
            self.not_done["disk-full"] = f"no file system of its own: {error}"
        else:
            self._mounted = True

    async def stop(self) -> None:
        """Keep a copy of the store, and unmount the disk."""
        if self._mounted:
            self._mounted = False
            shutil.copytree(self._disk, self.folder / "store", ignore=_sockets)
            await _run("umount", self._disk)

    def environment(self, slot: int) -> Mapping[str, str]:
        """Two processes of three live on a wall clock that may jump."""
        if not _FAKETIME or slot % 3 == 2:
            return {}
        return {
            "LD_PRELOAD": str(_FAKETIME[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
            "NO_FAKE_STAT": "1",
        }

    def faults(self) -> Sequence[Fault]:
        """Return the faults of processes, the file, the disk and the clock."""
        faults = [
            Fault("stop-in-turn", "SIGSTOP of a process in its turn to write", _stop, (0.3, 2.5)),
            Fault("kill-in-turn", "kill -9 of a process in its turn to write", _kill, (0.05, 0.5)),
            Fault("foreign-lock", "another program locks the file", self._lock, (0.2, 1.5)),
            Fault("durability", "one asks for durability=full", self._ask_for_full, (0.1, 0.2)),
        ]
        if "disk-full" not in self.not_done:
            faults.append(Fault("disk-full", "the disk is full", self._fill, (0.2, 2.0)))
        if "clock-jump" not in self.not_done:
            faults.append(Fault("clock-jump", "the wall clock jumps", self._jump, (1.5, 3.0)))
        return faults

    def holds_up_all(self, pid: int) -> bool:
        """Return true if it has the turn to write."""
        return self.owner() == pid

    # Faults

    def owner(self) -> int:
        """Return the process that is in its turn to write; 0 for none."""
        return _locker(f"{self._path}.tenure/turn.lock", "FLOCK")

    @asynccontextmanager
    async def _lock(self, scene: Scene) -> AsyncIterator[str]:
        """BEGIN IMMEDIATE, by somebody who knows nothing of turns."""
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as other:
            other.execute("PRAGMA busy_timeout = 0")
            until = scene.journal.now() + _PATIENCE
            while not _begins(other):
                if scene.journal.now() > until:
                    raise NotNow("others had the lock each time")
                await asyncio.sleep(0.0005)
            try:
                yield "BEGIN IMMEDIATE"
            finally:
                other.execute("ROLLBACK")

    @asynccontextmanager
    async def _fill(self, _: Scene) -> AsyncIterator[str]:
        ballast = self._disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                for size in (1 << 20, 4096, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(size))
            yield f"{ballast.stat().st_size >> 20} MiB of ballast"
        finally:
            ballast.unlink()

    @asynccontextmanager
    async def _jump(self, scene: Scene) -> AsyncIterator[str]:
        """There and back again, for those who have the library."""
        jump = scene.random.choice((-86400, -3600, -61, 61, 3600, 86400))
        self._set_clock(jump)
        try:
            yield f"{jump:+d} s"
        finally:
            self._set_clock(0)

    def _set_clock(self, offset: int) -> None:
        new = self._clock.with_suffix(".new")
        new.write_text(f"{offset:+d}\n")
        os.replace(new, self._clock)

    @asynccontextmanager
    async def _ask_for_full(self, scene: Scene) -> AsyncIterator[str]:
        """From here on for all of that file; those who start later say so too, every other time."""
        self._durability = "process" if self._durability == "full" else "full"
        async with scene.crew.one(scene.random) as slot, killed(scene, [slot]):
            yield f"a process starts with durability={self._durability}"


class PortableSqlite(Sqlite):
    """The same in portable mode: writers wait for SQLite's own lock, which shows no owner."""

    name = "sqlite-portable"

    @property
    def url(self) -> str:
        """URL of the file, with the present durability."""
        return f"{super().url}&portable=true"

    def owner(self) -> int:
        """Return the process that has SQLite's lock to write; 0 for none."""
        return _locker(f"{self._path}-shm", "POSIX", ("WRITE", _WRITE_LOCK))


# The turn


@asynccontextmanager
async def _stop(scene: Scene) -> AsyncIterator[str]:
    async with _in_turn(scene) as slot:
        assert slot.member is not None
        yield slot.member.label


@asynccontextmanager
async def _kill(scene: Scene) -> AsyncIterator[str]:
    async with contextlib.AsyncExitStack() as stack:
        slot = await stack.enter_async_context(_in_turn(scene))
        assert slot.member is not None
        label = slot.member.label
        async with killed(scene, [slot]):  # a stopped process dies as it is
            yield label


@asynccontextmanager
async def _in_turn(scene: Scene) -> AsyncIterator[Slot]:
    """Return a process that is stopped while it has the turn, found by trying."""
    engine = scene.engine
    assert isinstance(engine, Sqlite)
    until = scene.journal.now() + _PATIENCE
    while scene.journal.now() < until:
        slots = {slot.member.pid: slot for slot in scene.crew.slots if slot.member is not None}
        slot = slots.get(engine.owner())
        if slot is None or slot.lock.locked():
            await asyncio.sleep(0.0005)
            continue
        async with slot.lock:
            member = slot.member
            assert member is not None
            async with stopped(scene, member):
                if engine.holds_up_all(member.pid):
                    yield slot
                    return
        await asyncio.sleep(0.002)
    raise NotNow("nobody was found in its turn")


def _begins(other: sqlite3.Connection) -> bool:
    """Lock the file for writing, if nobody else has just now."""
    try:
        other.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    return True


def _locker(path: str, kind: str, area: tuple[str, str] | None = None) -> int:
    """Return the process that has a lock on a file; 0 for none.

    Args:
        path: the file.
        kind: of the lock, as the kernel names it.
        area: its mode and its first byte, if it has to have these.
    """
    try:
        inode = str(os.stat(path).st_ino)
    except FileNotFoundError:
        return 0
    with open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            # POSIX ADVISORY WRITE pid major:minor:inode first last
            what, _, mode, pid, file, first, _ = line.split()[1:8]
            if what == kind and file.rpartition(":")[2] == inode and area in {None, (mode, first)}:
                return int(pid)
    return 0


# The file system


async def _run(*command: str | Path) -> None:
    """Run a program of the system.

    Raises:
        OSError: it is not there, or failed.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    _, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise OSError(lines[0] if lines else f"{command[0]} failed")


def _sockets(folder: str, names: list[str]) -> list[str]:
    """Return the parts that cannot be copied."""
    return [
        name
        for name in names
        if not os.path.isfile(os.path.join(folder, name))
        and not os.path.isdir(os.path.join(folder, name))
    ]
