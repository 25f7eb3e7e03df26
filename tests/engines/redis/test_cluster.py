"""Redis Cluster: any node leads to the one that serves a namespace, also after that has changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis

import tenure
from tenure.engines.redis.connecting import Moved, connect
from tenure.engines.redis.locating import ClusterNodes, Node, nodes_of
from tenure.engines.redis.url import parse
from tests.engines.redis.clusters import Cluster, a_cluster, shared, slot_of
from tests.engines.redis.helpers import PATIENCE, is_waited_for, queue_of, until
from tests.engines.redis.servers import Server, a_server, free_port
from tests.guarantees import REDIS, guarantee
from tests.server.certificates import Authority


@pytest.fixture
def cluster() -> Cluster:
    return shared()


# Connecting


async def test_any_node_leads_to_the_one_that_serves_the_namespace(cluster: Cluster) -> None:
    url = cluster.url().replace("redis+cluster", "redis")
    hosts, parameters = url.split("?")
    nodes = [f"redis://{each}?{parameters}" for each in hosts.removeprefix("redis://").split(",")]
    async with tenure.connect(nodes[0]) as one, tenure.connect(nodes[1]) as other:
        lease = await one.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(one, "m")
        await lease.release()
        async with await waiting as later, tenure.connect(nodes[2]) as third:
            assert later.fencing_token > lease.fencing_token
            assert await queue_of(third, "m") == (1, 0)


async def test_nodes_of_the_url_that_are_down_do_not_matter(cluster: Cluster) -> None:
    url = cluster.url("", cluster.nodes[0]).replace("://", f"://127.0.0.1:{free_port()},")
    async with tenure.connect(url) as client, client.mutex("m").lock() as lease:
        assert lease.held


async def test_a_socket_of_a_node_leads_to_the_others(cluster: Cluster) -> None:
    url = cluster.url()
    other = cluster.other_than(cluster.master_of(url))
    place = f"redis+unix://{other.socket}?{url.partition('?')[2]}"
    async with tenure.connect(place) as client, client.mutex("m").lock() as lease:
        assert lease.held


async def test_a_cluster_that_does_not_know_how_it_is_reached_is_on_one_host(
    cluster: Cluster,
) -> None:
    url = cluster.url()
    other = cluster.other_than(cluster.master_of(url))
    for node in cluster.nodes:
        node.tell("CONFIG", "SET", "cluster-preferred-endpoint-type", "unknown-endpoint")
    try:
        for scheme in ("redis", "redis+cluster"):
            place = f"{scheme}://localhost:{other.port}?{url.partition('?')[2]}"
            async with tenure.connect(place) as client, client.mutex("m").lock() as lease:
                assert lease.held
        place = f"redis+unix://{cluster.master_of(url).socket}?{url.partition('?')[2]}"
        async with tenure.connect(place) as client, client.mutex("m").lock() as lease:
            assert lease.held
        place = f"redis+unix://{other.socket}?{url.partition('?')[2]}"
        await _refuses(place, tenure.EngineUnavailable, "does not have the keys")
    finally:
        for node in cluster.nodes:
            node.tell("CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")


async def test_an_account_that_may_not_use_the_command_cluster_finds_the_node(
    cluster: Cluster,
) -> None:
    name = cluster.url().partition("prefix=")[2]
    rights = (
        "+@read +@write -@dangerous +@connection +@transaction +subscribe +unsubscribe +publish"
    )
    scripts = "+eval +evalsha +script|load +script|exists +time +role"
    keys = f"~{{{name}}}:*", f"&{{{name}}}:*"
    for node in cluster.nodes:
        words = ("on", ">word", *keys, "-@all", *rights.split(), *scripts.split())
        node.tell("ACL", "SETUSER", "app", "reset", *words)
    url = cluster.url(name, parameters="&username=app&password=word")
    async with tenure.connect(url) as client, client.session() as session:
        lease = await session.mutex("m").lock()
        cluster.move(url)
        async with asyncio.timeout(PATIENCE), session.mutex("other").lock():
            assert lease.held
    await _refuses(url.replace("=word", "=wrong"), tenure.AuthenticationFailed, "WRONGPASS")


async def _refuses(url: str, kind: type[tenure.TenureError], why: str) -> None:
    with pytest.raises(kind, match=why):
        async with tenure.connect(url):
            pytest.fail("it cannot be used")


async def test_what_a_cluster_cannot_do_is_said(cluster: Cluster) -> None:
    await _refuses(cluster.url(parameters="&db=1"), tenure.EngineError, "a cluster has one")


async def test_one_server_is_not_taken_for_a_cluster() -> None:
    port = free_port()
    with a_server(port=port):
        url = f"redis+cluster://127.0.0.1:{port}"
        await _refuses(url, tenure.Unsupported, "Write redis://")


async def test_an_address_that_cannot_be_reached_is_called_one_of_the_cluster(
    cluster: Cluster,
) -> None:
    url = cluster.url()
    other = cluster.other_than(cluster.master_of(url))
    serving = cluster.master_of(url)
    serving.tell("CONFIG", "SET", "cluster-announce-hostname", "no-such-host.invalid")
    for node in cluster.nodes:
        node.tell("CONFIG", "SET", "cluster-preferred-endpoint-type", "hostname")
    try:
        await until(lambda: b"no-such-host" in cast("bytes", other.tell("CLUSTER", "NODES")))
        place = f"redis://127.0.0.1:{other.port}?{url.partition('?')[2]}"
        why = r"no-such-host.invalid:\d+ \(an address that the cluster announces\)"
        await _refuses(place, tenure.EngineUnavailable, why)
    finally:
        serving.tell("CONFIG", "SET", "cluster-announce-hostname", "")
        for node in cluster.nodes:
            node.tell("CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")


# Moving a slot


@pytest.mark.parametrize("protocol", [2, 3])
async def test_holders_waiters_and_watchers_follow_their_slot(
    cluster: Cluster, protocol: int
) -> None:
    url = cluster.url(parameters=f"&protocol={protocol}")
    async with (
        tenure.connect(url) as client,
        client.session() as session,
        tenure.connect(url) as other,
        other.session() as waiter,
    ):
        semaphore = session.semaphore("s")
        await semaphore.create(1)
        states = semaphore.watch(data=True)
        await anext(states)
        lease = await session.mutex("m").lock()
        waiting = asyncio.ensure_future(waiter.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(client, "m")
        former = cluster.master_of(url)
        assert cluster.move(url) is not former
        async with asyncio.timeout(PATIENCE):
            await waiter.semaphore("s").update(b"new")
            assert (await anext(states)).data == b"new"
            assert lease.held
            await lease.release()
            async with await waiting as later:
                assert later.fencing_token > lease.fencing_token
        await states.aclose()


async def test_calls_wait_while_a_slot_is_on_its_way_and_are_carried_out_once(
    cluster: Cluster,
) -> None:
    url = cluster.url()
    async with tenure.connect(url) as client, client.session() as session:
        held = await session.mutex("held").lock()
        await session.semaphore("old").create(1)
        source = cluster.master_of(url)
        to = cluster.other_than(source)
        cluster.begin_move(url, to)
        assert cluster.move_keys(url, source, to, 2) == 2  # the others are not moved yet
        calls = [
            asyncio.ensure_future(session.mutex("free").lock()),
            asyncio.ensure_future(held.release()),
            asyncio.ensure_future(session.semaphore("s").create(1)),
        ]
        await until(lambda: session.state == "detached")
        with pytest.raises(tenure.AcquireTimeout, match="moving the keys of the namespace"):
            await session.mutex("late").lock(timeout=0.1)
        await _refuses(url, tenure.EngineUnavailable, "moving the keys")
        assert not any(each.done() for each in calls)
        cluster.end_move(url, source, to)
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*calls)
        assert await queue_of(client, "free") == (1, 0)
        for name in ("held", "late"):
            assert await queue_of(client, name) == (0, 0)
        assert (await session.semaphore("old").describe()).limit == 1


async def test_a_move_that_is_given_up_leaves_everything_as_it_was(cluster: Cluster) -> None:
    url = cluster.url()
    async with (
        tenure.connect(url) as client,
        client.session() as session,
        session.mutex("m").lock() as lease,
    ):
        source = cluster.master_of(url)
        to = cluster.other_than(source)
        cluster.begin_move(url, to)
        waiting = asyncio.ensure_future(session.mutex("other").lock())
        await until(lambda: session.state == "detached")
        for node in (source, to):
            node.tell("CLUSTER", "SETSLOT", str(slot_of(url)), "STABLE")
        async with asyncio.timeout(PATIENCE), await waiting:
            assert lease.held


async def test_a_cluster_that_does_not_serve_is_an_outage(cluster: Cluster) -> None:
    url = cluster.url()
    async with tenure.connect(url) as client, client.session() as session:
        lease = await session.mutex("m").lock()
        serving = cluster.master_of(url)
        serving.tell("CONFIG", "SET", "cluster-require-full-coverage", "no")
        # Another slot of the node keeps the state of the others; this one is served by nobody.
        serving.tell("CLUSTER", "DELSLOTS", str(slot_of(url)))
        try:
            waiting = asyncio.ensure_future(session.mutex("other").lock())
            await until(lambda: session.state == "detached")
            with pytest.raises(tenure.AcquireTimeout, match="does not serve"):
                await session.mutex("late").lock(timeout=0.1)
        finally:
            serving.tell("CLUSTER", "ADDSLOTS", str(slot_of(url)))
            serving.tell("CONFIG", "SET", "cluster-require-full-coverage", "yes")
        async with asyncio.timeout(PATIENCE), await waiting:
            assert lease.held


async def test_what_other_nodes_know_later_counts(cluster: Cluster) -> None:
    url = cluster.url()
    address = parse(url)
    nodes = ClusterNodes(address)
    former = cluster.master_of(url)
    place = "127.0.0.1", former.port
    connection, server = await connect(address, place, _ignore, _ignore)
    await nodes.serve(connection, server)
    assert await nodes.newer(server) is None
    to = cluster.move(url)
    found: list[object] = []

    async with asyncio.timeout(PATIENCE):
        while not found or found[-1] is None:
            found.append(await nodes.newer(server))
    assert found[-1] == ("127.0.0.1", to.port)
    assert await nodes.locate() == ("127.0.0.1", to.port)
    connection.drop("it is not needed")
    nodes.disconnect()
    with pytest.raises(Moved) as raised:
        await connect(address, place, _ignore, _ignore)
    assert raised.value.place == ("127.0.0.1", to.port)


def _ignore(*_: object) -> None:
    """Ignore pushes and the end of a connection."""


def test_the_report_about_the_nodes_is_read() -> None:
    report = (
        b"07c 127.0.0.1:30004@31004,host master - 0 1426238317239 4 connected 0-5 [7->-292]\n"
        b"e7d :0@0 slave,fail? 07c 1426238316232 1426238316232 x disconnected\n"
        b"292 127.0.0.1:30003@31003 myself,slave 07c 0 1426238318243 3 connected\n"
    )
    assert list(nodes_of(report)) == [
        Node("07c", frozenset({"master"}), 4, ("7->-292",)),
        Node("292", frozenset({"myself", "slave"}), 3, ()),
    ]


@pytest.mark.exhaustive
async def test_nodes_are_found_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.signs("server")
    files = ("--tls-cert-file", own.cert, "--tls-key-file", own.key)
    others = ("--tls-ca-cert-file", authority.cert, "--tls-auth-clients", "no")
    tls = (*files, *others, "--tls-cluster", "yes")  # else Redis 7.0 announces the other ports
    with a_cluster(tls=tls) as cluster:
        for port in cluster.tls_ports:
            url = f"redis+cluster://localhost:{port}?fresh=true&prefix=test-{port}"
            secure = f"{url}&ssl=true&tls_ca={authority.cert}&tls_server_name=localhost"
            async with (
                tenure.connect(secure) as client,
                client.session() as session,
                session.mutex("m").lock() as lease,
            ):
                cluster.move(url)
                async with asyncio.timeout(PATIENCE), session.mutex("n").lock():
                    assert lease.held


# Failovers


@pytest.fixture
def replicated() -> Iterator[Cluster]:
    with a_cluster(replicas=True) as cluster:
        yield cluster


def replica_of(cluster: Cluster, master: Server) -> Server:
    return cluster.nodes[cluster.nodes.index(master) + 3]


def keys_of(node: Server) -> set[str]:
    found = cast("list[bytes]", node.tell("KEYS", "*"))
    return {each.decode() for each in found}


@pytest.mark.exhaustive
@guarantee("restarted", "kept", "tokens rise", on=REDIS)
async def test_a_failover_keeps_what_the_replica_has(replicated: Cluster) -> None:
    url = replicated.url("jobs")
    master = replicated.master_of(url)
    # Of the one node that ends: the others are known from it.
    url = replicated.url("jobs", master, parameters="&max_window=60")
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


@pytest.mark.exhaustive
async def test_a_failover_that_forgets_a_lease_tells_its_holder_and_tokens_rise(
    replicated: Cluster,
) -> None:
    url = replicated.url("jobs", parameters="&max_window=60")
    master = replicated.master_of(url)
    replica = replica_of(replicated, master)
    async with tenure.connect(url) as client:
        await client.list_nodes()
        await until(lambda: "{jobs}:meta" in keys_of(replica))
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


@pytest.mark.exhaustive
async def test_a_failover_without_any_data_is_a_loss_of_data(replicated: Cluster) -> None:
    url = replicated.url("jobs", parameters="&max_window=5")
    master = replicated.master_of(url)
    replica = replica_of(replicated, master)
    replica.pause()
    master.tell("CLIENT", "KILL", "TYPE", "replica")
    async with tenure.connect(url) as client:
        session = await client.session(recovery_window=5)
        lease = await session.mutex("m").lock()
        granted = time.monotonic()
        master.kill()
        replica.resume()
        async with asyncio.timeout(PATIENCE):
            await lease.wait_lost()
            async with client.mutex("m").lock() as later:
                assert later.fencing_token > lease.fencing_token
        assert time.monotonic() - granted > 5.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["asked for", "stopped"])
async def test_holders_and_waiters_follow_a_promoted_replica(replicated: Cluster, how: str) -> None:
    url = replicated.url("jobs")
    master = replicated.master_of(url)
    replica = replica_of(replicated, master)
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        lease = await client.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(client, "m")
        if how == "stopped":
            await until(lambda: keys_of(replica) == keys_of(master))
            master.pause()
        else:
            replica.tell("CLUSTER", "FAILOVER")  # connections of the former master stay
        await until(lambda: cast("list[bytes]", replica.tell("ROLE"))[0] == b"master")
        async with asyncio.timeout(PATIENCE):
            await lease.release()
            async with await waiting as later:
                assert later.fencing_token > lease.fencing_token
                if how == "stopped":
                    master.resume()
                    await until(lambda: cast("list[bytes]", master.tell("ROLE"))[0] == b"slave")
                async with client.mutex("other").lock(timeout=PATIENCE):
                    assert later.held


@pytest.mark.exhaustive
async def test_holders_and_waiters_follow_a_slot_that_is_moved_at_once(cluster: Cluster) -> None:
    url = cluster.url()
    slot = str(slot_of(url))
    async with tenure.connect(url) as client, tenure.connect(url) as other:
        lease = await client.mutex("m").lock()
        waiting = asyncio.ensure_future(other.mutex("m").lock(timeout=PATIENCE))
        await is_waited_for(client, "m")
        source = cluster.master_of(url)
        to = cluster.other_than(source)
        place = "SLOTSRANGE", slot, slot, "NODE", cluster.id_of(to)
        try:
            source.tell("CLUSTER", "MIGRATESLOTS", *place)
        except redis.ResponseError:
            await lease.release()
            await (await waiting).release()
            pytest.skip("this Redis has no CLUSTER MIGRATESLOTS (Valkey 9 has)")
        await until(lambda: cluster.master_of(url) is to)
        async with asyncio.timeout(PATIENCE):
            assert lease.held
            await lease.release()
            async with await waiting as later:
                assert later.fencing_token > lease.fencing_token


@pytest.mark.exhaustive
@pytest.mark.no_debug
async def test_a_stuck_loop_is_renewed_for_on_the_node_that_has_its_slot_now(
    cluster: Cluster,
) -> None:
    url = cluster.url()
    async with (
        tenure.connect(url) as client,
        client.session(recovery_window=1.5, max_stall=60) as session,
        session.mutex("m").lock() as lease,
    ):
        mover = threading.Timer(1.0, cluster.move, (url,))
        mover.start()
        time.sleep(5)  # noqa: ASYNC251  the loop is stuck
        mover.join()
        assert lease.held


@pytest.mark.exhaustive
async def test_slots_that_move_under_load_lose_nothing(cluster: Cluster) -> None:
    url = cluster.url()
    tokens: list[int] = []
    inside = 0
    ends = time.monotonic() + 20.0

    async def work(client: tenure.Client) -> None:
        nonlocal inside
        while time.monotonic() < ends:
            async with client.mutex("m").lock(timeout=PATIENCE) as lease:
                inside += 1
                assert inside == 1
                tokens.append(lease.fencing_token)
                await asyncio.sleep(0)
                inside -= 1

    async def move() -> int:
        moves = 0
        while time.monotonic() < ends - 3.0:
            await asyncio.to_thread(cluster.move, url)
            granted = len(tokens)
            while len(tokens) < granted + 20:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            moves += 1
        return moves

    async with tenure.connect(url) as one, tenure.connect(url) as other:
        moving = asyncio.ensure_future(move())
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(work(one))
                group.create_task(work(other))
        assert await moving > 2
    assert tokens == sorted(set(tokens))
