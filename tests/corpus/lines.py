"""The pains once more, over dflockd's protocol, where a hold lives and dies with its connection.

An administrator cannot tell whose a connection is, and sessions have no names there. What other
themes ask by ending a session is asked here by cutting its connections off.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tenure
from tenure._client import scope
from tenure._client.request import Request
from tenure.core import rules
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.engines.dflockd.request import DflockdRequest
from tenure.server.dflockd.locks import Locks
from tenure.wire import lines
from tests.corpus.rows import does_nothing, replacing, row
from tests.corpus.subjects import Scene
from tests.primitives.helpers import is_held

DFLOCKD = ("dflockd",)

DELAY = 0.05
"""Seconds that everything takes, in each direction, where answers are to be late."""


@row(1, replacing(scope.Scope, "trigger", does_nothing), on=DFLOCKD)
async def the_body_of_a_lease_that_went_with_its_connection_is_cancelled(scene: Scene) -> None:
    client, network = scene.afar()
    went_on = False
    async with client:

        async def hold() -> None:
            nonlocal went_on
            async with client.mutex("x").lock():
                network.refuse()
                await scene.in_vain()
                went_on = True

        with pytest.raises(tenure.LeaseLost):
            await hold()
        network.start()
    assert not went_on


def _match_with_who_still_waits(self: DflockdConnection, reply: Any, renewals: list[Any]) -> None:
    for expected in list(self._expected):
        request = getattr(expected.handler, "__self__", None)
        if not (isinstance(request, DflockdRequest) and request.answers.withdrawals):
            self._expected.remove(expected)
            self._expected.appendleft(expected)
            break
    _match(self, reply, renewals)


_match = DflockdConnection._match


@row(5, replacing(DflockdConnection, "_match", _match_with_who_still_waits), on=DFLOCKD)
async def the_reply_to_a_cancelled_request_goes_to_no_other(scene: Scene) -> None:
    client, network = scene.afar()
    async with client, client.session() as session:
        network.delay(DELAY)
        tasks = [asyncio.create_task(session.mutex(name).lock()) for name in "abc"]
        await asyncio.sleep(DELAY / 2)
        tasks[0].cancel()
        for name, lease in zip("bc", await scene.soon(asyncio.gather(*tasks[1:])), strict=True):
            (owner,) = await scene.queue(name)
            assert owner.order_id == lease.fencing_token
        await scene.queued("a", 0)
        network.delay(0)


@row(9, replacing(Request, "lose", does_nothing), on=DFLOCKD)
async def a_holder_whose_connection_is_cut_holds_no_more_after_a_reconnect(scene: Scene) -> None:
    client, network = scene.afar()
    async with scene.client() as other, client:
        session = await client.session()
        old = await session.mutex("x").lock()
        network.refuse()
        new = await scene.soon(other.mutex("x").lock())
        assert isinstance(await scene.soon(old.wait_lost()), tenure.LeaseLost)
        network.start()
        async with session.mutex("y").lock():  # it is there again
            assert is_held(new)
            assert not is_held(old)
        assert new.fencing_token > old.fencing_token


@row(
    12,
    # By the hour, so that no slow machine makes them rise.
    replacing(rules, "next_order_id", lambda last, seen, wall: int(wall // 3600)),
    on=DFLOCKD,
)
async def fencing_tokens_rise_over_names_and_programs(scene: Scene) -> None:
    tokens = []
    async with scene.client() as one, scene.client() as two:
        for client, name in ((one, "a"), (two, "b"), (two, "a"), (one, "b"), (one, "a")):
            async with client.session() as session, session.mutex(name).lock() as lease:
                tokens.append(lease.fencing_token)
    assert tokens == sorted(set(tokens))


@row(16, replacing(Locks, "leave", does_nothing), on=DFLOCKD)
async def a_waiter_whose_connection_has_died_is_passed_over(scene: Scene) -> None:
    dying, network = scene.afar()
    async with scene.client() as client, dying:
        async with client.mutex("x").lock():
            first = asyncio.create_task(dying.mutex("x").lock())
            await scene.queued("x", 2)
            second = asyncio.create_task(client.mutex("x").lock())
            await scene.queued("x", 3)
            network.refuse()  # it may have closed its sending side only, and still be there
        lease = await scene.soon(second)
        await lease.release()
        network.start()
        await (await scene.soon(first)).release()  # which has joined again, at the end


@row(17, replacing(Locks, "expire", does_nothing), on=DFLOCKD)
async def permits_of_a_silent_program_return_after_their_leases(scene: Scene) -> None:
    client, network = scene.afar()
    async with scene.client() as other, client:
        session = await client.session(recovery_window=1)
        for each in other, session:
            await each.semaphore("pool").create(limit=3)
        held = [await session.semaphore("pool").acquire() for _ in range(3)]
        network.stall()
        theirs = other.semaphore("pool")
        held += [await theirs.acquire(timeout=1 + scene.patience) for _ in range(3)]
        network.flow()


def _ask_with_the_limit_of_the_first(key: str, *terms: Any, limit: int | None = None) -> bytes:
    return _acquire(key, *terms, limit=limit and _limits.setdefault(key, limit))


_acquire = lines.acquire
_limits: dict[str, int] = {}


@row(18, replacing(lines, "acquire", _ask_with_the_limit_of_the_first), on=DFLOCKD)
async def a_peer_with_another_limit_is_refused(scene: Scene) -> None:
    async with scene.client() as one, scene.client() as two:
        await one.semaphore("pool").create(limit=4)
        await two.semaphore("pool").create(limit=5)
        async with one.semaphore("pool").acquire():
            with pytest.raises(tenure.InvalidArgument):
                await scene.soon(two.semaphore("pool").acquire())
