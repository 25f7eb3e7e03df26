"""When operations run: at once, together, or behind somebody else's turn."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.engines.contract import Enqueued, Place, Withdrawn
from tenure.engines.sqlite.engine import SqliteEngine
from tenure.engines.sqlite.transaction import Turn
from tenure.errors import EngineError, InvalidArgument
from tenure.model import NodeConfig
from tests.engines.sqlite.conftest import on_either
from tests.engines.sqlite.helpers import attached, opened, program, result
from tests.guarantees import DURABLE_SQLITE, SQLITE, guarantee


@contextmanager
def the_turn(path: Path) -> Iterator[Turn]:
    """Somebody else's turn, until it is released."""
    turn = Turn(f"{path}.tenure/turn.lock", 0o600)
    assert turn.try_take()
    try:
        yield turn
    finally:
        turn.close()


@contextmanager
def counted_commits(engine: SqliteEngine) -> Iterator[list[int]]:
    """The threads of the commits during the block; looks at the file are none."""
    commits: list[int] = []
    connection = engine.store.tx.connection
    writes = False

    def trace(sql: str) -> None:
        nonlocal writes
        if sql.startswith("BEGIN"):
            writes = sql == "BEGIN IMMEDIATE"
        elif sql == "COMMIT" and writes:
            commits.append(threading.get_ident())

    connection.set_trace_callback(trace)
    try:
        yield commits
    finally:
        connection.set_trace_callback(None)


async def test_one_operation_at_a_time_is_answered_at_once(url: str) -> None:
    async with program(url) as one:
        at_once = 0
        for hold in range(100):
            answer = one.ask(hold, "x")
            at_once += isinstance(answer, Enqueued)
            await result(answer)
            await one.withdraw(hold)
        assert at_once > 80


async def test_operations_behind_somebody_elses_turn_share_one_transaction(
    url: str, path: Path
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        with counted_commits(engine) as commits, the_turn(path) as turn:
            answers = [one.ask(hold, f"key-{hold}") for hold in range(50)]
            assert not any(isinstance(answer, Enqueued) for answer in answers)
            turn.release()
            places = [(await result(answer)).place for answer in answers]
        assert places == [Place.GRANTED] * 50
        assert len(commits) == 1


async def test_many_tasks_come_to_share_transactions(url: str) -> None:
    async with opened(url) as engine:
        one = await attached(engine)

        async def work(number: int) -> None:
            for turn in range(20):
                hold = number * 100 + turn
                assert await one.enqueue(hold, f"key-{number}") is Place.GRANTED
                await one.withdraw(hold)

        with counted_commits(engine) as commits:
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(work(number))
        assert len(commits) < 50 * 20 * 2 / 10


async def test_durable_operations_share_commits_which_the_loop_does_not_wait_for(
    url: str,
) -> None:
    async with opened(f"{url}?durability=full") as engine:
        one = await attached(engine)

        async def work(number: int) -> None:
            for turn in range(20):
                hold = number * 100 + turn
                assert await one.enqueue(hold, f"key-{number}") is Place.GRANTED
                await one.withdraw(hold)

        with counted_commits(engine) as threads:
            async with asyncio.TaskGroup() as group:
                for number in range(64):
                    group.create_task(work(number))
        assert len(threads) < 64 * 20 * 2 / 32
        assert threading.get_ident() not in threads


async def test_who_has_the_file_open_already_learns_that_commits_are_to_be_durable(
    url: str,
) -> None:
    async with opened(url) as engine:
        one = await attached(engine)
        assert not isinstance(one.ask(1, "x"), asyncio.Future)
        async with program(f"{url}?durability=full"):
            await one.enqueue(2, "y")
            assert engine.store.tx.execute("PRAGMA synchronous").fetchone() == (2,)
        assert isinstance(one.ask(3, "z"), asyncio.Future)
        await one.withdraw(3)


@on_either
@guarantee("stuck peer", "in order", on=(SQLITE, DURABLE_SQLITE))
async def test_operations_keep_their_order_across_all_ways(url: str, path: Path) -> None:
    async with program(url) as one:
        first = one.ask(1, "x")
        with the_turn(path):
            second, third = one.ask(2, "x"), one.ask(3, "x")
            withdrawn = one.session.withdraw(1)
        fourth = one.ask(4, "x")
        answers = [await result(answer) for answer in (first, second, third, fourth)]
        await result(withdrawn)
        assert [answer.place for answer in answers] == [Place.GRANTED] + [Place.WAITING] * 3
        tokens = [answer.order_id for answer in answers]
        assert tokens == sorted(tokens, key=lambda token: token or 0)
        await one.granted(2)


async def test_a_request_that_is_granted_in_the_turn_of_its_own_owns(url: str, path: Path) -> None:
    async with program(url) as one:
        await one.enqueue(1, "x")
        with the_turn(path):
            answer = one.ask(2, "x")
            one.session.withdraw(1)
        await one.granted(2)
        assert (await result(answer)).place is Place.WAITING
        assert not one.heard.broken


async def test_one_that_is_refused_does_not_fail_those_beside_it(url: str, path: Path) -> None:
    async with program(url) as one:
        with the_turn(path):
            good = one.ask(1, "x")
            bad = one.ask(2, "y", count=0)
            also_good = one.ask(3, "z")
        with pytest.raises(InvalidArgument):
            await result(bad)
        assert (await result(good)).place is (await result(also_good)).place is Place.GRANTED


async def test_one_that_the_store_fails_does_not_fail_those_beside_it(url: str, path: Path) -> None:
    async with program(url) as one:
        await one.enqueue(1, "x")
        with the_turn(path):
            good = one.ask(2, "y")
            bad = one.ask(1, "y")  # a hold that was used before: the store refuses the row
            also_good = one.ask(3, "z")
        with pytest.raises(EngineError, match="UNIQUE"):
            await result(bad)
        assert (await result(good)).place is (await result(also_good)).place is Place.GRANTED
        with pytest.raises(EngineError, match="UNIQUE"):
            await result(one.ask(1, "y"))


async def test_an_operation_goes_on_when_nobody_waits_for_it(url: str, path: Path) -> None:
    async with program(url) as one, program(url) as other:
        with the_turn(path):
            answer = one.ask(1, "x")
            assert isinstance(answer, asyncio.Future)
            answer.cancel()
        assert await one.enqueue(2, "y") is Place.GRANTED
        assert await other.enqueue(1, "x", timeout=0) is Place.REFUSED


@on_either
@guarantee("cancelled", "nothing leaks", on=(SQLITE, DURABLE_SQLITE))
async def test_a_cancelled_attach_leaves_no_session(url: str, path: Path) -> None:
    async with opened(url) as engine:
        await attached(engine)
        with the_turn(path):
            attaching = asyncio.create_task(attached(engine))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            attaching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attaching
        await engine.create_node("/afterwards", NodeConfig(), exist_ok=False)
        assert len(await engine.list_sessions("/default")) == 1


@guarantee("stuck peer", "others proceed", on=SQLITE)
async def test_another_programs_transaction_is_waited_for(url: str, path: Path) -> None:
    async with program(url) as one:
        shell = sqlite3.connect(path, isolation_level=None)
        try:
            shell.execute("BEGIN IMMEDIATE")
            answer = one.ask(1, "x")
            assert isinstance(answer, asyncio.Future)
            await asyncio.sleep(0.05)  # it is tried again meanwhile
            assert not answer.done()
            shell.execute("ROLLBACK")
            assert (await answer).place is Place.GRANTED
        finally:
            shell.close()


@on_either
@guarantee("stuck peer", "kept", "others proceed", on=(SQLITE, DURABLE_SQLITE))
async def test_another_programs_endless_transaction_is_a_clear_error(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.store._LOCKED_TIMEOUT", 0.05)
    async with program(url) as one:
        shell = sqlite3.connect(path, isolation_level=None)
        try:
            shell.execute("BEGIN IMMEDIATE")
            with pytest.raises(EngineError, match="another program keeps"):
                await one.enqueue(1, "x")
            one.session.renew()
            assert one.heard.end is None
            shell.execute("ROLLBACK")
            assert await one.enqueue(2, "x") is Place.GRANTED
        finally:
            shell.close()


async def test_an_interrupt_inside_a_transaction_undoes_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(url) as one, program(url) as other:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("tenure.engines.sqlite.transaction.Transaction.commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                one.ask(1, "x")
        assert await other.enqueue(1, "x") is Place.GRANTED


@contextmanager
def one_error_after_a_commit(
    engine: SqliteEngine, error: type[BaseException], commit: int = 1
) -> Iterator[None]:
    """A block in which one commit of an engine is followed by an error at once."""
    tx = engine.store.tx
    execute, commits = tx.execute, 0

    def executed(sql: str, *arguments: Any) -> Any:
        nonlocal commits
        cursor = execute(sql, *arguments)
        commits += sql == "COMMIT"
        if sql == "COMMIT" and commits == commit:
            raise error
        return cursor

    tx.execute = executed
    try:
        yield
    finally:
        tx.execute = execute


async def test_an_interrupt_after_a_commit_does_not_silence_it(url: str) -> None:
    async with opened(url) as engine:
        holder, waiter = await attached(engine), await attached(engine)
        assert await holder.enqueue(1, "x") is Place.GRANTED
        assert await waiter.enqueue(1, "x") is Place.WAITING
        (waiting,) = (
            await engine.describe_semaphore("/default", "x", owners=False, waiters=True)
        ).waiters
        with one_error_after_a_commit(engine, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            holder.session.withdraw(1)
        await engine.evict("/default", "x", waiting.order_id)
        await waiter.heard.wait_for(lambda heard: 1 in heard.removals, "the removal")
        assert 1 in waiter.heard.grants  # before it


def refused(*_: object) -> int:
    raise sqlite3.OperationalError("out of memory")


@pytest.mark.parametrize("commit", [1, 2])
async def test_an_interrupt_after_a_commit_repeats_nothing_and_silences_nothing(
    url: str, commit: int
) -> None:
    async with opened(url) as engine:
        holder, waiter = await attached(engine), await attached(engine)
        assert await holder.enqueue(1, "x") is Place.GRANTED
        assert await waiter.enqueue(1, "x") is Place.WAITING
        committer = engine.store.committer
        committer._grouping = True  # what comes is put off
        released = holder.session.withdraw(1)
        asked = [waiter.ask(hold, "y") for hold in (2, 3)]
        failed = None if commit == 1 else committer.do(refused)  # so that each has a commit
        with (
            one_error_after_a_commit(engine, KeyboardInterrupt, commit),
            pytest.raises(KeyboardInterrupt),
        ):
            committer._flushing.run()
        assert await result(released) is Withdrawn.LEFT
        assert [(await result(each)).place for each in asked] == [Place.GRANTED, Place.WAITING]
        await waiter.granted(1)
        if failed is not None:
            with pytest.raises(EngineError, match="out of memory"):
                await result(failed)


@on_either
@pytest.mark.parametrize("put_off", [False, True])
async def test_an_error_after_a_commit_repeats_nothing(
    url: str, put_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        patch.undo()
        raise MemoryError

    async with opened(url) as engine:
        holder, waiter = await attached(engine), await attached(engine)
        assert await holder.enqueue(1, "x") is Place.GRANTED
        assert await waiter.enqueue(1, "x") is Place.WAITING
        engine.store.committer._grouping = put_off
        with monkeypatch.context() as patch:
            patch.setattr(engine.store._checkpointer, "left", 1)
            patch.setattr(engine.store._checkpointer, "start", fails)
            released = holder.session.withdraw(1)
            asked = [waiter.ask(hold, "y") for hold in (2, 3)]
            assert await result(released) is Withdrawn.LEFT
        assert [(await result(each)).place for each in asked] == [Place.GRANTED, Place.WAITING]
        await waiter.granted(1)


async def test_a_turn_that_cannot_be_given_back_denies_no_result(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(f"{url}?durability=full") as engine:
        one, turn = await attached(engine), engine.store.turn

        def fails() -> None:
            patch.undo()
            turn.release()
            raise OSError("no locks available")

        with monkeypatch.context() as patch:
            patch.setattr(turn, "release", fails)
            assert await one.enqueue(1, "x") is Place.GRANTED
        assert await one.enqueue(2, "x", timeout=0) is Place.REFUSED


# A turn that does not end

TAKES_THE_TURN = """
import os, sys, time
from tenure.engines.sqlite.transaction import Turn
turn = Turn(sys.argv[1], 0o600)
turn.take()
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_process_stopped_in_its_turn(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_THE_TURN, f"{path}.tenure/turn.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield process
        finally:
            process.kill()


@on_either
@guarantee("stuck peer", "kept", "others proceed", on=(SQLITE, DURABLE_SQLITE))
async def test_a_process_stopped_in_its_turn_is_named_and_costs_nobody_a_lease(
    url: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tenure.sqlite")
    async with program(url, window=2) as one, program(url) as other:
        await one.enqueue(1, "x")
        with a_process_stopped_in_its_turn(path) as stopped:
            one.session.renew()  # that process may have been slow to start
            answer = other.ask(1, "x")
            for _ in range(6):
                await asyncio.sleep(0.5)  # longer than the window, all in all
                one.session.renew()
            assert len(one.heard.proofs) == 8, "the heartbeat needs no turn"
            assert one.heard.end is None
            (warning,) = [each for each in caplog.records if each.name == "tenure.sqlite"]
            assert f"process {stopped.pid} has kept the turn" in warning.getMessage()
            engine: Any = other.session._engine
            described = await engine.list_semaphores("/default", owners=True, waiters=False)
            assert [each.name for each in described] == ["x"], "reading needs no turn"
        assert (await result(answer)).place is Place.WAITING
        await one.withdraw(1)
        await other.granted(1)


@on_either
async def test_a_timeout_behind_a_stopped_turn_names_the_process(url: str, path: Path) -> None:
    async with tenure.connect(f"{url}{'&' if '?' in url else '?'}answer_timeout=1") as client:
        mutex = client.mutex("m")
        await (await mutex.lock()).release()
        with a_process_stopped_in_its_turn(path) as stopped:
            told = f"because process {stopped.pid} has kept the turn at "
            for call in (mutex.lock(timeout=1), mutex.try_lock()):
                with pytest.raises(tenure.AcquireTimeout, match=told) as late:
                    await call
                assert isinstance(late.value.__cause__, tenure.EngineUnavailable)
            with pytest.raises(
                tenure.EngineUnavailable, match=told
            ):  # behind what it has asked for
                await mutex.inspect()
        async with mutex.lock(timeout=30) as lease:
            assert lease.held


@guarantee("stuck peer", "others proceed", on=SQLITE)
async def test_an_engine_closed_behind_a_stopped_turn_says_so_and_lets_go(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.engine._LEAVING", 0.1)
    async with program(url) as other, opened(url) as engine:
        one = await attached(engine)
        await one.enqueue(1, "x")
        assert await other.enqueue(1, "x") is Place.WAITING
        with a_process_stopped_in_its_turn(path) as stopped:
            answer = one.ask(2, "y")
            with pytest.raises(EngineError, match=f"process {stopped.pid}"):
                await engine.aclose()
            with pytest.raises(EngineError, match=f"process {stopped.pid}"):
                await result(answer)
        await other.granted(1)  # of the death of the engine nobody was told but by its lock


async def test_the_waiting_thread_lets_go_of_a_turn_that_comes_too_late(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenure.engines.sqlite.engine._LEAVING", 0.01)
    async with opened(url) as engine:
        one = await attached(engine)
        with the_turn(path):
            one.ask(1, "x")
            with pytest.raises(EngineError):
                await engine.aclose()
            thread = engine.store.committer._thread
            assert thread.alive
        await asyncio.to_thread(thread.join)
    async with program(url) as other:
        assert await other.enqueue(1, "x") is Place.GRANTED


async def test_news_of_a_request_counts_before_its_place_is_known(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(url) as other, opened(url) as engine:
        one = await attached(engine)
        await other.enqueue(1, "x")
        committer = engine.store.committer
        committed, done = asyncio.Event(), committer._done
        reports: list[Any] = []

        def not_yet(*report: Any) -> None:
            reports.append(report)
            committed.set()

        monkeypatch.setattr(committer, "_done", not_yet)
        with the_turn(path):
            answer = one.ask(1, "x")
            await asyncio.sleep(0.01)  # it is handed to the thread
        await committed.wait()
        await other.withdraw(1)
        await one.granted(1)
        (report,) = reports
        done(*report)
        assert (await result(answer)).place is Place.WAITING
        assert not one.heard.broken
        assert await other.enqueue(2, "x", timeout=0) is Place.REFUSED
        await one.withdraw(1)
        assert await other.enqueue(3, "x", timeout=0) is Place.GRANTED


async def test_what_comes_of_an_operation_after_the_engine_was_closed_is_told_to_nobody(
    url: str, path: Path
) -> None:
    async with program(url) as other, opened(url) as engine:
        one = await attached(engine)
        with the_turn(path):
            answer = one.ask(1, "x")
            await asyncio.sleep(0.01)
        engine._release(EngineError("gone"), left=False)
        with pytest.raises(EngineError, match="gone"):
            await result(answer)
        assert await other.enqueue(1, "x", timeout=0) is Place.GRANTED


@pytest.mark.parametrize("how", ["close", "detach"])
async def test_a_session_that_ends_after_its_caller_was_cancelled_frees_its_heartbeat(
    url: str, how: str
) -> None:
    async with opened(url) as here, opened(url) as other:
        session = (await attached(here, liveness="window")).session
        turn = other.store.turn
        assert turn.try_take()
        leaving = asyncio.create_task(getattr(session, how)())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        turn.release()
        await here.create_node("/n", NodeConfig(), exist_ok=False)  # after it
        await asyncio.sleep(0)
        assert (await attached(here)).session.slot == session.slot
