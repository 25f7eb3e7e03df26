"""The files of a store: who may use them, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure.engines.sqlite import files
from tenure.engines.sqlite.url import Address, parse
from tenure.errors import AuthenticationFailed, EngineError, Unsupported
from tests.engines.sqlite.helpers import opened, program

ALICE, BOB, STAFF = 61001, 61002, 61003

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users, as only root can")


@contextlib.contextmanager
def as_user(uid: int, gid: int | None = None) -> Iterator[None]:
    """Be somebody else for the block."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder of root's that everyone can enter, and only root can write to."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(autouse=True)
def a_usual_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path: object) -> int:
    return stat.S_IMODE(os.lstat(str(path)).st_mode)


def refused(url: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        files.prepare(parse(url))


# What is made


async def test_everything_is_private_unless_shared(tmp_path: Path) -> None:
    database = tmp_path / "a" / "b" / "store.db"
    async with program(f"sqlite:///{database}") as one:
        await one.enqueue(1, "x")
        for folder in (tmp_path / "a", database.parent, f"{database}.tenure"):
            assert mode_of(folder) == 0o700
        names = os.listdir(f"{database}.tenure")
        assert sorted(names) == ["1.live", "1.sock", "turn.lock"]
        everything = [database, f"{database}-wal", f"{database}-shm"]
        for each in everything + [f"{database}.tenure/{name}" for name in names]:
            assert mode_of(each) == 0o600, each


@pytest.mark.parametrize(("mode", "folders"), [("0660", 0o770), ("0666", 0o777)])
async def test_everything_has_the_mode_whatever_the_umask(
    tmp_path: Path, mode: str, folders: int
) -> None:
    database = tmp_path / "a" / "store.db"
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
        refused(f"sqlite:///{common}/a/store.db", AuthenticationFailed, "permission denied")


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


# Who could put something in its place


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    os.chown(tmp_path, -1, os.getegid())
    who = "everyone" if mode & 2 else "its group"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_is_private_group", lambda _: False)
        refused(f"sqlite:///{tmp_path}/store.db", AuthenticationFailed, f"{who} can write")


def test_it_is_accepted_when_it_is_sticky_or_shared_on_purpose(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    files.prepare(parse(f"sqlite:///{tmp_path}/shared.db?mode=0660"))
    tmp_path.chmod(0o1777)
    files.prepare(parse(f"sqlite:///{tmp_path}/store.db"))


@needs_root
def test_a_group_that_is_its_users_alone_is_not_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    files.prepare(parse(f"sqlite:///{tmp_path}/store.db"))
    os.chown(tmp_path, 0, STAFF)  # a group that nobody has named
    refused(f"sqlite:///{tmp_path}/store.db", AuthenticationFailed, "its group can write")


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
    refused(f"sqlite:///{tmp_path}", EngineError, "is a folder; add the name")


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


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(files, "file_system", lambda _: kind)
    refused(f"sqlite:///{tmp_path}/store.db", Unsupported, "network file system")
    assert not (tmp_path / "store.db").exists()


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "fuse.mergerfs", ""])
def test_others_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "file_system", lambda _: kind)
    files.prepare(parse(f"sqlite:///{tmp_path}/store.db"))


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/a/store.db"
    mkdir, create = os.mkdir, files._create

    def slower_mkdir(path: str, mode: int = 0o777) -> None:
        mkdir(path, mode)
        mkdir(path, mode)

    def slower_create(path: str, address: Address) -> None:
        create(path, address)
        create(path, address)

    monkeypatch.setattr(os, "mkdir", slower_mkdir)
    monkeypatch.setattr(files, "_create", slower_create)
    files.prepare(parse(url))
    assert os.path.isfile(tmp_path / "a" / "store.db")


def test_a_folder_that_cannot_be_synced_is_an_error_only_where_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("tenure.engines.sqlite.files.os.fsync", fails)
    files.prepare(parse(f"sqlite:///{tmp_path}/a/store.db"))
    refused(f"sqlite:///{tmp_path}/b/store.db?durability=full", EngineError, "Invalid argument")


def test_a_folder_that_somebody_makes_just_now_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    isdir = os.path.isdir

    def made_after_the_first_look(path: str) -> bool:
        found = isdir(path)
        if path == str(folder) and not found:
            folder.mkdir(0o700)
        return found

    monkeypatch.setattr(os.path, "isdir", made_after_the_first_look)
    files.prepare(parse(f"sqlite:///{folder}/store.db"))
    assert os.path.isfile(folder / "store.db")
