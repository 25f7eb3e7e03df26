"""What `tenure doctor` tells of a ``redis://`` URL: the server, how it keeps data, the namespace.

Rules:

* Nothing is changed beyond what any client's greeting does, and a namespace that is not there is
  not made.
* One connection, and `PATIENCE` for all of it. What this account may not ask is said, and left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from statistics import median
from typing import Any

from tenure.clock import SystemClock
from tenure.engines.contract import Finding
from tenure.engines.redis.commands import Refusal
from tenure.engines.redis.connecting import (
    EARLIEST,
    Info,
    connect_once,
    greet,
    in_time,
    master_of,
    parse_info,
    shown,
    translated,
)
from tenure.engines.redis.engine import RedisEngine
from tenure.engines.redis.url import Address, parse
from tenure.engines.redis.wire import Wire
from tenure.errors import TenureError

__all__ = ["examine"]

PATIENCE = 10.0
"""Seconds for all that is asked."""
ROUNDS = 20
SLOW = 0.05
"""Seconds of round trip above which something is wrong."""
FAR = 1.0
"""Seconds between the clocks above which it is said."""
FULL = 0.9
"""Of the memory that is allowed."""
MOST_KEYS = 20_000
"""No more keys than these are looked at."""


def examine(url: str) -> Iterator[Finding]:
    """Everything about the store of a URL. Raises nothing of tenure's own."""
    findings: list[Finding] = []

    async def collect() -> None:
        async with asyncio.timeout(PATIENCE):
            async for finding in _Examination(parse(url)).all():
                findings.append(finding)  # noqa: PERF401  kept when a later step fails

    try:
        asyncio.run(collect())
    except TenureError as error:
        found, _, remedy = str(error).partition("; ")
        findings.append(Finding("failure", "connection", found, remedy))
    except TimeoutError:
        findings.append(
            Finding(
                "failure",
                "connection",
                f"no answer within {PATIENCE:g} s",
                "see what the server is busy with (SLOWLOG GET, or a script that hangs)",
            )
        )
    except OSError as error:
        findings.append(Finding("failure", "connection", f"was lost meanwhile: {error}"))
    yield from findings


class _Examination:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._refused: list[str] = []

    async def all(self) -> AsyncIterator[Finding]:
        address = self._address
        place = await master_of(address) if address.service else address.places[0]
        if address.service:
            yield Finding("ok", "sentinels", f"{address.service} is at {shown(place)}")
        wire = await connect_once(address, place, "", _ignore, _ignore)
        try:
            at = time.perf_counter()
            async with in_time(address, place):
                protocol = await greet(wire, address, address.protocol)
                if address.db:
                    await wire.ask("SELECT", address.db)
            took = time.perf_counter() - at
            secured = "with TLS" if address.tls else "not encrypted"
            yield Finding(
                "ok",
                "connection",
                f"{shown(place)}, {secured}, protocol {protocol}, greeted in {took * 1e3:.1f} ms",
            )
            async for finding in self._server(wire):
                yield finding
        except Refusal as refusal:
            raise translated(address, refusal) from refusal
        finally:
            wire.give_up("examined")

    async def _server(self, wire: Wire) -> AsyncIterator[Finding]:
        info = Info()
        told = await self._told(wire, "INFO")
        if told is not None:
            info = parse_info(told)
            for finding in (
                _version(info),
                _role(info),
                _persistence(info, await self._settings(wire, "appendfsync", "save")),
                _memory(info, self._address),
                _replicas(info, self._address),
            ):
                yield finding
        yield await _round_trip(wire)
        clock = await self._clock(wire)
        if clock is not None:
            yield clock
        async for finding in self._namespace(wire):
            yield finding
        if self._refused:
            yield Finding(
                "warning",
                "rights",
                f"this account may not use {', '.join(self._refused)}",
                "grant it the commands that docs/redis.md names, or see less here",
            )

    async def _told(self, wire: Wire, *words: str | int) -> Any:
        """The answer, or nothing where this account may not ask."""
        try:
            return await wire.ask(*words)
        except Refusal as refusal:
            if not str(refusal).startswith(("NOPERM", "ERR unknown command")):
                raise
            self._refused.append(str(words[0]))
            return None

    async def _settings(self, wire: Wire, *names: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            told = await self._told(wire, "CONFIG", "GET", name)
            if told is None:
                break
            words = [each for pair in told.items() for each in pair] if _is_map(told) else told
            texts = [_text(each) for each in words]
            found.update(zip(texts[::2], texts[1::2], strict=True))
        return found

    async def _clock(self, wire: Wire) -> Finding | None:
        before = time.time()
        told = await self._told(wire, "TIME")
        if told is None:
            return None
        here = (before + time.time()) / 2
        ahead = int(told[0]) + int(told[1]) / 1e6 - here
        if abs(ahead) < FAR:
            return Finding("ok", "clock", f"within {abs(ahead) * 1e3:,.0f} ms of this machine's")
        return Finding(
            "warning",
            "clock",
            f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's",
            "leases do not depend on it, but set it right slowly (NTP): a step forward of the "
            "server's clock ends every session",
        )

    async def _namespace(self, wire: Wire) -> AsyncIterator[Finding]:
        prefix = self._address.prefix
        meta = await self._told(wire, "HMGET", f"{prefix}meta", "e", "q", "n")
        if meta is None:
            return
        if meta[0] is None:
            fresh = self._address.fresh
            yield Finding(
                "ok" if fresh else "warning",
                "namespace",
                f"{prefix.rstrip(':')} is not there yet; the first use makes it"
                + ("" if fresh else f", and grants nothing for {self._address.quarantine:g} s"),
                ""
                if fresh
                else "if nobody can hold anything in it, say ?fresh=true once: without it a new "
                "namespace could be one that has lost its data",
                absent=True,
            )
            return
        told = await self._told(wire, "TIME")
        now = time.time() * 1e6 if told is None else int(told[0]) * 1e6 + int(told[1])
        left = (float(meta[1] or 0) - now) / 1e6
        if left > 0:
            new = (
                "if there were none, say so once with ?fresh=true; else " if meta[2] == b"1" else ""
            )
            yield Finding(
                "failure",
                "quarantine",
                f"nothing is granted for another {left:,.0f} s: the data was lost, or the "
                "namespace is new, and former holders may believe yet",
                f"{new}wait; a shorter ?quarantine= (no window may be longer) makes the next one "
                "shorter",
            )
        else:
            yield Finding("ok", "quarantine", "none")
        async for finding in self._contents(wire):
            yield finding

    async def _contents(self, wire: Wire) -> AsyncIterator[Finding]:
        """As any client sees it, whatever the keys look like."""
        prefix = self._address.prefix
        sessions = semaphores = owners = waiters = 0
        lasting = {f"{prefix}meta", f"{prefix}nodes"}
        engine = RedisEngine(self._address, SystemClock())
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
        endless = await self._endless(wire, lasting)
        if endless is None:
            return
        if endless:
            yield Finding(
                "warning",
                "expiry",
                f"{len(endless)} keys have none, {endless[0]} for one",
                "somebody else wrote them, or used PERSIST: nothing of tenure's stays for ever "
                "but nodes and lasting semaphores",
            )
        else:
            yield Finding("ok", "expiry", "everything that belongs to a session or request has one")

    async def _endless(self, wire: Wire, lasting: set[str]) -> list[str] | None:
        """The keys that will never expire, but for those; none where this account may not look."""
        found = []
        cursor, seen = "0", 0
        while seen < MOST_KEYS:
            told = await self._told(wire, "SCAN", cursor, "MATCH", f"{self._address.prefix}*")
            if told is None:
                return None
            cursor = _text(told[0])
            seen += len(told[1])
            keys = [key for key in map(_text, told[1]) if key not in lasting]
            ends = await asyncio.gather(*(wire.ask("PTTL", key) for key in keys))
            found += [key for key, end in zip(keys, ends, strict=True) if end == -1]
            if cursor == "0":
                break
        return found


# What INFO tells


def _version(info: Info) -> Finding:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "of an unknown version")
    found = f"{name} {version}, up for {int(info.get('uptime_in_seconds', 0)):,} s"
    if info.get("cluster_enabled") == "1":
        return Finding(
            "failure",
            "server",
            f"{found}, a node of a cluster",
            "use one server, or a master with replicas behind sentinels (redis+sentinel://)",
        )
    if info.version < EARLIEST:
        return Finding("failure", "server", f"{found}, which is too old", "use 6.2 or later")
    if info.get("loading") == "1":
        return Finding("failure", "server", f"{found}, is loading its data", "wait until it has")
    return Finding("ok", "server", found)


def _role(info: Info) -> Finding:
    if info.get("role", "master") == "master":
        return Finding("ok", "role", "master")
    master = f"{info.get('master_host')}:{info.get('master_port')}"
    return Finding(
        "failure",
        "role",
        f"a replica of {master}, which takes no writes",
        "name the master, or the sentinels with redis+sentinel://",
    )


def _persistence(info: Info, settings: dict[str, str]) -> Finding:
    if info.get("aof_enabled") == "1":
        if info.get("aof_last_write_status", "ok") != "ok":
            remedy = "make room on its disk: see the log of the server"
            return Finding("failure", "persistence", "the last write of its log failed", remedy)
        how = settings.get("appendfsync", "")
        found = f"appendonly{', appendfsync ' if how else ''}{how}"
        if how == "no":
            found += ": a crash of the machine loses what the system had not written"
            return Finding("warning", "persistence", found, "set appendfsync to always")
        if how == "everysec":
            found += ": a crash of the machine may lose a second"
        return Finding("ok", "persistence", found)
    snapshots = settings.get("save")
    if info.get("rdb_last_bgsave_status", "ok") != "ok" and snapshots:
        remedy = "see the log of the server: by default it takes no writes until one succeeds"
        return Finding("failure", "persistence", "the last snapshot failed", remedy)
    found = (
        f"snapshots alone (save {snapshots}): a restart forgets what came after the last"
        if snapshots
        else "none: after a restart nothing is granted for the time of the quarantine"
    )
    return Finding(
        "warning", "persistence", found, "set appendonly to yes, and appendfsync to always"
    )


def _memory(info: Info, address: Address) -> Finding:
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


def _replicas(info: Info, address: Address) -> Finding:
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
        return Finding("warning", "replicas", found, "have one more: one that is away stops grants")
    if online and not needed:
        return Finding(
            "warning",
            "replicas",
            f"{found}: a failover may forget the last grants",
            "with ?min_replicas=1 a grant is told only when a replica has it",
        )
    return Finding("ok", "replicas", found)


# What is tried


async def _round_trip(wire: Wire) -> Finding:
    took = []
    for _ in range(ROUNDS):
        at = time.perf_counter()
        await wire.ask("PING")
        took.append(time.perf_counter() - at)
    middle = median(took)
    found = f"{middle * 1e3:.2f} ms (median of {ROUNDS}, at worst {max(took) * 1e3:.2f} ms)"
    if middle > SLOW:
        remedy = "a far server, or a busy one? Each operation takes one round trip"
        return Finding("warning", "round trip", found, remedy)
    return Finding("ok", "round trip", found)


def _is_map(told: object) -> bool:
    return isinstance(told, dict)


def _text(word: bytes | str | int) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)


def _ignore(*_: object) -> None:
    """Nothing is published to this connection."""
