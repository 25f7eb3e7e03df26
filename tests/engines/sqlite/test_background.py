"""Waiters are granted although background steps fail: no descriptor, no memory, no thread."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Place, Withdrawn
from tenure.engines.sqlite import monitor, requests
from tenure.engines.sqlite.notifier import DatagramNotifier
from tenure.engines.sqlite.store import Committer
from tenure.engines.sqlite.transaction import Transaction
from tenure.errors import EngineError
from tenure.testing.stage import Stage, Stores
from tests.engines.sqlite.conftest import Workers, on_either
from tests.engines.sqlite.helpers import attached, opened, program, result
from tests.injection import (
    Injector,
    a_hand_over,
    each_error,
    failing_once,
    played_in_spite_of_errors,
)

NAMES = 3


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """A block in which this process can open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "tenure.sqlite"]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  nothing tells when to look again
        await asyncio.sleep(0.01)


async def test_a_time_without_descriptors_does_not_stop_the_monitor(
    url: str, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(1) as (holder,), opened(url) as engine:
        waiter = await attached(engine)
        assert (await holder.do("enqueue", hold=1, name="x"))[0] == "GRANTED"
        engine.store.lives.close()  # nothing is open of the holder
        with no_descriptor_left():
            assert await waiter.enqueue(1, "x") is Place.WAITING
            await until(lambda: any("too many open files" in each for each in logged(caplog)))
            await asyncio.sleep(1)  # some more ticks, which do not fill the log
        assert len(logged(caplog)) <= 2
        await holder.kill()
        await waiter.granted(1)


@on_either
async def test_a_thread_that_cannot_be_started_does_not_wedge_the_client(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(url) as holder, opened(url) as engine:
        waiter = await attached(engine)
        assert await holder.enqueue(1, "x") is Place.GRANTED
        refused = 0
        start = threading.Thread.start

        def no_thread(thread: threading.Thread) -> None:
            nonlocal refused
            refused += 1
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            if "full" not in url:
                patch.setattr(engine.store.turn, "try_take", lambda: False)
            committer = engine.store.committer
            if committer._thread.alive:  # as before the first
                committer._errands.put(None)
                committer._thread.join()
            patch.setattr(threading.Thread, "start", no_thread)
            asked = waiter.ask(1, "x")
            assert isinstance(asked, asyncio.Future)
            await until(lambda: refused >= 3)
            assert not asked.done()
            patch.setattr(threading.Thread, "start", start)
            assert (await asked).place is Place.WAITING
        await holder.withdraw(1)
        await waiter.granted(1)
    assert any("can't start new thread" in message for message in logged(caplog))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks that come soon."""
    monkeypatch.setattr(monitor, "_TICK_WAITING", 0.05)


@each_error
@pytest.mark.parametrize("rings", [True, False])
async def test_a_waiter_is_granted_wherever_a_step_fails(
    url: str,
    error: type[Exception],
    rings: bool,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    injector = Injector(monkeypatch, "engines/sqlite", error)
    if not rings:
        monkeypatch.setattr(DatagramNotifier, "notify", lambda self, participants: [])
    async with Stage(Stores(lambda: nullcontext(url)), url, SystemClock()) as stage:
        fired = await played_in_spite_of_errors(
            a_hand_over, injector, caplog, await stage.programs(2)
        )
    assert len(set(fired)) >= 5, fired


@on_either
@each_error
@pytest.mark.parametrize("step", ["_deliver", "_answer"])
async def test_what_was_committed_is_answered_though_answering_fails_once(
    url: str, error: type[Exception], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Stage(Stores(lambda: nullcontext(url)), url, SystemClock()) as stage:
        (program,) = await stage.programs(1)
        raised = failing_once(monkeypatch, Committer, step, error)
        requests = [program.send(f"m{n}", ephemeral=True) for n in range(40)]  # some are put off
        withdrawn = [program.send_withdrawal(await each.answered()) for each in requests]
        for each in withdrawn:
            assert await result(each) is Withdrawn.LEFT
    assert raised == [step]


@on_either
@each_error
@pytest.mark.parametrize("put_off", [False, True])
async def test_what_was_never_begun_is_no_commit(
    url: str, error: type[Exception], put_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as engine:
        holder = await attached(engine)
        assert await holder.enqueue(1, "x") is Place.GRANTED  # its commit succeeded
        failing_once(monkeypatch, Transaction, "begin", error)
        if put_off:
            monkeypatch.setattr(engine.store.turn, "try_take", lambda: False)
        with pytest.raises(Exception, match="injected into begin"):
            await result(holder.session.withdraw(1))
        described = await holder.session.describe_semaphore("x", owners=True, waiters=True)
        assert len(described.owners) == 1
        assert await result(holder.session.withdraw(1)) is Withdrawn.LEFT


@on_either
async def test_what_a_full_disk_has_undone_is_not_told(url: str) -> None:
    async with opened(url) as engine:
        holder, waiter = await attached(engine), await attached(engine)
        assert await holder.enqueue(1, "x") is Place.GRANTED
        assert await waiter.enqueue(1, "x") is Place.WAITING
        open_afterwards: list[bool] = []

        def release_and_fill(tx: Transaction) -> None:
            requests.withdraw(tx, holder.session.me, "/default", 1)
            (pages,) = tx.execute("PRAGMA page_count").fetchone()
            tx.execute(f"PRAGMA max_page_count = {pages}")
            try:
                tx.execute("INSERT INTO nodes VALUES (99, zeroblob(1 << 20), 0, 0, '', '', '', 0)")
            finally:
                open_afterwards.append(tx.connection.in_transaction)
                tx.execute("PRAGMA max_page_count = 1000000000")

        with pytest.raises(EngineError, match="full"):
            await result(engine.store.committer.do(release_and_fill))
        assert open_afterwards == [False]  # SQLite has undone it all by itself
        described = await holder.session.describe_semaphore("x", owners=True, waiters=True)
        assert len(described.owners) == len(described.waiters) == 1
        assert await holder.enqueue(2, "y") is Place.GRANTED
        assert await waiter.enqueue(2, "y") is Place.WAITING
        await holder.withdraw(2)
        await waiter.granted(2)  # what was wrongly told would have come before
        assert list(waiter.heard.grants) == [2]
        await holder.withdraw(1)
        await waiter.granted(1)
