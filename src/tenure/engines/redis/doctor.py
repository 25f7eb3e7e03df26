"""Findings of `tenure doctor` about a ``redis://`` URL: server, persistence, namespace.

Rules:

* Nothing is changed except by the usual greeting, and a missing namespace is not created.
* One connection is used, within `TIMEOUT`. A command that is denied to this account is reported,
  and skipped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from tenure.engines._kit import doctor as common
from tenure.engines.contract import Engine, Finding
from tenure.engines.redis.commands import Refusal, is_denied
from tenure.engines.redis.connecting import (
    EARLIEST,
    Info,
    connect_once,
    greet,
    in_time,
    parse_info,
    shown,
    translated,
)
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.locating import ClusterNodes, Node, locate, nodes_of
from tenure.engines.redis.namespace import REASONS, ROLL_CALL, Witnesses, collect, judge
from tenure.engines.redis.url import Place, RedisUrl
from tenure.errors import TenureError

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


TIMEOUT = 10.0
"""Timeout of the whole diagnosis in seconds."""
MOST_KEYS = 20_000
"""Maximum number of examined keys."""


def examine(address: RedisUrl, engine: Engine) -> Iterator[Finding]:
    """Examine the store at a URL. Errors become findings."""
    findings: list[Finding] = []

    async def collect() -> None:
        async with asyncio.timeout(TIMEOUT):
            async for finding in _Examination(address, engine).all():
                findings.append(finding)  # noqa: PERF401  kept when a later step fails

    try:
        asyncio.run(collect())
    except TenureError as error:
        findings.append(Finding.of_error("connection", error))
    except TimeoutError:
        findings.append(
            Finding(
                "failure",
                "connection",
                f"no answer within {TIMEOUT:g} s",
                "see what the server is busy with (SLOWLOG GET, or a script that hangs)",
            )
        )
    except OSError as error:
        findings.append(Finding("failure", "connection", f"was lost meanwhile: {error}"))
    yield from findings


class _Examination:
    def __init__(self, address: RedisUrl, engine: Engine) -> None:
        self._address = address
        self._engine = engine
        self._refused: list[str] = []

    async def all(self) -> AsyncIterator[Finding]:
        address = self._address
        place = await locate(address)
        if address.service:
            yield Finding("ok", "sentinels", f"{address.service} is at {shown(place)}")
        connection = await connect_once(address, place, _ignore, _ignore)
        try:
            at = time.perf_counter()
            async with in_time(address, place):
                protocol = await greet(connection, address, address.protocol)
            took = time.perf_counter() - at
            secured = "with TLS" if address.tls else "not encrypted"
            yield Finding(
                "ok",
                "connection",
                f"{shown(place)}, {secured}, protocol {protocol}, greeted in {took * 1e3:.1f} ms",
            )
            async for finding in self._server(connection, place):
                yield finding
        except Refusal as refusal:
            raise translated(address, refusal) from refusal
        finally:
            connection.drop("examined")

    async def _server(self, connection: RedisConnection, place: Place) -> AsyncIterator[Finding]:
        info = Info()
        serves = True
        reply = await self._read(connection, "INFO")
        if reply is not None:
            info = parse_info(reply)
            for finding in (
                version(info),
                *(clustered := await self._cluster(connection, info, place)),
                role(info),
                persistence(info, await self._settings(connection, "appendfsync", "save")),
                memory(info, self._address),
                replicas(info, self._address),
            ):
                yield finding
            serves = all(each.level != "failure" for each in clustered)
        yield await _round_trip(connection)
        clock = await self._clock(connection)
        if clock is not None:
            yield clock
        if serves:
            async for finding in self._namespace(connection):
                yield finding
        if self._refused:
            yield Finding(
                "warning",
                "rights",
                f"this account may not use {', '.join(self._refused)}",
                "grant it the commands that docs/engines/redis.md names, or see less here",
            )

    async def _cluster(
        self, connection: RedisConnection, info: Info, place: Place
    ) -> list[Finding]:
        """Say which node serves the namespace, if it is a cluster."""
        if info.get("cluster_enabled") != "1":
            return []
        state = await self._read(connection, "CLUSTER", "INFO")
        nodes = await self._read(connection, "CLUSTER", "NODES")
        if state is None or nodes is None:
            return []
        slot = ClusterNodes(self._address).slot
        return [cluster(parse_info(state), list(nodes_of(nodes)), slot, shown(place))]

    async def _read(self, connection: RedisConnection, *words: str | int) -> Any:
        """Return the answer; `None` if the command is denied."""
        try:
            return await connection.execute(*words)
        except Refusal as refusal:
            if not is_denied(str(refusal)):
                raise
            self._refused.append(str(words[0]))
            return None

    async def _settings(self, connection: RedisConnection, *names: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            reply = await self._read(connection, "CONFIG", "GET", name)
            if reply is None:
                break
            words = [each for pair in reply.items() for each in pair] if _is_map(reply) else reply
            texts = [_text(each) for each in words]
            found.update(zip(texts[::2], texts[1::2], strict=True))
        return found

    async def _clock(self, connection: RedisConnection) -> Finding | None:
        before = time.time()
        reply = await self._read(connection, "TIME")
        if reply is None:
            return None
        here = (before + time.time()) / 2
        return common.clock(int(reply[0]) + int(reply[1]) / 1e6 - here)

    async def _namespace(self, connection: RedisConnection) -> AsyncIterator[Finding]:
        prefix = self._address.prefix
        meta = await self._read(connection, "HMGET", f"{prefix}meta", "e", "q", "n", "w", "h")
        if meta is None:
            return
        if meta[0] is None:
            yield await self._first_contact(connection)
            return
        longest = self._address.max_window
        if meta[3] is not None and float(meta[3]) != longest * 1e6:
            longest = float(meta[3]) / 1e6
            yield Finding(
                "failure",
                "recovery window",
                f"the longest one in {prefix[:-1]} is {longest:g} s, and this URL allows "
                f"{self._address.max_window:g} s",
                f"write ?max_window={longest:g} in the URL of each program",
            )
            return
        yield Finding("ok", "recovery window", f"{longest:g} s at the longest (max_window)")
        reply = await self._read(connection, "TIME")
        now = time.time() * 1e6 if reply is None else int(reply[0]) * 1e6 + int(reply[1])
        left = (float(meta[1] or 0) - now) / 1e6
        why = REASONS.get(_text(meta[4] or b""), REASONS["lost"])
        new = "if no program has ever used it, say so with ?fresh=true; else "
        remedy = f"{new if meta[2] == b'1' else ''}wait"
        yield common.quarantine(min(left, longest), why, remedy)
        async for finding in self._contents(connection):
            yield finding

    async def _first_contact(self, connection: RedisConnection) -> Finding:
        """Predict the first client's result in a namespace that does not exist yet."""
        address = self._address
        witnesses = Witnesses(address)
        there = await self._read(connection, "SCRIPT", "EXISTS", *witnesses.digests)
        witnessed = 0.0 if there is None else witnesses.longest(there)
        wait, reason = judge(address, witnessed, await collect(connection))
        found = f"{address.prefix[:-1]} does not exist yet; the first use creates it"
        if wait <= ROLL_CALL:
            pause = f", and grants nothing for {wait:g} s" if wait else ""
            return Finding("ok", "namespace", f"{found}{pause}", absent=True)
        return Finding(
            "warning",
            "namespace",
            f"{found}, and grants nothing for {wait:,.0f} s: {REASONS[reason]}",
            "wait, or say ?fresh=true if no program has ever used it"
            if reason != "lost"
            else "wait",
            absent=True,
        )

    async def _contents(self, connection: RedisConnection) -> AsyncIterator[Finding]:
        """Examine the contents through the engine, and the expiry of all keys."""
        prefix = self._address.prefix
        sessions = semaphores = owners = waiters = 0
        lasting = {f"{prefix}meta", f"{prefix}nodes"}
        engine = self._engine
        try:
            await engine.open()
            nodes = await engine.list_nodes()
            for node in nodes:
                lasting.add(f"{prefix}M:{node}")
                sessions += len(await engine.list_sessions(node))
                for each in await engine.list_semaphores(node, owners=True, waiters=True):
                    semaphores += 1
                    owners, waiters = owners + len(each.owners), waiters + len(each.waiters)
                    if not each.ephemeral:
                        lasting.add(f"{prefix}m:{node}:{each.name}")
        finally:
            await engine.aclose()
        yield Finding(
            "ok",
            "contents",
            f"nodes: {len(nodes)}, sessions: {sessions}, semaphores: {semaphores} with {owners} "
            f"owners and {waiters} waiting",
        )
        endless = await self._endless(connection, lasting)
        if endless is None:
            return
        if endless:
            yield Finding(
                "warning",
                "expiry",
                f"{len(endless)} keys have none, such as {endless[0]}",
                "another program wrote them, or used PERSIST: tenure's keys all expire, "
                "except nodes and lasting semaphores",
            )
        else:
            yield Finding("ok", "expiry", "everything that belongs to a session or request has one")

    async def _endless(self, connection: RedisConnection, lasting: set[str]) -> list[str] | None:
        """Return other keys that never expire; `None` if the command is denied."""
        found = []
        cursor, seen = "0", 0
        while seen < MOST_KEYS:
            reply = await self._read(
                connection, "SCAN", cursor, "MATCH", f"{self._address.prefix}*"
            )
            if reply is None:
                return None
            cursor = _text(reply[0])
            seen += len(reply[1])
            keys = [key for key in map(_text, reply[1]) if key not in lasting]
            ends = await asyncio.gather(*(connection.execute("PTTL", key) for key in keys))
            found += [key for key, end in zip(keys, ends, strict=True) if end == -1]
            if cursor == "0":
                break
        return found


# Trials


async def _round_trip(connection: RedisConnection) -> Finding:
    took = []
    for _ in range(common.ROUNDS):
        at = time.perf_counter()
        await connection.execute("PING")
        took.append(time.perf_counter() - at)
    return common.round_trip(took)


def _is_map(reply: object) -> bool:
    return isinstance(reply, dict)


def _text(word: bytes | str | int) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)


def _ignore(*_: object) -> None:
    """Ignore pushes and the end of this connection."""
