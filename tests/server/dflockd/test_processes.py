"""Servers that are processes: killed and started anew, inside TLS, as dflockd's own command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tenure
from tests.server.certificates import Authority
from tests.server.serving import PATIENCE, Served, launched, serving

DFLOCKD = [sys.executable, "-W", "error", "-m", "tenure", "dflockd"]
THEIR_CLIENT = "dflockd-client==2.1.1"


def port_of(server: Served, number: int = 0) -> int:
    port = urlsplit(server.addresses[number]).port
    assert port
    return port


class Talk:
    """A connection over a network."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, command: str, key: str = "_", argument: str = "_") -> None:
        self.writer.write(f"{command}\n{key}\n{argument}\n".encode())

    async def hear(self) -> str:
        async with asyncio.timeout(PATIENCE):
            return (await self.reader.readline()).decode().rstrip("\n")

    async def ask(self, command: str, key: str = "_", argument: str = "_") -> str:
        self.say(command, key, argument)
        return await self.hear()

    async def token(self, command: str, key: str, argument: str) -> str:
        """That of what it asks for and gets."""
        reply = await self.ask(command, key, argument)
        match = re.fullmatch(r"ok ([0-9a-f]{32}) \d+", reply)
        assert match, reply
        return match[1]


@asynccontextmanager
async def talking(port: int, **more: Any) -> AsyncIterator[Talk]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    try:
        yield Talk(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):  # the server may have been killed
            await writer.wait_closed()


async def test_tokens_outlive_a_server_that_is_killed(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/locks.db"
    with_store = ("--store", store)
    async with serving(tmp_path, *with_store, listen=["dflockd://127.0.0.1:0"]) as server:
        port = port_of(server)
        async with talking(port) as holder, talking(port) as waiter:
            job = await holder.token("l", "job", "0 30")
            short = await holder.token("l", "short", "0 2")
            pool = await holder.token("sl", "pool", "0 2")
            waiter.say("l", "job", "30")
            assert await holder.ask("ping") == "ok"
            assert await server.end(signal.SIGKILL) == -signal.SIGKILL
    async with serving(tmp_path, *with_store, listen=["dflockd://127.0.0.1:0"]) as server:
        assert server.told("took locks over")
        assert port_of(server) != port
        port = port_of(server)
        async with talking(port) as client, talking(port) as other:
            assert await other.ask("l", "job", "0") == "timeout"
            assert await client.ask("n", "job", f"{job} 20") == "ok 20"
            await other.token("l", "short", "10")  # its lease has run out, or does
            assert await client.ask("n", "short", short) == "error"
            await other.token("sl", "pool", "0 2")
            assert await other.ask("sl", "pool", "0 2") == "timeout"
            assert await other.ask("sl", "pool", "0 3") == "error_limit_mismatch"
            assert await client.ask("sr", "pool", pool) == "ok"
            assert await client.ask("r", "job", job) == "ok"
            fence = int((await other.token("l", "job", "0"))[:16], 16)
            assert fence > int(job[:16], 16)
            client.say("l", "job", "30")
            assert await other.ask("ping") == "ok"
            assert await server.end() == 0
            assert await client.hear() == "error_draining"
            assert await client.hear() == ""


async def test_two_servers_on_one_store_accept_each_others_tokens(tmp_path: Path) -> None:
    store = ("--store", f"sqlite:///{tmp_path}/locks.db")
    listen = ["dflockd://127.0.0.1:0"]
    async with (
        serving(tmp_path, *store, listen=listen) as one,
        serving(tmp_path, *store, listen=listen) as two,
        talking(port_of(one)) as holder,
        talking(port_of(two)) as client,
    ):
        job = await holder.token("l", "job", "0 600")
        free = await holder.token("l", "free", "0 600")
        assert await client.ask("r", "free", free) == "ok"
        assert await holder.ask("l", "free", "0") != "timeout"
        assert await client.ask("n", "job", f"{job} 700") == "ok 700"
        assert await holder.ask("n", "job", f"{job} 600") == "ok 600"
        assert not two.told("took locks over")
        assert await one.end(signal.SIGKILL) == -signal.SIGKILL
        async with asyncio.timeout(PATIENCE):
            while await client.ask("n", "job", f"{job} 600") != "ok 600":
                pass  # the store has not seen yet that the process is dead
        assert await client.ask("l", "job", "0") == "timeout"
        assert await client.ask("r", "job", job) == "ok"


async def test_locks_are_those_of_tenures_own_clients(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/locks.db"
    listen = ["dflockd://127.0.0.1:0", "tenure://127.0.0.1:0"]
    async with (
        serving(tmp_path, "--store", store, listen=listen) as server,
        talking(port_of(server)) as client,
        tenure.connect(server.addresses[1]) as program,
        program.session("/dflockd") as session,
    ):
        token = await client.token("l", "job", "0")
        assert await session.mutex("job").try_lock() is None
        assert await client.ask("r", "job", token) == "ok"
        async with session.mutex("job").lock(timeout=PATIENCE) as lease:
            assert lease.fencing_token > int(token[:16], 16)
            assert await client.ask("l", "job", "0") == "timeout"
            assert await client.ask("e", "job", "") == "queued"
        assert (await client.ask("w", "job", "30")).startswith("ok ")
        await session.semaphore("pool").create(limit=2)
        async with session.semaphore("pool").acquire():
            await client.token("sl", "pool", "0 2")
            assert await client.ask("sl", "pool", "0 2") == "timeout"
            assert await client.ask("sl", "pool", "0 3") == "error_limit_mismatch"


async def test_inside_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("localhost")
    tls = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--store", "memory://")
    trust = ssl.create_default_context(cafile=authority.cert)
    async with (
        serving(tmp_path, *tls, listen=["dflockds://127.0.0.1:0"]) as server,
        talking(port_of(server), ssl=trust) as client,
    ):
        token = await client.token("l", "job", "0")
        client.writer.write(b"ping\n_\n_\n" * 1000 + f"r\njob\n{token}\n".encode())
        assert [await client.hear() for _ in range(1001)] == ["ok"] * 1001


# In the place of dflockd's own server


async def test_as_dflockds_command(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret word \n")
    environment = {
        "DFLOCKD_HOST": "127.0.0.1",
        "DFLOCKD_PORT": "1",
        "DFLOCKD_DEFAULT_LEASE_TTL_S": "12",
        "DFLOCKD_MAX_LOCKS": "2",
        "DFLOCKD_AUTO_RELEASE_ON_DISCONNECT": "false",
        "DFLOCKD_AUTH_TOKEN_FILE": str(secret),
        "DFLOCKD_SHUTDOWN_TIMEOUT_S": "1",
    }
    flags = ("--port", "0", "--max-waiters=1", "--store", f"sqlite:///{tmp_path}/locks.db")
    async with launched(tmp_path, *flags, environment=environment, command=DFLOCKD) as server:
        await server.until("ready")
        port = port_of(server)
        async with talking(port) as stranger:
            assert await stranger.ask("ping") == "error_auth"
            assert await stranger.reader.read() == b""
        async with talking(port) as holder:
            assert await holder.ask("auth", "_", "secret word") == "ok"
            reply = await holder.ask("l", "job", "0")
            assert re.fullmatch(r"ok [0-9a-f]{32} 12", reply)
            await holder.token("l", "other", "0")
            assert await holder.ask("l", "third", "0") == "error_max_locks"
        async with talking(port) as client, talking(port) as second:
            for each in client, second:
                assert await each.ask("auth", "_", "secret word") == "ok"
            assert await client.ask("n", "job", reply.split()[1]) == "ok 12"
            assert await client.ask("e", "job", "") == "queued"
            assert await second.ask("l", "job", "0") == "error_max_waiters"
        assert await server.end() == 0
        assert b"secret" not in server.raw


async def test_as_a_program_in_go_is_called(tmp_path: Path) -> None:
    words = ["-port=0", "-host", "127.0.0.1", "-debug", "-auto-release-on-disconnect=false"]
    words += ["-max-locks", "1", "-store", "memory://"]
    environment = {"DFLOCKD_MAX_LOCKS": "many", "DFLOCKD_READ_TIMEOUT_S": "23s"}
    async with launched(tmp_path, *words, environment=environment, command=DFLOCKD) as server:
        await server.until("ready")
        ignored = [line["found"] for line in server.told("take care")]
        assert "DFLOCKD_READ_TIMEOUT_S is ignored: it is a whole number, not '23s'" in ignored
        async with talking(port_of(server)) as holder:
            await holder.token("l", "job", "0")
            assert await holder.ask("l", "other", "0") == "error_max_locks"
        async with talking(port_of(server)) as client:
            assert await client.ask("l", "job", "0") == "timeout"
        assert await server.end() == 0


@pytest.mark.parametrize("word", ["-version", "--version"])
def test_its_version(tmp_path: Path, word: str) -> None:
    done = subprocess.run(
        [*DFLOCKD, word], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout == f"{tenure.__version__}\n"


def test_a_flag_with_one_dash_may_be_a_value(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DFLOCKD, "-host", "-debug", "-port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 78
    assert "'-debug' is not the name" in done.stderr


def test_what_it_is_told_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DFLOCKD, "--port", "x"],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "DFLOCKD_MAX_LOCKS": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 78
    assert "--port is a whole number, 0 or more, not 'x'" in done.stderr
    assert "DFLOCKD_MAX_LOCKS is a whole number, 1 or more, not '0'" in done.stderr
    assert list(tmp_path.iterdir()) == []


# Their client


def their_python() -> tuple[str, dict[str, str]]:
    """A Python that their client runs on, or a loud skip."""
    for version, name in (("3.13.0", "python3.13"), ("3.12.1", "python3.12")):
        found = shutil.which(name)
        environment = {"PYENV_VERSION": version, "PATH": os.environ["PATH"]}
        if found is not None:
            done = subprocess.run([found, "-c", ""], env=environment, check=False)
            if done.returncode == 0:
                return found, environment
    pytest.skip("dflockd-client needs Python 3.12 or newer, and there is none")


async def test_their_client_uses_it_unchanged(tmp_path: Path) -> None:
    python, environment = their_python()
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    install += ["--no-deps", "--ignore-requires-python", "--target", str(packages), THEIR_CLIENT]
    done = await asyncio.to_thread(
        subprocess.run, install, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        pytest.skip(f"{THEIR_CLIENT} cannot be installed: {done.stderr[-300:]}")
    flags = ("--port", "0", "--store", "memory://", "--auth-token", "a-word")
    async with launched(tmp_path, *flags, command=DFLOCKD) as server:
        await server.until("ready")
        program = str(Path(__file__).with_name("their_client.py"))
        done = await asyncio.to_thread(
            subprocess.run,
            [python, "-W", "error", program, str(port_of(server)), "a-word"],
            env={**environment, "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.stdout == "all is well\n", done.stderr
