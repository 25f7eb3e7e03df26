"""Renewals that another thread asks for, as it does while the event loop is stuck."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from tenure.clock import SystemClock
from tenure.engines.contract import Attach
from tenure.engines.etcd import connect
from tenure.engines.etcd.engine import EtcdEngine
from tenure.engines.etcd.session import EtcdSession
from tenure.model import DEFAULT_NODE, Liveness
from tenure.testing.recorder import Recorder
from tests.engines.etcd.servers import Cluster, a_cluster, a_prefix, free_port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with a_cluster() as running:
        yield running


@contextmanager
def a_silent_port() -> Iterator[int]:
    """One that takes connections, and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@asynccontextmanager
async def attached(
    url: str, liveness: Liveness = "process", window: float = 30.0
) -> AsyncIterator[tuple[EtcdSession, Recorder]]:
    engine, heard = connect(url, SystemClock()), Recorder()
    assert isinstance(engine, EtcdEngine)
    await engine.open()
    try:
        yield await engine.attach(Attach(DEFAULT_NODE, window, liveness=liveness), heard), heard
    finally:
        thread = engine._heartbeat._thread
        await engine.aclose()
    assert not thread.alive


async def proven_beside_the_loop(session: EtcdSession, heard: Recorder) -> None:
    """Ask for a renewal in a thread, and wait for the proof."""
    before = len(heard.proofs)
    await asyncio.to_thread(session.renew)
    await heard.wait_for(lambda each: len(each.proofs) > before, "a proof")


@pytest.mark.parametrize("liveness", ["process", "window"])
async def test_a_thread_renews_again_and_again(liveness: Liveness) -> None:
    with a_prefix() as url:
        async with attached(url, liveness) as (session, heard):
            for _ in range(3):
                await proven_beside_the_loop(session, heard)
            assert heard.proofs == sorted(heard.proofs)
            assert "tenure-etcd-heartbeat" in {each.name for each in threading.enumerate()}


async def test_a_member_that_is_down_or_silent_is_passed_over(cluster: Cluster) -> None:
    here = cluster.members[0].address
    with a_silent_port() as silent:
        url = f"etcd://127.0.0.1:{free_port()},127.0.0.1:{silent},{here}?timeout=0.3"
        async with attached(url, window=2.0) as (session, heard):
            for _ in range(2):
                await proven_beside_the_loop(session, heard)


async def test_a_lease_that_is_gone_is_not_proven(cluster: Cluster) -> None:
    async with attached(cluster.url) as (session, heard), attached(cluster.url) as (other, told):
        await proven_beside_the_loop(session, heard)
        before = list(heard.proofs)
        await asyncio.to_thread(cluster.revoke, session.id)
        await asyncio.to_thread(session.renew)
        await heard.wait_for(lambda each: each.end is not None, "the end")
        await proven_beside_the_loop(other, told)
        assert heard.proofs == before


async def test_the_thread_says_who_asks() -> None:
    with a_cluster() as cluster:
        cluster.have_users(root="secret", anna="word")
        async with attached(f"etcd://anna:word@{cluster.members[0].address}", "window") as (
            session,
            heard,
        ):
            await proven_beside_the_loop(session, heard)


async def test_closing_does_not_wait_for_a_member_that_says_nothing(cluster: Cluster) -> None:
    with a_silent_port() as silent:
        url = f"etcd://{cluster.members[0].address},127.0.0.1:{silent}"
        async with attached(url) as (session, heard):
            await proven_beside_the_loop(session, heard)
            session.engine._heartbeat._first = 1  # the silent one is asked next
            await asyncio.to_thread(session.renew)
        assert session.over


async def test_who_is_closed_is_not_renewed(cluster: Cluster) -> None:
    async with attached(cluster.url) as (session, _):
        engine = session.engine
    before = threading.active_count()
    engine._heartbeat.renew(session)
    assert threading.active_count() == before
