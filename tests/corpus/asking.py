"""Pains of those who ask: cancelled in the middle, told too much, told by the wrong thread."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._client import acquire
from tenure._client.request import Request
from tenure._client.session_core import SessionCore
from tenure.engines.sqlite.store import Committer
from tests.corpus.rows import does_nothing, replacing, row
from tests.corpus.subjects import Scene
from tests.primitives.helpers import is_held, this_task, turns


@row(
    3,
    replacing(Request, "withdraw_because", does_nothing),
    not_on={"dflockd": "tests/corpus/afar.py asks it, across a slow network"},
    shows=("cancelled", ("nothing leaks",)),
)
async def a_cancelled_acquire_leaves_nothing_in_the_queue(scene: Scene) -> None:
    for after in range(8):
        client, _ = scene.slow(2)
        async with client, client.session() as session:
            acquiring = asyncio.create_task(session.mutex("x").lock())
            await turns(after)
            acquiring.cancel()
            await asyncio.wait([acquiring])
            if not acquiring.cancelled():
                await acquiring.result().release()
            await turns()
            async with session.mutex("y").lock():  # the store has seen all that came before
                await scene.queued("x", 0)


async def leave_late(self: Request) -> None:
    await asyncio.sleep(0)
    await _leave(self)


_leave = Request.leave


@row(4, replacing(Request, "leave", leave_late), shows=("cancelled", ("nothing leaks",)))
async def a_cancelled_release_takes_effect(scene: Scene) -> None:
    client, _ = scene.slow(2)
    async with client:
        lease = await client.mutex("x").lock()
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await scene.queued("x", 0)


def _deal_out_answers(self: Committer) -> None:
    """Answer the callers that still wait, one after the other."""
    for operations, _ in self._finished:
        answers = [(each.result, each.error) for each in operations]
        for operation in operations:
            if operation.future is None or not operation.future.cancelled():
                operation.result, operation.error = answers.pop(0)
    _deliver(self)


_deliver = Committer._deliver


@row(
    5,
    {"sqlite": replacing(Committer, "_deliver", _deal_out_answers)},
    not_on={
        "memory": "it answers in the call itself: there is no command to cancel",
        "redis": "tests/corpus/afar.py asks it, across a slow network",
        "postgresql": "one statement is under way at a time, so an answer has one place to go",
        "etcd": "each command is a call of gRPC's, which matches answers to calls",
        "native": "tests/corpus/afar.py asks it, across a slow network",
        "dflockd": "tests/corpus/lines.py asks it, across a slow network",
        "ydb": "tests/corpus/afar.py asks it, across a slow network",
    },
)
async def after_a_cancelled_command_the_others_get_their_own_answers(scene: Scene) -> None:
    file = Path(scene.url.removeprefix("sqlite:///").partition("?")[0])
    async with scene.client() as client, client.session() as session:
        for limit, name in enumerate("abc", start=1):
            await session.semaphore(name).create(limit=limit)
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as others:
            others.execute("BEGIN IMMEDIATE")  # waits for a commit of ours to end
            commands = [
                asyncio.create_task(session.semaphore("a").update(b"new")),
                asyncio.create_task(session.semaphore("b").describe()),
                asyncio.create_task(session.semaphore("c").describe()),
            ]
            await turns()
            commands[0].cancel()
            await turns()
            others.execute("ROLLBACK")
        await scene.soon(asyncio.wait(commands))
        answers = [None if each.exception() else each.result() for each in commands[1:]]
        assert [getattr(answer, "name", None) for answer in answers] == ["b", "c"]


@row(
    10,
    replacing(Request, "refused", lambda request, error: request.fail(error)),
    shows=("cut off", ("nothing leaks",)),
)
async def a_request_whose_answer_was_an_error_is_withdrawn(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with client:
        session = await client.session()
        engine.fail("enqueue", tenure.EngineError("the answer was lost"), done=True)
        with pytest.raises(tenure.EngineError):
            await session.mutex("x").lock()
        await scene.queued("x", 0)


async def _wait_in_the_thread(self: Request) -> None:
    threading.Event().wait(0.05)  # for what no other task can do meanwhile
    raise tenure.AcquireTimeout("not granted while it waited")


@row(21, replacing(Request, "change", _wait_in_the_thread), shows=("none", ("others proceed",)))
async def other_tasks_of_the_thread_run_while_one_waits(scene: Scene) -> None:
    async with scene.client() as client:
        lease = await client.mutex("x").lock()
        waiting = asyncio.create_task(client.mutex("x").lock())
        await scene.queued("x", 2)
        await lease.release()  # by a task of the thread in which the other waits
        assert is_held(await scene.soon(waiting))


def _request_again(self: SessionCore, *arguments: Any) -> Request:
    self._last_request_id = 0
    return _request(self, *arguments)


_request = SessionCore.request


@row(22, replacing(SessionCore, "request", _request_again), shows=("none", ("one owner",)))
async def two_tasks_of_a_session_are_two_requests(scene: Scene) -> None:
    async with scene.client() as client, client.session() as session:
        first = await session.mutex("x").lock()
        second = asyncio.create_task(session.mutex("x").lock())
        await scene.queued("x", 2)
        assert not second.done()
        await first.release()
        lease = await scene.soon(second)
        assert is_held(lease)
        assert not is_held(first)
        await lease.release()


async def _find_nothing(request: Request, mine: object) -> None:
    return None


@row(23, replacing(acquire, "_check_self_deadlock", _find_nothing))
async def re_entry_is_refused_at_once(scene: Scene) -> None:
    async with scene.client() as client, client.mutex("x").lock():
        with pytest.raises(tenure.SelfDeadlock):
            await scene.soon(client.mutex("x").lock())
    assert this_task().cancelling() == 0
