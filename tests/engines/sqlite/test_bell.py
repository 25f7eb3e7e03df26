"""Bells, and hearing of deaths."""

# ruff: noqa: ASYNC220, ASYNC240  nothing else runs on the loop meanwhile

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.engines.contract import Place
from tenure.engines.sqlite.bell import Bell, Deathwatch
from tenure.engines.sqlite.life import started
from tests.engines.sqlite.helpers import program


class Rung:
    """How often it was."""

    def __init__(self) -> None:
        self.times = 0
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.times += 1
        self._event.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self._event.wait()
        self._event.clear()


@pytest.mark.parametrize("depth", [1, 200])
async def test_a_bell_is_heard_however_long_its_path(tmp_path: Path, depth: int) -> None:
    folder = tmp_path / ("x" * depth)
    os.mkdir(folder)
    loop = asyncio.get_running_loop()
    bell, other, rung = Bell(str(folder), 0o660), Bell(str(folder), 0o600), Rung()
    bell.hang(1)
    bell.listen(loop, rung)
    assert stat.S_IMODE(os.stat(folder / "1.sock").st_mode) == 0o660
    assert other.ring([1]) == []
    await rung.wait()
    bell.close(loop)
    assert not os.path.exists(folder / "1.sock")
    other.close(loop)


async def test_a_bell_that_nobody_answers_is_reported_and_a_full_one_is_not(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    bell, other, rung = Bell(str(tmp_path), 0o600), Bell(str(tmp_path), 0o600), Rung()
    bell.hang(1)
    assert other.ring([1] * 1000) == []
    bell.listen(loop, rung)
    await rung.wait()
    assert rung.times == 1, "all that has come is one call"
    bell.abandon()
    assert other.ring([1, 2]) == [1, 2]
    other.close(loop)


async def test_without_a_socket_the_tick_must_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.bell._LONGEST", 10**6)  # as if there were no /proc
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    url = f"sqlite:///{folder}/store.db"
    async with program(url) as one, program(url) as other:
        assert [name for name in os.listdir(f"{folder}/store.db.tenure") if "sock" in name] == []
        await one.enqueue(1, "x")
        assert await other.enqueue(1, "x") is Place.WAITING
        await one.withdraw(1)
        await other.granted(1)


async def test_a_death_is_heard_of_at_once() -> None:
    dead: list[int] = []
    heard = Rung()

    def died(participant: int) -> None:
        dead.append(participant)
        heard()

    watch = Deathwatch(asyncio.get_running_loop(), died)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch.watch(7, process.pid, started(process.pid))
        watch.watch(7, process.pid, started(process.pid))
        assert 7 in watch
        process.kill()
        await heard.wait()
    assert dead == [7]
    assert 7 not in watch


async def test_who_cannot_be_watched_is_not() -> None:
    watch = Deathwatch(asyncio.get_running_loop(), lambda _: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch.watch(1, process.pid, "another start")
        watch.watch(2, os.getpid(), started(os.getpid()))
        watch.watch(3, process.pid, started(process.pid))
        process.kill()
    watch.watch(4, process.pid, "gone")
    assert [who for who in range(5) if who in watch] == [3]
    watch.clear()
    assert 3 not in watch


def test_sockets_are_closed_with_the_bell(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    bell = Bell(str(tmp_path), 0o600)
    bell.hang(1)
    before = len(os.listdir("/proc/self/fd"))
    bell.close(loop)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    loop.close()
