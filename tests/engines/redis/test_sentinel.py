"""A failover: a master, a replica, and a sentinel that promotes it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import redis

import tenure
from tests.clean_up import clean_up_with
from tests.engines.redis.helpers import is_waited_for, replicates, until
from tests.engines.redis.servers import Server, a_folder, a_server, free_port, program
from tests.guarantees import REDIS, guarantee

PATIENCE = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server, str]]:
    """A master, its replica, and the URL of who knows which is which."""
    ports = free_port(), free_port(), free_port()
    master_port, replica_port, sentinel_port = ports
    with (
        a_server(port=master_port) as master,
        a_server("--replicaof", f"127.0.0.1 {master_port}", port=replica_port) as replica,
        a_folder() as folder,
    ):
        (folder / "sentinel.conf").write_text(
            f"port {sentinel_port}\n"
            f"sentinel monitor jobs 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds jobs 500\n"
            "sentinel failover-timeout jobs 3000\n"
        )
        with subprocess.Popen(
            [program("server"), str(folder / "sentinel.conf"), "--sentinel"],
            stdout=subprocess.PIPE,
            text=True,
        ) as sentinel:
            assert sentinel.stdout is not None
            with clean_up_with(sentinel.kill):
                for line in sentinel.stdout:  # it knows the replica from then on
                    if "+slave slave" in line:
                        break
                place = f"127.0.0.1:{sentinel_port}/jobs"
                yield master, replica, f"redis+sentinel://{place}?fresh=true&max_window=60"


async def test_a_sentinel_is_not_taken_for_a_server(pair: tuple[Server, Server, str]) -> None:
    _, _, url = pair
    with pytest.raises(tenure.EngineUnavailable, match=r"a sentinel .* Write redis\+sentinel://"):
        await tenure.connect(url.replace("+sentinel", "").replace("/jobs", "")).list_nodes()


@guarantee("restarted", "kept", "tokens rise", on=REDIS)
async def test_a_failover_keeps_what_the_replica_has(pair: tuple[Server, Server, str]) -> None:
    master, replica, url = pair
    await replicates(replica)
    async with tenure.connect(f"{url}&min_replicas=1") as client, tenure.connect(url) as other:
        session = await client.session(recovery_window=PATIENCE)
        lease = await session.mutex("m").lock(timeout=PATIENCE)
        waiting = asyncio.ensure_future(
            (await other.session(recovery_window=PATIENCE)).mutex("m").lock()
        )
        await is_waited_for(client, "m")
        master.kill()
        async with asyncio.timeout(PATIENCE):
            await lease.release()  # answered by the one that was promoted
            later = await waiting
        assert later.fencing_token > lease.fencing_token
        await later.release()


async def test_a_failover_that_forgets_a_lease_tells_its_holder_and_tokens_rise(
    pair: tuple[Server, Server, str],
) -> None:
    master, replica, url = pair
    async with tenure.connect(url) as client:
        await replicates(replica)
        await until(lambda: "{tenure}:meta" in replica.all_keys())
        replica.pause()
        master.tell("CLIENT", "KILL", "TYPE", "replica")  # it does not hear of what follows
        session = await client.session(recovery_window=PATIENCE)
        lease = await session.mutex("m").lock()
        master.kill()
        replica.resume()
        async with asyncio.timeout(PATIENCE):
            lost = await lease.wait_lost()
        assert isinstance(lost.__cause__, tenure.SessionExpired)
        async with (
            client.session() as another,
            another.mutex("m").lock(timeout=PATIENCE) as later,
        ):
            assert later.fencing_token > lease.fencing_token


@contextmanager
def in_a_partition(
    pair: tuple[Server, Server, str],
) -> Iterator[Callable[[], None]]:
    """Yield what promotes the replica, while the master goes on and keeps its connections."""
    _, replica, url = pair
    with redis.Redis(port=urlsplit(url).port or 0, protocol=2) as sentinel:

        def promote() -> None:
            sentinel.sentinel_remove("jobs")
            replica.tell("REPLICAOF", "NO", "ONE")
            sentinel.sentinel_monitor("jobs", "127.0.0.1", replica.port, 1)

        yield promote


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_client_leaves_a_master_that_goes_on_after_a_failover(
    pair: tuple[Server, Server, str], protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    master, replica, url = pair
    await replicates(replica)
    with in_a_partition(pair) as promote:
        async with tenure.connect(f"{url}&protocol={protocol}") as client:
            session = await client.session(recovery_window=PATIENCE)
            lease = await session.mutex("m").lock(timeout=PATIENCE)
            await until(lambda: _has_caught_up(master))
            promote()
            async with asyncio.timeout(PATIENCE), tenure.connect(url) as other:
                waiting = asyncio.ensure_future(other.mutex("m").lock())
                await is_waited_for(other, "m")  # on the new master, where the lease is known
                await until(lambda: "name another master" in caplog.text)
                assert lease.held
                await lease.release()  # there as well, and not on the former master
                async with await waiting as later:
                    assert later.fencing_token > lease.fencing_token
        assert master.tell("PING")


async def test_a_client_keeps_its_master_while_no_sentinel_answers(
    pair: tuple[Server, Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    _, _, url = pair
    with redis.Redis(port=urlsplit(url).port or 0, protocol=2) as sentinel:
        async with tenure.connect(url) as client:
            lease = await client.mutex("m").lock(timeout=PATIENCE)
            caplog.set_level(logging.DEBUG, "tenure")
            sentinel.sentinel_remove("jobs")
            await until(lambda: "the sentinels do not answer" in caplog.text)
            async with client.mutex("another").lock(timeout=PATIENCE):
                assert lease.held
            assert "lost contact" not in caplog.text


def _has_caught_up(master: Server) -> bool:
    told = master.tell("INFO", "replication")
    assert isinstance(told, dict)
    return bool(told["slave0"]["offset"] == told["master_repl_offset"])
