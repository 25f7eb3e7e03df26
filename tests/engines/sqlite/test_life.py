"""Signs of life, proofs, boots and forks."""

# ruff: noqa: ASYNC240  nothing else runs on the loop meanwhile

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Place
from tenure.engines.sqlite import liveness
from tenure.engines.sqlite.liveness import LivenessFile, LivenessFiles, boot_id, started
from tenure.errors import EngineError
from tests.engines.sqlite.conftest import Workers, on_either
from tests.engines.sqlite.helpers import attached, engine_of, opened, program
from tests.guarantees import DURABLE_SQLITE, SQLITE, guarantee


class Hands:
    """A clock that a test sets."""

    virtual = False

    def __init__(self) -> None:
        self.time = SystemClock().now()
        self.jumps: list[float] = []

    def now(self) -> float:
        if self.jumps:
            self.time += self.jumps.pop(0)
        return self.time

    def wall(self) -> float:
        return SystemClock().wall()


@pytest.fixture
def life(tmp_path: Path) -> LivenessFile:
    return LivenessFile(f"{tmp_path}/7.live", 0o600)


def test_heartbeats_are_read_by_others(life: LivenessFile, tmp_path: Path) -> None:
    lives = LivenessFiles(str(tmp_path))
    slots = [life.new_slot(number + 1.0) for number in range(2000)]
    assert slots == list(range(2000))
    assert [lives.last_beat(7, slot) for slot in slots] == [slot + 1.0 for slot in slots]
    life.beat(1234, 5.5)
    assert lives.last_beat(7, 1234) == life.last_beat(1234) == 5.5
    assert lives.last_beat(7, 2000) == float("-inf")
    lives.close()
    life.remove()


def test_a_slot_is_used_again_when_its_session_is_over(life: LivenessFile) -> None:
    first = life.new_slot(1.0)
    second = life.new_slot(2.0)
    life.free_slot(first)
    assert life.last_beat(first) == float("-inf")
    assert life.new_slot(3.0) == first != second
    life.remove()


def test_dead_is_whose_lock_can_be_taken(life: LivenessFile, tmp_path: Path) -> None:
    lives, others = LivenessFiles(str(tmp_path)), LivenessFiles(str(tmp_path))
    assert not lives.is_dead(7)
    assert not lives.is_dead(7)
    life.close()
    assert lives.is_dead(7)
    assert others.is_dead(7), "to look is not to take"
    lives.remove(7)
    assert not lives.is_alive(7)
    assert not lives.is_dead(7), "nobody is dead whose lock cannot be tried"
    lives.close()
    others.close()


def test_who_is_missed_is_silent_from_then_on(tmp_path: Path) -> None:
    times = iter([100.0, 130.0])
    lives = LivenessFiles(str(tmp_path), lambda: next(times))
    assert lives.last_beat(7, 0) == 100.0
    assert lives.last_beat(7, 0) == 100.0


def test_few_files_are_kept_open(tmp_path: Path) -> None:
    all_lives = [LivenessFile(f"{tmp_path}/{number}.live", 0o600) for number in range(100)]
    lives = LivenessFiles(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert not any(lives.is_dead(number) for number in range(100))
    assert len(os.listdir("/proc/self/fd")) <= before + 64
    lives.close()
    assert len(os.listdir("/proc/self/fd")) == before
    for each in all_lives:
        each.remove()
    assert os.listdir(tmp_path) == []


def test_a_life_that_is_dropped_lets_go(tmp_path: Path) -> None:
    life = LivenessFile(f"{tmp_path}/7.live", 0o600)
    lives = LivenessFiles(str(tmp_path))
    del life
    assert lives.is_dead(7)


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    assert started(os.getpid()) == started(os.getpid()) != ""
    assert started(2**22 + 1) == ""


# Proof


async def test_a_renewal_proves_from_before_it_was_written(url: str) -> None:
    clock = Hands()
    async with program(url, clock, window=10) as one:
        clock.time += 3
        clock.jumps = [0, 2]
        one.session.renew()
        assert one.heard.proofs[-1] == clock.time - 2


@guarantee("stopped", "loss reported", on=SQLITE)
async def test_a_renewal_after_the_window_proves_nothing_and_ends_the_session(url: str) -> None:
    clock = Hands()
    async with program(url, clock, window=10) as one:
        proofs = len(one.heard.proofs)
        clock.time += 10.1
        one.session.renew()
        assert len(one.heard.proofs) == proofs
        await one.ended()
        assert "window of 10 s" in str(one.heard.end)


@guarantee("stopped", "loss reported", on=SQLITE)
async def test_a_process_stopped_inside_a_renewal_proves_nothing(url: str) -> None:
    # Between reading the clock and writing the heartbeat, others may have missed it.
    clock = Hands()
    async with program(url, clock, window=10) as one:
        proofs = len(one.heard.proofs)
        clock.time += 9
        clock.jumps = [0, 2]
        one.session.renew()
        assert len(one.heard.proofs) == proofs
        one.session.renew()
        assert len(one.heard.proofs) == proofs, "not even by the next one"
        await one.ended()


async def test_any_thread_renews_and_none_waits_for_another(url: str) -> None:
    async with program(url) as one:
        before = len(one.heard.proofs)
        thread = threading.Thread(target=one.session.renew)
        thread.start()
        thread.join()
        assert len(one.heard.proofs) == before + 1
        with one.session._renewing:
            one.session.renew()
        assert len(one.heard.proofs) == before + 1


async def test_a_renewal_after_the_end_does_nothing(url: str) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        await one.session.close()
        await one.session.close()
        proofs = len(one.heard.proofs)
        one.session.renew()
        assert len(one.heard.proofs) == proofs
    one.session.over = False  # as a thread may see it that is just about to renew
    one.session.renew()
    assert len(one.heard.proofs) == proofs


# Boots


@on_either
@guarantee("power cut", "nothing leaks", "others proceed", on=(SQLITE, DURABLE_SQLITE))
async def test_after_a_reboot_everything_of_before_is_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(url)
    await engine.open()
    one = await attached(engine)
    await one.session.create_semaphore("pool", 2, b"data", exist_ok=False)
    await one.enqueue(1, "pool", count=2, ephemeral=False)
    await one.enqueue(2, "x")
    engine._release(EngineError("the machine is gone"), left=False)
    monkeypatch.setattr("tenure.engines.sqlite.store.boot_id", lambda: "another")
    async with opened(url) as engine:
        assert await engine.list_sessions("/default") == []
        (pool,) = await engine.list_semaphores("/default", owners=True, waiters=True)
        assert (pool.name, pool.held, pool.data, pool.owners) == ("pool", 0, b"data", ())
        two = await attached(engine)
        assert two.session.id > one.session.id
        assert await two.enqueue(1, "x") is Place.GRANTED


async def test_who_lives_under_another_kernel_is_not_declared_dead(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(url) as one:
        await one.enqueue(1, "x")
        with monkeypatch.context() as patch:
            patch.setattr("tenure.engines.sqlite.store.boot_id", lambda: "another")
            with pytest.raises(EngineError, match="under another kernel"):
                await engine_of(url).open()
        async with program(url) as two:
            assert await two.enqueue(1, "x", timeout=0) is Place.REFUSED


def test_a_boot_has_an_id() -> None:
    assert boot_id() == boot_id() != ""


@guarantee("power cut", "tokens rise", on=SQLITE)
async def test_tokens_rise_although_the_data_is_lost(url: str, path: Path) -> None:
    async with program(url) as one:
        first = one.ask(1, "x")
    for name in os.listdir(path.parent):
        if name.startswith(path.name) and not name.endswith(".tenure"):
            os.unlink(path.parent / name)
    async with program(url) as one:
        second = one.ask(1, "x")
    assert first.order_id < second.order_id  # type: ignore[union-attr, operator]


# Forks


@on_either
@guarantee("fork", "one owner", "kept", on=(SQLITE, DURABLE_SQLITE))
async def test_a_forked_child_may_not_use_its_parents_engine_and_does_no_harm(
    workers: Workers, url: str, path: Path
) -> None:
    async with workers(1) as (one,):
        await one.do("enqueue", hold=1, name="x")
        assert await one.do("use_in_a_child") == 0
        assert os.path.exists(f"{path}-wal")
        assert os.path.exists(f"{path}.tenure/1.live")
        async with program(url) as other:
            assert await other.enqueue(1, "x", timeout=0) is Place.REFUSED
        assert (await one.do("enqueue", hold=2, name="y"))[0] == "GRANTED"


@pytest.mark.parametrize("call", ["read_at", "write_at"])
def test_a_session_that_ends_during_a_check_is_no_damage(
    life: LivenessFile, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A heartbeat, an end and a check, each on a thread of its own."""
    slot = life.new_slot(1.0)
    original = getattr(liveness, call)
    ending = threading.Thread(target=life.free_slot, args=(slot,))

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(liveness, call, original)
        if call == "read_at":
            ending.start()
            ending.join(0.1)  # it may have to wait
        done = original(*args)
        if call == "write_at":
            ending.start()
            ending.join(0.1)
        return done

    monkeypatch.setattr(liveness, call, interrupted)
    if call == "write_at":
        life.beat(slot, 2.0)
    assert life.damage() == ""
    ending.join()
    assert life.damage() == ""
