"""Servers of all sorts: with a password, with TLS, of a cluster, full, with replicas or not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tenure.clock import SystemClock
from tenure.engines.redis.engine import RedisEngine
from tenure.engines.redis.url import parse
from tenure.identity import this_program
from tests.engines.redis.helpers import PATIENCE, is_waited_for, replicates, until
from tests.engines.redis.servers import Server, a_server, free_port
from tests.guarantees import REDIS, guarantee
from tests.server.certificates import Authority
from tests.server.dflockd import talking
from tests.server.serving import serving


async def works(url: str) -> None:
    """One acquires, another one is granted by its release."""
    async with tenure.connect(url) as one, tenure.connect(url) as other:
        lease = await one.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=30))
        await is_waited_for(one, "m")
        await lease.release()
        later = await waiting
        assert later.fencing_token > lease.fencing_token
        await later.release()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_password_is_asked_for(protocol: int) -> None:
    with a_server(
        "--requirepass", "secret", "--user", *"job on >word ~* &* +@all".split()
    ) as server:
        url = f"{server.url}&protocol={protocol}"
        await works(f"{url}&password=secret")
        await works(f"{url}&username=job&password=word")
        for wrong in ("", "&password=wrong"):
            with pytest.raises(tenure.AuthenticationFailed):
                await works(url + wrong)


async def test_a_database_is_a_namespace_of_its_own(server: Server) -> None:
    async with tenure.connect(server.url) as one, tenure.connect(f"{server.url}&db=3") as other:
        one_lease, other_lease = await one.mutex("m").lock(), await other.mutex("m").lock()
        assert one_lease.held
        assert other_lease.held
    await works(f"{server.url}&db=3&protocol=2")


async def test_describing_one_semaphore_costs_the_same_however_many_there_are(
    server: Server,
) -> None:
    def commands() -> int:
        told = server.tell("INFO", "commandstats")
        assert isinstance(told, dict)
        return sum(each["calls"] for name, each in told.items() if name != "cmdstat_info")

    async def cost(client: tenure.Client) -> int:
        before = commands()
        found = await client.describe_semaphore("m")
        assert [each.program for each in found.owners] == [this_program().program]
        return commands() - before

    async with (
        tenure.connect(server.url) as client,
        client.session() as session,
        session.mutex("m").lock(),
    ):
        await cost(client)  # the script is loaded
        alone = await cost(client)
        for number in range(200):
            await session.semaphore(f"lasting-{number}").create(1)
        leases = [await session.mutex(f"mutex-{number}").lock() for number in range(50)]
        assert await cost(client) <= alone + 20  # the session may be renewed meanwhile
        assert all(lease.held for lease in leases)


async def test_a_waiter_learns_its_position_without_a_read_of_the_queue(server: Server) -> None:
    def reads() -> int:
        told = server.tell("INFO", "commandstats")
        assert isinstance(told, dict)
        return sum(each["calls"] for name, each in told.items() if name == "cmdstat_hgetall")

    async with tenure.connect(server.url) as client, client.mutex("m").lock():
        tickets = [await client.mutex("m").enqueue() for _ in range(50)]
        before = reads()
        assert [await each.position() for each in tickets] == list(range(1, 51))
        assert reads() <= before + 5  # the first waiter may be looked up meanwhile
        server.tell("DEL", f"{parse(server.url).prefix}w:/default:m")
        assert [await each.position() for each in tickets] == list(range(1, 51))


async def test_a_push_of_a_newer_release_is_ignored(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = parse(server.url).prefix
    async with (
        tenure.connect(server.url) as one,
        tenure.connect(server.url) as other,
        other.session() as session,
    ):
        async with one.mutex("m").lock():
            waiting = asyncio.create_task(session.mutex("m").lock())
            await is_waited_for(one, "m")
            fields = server.tell("HMGET", f"{prefix}s:{session.id}", "c", "a")
            assert isinstance(fields, list)
            channel, token = (each.decode() for each in fields)
            server.tell("PUBLISH", channel, f"z {token} of a later time")
        async with asyncio.timeout(20):
            await (await waiting).release()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.fixture(scope="module")
def secure_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    server = authority.signs("server")
    port = free_port()
    options = (
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", server.cert, "--tls-key-file", server.key),
        *("--tls-ca-cert-file", authority.cert),
    )
    with a_server(*options):
        yield f"rediss://localhost:{port}?fresh=true&ssl_ca_certs={authority.cert}"


async def test_tls_is_spoken(secure_url: str) -> None:
    await works(secure_url)


async def test_a_server_that_nobody_vouches_for_is_not_spoken_to(secure_url: str) -> None:
    with pytest.raises(tenure.EngineUnavailable, match="certificate"):
        await works(secure_url.partition("&")[0])


@guarantee("stalled", "kept", on=REDIS)
@pytest.mark.no_debug
async def test_a_stuck_loop_is_renewed_for_over_tls_too(secure_url: str) -> None:
    async with (
        tenure.connect(secure_url) as client,
        client.session(recovery_window=1.5, max_stall=60) as session,
        session.mutex("m").lock() as lease,
    ):
        time.sleep(4)  # noqa: ASYNC251  the loop is stuck
        assert lease.held
    assert "tenure-redis-heartbeat" not in {thread.name for thread in threading.enumerate()}


async def test_a_node_whose_cluster_has_no_slots_is_an_outage() -> None:
    with (
        a_server(
            *("--cluster-enabled", "yes", "--cluster-port", str(free_port())), port=free_port()
        ) as server,
        pytest.raises(tenure.EngineUnavailable, match="the cluster does not serve"),
    ):
        await works(server.url)


async def test_a_server_that_may_evict_leases_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with a_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        with pytest.raises(tenure.EngineError, match="noeviction"):
            await works(server.url)
        await works(f"{server.url}&eviction=warn")
        assert "noeviction" in caplog.text


async def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(tenure.EngineUnavailable, match="cannot be reached"):
        await works(f"redis://localhost:{free_port()}")


@pytest.mark.parametrize("protocol", [2, 3])
async def test_an_account_that_may_not_hear_anything_is_told_so(protocol: int) -> None:
    with a_server("--user", *"job on >word ~* +@all resetchannels".split()) as server:
        url = f"{server.url}&protocol={protocol}&username=job&password=word"
        with pytest.raises(tenure.AuthenticationFailed, match=r"ermissions .*channels?.*\. Grant"):
            await works(url)


async def test_a_database_that_is_not_there_is_said(server: Server) -> None:
    with pytest.raises(tenure.EngineError, match=r"no database 99\. Choose one below"):
        await works(f"{server.url}&db=99")


async def test_tls_is_taken_for_what_it_is_not(secure_url: str) -> None:
    plain = f"redis{secure_url.partition('?')[0].removeprefix('rediss')}"
    with pytest.raises(tenure.EngineUnavailable, match="if it uses TLS, write rediss://"):
        await works(plain)
    port = free_port()
    with (
        a_server(port=port),
        pytest.raises(tenure.EngineUnavailable, match=r"[Ii]f it does not use TLS, write redis://"),
    ):
        await works(f"rediss://localhost:{port}?socket_connect_timeout=0.5")


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        (b"<html>", tenure.EngineUnavailable, "sent an invalid reply"),
        (b"-ERR unknown command\r\n", tenure.Unsupported, "Redis 5.0.14. Use 6.2"),
    ],
)
async def test_what_is_no_redis_or_an_old_one_is_said(
    said: bytes, error: type[Exception], why: str
) -> None:
    info = b"redis_version:5.0.14\r\n"
    answers = [said, b"+OK\r\n", b"*1\r\n$6\r\nmaster\r\n", b"$%d\r\n%s\r\n" % (len(info), info)]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for each in answers:
            if not await reader.read(65536):
                break
            writer.write(each)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(error, match=why):
            await works(f"redis://127.0.0.1:{port}")


async def test_what_is_left_to_chance_is_said(server: Server) -> None:
    async with tenure.connect(server.url) as client:
        assert "a failover may lose the last ones" in client.guarantees
    async with tenure.connect(f"{server.url}&min_replicas=2") as client:
        assert "confirmed by 2 replica(s)" in client.guarantees


def test_it_works_on_uvloop(server: Server) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(works(server.url))
        runner.run(works(f"{server.url}&protocol=2"))


async def test_a_count_that_is_true_is_one(server: Server) -> None:
    async with tenure.connect(server.url) as client, client.session() as session:
        pool = session.semaphore("pool")
        await pool.create(limit=True)
        async with pool.acquire(True):
            found = await pool.describe(owners=True)
            assert (found.limit, found.held, found.owners[0].count) == (1, 1, 1)
        assert (await pool.describe()).held == 0


# Replicas


async def test_a_grant_is_given_back_when_too_few_replicas_confirm_it(server: Server) -> None:
    async with (
        tenure.connect(server.url) as eye,
        tenure.connect(f"{server.url}&min_replicas=1") as client,
    ):
        with pytest.raises(tenure.EngineError, match="0 of min_replicas=1 replicas"):
            await client.mutex("m").lock()
        async with eye.mutex("m").lock(timeout=30) as lease:
            waiting = asyncio.ensure_future(client.mutex("m").lock(timeout=30))
            await is_waited_for(eye, "m")
            await lease.release()
        with pytest.raises(tenure.LeaseLost, match="not confirmed by enough replicas"):
            await waiting


@guarantee("none", "one owner", on=REDIS)
async def test_a_grant_is_told_when_a_replica_has_it(server: Server) -> None:
    port = free_port()
    with a_server(port=port) as master, a_server("--replicaof", f"127.0.0.1 {port}") as replica:
        assert master.port == port
        await replicates(replica)
        async with tenure.connect(f"{master.url}&min_replicas=1") as client:
            async with client.mutex("m").lock(timeout=30):
                assert any(":m:/default:m" in key for key in replica.all_keys())
            await works(f"{master.url}&min_replicas=1")
        with pytest.raises(tenure.EngineUnavailable, match="replica"):
            await works(replica.url)


async def test_a_grant_that_is_evicted_while_replicas_confirm_it_is_lost() -> None:
    port = free_port()
    with a_server(port=port) as master, a_server("--replicaof", f"127.0.0.1 {port}") as replica:
        await replicates(replica)
        async with (
            tenure.connect(master.url) as eye,
            tenure.connect(f"{master.url}&min_replicas=1") as client,
        ):
            async with client.mutex("m").lock(timeout=30):
                pass
            replica.pause()
            locking = asyncio.ensure_future(client.mutex("m").lock(timeout=30))
            try:
                holder = None
                while holder is None:
                    holder = await eye.mutex("m").inspect()
                assert not locking.done()
                assert await eye.evict("/default", "m", holder.fencing_token)
                with pytest.raises(tenure.LeaseLost, match="evicted"):
                    await locking
                replica.resume()
                await works(master.url)
            finally:
                replica.resume()


async def test_a_confirmation_that_cannot_be_asked_for_leaves_no_connection_behind() -> None:
    with a_server("--user", *"anna on >word ~* &* +@all".split()) as server:
        url = f"{server.url}&username=anna&password=word&min_replicas=1"
        async with tenure.connect(url) as client, client.session() as session:
            server.tell("ACL", "SETUSER", "anna", "resetpass", ">another")
            for _ in range(3):
                with pytest.raises(tenure.EngineError, match="WRONGPASS"):
                    await session.mutex("m").lock()
            await until(lambda: str(server.tell("CLIENT", "LIST")).count(" addr=") == 2)
            server.tell("ACL", "SETUSER", "anna", "resetpass", ">word")


async def test_what_is_asked_while_the_client_is_closed_fails_at_once(server: Server) -> None:
    client = tenure.connect(server.url)
    await client.list_nodes()
    server.pause()
    asked = asyncio.ensure_future(client.list_nodes())
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(tenure.EngineError, match="was closed"):
        async with asyncio.timeout(5):
            await asked


async def test_a_store_with_short_windows_serves_clients_of_dflockd(server: Server) -> None:
    clock = SystemClock()
    engine = RedisEngine(parse(server.url), clock)
    async with talking.serving(clock, engine=engine) as listener:
        client = talking.Client(listener)
        client.ask("l", "job", "10")
        heard = ""
        async with asyncio.timeout(PATIENCE):
            while not heard:
                heard = await client.hears()
        assert heard.startswith("ok ")


async def test_a_client_of_a_server_begins_with_a_window_that_its_store_allows(
    server: Server, tmp_path: Path
) -> None:
    async with (
        serving(tmp_path, "--store", f"{server.url}&max_window=10") as served,
        tenure.connect(served.address) as client,
        client.mutex("m").lock() as lease,
    ):
        assert lease.held
