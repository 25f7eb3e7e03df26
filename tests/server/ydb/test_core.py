"""The conversation by itself: what it says when answers and news come late, and in any order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenure.errors import EngineError
from tenure.server.limits import Limits
from tenure.server.ydb.core import Conversation
from tenure.server.ydb.messages import Request, Response, Status
from tenure.server.ydb.requests import FOREVER
from tests.server.ydb.parties import (
    ACQUIRED,
    NODE,
    PENDING,
    acquire,
    kinds,
    news,
    parties,
    release,
)

# --- what comes while something else goes on


async def test_a_grant_that_comes_before_the_answer_to_the_acquire_is_told_once() -> None:
    engine, (owner, waiter) = await parties(2)
    await owner.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await owner.answer_all()
    await waiter.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await owner.ask(**release(2))
    await news()
    assert waiter.heard() == []
    await waiter.answer_all()
    (said,) = waiter.heard()
    assert said.acquire_semaphore_result.acquired
    await engine.aclose()


async def test_a_grant_on_the_way_while_the_waiter_is_released_is_given_back_untold() -> None:
    engine, (owner, waiter) = await parties(2)
    await owner.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await waiter.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await owner.answer_all()
    await waiter.answer_all()
    waiter.heard()
    await owner.ask(**release(2))
    await waiter.ask(**release(2))
    await news()
    await waiter.answer_all()
    aborted, released = waiter.heard()
    assert aborted.acquire_semaphore_result.status == Status.ABORTED
    assert released.release_semaphore_result.released
    await engine.aclose()


async def test_a_waiter_granted_while_it_asks_again_owns_for_the_new_question() -> None:
    engine, (owner, waiter) = await parties(2)
    await owner.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await waiter.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await owner.answer_all()
    await waiter.answer_all()
    waiter.heard()
    await waiter.ask(**acquire(2, ephemeral=True, count=2**64 - 1, data=b"new"))
    await owner.ask(**release(2))
    await news()
    await waiter.answer_all()
    old, new = (each.acquire_semaphore_result for each in waiter.heard())
    assert (old.req_id, old.status) == (1, Status.ABORTED)
    assert (new.req_id, new.acquired) == (2, True)
    await engine.aclose()


async def test_a_waiter_that_is_gone_when_it_asks_again_joins_anew() -> None:
    engine, (owner, waiter) = await parties(2)
    await owner.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await waiter.ask(**acquire(1, ephemeral=True, count=2**64 - 1))
    await owner.answer_all()
    await waiter.answer_all()
    waiter.heard()
    (described,) = await engine.list_semaphores(NODE, owners=True, waiters=True)
    assert await engine.evict(NODE, "m", described.waiters[0].order_id)
    await waiter.ask(**acquire(2, ephemeral=True, count=2**64 - 1))
    await news()
    await waiter.answer_all()
    said = waiter.heard()
    assert kinds(said) == [ACQUIRED, PENDING]
    assert said[0].acquire_semaphore_result.status == Status.ABORTED
    assert said[1].acquire_semaphore_pending.req_id == 2
    await engine.aclose()


async def test_an_owner_that_is_evicted_is_told_nothing_and_has_nothing() -> None:
    engine, (owner,) = await parties(1)
    await owner.ask(**acquire(1, ephemeral=True))
    await owner.answer_all()
    owner.heard()
    (described,) = await engine.list_semaphores(NODE, owners=True, waiters=True)
    assert await engine.evict(NODE, "m", described.owners[0].order_id)
    await news()
    assert owner.heard() == []
    await owner.ask(**release(2))
    await owner.answer_all()
    (said,) = owner.heard()
    assert not said.release_semaphore_result.released
    await engine.aclose()


async def test_an_owner_that_is_evicted_has_nothing_to_release_before_it_is_told() -> None:
    engine, (owner,) = await parties(1)
    await owner.ask(**acquire(1, ephemeral=True))
    await owner.answer_all()
    owner.heard()
    (described,) = await engine.list_semaphores(NODE, owners=True, waiters=True)
    assert await engine.evict(NODE, "m", described.owners[0].order_id)
    await owner.ask(**release(2))
    await owner.answer_all()
    (said,) = owner.heard()
    assert not said.release_semaphore_result.released
    await engine.aclose()


async def test_a_store_that_fails_fails_one_request_and_not_the_stream() -> None:
    engine, (client,) = await parties(1)
    failing = {
        "acquire": acquire(1, ephemeral=True),
        "create": {"create_semaphore": Request.CreateSemaphore(req_id=2, name="s", limit=1)},
        "update": {"update_semaphore": Request.UpdateSemaphore(req_id=3, name="s")},
        "delete": {"delete_semaphore": Request.DeleteSemaphore(req_id=4, name="s")},
        "describe": {"describe_semaphore": Request.DescribeSemaphore(req_id=5, name="s")},
    }
    for request in failing.values():
        client.conversation.received(Request(**request), 0.0)
        job = client.conversation.operations.popleft()
        client.conversation.refused(job, EngineError("the disk is full"))
    said = client.heard()
    statuses = [getattr(each, each.WhichOneof("response")).status for each in said]
    assert statuses == [Status.INTERNAL_ERROR] * len(failing)
    assert not client.conversation.over
    await engine.aclose()


# --- pings


def talking() -> Conversation:
    made = Conversation(NODE, Limits(), None, None, None)  # type: ignore[arg-type]
    made.started(1, 30_000, 1, 7)
    made.replies.clear()
    return made


def test_a_pong_waits_for_a_proof_that_is_younger_than_the_ping() -> None:
    conversation = talking()
    conversation.received(Request(ping=Request.PingPong(opaque=5)), now=10.0)
    assert conversation.renew
    conversation.proven(9.9)
    assert conversation.replies == []
    conversation.proven(10.0)
    assert conversation.replies == [Response(pong=Response.PingPong(opaque=5))]
    conversation.proven(11.0)
    assert len(conversation.replies) == 1


def test_of_pings_without_end_so_many_are_remembered() -> None:
    conversation = talking()
    for opaque in range(1000):
        conversation.received(Request(ping=Request.PingPong(opaque=opaque)), now=1.0)
    conversation.proven(2.0)
    assert [each.pong.opaque for each in conversation.replies] == list(range(984, 1000))


def test_a_tick_with_the_ping_before_unanswered_is_the_end() -> None:
    conversation = talking()
    conversation.received(Request(pong=Request.PingPong(opaque=7)), now=1.0)
    conversation.tick(8)
    conversation.received(Request(ping=Request.PingPong(opaque=8)), now=1.0)
    conversation.tick(9)
    assert conversation.replies[-1].ping.opaque == 9
    conversation.tick(10)
    assert conversation.replies[-1].failure.status == Status.TIMEOUT
    said = len(conversation.replies)
    conversation.received(Request(ping=Request.PingPong(opaque=5)), now=1.0)
    conversation.proven(2.0)
    conversation.tick(11)
    assert len(conversation.replies) == said


# --- anything, in any order

NAMES = st.sampled_from(["a", "b"])
STEPS = st.one_of(
    st.tuples(
        st.just("acquire"),
        NAMES,
        st.integers(0, 4),
        st.sampled_from([0, FOREVER]),
        st.sampled_from([b"", b"x"]),
        st.booleans(),
    ),
    st.tuples(st.just("release"), NAMES),
    st.tuples(st.just("create"), NAMES, st.integers(0, 3)),
    st.tuples(st.just("update"), NAMES, st.sampled_from([b"", b"x", b"y"])),
    st.tuples(st.just("delete"), NAMES, st.booleans()),
    st.tuples(st.just("describe"), NAMES, st.booleans(), st.booleans()),
    st.tuples(st.just("answer")),
    st.tuples(st.just("news")),
)


def request_of(step: tuple[Any, ...], asked: int) -> dict[str, Any]:
    match step:
        case "acquire", name, count, timeout, data, ephemeral:
            return acquire(
                asked, name, count, timeout_millis=timeout, data=data, ephemeral=ephemeral
            )
        case "release", name:
            return release(asked, name)
        case "create", name, limit:
            ask: Any = Request.CreateSemaphore(req_id=asked, name=name, limit=limit)
        case "update", name, data:
            ask = Request.UpdateSemaphore(req_id=asked, name=name, data=data)
        case "delete", name, force:
            ask = Request.DeleteSemaphore(req_id=asked, name=name, force=force)
        case "describe", name, data, owners:
            ask = Request.DescribeSemaphore(
                req_id=asked, name=name, watch_data=data, watch_owners=owners
            )
        case _:
            raise AssertionError(step)
    return {f"{step[0]}_semaphore": ask}


class Listener:
    """What a client may rely on, whatever it asks and however late the answers come."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}  # request id -> the kind of what was asked
        self.waits: dict[int, str] = {}  # acquires without a result -> the name
        self.watches: set[int] = set()

    def asks(self, asked: int, step: tuple[Any, ...]) -> None:
        self.open[asked] = step[0]
        if step[0] == "acquire":
            self.waits[asked] = step[1]

    def hears(self, said: Any, releases: dict[int, str]) -> None:
        kind = said.WhichOneof("response")
        what = getattr(said, kind)
        asked = what.req_id
        if asked in self.open:
            assert asked == min(self.open), "answered before an earlier request"
        if kind == PENDING:
            assert self.open.pop(asked) == "acquire", "a Pending for what is none, or the second"
            assert asked in self.waits, "a Pending after the result"
        elif kind == ACQUIRED:
            assert asked in self.waits, "a second result"
            del self.waits[asked]
            self.open.pop(asked, None)
        elif kind == "describe_semaphore_changed":
            assert asked in self.watches, "a Changed that nobody has asked for"
            self.watches.remove(asked)
        else:
            assert self.open.pop(asked) == kind.partition("_")[0], "an answer too many"
            if kind == "describe_semaphore_result" and what.watch_added:
                self.watches.add(asked)
            if kind == "release_semaphore_result":
                late = [each for each, name in self.waits.items() if name == releases[asked]]
                assert all(each > asked for each in late), "released before it was aborted"


@pytest.mark.no_debug
@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), STEPS), max_size=60))
async def test_whatever_is_asked_each_question_has_one_answer(
    steps: list[tuple[int, tuple[Any, ...]]],
) -> None:
    engine, clients = await parties(3)
    listeners = [Listener() for _ in clients]
    releases: dict[int, str] = {}

    def listen() -> None:
        for client, listener in zip(clients, listeners, strict=True):
            for said in client.heard():
                listener.hears(said, releases)

    for asked, (who, step) in enumerate(steps, 1):
        client = clients[who]
        if step[0] == "answer":
            await client.answer_one()
        elif step[0] == "news":
            await news()
            client.conversation.report_changes()
            await client.work()
        else:
            listeners[who].asks(asked, step)
            if step[0] == "release":
                releases[asked] = step[1]
            await client.ask(**request_of(step, asked))
        listen()
    for _ in range(3):  # one may have the next one granted, and that one a change told
        for client in clients:
            await client.answer_all()
            await news()
            client.conversation.report_changes()
            await client.answer_all()
        listen()

    described = await engine.list_semaphores(NODE, owners=True, waiters=True)
    for client, listener in zip(clients, listeners, strict=True):
        assert listener.open == {}, "unanswered"
        waiting = {
            semaphore.name
            for semaphore in described
            for request in semaphore.waiters
            if request.session_id == client.session.id
        }
        assert sorted(listener.waits.values()) == sorted(waiting)
        assert client.conversation.unanswered == 0
        client.conversation.leave()
    await engine.aclose()
