"""Trust in the folders on the path of a store, and in their file system.

A user who can replace a folder on the path, or the file in it, can give two programs different
files under one name. Both would then be granted the same lock.

Rules, for a private store:

* Every folder from the root, and every symbolic link, belongs to this user or to root.
* Its group and all other users may not write to it. A user's own group, without other members, may.
* In a sticky folder, such as /tmp, others may write, because they cannot replace files of other
  users. Its owner can, and is checked as usual.

If the URL's ``mode`` shares the store, its users trust the owners of these folders and the group of
the store's folder. With 0666 they trust everyone.

A store needs locks that are effective between all programs that can open its files. On a file
system shared by several machines (over a network, in a cluster, or by a host and its virtual
machines), each machine may have separate locks and caches. The layer to which an overlay writes has
other locks than the overlay itself.

In a user namespace (a rootless container), outside users appear as one overflow user. Folders of
that user are accepted, since the root directory often is one of them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import AuthenticationFailed, Unsupported

_MOUNTS = "/proc/self/mountinfo"

_LINKS = 40  # maximum number of followed links, as in the kernel
_ALL_USERS = 2**32 - 1


def check_folders(folder: str, address: SqliteUrl) -> None:
    """Reject a store that another user could replace.

    Args:
        folder: the store's folder, absolute.
        address: the URL, with the mode and the path of the file.

    Raises:
        AuthenticationFailed: another user can replace a folder on the path, or the file.
    """
    if address.mode & 0o002:
        return
    trusted = {0, os.geteuid()} | _outside_namespace()
    group = os.stat(folder).st_gid if address.shared else None
    for path, status in _steps_to(folder):
        if not address.shared and status.st_uid not in trusted:
            kind = "symbolic link" if stat.S_ISLNK(status.st_mode) else "folder"
            raise AuthenticationFailed(
                f"the {kind} {path} belongs to {user(status.st_uid)}, who could put another file "
                f"in the place of {address.path}. Use a folder of your own, run as its owner, or "
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
        f"of {address.path}. Remove that permission ({command} {path}), use a folder of your own"
        + share
    )


def _has_access_list(path: str) -> bool:
    """Return true if a folder has a POSIX access list, which appears as its group's permissions."""
    try:
        os.getxattr(path, "system.posix_acl_access")
    except (OSError, AttributeError):  # none, or unsupported on this system
        return False
    return True


def _steps_to(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every folder and symbolic link that the kernel visits on the path."""
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
    """Return true if the group is its user's own: of the same name, and without other members."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(status.st_gid)
        owner = pwd.getpwuid(status.st_uid)
    except KeyError:
        return False
    return group.gr_name == owner.pw_name and set(group.gr_mem) <= {owner.pw_name}


def _outside_namespace() -> set[int]:
    """Return the overflow user of this process's user namespace, if it has one."""
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


# File systems

_NETWORK = frozenset(
    "acfs afs auristorfs ceph cifs coda davfs gfs gfs2 glusterfs lustre ncp ncpfs nfs nfs3 nfs4 "
    "ocfs2 orangefs pvfs2 smb smb2 smb3 smbfs".split()
)
_CLUSTER = frozenset("beegfs beegfs_nodev cvfs gpfs mmfs panfs wekafs".split())
_VIRTUAL_MACHINE = frozenset(
    "9p drvfs fakeowner osxfs prl_fs vboxsf virtiofs vmhgfs vmhgfs-fuse grpcfuse".split()
)
_USER_SPACE = frozenset(
    "afp afpfs alluxio-fuse blobfuse blobfuse2 ceph-fuse cephfs cosfs curlftpfs davfs2 fuse_dfs "
    "ftpfs gcsfuse geesefs goofys google-drive-ocamlfuse gvfsd-fuse hdfs juicefs kio-fuse lizardfs "
    "mfs moosefs mount-s3 mountpoint-s3 obsfs onedriver ossfs rclone s3fs s3ql seaweedfs smbnetfs "
    "sshfs weed xtreemfs".split()
)
_SHARED = _NETWORK | _CLUSTER | _VIRTUAL_MACHINE
_LAYERS = frozenset("aufs overlay fuse-overlayfs".split())


def check_file_system(folder: str) -> None:
    """Reject a folder whose files other programs can reach without sharing locks.

    Raises:
        Unsupported: other machines may share it, or it is a layer of an overlay.
    """
    kind = file_system(folder)
    name = kind.removeprefix("fuse.")
    if name in _SHARED or (name != kind and name in _USER_SPACE):
        shared = "shared with a host" if name in _VIRTUAL_MACHINE else "a network file system"
        raise Unsupported(
            f"{folder} is on {shared} ({kind}), whose locks do not hold between machines. Use a "
            "local folder, or redis://, etcd:// or a tenure:// server"
        )
    real = os.path.realpath(folder)
    for fields, kind, options in _mounts():
        layer = re.search(r"(?:^|,)upperdir=([^,]+)", options) if kind == "overlay" else None
        if layer and f"{real}/".startswith(f"{_unescaped(layer[1])}/"):
            raise Unsupported(
                f"{folder} is a layer of the overlay that is mounted at {_unescaped(fields[4])}, "
                "whose programs do not share locks with this path. Use the path there, or mount a "
                "folder of the host in the container"
            )


def describe_layer(folder: str) -> str:
    """Return a warning if a folder is on a container's own layer; empty if it is not."""
    kind = file_system(folder)
    if kind.removeprefix("fuse.") not in _LAYERS:
        return ""
    return (
        f"{folder} is on the container's own file system ({kind}): other containers do not see "
        "it, and it ends with the container"
    )


def file_system(folder: str) -> str:
    """Return the type of a folder's file system; empty if unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for fields, kind, _ in _mounts():
        if fields[2] == number:
            return kind
    return ""


def is_mount_point(path: str) -> bool:
    """Return whether something is mounted at a path, links resolved."""
    real = os.path.realpath(path)
    return any(_unescaped(fields[4]) == real for fields, _, _ in _mounts())


def _mounts() -> Iterator[tuple[list[str], str, str]]:
    """Yield the first fields of each mount, the type of its file system, and its options."""
    if not sys.platform.startswith("linux"):
        return
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields, _, described = line.partition(" - ")
                kind, _, rest = described.rstrip("\n").partition(" ")
                yield fields.split(" "), kind, rest.rpartition(" ")[2]
    except OSError:
        return


def _unescaped(field: str) -> str:
    """Decode the octal escapes of spaces, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
