"""What a namespace without data grants, and when, after each way in which it came to be empty."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest

import tenure
from tenure.engines.redis.connecting import Info
from tenure.engines.redis.connection import RedisConnection
from tenure.engines.redis.namespace import (
    FIRST_CALL,
    ROLL_CALL,
    Report,
    Verdict,
    Witnesses,
    judge,
    leave_trace,
)
from tenure.engines.redis.url import parse
from tests.engines.redis.helpers import PATIENCE, replicates, until
from tests.engines.redis.proxy import Proxy
from tests.engines.redis.servers import Server, a_server, free_port

WINDOW = 6
"""The longest recovery window here: a roll call is shorter, and a test not much longer."""

_numbers = itertools.count(1)


def plain(server: Server, *parameters: str) -> str:
    """The URL of a program that does not know whether the namespace is new."""
    return "&".join((f"redis+unix://{server.socket}?max_window={WINDOW}", *parameters))


def uptime(server: Server) -> float:
    told = server.tell("INFO", "server")
    assert isinstance(told, dict)
    return float(told["uptime_in_seconds"])


@pytest.fixture(scope="module")
def elderly() -> Iterator[Server]:
    """A server that has been up for longer than the longest recovery window."""
    with a_server() as server:
        asyncio.run(until(lambda: uptime(server) > WINDOW + 1))
        yield server


@pytest.fixture
def settled(elderly: Server) -> str:
    """The URL of a namespace in it that no program has ever used."""
    return plain(elderly, f"prefix=new-{next(_numbers)}")


async def granted(url: str) -> None:
    """Return when a new client has been granted something."""
    async with (
        tenure.connect(url) as client,
        client.session(recovery_window=2) as session,
        session.mutex(f"m-{next(_numbers)}").lock(timeout=PATIENCE),
    ):
        pass


async def announced(url: str, caplog: pytest.LogCaptureFixture) -> tuple[float, str]:
    """For how long a new client says that nothing is granted, and why."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tenure"):
        async with tenure.connect(url) as client:
            await client.list_nodes()
    said = [each.getMessage() for each in caplog.records if "nothing is granted" in each.message]
    if not said:
        return 0.0, ""
    (only,) = said
    return float(only.partition("another ")[2].partition(" s")[0]), only


# New


async def test_a_new_server_grants_after_a_roll_call(
    settled: str, caplog: pytest.LogCaptureFixture
) -> None:
    wait, why = await announced(settled, caplog)
    assert wait == pytest.approx(ROLL_CALL, abs=0.5)
    assert "may still have to reconnect" in why
    await granted(settled)
    assert await announced(settled, caplog) == (0.0, "")  # there is an epoch now


async def test_a_server_that_started_just_now_is_waited_for_as_long_as_it_could_have_lost_data(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    wait, why = await announced(plain(server), caplog)
    assert WINDOW - 2 - uptime(server) < wait <= WINDOW
    assert "its server started less than the longest recovery window ago" in why
    assert "?fresh=true" in why


async def test_what_is_said_to_be_new_grants_at_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    assert await announced(server.url, caplog) == (0.0, "")
    await granted(server.url)


async def test_that_a_namespace_is_new_can_be_said_later(server: Server) -> None:
    url = f"redis+unix://{server.socket}"
    async with tenure.connect(url) as early, tenure.connect(url) as client:
        await early.semaphore("w").create(limit=1)
        async with early.semaphore("w").enqueue() as ticket:
            with pytest.raises(tenure.AcquireTimeout):
                await client.semaphore("w").acquire(timeout=0.1)
            async with (
                tenure.connect(server.url),
                await ticket.wait(timeout=PATIENCE) as lease,
            ):
                assert lease.held
        free = await client.mutex("m").try_lock()
        assert free is not None


async def test_of_many_first_clients_none_waits_longer_than_the_roll_call(
    settled: str, elderly: Server
) -> None:
    await asyncio.gather(*(granted(settled) for _ in range(12)))
    prefix = parse(settled).prefix
    told = elderly.tell("HMGET", f"{prefix}meta", "b", "q")
    assert isinstance(told, list)
    began, until = map(int, told)
    assert (until - began) / 1e6 == pytest.approx(ROLL_CALL)


async def test_a_lock_that_is_tried_in_a_roll_call_is_granted_at_its_end(settled: str) -> None:
    async with (
        tenure.connect(f"{settled}&answer_timeout=20") as client,
        client.session(recovery_window=WINDOW) as session,
    ):
        lease = await session.mutex("m").try_lock()
        assert lease is not None
        assert lease.held
        assert await session.mutex("m").try_lock() is None


async def test_a_try_given_up_in_a_roll_call_leaves_nothing(settled: str) -> None:
    async with (
        tenure.connect(settled) as client,
        client.session(recovery_window=WINDOW) as session,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.mutex("m").try_lock()
        async with session.mutex("m").lock(timeout=PATIENCE):
            pass


# New, on a server that keeps its data

SNAPSHOTS = ("--save", "3600 1 300 100 60 10000")
LOG = ("--appendonly", "yes")
keeping = pytest.mark.parametrize("options", [SNAPSHOTS, LOG, SNAPSHOTS + LOG])


@keeping
async def test_a_new_server_that_keeps_its_data_grants_soon_after_its_start(
    options: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with a_server(*options) as server:
        at = time.monotonic()
        wait, _ = await announced(f"redis+unix://{server.socket}", caplog)
        assert wait <= FIRST_CALL
        await granted(f"redis+unix://{server.socket}?prefix=other")
        assert time.monotonic() - at < FIRST_CALL + 10  # the machine may be busy
        # From then on it grants at once, in new namespaces, too.
        await asyncio.gather(
            *(granted(f"redis+unix://{server.socket}?prefix=more-{n}") for n in range(4))
        )
        assert time.monotonic() - at < FIRST_CALL + 12


@pytest.mark.exhaustive
@keeping
async def test_the_first_programs_of_a_new_server_agree(options: tuple[str, ...]) -> None:
    for _ in range(5):
        with a_server(*options) as server:
            url = f"redis+unix://{server.socket}"
            async with asyncio.timeout(FIRST_CALL + 10):
                await asyncio.gather(*(granted(url) for _ in range(12)))


def kill(server: Server) -> None:
    server.kill()


def flush_and_stop(server: Server) -> None:
    server.tell("FLUSHALL")
    server.stop()


def flush_database_and_stop(server: Server) -> None:
    server.tell("FLUSHDB")
    server.stop()


@pytest.mark.parametrize(
    ("options", "lose"),
    [
        (SNAPSHOTS, kill),
        (SNAPSHOTS, flush_and_stop),
        (SNAPSHOTS, flush_database_and_stop),
        (LOG, flush_and_stop),
    ],
)
async def test_a_server_that_starts_again_without_the_data_is_not_taken_for_a_new_one(
    options: tuple[str, ...], lose: Callable[[Server], None], caplog: pytest.LogCaptureFixture
) -> None:
    with a_server(*options) as server:
        async with tenure.connect(plain(server)):
            pass
        lose(server)
        server.start()
        for prefix in ("tenure", "second"):
            wait, why = await announced(plain(server, f"prefix={prefix}"), caplog)
            assert WINDOW - 2 - uptime(server) < wait <= WINDOW
            assert "its server started less than the longest recovery window ago" in why


async def test_a_server_with_a_log_that_is_killed_keeps_its_leases() -> None:
    # Without this, Redis may reply up to two seconds before it writes the log.
    with a_server(*LOG, "--appendfsync", "always") as server:
        async with a_cut_off_holder(server) as lease:
            server.kill()
            server.start()
            async with (
                tenure.connect(plain(server)) as other,
                other.session(recovery_window=WINDOW) as session,
            ):
                assert await session.mutex("m").try_lock() is None
                assert lease.held


@pytest.mark.parametrize(
    "options",
    [SNAPSHOTS, pytest.param((), marks=pytest.mark.exhaustive)],
)
async def test_a_server_killed_under_a_holder_grants_nothing_before_its_window_is_over(
    options: tuple[str, ...],
) -> None:
    with a_server(*options) as server:
        async with a_cut_off_holder(server) as lease:
            server.kill()
            server.start()
            async with (
                tenure.connect(plain(server)) as other,
                other.session(recovery_window=WINDOW) as session,
                session.mutex("m").lock(timeout=PATIENCE) as later,
            ):
                assert not lease.held
                assert later.fencing_token > lease.fencing_token


@pytest.mark.exhaustive
async def test_a_holder_reports_that_the_files_of_its_server_were_removed() -> None:
    with a_server(*LOG) as server:
        async with tenure.connect(plain(server)) as holder:
            session = await holder.session(recovery_window=WINDOW)
            lease = await session.mutex("m").lock(timeout=PATIENCE)
            server.kill()
            shutil.rmtree(server.folder / "appendonlydir")
            server.start()
            async with (
                tenure.connect(plain(server)) as other,
                other.session(recovery_window=WINDOW) as later,
                later.mutex("m").lock(timeout=PATIENCE),
            ):
                assert not lease.held


async def test_files_that_cannot_be_written_prove_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with a_server(*SNAPSHOTS, "--enable-protected-configs", "local") as server:
        nowhere = server.folder / "files"
        nowhere.mkdir()
        server.tell("CONFIG", "SET", "dir", str(nowhere))
        nowhere.rmdir()
        wait, why = await announced(plain(server), caplog)
        assert WINDOW - 2 - uptime(server) < wait <= WINDOW
        assert "its server started less" in why
        assert server.tell("SET", "users", "data")  # a failed SAVE does not stop the user's writes


@pytest.mark.parametrize("denied", ["-save", "-config|get", "-function"])
async def test_an_account_that_may_not_leave_a_trace_waits(
    denied: str, caplog: pytest.LogCaptureFixture
) -> None:
    user = f"weak on >word ~* &* +@all {denied}".split()
    with a_server(*SNAPSHOTS, "--user", *user) as server:
        wait, _ = await announced(plain(server, "username=weak", "password=word"), caplog)
        assert WINDOW - 2 - uptime(server) < wait <= WINDOW


async def test_a_trace_that_was_removed_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with a_server(*SNAPSHOTS) as server:
        server.tell("FUNCTION", "FLUSH")
        wait, _ = await announced(plain(server), caplog)
        assert WINDOW - 2 - uptime(server) < wait <= WINDOW


async def test_a_short_longest_window_is_that_of_the_implicit_session_too(server: Server) -> None:
    url = f"redis+unix://{server.socket}?max_window=2"
    async with tenure.connect(url) as client:
        lease = await client.mutex("m").lock(timeout=PATIENCE)
        (session,) = await client.list_sessions("/default")
        assert session.recovery_window == 2
        assert lease.held


# Lost


def flush_all(server: Server) -> None:
    server.tell("FLUSHALL")


def flush_database(server: Server) -> None:
    server.tell("FLUSHDB")


def swap_databases(server: Server) -> None:
    server.tell("SWAPDB", "0", "1")


def delete_the_keys(server: Server) -> None:
    for key in server.all_keys():
        server.tell("DEL", key)


def restart(server: Server) -> None:
    server.kill()
    server.start()


def flush_scripts_too(server: Server) -> None:
    server.tell("SCRIPT", "FLUSH")
    server.tell("FLUSHALL")


def forget_the_flush(server: Server) -> None:
    flush_scripts_too(server)
    server.tell("CONFIG", "RESETSTAT")


@contextlib.asynccontextmanager
async def a_cut_off_holder(server: Server) -> AsyncIterator[tenure.Lease]:
    """The lease of a program that cannot reach the server any more, and considers it held."""
    async with Proxy(server.socket, f"{server.socket}.proxy") as proxy:
        holder = tenure.connect(f"{proxy.url}&max_window={WINDOW}")
        try:
            session = await holder.session(recovery_window=WINDOW)
            lease = await session.mutex("m").lock(timeout=PATIENCE)
            proxy.refuses = True
            proxy.cut()
            yield lease
        finally:
            proxy.refuses = False
            await holder.aclose()


@pytest.mark.parametrize(
    ("lose", "fresh"),
    [
        (flush_all, "fresh=true"),
        pytest.param(flush_database, "", marks=pytest.mark.exhaustive),
        pytest.param(swap_databases, "", marks=pytest.mark.exhaustive),
        pytest.param(delete_the_keys, "fresh=true", marks=pytest.mark.exhaustive),
        pytest.param(restart, "", marks=pytest.mark.exhaustive),
    ],
)
async def test_no_client_is_granted_what_a_holder_from_before_considers_held(
    server: Server, lose: Callable[[Server], None], fresh: str
) -> None:
    async with a_cut_off_holder(server) as lease:
        lose(server)
        async with tenure.connect(plain(server, fresh)) as other:
            session = await other.session(recovery_window=WINDOW)
            async with session.mutex("m").lock(timeout=PATIENCE) as later:
                assert not lease.held
                assert later.fencing_token > lease.fencing_token


@pytest.mark.exhaustive
async def test_data_from_another_database_is_not_taken_for_the_own(server: Server) -> None:
    elsewhere = f"{server.url}&max_window={WINDOW}&db=1"
    async with tenure.connect(elsewhere) as client:
        await client.list_nodes()
    async with a_cut_off_holder(server) as lease:
        swap_databases(server)
        async with tenure.connect(plain(server)) as other:
            session = await other.session(recovery_window=WINDOW)
            async with session.mutex("m").lock(timeout=PATIENCE):
                assert not lease.held


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (flush_all, "its data was lost"),
        (flush_scripts_too, "its server has forgotten its scripts"),
        (forget_the_flush, "the statistics of its server were reset"),
    ],
)
async def test_what_has_become_of_the_data_is_told_by_the_server(
    server: Server, lose: Callable[[Server], None], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with tenure.connect(plain(server, "fresh=true")):
        pass
    lose(server)
    wait, said = await announced(plain(server), caplog)
    assert WINDOW - 0.5 < wait <= 8  # a witness stands for windows up to a round number
    assert why in said


async def test_a_program_that_knew_the_data_has_the_others_wait(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with tenure.connect(plain(server, "fresh=true")) as holder:
        session = await holder.session(recovery_window=WINDOW)
        lease = await session.mutex("m").lock()
        flush_scripts_too(server)
        async with asyncio.timeout(PATIENCE):
            await lease.wait_lost()
        wait, why = await announced(plain(server, "fresh=true"), caplog)
    assert wait > 0
    assert "its data was lost" in why
    assert "?fresh=true" not in why


async def test_a_promoted_replica_without_data_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    with a_server(port=port), a_server("--replicaof", "localhost", str(port)) as replica:
        await replicates(replica)
        replica.tell("REPLICAOF", "NO", "ONE")
        wait, why = await announced(plain(replica), caplog)
    assert wait == pytest.approx(WINDOW, abs=0.5)
    assert "its server was a replica" in why


@pytest.mark.exhaustive
async def test_an_account_that_may_not_ask_what_happened_waits_for_the_longest_window(
    caplog: pytest.LogCaptureFixture,
) -> None:
    user = "weak on >word ~* &* +@all -info".split()
    with a_server("--user", *user) as server:
        url = plain(server, "username=weak", "password=word")
        wait, why = await announced(url, caplog)
        assert wait == pytest.approx(WINDOW, abs=0.5)
        assert "does not report whether the data was lost" in why
        await granted(url)


async def test_a_witness_survives_what_makes_a_server_a_copy_of_another(server: Server) -> None:
    witnesses = Witnesses(parse(plain(server)))
    async with tenure.connect(plain(server, "fresh=true")):
        pass
    port = free_port()
    with a_server(port=port):
        server.tell("REPLICAOF", "localhost", str(port))
        await replicates(server)
        server.tell("REPLICAOF", "NO", "ONE")
    assert server.all_keys() == {}
    there = server.tell("SCRIPT", "EXISTS", *witnesses.digests)
    assert isinstance(there, list)
    assert witnesses.longest(there) >= WINDOW


# What a waiting program is told


async def test_a_program_that_waits_learns_why_and_until_when(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis+unix://{server.socket}?prefix=jobs"
    async with tenure.connect(url) as client:
        with pytest.raises(
            tenure.AcquireTimeout,
            match="not acquired at once, because nothing is granted in",
        ) as tried:
            await client.mutex("m").try_lock()
        with pytest.raises(tenure.AcquireTimeout):
            await client.mutex("m").lock(timeout=0.1)
        server.tell("CLIENT", "KILL", "TYPE", "normal")
        async with client.session() as session:
            with pytest.raises(tenure.AcquireTimeout):
                await session.mutex("m").lock(timeout=0.5)
    assert "(until " in str(tried.value)
    assert isinstance(tried.value.__cause__, tenure.EngineError)
    warnings = [each for each in caplog.records if "nothing is granted" in each.getMessage()]
    assert len(warnings) == 1


# The longest recovery window


async def test_a_longer_window_is_refused_with_the_parameter_to_write(server: Server) -> None:
    async with tenure.connect(server.url) as client:
        with pytest.raises(tenure.InvalidArgument, match=r"\?max_window=60"):
            await client.session(recovery_window=60)
    async with (
        tenure.connect(f"{server.url}&prefix=long&max_window=60") as client,
        client.session(recovery_window=60),
    ):
        pass


async def test_a_program_with_another_longest_window_is_refused_and_changes_nothing(
    server: Server,
) -> None:
    async with tenure.connect(f"{server.url}&max_window=60") as one, one.session():
        before = server.tell("HGETALL", "{tenure}:meta"), server.all_keys()
        for other in (server.url, f"{server.url}&max_window=90", f"{server.url}&quarantine=90"):
            with pytest.raises(tenure.InvalidArgument, match=r"\?max_window=60"):
                async with tenure.connect(other):
                    pytest.fail("its holders could rely on another window")
        after = server.tell("HGETALL", "{tenure}:meta"), server.all_keys()
        # The living program renews, and notes the time.
        assert isinstance(before[0], dict)
        assert isinstance(after[0], dict)
        assert {**before[0], "t": ""} == {**after[0], "t": ""}
        assert before[1] == after[1]
    async with tenure.connect(f"{server.url}&max_window=90") as later:  # no session relies on it
        _held = await later.session(recovery_window=90)


async def test_after_a_loss_the_longer_of_two_windows_counts(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.url
    async with tenure.connect(f"{url}&max_window=60"):
        pass
    server.tell("FLUSHALL")
    wait, _ = await announced(f"{url}&max_window=2", caplog)
    assert wait == pytest.approx(60, abs=1)


async def test_a_namespace_of_the_version_before_goes_on_working(server: Server) -> None:
    async with tenure.connect(f"{server.url}&max_window=60") as client:
        session = await client.session(recovery_window=50, resumable=True)
        _held = await session.mutex("m").lock()
        await session.detach()
    server.tell("HDEL", "{tenure}:meta", "w", "d", "t", "h")  # as that version leaves it
    with pytest.raises(tenure.InvalidArgument, match=r"\?max_window=50"):
        async with tenure.connect(server.url):
            pytest.fail("a session lives whose window is longer")
    async with tenure.connect(f"{server.url}&max_window=60") as client:
        assert await client.mutex("m").try_lock() is None
        free = await client.mutex("other").try_lock()
        assert free is not None


# The evidence, where no server here would give it


def report(uptime: float | None, **info: str) -> Report:
    usual = {
        "uptime_in_seconds": "1000",
        "master_replid2": "0" * 40,
        "cmdstat_hello": "calls=3,usec=1",
    }
    return Report(Info({**usual, **info}), uptime, 0.0)


ADDRESS = parse("redis://localhost")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (report(1000.0), Verdict(ROLL_CALL, "new")),
        (report(10.0), Verdict(20.0, "restarted")),
        (report(28.0), Verdict(ROLL_CALL, "new")),
        (report(None), Verdict(ROLL_CALL, "new")),
        (report(None, uptime_in_seconds="11"), Verdict(20.0, "restarted")),
        (report(None)._replace(apart=3600.0), Verdict(30.0, "clock")),
        (report(1000.0)._replace(apart=3600.0), Verdict(ROLL_CALL, "new")),
        (Report(None, None, 0.0), Verdict(30.0, "unknown")),
        (Report(Info(), None, 0.0), Verdict(30.0, "unknown")),
        (report(1000.0, master_replid2="ab" * 20), Verdict(30.0, "promoted")),
        (report(1000.0, cmdstat_slaveof="calls=1,usec=3"), Verdict(30.0, "promoted")),
        (report(1000.0, cmdstat_replicaof="calls=0,usec=0"), Verdict(ROLL_CALL, "new")),
        (report(1000.0, **{"cmdstat_script|flush": "calls=1,x=1"}), Verdict(30.0, "flushed")),
        (report(1000.0, **{"cmdstat_script|load": "calls=9,x=1"}), Verdict(ROLL_CALL, "new")),
        (report(1000.0, cmdstat_script="calls=9,usec=3"), Verdict(30.0, "flushed")),
        (report(1000.0, cmdstat_config="calls=9,usec=3"), Verdict(30.0, "reset")),
        (report(1000.0, **{"cmdstat_config|resetstat": "calls=1"}), Verdict(30.0, "reset")),
        (report(1000.0, **{"cmdstat_script|flush": "nonsense"}), Verdict(30.0, "flushed")),
        (report(2.0)._replace(began_empty=True), Verdict(FIRST_CALL - 2.0, "empty")),
        (report(20.0)._replace(began_empty=True), Verdict(0.0, "empty")),
        (report(1000.0)._replace(began_empty=True), Verdict(ROLL_CALL, "new")),
        (report(None)._replace(began_empty=True, apart=3600.0), Verdict(FIRST_CALL, "empty")),
        (
            report(2.0, master_replid2="ab" * 20)._replace(began_empty=True),
            Verdict(30.0, "promoted"),
        ),
    ],
)
def test_each_piece_of_evidence_has_its_wait(found: Report, verdict: Verdict) -> None:
    assert judge(ADDRESS, 0.0, found) == verdict


class Answers:
    """A connection to a server whose report says this of its log."""

    def __init__(self, **info: str) -> None:
        self._info = info

    async def execute(self, *words: str) -> bytes:
        assert words[0] in {"FUNCTION", "INFO"}
        return "".join(f"{name}:{value}\r\n" for name, value in self._info.items()).encode()


@pytest.mark.parametrize(
    ("waiting", "status", "left"),
    [("0", "ok", True), ("117", "ok", False), ("0", "err", False)],
)
async def test_a_trace_counts_once_the_log_has_it(waiting: str, status: str, left: bool) -> None:
    empty = report(2.0, aof_enabled="1")._replace(began_empty=True, kept=True)
    server = Answers(aof_buffer_length=waiting, aof_last_write_status=status)
    assert await leave_trace(cast("RedisConnection", server), empty) is left


@pytest.mark.parametrize(
    ("url", "wait"),
    [
        ("redis://localhost", (0.5, "empty")),
        ("redis://127.0.0.1:6380", (0.5, "empty")),
        ("redis+unix:///run/redis.sock", (0.5, "empty")),
        ("redis://redis", (28.0, "restarted")),
        ("redis://10.0.0.7", (28.0, "restarted")),
    ],
)
def test_a_server_elsewhere_may_stand_in_for_one_whose_files_are_gone(
    url: str, wait: tuple[float, str]
) -> None:
    empty = report(2.0)._replace(began_empty=True, kept=True)
    assert judge(parse(url), 0.0, empty) == Verdict(*wait)


def test_a_witness_outweighs_what_the_caller_says() -> None:
    fresh = replace(ADDRESS, fresh=True)
    assert judge(fresh, 60.0, report(1000.0)) == Verdict(60.0, "lost")
    assert judge(fresh, 0.0, report(1000.0)) == Verdict(0.0, "fresh")


def test_behind_sentinels_nothing_is_certain() -> None:
    sentinel = parse("redis+sentinel://one,two/mymaster")
    assert judge(sentinel, 0.0, report(1000.0)) == Verdict(30.0, "sentinel")


def test_on_a_node_of_a_cluster_nothing_is_certain() -> None:
    cluster = parse("redis+cluster://one,two")
    assert judge(cluster, 0.0, Report(None, None, 0.0)) == Verdict(30.0, "cluster")
    node = report(1000.0, cluster_enabled="1")
    assert judge(parse("redis://one"), 0.0, node) == Verdict(30.0, "cluster")
    assert judge(replace(cluster, fresh=True), 0.0, node) == Verdict(0.0, "fresh")


def test_each_namespace_has_witnesses_of_its_own() -> None:
    urls = ("redis://h/0", "redis://h/1", "redis://h/0?prefix=x", "redis://h/0?max_window=60")
    texts = [Witnesses(parse(url)).mine for url in urls]
    assert len({hashlib.sha1(text.encode()).hexdigest() for text in texts}) == len(urls)
    assert Witnesses(parse("redis://h/0?max_window=29")).mine == texts[0]
