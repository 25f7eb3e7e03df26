"""`tenure restore`: old data under which nothing is granted twice.

The *lost future* is what happened in the store after the backup was taken.
"""

# ruff: noqa: ASYNC240  nothing else runs on the loop meanwhile

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.core.rules import MAX_WINDOW
from tenure.engines import diagnose
from tenure.engines.contract import Place
from tenure.engines.sqlite import restore as restoring
from tenure.engines.sqlite.restore import backup, restore
from tenure.errors import EngineError, InvalidArgument, SessionExpired
from tests.engines.sqlite.helpers import SYSTEM, attached, opened, result
from tests.engines.sqlite.holder import Holder
from tests.engines.sqlite.restored import again, as_of_version_2, change, told
from tests.server.serving import serving

# What comes back


async def test_nodes_semaphores_and_data_come_back_and_sessions_do_not(
    url: str, file: Path
) -> None:
    async with tenure.connect(url) as client:
        await client.create_node("/billing")
        await client.semaphore("pool").create(limit=3, data=b"kept")
        session = await client.session(resumable=True)
        token = session.resume_token
        async with session.semaphore("pool").acquire(2), session.mutex("m").lock():
            backup(url, str(file))
        await client.semaphore("pool").update(b"newer")
        await session.detach()
    again(url, file, quarantine=0)
    async with tenure.connect(url) as client:
        assert "/billing" in await client.list_nodes()
        pool = await client.semaphore("pool").describe(owners=True, waiters=True)
        assert (pool.limit, pool.data, pool.held, pool.owners) == (3, b"kept", 0, ())
        assert [each.name for each in await client.list_semaphores()] == ["pool"]
        with pytest.raises(SessionExpired):
            await client.session(resume=token)
        async with client.semaphore("pool").acquire(3), client.mutex("m").lock():
            pass


async def test_a_store_is_made_where_there_is_none(url: str, path: Path, file: Path) -> None:
    async with tenure.connect(url) as client:
        await client.semaphore("pool").create(limit=3)
    backup(url, str(file))
    for each in path.parent.glob("store.db*"):
        if each.is_file():
            each.unlink()
    restore(url, str(file), quarantine=0)
    async with tenure.connect(url) as client:
        assert (await client.semaphore("pool").describe()).limit == 3


# Who is protected


async def test_nothing_is_granted_until_the_quarantine_is_over_and_then_in_order(
    url: str, path: Path, file: Path
) -> None:
    async with opened(url) as engine:
        before = await attached(engine, window=1.5)
        backup(url, str(file))
        lost = await result(before.ask(1, "m"))
    assert lost.order_id is not None
    assert again(url, file).quarantine == 1.5
    begun = SYSTEM.now()
    async with opened(url) as engine, opened(url) as other:
        one, two = await attached(engine, window=1.5), await attached(other, window=1.5)
        trouble = engine.trouble("m")
        assert trouble is not None
        assert "restored from a backup" in str(trouble)
        assert await one.enqueue(9, "n", timeout=0) is Place.REFUSED
        answer = await result(one.ask(1, "m"))
        assert answer.place is Place.WAITING
        assert await two.enqueue(1, "m") is Place.WAITING
        beats = asyncio.create_task(_renew(one, two))
        await one.granted(1)
        assert SYSTEM.now() >= begun + 1.5
        assert answer.order_id is not None
        assert answer.order_id > lost.order_id
        assert 1 not in two.heard.grants
        await one.withdraw(1)
        await two.granted(1)
        beats.cancel()
        assert engine.trouble("m") is None
    assert told(path, "quarantine") == 0


async def _renew(*programs: Any) -> None:
    while True:
        for each in programs:
            each.session.renew()
        await asyncio.sleep(0.3)


async def test_a_release_in_the_quarantine_grants_nothing(url: str, file: Path) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    again(url, file, quarantine=600)
    async with opened(url) as engine:
        one = await attached(engine)
        assert await one.enqueue(1, "m") is Place.WAITING
        assert await one.enqueue(2, "m") is Place.WAITING
        await one.withdraw(1)
        described = await one.session.describe_semaphore("m", owners=True, waiters=True)
        assert (len(described.owners), len(described.waiters)) == (0, 1)


async def test_a_wait_that_is_over_in_the_quarantine_names_it(url: str, file: Path) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    again(url, file, quarantine=600)
    async with tenure.connect(url) as client:
        with pytest.raises(tenure.AcquireTimeout, match="restored from a backup") as failed:
            await client.mutex("m").lock(timeout=0.1)
        assert isinstance(failed.value.__cause__, EngineError)


async def test_every_program_warns_once_that_nothing_is_granted(
    url: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    again(url, file, quarantine=600)
    for programs in (1, 2):
        async with opened(url) as engine:
            await attached(engine)
            await attached(engine)
        warned = [each for each in caplog.messages if "restored from a backup" in each]
        assert len(warned) == programs


async def test_the_quarantine_begins_anew_with_a_new_boot(url: str, path: Path, file: Path) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    again(url, file, quarantine=600)
    async with opened(url):
        pass
    change(path, boot="another", quarantined_until=1.0)
    async with opened(url) as engine:
        one = await attached(engine)
        assert await one.enqueue(1, "m") is Place.WAITING
    assert told(path, "quarantined_until") > SYSTEM.now() + 500


async def test_the_doctor_reports_the_quarantine(url: str, file: Path) -> None:
    async with opened(url):
        pass
    backup(url, str(file))
    again(url, file, quarantine=600)
    assert [each.level for each in diagnose(url) if each.what == "quarantine"] == ["warning"]


async def test_a_client_of_the_server_holds_until_it_knows_better_before_another_is_granted(
    url: str, path: Path, file: Path
) -> None:
    """The holder's lease is of the lost future, and it cannot reach the restored server."""
    holders: list[Holder] = []
    window = 3.0
    try:
        async with serving(path.parent, "--store", url) as server:
            holder = await Holder.start(server.address, attach=False)
            holders.append(holder)
            await holder.do("begin", window=window, resumable=False)
            backup(url, str(file))
            lost = await holder.do("lock", name="m")
            with pytest.raises(EngineError, match="in use"):
                again(url, file)
            assert await server.end(signal.SIGKILL) == -signal.SIGKILL
        assert again(url, file).quarantine >= window
        async with serving(path.parent, "--store", url) as server:
            waiter = await Holder.start(server.address, attach=False)
            holders.append(waiter)
            await waiter.do("begin", window=window, resumable=False)
            token = await waiter.do("lock", name="m")
            await holder.believes_no_more("m")
            ((_, until),) = holder.beliefs("m")
            ((since, _),) = waiter.beliefs("m")
            assert until < since
            assert token > lost
    finally:
        for each in holders:
            await each.end()


async def test_a_client_that_reaches_the_restored_server_loses_its_lease(
    url: str, path: Path, file: Path
) -> None:
    holder = None
    try:
        async with serving(path.parent, "--store", url) as server:
            holder = await Holder.start(server.address, attach=False)
            await holder.do("begin", window=60.0, resumable=True)
            await holder.do("lock", name="m")
            backup(url, str(file))
            address = server.address
            assert await server.end() == 0
        again(url, file)
        async with serving(path.parent, "--store", url, listen=[address]):
            await holder.believes_no_more("m")
            (lost,) = holder.heard("lost")
            assert lost["last"] < lost["deadline"], "it did not have to wait for its window"
    finally:
        if holder is not None:
            await holder.end()


# How the window is known


async def test_the_longest_window_that_was_ever_given_counts(url: str, file: Path) -> None:
    async with opened(url) as engine:
        await attached(engine, window=20.0)
        backup(url, str(file))
        after = await attached(engine, window=45.0)
        await after.session.close()
    done = again(url, file)
    assert (done.quarantine, done.reason) == (
        45.0,
        "the longest recovery window of any session in the replaced store",
    )


async def test_what_another_store_gave_is_not_known(
    url: str, path: Path, file: Path, tmp_path: Path
) -> None:
    async with opened(url) as engine:
        await attached(engine, window=20.0)
    backup(url, str(file))
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    assert restore(elsewhere, str(file)).quarantine == MAX_WINDOW
    path.unlink()  # a program has made a new one since
    async with opened(url) as engine:
        await attached(engine, window=20.0)
    assert again(url, file).quarantine == MAX_WINDOW


@pytest.mark.parametrize(("durable", "known"), [(0, False), (1, True)])
async def test_what_a_power_cut_may_have_undone_is_not_known(
    url: str, path: Path, file: Path, durable: int, known: bool
) -> None:
    async with opened(url) as engine:
        await attached(engine, window=20.0)
    backup(url, str(file))
    change(path, boot="before", durable=durable)
    assert again(url, file).quarantine == (20.0 if known else MAX_WINDOW)


async def test_what_an_earlier_version_gave_is_not_known(url: str, path: Path, file: Path) -> None:
    async with opened(url) as engine:
        await attached(engine, window=20.0)
    as_of_version_2(path)
    async with opened(url) as engine:
        await attached(engine, window=20.0)
    backup(url, str(file))
    assert again(url, file).quarantine == MAX_WINDOW


async def test_a_quarantine_that_is_owed_is_not_lost_with_another_restore(
    url: str, file: Path, tmp_path: Path
) -> None:
    async with opened(url) as engine:
        await attached(engine, window=20.0)
    backup(url, str(file))
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"
    restore(elsewhere, str(file))
    assert again(elsewhere, file).quarantine == MAX_WINDOW
    async with opened(elsewhere):
        pass
    second = tmp_path / "second"
    backup(elsewhere, str(second))
    assert again(elsewhere, second).quarantine == MAX_WINDOW


@pytest.mark.parametrize("seconds", [-1.0, MAX_WINDOW + 1])
async def test_a_quarantine_that_cannot_be_is_refused(url: str, file: Path, seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="longest recovery window"):
        restore(url, str(file), quarantine=seconds)


# Numbers


async def test_tokens_and_numbers_of_sessions_rise_above_the_lost_future(
    url: str, path: Path, file: Path, tmp_path: Path
) -> None:
    """Whether the replaced store can say what it gave out, or is gone."""
    ahead = int((time.time() + 7200) * 1e6)  # the clock was wrong when these were given
    async with opened(url):
        pass
    backup(url, str(file))
    change(path, last_order_id=ahead, last_session_id=5_000)
    gone = f"sqlite:///{tmp_path}/elsewhere.db"
    for store, number in ((gone, 1), (url, 2), (url, 3)):
        restore(store, str(file), force=True, quarantine=0)
        async with opened(store) as engine:
            one = await attached(engine)
            answer = await result(one.ask(1, "m"))
            assert answer.order_id is not None
            assert answer.order_id > ahead, number
            assert one.session.id > 5_000, number
            ahead = answer.order_id if store == url else ahead


def test_tokens_rise_however_far_the_backup_was_ahead_of_the_clock() -> None:
    ahead = 2 * 10**15  # decades
    one = restoring._numbers(ahead, 7, restoring._NOTHING, now=1.7e9, saved_at=1.7e9 - 60)
    given = 60 * restoring._TOKENS_PER_SECOND  # as many as a store can give out in that time
    assert one[0] > ahead + given
    assert one[1] > 7 + 60 * restoring._SESSIONS_PER_SECOND


def test_tokens_rise_with_every_restore_of_one_backup() -> None:
    numbers = [
        restoring._numbers(5, 7, restoring._NOTHING, now=1.7e9 + later, saved_at=1.7e9)
        for later in (0, 100, 1e6)
    ]
    for (order_id, session_id), after in itertools.pairwise(numbers):
        assert order_id + 100 * restoring._TOKENS_PER_SECOND <= after[0]
        assert session_id + 100 * restoring._SESSIONS_PER_SECOND <= after[1]


def test_a_clock_that_was_set_back_costs_no_rise() -> None:
    lost = restoring._Lost("x", 9 * 10**15 - 1, 10**9, 30.0, 0.0, is_complete=True)
    assert restoring._numbers(5, 7, lost, now=1.0, saved_at=1.7e9) == (9 * 10**15 - 1, 10**9)
