"""The files of a store: who may use them, and what is refused."""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenure.engines.sqlite import files
from tenure.engines.sqlite.doctor import examine
from tenure.engines.sqlite.url import SqliteUrl, parse
from tenure.errors import AuthenticationFailed, EngineError, Unsupported
from tenure.model import NodeConfig
from tests.engines.sqlite.helpers import (
    ALICE,
    as_user,
    attached,
    engine_of,
    needs_root,
    opened,
    program,
)

PREPARES = """
import sys
from tenure.engines.sqlite import files
from tenure.engines.sqlite.url import parse
files.prepare(parse(sys.argv[1]))
"""
PREPARES_IN_NAMESPACE = """
import ctypes, grp, os, pwd, sys
from tenure.engines.sqlite import files
from tenure.engines.sqlite.url import parse
libc, user = ctypes.CDLL(None), int(sys.argv[2])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
libc.prctl(4, 1)  # PR_SET_DUMPABLE, or the next file would belong to root
if libc.unshare(0x10000000):  # CLONE_NEWUSER
    sys.exit("no user namespace")
with open("/proc/self/uid_map", "w") as map:
    map.write(f"{user} {user} 1")
assert os.stat("/").st_uid == 65534
files.prepare(parse(sys.argv[1]))
"""
BOB, STAFF = 61002, 61003


@pytest.fixture(autouse=True)
def a_usual_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the default store, the only one that is made; it is missing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "tenure"


def mode_of(path: object) -> int:
    return stat.S_IMODE(os.lstat(str(path)).st_mode)


def refused(url: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        files.prepare(parse(url))


# What is made


async def test_everything_is_private_unless_shared(state: Path) -> None:
    database = state / "b" / "store.db"
    async with program(f"sqlite:///{database}") as one:
        await one.enqueue(1, "x")
        for folder in (state, database.parent, f"{database}.tenure"):
            assert mode_of(folder) == 0o700
        names = os.listdir(f"{database}.tenure")
        assert sorted(names) == ["1.live", "1.sock", "turn.lock"]
        everything = [database, f"{database}-wal", f"{database}-shm"]
        for each in everything + [f"{database}.tenure/{name}" for name in names]:
            assert mode_of(each) == 0o600, each


@pytest.mark.parametrize(("mode", "folders"), [("0660", 0o770), ("0666", 0o777)])
async def test_everything_has_the_mode_whatever_the_umask(
    state: Path, mode: str, folders: int
) -> None:
    database = state / "store.db"
    async with program(f"sqlite:///{database}?mode={mode}") as one:
        await one.enqueue(1, "x")
        for folder in (database.parent, f"{database}.tenure"):
            assert mode_of(folder) & 0o777 == folders
        names = os.listdir(f"{database}.tenure")
        everything = [database, f"{database}-wal", f"{database}-shm"]
        for each in everything + [f"{database}.tenure/{name}" for name in names]:
            assert mode_of(each) == int(mode, 8), each


async def test_a_private_file_of_ones_own_becomes_shared_when_it_is_opened_so(
    tmp_path: Path,
) -> None:
    database = tmp_path / "store.db"
    async with program(f"sqlite:///{database}"):
        pass
    async with program(f"sqlite:///{database}?mode=0660"):
        assert mode_of(database) == 0o660
        assert mode_of(f"{database}.tenure") & 0o777 == 0o770
        assert mode_of(f"{database}.tenure/turn.lock") == 0o660
    refused(f"sqlite:///{database}", AuthenticationFailed, r"mode=0660\), or make it private")


async def test_a_folder_that_was_there_is_not_changed(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    async with program(f"sqlite:///{tmp_path}/store.db"):
        assert mode_of(tmp_path) == 0o755


# Whom it belongs to


@needs_root
async def test_another_users_file_is_refused_unless_it_is_shared(common: Path) -> None:
    home = common / "alice"
    home.mkdir()
    home.chmod(0o755)
    os.chown(home, ALICE, ALICE)
    url = f"sqlite:///{home}/store.db"
    with as_user(ALICE):
        async with program(url):
            pass
    refused(url, AuthenticationFailed, f"belongs to the user {ALICE}")
    with as_user(BOB):
        refused(url, AuthenticationFailed, f"belongs to the user {ALICE}")
        refused(f"{url}?mode=0660", AuthenticationFailed, "cannot be both read and written")


@needs_root
async def test_users_of_one_group_share_a_file(common: Path) -> None:
    folder = common / "shared"
    folder.mkdir()
    os.chown(folder, 0, STAFF)
    folder.chmod(0o2770)
    url = f"sqlite:///{folder}/store.db?mode=0660"
    async with program(url) as roots:
        await roots.enqueue(1, "x")
        with as_user(ALICE, STAFF):
            async with program(url) as alices:
                await alices.enqueue(1, "x")
                await roots.withdraw(1)
                await alices.granted(1)
                assert os.stat(f"{folder}/store.db.tenure/2.live").st_gid == STAFF
        async with program(url) as again:
            await again.enqueue(1, "x")


@needs_root
async def test_what_sqlite_makes_has_the_groups_of_a_shared_file_as_well(common: Path) -> None:
    url = f"sqlite:///{common}/store.db?mode=0660"
    async with program(url):
        pass
    os.chown(f"{common}/store.db", 0, STAFF)
    async with program(url):
        for suffix in ("", "-wal", "-shm"):
            assert os.stat(f"{common}/store.db{suffix}").st_gid == STAFF
            assert mode_of(f"{common}/store.db{suffix}") == 0o660


@needs_root
async def test_the_files_of_another_users_death_can_be_cleared_away(common: Path) -> None:
    folder = common / "shared"
    folder.mkdir()
    os.chown(folder, 0, STAFF)
    folder.chmod(0o2770)
    url = f"sqlite:///{folder}/store.db?mode=0660"
    async with opened(url) as roots:
        with as_user(ALICE, STAFF):
            async with program(url):
                pass
        assert await roots.list_sessions("/default") == []


@needs_root
def test_a_folder_where_one_may_not_write_is_a_clear_error(common: Path) -> None:
    with as_user(ALICE):
        refused(f"sqlite:///{common}/store.db", AuthenticationFailed, "permission denied")


@needs_root
async def test_a_file_that_cannot_be_written_is_a_clear_error(common: Path) -> None:
    home = common / "alice"
    home.mkdir()
    os.chown(home, ALICE, ALICE)
    database = home / "store.db"
    with as_user(ALICE):
        async with program(f"sqlite:///{database}"):
            pass
        database.chmod(0o400)
        refused(f"sqlite:///{database}", AuthenticationFailed, "its mode is 0400")


# Where a folder is missing


@pytest.mark.parametrize("mode", ["", "?mode=0660"])
def test_a_missing_folder_is_an_error_with_the_command_that_makes_it(
    tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "a" / "b"
    url = f"sqlite:///{folder}/store.db{mode}"
    bits = 2770 if mode else 700
    refused(url, EngineError, rf"no folder {folder} .*mkdir -p -m {bits} {folder}\)")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    folder.mkdir(mode=0o700)
    files.prepare(parse(url))


def test_a_relative_path_is_shown_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    refused("sqlite:///data/jobs.db", EngineError, f"no folder {tmp_path}/data ")
    caplog.set_level(logging.INFO, "tenure.sqlite")
    files.prepare(parse("sqlite:///jobs.db"))
    files.prepare(parse("sqlite:///jobs.db"))
    assert caplog.messages == [f"created the store: url=sqlite:///{tmp_path}/jobs.db"]


# One file, one name


def test_a_file_with_a_hard_link_is_refused_by_either_name(tmp_path: Path) -> None:
    files.prepare(parse(f"sqlite:///{tmp_path}/a.db"))
    os.link(tmp_path / "a.db", tmp_path / "b.db")
    for name in ("a", "b"):
        path = tmp_path / f"{name}.db"
        refused(f"sqlite:///{path}", EngineError, rf"2 names \(hard links\).*samefile {path}")
    assert not (tmp_path / "b.db.tenure").exists()
    (tmp_path / "a.db").unlink()
    files.prepare(parse(f"sqlite:///{tmp_path}/b.db"))


async def test_a_session_ends_when_its_file_gets_a_hard_link(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/a.db") as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        os.link(tmp_path / "a.db", tmp_path / "b.db")
        await one.ended()
        assert "hard links" in str(one.heard.end)
        with pytest.raises(EngineError, match="hard links"):
            await engine.create_node("/new", NodeConfig(), exist_ok=False)
        os.unlink(tmp_path / "b.db")


@needs_root
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts a file over another")
def test_a_file_that_is_mounted_elsewhere_is_refused_there(tmp_path: Path) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second db"
    first.touch(0o600)
    second.touch(0o600)
    mounted = f"mount --bind '{first}' '{second}' && exec \"$@\""
    command = ["unshare", "-m", "sh", "-c", mounted, "sh", sys.executable, "-c", PREPARES]
    done = subprocess.run(
        [*command, f"sqlite:///{tmp_path}/second%20db"], capture_output=True, text=True, check=False
    )
    if "permission" in done.stderr.lower():
        pytest.skip("may not mount anything here")
    assert "is mounted by itself" in done.stderr
    assert "Mount its folder" in done.stderr


@needs_root
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts an overlay")
def test_the_layer_of_a_container_is_refused_outside(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir(0o700)
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mounted = f'mount -t overlay overlay -o {options} {tmp_path}/merged && exec "$@"'
    enter = ["unshare", "-m", "sh", "-c", mounted, "sh"]
    tried = subprocess.run([*enter, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no overlay here: {tried.stderr.strip()}")

    def error(name: str) -> str:
        command = [*enter, sys.executable, "-c", PREPARES, f"sqlite:///{tmp_path}/{name}/store.db"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert "Error" not in error("merged")
    assert f"a layer of the overlay that is mounted at {tmp_path}/merged" in error("upper")


# Who could put something in its place


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    os.chown(tmp_path, -1, os.getegid())
    who, shared = ("everyone", "0666") if mode & 2 else ("its group", "0660")
    url = f"sqlite:///{tmp_path}/store.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_is_private_group", lambda _: False)
        refused(url, AuthenticationFailed, rf"{who} can write .* \(\?mode={shared}\)$")
        files.prepare(parse(f"{url}?mode={shared}"))


def test_it_is_accepted_when_it_is_sticky_or_shared_on_purpose(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    files.prepare(parse(f"sqlite:///{tmp_path}/shared.db?mode=0660"))
    tmp_path.chmod(0o777)
    files.prepare(parse(f"sqlite:///{tmp_path}/everyones.db?mode=0666"))
    tmp_path.chmod(0o1777)
    files.prepare(parse(f"sqlite:///{tmp_path}/store.db"))


@needs_root
def test_a_group_that_is_its_users_alone_is_not_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    files.prepare(parse(f"sqlite:///{tmp_path}/store.db"))
    os.chown(tmp_path, 0, STAFF)  # a group that nobody has named
    refused(f"sqlite:///{tmp_path}/store.db", AuthenticationFailed, "its group can write")


@needs_root
def test_every_folder_on_the_way_is_looked_at(common: Path) -> None:
    folder = common / "a" / "b" / "c"
    folder.mkdir(parents=True, mode=0o755)
    url = f"sqlite:///{folder}/store.db"
    files.prepare(parse(url))
    (common / "a").chmod(0o777)
    refused(url, AuthenticationFailed, rf"everyone .*{common}/a, .*chmod go-w {common}/a\)")
    (common / "a").chmod(0o755)
    os.chown(common / "a" / "b", BOB, BOB)
    refused(url, AuthenticationFailed, f"folder {common}/a/b belongs to the user {BOB}, who could")
    os.chown(common / "a" / "b", 0, STAFF)
    (common / "a" / "b").chmod(0o775)
    refused(url, AuthenticationFailed, f"its group can write to the folder {common}/a/b, ")


@needs_root
@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="sets a POSIX access list")
def test_a_user_of_an_access_list_may_not_write_on_the_way(common: Path) -> None:
    folder = common / "a"
    folder.mkdir(mode=0o755)
    nobody = 2**32 - 1
    entries = [(1, 7, nobody), (2, 7, BOB), (4, 5, nobody), (16, 7, nobody), (32, 5, nobody)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"this file system has no access lists: {error}")
    url = f"sqlite:///{folder}/store.db"
    refused(url, AuthenticationFailed, rf"access list can write .*\(setfacl -b {folder}\)")
    files.prepare(parse(f"{url}?mode=0660"))


@needs_root
def test_a_sticky_folder_is_its_owners_to_change(common: Path) -> None:
    sticky = common / "sticky"
    folder = sticky / "a"
    folder.mkdir(parents=True, mode=0o755)
    sticky.chmod(0o1777)
    files.prepare(parse(f"sqlite:///{folder}/store.db"))
    files.prepare(parse(f"sqlite:///{sticky}/store.db"))
    os.chown(sticky, BOB, BOB)
    for where in (folder, sticky):
        refused(f"sqlite:///{where}/store.db", AuthenticationFailed, f"{sticky} belongs to the")
    os.chown(sticky, 0, 0)
    os.chown(folder, BOB, BOB)
    refused(f"sqlite:///{folder}/store.db", AuthenticationFailed, f"{folder} belongs to the user")


@needs_root
def test_the_way_through_a_link_is_looked_at_too(common: Path) -> None:
    (common / "open").mkdir()
    (common / "open").chmod(0o777)
    (common / "open" / "real").mkdir(mode=0o755)
    (common / "link").symlink_to("open/../open/real")
    refused(
        f"sqlite:///{common}/link/store.db", AuthenticationFailed, f"folder {common}/open, and so"
    )
    (common / "open").chmod(0o755)
    files.prepare(parse(f"sqlite:///{common}/link/store.db"))
    os.lchown(common / "link", BOB, BOB)
    refused(
        f"sqlite:///{common}/link/store.db",
        AuthenticationFailed,
        f"symbolic link {common}/link belongs to the user {BOB}",
    )


def test_links_that_lead_in_a_circle_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=r"[Tt]oo many"):
        files.check_folders(f"{tmp_path}/a", parse(f"sqlite:///{tmp_path}/a/store.db"))


@needs_root
def test_a_shared_store_trusts_its_owners_and_its_group_and_no_other(common: Path) -> None:
    home = common / "alice"
    folder = home / "shared"
    folder.mkdir(parents=True)
    os.chown(home, ALICE, STAFF)
    home.chmod(0o2775)
    os.chown(folder, ALICE, STAFF)
    folder.chmod(0o2770)
    url = f"sqlite:///{folder}/store.db?mode=0660"
    files.prepare(parse(url))
    with as_user(BOB, STAFF):
        files.prepare(parse(url))
    os.chown(home, ALICE, BOB)
    home.chmod(0o775)
    refused(url, AuthenticationFailed, f"its group can write to the folder {home}, ")
    home.chmod(0o757)
    refused(url, AuthenticationFailed, rf"everyone .*chmod o-w {home}\), use a folder of your own$")
    folder.chmod(0o2777)
    files.prepare(parse(f"sqlite:///{folder}/everyones.db?mode=0666"))


@needs_root
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="makes a user namespace")
def test_a_container_without_root_on_the_host_can_have_a_store(common: Path) -> None:
    # There "/" belongs to a user from outside, who has no number inside.
    home = common / "alice"
    home.mkdir()
    home.chmod(0o755)
    os.chown(home, ALICE, ALICE)
    done = subprocess.run(
        [sys.executable, "-c", PREPARES_IN_NAMESPACE, f"sqlite:///{home}/store.db", str(ALICE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "no user namespace" in done.stderr:
        pytest.skip("may not make a user namespace here")
    assert done.stderr == ""
    assert (home / "store.db").exists()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    files.prepare(parse(f"sqlite:///{tmp_path}/real.db"))
    (tmp_path / "link.db").symlink_to("real.db")
    refused(f"sqlite:///{tmp_path}/link.db", AuthenticationFailed, "symbolic link")
    (tmp_path / "dangling.db").symlink_to("nowhere.db")
    refused(f"sqlite:///{tmp_path}/dangling.db", AuthenticationFailed, "symbolic link")
    assert not (tmp_path / "nowhere.db").exists()


def test_a_folder_reached_through_a_link_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    files.prepare(parse(f"sqlite:///{tmp_path}/link/store.db"))
    assert (tmp_path / "real" / "store.db").exists()


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_a_planted_side_file_is_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"store.db{suffix}").symlink_to("elsewhere")
    refused(f"sqlite:///{tmp_path}/store.db", AuthenticationFailed, "not a regular file")


@needs_root
@pytest.mark.parametrize("suffix", ["-wal", ".tenure"])
def test_what_another_user_has_planted_is_refused(tmp_path: Path, suffix: str) -> None:
    planted = tmp_path / f"store.db{suffix}"
    if suffix == ".tenure":
        planted.mkdir()
    else:
        planted.touch()
    os.chown(planted, BOB, BOB)
    refused(f"sqlite:///{tmp_path}/store.db", AuthenticationFailed, f"belongs to the user {BOB}")


def test_a_planted_folder_of_ours_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db.tenure").symlink_to("/tmp")
    refused(f"sqlite:///{tmp_path}/store.db", EngineError, "is not a folder")


# What is there instead


def test_a_folder_in_the_place_of_the_file_is_a_clear_error(tmp_path: Path) -> None:
    refused(f"sqlite:///{tmp_path}", EngineError, "is a folder. Add the name")


def test_a_file_in_the_place_of_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(f"sqlite:///{tmp_path}/file/store.db", EngineError, "is not a folder")
    refused(f"sqlite:///{tmp_path}/file/a/store.db", EngineError, "is not a folder")


def test_something_else_than_a_file_is_a_clear_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store.db")
    refused(f"sqlite:///{tmp_path}/store.db", EngineError, "not a regular file")


def test_a_name_that_is_too_long_is_a_clear_error(tmp_path: Path) -> None:
    refused(f"sqlite:///{tmp_path}/{'x' * 300}", EngineError, "too long")
    refused(f"sqlite:///{tmp_path}/{'x' * 252}", EngineError, "too long")


# Where it is


@pytest.mark.parametrize(
    "kind",
    [
        *("nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "afs"),
        *("9p", "virtiofs", "vboxsf", "fuse.vmhgfs-fuse", "vmhgfs", "prl_fs"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.ceph-fuse"),
    ],
)
def test_a_file_system_that_other_machines_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(files, "file_system", lambda _: kind)
    refused(f"sqlite:///{tmp_path}/store.db", Unsupported, "do not hold between machines")
    assert not (tmp_path / "store.db").exists()


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "fuse.mergerfs", "fuseblk", "weed", ""])
def test_others_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "file_system", lambda _: kind)
    files.prepare(parse(f"sqlite:///{tmp_path}/store.db"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["overlay", "fuse.fuse-overlayfs"])
def test_a_store_on_the_layer_of_a_container_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1002 900 {os.major(device)}:{os.minor(device)} / / rw,relatime - {kind} overlay "
        "rw,lowerdir=/l/1,upperdir=/u/diff,workdir=/u/work\n"
    )
    monkeypatch.setattr(files, "_MOUNTS", str(mounts))
    address = parse(f"sqlite:///{tmp_path}/store.db")
    files.prepare(address)
    files.prepare(address)  # once, when it is created
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "other containers do not see it" in record.getMessage()
    (found,) = (each for each in examine(address) if each.what == "file system")
    assert found.level == "warning"
    assert f"({kind}): other containers do not see it" in found.found


@needs_root
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts a file system")
def test_a_layer_that_the_system_has_mounted_is_found(tmp_path: Path) -> None:
    # The upper folder of an overlay must not be on another one, as that of this test may be.
    mounted = (
        'mount -t tmpfs none "$0" && cd "$0" && mkdir lower upper work merged && mount -t overlay '
        "overlay -o lowerdir=lower,upperdir=upper,workdir=work merged && mkdir merged/app && "
        'exec "$@"'
    )
    url = f"sqlite:///{tmp_path}/merged/app/store.db"
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        mounted,
        str(tmp_path),
        sys.executable,
        "-c",
        PREPARES,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("may not mount anything here")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("other containers do not see it") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_a_system_without_proc_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = Path.read_text

    def unmounted(path: Path, *how: Any) -> str:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return read(path, *how)

    monkeypatch.setattr(Path, "read_text", unmounted)
    engine = engine_of(f"sqlite:///{tmp_path}/store.db")
    with pytest.raises(EngineError, match="Mount /proc"):
        await engine.open()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_kernel_tells_the_file_system() -> None:
    assert files.file_system("/proc") == "proc"
    assert files.file_system("/dev/shm") == "tmpfs"


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.EACCES, AuthenticationFailed, "permission denied"),
        (errno.EROFS, EngineError, "read-only"),
        (errno.ENOSPC, EngineError, "disk is full"),
        (errno.EMFILE, EngineError, "ulimit"),
        (errno.EIO, EngineError, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_said_with_what_to_do(
    number: int, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says), files.system_error("cannot do it"):
        raise OSError(number, os.strerror(number))


def test_two_that_make_the_same_file_at_once_do_not_mind(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{state}/store.db"
    mkdir, create = os.mkdir, files._create

    def slower_mkdir(path: str, mode: int = 0o777) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    def slower_create(path: str, address: SqliteUrl) -> None:
        create(path, address)
        create(path, address)

    monkeypatch.setattr(os, "mkdir", slower_mkdir)
    monkeypatch.setattr(files, "_create", slower_create)
    files.prepare(parse(url))
    assert os.path.isfile(state / "store.db")


def test_a_folder_that_cannot_be_synced_is_an_error_only_where_that_was_asked_for(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("tenure.engines.sqlite.files.os.fsync", fails)
    files.prepare(parse(f"sqlite:///{state}/a/store.db"))
    refused(f"sqlite:///{state}/b/store.db?durability=full", EngineError, "Invalid argument")


def test_a_folder_that_somebody_makes_just_now_is_a_folder(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = state
    isdir = os.path.isdir

    def made_after_the_first_look(path: str) -> bool:
        found = isdir(path)
        if path == str(folder) and not found:
            folder.mkdir(0o700)
        return found

    monkeypatch.setattr(os.path, "isdir", made_after_the_first_look)
    files.prepare(parse(f"sqlite:///{folder}/store.db"))
    assert os.path.isfile(folder / "store.db")
