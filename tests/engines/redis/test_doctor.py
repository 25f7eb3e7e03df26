"""`tenure doctor` on a Redis: what it finds, and what it says to do about it."""

from __future__ import annotations

import asyncio

import pytest

from tenure import blocking
from tenure.doctor import Finding, examine, healthy, without_secrets
from tenure.engines import diagnose
from tests.engines.redis.clusters import shared, slot_of
from tests.engines.redis.helpers import until
from tests.engines.redis.servers import Server, a_server, free_port


def findings(url: str) -> dict[str, Finding]:
    """By what was examined; nothing twice."""
    found = list(diagnose(url))
    assert len({each.what for each in found}) == len(found)
    return {each.what: each for each in found}


def failure(url: str) -> Finding:
    """The one there is; it says what to do."""
    (found,) = [each for each in diagnose(url) if each.level == "failure"]
    assert found.remedy
    return found


def test_a_server_that_works_is_described(durable: Server) -> None:
    with blocking.connect(durable.url) as client, client.session() as session:
        client.list_nodes()
        session.semaphore("pool").create(limit=3)
        with session.mutex("m").lock(), session.mutex("other").lock():
            found = findings(durable.url)
            assert {each.level for each in found.values()} == {"ok"}
            assert found["contents"].found == (
                "nodes: 1, sessions: 1, semaphores: 3 with 2 owners and 0 waiting"
            )
            assert "appendfsync always" in found["persistence"].found
            durable.tell("SET", "{tenure}:stray", "1")
            assert "{tenure}:stray" in findings(durable.url)["expiry"].found
    everything = list(examine(durable.url))
    assert healthy(everything)
    assert "hand-over" in {each.what for each in everything}


def test_a_namespace_that_is_not_there_is_not_made(server: Server) -> None:
    url = server.url.partition("?")[0]
    found = findings(url)
    assert found["persistence"].level == "warning"
    assert found["namespace"].absent
    assert healthy(list(examine(url)))
    assert server.all_keys() == {}


def test_the_wait_at_first_contact_and_its_reason_are_said(server: Server) -> None:
    url = server.url.partition("?")[0]
    early = findings(url)["namespace"]
    assert "started less than the longest recovery window ago" in early.found
    assert "?fresh=true" in early.remedy
    server.tell("SCRIPT", "FLUSH")
    assert "forgotten its scripts" in findings(url)["namespace"].found
    said = findings(f"{url}?fresh=true")["namespace"]
    assert (said.level, said.remedy) == ("ok", "")
    with blocking.connect(server.url):
        server.tell("FLUSHALL")
        lost = findings(server.url)["namespace"]
        assert "for 30 s: its data was lost" in lost.found
        assert lost.remedy == "wait"


def test_a_quarantine_is_said(server: Server) -> None:
    url = f"{server.url.partition('?')[0]}?max_window=60"
    with blocking.connect(url):
        pass
    said = failure(url)
    assert said.what == "quarantine"
    assert "started less than the longest recovery window ago" in said.found
    assert said.remedy == "if no program has ever used it, say so with ?fresh=true; else wait"
    server.tell("HSET", "{tenure}:meta", "n", "0")  # as a client does that knew the data before
    assert failure(url).remedy == "wait"


def test_the_longest_recovery_window_is_said(server: Server) -> None:
    with blocking.connect(f"{server.url}&max_window=60"):
        assert findings(f"{server.url}&max_window=60")["recovery window"].found.startswith("60 s")
        other = failure(server.url)
    assert other.what == "recovery window"
    assert "?max_window=60" in other.remedy


def test_a_policy_that_evicts_is_said() -> None:
    with a_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        assert failure(server.url).what == "memory"
        found = findings(f"{server.url}&eviction=warn")
        assert found["memory"].level == "warning"


def test_the_node_of_a_cluster_that_serves_the_namespace_is_named() -> None:
    cluster = shared()
    url = cluster.url()
    serving = cluster.master_of(url)
    other = cluster.other_than(serving)
    with blocking.connect(url):
        for place in (url, f"redis+unix://{other.socket}?{url.partition('?')[2]}"):
            found = findings(place)
            assert found["cluster"].found == (
                f"127.0.0.1:{serving.port} serves slot {slot_of(url)}, that of the namespace; "
                "masters: 3, replicas: 0"
            )
            assert f"127.0.0.1:{serving.port}, not encrypted" in found["connection"].found
            assert found["contents"].level == found["cluster"].level == "ok"
        cluster.begin_move(url, other)
        assert "on its way" in findings(url)["cluster"].found
        cluster.end_move(url, serving, other)
        assert f"127.0.0.1:{other.port} serves" in findings(url)["cluster"].found


def test_a_cluster_without_its_slots_is_said() -> None:
    options = "--cluster-enabled", "yes", "--cluster-port", str(free_port())
    with a_server(*options, port=free_port()) as server:
        assert "cluster_state:fail" in findings(server.url)["cluster"].found


def test_too_few_replicas_are_said() -> None:
    port = free_port()
    with a_server(port=port) as master, a_server("--replicaof", "localhost", str(port)) as replica:

        def is_online() -> bool:
            told = master.tell("INFO", "replication")
            return isinstance(told, dict) and told.get("slave0", {}).get("state") == "online"

        asyncio.run(until(is_online))
        assert findings(master.url)["replicas"].level == "warning"
        assert failure(f"{master.url}&min_replicas=2").what == "replicas"
        assert failure(replica.url).what == "role"


def test_what_an_account_may_not_ask_is_left_out() -> None:
    user = "weak on >word ~* &* +@all -info -config -time".split()
    with a_server("--user", *user) as server:
        found = findings(f"{server.url}&username=weak&password=word")
    assert found["rights"].level == "warning"
    assert "INFO, TIME" in found["rights"].found
    assert "round trip" in found


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:secret@host/1", "redis://***@host/1"),
        ("redis://me:sec/ret@host/1", "redis://***@host/1"),
        ("redis://host/1?password=secret&db=1", "redis://host/1?password=***&db=1"),
        ("sqlite:///a@b.db", "sqlite:///a@b.db"),
    ],
)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
