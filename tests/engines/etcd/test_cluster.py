"""Three members, of which some die, stop, or are cut off: who holds holds, or knows in time."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

import tenure
from chaos.adapter import Scene
from chaos.etcd import Etcd
from chaos.network import Proxy
from tests.engines.etcd.contest import PATIENCE, contest
from tests.engines.etcd.servers import Cluster, a_cluster, program
from tests.guarantees import ETCD, SERVED, guarantee
from tests.server.serving import serving

pytestmark = pytest.mark.exhaustive

CONTENDERS = 16
SOON = 30.0
"""Seconds in which work goes on after a fault, on a busy machine; it takes two or three."""

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with a_cluster(3) as running:
        yield running


@pytest.fixture
def cluster(three: Cluster) -> Iterator[Cluster]:
    """Three members who are well, now and afterwards."""
    three.heal()
    yield three
    three.heal()


@pytest.fixture
def url(cluster: Cluster) -> str:
    """Of a part of the store in which nothing has happened yet."""
    return f"{cluster.url}?prefix=cluster-{next(_numbers)}"


# One of three


@guarantee("restarted", "kept", "tokens rise", on=ETCD)
async def test_a_leader_that_is_killed_and_comes_back_costs_no_lease(
    cluster: Cluster, url: str
) -> None:
    async with contest(url, contenders=CONTENDERS) as seen:
        leader = await asyncio.to_thread(cluster.leader)
        await asyncio.to_thread(leader.kill)
        assert await seen.turns() < SOON
        await asyncio.to_thread(cluster.heal)
        assert await seen.turns() < SOON
    assert seen.sessions == CONTENDERS


@guarantee("cut off", "one owner", "kept", "others proceed", on=ETCD)
async def test_a_leader_that_is_stopped_for_longer_than_the_window_costs_no_lease(
    cluster: Cluster, url: str
) -> None:
    async with contest(url, window=5, contenders=CONTENDERS) as seen:
        leader = await asyncio.to_thread(cluster.leader)
        leader.pause()
        try:
            assert await seen.turns() < SOON
            await asyncio.sleep(5)
            assert await seen.turns() < SOON
            assert seen.sessions == CONTENDERS
        finally:
            leader.resume()
        # Etcd 3.4 may revoke what has lapsed by the old leader's clock now: who has lost a session
        # is told so, and comes again.
        assert await seen.turns() < SOON


# Two of three: no quorum


@guarantee("cut off", "kept", "others proceed", on=ETCD)
async def test_a_quorum_that_is_back_within_the_window_was_never_missed(
    cluster: Cluster, url: str
) -> None:
    async with contest(url, window=20, contenders=CONTENDERS) as seen:
        for member in cluster.members[:2]:
            member.pause()
        await asyncio.sleep(2)
        for member in cluster.members[:2]:
            member.resume()
        assert await seen.turns() < SOON
    assert seen.sessions == CONTENDERS


@guarantee("cut off", "one owner", "loss reported", "others proceed", on=ETCD)
async def test_without_a_quorum_nobody_is_granted_and_leases_end_at_their_deadlines(
    cluster: Cluster, url: str
) -> None:
    async with tenure.connect(url) as holder, tenure.connect(url) as other:
        session = await holder.session(recovery_window=3)
        lease = await session.mutex("m").lock()
        waiting = await other.session(recovery_window=20)

        async def hold() -> None:
            async with lease:
                for member in cluster.members[:2]:
                    member.pause()
                await asyncio.sleep(PATIENCE)

        try:
            with pytest.raises(tenure.LeaseLost):
                await hold()
            assert holder.clock.now() >= lease.deadline
            with pytest.raises(tenure.AcquireTimeout):
                await waiting.mutex("another").lock(timeout=0.5)
        finally:
            for member in cluster.members[:2]:
                member.resume()
        async with waiting.mutex("m").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > lease.fencing_token
        await waiting.aclose()


async def test_all_members_may_be_killed_within_the_window(cluster: Cluster, url: str) -> None:
    async with contest(url, window=15, contenders=CONTENDERS) as seen:
        await asyncio.to_thread(cluster.kill)
        await asyncio.to_thread(cluster.heal)
        assert await seen.turns() < SOON
    assert seen.sessions == CONTENDERS


# The network


@asynccontextmanager
async def on_proxies(cluster: Cluster, url: str) -> AsyncIterator[tuple[str, list[Proxy]]]:
    """The way to each member can be broken; and the same URL on that way."""
    proxies = [Proxy(member.client) for member in cluster.members]
    try:
        for proxy in proxies:
            await proxy.start()
        places = ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies)
        yield f"etcd://{places}?{url.partition('?')[2]}", proxies
    finally:
        for proxy in proxies:
            await proxy.aclose()


@guarantee("cut off", "one owner", "kept", "others proceed", on=ETCD)
@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_a_member_out_of_reach_costs_no_lease_whichever_it_is(
    cluster: Cluster, url: str, how: str
) -> None:
    async with (
        on_proxies(cluster, url) as (behind, proxies),
        contest(behind, window=5, contenders=8) as seen,
    ):
        for proxy in proxies:
            if how == "cut":
                await proxy.cut()
            else:
                proxy.fall_silent()
            assert await seen.turns(20) < SOON
            await proxy.mend()
        assert await seen.turns(20) < SOON
        assert seen.sessions == 8


@guarantee("cut off", "one owner", "kept", "others proceed", on=ETCD)
async def test_a_member_that_the_others_have_lost_makes_nobody_win_and_costs_no_lease(
    tmp_path: Path,
) -> None:
    program("etcd")
    engine = Etcd(tmp_path)
    scene = Scene(None, engine, None, Random(1))  # type: ignore[arg-type]  # it looks at chance only
    try:
        await engine.start()
        (isolate,) = (fault for fault in engine.faults() if fault.name == "isolate")
        async with contest(engine.url, window=5, contenders=8) as seen:
            async with isolate.inflict(scene):
                await asyncio.sleep(2)  # it has noticed by then, if it was the leader
                assert await seen.turns(20) < SOON
                assert seen.sessions == 8
            assert await seen.turns(20) < SOON  # see above: an old leader is back
    finally:
        await engine.stop()


# What an administrator of etcd does


@guarantee("cut off", "kept", "others proceed", on=ETCD)
async def test_what_was_compacted_away_meanwhile_is_read_again(cluster: Cluster, url: str) -> None:
    async with (
        tenure.connect(url) as owner,
        on_proxies(cluster, url) as (behind, proxies),
        tenure.connect(behind) as other,
    ):
        await owner.semaphore("text").create(1, data=b"0")
        await owner.semaphore("pool").create(1)
        lease = await owner.semaphore("pool").acquire()
        waiting = await other.session(recovery_window=60)
        async with (
            waiting.semaphore("pool").enqueue() as ticket,
            waiting.semaphore("text").watch(data=True) as states,
        ):
            assert (await anext(states)).data == b"0"
            for proxy in proxies:
                await proxy.cut()
            for text in (b"1", b"2", b"3"):
                await owner.semaphore("text").update(text)
            await lease.release()
            await asyncio.to_thread(cluster.compact)
            for proxy in proxies:
                await proxy.mend()
            async with asyncio.timeout(PATIENCE):
                while (await anext(states)).data != b"3":
                    pass
            async with await ticket.wait(timeout=PATIENCE) as later:
                assert later.fencing_token > lease.fencing_token
        await waiting.aclose()


@guarantee("administrator", "loss reported", "tokens rise", "others proceed", on=ETCD)
async def test_a_lease_that_is_revoked_in_etcd_is_lost_at_once(cluster: Cluster, url: str) -> None:
    async with tenure.connect(url) as holder, tenure.connect(url) as other:
        before = await asyncio.to_thread(cluster.leases)
        session = await holder.session(recovery_window=60)
        of_the_session = set(await asyncio.to_thread(cluster.leases)) - set(before)
        lease = await session.mutex("m").lock()
        waiting = asyncio.create_task(other.mutex("m").lock(timeout=PATIENCE))
        deadline = lease.deadline
        for each in of_the_session:
            await asyncio.to_thread(cluster.revoke, each)
        async with asyncio.timeout(PATIENCE):
            lost = await lease.wait_lost()
        assert holder.clock.now() < deadline
        assert isinstance(lost.__cause__, tenure.SessionExpired)
        async with await waiting as later:
            assert later.fencing_token > lease.fencing_token


# Servers of ours on one cluster


@guarantee("restarted", "kept", "tokens rise", on=SERVED)
async def test_a_client_goes_from_one_server_to_the_other_with_its_leases(
    url: str, tmp_path: Path
) -> None:
    async with (
        serving(tmp_path, "--store", url) as first,
        serving(tmp_path, "--store", url) as second,
    ):
        both = f"{first.address},{second.address.removeprefix('tenure://')}"
        async with tenure.connect(both) as one, tenure.connect(both) as other:
            await one.semaphore("pool").create(limit=1)
            async with one.session(recovery_window=20) as session, other.session() as another:
                lease = await session.semaphore("pool").acquire()
                async with another.semaphore("pool").enqueue() as ticket:
                    await first.end(signal.SIGKILL)
                    mine = await session.mutex("mine").lock(timeout=PATIENCE)
                    assert lease.held
                    assert not ticket.granted
                    await lease.release()
                    later = await ticket.wait(timeout=PATIENCE)
                    assert later.fencing_token > lease.fencing_token
                    await later.release()
                    await mine.release()
