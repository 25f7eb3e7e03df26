"""What holds when the network, the server or the program's loop fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.engines.dflockd import connection, shard
from tenure.engines.dflockd.connection import DflockdConnection
from tenure.events import Renewed
from tenure.server.auth import Authenticator
from tenure.server.tls import TlsFiles, server_context
from tests.engines.dflockd.proxy import Proxy
from tests.engines.dflockd.servers import Early, InThread, OwnProcess, Server, early_server
from tests.guarantees import DFLOCKD, broken, guarantee
from tests.server.certificates import Authority

PATIENCE = 30.0


@pytest.fixture
def process(tmp_path: Path) -> Iterator[OwnProcess]:
    """Tenure's server as a process, on a file."""
    server = OwnProcess(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


async def lose(session: tenure.Session, name: str, begun: asyncio.Event) -> tenure.LeaseLost:
    """Hold until the lease is lost, and return how."""
    try:
        async with session.mutex(name).lock():
            begun.set()
            await asyncio.Event().wait()
    except tenure.LeaseLost as loss:
        return loss
    raise AssertionError("nothing else ends it")


# The network


@guarantee("cut off", "loss reported", "others proceed", on=DFLOCKD)
async def test_a_cut_connection_is_the_loss_of_all_on_it_at_once(server: Server) -> None:
    async with (
        Proxy(server.port) as proxy,
        tenure.connect(proxy.url) as client,
        client.session() as session,
        tenure.connect(server.url) as other,
    ):
        begun = [asyncio.Event() for _ in range(3)]
        losing = [
            asyncio.create_task(lose(session, f"m{number}", each))
            for number, each in enumerate(begun)
        ]
        for each in begun:
            await each.wait()
        began = time.monotonic()
        proxy.cut()
        for loss in await asyncio.gather(*losing):
            assert "lost with its connection" in str(loss)
        assert time.monotonic() - began < 5
        assert session.state in {"attached", "detached"}  # it lives, and connects again
        for number in range(3):
            await (await other.mutex(f"m{number}").lock(timeout=PATIENCE)).release()
        async with session.mutex("m0").lock(timeout=PATIENCE):
            pass


@broken("cut off", "kept", on=DFLOCKD)
async def test_who_waits_joins_again_when_its_connection_is_cut(server: Server) -> None:
    async with (
        Proxy(server.port) as proxy,
        tenure.connect(proxy.url) as client,
        tenure.connect(server.url) as other,
    ):
        lease = await other.mutex("m").lock()
        waiting = asyncio.create_task(_hold(client, "m"))
        await proxy.until_open(2)
        accepted = proxy.accepted
        proxy.cut()
        async with asyncio.timeout(PATIENCE):
            while proxy.accepted < accepted + 2:  # noqa: ASYNC110  both are made anew
                await asyncio.sleep(0.01)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await waiting


async def _hold(client: tenure.Client, name: str) -> None:
    async with client.mutex(name).lock():
        pass


@guarantee("cut off", "loss reported", "others proceed", on=DFLOCKD)
async def test_who_is_out_of_reach_believes_no_more_when_the_next_holds(ours: InThread) -> None:
    async with (
        Proxy(ours.port) as proxy,
        tenure.connect(f"{proxy.url}?socket-timeout=30") as client,
        tenure.connect(ours.url) as other,
    ):
        session = await client.session(recovery_window=2)
        lease = await session.mutex("m").lock()
        waiting = asyncio.create_task(_take_within(other, "m"))
        proxy.silent = True
        following = await waiting
        assert not lease.held
        assert lease.deadline <= client.clock.now()
        assert following.fencing_token > lease.fencing_token
        proxy.cut()


async def test_an_answer_that_stays_out_costs_its_connection_not_the_session(
    ours: InThread,
) -> None:
    async with (
        Proxy(ours.port) as proxy,
        tenure.connect(f"{proxy.url}?socket-timeout=0.3") as client,
        client.session() as session,
    ):
        proxy.silent = proxy.refuses = True
        requesting = asyncio.create_task(_take(session, "m"))
        await proxy.until_open(0)
        proxy.silent = proxy.refuses = False
        lease = await asyncio.wait_for(requesting, PATIENCE)
        assert lease.held
        await lease.release()


async def _take(session: tenure.Session, name: str) -> tenure.Lease:
    return await session.mutex(name).lock()


async def _take_within(client: tenure.Client, name: str) -> tenure.Lease:
    return await client.mutex(name).lock(timeout=PATIENCE)


@guarantee("cut off", "nothing leaks", "others proceed", on=DFLOCKD)
async def test_what_a_server_does_not_know_to_be_lost_is_released_when_it_is_there_again(
    ours: InThread,
) -> None:
    async with (
        Proxy(ours.port) as proxy,
        tenure.connect(proxy.url) as client,
        client.session() as session,
    ):
        begun = asyncio.Event()
        losing = asyncio.create_task(lose(session, "m", begun))
        await begun.wait()
        proxy.cut_client()
        await losing
        lease = await session.mutex("m").lock(timeout=PATIENCE)
        assert lease.held


@pytest.mark.exhaustive
@broken("cut off", "one owner", on=DFLOCKD)
async def test_who_is_not_told_that_its_connection_is_gone_believes_until_its_deadline(
    ours: InThread,
) -> None:
    async with (
        Proxy(ours.port) as proxy,
        tenure.connect(f"{proxy.url}?socket-timeout=30") as client,
        tenure.connect(ours.url) as other,
    ):
        session = await client.session(recovery_window=6)
        lease = await session.mutex("m").lock()
        proxy.cut_server()
        async with other.mutex("m").lock(timeout=PATIENCE) as following:
            assert following.fencing_token > lease.fencing_token  # so that a fence can tell
            assert lease.held
            await lease.wait_lost()
            assert client.clock.now() < lease.deadline + 5
        proxy.cut()


# The server


async def test_a_killed_server_costs_every_lease_and_serves_again_after_its_restart(
    process: OwnProcess,
) -> None:
    async with tenure.connect(process.url) as client, client.session() as session:
        begun = asyncio.Event()
        losing = asyncio.create_task(lose(session, "m", begun))
        await begun.wait()
        waiting = asyncio.create_task(_take(session, "m"))
        process.kill()
        await losing
        process.start()
        lease = await asyncio.wait_for(waiting, PATIENCE)
        async with lease:
            assert await session.mutex("m").try_lock() is None


@guarantee("restarted", "tokens rise", on=DFLOCKD)
async def test_tokens_rise_over_a_restart(process: OwnProcess) -> None:
    async with tenure.connect(process.url) as client:
        async with client.mutex("m").lock() as lease:
            before = lease.fencing_token
        process.kill()
        process.start()
        async with client.mutex("m").lock(timeout=PATIENCE) as lease:
            assert lease.fencing_token > before


async def test_an_early_server_that_is_killed_serves_again_after_its_restart() -> None:
    with early_server() as server:
        assert isinstance(server, Early)
        async with tenure.connect(server.url) as client, client.session() as session:
            begun = asyncio.Event()
            losing = asyncio.create_task(lose(session, "m", begun))
            await begun.wait()
            server.kill()
            await losing
            server.start()
            async with session.mutex("m").lock(timeout=PATIENCE):
                pass


async def test_a_server_that_is_stopped_past_the_lease_costs_it_in_time(
    process: OwnProcess,
) -> None:
    window = 2.0
    async with tenure.connect(process.url) as client:
        session = await client.session(recovery_window=window)
        begun = asyncio.Event()
        losing = asyncio.create_task(lose(session, "m", begun))
        await begun.wait()
        began = client.clock.now()
        process.pause()
        try:
            await losing
            assert client.clock.now() - began < window
        finally:
            process.resume()
        assert session.state == "expired"
        async with client.mutex("m").lock(timeout=PATIENCE):
            pass


async def test_a_stop_within_the_window_costs_nothing(process: OwnProcess) -> None:
    async with (
        tenure.connect(process.url) as client,
        client.session(recovery_window=10) as session,
    ):
        async with session.mutex("m").lock() as lease:
            process.pause()
            await asyncio.sleep(0.3)  # it is silent that long
            process.resume()
            assert lease.held
        async with session.mutex("m").lock(timeout=PATIENCE):
            pass


# The program


@pytest.mark.exhaustive
@guarantee("stalled", "kept", "one owner", on=DFLOCKD)
@pytest.mark.no_debug
async def test_a_loop_that_stands_still_keeps_its_leases(server: Server) -> None:
    async with tenure.connect(server.url) as client, tenure.connect(server.url) as other:
        _warm = await other.mutex("warm").try_lock()
        session = await client.session(recovery_window=4, max_stall=30)
        waited = await other.mutex("n").lock()
        taking = asyncio.create_task(_take(session, "n"))
        await asyncio.sleep(0)
        lease = await session.mutex("m").lock()
        await waited.release()
        also = await asyncio.wait_for(taking, PATIENCE)
        deadline = lease.deadline
        time.sleep(5)  # noqa: ASYNC251  the loop stands still
        assert lease.held
        assert also.held
        assert lease.deadline > deadline
        assert await other.mutex("m").try_lock() is None
        assert await other.mutex("n").try_lock() is None
        await session.aclose()
        async with other.mutex("m").lock(timeout=PATIENCE):
            pass


async def test_a_connection_that_is_idle_is_kept_alive() -> None:
    with InThread(read_timeout=1.0) as server:
        async with Proxy(server.port) as proxy:
            url = f"{proxy.url}?read-timeout=1"
            async with (
                tenure.connect(url) as client,
                tenure.connect(server.url) as other,
                client.session(recovery_window=6) as session,
            ):
                async with session.mutex("m").lock():
                    waiting = asyncio.create_task(_take(session, "m"))
                    await proxy.until_open(2)
                    await asyncio.sleep(2.5)  # more than the server's patience, twice
                    assert not waiting.done()
                    assert await other.mutex("m").try_lock() is None
                await (await waiting).release()
                assert proxy.accepted == 2


async def test_a_short_read_timeout_shortens_what_a_proof_is_worth() -> None:
    with InThread(read_timeout=2.0) as server:
        async with tenure.connect(f"{server.url}?read-timeout=2") as client:
            session = await client.session(recovery_window=10)
            assert session.deadline - client.clock.now() < 2.0
            await session.aclose()


async def test_renewals_may_be_asked_for_more_often(ours: InThread) -> None:
    async with (
        tenure.connect(f"{ours.url}?renew-ratio=0.05") as client,
        client.events() as events,
        client.session(recovery_window=6) as session,
        session.mutex("m").lock(),
    ):
        began = client.clock.now()
        renewed = 0
        async for event in events:
            renewed += isinstance(event, Renewed)
            if renewed == 8:
                break
        assert client.clock.now() - began < 8 * 1.9


# Tokens


async def test_a_token_lets_in() -> None:
    secret = "0123456789abcdef0123456789abcdef"
    with InThread(authenticator=Authenticator({secret: "me"})) as server:
        async with (
            tenure.connect(f"dflockd://{secret}@127.0.0.1:{server.port}") as client,
            client.mutex("m").lock(),
        ):
            pass
        for url in (server.url, f"dflockd://wrong@127.0.0.1:{server.port}"):
            with pytest.raises(tenure.AuthenticationFailed) as caught:
                async with tenure.connect(url):
                    pass
            assert "wrong" not in str(caught.value)


async def test_it_speaks_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("server.test")
    with InThread(tls=server_context(TlsFiles(pair.cert, pair.key))) as server:
        place = f"127.0.0.1:{server.port}"
        async with (
            tenure.connect(f"dflockds://{place}?tls-ca={authority.cert}") as client,
            client.session() as session,
        ):
            lease = await session.mutex("m").lock()
            waiting = asyncio.create_task(_take(session, "m"))
            session._core.renew()
            await lease.release()
            await (await asyncio.wait_for(waiting, PATIENCE)).release()
        with pytest.raises(tenure.EngineUnavailable, match=r"(?i)certificate"):
            async with tenure.connect(f"dflockds://{place}"):
                pass


async def test_an_unexpected_error_does_not_end_the_attempts_to_connect(
    ours: InThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = 2

    async def fail(*arguments: Any) -> DflockdConnection:
        nonlocal failing
        if failing:
            failing -= 1
            raise MemoryError
        return await connection.dial(*arguments)

    async with Proxy(ours.port) as proxy, tenure.connect(proxy.url) as client:
        async with client.mutex("m").lock():
            pass
        monkeypatch.setattr(shard, "dial", fail)
        proxy.cut()
        async with client.mutex("m").lock(timeout=PATIENCE), client.mutex("n").lock():
            pass
    assert not failing
    assert any("keeping a connection to" in each.getMessage() for each in caplog.records)
