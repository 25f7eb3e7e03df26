"""First contact with a namespace without an epoch, and the quarantine in which it grants nothing.

A namespace without an epoch is new, or has lost its data. After a loss, holders may consider their
leases held for at most W, the longest recovery window (``max_window``). So the quarantine lasts W,
or less if the server proves that no such holder can exist; docs/engines/redis.md has the argument.

The evidence is the server's report about itself, and a *witness*: a script that each program loads
into the server before it attaches a session. A witness survives the data (``FLUSHALL``, ``SWAPDB``,
a resynchronisation) and ends with the process, or by ``SCRIPT FLUSH``, which the server counts.

A *trace* outlives the process: a library of functions that the first program of a server leaves in
the server's files, before anything is granted. A server that keeps its data, began without any, and
has no trace from before has lost nothing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import Any, NamedTuple

from tenure.clock import Clock
from tenure.core.rules import MAX_WINDOW
from tenure.engines._kit.quarantine import Quarantine
from tenure.engines.redis.commands import Refusal, keys_of
from tenure.engines.redis.connecting import Info, parse_info
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.lua import SCRIPTS
from tenure.engines.redis.url import RedisUrl
from tenure.errors import InvalidArgument

ROLL_CALL = 4.0
"""Seconds for connected programs to reconnect, and to report the loss of data."""

FIRST_CALL = 2.5
"""The same for a server that began empty, from its start: longer than a reconnector's pause."""

_LEVELS = (2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 900.0, MAX_WINDOW)
"""Longest recovery windows that a witness can represent, in seconds."""

_APART = 5.0
"""Difference in seconds between the clocks of server and client above which the server's is not
used."""

_PROMOTING = ("replicaof", "slaveof", "failover")
_TRACE = "tenure_trace"
_RUN = re.compile(rb"run=(\w*) empty=(\d) saves=(\d+)")
_UNTRACING = ("function|flush", "function|delete", "function|restore")
_SMALL = 16 * 2**20
"""Bytes of memory up to which a snapshot takes milliseconds, so that a trace is saved at once."""

_MALLOC_UPTIME = re.compile(r"^uptime:\s*(\d+)", re.MULTILINE)


REASONS = {
    "fresh": "",
    "new": "its programs may still have to reconnect",
    "empty": "its server has just started without data, and programs may still have to reconnect",
    "lost": "its data was lost, and former holders may still consider their leases held",
    "restarted": "its server started less than the longest recovery window ago, perhaps without "
    "its data",
    "promoted": "its server was a replica, which may lack the data of its master",
    "sentinel": "a server behind sentinels may lack the data of a former master",
    "cluster": "a node of a cluster may lack the data of a former master",
    "flushed": "its server has forgotten its scripts, and with them whether the data was lost",
    "reset": "the statistics of its server were reset, and with them whether the data was lost",
    "unknown": "its server does not report whether the data was lost (INFO is denied or "
    "incomplete)",
    "clock": "the clock of its server differs from the clock of this client, so how long the "
    "server has been up is unknown",
    "moved": "its data was moved to another database, and former holders may still consider "
    "their leases held",
}
"""Reason why nothing is granted, by the code stored in the namespace."""

_CERTAIN = frozenset({"lost", "moved"})
"""Reasons by which the data is known to be lost."""
_SHORT = frozenset({"new", "empty"})
"""Reasons for a wait of a few seconds."""


class Witnesses:
    """Witness scripts of one namespace.

    There is one text for each of `_LEVELS`, so that a witness also shows the longest possible
    recovery window of its programs.
    """

    def __init__(self, address: RedisUrl) -> None:
        self._texts = {
            level: (
                f"-- tenure: programs with recovery windows of up to {level:g} s have used "
                f"{address.prefix} in database {address.db} of this server.\nreturn 1\n"
            )
            for level in _LEVELS
        }
        self.mine = self._texts[min(each for each in _LEVELS if each >= address.max_window)]
        self.digests = [
            hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            for text in self._texts.values()
        ]

    def longest(self, there: list[int]) -> float:
        """Return the longest recovery window of the witnesses in seconds; 0.0 without any.

        Args:
            there: the reply to ``SCRIPT EXISTS`` for `digests`.
        """
        found = [level for level, known in zip(_LEVELS, there, strict=True) if known]
        return max(found, default=0.0)


class Verdict(NamedTuple):
    """Duration and reason of the quarantine of a namespace without an epoch.

    Attributes:
        wait: the duration in seconds.
        reason: a key of `REASONS`.
    """

    wait: float
    reason: str


class Report(NamedTuple):
    """A server's report about itself.

    Attributes:
        info: the answer to ``INFO everything``; ``None`` if denied.
        uptime: seconds since the start of the process by a monotonic clock; ``None`` if the server
            does not report it.
        apart: difference in seconds between the clocks of the server and this client.
        kept: whether the server keeps its data when its process ends; ``None`` if unknown.
        trace: the library that an earlier program left, or ``None``.
        began_empty: whether it keeps its data, and neither data nor a trace was there at its start.
    """

    info: Info | None
    uptime: float | None
    apart: float
    kept: bool | None = None
    trace: bytes | None = None
    began_empty: bool = False


class Greeting(NamedTuple):
    """Answer of a namespace to a client that has connected.

    Attributes:
        epoch: the epoch, which changes with each loss of data.
        left: remaining seconds of the quarantine.
        reason: a key of `REASONS`.
        may_be_new: whether ``?fresh=true`` would end it.
    """

    epoch: str
    left: float
    reason: str
    may_be_new: bool


async def greet_namespace(
    connection: RedisConnection, address: RedisUrl, witnesses: Witnesses, run_id: str, known: str
) -> Greeting:
    """Greet the namespace, create it if it is missing, and leave a witness.

    The witness exists before anything is attached or renewed over this connection.

    Args:
        connection: the new connection.
        address: the namespace and the options of the URL.
        witnesses: the witness scripts of the namespace.
        run_id: the id of the server's run, as reported.
        known: the epoch that this client has seen, or empty.

    Raises:
        InvalidArgument: the programs of the namespace have another ``max_window``.
    """
    text, keys = SCRIPTS["hello"].text, keys_of(address.prefix)
    longest = int(address.max_window * 1e6)
    words = (run_id, int(address.fresh), secrets.token_hex(8), known, longest, address.db)
    while True:
        reply = await connection.run("hello", *words, "", "")
        if reply[0] == b"window":
            raise _other_window(address, int(reply[1]) / 1e6)
        if reply[0] == b"ok":
            await connection.execute("SCRIPT", "LOAD", witnesses.mine)
            break
        # If two clients are first, one creates the namespace. The other sees its epoch, and never a
        # witness without an epoch, since both are created in one transaction.
        await connection.execute("WATCH", keys[1])
        witnessed = witnesses.longest(
            await connection.execute("SCRIPT", "EXISTS", *witnesses.digests)
        )
        # Collected after that; otherwise a SCRIPT FLUSH in between would be missed.
        report = await collect(connection)
        if not await leave_trace(connection, report):
            report = report._replace(began_empty=False)
        if known:
            verdict = Verdict(max(address.max_window, witnessed), "lost")
        else:
            verdict = judge(address, witnessed, report)
        await connection.execute("MULTI")
        wait = int(verdict.wait * 1e6)
        await connection.execute("EVAL", text, *keys, *words, wait, verdict.reason)
        await connection.execute("SCRIPT", "LOAD", witnesses.mine)
        done = await connection.execute("EXEC")
        if done is None:
            continue
        reply = done[0]
        if isinstance(reply, Refusal):
            raise reply
        if reply[0] == b"ok":
            break
    _, epoch, left, reason, may_be_new = reply
    return Greeting(epoch.decode(), left / 1e6, reason.decode(), bool(may_be_new))


def _other_window(address: RedisUrl, there: float) -> InvalidArgument:
    return InvalidArgument(
        f"{address.url}: the programs that use {address.prefix[:-1]} have recovery windows of up "
        f"to {there:g} s, and this URL allows {address.max_window:g} s. Write "
        f"?max_window={there:g} in the URL of each program. Another value is accepted once none of "
        "their sessions is left"
    )


async def collect(connection: RedisConnection) -> Report:
    """Query a server for the evidence of `judge`."""
    info = uptime = None
    apart = 0.0
    try:
        info = parse_info(await connection.execute("INFO", "everything"))
        before = time.time()
        reply = await connection.execute("TIME")
        apart = abs(int(reply[0]) + int(reply[1]) / 1e6 - (before + time.time()) / 2)
    except Refusal:
        return Report(None, None, 0.0)
    try:
        uptime = _elapsed(await connection.execute("MEMORY", "MALLOC-STATS"))
    except Refusal:
        uptime = None  # another allocator or a restricted account: the wall clock is used
    return await _examine_files(connection, Report(info, uptime, apart))


async def _examine_files(connection: RedisConnection, report: Report) -> Report:
    """Add what is known of the server's files."""
    info = report.info
    assert info is not None
    kept: bool | None = info.get("aof_enabled") == "1"
    try:
        if not kept:
            kept = bool(_pairs(await connection.execute("CONFIG", "GET", "save")).get(b"save"))
        libraries = await connection.execute("FUNCTION", "LIST", "LIBRARYNAME", _TRACE, "WITHCODE")
    except Refusal:  # a restricted account, or a version without functions
        return report._replace(kept=kept or None)
    trace = _pairs(libraries[0])[b"library_code"] if libraries else None
    empty = kept and _began_empty(info, trace)
    return report._replace(kept=kept, trace=trace, began_empty=empty)


def _pairs(reply: Any) -> dict[bytes, Any]:
    """Return a map of a reply, which RESP2 encodes as a list."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


def _began_empty(info: Info, trace: bytes | None) -> bool:
    if any(_calls_of(info).get(each) for each in _UNTRACING):
        return False
    if trace is not None:  # of this run, it says what was found when the first program came
        found = _RUN.search(trace)
        return found is not None and found[1].decode() == info.get("run_id") and found[2] == b"1"
    sizes = ["rdb_last_load_keys_loaded", "rdb_last_load_keys_expired"]
    if info.get("aof_enabled") == "1":
        sizes.append("aof_base_size")
    return all(info.get(each) == "0" for each in sizes)


async def leave_trace(connection: RedisConnection, report: Report) -> bool:
    """Have the server's files show that it was used; return false if they may not show it."""
    info, trace = report.info, report.trace
    if info is None or not report.kept or info.get("cluster_enabled") == "1":
        return False  # in a cluster it would show nothing
    run, saves = info.get("run_id", ""), int(info.get("rdb_saves", 0))
    try:
        if trace is None:
            found = f"run={run} empty={int(report.began_empty)} saves={saves}"
            body = f"redis.register_function('{_TRACE}', function() return '{found}' end)"
            code = f"#!lua name={_TRACE}\n-- Left by tenure, see docs/engines/redis.md.\n{body}\n"
            try:
                await connection.execute("FUNCTION", "LOAD", code)
            except Refusal as refusal:
                if "already exists" not in str(refusal):
                    raise
        elif (found_run := _RUN.search(trace)) is None or found_run[1].decode() != run:
            return True  # it was in the files
        elif saves > int(found_run[3]):
            return True
        if info.get("aof_enabled") == "1":
            # While the disk is busy, Redis may reply up to two seconds before it writes the log.
            now = parse_info(await connection.execute("INFO", "persistence"))
            written = now.get("aof_buffer_length") == "0"
            return written and now.get("aof_last_write_status") == "ok"
        if int(info.get("used_memory", _SMALL + 1)) > _SMALL:
            return False
        await connection.execute("SAVE")
    except Refusal:
        return False  # a restricted account, or files that cannot be written
    return True


def _elapsed(stats: Any) -> float | None:
    """Return the seconds since the allocator was initialised, by the monotonic clock."""
    text = stats.decode("utf-8", "replace") if isinstance(stats, bytes) else str(stats)
    found = _MALLOC_UPTIME.search(text)
    return None if found is None else int(found[1]) / 1e9


def judge(address: RedisUrl, witnessed: float, report: Report) -> Verdict:
    """Decide how long nothing is granted in a namespace without an epoch.

    Args:
        address: the namespace and the options of the URL.
        witnessed: the result of `Witnesses.longest`.
        report: the server's report about itself.
    """
    longest = max(address.max_window, witnessed)
    if witnessed:
        return Verdict(longest, "lost")
    if address.fresh:
        return Verdict(0.0, "fresh")
    doubt = _doubt(address, report)
    if doubt:
        return Verdict(longest, doubt)
    uptime = _uptime(report)
    if report.began_empty and _is_here(address) and (uptime is None or uptime < longest):
        return Verdict(max(FIRST_CALL - max(uptime or 0.0, 0.0), 0.0), "empty")
    if uptime is None:
        return Verdict(longest, "clock")
    left = longest - max(uptime, 0.0)
    return Verdict(left, "restarted") if left > ROLL_CALL else Verdict(ROLL_CALL, "new")


def _is_here(address: RedisUrl) -> bool:
    """Return whether the server is on this host.

    One elsewhere may be a new container in the place of one without a volume. Then its former
    clients learn late that their connections are dead.
    """
    hosts = [each if isinstance(each, str) else each[0] for each in address.places]
    return all(each in ("localhost", "::1") or each.startswith(("/", "127.")) for each in hosts)


def _doubt(address: RedisUrl, report: Report) -> str:
    """Return why the absence of a witness proves nothing, or an empty text."""
    if address.service:
        return "sentinel"
    info = report.info
    if address.cluster or (info is not None and info.get("cluster_enabled") == "1"):
        return "cluster"
    if info is None or not {"uptime_in_seconds", "master_replid2"} <= info.keys():
        return "unknown"
    calls = _calls_of(info)
    if not calls:
        return "unknown"
    if info["master_replid2"].strip("0") or any(calls.get(each) for each in _PROMOTING):
        return "promoted"
    # Before 7.0 the calls of a command's subcommands are counted together.
    if calls.get("config|resetstat") or calls.get("config"):
        return "reset"
    if calls.get("script|flush") or calls.get("script"):
        return "flushed"
    return ""


def _calls_of(info: Info) -> dict[str, int]:
    """Return how often each command was called."""
    return {
        name.removeprefix("cmdstat_"): _calls(value)
        for name, value in info.items()
        if name.startswith("cmdstat_")
    }


def _calls(statistics: str) -> int:
    number = statistics.partition(",")[0].removeprefix("calls=")
    return int(number) if number.isdecimal() else 1


def _uptime(report: Report) -> float | None:
    """Return the minimum seconds for which the process has been up; ``None`` if unknown."""
    if report.uptime is not None:
        return report.uptime
    assert report.info is not None
    if report.apart > _APART:
        # The clock may have been set since the start, which changes the reported uptime.
        return None
    return float(report.info["uptime_in_seconds"]) - 1.0  # it is a difference of whole seconds


class NamespaceQuarantine(Quarantine):
    """Time for which nothing is granted in a namespace, because its data may be lost.

    Its reason is a key of `REASONS`.
    """

    def __init__(self, address: RedisUrl, clock: Clock) -> None:
        super().__init__(address.url, clock)
        self.reason = "lost"
        self._name = address.prefix[1:-2]  # without braces and colon
        self._may_be_new = False

    def greeted(self, left: float, reason: str, *, may_be_new: bool) -> None:
        """Record what a greeting found; ``?fresh=true`` would end it if it `may_be_new`."""
        self._may_be_new = may_be_new
        self.update(left, reason)

    def __str__(self) -> str:
        """Return a clause that says until when, and why, nothing is granted."""
        why = REASONS.get(self.reason, REASONS["lost"])
        new = ""
        if self._may_be_new and self.reason not in _CERTAIN | _SHORT:
            new = "; if no program has ever used it, ?fresh=true ends the wait"
        return f"nothing is granted in namespace {self._name!r} {self.rest}: {why}{new}"
