"""What a journal records of programs that use the public API."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import tenure
from tenure import blocking
from tenure.model import EPHEMERAL_LIMIT
from tenure.testing import VirtualClock, VirtualLoop
from tenure.testing.history import AppendOnly, Journal, Record, Request, load
from tenure.testing.history.records import (
    Called,
    Described,
    Gone,
    Granted,
    Held,
    Leaves,
    Observed,
    Queued,
    Refunds,
    Requested,
    Returned,
    Revokes,
    Shrinks,
    Takes,
    Took,
    Unobserved,
)

_stores = itertools.count()


@pytest.fixture
def records(loop_factory: Callable[[], VirtualLoop]) -> list[Record]:
    """What is recorded, in virtual time."""
    return []


@pytest.fixture
def journal(clock: VirtualClock, records: list[Record]) -> Journal:
    return Journal("a", records.append, now=clock.now)


@pytest.fixture
def url() -> str:
    return f"memory://journal-{next(_stores)}"


def kinds(records: list[Record]) -> list[type]:
    return [type(record) for record in records]


async def test_a_lock_is_recorded_from_asking_to_release(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client, client.session() as session:
        start = clock.now()
        async with journal.lock(session.mutex("m"), timeout=5.0) as request:
            await asyncio.sleep(1.0)
            assert request.lease is not None
            deadline, token = session.deadline, request.lease.fencing_token
    window = session.recovery_window
    assert records == [
        Requested(
            start, "a", "a-1", "/default", "m", EPHEMERAL_LIMIT, EPHEMERAL_LIMIT, window, 5.0
        ),
        Granted(start, "a-1", token, deadline),
        Held(start + 1.0, "a-1", deadline),
        Leaves(start + 1.0, "a-1"),
        Gone(start + 1.0, "a-1", "released", deadline),
    ]


async def test_deadlines_are_told_on_the_common_scale(
    url: str, clock: VirtualClock, records: list[Record]
) -> None:
    journal = Journal("a", records.append, now=lambda: 7.0, to_common=lambda local: local - 900.0)
    async with tenure.connect(url, clock=clock) as client, client.session() as session:
        async with journal.lock(session.mutex("m")) as request:
            request.sample()
        deadline = session.deadline - 900.0
    assert records[1:3] == [
        Granted(7.0, "a-1", records[1].order_id, deadline),  # type: ignore[union-attr]
        Held(7.0, "a-1", deadline),
    ]


async def test_a_wait_that_times_out_is_gone(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client, client.mutex("m").lock():
        with pytest.raises(tenure.AcquireTimeout):
            async with journal.lock(client.mutex("m"), timeout=2.0):
                raise AssertionError("nothing is held")
        async with journal.try_lock(client.mutex("m")) as request:
            assert request is None
    assert kinds(records) == [Requested, Gone] * 2
    assert [record.why for record in records if isinstance(record, Gone)] == ["timeout", "refused"]


async def test_who_cancels_says_so_first(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    mine: list[Request] = []

    async def hold(client: tenure.Client) -> None:
        async with journal.lock(client.mutex("m")) as request:
            mine.append(request)
            await asyncio.sleep(60.0)

    async with tenure.connect(url, clock=clock) as client:
        task = asyncio.create_task(hold(client))
        waiting = asyncio.create_task(hold(client))
        await asyncio.sleep(1.0)
        journal.leaves()
        waiting.cancel()
        task.cancel()
        await asyncio.wait([task, waiting])
        assert not mine[0].sample()
    whys = {record.request: record.why for record in records if isinstance(record, Gone)}
    assert whys == {"a-1": "released", "a-2": "withdrawn"}
    assert Held not in kinds(records)
    assert kinds(records).count(Leaves) == 2


async def test_a_loss_is_recorded_when_the_body_is_cancelled(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async def be_evicted(client: tenure.Client) -> None:
        async with journal.lock(client.mutex("m")) as request:
            assert request.lease is not None
            journal.revokes(request=request.label)
            assert await client.evict("/default", "m", request.lease.fencing_token)
            await asyncio.sleep(60.0)

    async with tenure.connect(url, clock=clock) as client:
        with pytest.raises(tenure.LeaseLost):
            await be_evicted(client)
    assert kinds(records) == [Requested, Granted, Revokes, Gone]
    assert [record.why for record in records if isinstance(record, Gone)] == ["lost"]


async def test_a_place_in_a_queue_is_recorded(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client:
        pool = client.semaphore("pool")
        await pool.create(3)
        async with (
            journal.acquire(pool, 2, limit=3) as first,
            journal.enqueue(pool, 2, limit=3) as place,
        ):
            with pytest.raises(tenure.AcquireTimeout):
                async with place.held(timeout=1.0):
                    raise AssertionError("nothing is held")
            assert isinstance(first.lease, tenure.Lease)
            first.shrinks(1)
            await first.lease.update(count=1)
            async with place.held() as second:
                assert second.label == "a-2"
                assert second.sample()
    token = place.ticket._lease.fencing_token
    places = [record for record in records if isinstance(record, Queued | Granted)]
    assert [(each.request, each.order_id) for each in places[1:]] == [("a-2", token)] * 2
    assert kinds(records) == [
        *(Requested, Granted),
        *(Requested, Queued),
        *(Shrinks, Granted, Held, Held, Leaves, Gone),
        *(Held, Leaves, Gone),
    ]


async def test_what_a_resumed_session_had_goes_on_under_another_label(
    url: str, clock: VirtualClock, records: list[Record]
) -> None:
    before = Journal("a.0", records.append, now=clock.now)
    after = Journal("a.1", records.append, now=clock.now)
    async with tenure.connect(url, clock=clock) as client:
        session = await client.session(resumable=True)
        former = before.request(session.mutex("m"))
        former.granted(await session.mutex("m").lock())
        before.leaves()
        resume = session.resume_token
        await session.detach()
        former.gone("lost")
        async with client.session(resume=resume) as again:
            async with after.recover(again.mutex("m"), recovers=former.label) as place:
                assert place is not None
                async with place.held():
                    pass
            async with after.recover(again.mutex("m")) as nothing:
                assert nothing is None
    asked = [record for record in records if isinstance(record, Requested)]
    tokens = {record.order_id for record in records if isinstance(record, Queued | Granted)}
    assert [(each.request, each.recovers) for each in asked] == [
        ("a.0-1", None),
        ("a.1-1", "a.0-1"),
    ]
    assert asked[1].count == EPHEMERAL_LIMIT
    assert len(tokens) == 1


async def test_calls_on_data_say_how_they_ended(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client:
        config = client.semaphore("config")
        with pytest.raises(tenure.SemaphoreNotFound):
            await journal.read(config)
        await journal.create(config, 1, b"one")
        with pytest.raises(tenure.SemaphoreExists):
            await journal.create(config, 1, b"two")
        await journal.update(config, b"\xff\n")
        assert await journal.read(config) == b"\xff\n"
        async with config.acquire():
            with pytest.raises(tenure.SemaphoreBusy):
                await journal.delete(config)
        with pytest.raises(tenure.InvalidArgument):
            await journal.create(config, 0)
        await journal.delete(config)
    with pytest.raises(tenure.SessionClosed):
        await journal.update(config, b"too late")
    calls = [(each.op, each.argument) for each in records if isinstance(each, Called)]
    ends = [(each.outcome, each.result) for each in records if isinstance(each, Returned)]
    assert list(zip(calls, ends, strict=True)) == [
        (("read", None), ("missing", None)),
        (("create", b"one"), ("ok", None)),
        (("create", b"two"), ("exists", None)),
        (("update", b"\xff\n"), ("ok", None)),
        (("read", None), ("ok", b"\xff\n")),
        (("delete", None), ("busy", None)),
        (("create", b""), ("refused", None)),
        (("delete", None), ("ok", None)),
        (("update", b"too late"), ("unknown", None)),
    ]


def test_threads_record_as_tasks_do(url: str, tmp_path: Path) -> None:
    journal = Journal("a", AppendOnly(tmp_path / "a"))
    with blocking.connect(url) as client:
        mutex, config = client.mutex("m"), client.semaphore("config")
        with (
            journal.request(mutex, timeout=5.0) as request,
            mutex.lock(timeout=5.0) as lease,
            request.holds(lease),
        ):
            assert request.sample()
        with journal.call(config, "create", b"\xe4"):
            config.create(1, b"\xe4")
        journal.observed("w", config, config.describe().data)
    found = load([tmp_path / "a"]).records
    assert kinds(list(found)) == [
        *(Requested, Granted, Held, Held, Leaves, Gone),
        *(Called, Returned, Observed),
    ]
    assert isinstance(found[-1], Observed)
    assert found[-1].value == b"\xe4"


def test_what_an_administrator_does_is_told_before_and_after(
    clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    before = clock.now()
    with journal.revoking(name="m"):
        clock.advance(1.0)
    journal.unobserved("w")
    assert records == [
        Revokes(before, name="m"),
        Revokes(before + 1.0, name="m", since=before),
        Unobserved(before + 1.0, "a", "w"),
    ]


def test_a_file_that_is_there_is_added_to(tmp_path: Path) -> None:
    for process in ("a", "b"):
        file = AppendOnly(tmp_path / "history")
        Journal(process, file).revokes(session_of=process)
        file.close()
    told = load([tmp_path / "history"]).records
    assert [each.session_of for each in told if isinstance(each, Revokes)] == ["a", "b"]


def test_the_limit_of_a_lasting_semaphore_has_to_be_told(url: str, journal: Journal) -> None:
    async def ask() -> None:
        async with tenure.connect(url) as client:
            with pytest.raises(tenure.Misuse, match="the limit of semaphore 'x' is missing"):
                journal.request(client.semaphore("x"))
            journal.request(client.semaphore("x", ephemeral=True))

    asyncio.run(ask())


def test_a_killed_process_loses_nothing_of_what_it_has_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    program = """
import os, sys
from tenure.testing.history import AppendOnly, Journal
journal = Journal("a", AppendOnly(sys.argv[1]))
for _ in range(10):
    journal.revokes()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == -9
    with path.open("ab") as file:
        file.write(b'{"kind": "revo')  # torn
    assert kinds(list(load([path]).records)) == [Revokes] * 10


# Several requests, and rates


async def enter(block: AbstractAsyncContextManager[object], seconds: float = 0.0) -> None:
    """Enter a block for a while."""
    async with block:
        await asyncio.sleep(seconds)


async def evict_the_owner(client: tenure.Client, name: str) -> None:
    await asyncio.sleep(1.0)
    [owner] = (await client.describe_semaphore(name)).owners
    await client.evict("/default", name, owner.order_id)


async def test_a_share_is_two_requests_that_leave_together(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client, client.session() as session:
        jobs = session.semaphore("jobs", limit=5, per_key=2)
        async with journal.share(
            jobs, 2, key="a", limit=5, per_key=2, timeout=3.0, data=lambda each: each.label.encode()
        ) as both:
            described = await client.describe_semaphore("jobs")
            of_key = await client.describe_semaphore("jobs/key/a")
            await journal.describe(jobs)
            assert both.sample()
    first, second = (each for each in records if isinstance(each, Requested))
    assert (first.request, first.name, first.count, first.limit) == ("a-1/key", "jobs/key/a", 2, 2)
    assert (second.request, second.name, second.count, second.limit) == ("a-1", "jobs", 2, 5)
    assert (first.key, second.key, first.timeout, second.timeout) == (None, "a-1/key", 3.0, 3.0)
    assert [each.data for each in described.owners] == [b"a-1"]
    tokens = [each.order_id for each in (*of_key.owners, *described.owners)]
    assert [each.order_id for each in records if isinstance(each, Granted)] == tokens
    assert [each.owners for each in records if isinstance(each, Described)] == [(tokens[1],)]
    assert kinds(records[5:]) == [Held, Held, Held, Leaves, Held, Leaves, Gone, Gone]
    assert [each.request for each in records if isinstance(each, Gone)] == ["a-1", "a-1/key"]


async def test_all_of_several_locks_are_recorded_each(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client:
        gpu = client.semaphore("gpu", limit=4)
        async with journal.all_of(
            client, client.mutex("b"), (gpu, 2, 4), client.mutex("a")
        ) as all_:
            assert all_.sample()
            assert [each.lease.held for each in all_.requests if each.lease] == [True] * 3
        both = client.mutex("a"), client.mutex("b")
        async with client.mutex("a").lock():
            with pytest.raises(tenure.AcquireTimeout):
                await enter(journal.all_of(client, *both, timeout=1.0))
    asked = [each for each in records if isinstance(each, Requested)]
    assert [each.name for each in asked] == ["b", "gpu", "a", "a", "b"]
    assert (asked[1].count, asked[1].limit, asked[3].timeout) == (2, 4, 1.0)
    gone = {each.request: each.why for each in records if isinstance(each, Gone)}
    assert [gone[each.request] for each in asked] == ["released"] * 3 + ["timeout"] * 2


async def test_a_lost_lease_of_several_is_lost_and_the_others_are_released(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client:
        evicting = asyncio.create_task(evict_the_owner(client, "a"))
        with pytest.raises(tenure.LeaseLost):
            await enter(journal.all_of(client, client.mutex("a"), client.mutex("b")), 60.0)
        await evicting
    gone = [(each.request, each.why) for each in records if isinstance(each, Gone)]
    assert sorted(gone) == [("a-1", "lost"), ("a-2", "released")]


async def test_any_of_several_locks_holds_one_and_withdraws_the_others(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client, client.mutex("a").lock():
        locks = client.mutex("a"), client.mutex("b")
        async with journal.any_of(client, *locks) as request:
            assert request.label == "a-2"
    assert [each.request for each in records if isinstance(each, Granted)] == ["a-2"]
    gone = [(each.request, each.why) for each in records if isinstance(each, Gone)]
    assert gone == [("a-1", "withdrawn"), ("a-2", "released")]


async def test_takes_of_a_rate_are_recorded_with_the_time_of_the_store(
    url: str, clock: VirtualClock, journal: Journal, records: list[Record]
) -> None:
    async with tenure.connect(url, clock=clock) as client:
        rate = client.rate("api", limit=10, per=2.0, burst=5)
        first = await journal.take(rate, 5)
        begun = clock.now()
        await first.refund(1)
        with pytest.raises(tenure.RateExceeded):
            await journal.take(rate, 5, timeout=0.1)
        await journal.take(rate, 5)
    takes, took = ([each for each in records if isinstance(each, kind)] for kind in (Takes, Took))
    assert takes[0] == Takes(begun, "a", "a-1", "/default", "api", 5, 10, 2_000_000, 5)
    assert [each.take for each in took] == ["a-1", "a-2", "a-3"]
    one, refused, other = (each for each in records if isinstance(each, Took))
    assert (refused.granted, refused.waited) == (None, 0.0)
    assert one.granted is not None
    assert other.granted is not None
    assert other.granted - one.granted == pytest.approx(1e6 * other.waited, rel=0.02)
    assert other.at - begun == pytest.approx(other.waited)
    assert [each for each in records if isinstance(each, Refunds)] == [Refunds(begun, "a-1", 1)]
