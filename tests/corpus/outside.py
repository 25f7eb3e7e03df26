"""Pains beside the lock itself: child processes, forks, watches, and what nobody can see."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import tenure
from tenure import fork
from tenure._client.listeners import Listeners
from tenure.core.store import CHANGED, Store
from tenure.engines.sqlite.watches import SqliteWatches
from tenure.events import Acquired, Released
from tests.cli import programs
from tests.cli.programs import Tenure, alive, listener, pid_of
from tests.corpus import etcd
from tests.corpus.lua import in_lua
from tests.corpus.rows import does_nothing, replacing, row, together
from tests.corpus.sql import in_sql
from tests.corpus.subjects import Scene
from tests.primitives.helpers import turns

_HERE = Path(__file__).parent
_WITH_A_DEAF_GUARDIAN = [sys.executable, str(_HERE / "deaf_guardian.py"), "tenure"]


@row(
    19,
    replacing(programs, "TENURE", _WITH_A_DEAF_GUARDIAN),
    not_on={"memory": "a command line has nobody to share it with"},
    real_time=True,
    shows=("stopped", ("one owner", "others proceed")),
)
async def a_command_is_dead_before_another_has_the_lock(scene: Scene) -> None:
    folder = TemporaryDirectory(prefix="tenure-")
    tenure = Tenure(Path(folder.name))
    tenure.environment = {**tenure.environment, "TENURE_URL": scene.url}
    try:
        window = ("--recovery-window", "2.5", "--grace", "0.2")
        running = await asyncio.to_thread(tenure.start, *listener(*window))
        command = pid_of(await asyncio.to_thread(running.line))
        running.signal(programs.STOP)
        other = ("run", "--lock", "nightly", "--timeout", f"{2.5 + scene.patience:g}", "--", "true")
        assert (await asyncio.to_thread(tenure, *other)).returncode == 0
        assert not alive(command)
        running.signal(programs.CONT)
        code, said = await asyncio.to_thread(running.end)
        assert (code, said.count("\n")) == (79, 1)
    finally:
        tenure.close()
        folder.cleanup()


@row(20, replacing(fork, "check", does_nothing), shows=("fork", ("one owner",)))
async def a_forked_child_gets_a_clear_error(scene: Scene) -> None:
    async with scene.client() as client:
        lease = await client.mutex("x").lock()
        parent = fork.generation
        fork.generation = parent + 1  # what the fork's hook does in the child
        try:
            with pytest.raises(tenure.Misuse, match="connect"):
                lease.held  # noqa: B018  asking is what is tested
            with pytest.raises(tenure.Misuse, match="connect"):
                await client.mutex("x").try_lock()
        finally:
            fork.generation = parent


def _plant_forgetful_watches(patch: pytest.MonkeyPatch) -> None:
    told = 0

    def tell_once(self: Store, *arguments: Any, **named: Any) -> None:
        nonlocal told
        before = len(self.effects)
        changed(self, *arguments, **named)
        told += sum(each[1] == CHANGED for each in self.effects[before:])
        if told > 1:
            del self.effects[before:]

    changed = Store._changed
    patch.setattr(Store, "_changed", tell_once)


def _plant_forgetful_news(patch: pytest.MonkeyPatch) -> None:
    told = 0

    def tell_once(self: SqliteWatches, *arguments: Any) -> None:
        nonlocal told
        told += 1
        if told == 1:
            tell(self, *arguments)

    tell = SqliteWatches.changed
    patch.setattr(SqliteWatches, "changed", tell_once)


@row(
    24,
    {
        "memory": _plant_forgetful_watches,
        "sqlite": _plant_forgetful_news,
        "redis": in_lua("if watched then", "if watched and call('INCR', P .. 'told') == 1 then"),
        "postgresql": together(
            in_sql("IF changed <> '' AND q.watch_channel", "IF false AND q.watch_channel"),
            in_sql("data_changes + (changed IN ('d', 'b'))::integer", "least(data_changes + 1, 1)"),
        ),
        "etcd": etcd.plant_forgetful_watches,
    },
    not_on={"dflockd": "it has no watches"},
)
async def a_watch_ends_in_the_true_state(scene: Scene) -> None:
    async with scene.client() as client:
        config = client.semaphore("config")
        await config.create(limit=1, data=b"0")

        async def last() -> bytes:
            async with config.watch(data=True) as states:
                async for state in states:
                    if state.data == b"9":
                        return state.data
            raise AssertionError("a watch ended by itself")

        watching = asyncio.create_task(last())
        for number in range(1, 10):
            await turns(number % 4)
            await config.update(b"%d" % number)
        assert await scene.soon(watching) == b"9"


@row(
    25,
    replacing(Listeners, "emit", does_nothing),
    not_on={"dflockd": "its protocol does not name holders and waiters"},
)
async def waiters_and_holders_are_listed_with_their_times(scene: Scene) -> None:
    async with scene.client() as client, client.events() as stream:
        session = await client.session(description="the nightly import")
        lease = await session.mutex("x").lock()
        waiting = asyncio.create_task(client.mutex("x").lock())
        await scene.queued("x", 2)
        owner, waiter = await scene.queue("x")
        if client.capabilities.descriptions:
            assert owner.session_description == "the nightly import"
        assert (owner.session_id, waiter.order_id > owner.order_id) == (session.id, True)
        await asyncio.sleep(0.02)
        await lease.release()
        await scene.soon(waiting)
        held, waited = [], []
        async with asyncio.timeout(scene.patience):
            async for event in stream:
                if isinstance(event, Released):
                    held.append(event.held_for)
                elif isinstance(event, Acquired):
                    waited.append(event.waited)
                    if len(waited) == 2:
                        break
        assert (held[0] >= 0.01, waited[1] >= 0.01) == (True, True)
