"""What SQLite does to its files, call by call, and what a power cut would leave of them.

`recorded` puts a layer of our own between SQLite and the operating system (a VFS, as SQLite calls
it): all that is written, cut, removed and synced goes into a log before it goes on, and tests add
what programs were told. `after_power_cut` makes of the log what a disk may hold after any moment:
all that was synced by then, and of the rest nothing, everything, or any part.

The layer is the default for every connection opened meanwhile, in this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

_OPEN_FOLDER = b"openDirectory"
_SECTOR = 512
"""Bytes that a disk writes whole or not at all."""


@dataclass(frozen=True)
class Write:
    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Truncate:
    path: str
    size: int


@dataclass(frozen=True)
class Sync:
    path: str


@dataclass(frozen=True)
class SyncFolder:
    path: str
    names: frozenset[str]


@dataclass(frozen=True)
class Delete:
    path: str


Log = list[Any]
"""These, and between them whatever a test adds, in the order in which it happened."""


# SQLite's structures


class _Methods(ctypes.Structure):
    _fields_: ClassVar = [
        ("version", ctypes.c_int),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "close read write truncate sync size lock unlock reserved control sector "
                "characteristics shm_map shm_lock shm_barrier shm_unmap fetch unfetch"
            ).split()
        ),
    ]


class _File(ctypes.Structure):
    _fields_: ClassVar = [("methods", ctypes.POINTER(_Methods))]


class _Vfs(ctypes.Structure):
    _fields_: ClassVar = [
        ("version", ctypes.c_int),
        ("file_size", ctypes.c_int),
        ("longest_path", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "open delete access full_path dl_open dl_error dl_sym dl_close randomness sleep "
                "time last_error time64 set_call get_call next_call"
            ).split()
        ),
    ]


_OPEN = ctypes.CFUNCTYPE(
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_File)),
    *(ctypes.c_int, ctypes.POINTER(ctypes.c_int)),
)  # the name as an address: SQLite keeps it
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_CLOSE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_WRITE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_FOLDER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int))
_GET_CALL = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_SET_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class _Calls:
    """SQLite's own functions for one kind of file."""

    def __init__(self, methods: Any) -> None:
        self.close = _CLOSE(methods.close)
        self.write = _WRITE(methods.write)
        self.truncate = _TRUNCATE(methods.truncate)
        self.sync = _SYNC(methods.sync)


def _library() -> ctypes.CDLL | None:
    """The library that Python's own `sqlite3` uses, if it is one of its own."""
    name = ctypes.util.find_library("sqlite3")
    with contextlib.suppress(OSError):
        if name is not None:
            library = ctypes.CDLL(name)
            library.sqlite3_libversion.restype = ctypes.c_char_p
            library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
            with open("/proc/self/maps", encoding="utf-8") as maps:
                loaded = {line.split()[-1] for line in maps if "libsqlite3" in line}
            if len(loaded) == 1 and library.sqlite3_libversion().decode() == sqlite3.sqlite_version:
                return library
    return None


def is_possible() -> bool:
    """Whether a layer can be put there: not where `sqlite3` has SQLite inside."""
    return _library() is not None


@contextlib.contextmanager
def recorded() -> Iterator[Log]:
    """The log of all that connections opened in the block do to their files."""
    library = _library()
    assert library is not None
    log: Log = []
    real = library.sqlite3_vfs_find(None)
    ours = _Vfs.from_buffer_copy(real.contents)
    kinds: dict[int, tuple[_Methods, _Calls]] = {}  # SQLite has several kinds of files
    files: dict[int, tuple[str, _Calls]] = {}
    real_open, real_delete = _OPEN(real.contents.open), _DELETE(real.contents.delete)

    def our_kind(methods: Any) -> tuple[_Methods, _Calls]:
        address = ctypes.addressof(methods)
        if address not in kinds:
            copy = _Methods.from_buffer_copy(methods)
            for field, function in replaced.items():
                setattr(copy, field, ctypes.cast(function, ctypes.c_void_p))
            kinds[address] = copy, _Calls(methods)
        return kinds[address]

    def open_(_vfs: int, name: int | None, file: Any, flags: int, out: Any) -> int:
        status = real_open(ctypes.addressof(real.contents), name, file, flags, out)
        if status == 0 and name is not None:
            methods, calls = our_kind(file.contents.methods.contents)
            path = os.fsdecode(ctypes.string_at(name))
            files[ctypes.addressof(file.contents)] = path, calls
            file.contents.methods = ctypes.pointer(methods)
        return int(status)

    def delete(_vfs: int, name: bytes, sync_folder: int) -> int:
        log.append(Delete(os.fsdecode(name)))
        return int(real_delete(ctypes.addressof(real.contents), name, sync_folder))

    def close(file: int) -> int:
        _, calls = files.pop(file)
        return int(calls.close(file))

    def write(file: int, data: int, size: int, offset: int) -> int:
        path, calls = files[file]
        log.append(Write(path, offset, ctypes.string_at(data, size)))
        return int(calls.write(file, data, size, offset))

    def truncate(file: int, size: int) -> int:
        path, calls = files[file]
        log.append(Truncate(path, size))
        return int(calls.truncate(file, size))

    def sync(file: int, flags: int) -> int:
        path, calls = files[file]
        status = int(calls.sync(file, flags))
        if status == 0:
            log.append(Sync(path))
        return status

    real_folder = _FOLDER(_GET_CALL(real.contents.get_call)(None, _OPEN_FOLDER))
    set_call = _SET_CALL(real.contents.set_call)

    def open_folder(path_in_it: bytes, fd: Any) -> int:
        # SQLite opens a folder for no other reason than to sync it.
        folder = os.path.dirname(os.fsdecode(path_in_it))
        log.append(SyncFolder(folder, frozenset(os.listdir(folder))))
        return int(real_folder(path_in_it, fd))

    replaced = {
        "close": _CLOSE(close),
        "write": _WRITE(write),
        "truncate": _TRUNCATE(truncate),
        "sync": _SYNC(sync),
    }
    new_open, new_delete, new_folder = _OPEN(open_), _DELETE(delete), _FOLDER(open_folder)
    ours.name = b"recorded"
    ours.open = ctypes.cast(new_open, ctypes.c_void_p)
    ours.delete = ctypes.cast(new_delete, ctypes.c_void_p)
    assert library.sqlite3_vfs_register(ctypes.byref(ours), 1) == 0
    assert set_call(None, _OPEN_FOLDER, ctypes.cast(new_folder, ctypes.c_void_p)) == 0
    try:
        yield log
    finally:
        set_call(None, _OPEN_FOLDER, None)  # as it was
        library.sqlite3_vfs_register(real, 1)
        library.sqlite3_vfs_unregister(ctypes.byref(ours))
        assert not files, f"still open: {files}"


def after_power_cut(log: Log, cut: int, chance: random.Random) -> Iterator[dict[str, bytes]]:
    """What the files may hold when the power fails before ``log[cut]`` happens."""
    synced: dict[str, bytearray] = {}
    pending: dict[str, list[Write | Truncate]] = {}
    for done in log[:cut]:
        match done:
            case Write(path) | Truncate(path):
                pending.setdefault(path, []).append(done)
            case Sync(path):
                _apply(synced.setdefault(path, bytearray()), pending.pop(path, []))
            case Delete(path):
                synced.pop(path, None)
                pending.pop(path, None)
    for survives in (_none, _all, _some):
        files = {path: bytearray(data) for path, data in synced.items()}
        for path, changes in pending.items():
            _apply(files.setdefault(path, bytearray()), survives(changes, chance))
        yield {path: bytes(data) for path, data in files.items()}


def _none(_changes: list[Write | Truncate], _chance: random.Random) -> list[Write | Truncate]:
    return []


def _all(changes: list[Write | Truncate], _chance: random.Random) -> list[Write | Truncate]:
    return changes


def _some(changes: list[Write | Truncate], chance: random.Random) -> list[Write | Truncate]:
    """Any of the sectors, also of one write."""
    some: list[Write | Truncate] = []
    for change in changes:
        if isinstance(change, Truncate):
            if chance.random() < 0.5:
                some.append(change)
            continue
        at, end = change.offset, change.offset + len(change.data)
        while at < end:
            to = min(end, (at // _SECTOR + 1) * _SECTOR)
            if chance.random() < 0.5:
                part = change.data[at - change.offset : to - change.offset]
                some.append(Write(change.path, at, part))
            at = to
    return some


def _apply(data: bytearray, changes: list[Write | Truncate]) -> None:
    for change in changes:
        size = change.size if isinstance(change, Truncate) else change.offset + len(change.data)
        if len(data) < size:
            data.extend(bytes(size - len(data)))
        if isinstance(change, Truncate):
            del data[size:]
        else:
            data[change.offset : size] = change.data
