"""File systems: which of them a store can be on.

A store needs locks that hold between all programs that can open its files. On a file system which
several machines share (a network, a cluster, or a host and its virtual machines), each machine may
have locks and caches of its own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from tenure.errors import Unsupported

__all__ = ["check_file_system", "file_system", "is_mount_point"]

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


def check_file_system(folder: str) -> None:
    """Refuse a folder that other machines may share.

    Raises:
        Unsupported: it is on such a file system.
    """
    kind = file_system(folder)
    name = kind.removeprefix("fuse.")
    if name in _SHARED or (name != kind and name in _USER_SPACE):
        shared = "shared with a host" if name in _VIRTUAL_MACHINE else "a network file system"
        raise Unsupported(
            f"{folder} is on {shared} ({kind}), whose locks do not hold between machines; use a "
            "local folder, or redis://, etcd:// or a tenure:// server"
        )


def file_system(folder: str) -> str:
    """Return the type of a folder's file system; empty where the system does not tell."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for fields, kind in _mounts():
        if fields[2] == number:
            return kind
    return ""


def is_mount_point(path: str) -> bool:
    """Return whether something is mounted at a path, by whichever links it is reached."""
    real = os.path.realpath(path)
    return any(_unescaped(fields[4]) == real for fields, _ in _mounts())


def _mounts() -> Iterator[tuple[list[str], str]]:
    """The fields of each mount before the separator, and the type of its file system."""
    if not sys.platform.startswith("linux"):
        return
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields, _, described = line.partition(" - ")
                yield fields.split(" "), described.split(" ", 1)[0]
    except OSError:
        return


def _unescaped(field: str) -> str:
    """Decode the octal escapes of spaces, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
