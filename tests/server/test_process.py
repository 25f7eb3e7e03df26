"""`tenure serve` as a real process: its start, its end, its death, and who may come in."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ydb
from ydb.coordination import CoordinationClient

import tenure
from tenure.identity import ANONYMOUS, Identity, this_program
from tenure.server.auth.tokens import hash_of
from tests.server.certificates import Authority
from tests.server.serving import launched, serving

ONE, TWO = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"


async def token_of_a_lock(url: str) -> int:
    """Lock and release at this address; the fencing token."""
    async with tenure.connect(url) as client, client.mutex("m").lock(timeout=30) as lease:
        return lease.fencing_token


async def until(so: Callable[[], bool]) -> None:
    """Ask until it is so, of what another process brings about."""
    async with asyncio.timeout(60):
        while not so():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)


def command_line(pid: int) -> str:
    """What everybody on the machine can see of a process."""
    shown = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return shown.stdout


async def test_it_says_where_it_listens_and_clients_find_it_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        assert server.told("starting")[0]["pid"] == server.pid
        (listening,) = server.told("listening")
        assert listening["address"] == server.address
        assert listening["tls"] == "no"
        assert int(server.address.rpartition(":")[2]) > 0
        first = await token_of_a_lock(server.address)
        assert await token_of_a_lock(server.address) > first
        assert await server.end() == 0
        assert [line["event"] for line in server.lines[-2:]] == ["draining", "ended"]
    assert (tmp_path / "tenure" / "server.db").exists()


@pytest.mark.parametrize(("loop", "busy_poll"), [("asyncio", "0"), ("uvloop", "1000")])
async def test_it_runs_on_either_loop(loop: str, busy_poll: str, tmp_path: Path) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    options = ["--loop", loop, "--busy-poll", busy_poll, "--store", "memory://"]
    async with serving(tmp_path, *options) as server:
        assert server.told("starting")[0]["loop"] == loop
        assert len(server.told("the store ends with the server")) == 1
        await token_of_a_lock(server.address)
        assert await server.end(signal.SIGINT) == 0


async def test_a_unix_socket_is_there_while_it_serves(tmp_path: Path) -> None:
    path = tmp_path / "t.sock"
    url = f"tenure+unix://{path}"
    async with serving(tmp_path, listen=[url + "?mode=0660"]) as server:
        assert server.address == url
        assert path.stat().st_mode & 0o777 == 0o660
        await token_of_a_lock(url)
        async with launched(tmp_path, "--listen", url) as second:
            assert await second.end(None) == 74
            assert "another server listens there" in second.lines[-1]["why"]
        await token_of_a_lock(url)  # the refused one has taken nothing with it
        await server.end(signal.SIGKILL)
    assert path.exists()
    async with serving(tmp_path, listen=[url]) as server:  # a stale file is no obstacle
        await token_of_a_lock(url)
        assert await server.end() == 0
    assert not path.exists()


@pytest.mark.parametrize("identify", [True, False])
async def test_a_client_is_known_by_its_own_process_and_never_by_the_server_s(
    tmp_path: Path, *, identify: bool
) -> None:
    me = this_program() if identify else ANONYMOUS
    async with serving(tmp_path) as server:
        url = server.addresses[0]
        async with (
            tenure.connect(url, identify=identify) as client,
            client.session(description="mine") as session,
        ):
            async with session.mutex("m").lock():
                (owner,) = (await client.describe_semaphore("m")).owners
                assert Identity(owner.host, owner.pid, owner.program) == me
                assert owner.session_description == "mine"
            (listed,) = await client.list_sessions()
            assert (listed.id, listed.description) == (session.id, "mine")
            assert Identity(listed.host, listed.pid, listed.program) == me
        await server.end()


async def test_a_port_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tenure://127.0.0.1:{taken.getsockname()[1]}"
        async with launched(tmp_path, "--listen", address) as server:
            assert await server.end(None) == 74
            assert address.partition("//")[2] in server.lines[-1]["why"]
            assert b"Traceback" not in server.raw


async def test_a_store_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"this is no database" * 100)
    (tmp_path / "store.db").chmod(0o600)
    store = f"sqlite:///{tmp_path}/store.db"
    async with launched(tmp_path, "--store", store, "--listen", "tenure://127.0.0.1:0") as server:
        assert await server.end(None) == 74
        assert str(tmp_path / "store.db") in server.lines[-1]["why"]
        assert b"Traceback" not in server.raw


# Its end, and its death


async def test_an_end_under_load_loses_no_session(tmp_path: Path) -> None:
    """SIGTERM while tasks lock and release; another server follows at the same address."""
    rounds = [0] * 6
    enough = False

    async with (
        serving(tmp_path) as first,
        tenure.connect(first.address) as client,
        client.session(recovery_window=60) as session,
        session.mutex("kept").lock() as kept,
        asyncio.TaskGroup() as group,
    ):

        async def work(number: int) -> None:
            while not enough:
                async with session.mutex(f"m{number % 2}").lock():
                    rounds[number] += 1

        for number in range(len(rounds)):
            group.create_task(work(number))
        await until(lambda: min(rounds) > 5)
        assert await first.end() == 0
        before = list(rounds)
        async with serving(tmp_path, listen=[first.address]):
            await until(lambda: all(a > b + 5 for a, b in zip(rounds, before, strict=True)))
            kept.check()
            enough = True
            await until(lambda: all(task.done() for task in group._tasks))
            await kept.release()
            await session.aclose()
            await client.aclose()


async def test_a_killed_server_takes_no_lease_with_it(tmp_path: Path) -> None:
    """kill -9 and a start: who holds holds, who waits keeps its place, and tokens rise."""
    async with (
        serving(tmp_path) as first,
        tenure.connect(first.address) as holding,
        tenure.connect(first.address) as waiting,
        holding.session(recovery_window=60, description="holder") as holder,
        waiting.session(recovery_window=60, description="waiter") as waiter,
    ):
        lease = await holder.mutex("m").lock()
        async with (
            waiter.semaphore("m", ephemeral=True).enqueue() as second,
            waiter.semaphore("m", ephemeral=True).enqueue() as third,
        ):
            await first.end(signal.SIGKILL)
            async with serving(tmp_path, listen=[first.address]):
                lease.check()
                described = await holder.semaphore("m", ephemeral=True).describe(
                    owners=True, waiters=True
                )
                assert [each.order_id for each in described.owners] == [lease.fencing_token]
                assert len(described.waiters) == 2
                await lease.release()
                taken = [await second.wait(timeout=60)]
                assert taken[0].fencing_token > lease.fencing_token
                await taken[0].release()
                taken.append(await third.wait(timeout=60))
                assert taken[1].fencing_token > taken[0].fencing_token
                await taken[1].release()
                assert await token_of_a_lock(first.address) > taken[1].fencing_token
                await holder.aclose()
                await waiter.aclose()


async def test_a_stuck_store_does_not_hold_the_end_up(tmp_path: Path) -> None:
    """Another program keeps the store's turn to write: the end is forced, and nothing is lost."""
    async with (
        serving(tmp_path, "--drain-time", "0.5") as first,
        tenure.connect(first.address) as client,
        client.session(recovery_window=60) as session,
    ):
        lease = await session.mutex("m").lock()
        with (tmp_path / "tenure" / "server.db.tenure" / "turn.lock").open("rb") as turn:
            await asyncio.to_thread(fcntl.flock, turn, fcntl.LOCK_EX)
            stuck = asyncio.ensure_future(session.mutex("other").lock())
            assert await first.end() == 74
            assert first.lines[-1]["event"] == "ended by force; sessions live on in the store"
            assert "drain-time, 0.5 s" in first.lines[-1]["why"]
        async with serving(tmp_path, listen=[first.address]):
            await (await stuck).release()
            lease.check()
            await lease.release()
            await session.aclose()


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, "--drain-time", "3600") as server,
        tenure.connect(server.address) as client,
    ):
        session = await client.session(recovery_window=2)
        with (tmp_path / "tenure" / "server.db.tenure" / "turn.lock").open("rb") as turn:
            await asyncio.to_thread(fcntl.flock, turn, fcntl.LOCK_EX)
            stuck = asyncio.ensure_future(session.mutex("m").lock())
            server.send(signal.SIGTERM)
            await server.until("draining")
            assert await server.end(signal.SIGINT) == 128 + signal.SIGINT
            with pytest.raises(tenure.SessionExpired):  # nobody came back in time
                await stuck


# Who may come in


async def test_only_who_has_a_token_comes_in_and_no_token_is_ever_shown(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# for the tests\n{ONE}\n")
    tokens.chmod(0o600)
    async with serving(
        tmp_path, "--auth-token-file", str(tokens), "--log-level", "debug"
    ) as server:
        place = server.address.partition("//")[2]
        for wrong in ("", f"{TWO}@", f"{ONE[:-1]}@"):
            with pytest.raises(tenure.AuthenticationFailed):
                await token_of_a_lock(f"tenure://{wrong}{place}")
        await token_of_a_lock(f"tenure://{ONE}@{place}")

        tokens.write_text(f"{TWO}\n")
        server.send(signal.SIGHUP)
        await server.until("reloaded")
        await token_of_a_lock(f"tenure://{TWO}@{place}")
        with pytest.raises(tenure.AuthenticationFailed):
            await token_of_a_lock(f"tenure://{ONE}@{place}")

        tokens.write_text("")
        server.send(signal.SIGHUP)
        said = await server.until("not reloaded, settings kept")
        assert "has no token" in said["why"]
        for useless, why in (
            (f'[tokens.a]\nhash = "{hash_of(ONE)}"\nexpires = 2020-01-01T00:00:00Z\n', "expired"),
            (f'[tokens.a]\nhash = "{hash_of(ONE)}"\npermissions = {{}}\n', "gives no permission"),
            ("[tokens]\n", "has no token"),
        ):
            tokens.write_text(useless)
            server.send(signal.SIGHUP)
            assert why in (await server.until("not reloaded, settings kept"))["why"]
        await token_of_a_lock(f"tenure://{TWO}@{place}")

        shown = command_line(server.pid)
        assert "serve" in shown
        assert ONE not in shown
        assert TWO not in shown
        assert await server.end() == 0
        assert len(server.lines) > 5
        for secret in (ONE, TWO, ONE[:-1]):
            assert secret.encode() not in server.raw


async def test_a_file_that_does_not_answer_stops_neither_the_server_nor_its_end(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ONE}\n")
    tokens.chmod(0o600)
    async with serving(tmp_path, "--auth-token-file", str(tokens)) as server:
        place = server.address.partition("//")[2]
        tokens.unlink()
        os.mkfifo(tokens, 0o600)  # opening it waits for a writer
        server.send(signal.SIGHUP)
        await token_of_a_lock(f"tenure://{ONE}@{place}")
        assert await server.end() == 0
        assert not server.told("reloaded")


async def test_what_is_open_to_everybody_is_warned_of(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ONE}\n")
    tokens.chmod(0o644)
    anywhere = ["tenure://0.0.0.0:0"]
    async with serving(tmp_path, listen=anywhere) as server:
        (warning,) = (line for line in server.lines if line["level"] == "warning")
        assert "any client that reaches tenure://0.0.0.0:0 is let in" in warning["found"]
        assert "--auth-token-file" in warning["remedy"]
        await server.end()
    async with serving(tmp_path, "--auth-token-file", str(tokens), listen=anywhere) as server:
        told = " ".join(line["found"] for line in server.told("take care"))
        assert "everybody may read" in told
        assert "unencrypted" in told
        assert "is let in" not in told
        await server.end()


async def test_tls_lets_in_who_trusts_the_server_and_whom_the_server_trusts(
    tmp_path: Path,
) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "another authority")
    pair, client = ours.signs("server.test"), ours.signs("client.test")
    stranger = theirs.signs("stranger.test")
    async with serving(
        tmp_path,
        *("--tls-cert", pair.cert, "--tls-key", pair.key),
        listen=["tenures://127.0.0.1:0", f"tenures://127.0.0.1:0?tls-client-ca={ours.cert}"],
    ) as server:
        plain, mutual = server.addresses
        listening = [line["tls"] for line in server.told("listening")]
        assert listening == ["yes", "with client certificates"]

        await token_of_a_lock(f"{plain}?tls-ca={ours.cert}")
        for refused in (plain, f"{plain}?tls-ca={theirs.cert}", f"{mutual}?tls-ca={ours.cert}"):
            with pytest.raises(tenure.TenureError):
                await token_of_a_lock(refused)
        await server.until("handshake failed")
        assert all(line["reason"] for line in server.told("handshake failed"))
        shown = f"{mutual}?tls-ca={ours.cert}&tls-cert={{0.cert}}&tls-key={{0.key}}"
        await token_of_a_lock(shown.format(client))
        with pytest.raises(tenure.TenureError):
            await token_of_a_lock(shown.format(stranger).replace(" ", "%20"))

        await asyncio.to_thread(Path(pair.cert).write_text, "no certificate")
        server.send(signal.SIGHUP)
        said = await server.until("not reloaded, settings kept")
        assert said["why"].count("server.test.pem has no certificate") == 1  # of two listeners

        renewed = ours.signs("server.test")  # into the same files
        assert renewed == pair
        server.send(signal.SIGHUP)
        await server.until("reloaded")
        await token_of_a_lock(f"{plain}?tls-ca={ours.cert}")
        assert await server.end() == 0


# The service manager


async def test_the_service_manager_is_told_how_it_goes(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        loop = asyncio.get_running_loop()

        async def heard(first: bytes) -> bytes:
            """What it is told next, signs of life apart."""
            async with asyncio.timeout(60):
                while True:
                    said = await loop.sock_recv(manager, 4096)
                    if first == b"WATCHDOG=1" or said != b"WATCHDOG=1":
                        assert said.startswith(first)
                        return said

        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        async with serving(tmp_path, environment=environment) as server:
            assert server.address.encode() in await heard(b"READY=1\n")
            for _ in range(3):
                await heard(b"WATCHDOG=1")
            server.send(signal.SIGHUP)
            await heard(b"RELOADING=1\nMONOTONIC_USEC=")
            await heard(b"READY=1\n")
            assert await server.end() == 0
            await heard(b"STOPPING=1\n")


ACTIVATES = """
import os, sys
os.dup2(int(sys.argv[1]), 3)  # where systemd would have put it
os.environ["LISTEN_FDS"], os.environ["LISTEN_PID"] = "1", str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "tenure", "serve", *sys.argv[2:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
async def test_it_serves_the_socket_that_systemd_has_opened(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        url = f"tenure://127.0.0.1:{opened.getsockname()[1]}"
        command = [sys.executable, "-c", ACTIVATES, str(opened.fileno())]
        options = ("--listen", url)
        async with launched(
            tmp_path, *options, command=command, pass_fds=[opened.fileno()]
        ) as server:
            await server.until("ready")
            assert server.address == url
            await token_of_a_lock(url)
            assert await server.end() == 0
        async with launched(
            tmp_path,
            *("--listen", "tenure://127.0.0.1:0"),
            command=command,
            pass_fds=[opened.fileno()],
        ) as server:
            assert await server.end(None) == 78
            assert "no --listen has this address" in server.lines[-1]["why"]


# YDB's clients


def described_node(address: str, path: str) -> Any:
    """What YDB's own client is told of a node."""
    endpoint, database = address.removeprefix("ydb://").split("/", 1)
    driver = ydb.Driver(endpoint=f"grpc://{endpoint}", database=f"/{database}")
    with driver:
        driver.wait(timeout=30, fail_fast=True)
        return CoordinationClient(driver).describe_node(path)


async def test_ydbs_clients_find_what_tenures_own_have_made(tmp_path: Path) -> None:
    async with serving(
        tmp_path,
        *("--database", "/prod"),
        listen=["tenure://127.0.0.1:0", "ydb://127.0.0.1:0"],
    ) as server:
        own, foreign = server.addresses
        assert foreign.endswith("/prod")
        async with tenure.connect(own) as client:
            await client.create_node("/billing", tenure.NodeConfig(self_check_period=7))
        described = await asyncio.to_thread(described_node, foreign, "/prod/billing")
        assert described.self_check_period_millis == 7000
        assert await server.end() == 0


async def test_who_finds_nobody_is_told_what_to_look_for(tmp_path: Path) -> None:
    with pytest.raises(tenure.EngineUnavailable, match="see whether 'tenure serve' runs there"):
        await token_of_a_lock(f"tenure+unix://{tmp_path}/t.sock")


async def test_the_log_names_the_identity_of_each_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, client = authority.signs("server.test"), authority.signs("billing")
    query = f"tls-cert={pair.cert}&tls-key={pair.key}&tls-client-ca={authority.cert}"
    listen = [
        "tenure://127.0.0.1:0",
        f"tenure+unix://{tmp_path}/t.sock",
        f"tenures://127.0.0.1:0?{query}",
        "dflockd://127.0.0.1:0",
        "ydb://127.0.0.1:0",
    ]
    async with serving(tmp_path, "--log-level", "debug", listen=listen) as server:
        plain, local, inside_tls, lines, grpc = server.addresses
        await token_of_a_lock(plain)
        await token_of_a_lock(local)
        await token_of_a_lock(
            f"{inside_tls}?tls-ca={authority.cert}&tls-cert={client.cert}&tls-key={client.key}"
        )
        await token_of_a_lock(lines)
        await token_of_a_lock(grpc)
        assert await server.end() == 0
        found = [each["identity"] for each in server.told("connection greeted")]
        assert set(found) == {"anonymous", f"uid {os.getuid()}", "CN=billing"}
        assert found.count("anonymous") >= 3  # one of each protocol
