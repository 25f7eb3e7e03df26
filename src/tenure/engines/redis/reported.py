"""Findings of `tenure doctor` from a Redis server's report (``INFO``)."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.engines.contract import Finding
from tenure.engines.redis.connecting import EARLIEST, Info
from tenure.engines.redis.locating import Node
from tenure.engines.redis.url import RedisUrl

FULL = 0.9
"""Fraction of the allowed memory above which a warning is given."""


def version(info: Info) -> Finding:
    """Check which server it is."""
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "of an unknown version")
    found = f"{name} {version}, up for {int(info.get('uptime_in_seconds', 0)):,} s"
    if info.version < EARLIEST:
        return Finding("failure", "server", f"{found}, which is too old", "use 6.2 or later")
    if info.get("loading") == "1":
        return Finding("failure", "server", f"{found}, is loading its data", "wait until it has")
    return Finding("ok", "server", found)


def cluster(state: Info, nodes: Sequence[Node], slot: int, place: str) -> Finding:
    """Check whether the cluster serves the namespace.

    Args:
        state: its report (``CLUSTER INFO``).
        nodes: its nodes, as one of them reports them.
        slot: the slot of the namespace.
        place: the address of the node that reports.
    """
    masters = sum("master" in each.flags for each in nodes)
    found = (
        f"{place} serves slot {slot}, that of the namespace; masters: {masters}, replicas: "
        f"{len(nodes) - masters}"
    )
    if state.get("cluster_state") != "ok":
        return Finding(
            "failure",
            "cluster",
            f"{place} reports cluster_state:{state.get('cluster_state')}, and serves nothing",
            "see its CLUSTER INFO and CLUSTER NODES, and run redis-cli --cluster check",
        )
    for each in nodes:
        if any(words.startswith(f"{slot}-") for words in each.moving):
            return Finding(
                "failure",
                "cluster",
                f"{place} has slot {slot}, that of the namespace, on its way to another node: "
                "nothing is granted until it is there",
                "wait, or run redis-cli --cluster fix if the move was interrupted",
            )
    failed = [each.id for each in nodes if each.flags & {"fail", "fail?"}]
    if failed:
        return Finding(
            "warning",
            "cluster",
            f"{found}; nodes that do not answer: {len(failed)}",
            "see CLUSTER NODES",
        )
    return Finding("ok", "cluster", found)


def role(info: Info) -> Finding:
    """Check whether it accepts writes."""
    if info.get("role", "master") == "master":
        return Finding("ok", "role", "master")
    master = f"{info.get('master_host')}:{info.get('master_port')}"
    return Finding(
        "failure",
        "role",
        f"a replica of {master}, which rejects writes",
        "name the master, or the sentinels with redis+sentinel://",
    )


def persistence(info: Info, settings: dict[str, str]) -> Finding:
    """Check the persistence of its data."""
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            remedy = "make room on its disk: see the log of the server"
            return Finding("failure", "persistence", "the last write of its log failed", remedy)
        how = settings.get("appendfsync", "")
        found = f"appendonly{', appendfsync ' if how else ''}{how}"
        if how == "no":
            found += ": a crash of the machine loses the data that the system had not written"
            return Finding("warning", "persistence", found, "set appendfsync to always")
        if how == "everysec":
            found += ": a crash of the machine may lose a second"
        return Finding("ok", "persistence", found)
    snapshots = settings.get("save")
    if info.get("rdb_last_bgsave_status", "ok") != "ok" and snapshots:
        remedy = "see the log of the server: by default it rejects writes until one succeeds"
        return Finding("failure", "persistence", "the last snapshot failed", remedy)
    found = (
        f"only snapshots (save {snapshots}): a restart loses changes after the last one"
        if snapshots
        else "none: after a restart nothing is granted for the longest recovery window"
    )
    return Finding(
        "warning", "persistence", found, "set appendonly to yes, and appendfsync to always"
    )


def memory(info: Info, address: RedisUrl) -> Finding:
    """Check the remaining memory, and the eviction policy."""
    policy = info.get("maxmemory_policy", "noeviction")
    most, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    found = f"{used / 2**20:,.0f} MiB used" + (f" of {most / 2**20:,.0f}" if most else ", no limit")
    found += f", maxmemory-policy {policy}"
    if policy != "noeviction":
        return Finding(
            "failure" if most and not address.may_evict else "warning",
            "memory",
            f"{found}: leases that are held may be evicted",
            "CONFIG SET maxmemory-policy noeviction (and in its configuration file)",
        )
    if most and used > FULL * most:
        remedy = "raise maxmemory: a full server refuses every change"
        return Finding("warning", "memory", found, remedy)
    return Finding("ok", "memory", found)


def replicas(info: Info, address: RedisUrl) -> Finding:
    """Check the number of replicas."""
    count = int(info.get("connected_slaves", 0))
    online = 0
    for number in range(count):
        facts = dict(
            each.partition("=")[::2] for each in info.get(f"slave{number}", "").split(",") if each
        )
        online += facts.get("state") == "online"
    needed = address.min_replicas
    found = f"{online} online, min_replicas={needed}"
    if online < needed:
        return Finding(
            "failure",
            "replicas",
            f"{found}: no grant can be confirmed",
            "start the replicas, or lower min_replicas",
        )
    if needed and online == needed:
        return Finding("warning", "replicas", found, "add one: otherwise a failure stops grants")
    if online and not needed:
        return Finding(
            "warning",
            "replicas",
            f"{found}: a failover may lose the last grants",
            "set ?min_replicas=1: a replica then confirms each grant before it is reported",
        )
    return Finding("ok", "replicas", found)
