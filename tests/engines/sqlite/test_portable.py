"""The portable mode: no kernel locks, no sockets, no process ids."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sqlite3
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.contract import Attach, Place
from tenure.engines.sqlite import liveness, monitor, participants, schema
from tenure.engines.sqlite.doctor import examine
from tenure.engines.sqlite.restore import backup, restore
from tenure.engines.sqlite.store import Store
from tenure.engines.sqlite.url import parse
from tenure.errors import EngineError, SessionExpired
from tenure.testing.recorder import Recorder
from tests.engines.sqlite.conftest import Holders, Workers
from tests.engines.sqlite.helpers import Program, attached, engine_of, opened, program, result
from tests.engines.sqlite.test_life import Hands
from tests.engines.sqlite.worker import now
from tests.guarantees import PORTABLE_SQLITE, guarantee

pytestmark = pytest.mark.parametrize("url", ["?portable=true"], ids=["portable"], indirect=True)


@pytest.fixture
def native(path: Path) -> str:
    """The same file in the other mode."""
    return f"sqlite:///{path}"


def files(path: Path) -> set[str]:
    return set(os.listdir(f"{path}.tenure"))


# Hand-off, death and silence


@guarantee("none", "in order", "tokens rise", "others proceed", on=PORTABLE_SQLITE)
async def test_a_release_in_one_process_grants_in_the_next_in_order(workers: Workers) -> None:
    async with workers(3) as (a, b, c):
        assert (await a.do("enqueue", hold=1, name="x"))[0] == "GRANTED"
        second, first_token = await b.do("enqueue", hold=1, name="x")
        third, second_token = await c.do("enqueue", hold=1, name="x")
        assert (second, third) == ("WAITING", "WAITING")
        await a.do("withdraw", hold=1)
        assert (await b.hear("granted", hold=1))["order_id"] == first_token
        assert not c.has_heard("granted")
        await b.do("withdraw", hold=1)
        assert (await c.hear("granted", hold=1))["order_id"] == second_token > first_token


async def test_a_watch_in_another_process_sees_a_change(workers: Workers) -> None:
    async with workers(2) as (one, other):
        await one.do("create", name="x", limit=2)
        await other.do("watch", name="x", data=True, owners=False)
        await one.do("update", name="x", data="new")
        await other.hear("changed", name="x")


@guarantee("killed", "one owner", "others proceed", on=PORTABLE_SQLITE)
async def test_a_killed_holder_is_followed_after_its_window(workers: Workers) -> None:
    async with workers(1, window=1.5) as (holder,), workers(1) as (waiter,):
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        await holder.kill()
        killed = now()
        assert (await waiter.do("enqueue", hold=2, name="y"))[0] == "GRANTED"
        granted = await waiter.hear("granted", hold=1)
        assert granted["at"] - killed > 0.9


@guarantee("killed", "nothing leaks", on=PORTABLE_SQLITE)
async def test_a_killed_waiter_is_passed_over(workers: Workers) -> None:
    async with workers(1, window=1.5) as (dead,), workers(2) as (holder, waiter):
        await holder.do("enqueue", hold=1, name="x")
        await dead.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        await dead.kill()
        await holder.do("withdraw", hold=1)
        await waiter.hear("granted", hold=1)


@guarantee("stopped", "one owner", "loss reported", "others proceed", on=PORTABLE_SQLITE)
async def test_a_stopped_holder_believes_no_more_when_the_next_one_holds(holders: Holders) -> None:
    async with holders(2) as (stopped, other):
        await stopped.do("begin", window=1.5, resumable=False)
        await other.do("begin", window=30, resumable=False)
        token = await stopped.do("lock", name="m")
        await other.do("line_up", name="m")
        stopped.stop()
        granted = await other.hear("holds", name="m")
        stopped.signal(signal.SIGCONT)
        lost = await stopped.hear("lost", name="m")
        assert lost["last"] < granted["at"]
        assert lost["deadline"] <= granted["at"], "it could still believe"
        assert granted["token"] > token


@guarantee("stopped", "kept", on=PORTABLE_SQLITE)
async def test_a_stop_shorter_than_the_window_costs_nothing(workers: Workers) -> None:
    async with workers(2, window=5) as (holder, waiter):
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        holder.stop()
        assert (await waiter.do("enqueue", hold=2, name="x", timeout=0))[0] == "REFUSED"
        holder.signal(signal.SIGCONT)
        assert await holder.do("renew")
        assert not waiter.has_heard("granted", hold=1)


# Writers


async def test_processes_that_create_the_store_together_exclude_each_other(
    workers: Workers,
) -> None:
    async with workers(5, attach=False) as all_workers:
        await asyncio.gather(*(each.do("attach", window=30, renew=True) for each in all_workers))
        await asyncio.gather(*(each.do("contend", name="x", seconds=1.0) for each in all_workers))
        holds = sorted(hold for each in all_workers for hold in each.holds())
    assert all(each.holds() for each in all_workers)
    for (_, _, end), (_, begin, _) in itertools.pairwise(holds):
        assert end <= begin


@guarantee("stuck peer", "kept", "others proceed", on=PORTABLE_SQLITE)
async def test_a_locked_database_delays_writers_and_costs_no_lease(url: str, path: Path) -> None:
    async with opened(url) as engine:
        one = await attached(engine, window=1)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            answer = one.ask(1, "x")
            assert isinstance(answer, asyncio.Future)
            until = now() + 1.5  # longer than the window
            while now() < until or engine.trouble() is None:
                one.session.renew()
                await asyncio.sleep(0.1)
            assert "has kept the turn" in str(engine.trouble())
            other.execute("ROLLBACK")
        assert (await answer).place is Place.GRANTED
        assert one.heard.end is None
        assert engine.trouble() is None


async def test_an_engine_closes_while_the_database_is_locked(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.engine._LEAVING", 0.1)
    engine = engine_of(url)
    await engine.open()
    one = await attached(engine)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = one.ask(1, "x")
        assert isinstance(answer, asyncio.Future)
        with pytest.raises(EngineError, match="was closed while"):
            await engine.aclose()
        with pytest.raises(tenure.TenureError):
            await answer


async def test_commits_become_durable_for_all_programs(url: str) -> None:
    async with program(url) as one, program(f"{url}&durability=full") as two:
        assert await two.enqueue(1, "x") is Place.GRANTED
        assert await one.enqueue(1, "y") is Place.GRANTED
        assert one.session._engine.store.tx.durable
        assert await two.enqueue(2, "y", timeout=0) is Place.REFUSED


# One mode


@pytest.mark.parametrize("first", ["native", "portable"])
async def test_a_store_in_the_other_mode_is_refused(url: str, native: str, first: str) -> None:
    made, refused = (native, url) if first == "native" else (url, native)
    async with opened(made):
        pass
    with pytest.raises(EngineError, match=f"is in {first} mode.*portable=true") as caught:
        await engine_of(refused).open()
    assert "tenure restore" in str(caught.value)
    with pytest.raises(EngineError, match=f"is in {first} mode"):
        async with tenure.connect(refused) as client:
            await client.list_nodes()
    async with program(made) as one:
        assert await one.enqueue(1, "x") is Place.GRANTED


@pytest.mark.parametrize("first", ["native", "portable"])
async def test_programs_that_create_a_store_together_have_one_mode(
    url: str, native: str, first: str
) -> None:
    made, late = (native, url) if first == "native" else (url, native)
    store = Store(parse(late), SystemClock(), asyncio.get_running_loop())
    try:
        async with opened(made):
            with pytest.raises(EngineError, match=f"is in {first} mode"):
                store.tx.begin()
            store.tx.rollback()
    finally:
        store.close(EngineError("closed"), left=False)


@pytest.mark.parametrize("first", ["native", "portable"])
async def test_a_backup_moves_a_store_to_the_other_mode(
    url: str, native: str, first: str, file: Path, tmp_path: Path
) -> None:
    made, other = (native, url) if first == "native" else (url, native)
    moved = other.replace("store.db", "moved.db")
    async with program(made) as one:
        await one.session.create_semaphore("config", 1, b"data", exist_ok=False)
    backup(made, str(file))
    assert restore(moved, str(file), quarantine=0).path == f"{tmp_path}/moved.db"
    async with program(moved) as two:
        assert (
            await two.session.describe_semaphore("config", owners=False, waiters=False)
        ).data == b"data"
    with pytest.raises(EngineError, match="mode"):
        restore(f"{made.replace('store.db', 'moved.db')}", str(file), force=True)


async def test_a_store_in_use_is_not_restored(url: str, file: Path) -> None:
    async with program(url):
        backup(url, str(file))
        with pytest.raises(EngineError, match="is in use"):
            restore(url, str(file), force=True)
    assert restore(url, str(file), force=True).quarantine > 0


def test_the_mode_is_shown(url: str) -> None:
    assert "portable mode" in engine_of(url).guarantees
    (mode,) = [found for found in examine(parse(url)) if found.what == "mode"]
    assert mode.found.startswith("portable: ")
    assert engine_of(url.partition("?")[0]).guarantees == ""


# Files


async def test_there_is_a_liveness_file_and_nothing_else(url: str, path: Path) -> None:
    async with program(url):
        assert files(path) == {"1.live"}
    assert files(path) == set()


async def test_the_files_of_the_dead_are_removed_after_a_day(url: str, path: Path) -> None:
    clock = Hands()
    engine = engine_of(url, clock)
    await engine.open()
    one = await attached(engine)
    await one.enqueue(1, "x")
    engine._release(EngineError("its process was killed"), left=False)
    clock.time += 31
    async with opened(url, clock) as other:
        two = await attached(other)
        assert files(path) == {"1.live", "2.live"}
        assert await two.enqueue(1, "x", timeout=0) is Place.GRANTED
        assert [each.id for each in await other.list_sessions("/default")] == [two.session.id]
    clock.time += liveness._LEFT_BEHIND
    async with program(url, clock):
        assert files(path) == {"3.live"}


async def test_a_liveness_file_that_is_removed_ends_its_sessions(url: str, path: Path) -> None:
    async with program(url) as one:
        os.unlink(f"{path}.tenure/1.live")
        await one.ended()
        assert "removed while in use" in str(one.heard.end)


# Clocks


async def test_another_clock_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with program(url):
        monkeypatch.setattr("tenure.engines.sqlite.store.clock_id", lambda: "GetTickCount64()")
        with pytest.raises(EngineError, match=r"another clock \(CLOCK_BOOTTIME\).*tenure restore"):
            await engine_of(url).open()


async def leave(url: str, clock: Hands, *attachments: Attach) -> list[Program]:
    """Attach sessions that each hold a lock of their own, and die."""
    engine = engine_of(url, clock)
    await engine.open()
    left = []
    for each in attachments:
        heard = Recorder()
        left.append(Program(await engine.attach(each, heard), heard))
        assert await left[-1].enqueue(1, f"lock-{len(left)}") is Place.GRANTED
    engine._release(EngineError("its process was killed"), left=False)
    return left


@guarantee("power cut", "nothing leaks", "kept", on=PORTABLE_SQLITE)
async def test_a_restart_of_the_machine_ends_what_does_not_outlive_its_process(url: str) -> None:
    clock = Hands()
    clock.time = 50_000.0
    one, two = await leave(
        url, clock, Attach("/default", 30), Attach("/default", 30, liveness="window", key=b"k")
    )
    clock.time = 40.0
    async with program(url, clock) as three:
        assert await three.enqueue(1, "lock-1", timeout=0) is Place.GRANTED
        assert await three.enqueue(2, "lock-2", timeout=0) is Place.REFUSED
        clock.time += 35  # less than its grace period and its window
        assert await three.enqueue(3, "lock-2", timeout=0) is Place.REFUSED
        clock.time += 10
        three.session.renew()
        assert await three.enqueue(4, "lock-2", timeout=0) is Place.GRANTED
    assert (one.heard.end, two.heard.end) == (None, None)


async def test_a_restart_that_no_reading_shows_ends_sessions_by_their_windows(url: str) -> None:
    clock = Hands()
    clock.time = 100.0
    await leave(url, clock, Attach("/default", 30))
    clock.time = 110.0  # of the next boot
    async with program(url, clock) as two:
        assert await two.enqueue(1, "lock-1", timeout=0) is Place.REFUSED
        clock.time += 21
        assert await two.enqueue(2, "lock-1", timeout=0) is Place.GRANTED


async def test_a_grace_period_is_not_taken_for_a_restart(url: str) -> None:
    clock = Hands()
    async with opened(url, clock) as engine:
        config = tenure.NodeConfig(session_grace_period=100_000.0)
        await engine.create_node("/far", config, exist_ok=False)
    await leave(url, clock, Attach("/far", 30, liveness="window", key=b"k"))
    clock.time += 40
    for _ in range(3):
        async with opened(url, clock) as engine:
            with engine.store.reading() as tx:
                assert not participants.was_restarted(tx)
            assert len(await engine.list_sessions("/far")) == 1
    clock.time = 10.0
    async with opened(url, clock) as engine:
        assert len(await engine.list_sessions("/far")) == 1
        with engine.store.reading() as tx:
            assert tx.execute("SELECT contact FROM sessions").fetchone()[0] <= 10 + 30 * 60


@guarantee("restarted", "kept", on=PORTABLE_SQLITE)
async def test_a_silent_session_is_resumed_after_a_pause_once(url: str) -> None:
    clock = Hands()
    how = Attach("/default", 30, liveness="window", key=b"k")
    (left,) = await leave(url, clock, how)
    clock.time += 35
    async with opened(url, clock) as engine:
        resumed = Recorder()
        how = Attach("/default", 30, liveness="window", key=b"k", session_id=left.session.id)
        session = await engine.attach(how, resumed)
        assert [each.name for each in resumed.found] == ["lock-1"]
        await session.detach()
    clock.time += 1
    async with opened(url, clock) as engine:
        clock.time += 100
        assert await engine.list_sessions("/default") == []


async def test_a_program_that_continues_after_that_has_lost_its_session(url: str) -> None:
    clock = Hands()
    async with opened(url, clock) as stopped:
        heard = Recorder()
        how = Attach("/default", 10, liveness="window", key=b"k")
        one = Program(await stopped.attach(how, heard), heard)
        await one.enqueue(1, "x")
        stopped.monitor._timer.cancel()
        clock.time += 11
        async with program(url, clock) as two:
            assert one.session.beat() is None
            assert await two.enqueue(1, "x", timeout=0) is Place.REFUSED  # its grace period
            stopped.monitor.keep_ticking()
            await one.ended()
            with pytest.raises(SessionExpired):
                await result(one.ask(2, "y"))


# Forks


@guarantee("fork", "one owner", "others proceed", on=PORTABLE_SQLITE)
async def test_a_forked_child_does_not_keep_its_parents_leases(workers: Workers) -> None:
    async with workers(1, window=1.5) as (holder,), workers(1) as (waiter,):
        await holder.do("enqueue", hold=1, name="x")
        await waiter.do("enqueue", hold=1, name="x")
        child = await holder.do("fork")
        try:
            assert await holder.do("use_in_a_child") == 0
            assert await holder.do("renew")
            await holder.kill()
            await waiter.hear("granted", hold=1)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_command_has_no_descriptor_to_inherit(url: str) -> None:
    async with opened(url) as engine:
        await attached(engine)
        assert engine.liveness_fd() is None


# Polling


async def test_only_waiting_polls(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "POLL", 0.001)
    async with opened(url) as engine:
        one, two = await attached(engine), await attached(engine)
        polling = engine.monitor._polling
        await one.enqueue(1, "x")
        assert [polling.armed] == [False]
        assert await two.enqueue(1, "x") is Place.WAITING
        assert [polling.armed] == [True]
        await one.withdraw(1)
        await two.granted(1)
        while polling.armed:  # noqa: ASYNC110  the timer tells nobody
            await asyncio.sleep(0.001)


def test_the_mode_is_recorded_in_the_file(url: str, path: Path) -> None:
    async def use() -> None:
        async with opened(url):
            pass

    asyncio.run(use())
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
    assert application == schema.PORTABLE_ID
