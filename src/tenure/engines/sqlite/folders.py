"""Trust in the folders on the way to a store.

A user who can exchange a folder on the way, or the file in it, can give two programs two different
files under one name. Both would then be granted the same lock.

Rules, for a private store:

* Every folder from the root on belongs to this user or to root. So does every symbolic link.
* Its group and everyone else may not write to it. A user's own group, with no other members, may.
* In a sticky folder, such as /tmp, others may write: they cannot exchange what is not theirs. Its
  owner can, and is checked like any other.

Where the URL's ``mode`` shares the store, its users trust the owners of these folders and the group
of the store's folder. With 0666 they trust everyone.

In a user namespace (a container without root on the host), users from outside appear as one
overflow user. Folders of that user are accepted, since the root directory often is one of them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import AuthenticationFailed

__all__ = ["check_folders", "user"]

_LINKS = 40  # followed at the most, as the kernel does
_ALL_USERS = 2**32 - 1


def check_folders(folder: str, address: SqliteUrl) -> None:
    """Refuse a store that another user could exchange.

    Args:
        folder: The store's folder, absolute.

    Raises:
        AuthenticationFailed: another user can exchange a folder on the way, or the file.
    """
    if address.mode & 0o002:
        return
    trusted = {0, os.geteuid()} | _outside_namespace()
    group = os.stat(folder).st_gid if address.shared else None
    for path, status in _way_to(folder):
        if not address.shared and status.st_uid not in trusted:
            kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder"
            raise AuthenticationFailed(
                f"the {kind} {path} belongs to {user(status.st_uid)}, who could put another file "
                f"in the place of {address.path}; use a folder of your own, run as its owner, or "
                "share the store on purpose (?mode=0660)"
            )
        if not stat.S_ISLNK(status.st_mode):
            _check_writers(path, status, group, address)


def _check_writers(
    path: str, status: os.stat_result, group: int | None, address: SqliteUrl
) -> None:
    if status.st_mode & stat.S_ISVTX or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    mode, command = "0666", "chmod go-w"
    if status.st_mode & stat.S_IWOTH:
        writers = "everyone"
        if address.shared:
            command = "chmod o-w"
    elif not address.shared and _has_access_list(
        path
    ):  # its widest permission is shown as the group's
        writers, command = "a user of its access list", "setfacl -b"
    elif status.st_gid != group and not _is_private_group(status):
        writers, mode = "its group", "0660"
    else:
        return
    share = "" if address.shared else f", or share the store on purpose (?mode={mode})"
    raise AuthenticationFailed(
        f"{writers} can write to the folder {path}, and so could put another file in the place "
        f"of {address.path}; remove that permission ({command} {path}), use a folder of your own"
        + share
    )


def _has_access_list(path: str) -> bool:
    """Return whether a folder has a POSIX access list, which shows as its group's permissions."""
    try:
        os.getxattr(path, "system.posix_acl_access")
    except (OSError, AttributeError):  # none, or not on this system
        return False
    return True


def _way_to(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder and symbolic link that the kernel passes on its way."""
    at = "/"
    names = folder.split("/")[::-1]
    links = 0
    yield at, os.lstat(at)
    while names:
        name = names.pop()
        if name in {"", "."}:
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        path = os.path.join(at, name)
        status = os.lstat(path)
        yield path, status
        if not stat.S_ISLNK(status.st_mode):
            at = path
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(path)
        names += target.split("/")[::-1]
        if target.startswith("/"):
            at = "/"


def _is_private_group(status: os.stat_result) -> bool:
    """Return whether the group is its user's own: of the same name, and without other members."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(status.st_gid)
        owner = pwd.getpwuid(status.st_uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def _outside_namespace() -> set[int]:
    """The user as which those from outside this process's user namespace appear, if it has one."""
    try:
        mapped = [
            tuple(map(int, line.split()))
            for line in Path("/proc/self/uid_map").read_text("utf-8").splitlines()
        ]
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text("utf-8"))
    except (OSError, ValueError):
        return set()
    if sum(count for _, _, count in mapped) >= _ALL_USERS:
        return set()  # of the whole system
    return {overflow}


def user(uid: int) -> str:
    """Return a user's name, or a description of one that has none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user {uid}"
