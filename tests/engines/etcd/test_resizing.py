"""A limit that is changed where each program works out by itself who owns."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest

import tenure
from tenure.engines.etcd import semaphores
from tenure.engines.etcd.attachment import EtcdAttachment
from tests.engines.etcd.contest import PATIENCE
from tests.engines.etcd.servers import a_prefix, shared


@pytest.fixture
def url() -> Iterator[str]:
    with a_prefix() as url:
        yield url


async def test_more_owners_than_a_transaction_compares_all_stay_owners(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        pool = client.semaphore("pool")
        await pool.create(230)
        leases = await asyncio.gather(*(pool.acquire() for _ in range(230)))
        async with other.semaphore("pool").enqueue(2) as ticket:
            await other.semaphore("pool").resize(229)
            found = await pool.describe(owners=True, waiters=True)
            assert (found.held, len(found.owners), len(found.waiters)) == (230, 230, 1)
            await asyncio.gather(*(each.release() for each in leases[:2]))
            assert not ticket.granted
            await leases[2].release()
            await ticket.wait(PATIENCE)
            found = await pool.describe(owners=True)
            assert (found.held, found.waiting) == (229, 0)
        await asyncio.gather(*(each.release() for each in leases[3:]))


@pytest.mark.parametrize("compared", [1, 100])
async def test_one_that_becomes_an_owner_just_before_the_change_stays_one(
    url: str, monkeypatch: pytest.MonkeyPatch, compared: int
) -> None:
    monkeypatch.setattr(semaphores, "_MOST_COMPARED", compared)
    transact = EtcdAttachment.transact
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as one,
        tenure.connect(url) as two,
    ):
        pool = client.semaphore("pool")
        await pool.create(4)
        lease = await one.semaphore("pool").acquire(2)
        other = await one.semaphore("pool").acquire(2)
        async with two.semaphore("pool").enqueue(2) as ticket:
            between: list[Any] = [other.release, ticket.wait]

            async def late(self: EtcdAttachment, build: Any, *rest: Any, **more: Any) -> Any:
                while between and getattr(build, "func", None) is semaphores._resizing:
                    await between.pop(0)()
                return await transact(self, build, *rest, **more)

            monkeypatch.setattr(EtcdAttachment, "transact", late)
            await pool.resize(1)
            found = await pool.describe(owners=True)
            assert [each.count for each in found.owners] == [2, 2]
            assert (found.held, found.limit) == (4, 1)
            assert (await ticket.wait()).held
        await lease.release()


async def test_more_waiters_than_a_transaction_removes_all_leave(url: str) -> None:
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        pool = client.semaphore("pool")
        await pool.create(3)
        async with pool.acquire(2):
            large = [await other.semaphore("pool").enqueue(3) for _ in range(90)]
            small = await other.semaphore("pool").enqueue(1)
            await pool.resize(2)
            for each in large:
                with pytest.raises(tenure.InvalidArgument, match="was changed to 2 while"):
                    await each.wait(PATIENCE)
            assert (await pool.describe()).waiting == 1
        async with small:
            await small.wait(PATIENCE)


async def test_a_waiter_leaves_although_the_program_that_changed_the_limit_is_dead(
    url: str,
) -> None:
    """The limit's key alone is changed, as by a program that dies before it removes waiters."""
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        pool = client.semaphore("pool")
        await pool.create(4)
        async with pool.acquire(2):
            large = await other.semaphore("pool").enqueue(4)
            small = await other.semaphore("pool").enqueue(1)
            await _set_limit(url, 3)
            with pytest.raises(tenure.InvalidArgument, match="was changed to 3 while"):
                await large.wait(PATIENCE)
            async with small:
                await small.wait(PATIENCE)


async def _set_limit(url: str, limit: int) -> None:
    key = f"{url.partition('=')[2]}/q/:default/pool/limit".encode()
    encoded = base64.b64encode(key).decode()
    read = await asyncio.to_thread(shared().ask, "kv/range", {"key": encoded})
    found = read["kvs"]
    assert isinstance(found, list)
    nonce = base64.b64decode(found[0]["value"])[8:16]
    value = base64.b64encode(limit.to_bytes(8, "big") + nonce).decode()
    await asyncio.to_thread(shared().ask, "kv/put", {"key": encoded, "value": value})


async def test_no_lease_is_lost_while_a_limit_rises_and_falls(url: str) -> None:
    """Programs acquire and release while another one changes the limit all the time."""
    limits = (1, 4, 2, 6, 3, 5)
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as one,
        tenure.connect(url) as two,
    ):
        pool = client.semaphore("pool")
        await pool.create(limits[-1])
        held = most = refused = 0
        going_on = True

        async def work(program: tenure.Client, count: int) -> None:
            nonlocal held, most, refused
            while going_on:
                try:
                    async with program.semaphore("pool").acquire(count):
                        held += count
                        most = max(most, held)
                        await asyncio.sleep(0.002)
                        held -= count
                except tenure.InvalidArgument:
                    refused += 1
                    await asyncio.sleep(0.002)

        async with asyncio.TaskGroup() as group:
            for program in (one, two):
                for count in (1, 2, 3, 5):
                    group.create_task(work(program, count))
            for round_ in range(40):
                await pool.resize(limits[round_ % len(limits)])
                await asyncio.sleep(0.02)
            going_on = False
            await pool.resize(max(limits))
        assert most <= max(limits)
        assert refused
        assert (await pool.describe()).held == 0
