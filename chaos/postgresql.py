"""PostgreSQL for chaos: one server of ours behind a network that can be broken.

It writes each commit to disk before it answers, and may end at any moment: no grant is lost.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from chaos.adapter import Engine, Fault, Inflict, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults

__all__ = ["Postgresql"]

_STARTS = 100
"""Attempts to start a server whose former processes still end, or to reach one that recovers."""
_PAUSE = 0.1


class PostgresServer(Server):
    """The processes of one server."""

    async def start(self) -> None:
        """Start it. After a kill its former processes keep the data for an instant."""
        for attempt in range(_STARTS):
            try:
                await super().start()
            except OSError:
                if attempt == _STARTS - 1:
                    raise
                await asyncio.sleep(_PAUSE)
            else:
                return

    async def stop(self) -> None:
        """End it without waiting for the ends of connections."""
        self.resume()
        await self._end(signal.SIGINT)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal; SIGSTOP and SIGCONT to every process."""
        assert self._process is not None
        if number in {signal.SIGSTOP, signal.SIGCONT}:
            found = subprocess.run(
                ["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=False
            )
            for each in map(int, found.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(each, number)
        super()._send(number)


class Postgresql(Engine):
    """A server that survives its own end."""

    name = "postgresql"
    lingers = 5.0

    def __init__(self, folder: Path) -> None:
        """Prepare the server; `start` starts it."""
        super().__init__(folder)
        self._server: PostgresServer | None = None
        self._proxy: Proxy | None = None

    @property
    def url(self) -> str:
        """URL of the server, behind the network."""
        assert self._proxy is not None
        return f"postgresql://tenure@127.0.0.1:{self._proxy.port}/postgres"

    async def start(self) -> None:
        """Make a database cluster, and start the server and its network."""
        program = _program()
        if not program:
            raise ValueError("no PostgreSQL here (Debian: postgresql)")
        data, port = self.folder / "data", _free_port()
        account = _account()
        if account:  # it refuses to run as root
            shutil.chown(self.folder, account, account)
            for each in (self.folder, *self.folder.parents[:2]):
                each.chmod(0o755)
        become = ("setpriv", f"--reuid={account}", f"--regid={account}", "--clear-groups", "--")
        prefix = become if account else ()
        made = await asyncio.create_subprocess_exec(
            *(*prefix, str(Path(program).with_name("initdb")), "--pgdata", str(data)),
            *("--username", "tenure", "--auth", "trust", "--encoding", "UTF8", "--no-locale"),
            stdout=asyncio.subprocess.DEVNULL,
            cwd=self.folder,
        )
        if await made.wait():
            raise OSError("initdb failed")
        command = (
            *(*prefix, program, "-D", str(data), "-p", str(port)),
            *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
            *("-c", "max_connections=200"),
        )
        self._server = PostgresServer(command, port, self.folder / "postgresql.log")
        await self._server.start()
        self._proxy = Proxy(port)
        await self._proxy.start()
        self.not_done["failover"] = "tests/engines/postgresql/test_failover.py has one"
        self.not_done["clock-jump"] = "the server's clock is the machine's"

    async def stop(self) -> None:
        """Stop the network and the server."""
        if self._proxy is not None:
            await self._proxy.aclose()
        if self._server is not None:
            await self._server.stop()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the server and the network."""
        assert self._server is not None
        assert self._proxy is not None
        return [
            *server_faults([self._server]),
            *network_faults([self._proxy]),
            Fault(
                "kill-connections",
                "the server ends all connections",
                self._execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'tenure' AND pid <> pg_backend_pid()"
                ),
                (0.05, 0.2),
            ),
            Fault(
                "crash",
                "a process of the server is killed, and all of them recover",
                self._crash,
                (0.1, 1.0),
            ),
        ]

    async def _administrator(self) -> psycopg.AsyncConnection[Any]:
        """Connect beside the network; a server that recovers from a fault is waited for."""
        assert self._server is not None
        url = f"postgresql://tenure@127.0.0.1:{self._server.port}/postgres"
        for attempt in range(_STARTS):
            try:
                return await psycopg.AsyncConnection.connect(url, autocommit=True)
            except psycopg.OperationalError:
                if attempt == _STARTS - 1:
                    raise
            await asyncio.sleep(_PAUSE)
        raise AssertionError("there is a last attempt")

    def _execute(self, sql: str) -> Inflict:
        @asynccontextmanager
        async def inflict(scene: Scene) -> AsyncIterator[str]:  # noqa: ARG001
            async with await self._administrator() as connection:
                await connection.execute(sql.encode())
            yield sql.partition("(")[0]

        return inflict

    @asynccontextmanager
    async def _crash(self, scene: Scene) -> AsyncIterator[str]:  # noqa: ARG002
        async with await self._administrator() as connection:
            cursor = await connection.execute("SELECT pg_backend_pid()")
            row = await cursor.fetchone()
            assert row is not None
            os.kill(row[0], signal.SIGKILL)
        yield f"process {row[0]}"


def _program() -> str:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return shutil.which("postgres") or (str(found[-1]) if found else "")


def _account() -> str:
    if os.geteuid():
        return ""
    return "postgres" if "postgres" in {each.pw_name for each in pwd.getpwall()} else "nobody"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
