"""The order in which a conversation answers, whatever the store answers first."""

from __future__ import annotations

from tenure.server.ydb.messages import Request, Status
from tests.server.ydb.parties import (
    acquire,
    kinds,
    news,
    parties,
    release,
)


async def test_an_answer_that_comes_first_waits_for_the_earlier_requests() -> None:
    engine, (client,) = await parties(1)
    await client.ask(**acquire(1, "a", ephemeral=True))
    await client.ask(**acquire(2, "b", ephemeral=True))
    client.done.rotate(1)
    await client.answer_one()
    assert client.heard() == []
    assert client.conversation.unanswered == 2
    await client.answer_one()
    said = client.heard()
    assert [each.acquire_semaphore_result.req_id for each in said] == [1, 2]
    assert client.conversation.unanswered == 0
    await engine.aclose()


async def test_a_grant_is_told_after_the_replies_that_were_ready_before_it() -> None:
    engine, (owner, waiter) = await parties(2)
    for each in (owner, waiter):
        await each.ask(**acquire(1, count=2**64 - 1, ephemeral=True))
        await each.answer_all()
    waiter.heard()
    await waiter.ask(**acquire(2, "slow", ephemeral=True))
    await waiter.ask(**acquire(3, "other", ephemeral=True))
    await owner.ask(**release(2))
    await news()
    assert waiter.heard() == []
    await waiter.answer_all()
    said = waiter.heard()
    assert [each.acquire_semaphore_result.req_id for each in said] == [2, 3, 1]
    await engine.aclose()


async def test_descriptions_are_read_one_at_a_time() -> None:
    engine, (client,) = await parties(1)
    for name in ("a", "b"):
        await client.ask(describe_semaphore=Request.DescribeSemaphore(req_id=ord(name), name=name))
    assert len(client.done) == 1  # the reply to the second one cannot wait for the first
    await client.answer_all()
    said = client.heard()
    assert [each.describe_semaphore_result.req_id for each in said] == [ord("a"), ord("b")]
    await engine.aclose()


async def test_a_failure_ends_what_waits_for_its_turn_or_for_the_store() -> None:
    engine, (owner, waiter) = await parties(2)
    await owner.ask(**acquire(1, count=2**64 - 1, ephemeral=True))
    await waiter.ask(**acquire(1, count=2**64 - 1, ephemeral=True))
    await owner.answer_all()
    await waiter.answer_all()
    await waiter.ask(**acquire(2, count=2**64 - 1, ephemeral=True, timeout_millis=0))
    await waiter.ask(**acquire(3, "other", ephemeral=True))
    waiter.heard()
    waiter.conversation.fail(Status.UNAVAILABLE, "going away")
    await news()
    await waiter.answer_all()
    assert kinds(waiter.heard()) == ["failure"]
    assert waiter.conversation.unanswered == 0
    await engine.aclose()
