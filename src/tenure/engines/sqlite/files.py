"""Files of a store, and their checks.

Next to the database (and SQLite's own ``-wal`` and ``-shm``) there is a folder with the database's
name and ``.tenure``. It contains the turn, and each participant's liveness file and socket.

Rules:

* New files are private (0600, folders 0700), unless the URL's ``mode`` shares them. The umask
  has no effect.
* Files of another user are never changed, and are used only if they are shared by ``mode``. The
  same applies to folders in which others could replace a file.
* A database has one name. SQLite finds its log, and tenure its folder, by the name, so two names of
  one file (a hard link, a second mount) would be two stores in one file.
* A folder is created only in the user's state folder, for the default store. Another missing folder
  is more likely a mistake, and creating it would silently split one store into two.
* The entries of new files are synced to disk before they are used, by syncing the folder. (SQLite
  syncs its own.)
* The database is checked by its name and never opened here: closing it would release SQLite's locks
  on it in this process.

Trust in the folders on the path of a store, and in their file system.

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

import contextlib
import errno
import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tenure.engines.sqlite.url import SqliteUrl
from tenure.errors import AuthenticationFailed, EngineError, TenureError, Unsupported
from tenure.greenlets import close_descriptor

UNIX = hasattr(os, "geteuid")
"""Whether files have an owner and a mode. On Windows, a store has the access list of its folder."""

OPENING: int = sum(
    getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_NOINHERIT", "O_BINARY")
)
"""Flags for opening a file of a store, as far as the system has them."""

_seeking = threading.Lock()


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Read from a file at an offset, as ``os.pread``, which Windows lacks."""
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write to a file at an offset, as ``os.pwrite``, which Windows lacks."""
    if hasattr(os, "pwrite"):
        os.pwrite(fd, data, offset)
        return
    with _seeking:
        os.lseek(fd, offset, os.SEEK_SET)
        os.write(fd, data)


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
    if address.mode & 0o002 or not UNIX:
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
    if not UNIX:
        return "unknown"
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
_SHARED = _NETWORK | _CLUSTER | _VIRTUAL_MACHINE | {"network drive"}
_DRIVE_REMOTE = 4  # of GetDriveType
_LAYERS = frozenset("aufs overlay fuse-overlayfs".split())


def check_file_system(folder: str) -> None:
    """Reject a folder whose files other programs can reach without sharing locks.

    Raises:
        Unsupported: other machines may share it, or it is a layer of an overlay.
    """
    kind = "network drive" if _is_network_drive(folder) else file_system(folder)
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


def _is_network_drive(folder: str) -> bool:
    """Return true if a folder of Windows is on another machine."""
    import ctypes

    drive = os.path.splitdrive(folder)[0]
    windll = getattr(ctypes, "windll", None)
    if windll is None or not drive:
        return False
    return bool(windll.kernel32.GetDriveTypeW(f"{drive}\\") == _DRIVE_REMOTE)


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
    if not sys.platform.startswith("linux"):
        return ""
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


log = logging.getLogger("tenure.sqlite")

Identity: TypeAlias = tuple[int, int]
"""Device and inode of a file."""


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """Paths of a store's files, and their mode.

    Attributes:
        path: the path of the database.
        identity: the device and inode of the database.
        folder: the folder for tenure's own files.
        mode: the mode of every file.
        portable: whether the store is used in portable mode.
    """

    path: str
    identity: Identity
    folder: str
    mode: int
    portable: bool

    @property
    def log(self) -> tuple[str, str]:
        """Paths of SQLite's log and of the index of the log."""
        return f"{self.path}-wal", f"{self.path}-shm"

    @property
    def current_mode(self) -> int:
        """Mode of a new file. Another program may have opened a private store as shared."""
        mode = os.stat(self.path).st_mode
        return self.mode | (mode & 0o666 if mode & 0o022 else 0)

    @property
    def turn(self) -> str:
        """Path of the file whose lock is the turn."""
        return os.path.join(self.folder, "turn.lock")


# Layout of the log's index, which SQLite's documentation describes (walformat.html).
_COPY = 48  # the first of two equal headers
_FRAMES = slice(16, 20)
_SALTS = slice(32, 40)  # which differ after each restart of the log
_BACKFILLED = slice(96, 100)
_ATTEMPTED = slice(128, 132)
_INDEX_HEADER = 136
_CHECKPOINTS = (_SALTS, _BACKFILLED, _ATTEMPTED)
_HEAD = 4096  # bytes of the database: with the row of the table meta


@dataclass(frozen=True, slots=True)
class _Content:
    """A look at a database's content.

    Attributes:
        written: when it was written to, and its size.
        checkpoints: how far the checkpoints had come.
        head: its beginning.
    """

    written: tuple[int, int]
    checkpoints: bytes
    head: bytes


class OpenFiles:
    """Files that an engine has opened, and must find again under their names.

    SQLite and the kernel go on with a file that was removed or replaced. Another program would open
    the new one, so that both could be granted the same lock.

    Args:
        place: the store's files. All are there, because the engine has just opened them.
        read: reads so many bytes of the database or of the log's index; empty where that is not
            possible.

    Attributes:
        lost: the reason why the engine does not use them any more, or empty.
    """

    def __init__(self, place: StoreFiles, read: Callable[[str, int], bytes]) -> None:
        self.lost = ""
        self._path = place.path
        self._log, self._index = place.log
        self._index_size = 0
        self._read = read
        self._seen: _Content | None = None
        self.identities = {place.path: place.identity}
        for each in place.log if place.portable else (*place.log, place.turn):
            status = os.stat(each, follow_symlinks=False)
            self.identities[each] = (status.st_dev, status.st_ino)

    def check(self) -> None:
        """Raise unless every file is still the one that was opened.

        Raises:
            EngineError: a file was removed, replaced, truncated, overwritten, made inaccessible, or
                given a second name.
        """
        if self.lost:
            raise EngineError(self.lost)
        for path, identity in self.identities.items():
            try:
                status = os.stat(path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                raise self.lost_error(path, "removed") from None
            except PermissionError:
                raise self.lost_error(path, "made inaccessible") from None
            if (status.st_dev, status.st_ino) != identity:
                raise self.lost_error(path, "replaced")
            if status.st_nlink > 1 and path == self._path:
                check_one_name(path, status)
            if self._is_truncated(path, status.st_size):
                raise self.lost_error(path, "truncated")
            if path == self._path and self._is_overwritten(status):
                raise self.lost_error(path, "overwritten")

    def _is_overwritten(self, status: os.stat_result) -> bool:
        """Return true if the database was written to, and not by a checkpoint.

        Checkpoints record in the log's index how far they have come. One may run at any moment of
        this, since the status was read, for example. So an unchanged time of the last write alone
        does not show that the content is unchanged.
        """
        written = (status.st_mtime_ns, status.st_size)
        former = self._seen
        index = self._read(self._index, _INDEX_HEADER)
        checkpoints = b"".join(index[each] for each in _CHECKPOINTS)
        if former and former.written == written and former.checkpoints == checkpoints:
            head = former.head
        else:
            head = self._read(self._path, _HEAD)
        again = self._read(self._index, _INDEX_HEADER)
        if not index or any(index[each] != again[each] for each in _CHECKPOINTS):
            return False
        if index[_BACKFILLED] != index[_ATTEMPTED]:  # a checkpoint is running, or was interrupted
            return False
        self._seen = _Content(written, checkpoints, head)
        return former is not None and former.checkpoints == checkpoints and former.head != head

    def _is_truncated(self, path: str, size: int) -> bool:
        if path == self._index:  # mapped, and never made shorter by SQLite while it is in use
            self._index_size = max(size, self._index_size)
            return size < self._index_size
        return size == 0 and (
            path == self._path or (path == self._log and self._has_index_frames())
        )

    def _has_index_frames(self) -> bool:
        """Return true if the log is empty, but its index has frames.

        A checkpoint of another program clears the index before it truncates the log. A commit
        writes the log before the index. So an unchanged header around a look at the log decides.
        """
        before = self._read(self._index, _COPY)
        empty = os.stat(self._log, follow_symlinks=False).st_size == 0
        return empty and before == self._read(self._index, _COPY) and any(before[_FRAMES])

    def lost_error(self, path: str, how: str) -> EngineError:
        """Return the error for a file of the store to which something was done.

        Args:
            path: the file.
            how: what was done to it, as a participle.
        """
        if path in self.identities:
            effect = "leases are not protected any more. "
            remedy = f"End every program that uses {self._path}, then connect again"
        else:
            effect, remedy = "it proved that this program is alive. ", "Then connect again"
        return EngineError(
            f"{path} was {how} while in use: {effect}Stop all programs of a store before touching "
            f"its files. {remedy}"
        )


@contextmanager
def system_error(doing: str) -> Iterator[None]:
    """Convert an `OSError` into an error that says what to do about it."""
    try:
        yield
    except TenureError:  # some of which are OSErrors, too
        raise
    except OSError as error:
        raise explain(doing, error) from error


def explain(doing: str, error: OSError) -> TenureError:
    """Return an error that says what the system rejected, and what to do about it."""
    match error.errno:
        case errno.EACCES | errno.EPERM:
            return AuthenticationFailed(
                f"{doing}: permission denied. Choose a folder of your own, or run as the owner "
                "of the file, or have the owner share it (sqlite:///...?mode=0660)"
            )
        case errno.EROFS:
            return EngineError(f"{doing}: the file system is read-only. Choose another place")
        case errno.ENOSPC | errno.EDQUOT:
            return EngineError(f"{doing}: the disk is full. Make room, and try again")
        case errno.EMFILE | errno.ENFILE:
            return EngineError(f"{doing}: too many open files. Raise the limit (ulimit -n)")
    return EngineError(f"{doing}: {error.strerror or error}")


def prepare(address: SqliteUrl) -> StoreFiles:
    """Check all of the store's files, and create missing ones.

    Raises:
        AuthenticationFailed: this user may not use them, or others could tamper with them.
        Unsupported: they are on a network file system.
        EngineError: they have another problem.
    """
    path = address.path
    parent = os.path.dirname(path)
    with system_error(f"cannot make the folder {parent}"):
        _make_folders(parent, address)
    with system_error(f"cannot examine the folder {parent}"):
        check_folders(parent, address)
    check_file_system(parent)
    with system_error(f"cannot make {path}"):
        status = _database(path, address)
    for suffix in ("-wal", "-shm", "-journal"):
        with system_error(f"cannot use {path}{suffix}"):
            _check_side_file(path + suffix, status, address)
    folder = path + ".tenure"
    with system_error(f"cannot make the folder {folder}"):
        _make_own_folder(folder, status, address)
    return StoreFiles(path, (status.st_dev, status.st_ino), folder, address.mode, address.portable)


# Folders


def _folder_mode(address: SqliteUrl) -> int:
    """Return the permissions of a folder; new files in a shared one get its group."""
    mode = address.mode | (address.mode & 0o444) >> 2
    return mode | stat.S_ISGID if address.shared else mode


def _make_folder(folder: str, address: SqliteUrl) -> None:
    mode = _folder_mode(address)
    os.mkdir(folder, mode & 0o777)
    os.chmod(folder, mode)  # regardless of the umask
    _sync_folder(os.path.dirname(folder), address)


def _sync_folder(folder: str, address: SqliteUrl) -> None:
    """Sync the entries of a folder. A failure matters only if commits are durable."""
    if not UNIX:  # folders cannot be synced
        return
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            close_descriptor(fd)
    except OSError:
        if address.durability == "full":
            raise


def _make_folders(folder: str, address: SqliteUrl) -> None:
    missing: list[str] = []
    target = folder
    while not os.path.isdir(folder):
        # Checked again: another process may have created it just now.
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise EngineError(f"{folder} is not a folder. Check the path in the URL")
        missing.append(folder)
        folder = os.path.dirname(folder)
    if missing and not may_make_folder(target):
        raise no_folder(target, address)
    for each in reversed(missing):
        try:
            _make_folder(each, address)
        except FileExistsError:  # another process was first
            continue


def may_make_folder(folder: str) -> bool:
    """Return true if a missing folder is created: in the state folder of `tenure.default_url`."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    own = os.path.abspath(os.path.join(home, "tenure"))
    return folder == own or folder.startswith(own + os.sep)


def no_folder(folder: str, address: SqliteUrl) -> EngineError:
    """Return the error for a missing folder that is not created."""
    mode = f"{_folder_mode(address):o}"
    return EngineError(
        f"there is no folder {folder} for {address.path}. Check the URL (a relative path counts "
        f"from the working directory), or make it (mkdir -p -m {mode} {folder})"
    )


def _make_own_folder(folder: str, database: os.stat_result, address: SqliteUrl) -> None:
    try:
        _make_folder(folder, address)
        if address.shared and UNIX:
            _set_group(folder, database.st_gid, _folder_mode(address))
    except FileExistsError:
        pass
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise EngineError(f"{folder} is not a folder. Move it away: the store needs one")
    if not UNIX:
        return
    _check_owner(folder, status, address)
    mode = _folder_mode(address)
    if status.st_uid == os.geteuid():
        if stat.S_IMODE(status.st_mode) != mode:
            os.chmod(folder, mode)
    elif not _may(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def share_side_files(place: StoreFiles, address: SqliteUrl) -> None:
    """Give SQLite's files, which have the mode of the database, its group as well."""
    if address.shared and UNIX:
        group = os.stat(place.path).st_gid
        for each in place.log:
            with contextlib.suppress(FileNotFoundError):
                _set_group(each, group, address.mode)


def _set_group(path: str, group: int, mode: int) -> None:
    """Give a file of a shared store to the group of its database, if permitted."""
    if os.stat(path).st_gid != group:
        try:
            os.chown(path, -1, group)
        except PermissionError:
            return  # it keeps its original group
        os.chmod(path, mode)


# Files


def _database(path: str, address: SqliteUrl) -> os.stat_result:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        _create(path, address)
        status = os.lstat(path)
    check_trusted(path, status, address)
    mode = stat.S_IMODE(status.st_mode)
    if UNIX and status.st_uid == os.geteuid() and address.shared and mode != address.mode:
        for each in (path, f"{path}-wal", f"{path}-shm", *_own_files(f"{path}.tenure")):
            with contextlib.suppress(FileNotFoundError):
                os.chmod(each, address.mode)
    check_usable(path)
    return status


def _own_files(folder: str) -> list[str]:
    """Return this user's files in the folder of a store, which a private program may have made."""
    with contextlib.suppress(FileNotFoundError):
        return [each.path for each in os.scandir(folder) if each.stat().st_uid == os.geteuid()]
    return []


def check_trusted(path: str, status: os.stat_result, address: SqliteUrl) -> None:
    """Reject a database that another user may have tampered with.

    Raises:
        AuthenticationFailed: another user owns it, can write to it, or may have placed it there.
        EngineError: it is not a regular file with one name.
    """
    if stat.S_ISLNK(status.st_mode):
        raise AuthenticationFailed(
            f"{path} is a symbolic link, which another user may have put there. Name the file "
            f"itself ({os.path.realpath(path)})"
        )
    if stat.S_ISDIR(status.st_mode):
        raise EngineError(f"{path} is a folder. Add the name of a file to it")
    if not stat.S_ISREG(status.st_mode):
        raise EngineError(f"{path} is not a regular file")
    check_one_name(path, status)
    if is_mount_point(path):
        raise EngineError(
            f"{path} is mounted by itself, and a program that reaches the file by another path has "
            "a queue of its own. Mount its folder"
        )
    if not UNIX:
        return
    _check_owner(path, status, address)
    mode = stat.S_IMODE(status.st_mode)
    if not address.shared and mode & 0o022:
        raise AuthenticationFailed(
            f"others can write to {path} (its mode is {mode:04o}): open it as shared "
            f"(?mode={0o666 if mode & 0o002 else 0o660:04o}), or make it private (chmod 600)"
        )


def check_one_name(path: str, status: os.stat_result) -> None:
    """Reject a database with hard links."""
    if status.st_nlink > 1:
        raise EngineError(
            f"{path} has {status.st_nlink} names (hard links), and a program that opens it by "
            "another name has a queue of its own. Remove the other names (find / -xdev -samefile "
            f"{path}) or copy the file"
        )


def check_usable(path: str) -> None:
    """Reject a database that this user cannot both read and write.

    Raises:
        AuthenticationFailed: this user lacks a permission.
        OSError: the file system is read-only.
    """
    if UNIX and os.statvfs(path).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not _may(path, os.R_OK | os.W_OK):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        raise AuthenticationFailed(
            f"{path} cannot be both read and written by this user (its mode is {mode:04o}). Have "
            "its owner share it (sqlite:///...?mode=0660)"
        )


def _create(path: str, address: SqliteUrl) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPENING, address.mode)
    except FileExistsError:  # another process was first
        return
    try:
        if UNIX:
            os.fchmod(fd, address.mode)  # regardless of the umask
    finally:
        close_descriptor(fd)
    _sync_folder(os.path.dirname(path), address)
    log.info("created the store: url=%s", address.url)
    layer = describe_layer(os.path.dirname(path))
    if layer:
        log.warning("programs outside do not share the store: url=%s error=%s", address.url, layer)


def _check_side_file(path: str, database: os.stat_result, address: SqliteUrl) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise AuthenticationFailed(f"{path} is not a regular file, and tenure did not create it")
    if status.st_uid != database.st_uid:
        _check_owner(path, status, address)


def _check_owner(path: str, status: os.stat_result, address: SqliteUrl) -> None:
    if UNIX and status.st_uid != os.geteuid() and not address.shared:
        raise AuthenticationFailed(
            f"{path} belongs to {user(status.st_uid)}. If it is meant to be shared, every user "
            "opens it with ?mode=0660 (same group) or ?mode=0666"
        )


def _may(path: str, what: int) -> bool:
    return os.access(path, what, effective_ids=os.access in os.supports_effective_ids)
