"""Notifications, and the reported end of processes."""

# ruff: noqa: ASYNC220, ASYNC240  nothing else runs on the loop meanwhile

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tenure.engines.contract import Place
from tenure.engines.sqlite import monitor
from tenure.engines.sqlite.liveness import started
from tenure.engines.sqlite.notifier import DatagramNotifier, ProcessWatch
from tests.engines.sqlite.helpers import program


class Notified:
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
async def test_a_notification_arrives_however_long_the_path(tmp_path: Path, depth: int) -> None:
    folder = tmp_path / ("x" * depth)
    os.mkdir(folder)
    loop = asyncio.get_running_loop()
    notifier, other = (DatagramNotifier(str(folder), mode) for mode in (0o660, 0o600))
    notified = Notified()
    notifier.bind(1, loop, notified)
    assert stat.S_IMODE(os.stat(folder / "1.sock").st_mode) == 0o660
    assert other.notify([1]) == []
    await notified.wait()
    notifier.close(loop)
    assert not os.path.exists(folder / "1.sock")
    other.close(loop)


async def test_a_notification_without_a_receiver_is_reported_and_a_full_socket_is_not(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    notifier, other = (DatagramNotifier(str(tmp_path), 0o600) for _ in range(2))
    notified = Notified()
    notifier.bind(1, loop, notified)
    assert other.notify([1] * 1000) == []
    await notified.wait()
    assert notified.times == 1, "all that has come is one call"
    notifier.abandon()
    assert other.notify([1, 2]) == [1, 2]
    other.close(loop)


async def test_without_a_socket_the_tick_must_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tenure.engines.sqlite.notifier.LONGEST_FOLDER", 10**6
    )  # as if there were no /proc
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
    heard = Notified()

    def died(participant: int) -> None:
        dead.append(participant)
        heard()

    watch = ProcessWatch(asyncio.get_running_loop(), died)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch.watch(7, process.pid, started(process.pid))
        watch.watch(7, process.pid, started(process.pid))
        assert 7 in watch
        process.kill()
        await heard.wait()
    assert dead == [7]
    assert 7 not in watch


async def test_who_cannot_be_watched_is_not() -> None:
    watch = ProcessWatch(asyncio.get_running_loop(), lambda _: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch.watch(1, process.pid, "another start")
        watch.watch(2, os.getpid(), started(os.getpid()))
        watch.watch(3, process.pid, started(process.pid))
        process.kill()
    watch.watch(4, process.pid, "gone")
    assert [who for who in range(5) if who in watch] == [3]
    watch.clear()
    assert 3 not in watch


def test_sockets_are_closed_with_the_notifier(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    notifier = DatagramNotifier(str(tmp_path), 0o600)
    notifier.bind(1, loop, lambda: None)
    before = len(os.listdir("/proc/self/fd"))
    notifier.close(loop)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    loop.close()


async def test_a_waiter_is_notified_while_the_loop_of_the_former_holder_is_busy(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("_TICK", "_TICK_WAITING", "_FIRST_LOOK"):
        monkeypatch.setattr(monitor, constant, 600.0)
    owns, waits, granted = (threading.Event() for _ in range(3))

    async def hold_and_compute() -> bool:
        async with program(f"{url}?durability=full") as holder:
            await holder.enqueue(1, "x")
            owns.set()
            await asyncio.to_thread(waits.wait)
            holder.session.withdraw(1)
            for _ in range(3):  # the thread has got it
                await asyncio.sleep(0)
            return granted.wait(20)  # computing, as far as the loop is concerned

    holding = asyncio.create_task(asyncio.to_thread(asyncio.run, hold_and_compute()))
    await asyncio.to_thread(owns.wait)
    async with program(f"{url}?durability=full") as waiter:
        assert await waiter.enqueue(2, "x") is Place.WAITING
        waits.set()
        await waiter.granted(2)
        granted.set()
        assert await holding
