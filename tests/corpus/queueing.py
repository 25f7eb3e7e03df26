"""Pains of those who stand in line: overtaken, stuck behind the dead, let in where nobody fits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

import tenure
from tenure._client.request import Request as ClientRequest
from tenure.core import rules
from tenure.core.node import StoredRequest, StoredSemaphore, StoredSession
from tenure.core.store import Deadlines, Store
from tenure.engines.etcd import semaphores as semaphores_of_etcd
from tenure.engines.etcd.attachment import EtcdAttachment
from tenure.engines.etcd.requests import Waiting as WaitingOfEtcd
from tenure.engines.postgresql.handoff import Handoff
from tenure.engines.sqlite import expiry, nodes, participants, requests
from tenure.engines.sqlite.transaction import ENDED, Transaction
from tests.corpus import etcd
from tests.corpus.lua import in_lua
from tests.corpus.rows import does_nothing, replacing, row, together
from tests.corpus.sql import in_sql
from tests.corpus.subjects import Scene


@row(
    8,
    replacing(ClientRequest, "fail", does_nothing),
    not_on={"dflockd": "who waits has no session that is over: it joins the queue anew"},
    shows=("administrator", ("loss reported",)),
)
async def a_waiter_learns_that_its_session_is_over(scene: Scene) -> None:
    async with scene.client() as client, client.mutex("x").lock():
        session = await client.session(description="victim")
        waiting = asyncio.create_task(session.mutex("x").lock())
        await scene.queued("x", 2)
        await scene.end_sessions("victim")
        with pytest.raises(tenure.SessionExpired):
            await scene.soon(waiting)


@row(
    12,
    {
        # By the hour, so that no slow machine makes them rise.
        "": replacing(rules, "next_order_id", lambda last, seen, wall: int(wall // 3600)),
        "redis": in_lua("math.max(order + 1, now)", "math.floor(now / 3.6e9)"),
        "postgresql": in_sql(
            "    IF id > above AND id > wall - 1000000 THEN",
            "    id := wall / 3600000000; IF true THEN",
        ),
        "etcd": replacing(EtcdAttachment, "order_id", etcd.numbered_by_the_hour),
    },
    not_on={"dflockd": "it has one node; tests/corpus/lines.py asks the rest"},
    shows=("none", ("tokens rise",)),
)
async def fencing_tokens_rise_over_names_nodes_and_sessions(scene: Scene) -> None:
    tokens = []
    async with scene.client() as client:
        await client.create_node("/other")
        for path, name in itertools.product(("/default", "/other"), ("a", "b", "a")):
            async with client.session(path) as session, session.mutex(name).lock() as lease:
                tokens.append(lease.fencing_token)
    assert tokens == sorted(set(tokens))


def _grant_the_last(self: StoredSemaphore, now: float) -> StoredRequest | None:
    last, first = self.last, self.first_waiting
    if last is None or first is None or last is first:
        return _grant_next(self, now)
    first.count, last.count = last.count, first.count
    first.session, last.session = last.session, first.session
    first.request_id, last.request_id = last.request_id, first.request_id
    for each in (first, last):
        each.session.requests[each.request_id] = each
    return _grant_next(self, now)


_grant_next = StoredSemaphore.grant_next


def _grant_after_sending_the_first_to_the_end(
    tx: Transaction, node: int, name: str, *level: Any
) -> int:
    waiting = "FROM requests WHERE node = :node AND name = :name AND granted_at IS NULL"
    tx.execute(
        f"UPDATE requests SET order_id = (SELECT 1 + max(order_id) {waiting}) WHERE node = :node "
        f"AND name = :name AND order_id = (SELECT min(order_id) {waiting})",
        {"node": node, "name": name},
    )
    return _grant_next_row(tx, node, name, *level)


_grant_next_row = requests._grant_next


@row(
    15,
    {
        "memory": replacing(StoredSemaphore, "grant_next", _grant_the_last),
        "sqlite": replacing(requests, "_grant_next", _grant_after_sending_the_first_to_the_end),
        "redis": in_lua("call('ZPOPMIN', m.waiters)", "call('ZPOPMAX', m.waiters)"),
        "postgresql": together(
            in_sql(
                "queue = its_queue AND order_id > latest ORDER BY order_id LIMIT 1",
                "queue = its_queue AND order_id > latest ORDER BY order_id DESC LIMIT 1",
            ),
            replacing(Handoff, "released", lambda self, number: None),
        ),
        "etcd": replacing(WaitingOfEtcd, "granted", etcd.grant_the_last),
    },
    shows=("none", ("in order",)),
)
async def who_comes_first_is_served_first(scene: Scene) -> None:
    served: list[int] = []

    async def contend(client: tenure.Client, number: int) -> None:
        async with client.mutex("x").lock():
            served.append(number)

    async with scene.client() as client:
        async with client.mutex("x").lock():
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(contend(client, number)))
                await scene.queued("x", number + 2)
        await scene.soon(asyncio.gather(*tasks))
    assert served == [0, 1, 2, 3, 4]


def _leave_requests_behind(self: Store, session: StoredSession, why: str | None) -> dict[Any, Any]:
    waiting = [each for each in session.requests.values() if each.granted_at is None]
    for each in waiting:
        del session.requests[each.request_id]
    return _remove_session(self, session, why)


_remove_session = Store._remove_session


def _leave_waiting_rows_behind(tx: Transaction, over: Iterable[Any], why: str | None) -> None:
    for one in over:
        waits = "SELECT 1 FROM requests WHERE session = ? AND granted_at IS NULL"
        if tx.execute(waits, one[:1]).fetchone() is None:
            _remove_sessions(tx, [one], why)
        elif why is not None:
            tx.send(one[2], ENDED, one[0], why=why)


_remove_sessions = requests.remove_sessions


@row(
    16,
    {
        "memory": replacing(Store, "_remove_session", _leave_requests_behind),
        "sqlite": together(
            replacing(requests, "remove_sessions", _leave_waiting_rows_behind),
            replacing(participants, "remove_sessions", _leave_waiting_rows_behind),
        ),
        "redis": in_lua(
            "if r then\n        leave(m, order, r)",
            "if r and r.granted ~= '0' then\n        leave(m, order, r)",
        ),
        "postgresql": in_sql(
            "            WHERE y.queue = q.id AND y.session = ANY (dead)\n        LOOP",
            "            WHERE y.queue = q.id AND y.session = ANY (dead)\n"
            "                AND y.order_id <= q.last_owner LOOP",
        ),
        "etcd": etcd.plant_requests_under_no_lease,
    },
    not_on={"dflockd": "tests/corpus/lines.py asks it, by cutting connections off"},
    shows=("administrator", ("in order", "others proceed")),
)
async def a_dead_waiter_is_passed_over(scene: Scene) -> None:
    async with scene.client() as client:
        dying = await client.session(description="victim")
        async with client.mutex("x").lock():
            first = asyncio.create_task(dying.mutex("x").lock())
            await scene.queued("x", 2)
            second = asyncio.create_task(client.mutex("x").lock())
            await scene.queued("x", 3)
            await scene.end_sessions("victim")
            await asyncio.wait([first])
            assert isinstance(first.exception(), tenure.SessionExpired)
        lease = await scene.soon(second)
        await lease.release()


def _add_but_for_sessions(self: Deadlines, when: float, entry: Any) -> None:
    if isinstance(entry, StoredRequest):
        _add(self, when, entry)


_add = Deadlines.add


@row(
    17,
    {
        "memory": replacing(Deadlines, "add", _add_but_for_sessions),
        "sqlite": replacing(expiry, "is_silent", lambda tx, suspect: False),
        "redis": in_lua("tonumber(x[2] or math.huge), ", "math.huge, "),
        "postgresql": in_sql(
            "clock_timestamp() - s.seen > make_interval(secs => s.recovery_window)", "false"
        ),
        "etcd": etcd.plant_requests_under_no_lease,
    },
    not_on={"dflockd": "a request has one token; tests/corpus/lines.py asks for three"},
    shows=("cut off", ("others proceed",)),
)
async def permits_of_a_silent_session_return_after_its_window(scene: Scene) -> None:
    client, engine = scene.slow(1)
    async with scene.client() as other, client:
        pool = other.semaphore("pool")
        await pool.create(limit=3)
        session = await client.session(recovery_window=1)
        _held = await session.semaphore("pool").acquire(3)
        engine.cut()
        lease = await pool.acquire(3, timeout=1 + scene.patience)
        await lease.release()
        engine.mend()


def _create_whatever_is_there(self: Store, *arguments: Any, **named: Any) -> None:
    try:
        _create(self, *arguments, **named)
    except tenure.SemaphoreExists:
        return


_create = Store.create


def _create_row_whatever_is_there(tx: Transaction, *arguments: Any) -> None:
    try:
        _create_row(tx, *arguments)
    except tenure.SemaphoreExists:
        return


_create_row = nodes.create_semaphore


@row(
    18,
    {
        "memory": replacing(Store, "create", _create_whatever_is_there),
        "sqlite": replacing(nodes, "create_semaphore", _create_row_whatever_is_there),
        "redis": in_lua("return {'exists', m.limit}", "return {'ok'}"),
        "postgresql": in_sql("(args ->> 3)::boolean AND q.max_count =", "true OR q.max_count ="),
        "etcd": replacing(semaphores_of_etcd, "create", etcd.create_whatever_is_there),
    },
    not_on={"dflockd": "a limit lies with the requests; tests/corpus/lines.py asks its users"},
)
async def another_limit_is_refused(scene: Scene) -> None:
    async with scene.client() as client:
        await client.semaphore("pool").create(limit=4)
        with pytest.raises(tenure.SemaphoreExists) as error:
            await client.semaphore("pool").create(limit=5, exist_ok=True)
        assert error.value.limit == 4
