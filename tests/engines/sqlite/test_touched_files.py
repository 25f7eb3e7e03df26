"""What is done to single files of a store while it is used: no crash, and no second holder."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from tenure.engines.contract import Place
from tenure.engines.sqlite.engine import SqliteEngine
from tenure.errors import (
    AuthenticationFailed,
    EngineError,
    EngineUnavailable,
    SessionExpired,
    TenureError,
)
from tests.engines.sqlite.conftest import Workers
from tests.engines.sqlite.helpers import (
    ALICE,
    Program,
    as_user,
    attached,
    engine_of,
    needs_root,
    opened,
)
from tests.engines.sqlite.worker import Worker

Touch = Callable[[Path], object]


def cut(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_part(path: Path) -> None:
    os.truncate(path, 12)


def cut_and_lengthened(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * 100)


def set_back(path: Path) -> None:
    """Put an older copy into the file, of the same inode."""
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("d", 1.0))


def replaced_by_a_copy(path: Path) -> None:
    shutil.copy2(path, f"{path}.copy")
    os.replace(f"{path}.copy", path)


def replaced_by_nothing(path: Path) -> None:
    path.unlink()
    path.touch(0o600)


def replaced_by_a_link(path: Path) -> None:
    path.rename(f"{path}.moved")
    path.symlink_to(f"{path}.moved")


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def moved(path: Path) -> None:
    path.rename(f"{path}.moved")


def inaccessible(path: Path) -> None:
    path.chmod(0)


def read_only(path: Path) -> None:
    path.chmod(0o400)


LOST = {
    cut: "truncated",
    cut_in_part: "truncated",
    cut_and_lengthened: "overwritten",
    overwritten: "overwritten",
    Path.unlink: "removed",
    moved: "removed",
    replaced_by_a_copy: "replaced",
    replaced_by_nothing: "replaced",
    replaced_by_a_link: "replaced",
    replaced_by_a_folder: "replaced",
    replaced_by_a_pipe: "replaced",
    inaccessible: "made inaccessible",
    read_only: "made inaccessible",
}
"""What can be done to a file, and how the error calls it."""


async def each(
    folder: Path,
    case: Callable[[Path, Touch, str], Coroutine[None, None, None]],
    kinds: Mapping[Any, str],
) -> None:
    """Run a case for each kind at once, in a folder of its own; the error names the kind."""
    async with asyncio.TaskGroup() as tasks:
        for touch, how in kinds.items():
            place = folder / touch.__name__
            place.mkdir()
            tasks.create_task(case(place, touch, how))


async def lost(one: Program, says: str) -> None:
    """Wait for the end of a session, which says why."""
    async with asyncio.timeout(5):
        await one.ended()
    assert says in str(one.heard.end)


async def test_a_holder_whose_liveness_file_was_touched_has_lost_before_another_is_granted(
    tmp_path: Path,
) -> None:
    async def case(folder: Path, touch: Touch, how: str) -> None:
        url = f"sqlite:///{folder}/store.db"
        async with opened(url) as engine, opened(url) as other:
            one = await attached(engine, window=1.0)
            two = await attached(other, window=30.0)
            assert await one.enqueue(1, "x") is Place.GRANTED
            assert await two.enqueue(1, "x") is Place.WAITING
            touch(folder / "store.db.tenure" / "1.live")
            one.session.renew()  # proves nothing
            proven = one.heard.proofs[-1] + 1.0
            await two.granted(1)
            assert one.heard.end is not None or engine.clock.now() > proven, touch.__name__
            await lost(one, f"1.live was {how} while in use")
            assert two.heard.end is None

    await each(tmp_path, case, LOST)


async def test_a_program_ends_its_sessions_when_its_liveness_file_is_touched(
    tmp_path: Path,
) -> None:
    async def case(folder: Path, touch: Touch, how: str) -> None:
        async with opened(f"sqlite:///{folder}/store.db") as engine:
            one = await attached(engine)
            touch(folder / "store.db.tenure" / "1.live")
            engine.monitor._tick()
            await lost(one, f"1.live was {how} while in use")
            with pytest.raises(EngineError, match="Then connect again"):
                await attached(engine)
        async with opened(f"sqlite:///{folder}/store.db") as engine:
            await attached(engine)

    await each(tmp_path, case, LOST | {set_back: "overwritten"})


async def test_heartbeats_of_other_threads_are_not_damage(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/store.db") as engine:
        one = await attached(engine)
        life = one.session._life
        os.pwrite(life.fd, struct.pack("d", engine.clock.now() + 1), 8)
        engine.monitor._tick()
        assert one.heard.end is None


async def test_a_waiter_whose_liveness_file_was_touched_leaves_the_queue(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with opened(url) as engine, opened(url) as other, opened(url) as last:
        one = await attached(engine)
        two = await attached(other, window=1.0)
        three = await attached(last)
        await one.enqueue(1, "x")
        await two.enqueue(1, "x")
        await three.enqueue(1, "x")
        cut(tmp_path / "store.db.tenure" / "2.live")
        await lost(two, "2.live was truncated while in use")
        await one.withdraw(1)
        await three.granted(1)
        assert 1 not in two.heard.grants


@pytest.mark.parametrize("touch", [cut, cut_and_lengthened, overwritten, inaccessible, read_only])
async def test_the_content_and_the_mode_of_the_file_of_the_turn_do_not_matter(
    tmp_path: Path, touch: Touch
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine), await attached(other)
        assert await one.enqueue(1, "x") is Place.GRANTED
        touch(tmp_path / "store.db.tenure" / "turn.lock")
        assert await two.enqueue(1, "x") is Place.WAITING
        async with opened(url) as third:
            assert await (await attached(third)).enqueue(1, "x", timeout=0) is Place.REFUSED
        await one.withdraw(1)
        await two.granted(1)
        engine.monitor._tick()
        other.monitor._tick()
        assert one.heard.end is two.heard.end is None


async def test_the_sessions_end_when_the_file_of_the_turn_is_not_found_any_more(
    tmp_path: Path,
) -> None:
    async def case(folder: Path, touch: Touch, how: str) -> None:
        url = f"sqlite:///{folder}/store.db"
        async with opened(url) as engine, opened(url) as other:
            one, two = await attached(engine), await attached(other)
            await one.enqueue(1, "x")
            await two.enqueue(1, "x")
            touch(folder / "store.db.tenure" / "turn.lock")
            await lost(one, f"turn.lock was {how} while in use")
            await lost(two, f"turn.lock was {how} while in use")
            assert 1 not in two.heard.grants

    kinds = {touch: how for touch, how in LOST.items() if how in {"removed", "replaced"}}
    await each(tmp_path, case, kinds)


def copied_over(folder: Path) -> None:
    shutil.copytree(folder, f"{folder}.copy", ignore=lambda *_: ["1.sock", "2.sock"])
    shutil.rmtree(folder)
    os.rename(f"{folder}.copy", folder)


async def test_the_sessions_end_when_the_folder_is_not_found_any_more(tmp_path: Path) -> None:
    async def case(folder: Path, touch: Touch, how: str) -> None:
        url = f"sqlite:///{folder}/store.db"
        async with opened(url) as engine, opened(url) as other:
            one, two = await attached(engine), await attached(other)
            await one.enqueue(1, "x")
            await two.enqueue(1, "x")
            touch(folder / "store.db.tenure")
            await lost(one, f"turn.lock was {how} while in use")
            await lost(two, f"turn.lock was {how} while in use")
            assert 1 not in two.heard.grants

    kinds = {shutil.rmtree: "removed", moved: "removed", copied_over: "replaced"}
    await each(tmp_path, case, kinds)


@pytest.mark.parametrize(
    "touch", [Path.unlink, replaced_by_nothing, replaced_by_a_folder, inaccessible]
)
async def test_a_touched_socket_only_makes_a_grant_later(tmp_path: Path, touch: Touch) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine), await attached(other)
        await one.enqueue(1, "x")
        await two.enqueue(1, "x")
        touch(tmp_path / "store.db.tenure" / "2.sock")
        await one.withdraw(1)
        await two.granted(1)
        assert one.heard.end is two.heard.end is None


async def shorten_the_index(folder: Path) -> None:
    """Run in a process of its own: SQLite maps the file, so an access to it may be a SIGBUS."""
    async with opened(f"sqlite:///{folder}/store.db") as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        engine.monitor._tick()
        os.truncate(folder / "store.db-shm", 4096)
        engine.monitor._tick()
        await lost(one, "store.db-shm was truncated while in use")
        with pytest.raises(SessionExpired, match="truncated"):
            await one.enqueue(2, "y")
        await engine.aclose()


async def test_a_shortened_index_of_the_log_ends_the_sessions(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from tests.engines.sqlite import "
        "test_touched_files as it; asyncio.run(it.shorten_the_index(Path(sys.argv[1])))"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, -signal.SIGBUS}, done.stderr
    async with opened(f"sqlite:///{tmp_path}/store.db") as engine:
        one = await attached(engine)
        place = await one.enqueue(1, "x")
        assert place is Place.GRANTED  # the ended session has it no more


async def test_an_unknown_holder_of_the_turn_is_called_so(tmp_path: Path) -> None:
    engine = engine_of(f"sqlite:///{tmp_path}/store.db")
    await engine.open()
    try:
        cut(tmp_path / "store.db.tenure" / "turn.lock")
        assert engine.store.turn.holder == 0
        engine.store.committer.stalled_since = 0.0
        assert "process (unknown) has kept the turn" in engine.monitor.stall(1.0)
        engine.store.committer.stalled_since = None
    finally:
        await engine.aclose()


# Backups that are put over the store


def vacuumed(store: Path, backup: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as tool:
        tool.execute("VACUUM INTO ?", (str(backup),))


def checkpointed(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as tool:
        # Busy while a program of the store begins a checkpoint of its own.
        while tool.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            pass


def copied(backup: Path, store: Path) -> None:
    """As ``cp`` does it: into the file that is there."""
    with store.open("r+b") as file:
        file.truncate()
        file.write(backup.read_bytes())


def restored(backup: Path, store: Path) -> None:
    """As the shell's ``.restore`` does it: through SQLite, with its locks."""
    with (
        contextlib.closing(sqlite3.connect(backup)) as source,
        contextlib.closing(sqlite3.connect(store)) as target,
    ):
        source.backup(target)


def look_no_more(engine: SqliteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.monitor._timer.cancel()
    monkeypatch.setattr(engine.monitor, "tick_by", lambda _: None)


@pytest.mark.parametrize("put_over", [copied, restored])
async def test_a_backup_put_over_the_store_grants_no_lease_again(
    tmp_path: Path, put_over: Callable[[Path, Path], None]
) -> None:
    url, store, file = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db", tmp_path / "file"
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine), await attached(other)
        await one.enqueue(1, "earlier")
        vacuumed(store, file)
        assert await one.enqueue(2, "x") is Place.GRANTED
        checkpointed(store)
        put_over(file, store)
        with pytest.raises(EngineError, match=r"was (set back|overwritten)"):
            await two.enqueue(1, "x")
        engine.monitor._tick()
        other.monitor._tick()
        await lost(one, "store.db was ")
        await lost(two, "store.db was ")


async def test_a_new_program_waits_until_others_have_noticed_that_a_store_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.engine._FORMER", 0.1)
    url, store, file = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db", tmp_path / "file"
    async with opened(url) as engine:
        one = await attached(engine)
        vacuumed(store, file)
        assert await one.enqueue(1, "x") is Place.GRANTED
        look_no_more(engine, monkeypatch)
        restored(file, store)
        async with opened(url) as third:
            with pytest.raises(EngineUnavailable, match="set back while in use"):
                await attached(third)
            monkeypatch.setattr("tenure.engines.sqlite.engine._FORMER", 20.0)
            asyncio.get_running_loop().call_later(0.1, engine.monitor._tick)
            three = await attached(third)
            await lost(one, "set back to an earlier state")
            assert await three.enqueue(1, "x") is Place.GRANTED


async def test_a_program_that_joins_while_a_store_is_set_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, store, file = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db", tmp_path / "file"
    async with opened(url) as engine, opened(url) as third:
        one = await attached(engine)
        vacuumed(store, file)
        await one.enqueue(1, "x")
        look_no_more(engine, monkeypatch)
        monkeypatch.setattr(third.store, "is_set_back", lambda: False)  # it was so just now
        restored(file, store)
        with pytest.raises(EngineError, match="set back to an earlier state"):
            await attached(third)
        assert not third.store.marks.marked
        assert not third.store.tx.joined
        engine.monitor._tick()
        assert one.heard.end is not None


async def test_another_store_copied_over_this_one_ends_the_sessions(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with opened(f"sqlite:///{tmp_path}/store.db") as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        async with opened(f"sqlite:///{tmp_path}/other/store.db") as other:
            two = await attached(other)
            for hold in range(50):
                await two.enqueue(hold, f"y-{hold}")
            vacuumed(tmp_path / "other" / "store.db", tmp_path / "file")
        restored(tmp_path / "file", tmp_path / "store.db")
        engine.monitor._tick()
        await lost(one, "set back")


async def test_a_copy_over_the_store_is_noticed_although_the_log_hides_it(tmp_path: Path) -> None:
    url, store, file = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db", tmp_path / "file"
    async with opened(url) as engine:
        one = await attached(engine)
        vacuumed(store, file)
        await one.enqueue(1, "x")
        engine.monitor._tick()
        copied(file, store)
        engine.monitor._tick()
        await lost(one, "store.db was overwritten while in use")


async def test_checkpoints_and_a_new_time_of_the_database_are_no_damage(tmp_path: Path) -> None:
    url, store = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db"
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine), await attached(other)
        for hold in range(30):
            await one.enqueue(hold, f"x-{hold}")
            await two.enqueue(hold, f"y-{hold}")
            if hold % 3 == 0:
                engine.store._checkpointer.checkpoint()
            elif hold % 3 == 1:
                checkpointed(store)
            else:
                os.utime(store)
            engine.monitor._tick()
            other.monitor._tick()
        with contextlib.closing(sqlite3.connect(store)) as tool:
            tool.execute("VACUUM")
        engine.store._checkpointer.checkpoint()
        engine.monitor._tick()
        assert one.heard.end is two.heard.end is None


@pytest.mark.parametrize("reading", range(4))
async def test_a_checkpoint_within_a_check_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: int
) -> None:
    store = tmp_path / "store.db"
    async with opened(f"sqlite:///{store}") as engine:
        one = await attached(engine)
        files = engine.store._files
        read = files._read
        readings = 0

        def read_beside_a_checkpoint(path: str, size: int) -> bytes:
            nonlocal readings
            if readings == reading:
                checkpointed(store)
            readings += 1
            return read(path, size)

        engine.monitor._tick()
        await one.enqueue(1, "x")
        with monkeypatch.context() as patched:
            patched.setattr(files, "_read", read_beside_a_checkpoint)
            engine.monitor._tick()
        assert readings > 1
        engine.monitor._tick()
        assert one.heard.end is None


async def test_a_damaged_store_ends_the_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = sqlite3.DatabaseError("malformed")
    damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT

    def fail(_: object) -> str:
        raise damage

    async with opened(f"sqlite:///{tmp_path}/store.db") as engine:
        one = await attached(engine)
        monkeypatch.setattr("tenure.engines.sqlite.monitor.schema.missing", fail)
        engine.monitor._tick()
        await lost(one, "store.db is damaged: malformed")


async def test_a_store_may_be_set_back_while_no_program_uses_it(tmp_path: Path) -> None:
    url, store, file = f"sqlite:///{tmp_path}/store.db", tmp_path / "store.db", tmp_path / "file"
    async with opened(url) as engine:
        one = await attached(engine)
        vacuumed(store, file)
        await one.enqueue(1, "x")
    shutil.copyfile(file, store)
    async with opened(url) as engine:
        one = await attached(engine)
        assert await one.enqueue(1, "x") is Place.GRANTED
        async with opened(url) as other:
            two = await attached(other)
            assert await two.enqueue(1, "x") is Place.WAITING


# Modes, names and views


@needs_root
@pytest.mark.parametrize(
    ("name", "mode", "refused"),
    [
        ("store.db", 0, True),
        ("store.db", 0o400, True),
        ("store.db-wal", 0, True),
        ("store.db-wal", 0o400, True),
        ("store.db-shm", 0, False),  # the same process has it open
        ("store.db.tenure", 0o500, False),  # its owner makes it accessible again
        ("store.db.tenure/turn.lock", 0, True),
        ("store.db.tenure/turn.lock", 0o400, True),
        ("", 0o500, False),
    ],
)
async def test_a_changed_mode_grants_no_lease_again(
    common: Path, name: str, mode: int, refused: bool
) -> None:
    folder = common / "alice"
    folder.mkdir()
    os.chown(folder, ALICE, ALICE)
    url = f"sqlite:///{folder}/store.db"
    "".encode("ascii")  # the codec, which that user might not find
    with as_user(ALICE):
        async with opened(url) as engine, opened(url) as other:
            one, two = await attached(engine), await attached(other)
            await one.enqueue(1, "x")
            before = (folder / name).stat().st_mode
            (folder / name).chmod(mode)
            try:
                assert await two.enqueue(1, "x") is Place.WAITING
                engine.monitor._tick()
                other.monitor._tick()
                async with contextlib.AsyncExitStack() as stack:
                    if refused:
                        stack.enter_context(pytest.raises(TenureError, match=r"store\.db"))
                    third = await stack.enter_async_context(opened(url))
                    three = await attached(third)
                    assert await three.enqueue(1, "x", timeout=0) is Place.REFUSED
                await one.withdraw(1)
                await two.granted(1)
            finally:
                (folder / name).chmod(before)
            assert one.heard.end is two.heard.end is None


@needs_root
@pytest.mark.parametrize("name", ["", "store.db.tenure"])
async def test_a_folder_that_cannot_be_entered_any_more_ends_the_sessions(
    common: Path, name: str
) -> None:
    folder = common / "alice"
    folder.mkdir()
    os.chown(folder, ALICE, ALICE)
    url = f"sqlite:///{folder}/store.db"
    with as_user(ALICE):
        async with opened(url) as engine:
            one = await attached(engine)
            await one.enqueue(1, "x")
            (folder / name).chmod(0)
            engine.monitor._tick()
            await lost(one, "was made inaccessible while in use")
        if name:  # its owner makes it accessible again
            async with opened(url) as engine:
                await attached(engine)
        else:
            with pytest.raises(AuthenticationFailed, match="permission denied"):
                await engine_of(url).open()
            folder.chmod(0o700)


async def test_a_program_that_opens_a_private_store_as_shared_shares_what_others_made(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with opened(url) as engine, opened(url) as later:
        one = await attached(engine)
        async with opened(f"{url}?mode=0660") as other:
            await attached(later)
            await attached(other)
            for each in ("1.live", "1.sock", "2.live", "3.live", "turn.lock"):
                mode = (tmp_path / "store.db.tenure" / each).stat().st_mode
                assert mode & 0o777 == 0o660, each
        engine.monitor._tick()
        assert one.heard.end is None


async def test_paths_through_a_link_to_the_folder_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    async with (
        opened(f"sqlite:///{tmp_path}/real/store.db") as engine,
        opened(f"sqlite:///{tmp_path}/link/store.db") as other,
    ):
        one, two = await attached(engine), await attached(other)
        assert await one.enqueue(1, "x") is Place.GRANTED
        assert await two.enqueue(1, "x") is Place.WAITING
        engine.monitor._tick()
        other.monitor._tick()
        await one.withdraw(1)
        await two.granted(1)


async def test_a_link_that_leads_to_another_folder_ends_the_sessions(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("one")
    url = f"sqlite:///{tmp_path}/current/store.db"
    async with opened(url) as engine:
        one = await attached(engine)
        async with opened(f"sqlite:///{tmp_path}/two/store.db") as other:
            await attached(other)
            (tmp_path / "new").symlink_to("two")
            os.replace(tmp_path / "new", tmp_path / "current")
            engine.monitor._tick()
            await lost(one, "store.db was replaced while in use")


@pytest.mark.parametrize("name", ["-wal", "-shm", ".tenure/turn.lock", ".tenure/1.live"])
async def test_a_second_name_of_another_file_does_not_matter(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine), await attached(other)
        await one.enqueue(1, "x")
        os.link(f"{tmp_path}/store.db{name}", tmp_path / "second")
        assert await two.enqueue(1, "x") is Place.WAITING
        engine.monitor._tick()
        assert one.heard.end is None


def own_library(folder: Path) -> ctypes.CDLL:
    """Another SQLite in this process, which knows nothing of the locks of the first."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found = {line.split()[-1] for line in maps if "libsqlite3" in line}
    if not found:
        pytest.skip("Python's SQLite is no library of its own")
    shutil.copyfile(found.pop(), folder / "second.so")
    return ctypes.CDLL(str(folder / "second.so"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_a_second_library_in_the_process_opens_and_closes_the_store(
    workers: Workers, url: str, tmp_path: Path
) -> None:
    sqlite = own_library(tmp_path)
    async with opened(url) as engine, workers(2) as (leaver, other):
        one = await attached(engine)
        await one.enqueue(1, "x")
        log = os.stat(f"{tmp_path}/store.db-wal").st_ino
        database = ctypes.c_void_p()
        assert sqlite.sqlite3_open(f"{tmp_path}/store.db".encode(), ctypes.byref(database)) == 0
        count = b"SELECT count(*) FROM requests"
        assert sqlite.sqlite3_exec(database, count, None, None, None) == 0
        assert sqlite.sqlite3_close(database) == 0
        await leaver.do("close")
        assert os.stat(f"{tmp_path}/store.db-wal").st_ino == log
        assert (await other.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await one.withdraw(1)
        await other.hear("granted", hold=1)
        assert one.heard.end is None


@needs_root
@pytest.mark.skipif(not shutil.which("unshare"), reason="makes namespaces")
async def test_a_container_with_the_folder_at_another_path_shares_the_store(
    tmp_path: Path,
) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "container").mkdir()
    script = f"mount --bind '{tmp_path}/host' '{tmp_path}/container' && exec \"$@\""
    enter = ("unshare", "-mpf", "--mount-proc", "--kill-child", "sh", "-c", script, "sh")
    tried = subprocess.run([*enter, "true"], capture_output=True, check=False)  # noqa: ASYNC221
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.decode().strip()}")
    inside = f"sqlite:///{tmp_path}/container/store.db"
    async with contextlib.AsyncExitStack() as stack:

        async def start(url: str, through: tuple[str, ...] = ()) -> Worker:
            worker = await Worker.start(url, through=through)
            stack.push_async_callback(worker.end)
            return worker

        host = await start(f"sqlite:///{tmp_path}/host/store.db")
        contained = await start(inside, enter)
        assert (await host.do("enqueue", hold=1, name="x"))[0] == "GRANTED"
        assert (await contained.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await host.kill()
        await contained.hear("granted", hold=1)
        last = await start(f"sqlite:///{tmp_path}/host/store.db")
        assert (await last.do("enqueue", hold=1, name="x"))[0] == "WAITING"
        await contained.kill()
        await last.hear("granted", hold=1)
