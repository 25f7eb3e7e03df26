"""PostgreSQL for chaos: one server of ours behind a network that can be broken.

It writes each commit to disk before it answers, and may end at any moment: no grant is lost.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from chaos.adapter import Engine, Fault, Inflict, Scene
from chaos.network import Proxy, network_faults
from chaos.servers import Server, server_faults
from tests.ports import free_port

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
        """End it without waiting for the ends of connections.

        In the recovery from a crash, PostgreSQL 15 may go on shutting down for ever.
        """
        self.resume()
        await self._end_or_kill(signal.SIGINT)

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
        self._servers: list[Server] = []
        self._networks: list[Proxy] = []

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
        data, port = self.folder / "data", free_port()
        account = _account()
        if account:
            shutil.chown(self.folder, account, account)
            for each in (self.folder, *self.folder.parents[:2]):
                each.chmod(0o755)
        prefix = _become(account)
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
        self._servers.append(self._server)
        self._networks.append(self._proxy)
        self.not_done["failover"] = "tests/engines/postgresql/test_failover.py has one"
        self.not_done["clock-jump"] = "the server's clock is the machine's"

    async def stop(self) -> None:
        """Stop the network and the server."""
        if self._proxy is not None:
            await self._proxy.aclose()
        if self._server is not None:
            await self._server.stop()

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the servers and the networks, of one of each at a time."""
        return [
            *server_faults(self._servers),
            *network_faults(self._networks),
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


class PooledPostgresql(Postgresql):
    """The same behind PgBouncer in transaction mode, with a direct connection for `listen`.

    Both ways have a network of their own: one works while the other does not.
    """

    name = "postgresql-pooler"

    def __init__(self, folder: Path) -> None:
        """Prepare the pooler too."""
        super().__init__(folder)
        self._pooler: Server | None = None
        self._to_pooler: Proxy | None = None

    @property
    def url(self) -> str:
        """URL of the pooler, behind the network."""
        assert self._proxy is not None
        assert self._to_pooler is not None
        direct = f"127.0.0.1:{self._proxy.port}"
        return f"postgresql://tenure@127.0.0.1:{self._to_pooler.port}/postgres?listen={direct}"

    async def start(self) -> None:
        """Start the pooler and its network, after the server."""
        program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
        if program is None:
            raise ValueError("no PgBouncer here (Debian: pgbouncer)")
        await super().start()
        assert self._server is not None
        port, account = free_port(), _account()
        users, settings = self.folder / "users", self.folder / "pgbouncer.ini"
        users.write_text('"tenure" ""\n')
        settings.write_text(
            f"""[databases]
* = host=127.0.0.1 port={self._server.port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
"""
        )
        command = (*_become(account), program, str(settings))
        self._pooler = Server(command, port, self.folder / "pgbouncer.log")
        await self._pooler.start()
        self._to_pooler = Proxy(port)
        await self._to_pooler.start()
        self._servers.append(self._pooler)
        self._networks.append(self._to_pooler)

    async def stop(self) -> None:
        """Stop the pooler and its network first."""
        if self._to_pooler is not None:
            await self._to_pooler.aclose()
        if self._pooler is not None:
            await self._pooler.stop()
        await super().stop()


def _become(account: str) -> tuple[str, ...]:
    """Return the beginning of a command that runs as that account; root is refused."""
    if not account:
        return ()
    return ("setpriv", f"--reuid={account}", f"--regid={account}", "--clear-groups", "--")


def _program() -> str:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return shutil.which("postgres") or (str(found[-1]) if found else "")


def _account() -> str:
    if os.geteuid():
        return ""
    return "postgres" if "postgres" in {each.pw_name for each in pwd.getpwall()} else "nobody"
