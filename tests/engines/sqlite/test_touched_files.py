"""What is done to single files of a store while it is used: no crash, and no second holder."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from tenure.engines.contract import Place
from tenure.errors import EngineError, SessionExpired
from tests.engines.sqlite.helpers import Program, attached, engine_of, opened

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


async def lost(one: Program, name: str, how: str) -> None:
    """Wait for the end of a session; it says what was done."""
    async with asyncio.timeout(5):
        await one.ended()
    assert f"{name} was {how} while in use" in str(one.heard.end)


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
            await lost(one, "1.live", how)
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
            await lost(one, "1.live", how)
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
        await lost(two, "2.live", "truncated")
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
            await lost(one, "turn.lock", how)
            await lost(two, "turn.lock", how)
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
            await lost(one, "turn.lock", how)
            await lost(two, "turn.lock", how)
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


async def test_a_shortened_index_of_the_log_ends_the_sessions(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/store.db") as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        engine.monitor._tick()
        os.truncate(tmp_path / "store.db-shm", 4096)
        engine.monitor._tick()
        await lost(one, "store.db-shm", "truncated")
        with pytest.raises(SessionExpired, match="truncated"):
            await one.enqueue(2, "y")
        await engine.aclose()
    async with opened(f"sqlite:///{tmp_path}/store.db") as engine:
        await attached(engine)


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
