"""With ``durability=full``, no power cut takes back what a program was told.

A workload is recorded down to the writes and syncs of SQLite (`disk`); then the power is cut at
every one of these moments, with writes that were not synced kept, lost or torn, and the store is
opened as after a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Place
from tenure.engines.sqlite import checkpoint
from tenure.engines.sqlite.engine import SqliteEngine
from tenure.testing.recorder import Recorder
from tests.engines.sqlite import disk
from tests.engines.sqlite.helpers import Program, opened, program, result
from tests.guarantees import DURABLE_SQLITE, SQLITE, broken, guarantee

pytestmark = [
    pytest.mark.no_debug,
    pytest.mark.skipif(not disk.is_possible(), reason="sqlite3 has SQLite inside itself"),
]


@dataclass(frozen=True)
class Told:
    """A program was told that it owns, with this fencing token."""

    order_id: int


@dataclass(frozen=True)
class Asked:
    """A program has begun to release that."""

    order_id: int


@dataclass(frozen=True)
class Freed:
    """A program was told that it has released that."""

    order_id: int


class Heard(Recorder):
    """Notes in the log of the disk what it is told."""

    def __init__(self, log: disk.Log) -> None:
        super().__init__()
        self.log = log

    def granted(self, hold: int, order_id: int | None) -> None:
        assert order_id is not None
        self.log.append(Told(order_id))
        super().granted(hold, order_id)


class Worker(Program):
    """Acquires and releases, and notes it in the log."""

    async def acquire(self, hold: int, name: str) -> int:
        assert isinstance(self.heard, Heard)
        answer = await result(self.ask(hold, name))
        assert answer.order_id is not None
        if answer.place is Place.GRANTED:
            self.heard.log.append(Told(answer.order_id))
        else:
            await self.granted(hold)
        return answer.order_id

    async def release(self, hold: int, order_id: int) -> None:
        assert isinstance(self.heard, Heard)
        self.heard.log.append(Asked(order_id))
        await self.withdraw(hold)
        self.heard.log.append(Freed(order_id))


async def worker(engine: SqliteEngine, log: disk.Log) -> Worker:
    heard = Heard(log)
    return Worker(await engine.attach(Attach("/default", 30.0), heard), heard)


async def hand_around(workers: list[Worker], rounds: range, keys: int) -> None:
    """Every worker acquires every key, again and again, so that most are handed over."""

    async def work(number: int, mine: Worker, key: int) -> None:
        for turn in rounds:
            hold = (turn * keys + key) * len(workers) + number + 1
            order_id = await mine.acquire(hold, f"key-{key}")
            await mine.release(hold, order_id)

    async with asyncio.TaskGroup() as group:
        for number, mine in enumerate(workers):
            for key in range(keys):
                group.create_task(work(number, mine, key))


def broken_promises(log: disk.Log, folder: Path, cuts: range) -> Iterator[str]:
    """What a power cut at one of these moments takes back, in words."""
    chance = random.Random(1)
    seen = set()
    for cut in cuts:
        told = {word.order_id for word in log[:cut] if isinstance(word, Told)}
        held = told - {word.order_id for word in log[:cut] if isinstance(word, Asked)}
        freed = {word.order_id for word in log[:cut] if isinstance(word, Freed)}
        for number, left in enumerate(disk.after_power_cut(log, cut, chance)):
            state = hash((frozenset(left.items()), frozenset(held), frozenset(freed)))
            if state in seen:
                continue
            seen.add(state)
            where = f"power cut {number} before {cut} of {len(log)}"
            owned, last = what_is_there(left, folder)
            if held - owned:
                yield f"{where}: not held any more: {held - owned}"
            if freed & owned:
                yield f"{where}: held again: {freed & owned}"
            if told and max(told) > last:
                yield f"{where}: tokens begin anew after {last}, {max(told)} was told"


def restored(left: dict[str, bytes], folder: Path) -> Path:
    """The files as the disk has them, in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for path, data in left.items():
        (folder / Path(path).name).write_bytes(data)
        (folder / Path(path).name).chmod(0o600)
    return folder / "store.db"


def what_is_there(left: dict[str, bytes], folder: Path) -> tuple[set[int], int]:
    """The order ids that own, and the last one given out."""
    connection = sqlite3.connect(restored(left, folder))
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return set(), 0
        owned = connection.execute("SELECT order_id FROM requests WHERE granted_at IS NOT NULL")
        last = connection.execute("SELECT last_order_id FROM meta").fetchone()[0]
        return {number for (number,) in owned}, last
    finally:
        connection.close()


async def recorded(path: Path, *durabilities: str, rounds: int = 3, keys: int = 3) -> disk.Log:
    """The log of programs that hand some keys around."""
    with disk.recorded() as log:
        async with contextlib.AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(opened(f"sqlite:///{path}?durability={each}"))
                for each in durabilities
            ]
            workers = [await worker(engine, log) for engine in engines]
            await hand_around(workers, range(rounds), keys)
            for engine in engines:
                engine.store._checkpointer.close()
                engine.store._checkpointer.checkpoint()  # all of it, so that the log begins anew
            await hand_around(workers, range(rounds, 2 * rounds), keys)
            end = len(log)
    return log[:end]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "after"


@guarantee("power cut", "answers stand", on=DURABLE_SQLITE)
@pytest.mark.timeout(300)
async def test_no_power_cut_takes_back_what_was_told(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_EVERY", 2)  # beside the commits, too
    log = await recorded(path, "full", "full")
    assert sum(isinstance(word, Told) for word in log) == 36
    first = log.index(next(word for word in log if isinstance(word, Told)))
    assert disk.Sync(str(path)) in log[first:]
    assert any(isinstance(word, disk.Write) and word.offset == 0 for word in log[first:])
    assert list(broken_promises(log, folder, range(len(log) + 1))) == []


@guarantee("power cut", "answers stand", on=DURABLE_SQLITE)
@pytest.mark.timeout(300)
async def test_what_one_program_asks_for_all_keep(path: Path, folder: Path) -> None:
    # Each is told by the other, too: a hand-over is written by who releases.
    log = await recorded(path, "process", "full")
    first = next(number for number, word in enumerate(log) if isinstance(word, Told))
    assert list(broken_promises(log, folder, range(first, len(log) + 1))) == []


@broken("power cut", "answers stand", on=SQLITE)
async def test_without_it_a_power_cut_does_take_back(path: Path, folder: Path) -> None:
    # This is also how the test above would fail.
    log = await recorded(path, "process", "process", rounds=1)
    lost = list(broken_promises(log, folder, range(len(log) + 1)))
    assert any("not held any more" in words for words in lost)
    assert any("tokens begin anew" in words for words in lost)


class SetBack(SystemClock):
    """Its wall clock has lost the time, as that of a machine without a battery."""

    def wall(self) -> float:
        return 0.0


@guarantee("power cut", "tokens rise", "others proceed", on=DURABLE_SQLITE)
async def test_after_a_power_cut_the_store_goes_on_with_higher_tokens(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await recorded(path, "full", "full", rounds=1)
    monkeypatch.setattr("tenure.engines.sqlite.store.boot_id", lambda: "another")
    chance = random.Random(2)
    for cut in range(0, len(log) + 1, 5):
        told = [word.order_id for word in log[:cut] if isinstance(word, Told)]
        for left in disk.after_power_cut(log, cut, chance):
            database = restored(left, folder)
            async with program(f"sqlite:///{database}?durability=full", SetBack()) as one:
                for hold, key in enumerate(("key-0", "key-1", "key-2"), 1):
                    answer = await result(one.ask(hold, key))
                    assert answer.place is Place.GRANTED
                    assert answer.order_id is not None
                    assert answer.order_id > max(told, default=0)


async def test_the_names_of_new_files_are_on_disk_before_anything_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    database = tmp_path / "tenure" / "b" / "store.db"
    synced: dict[str, set[str]] = {}
    fsync = os.fsync

    def noted(fd: int) -> None:
        folder = os.readlink(f"/proc/self/fd/{fd}")
        synced.setdefault(folder, set()).update(os.listdir(folder))
        fsync(fd)

    monkeypatch.setattr("tenure.engines.sqlite.files.os.fsync", noted)
    log = await recorded(database, "full", rounds=1)
    assert "tenure" in synced[str(tmp_path)]
    assert "b" in synced[str(tmp_path / "tenure")]
    assert "store.db" in synced[str(database.parent)]
    told = next(number for number, word in enumerate(log) if isinstance(word, Told))
    names = [word.names for word in log[:told] if isinstance(word, disk.SyncFolder)]
    assert names[-1] >= {"store.db", "store.db-wal"}
