"""URLs of an SQLite store: its file, its permissions, its mode, and the durability of its commits.

A store is used in one of two modes. The *native* mode relies on the kernel's locks, sockets and
process ids; the *portable* mode on SQLite and plain files alone (``?portable=true``). It is the
only one where the kernel's locks are missing, as on Windows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from tenure.engines._kit.url import Parameter, StoreUrl, choice, flag
from tenure.errors import Unsupported

Durability: TypeAlias = Literal["process", "full"]

PRIVATE = 0o600
_EXAMPLES = (
    "sqlite:///jobs.db is a file in the current folder, sqlite:////var/lib/jobs.db one anywhere"
)


def _mode(value: str) -> int:
    try:
        mode = int(value, 8)
    except ValueError:
        mode = -1
    if mode not in {PRIVATE, 0o660, 0o666}:
        raise ValueError("0600 (only the owner), 0660 (also its group) or 0666 (everyone)")
    return mode


_MODE = Parameter("mode", PRIVATE, _mode)
_DURABILITIES: dict[str, Durability] = {"process": "process", "full": "full"}
_DURABILITY: Parameter[Durability] = choice("durability", "process", _DURABILITIES)
_PORTABLE = flag("portable")
PARAMETERS: tuple[Parameter[Any], ...] = (_MODE, _DURABILITY, _PORTABLE)


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """A parsed URL.

    Attributes:
        url: the URL with an absolute path.
        path: the absolute path of the database.
        mode: the permissions of every file of the store.
        durability: ``"process"``: a commit survives the death of every process; ``"full"``: it also
            survives the death of the machine.
        portable: whether the store is used in portable mode.
    """

    url: str
    path: str
    mode: int
    durability: Durability
    portable: bool = False

    @property
    def shared(self) -> bool:
        """True if other users may use the file."""
        return self.mode != PRIVATE


def parse(url: str) -> SqliteUrl:
    """Parse a URL; a relative path counts from the current folder.

    Raises:
        InvalidArgument: it is malformed.
        Unsupported: it requests the native mode on a system without the kernel's locks.
    """
    given = StoreUrl(url, ("sqlite",), PARAMETERS)
    host, path = given.hosts, given.path[1:]
    if ":memory:" in {host, path}:
        raise given.wrong("it would be one program's own; use memory://")
    if host:
        raise given.wrong(
            f"it names a host, {host!r}; write sqlite:///{host}{given.path} for a path that counts "
            f"from the current folder, or sqlite:////{host}{given.path} for an absolute one"
        )
    if not path.strip("/"):
        raise given.wrong(f"it names no file: {_EXAMPLES}")
    if path.endswith("/"):
        raise given.wrong("it names a folder; add the name of a file to it")
    if path.startswith("~"):
        raise given.wrong("'~' is not expanded; write the whole path after four slashes")
    decoded = os.fsdecode(unquote_to_bytes(os.fsencode(path)))
    if "\0" in decoded:
        raise given.wrong("no file has a NUL in its name")
    absolute = os.path.abspath(decoded)
    if absolute != decoded:
        query = url.partition("?")[2]
        shown = absolute.replace(os.sep, "/")
        url = f"sqlite:///{quote(os.fsencode(shown), '/:')}{'?' if query else ''}{query}"
    portable = given[_PORTABLE]
    if not portable and not _has_kernel_locks():
        if _PORTABLE in given:
            raise Unsupported(
                f"{given.shown!r}: this system has only the portable mode. Remove portable=false"
            )
        portable = True
    return SqliteUrl(url, absolute, given[_MODE], given[_DURABILITY], portable)


def _has_kernel_locks() -> bool:
    try:
        import fcntl  # noqa: F401  only to check that this system has it
    except ImportError:  # Windows
        return False
    return True
