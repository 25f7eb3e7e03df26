"""Quarantine after a loss of data: a crash without the disk, and a promoted standby."""

from __future__ import annotations

import asyncio

import pytest

import tenure
from tests.engines.postgresql.helpers import (
    PATIENCE,
    an_engine,
    until,
    until_detached_and_back,
)
from tests.engines.postgresql.servers import PostgresServer, a_standby
from tests.guarantees import POSTGRESQL, guarantee

pytestmark = pytest.mark.exhaustive

_WINDOW = 5.0
"""Seconds; twice that is longer than a server takes to start on a busy machine."""
_SOON = 3.0
"""Seconds within which the first waiter is granted after a quarantine, on a busy machine."""


def _quarantine_left(server: PostgresServer) -> float:
    """Return the seconds for which the store grants nothing, by its own clock."""
    ((left,),) = server.execute(
        "SELECT extract(epoch FROM quarantined_until - clock_timestamp())::float8 FROM tenure.meta"
    )
    assert isinstance(left, float)
    return left


def _has_replayed_all(server: PostgresServer) -> bool:
    rows = server.execute(
        "SELECT replay_lsn >= pg_current_wal_insert_lsn() FROM pg_stat_replication"
    )
    return rows == [(True,)]


@guarantee("power cut", "tokens rise", on=POSTGRESQL)
async def test_a_crash_with_durability_process_grants_nothing_for_the_longest_window(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{server.url}&durability=process"
    async with (
        tenure.connect(url) as client,
        tenure.connect(url) as other,
        an_engine(url, client.clock) as engine,
        client.session(recovery_window=2 * _WINDOW) as session,
        other.session(recovery_window=2 * _WINDOW) as second,
    ):
        events = other.events()
        lease = await session.mutex("m").lock()
        assert engine.trouble() is None
        await asyncio.to_thread(server.crash)
        await asyncio.to_thread(server.start)
        await until_detached_and_back(events)
        end = client.clock.now() + _quarantine_left(server)
        await until(lambda: "grants nothing" in str(engine.trouble()))
        assert "the server crashed, and durability=process is in use" in str(engine.trouble())
        with pytest.raises(tenure.AcquireTimeout, match="the server crashed"):
            await second.mutex("free").lock(timeout=0.5)
        async with second.mutex("free").lock(timeout=PATIENCE) as later:
            assert end <= client.clock.now() < end + _SOON
            assert later.fencing_token > lease.fencing_token
        await events.aclose()
    warnings = [each for each in caplog.messages if each.startswith("quarantine: ")]
    assert len(warnings) == 3  # one for each engine
    assert all("the server crashed" in each for each in warnings)


@guarantee("restarted", "kept", "tokens rise", on=POSTGRESQL)
async def test_a_client_moves_to_a_promoted_standby_which_begins_with_a_quarantine(
    server: PostgresServer,
) -> None:
    with a_standby(server) as standby:
        url = f"postgresql://tenure@/postgres?host={server.folder},{standby.folder}"
        async with (
            tenure.connect(url) as client,
            tenure.connect(url) as other,
            an_engine(url, client.clock) as engine,
            client.session(recovery_window=2 * _WINDOW) as session,
            other.session(recovery_window=2 * _WINDOW) as second,
        ):
            events = client.events()
            kept = await session.mutex("kept").lock()
            waiting = asyncio.ensure_future(second.mutex("kept").lock())
            await until(lambda: _has_replayed_all(server))
            await asyncio.to_thread(server.crash)
            await asyncio.to_thread(standby.run, "pg_ctl", "promote", "-D", str(standby.data))
            await until_detached_and_back(events)
            end = client.clock.now() + _quarantine_left(standby)
            await until(lambda: "grants nothing" in str(engine.trouble()))
            assert "another server was promoted" in str(engine.trouble())
            assert kept.held
            with pytest.raises(tenure.AcquireTimeout, match="another server was promoted"):
                await session.mutex("free").lock(timeout=0.5)
            assert not waiting.done()
            async with session.mutex("free").lock(timeout=PATIENCE) as later:
                assert end <= client.clock.now() < end + _SOON
                assert later.fencing_token > kept.fencing_token
            assert kept.held
            await kept.release()
            async with asyncio.timeout(PATIENCE), await waiting as next_lease:
                assert next_lease.fencing_token > kept.fencing_token
            await events.aclose()


@guarantee("restarted", "tokens rise", on=POSTGRESQL)
async def test_a_lease_that_the_promoted_standby_does_not_know_is_lost_before_the_next_grant(
    server: PostgresServer,
) -> None:
    async with tenure.connect(server.url):
        pass
    with a_standby(server) as standby:
        url = f"postgresql://tenure@/postgres?host={server.folder},{standby.folder}"
        async with (
            tenure.connect(url) as client,
            tenure.connect(url) as other,
            other.session(recovery_window=_WINDOW) as second,
        ):
            await until(lambda: _has_replayed_all(server))
            standby.stop()  # it misses what follows
            session = await client.session(recovery_window=_WINDOW)
            lease = await session.mutex("m").lock()
            server.crash()
            await asyncio.to_thread(standby.start)
            await asyncio.to_thread(standby.run, "pg_ctl", "promote", "-D", str(standby.data))
            async with second.mutex("m").lock(timeout=PATIENCE) as later:
                assert not lease.held
                assert later.fencing_token > lease.fencing_token
            async with asyncio.timeout(PATIENCE):
                assert isinstance(await lease.wait_lost(), tenure.LeaseLost)


async def test_a_synchronous_failover_needs_no_quarantine(server: PostgresServer) -> None:
    with a_standby(server) as standby:
        url = f"postgresql://tenure@/postgres?host={server.folder},{standby.folder}"
        async with (
            tenure.connect(f"{url}&failover=synchronous") as client,
            client.session(recovery_window=60) as session,
        ):
            events = client.events()
            kept = await session.mutex("kept").lock()
            await until(lambda: _has_replayed_all(server))
            await asyncio.to_thread(server.crash)
            await asyncio.to_thread(standby.run, "pg_ctl", "promote", "-D", str(standby.data))
            await until_detached_and_back(events)
            async with session.mutex("free").lock(timeout=_WINDOW) as later:
                assert later.fencing_token > kept.fencing_token
            assert kept.held
            await kept.release()
            await events.aclose()


@guarantee("restarted", "tokens rise", on=POSTGRESQL)
@pytest.mark.parametrize("how", ["dump", "template", "data_was_restored"])
async def test_restored_data_begin_with_a_quarantine(server: PostgresServer, how: str) -> None:
    async with tenure.connect(server.url) as client:
        session = await client.session(recovery_window=_WINDOW)
        lease = await session.mutex("m").lock()
        token = lease.fencing_token
        await session.detach()
    url = server.url
    if how == "template":
        server.execute("CREATE DATABASE copy TEMPLATE postgres")
        url = url.replace("/postgres?", "/copy?")
    elif how == "dump":
        dump = server.folder / "dump"
        server.run("pg_dump", "--schema", "tenure", "--file", str(dump), "--dbname", server.url)
        server.execute("DROP SCHEMA tenure CASCADE")
        server.run("psql", "--quiet", "--file", str(dump), "--dbname", server.url)
    else:
        server.execute("SELECT tenure.data_was_restored()")
    async with tenure.connect(url) as client:
        with pytest.raises(tenure.AcquireTimeout, match="the database was restored"):
            await client.mutex("free").lock(timeout=0.5)
        async with client.mutex("free").lock(timeout=PATIENCE) as later:
            assert later.fencing_token > token
