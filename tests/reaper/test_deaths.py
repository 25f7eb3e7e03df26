"""The next holder follows a dead program at once, and never a living one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

import pytest

import tenure
from tenure import blocking
from tenure._client.client import client_core
from tenure._client.session_core import SessionCore
from tenure.clock import SystemClock
from tenure.doctor import Finding, examine
from tenure.engines import connect_engine
from tenure.engines.contract import Orphan
from tenure.reaper import program
from tenure.reaper.program import WAITER
from tests.engines.outages import NETWORKED
from tests.engines.stores import stores
from tests.reaper.programs import Program, ends, reapers_of

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="for Linux")

AT_ONCE = 10.0
"""Seconds, on a busy machine; the recovery window is 30 s."""

ENGINES = ("redis", "postgresql", "etcd", "tenure", "ydb")
KINDS = ("exit", "abort", "term", "kill")


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty store of each engine that learns of deaths by silence alone."""
    with stores(request.param).empty() as url:
        yield url


@pytest.fixture
def redis() -> Iterator[str]:
    """An empty store on Redis."""
    with stores("redis").empty() as url:
        yield url


def die(program: Program, kind: str) -> None:
    """Let a program die."""
    if kind == "kill":
        program.process.kill()
    else:
        program.do(kind)


async def is_free(client: tenure.Client) -> bool:
    """Whether the lock is free."""
    lease = await client.mutex("a").try_lock()
    if lease is None:
        return False
    await lease.release()
    return True


async def handed_over(client: tenure.Client, program: Program, kind: str) -> float:
    """The seconds from a program's death until a waiter has its lock."""
    waiting = asyncio.ensure_future(client.mutex("a").lock(timeout=AT_ONCE))
    await waits(client)
    began = time.perf_counter()
    die(program, kind)
    lease = await waiting
    took = time.perf_counter() - began
    await lease.release()
    return took


async def another_death(url: str) -> None:
    """Kill another program, and return when its reaper is done: any other one had time, too."""
    with Program.holding(url, name="b") as program:
        program.kill()
        await ends(program.reaper)


async def waits(client: tenure.Client) -> None:
    """Return when a request waits for the lock."""
    while not (await client.semaphore("a").describe(waiters=True)).waiters:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_the_next_holder_follows_a_killed_program(url: str) -> None:
    async with tenure.connect(url) as client:
        with Program.holding(url) as program:
            await handed_over(client, program, "kill")
            await ends(program.reaper)


async def test_all_requests_of_a_session_for_one_name_end_with_it(url: str) -> None:
    async with tenure.connect(url) as client:
        with Program.holding(url) as program:
            assert program.tell("twice") == "holds s"
            program.kill()
            async with client.semaphore("s").acquire(2, timeout=AT_ONCE):
                pass
            async with client.mutex("a").lock(timeout=AT_ONCE):
                pass


@pytest.mark.parametrize("kind", KINDS[:-1])
async def test_each_kind_of_death_counts(redis: str, kind: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis) as program:
            await handed_over(client, program, kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
async def test_many_deaths_hand_over_at_once(
    url: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    took = []
    async with tenure.connect(url) as client:
        for _ in range(12):
            with Program.holding(url) as program:
                took.append(await handed_over(client, program, kind))
    cuts = quantiles(took, n=100, method="inclusive")
    with capsys.disabled():
        sys.stdout.write(
            f"{url.partition(':')[0]} {kind}: p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s\n"
        )
    assert cuts[98] < AT_ONCE


MANY = """
import asyncio, sys
import tenure
from tenure.reaper.program import settled

async def main():
    client = tenure.connect(sys.argv[1])
    sessions = [await client.session(recovery_window=30) for _ in range(150)]
    locks = [await each.mutex(f"m{n}").lock() for n, each in enumerate(sessions)]
    await asyncio.to_thread(settled)
    print("watched", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_more_sessions_than_the_reaper_may_have_descriptors_are_ended(redis: str) -> None:
    limited = ("/bin/sh", "-c", 'ulimit -n 100; exec "$0" "$@"', sys.executable, "-c", MANY, redis)
    with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "watched\n"
        finally:
            process.kill()
    until = time.monotonic() + AT_ONCE
    with blocking.connect(redis) as client:
        for number in range(150):
            with client.mutex(f"m{number}").lock(timeout=until - time.monotonic()):
                pass


@pytest.mark.parametrize("how", ["refuse", pytest.param("stall", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("store", ["redis", "postgresql", "etcd", "native", "ydb"])
async def test_a_store_that_is_out_of_reach_at_the_death_is_tried_again(
    store: str, how: str
) -> None:
    with NETWORKED[store]() as afar:
        async with tenure.connect(afar.direct) as client:
            with Program.holding(afar.url) as program:
                getattr(afar.network, how)()
                program.kill()
                await another_death(afar.direct)
                assert not await is_free(client)
                afar.network.flow()
                afar.network.cut()
                afar.network.start()
                async with client.mutex("a").lock(timeout=AT_ONCE):
                    pass
                await ends(program.reaper)


async def test_a_stopped_program_keeps_its_lease(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis) as program:
            program.stop()
            await another_death(redis)
            assert not await is_free(client)
            assert reapers_of(program.id) == [program.reaper]
            await handed_over(client, program, "kill")  # stopped or not


async def test_the_end_of_a_forked_child_is_no_death(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis) as program:
            assert program.tell("fork") == "forked 0"
            await another_death(redis)
            assert not await is_free(client)
            await handed_over(client, program, "kill")


async def test_a_living_child_with_all_descriptors_does_not_hide_the_death(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis) as program:
            child = int(program.tell("daemonize").removeprefix("child "))
            try:
                await handed_over(client, program, "kill")
            finally:
                os.kill(child, signal.SIGKILL)


async def test_a_child_that_has_the_descriptor_prolongs_the_sessions(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis) as program:
            child = int(program.tell("kept").removeprefix("child "))
            program.kill()
            try:
                await another_death(redis)
                assert not await is_free(client)
            finally:
                os.kill(child, signal.SIGKILL)
            async with client.mutex("a").lock(timeout=AT_ONCE):
                pass


async def test_an_exec_is_no_death_and_lets_the_reaper_leave(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis, 1) as program:
            assert program.tell("exec") == "new"
            await ends(program.reaper)
            assert program.process.poll() is None
            async with client.mutex("a").lock(timeout=AT_ONCE):  # its window has passed
                pass


@pytest.mark.parametrize("options", ["detach", "resumable"])
async def test_a_session_that_survives_its_program_is_left_alone(redis: str, options: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis, 30, options, watched=options == "detach") as program:
            if options == "detach":
                assert program.tell("detach") == "detached"
            program.kill()
            if program.reaper:
                await ends(program.reaper)
            assert not reapers_of(program.id)
            assert not await is_free(client)


async def test_the_reaper_leaves_when_there_is_no_session_for_a_while(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis, 30, "impatient") as program:
            assert program.tell("close") == "closed"
            await ends(program.reaper)
            assert program.tell("again") == "holds b"
            (another,) = reapers_of(program.id)
            assert another != program.reaper
            program.kill()
            async with client.mutex("b").lock(timeout=AT_ONCE):
                pass


async def test_the_reaper_serves_clients_one_after_the_other(redis: str) -> None:
    with Program.holding(redis) as program:
        assert program.tell("close") == "closed"
        assert program.tell("again") == "holds b"
        assert reapers_of(program.id) == [program.reaper]


async def test_the_program_has_no_child(redis: str) -> None:
    with Program.holding(redis) as program:
        assert program.tell("wait") == "no child"


async def test_the_reaper_has_no_descriptor_of_the_program_and_its_own_session(redis: str) -> None:
    with Program.holding(redis) as program:
        folder = f"/proc/{program.reaper}/fd"
        assert {
            os.readlink(f"{folder}/{each}").partition(":")[0] for each in os.listdir(folder)
        } == {
            "/dev/null",
            "anon_inode",
            "socket",
        }
        assert os.getsid(program.reaper) == program.reaper
        assert os.getpgid(program.reaper) != os.getpgid(program.id)
        assert program.resident < 12 * 1024


async def test_without_the_reaper_the_window_counts(redis: str) -> None:
    async with tenure.connect(redis) as client:
        with Program.holding(redis, 1) as program:
            os.kill(program.reaper, signal.SIGKILL)
            await ends(program.reaper)
            program.process.kill()
            async with client.mutex("a").lock(timeout=AT_ONCE):
                pass


async def test_it_can_be_switched_off(redis: str) -> None:
    off = f"{redis}{'&' if '?' in redis else '?'}reaper=false"
    with Program.holding(off, watched=False) as program:
        assert program.tell("settled") == "settled"
        assert not reapers_of(program.id)
    async with tenure.connect(redis, reaper=False) as client, client.mutex("b"):
        assert client_core(client).registrations is None


async def test_only_the_session_of_the_credential_is_ended(url: str) -> None:
    engine = connect_engine(url, SystemClock())
    async with tenure.connect(url, reaper=False) as client, tenure.connect(url) as administrator:
        session = await client.session()
        lease = await session.mutex("a").lock()
        (core,) = client_core(client).sessions
        assert isinstance(core, SessionCore)
        mine = core.engine.credential
        assert mine is not None
        orphan = Orphan("/default", session.id, 30.0, mine)
        other = mine[:-4] + ("0000" if mine[-4:] != "0000" else "1111")
        await engine.open()
        try:
            await engine.end_orphan(replace(orphan, credential=other))
            assert not await is_free(administrator)
            lease.check()
            await engine.end_orphan(orphan)
            assert await is_free(administrator)
            await engine.end_orphan(orphan)  # again, without an error
        finally:
            await engine.aclose()


async def test_the_lock_of_a_killed_tenure_run_passes_on_after_its_command(redis: str) -> None:
    words = (sys.executable, "-m", "tenure", "run", "--lock", "a", "--")
    command = (sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()")
    async with tenure.connect(redis) as client:
        with subprocess.Popen(  # noqa: ASYNC220  quick enough for a test
            [*words, *command],
            env={**os.environ, "TENURE_URL": redis},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as runner:
            assert runner.stdout is not None
            number = int(runner.stdout.readline())
            (reaper,) = reapers_of(runner.pid)
            runner.kill()
            async with client.mutex("a").lock(timeout=AT_ONCE):
                with pytest.raises(ProcessLookupError):
                    os.kill(number, 0)
            await ends(reaper)


async def findings(url: str) -> list[Finding]:
    """What the doctor says about the reaper."""
    async with tenure.connect(url, reaper=False) as client:
        await client.list_nodes()  # there is a store
    return [each for each in await asyncio.to_thread(list, examine(url)) if each.what == "reaper"]


async def test_the_doctor_says_that_there_is_a_reaper(redis: str) -> None:
    (finding,) = await findings(redis)
    assert finding.level == "ok"
    assert not await findings(f"{redis}&reaper=false")


@pytest.mark.parametrize(
    ("broken", "value", "reason"),
    [
        ("sys.executable", "/nowhere/game", "no Python interpreter"),
        ("tenure.reaper.program.SHELL", "/nowhere/sh", "there is no /nowhere/sh"),
        ("sys.executable", "/nowhere/python", "its process ended at once"),
        ("os.getpid", lambda: 1, "process 1 of its container"),
    ],
)
async def test_the_doctor_says_why_there_is_none(
    redis: str, broken: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_program", type(program.__dict__["_program"])())
    monkeypatch.setattr(broken, value)
    (finding,) = await findings(redis)
    assert finding.level == "warning"
    assert reason in finding.found


def test_nothing_is_written_to_a_file_that_has_the_number_of_the_socket(tmp_path: Path) -> None:
    program = """
        import os, sys
        from tenure.engines.contract import Orphan
        from tenure.reaper import program

        sessions = program.Registrations("redis://nowhere.invalid")
        sessions.put(Orphan("/default", 1, 1.0, "token"))
        assert program.settled()
        os.closerange(3, 256)  # as a daemonizing program does
        files = [open(f"{sys.argv[1]}/{number}", "wb") for number in range(32)]
        sessions.put(Orphan("/default", 2, 1.0, "token"))
        assert program.settled()  # another one
        sessions.drop(1)
        sessions.close()
        sizes = [os.fstat(each.fileno()).st_size for each in files]
        print([each for each in sizes if each])
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_socket_that_is_closed_while_lines_are_sent_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reapers = []
    with (tmp_path / "file").open("wb") as file:

        def start() -> int:
            ours, theirs = socket.socketpair()
            reapers.append((ours.fileno(), theirs))
            return ours.detach()

        def environment() -> bytes:
            if len(reapers) == 1:
                os.dup2(file.fileno(), reapers[0][0])  # its number belongs to a file now
            return b"program {}\n"

        monkeypatch.setattr(program, "_start", start)
        monkeypatch.setattr(program, "_environment", environment)
        monkeypatch.setattr(program, "_program", type(program.__dict__["_program"])())
        sessions = program.Registrations("redis://nowhere.invalid")
        sessions.put(Orphan("/default", 1, 1.0, "token"))
        assert program.settled()
        (taken, lost), (ours, reaper) = reapers
        with lost, reaper:
            lines = reaper.recv(1 << 16, socket.MSG_DONTWAIT).splitlines()
            assert [line[:1] for line in lines] == [b"p", b"+"]
            assert os.fstat(taken).st_size == 0
            sessions.close()
            assert reaper.recv(1 << 16, socket.MSG_DONTWAIT).startswith(b"-")
            os.close(taken)
            os.close(ours)


def test_a_session_that_is_registered_as_the_reaper_leaves_is_ended() -> None:
    program = """
        import os, socket, subprocess, sys
        sys.path.insert(0, sys.argv[1])
        from waiter import CONTROL, PIDFD, Waiter

        program = subprocess.Popen(["sleep", "600"])
        ours, theirs = socket.socketpair()
        ours, theirs = (os.fdopen(os.dup2(each.detach(), 20 + n), "wb", 0)
                        for n, each in enumerate((ours, theirs)))
        os.dup2(os.pidfd_open(program.pid), PIDFD)
        os.dup2(theirs.fileno(), CONTROL)

        class Leaving(Waiter):
            def _refuse(self):
                ours.write(b"+key 30 {}\\n")
                super()._refuse()
                try:
                    ours.write(b"+late 30 {}\\n")
                except BrokenPipeError:
                    pass

            def _longest_wait(self):
                seconds = super()._longest_wait()
                if self.closed:
                    print(seconds)
                    program.kill()
                return seconds

        waiter = Leaving(program.pid, 0.0)
        assert waiter.wait()
        print(*waiter.orphans)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), os.path.dirname(WAITER)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("None\nb'key'\n", "")
