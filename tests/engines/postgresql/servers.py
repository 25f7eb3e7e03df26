"""PostgreSQL servers of the tests' own: processes that can be stopped, killed and started again.

Where there is none, the tests that need one are skipped, with the command that installs it.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from tests.clean_up import clean_up_with
from tests.ports import free_port

_PATIENCE = 60  # seconds for a command that starts or ends a server
_numbers = itertools.count(1)


def program(name: str) -> str:
    """Path of one of PostgreSQL's programs; Debian keeps them out of the PATH.

    ``POSTGRESQL_BIN`` names the folder of those to be used where it has them.
    """
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    chosen = shutil.which(name, path=os.environ.get("POSTGRESQL_BIN", ""))
    path = chosen or shutil.which(name) or (str(found[-1]) if found else "")
    if not path:
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    return path


class PostgresServer:
    """One server on a socket in a folder of its own.

    Args:
        folder: of its socket and its data.
        settings: ``name=value`` each.
    """

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = 5432
        self.settings = settings
        self.environment: dict[str, str] = {}  # in addition, of its processes
        self.user: str | None = None
        if os.geteuid() == 0:  # it refuses to run as root
            names = {each.pw_name for each in pwd.getpwall()}
            self.user = "postgres" if "postgres" in names else "nobody"
            shutil.chown(folder, self.user)

    @property
    def url(self) -> str:
        """URL of its database, over the socket."""
        port = f"&port={self.port}" if self.port != 5432 else ""
        return f"postgresql://tenure@/postgres?host={self.folder}{port}"

    @property
    def major(self) -> int:
        """Major version of its PostgreSQL."""
        return int((self.data / "PG_VERSION").read_text())

    def create(self, *options: str) -> None:
        """Make an empty database cluster."""
        self.run(
            *("initdb", "--pgdata", str(self.data), "--username", "tenure", "--auth", "trust"),
            *("--no-sync", "--encoding", "UTF8", "--no-locale", *options),
        )

    def listen(self) -> None:
        """Have it listen on a free port of this host from its next start on."""
        self.port = free_port()
        self.settings = (*self.settings, f"port={self.port}", "listen_addresses=127.0.0.1")

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        settings = (f"unix_socket_directories={self.folder}", "listen_addresses=", *self.settings)
        options = " ".join(f"-c {each}" for each in settings)
        self.run("pg_ctl", "start", "--wait", "--pgdata", str(self.data), "--options", options)

    def stop(self, mode: str = "fast") -> None:
        """Stop it."""
        self.run("pg_ctl", "stop", "--wait", "--pgdata", str(self.data), "--mode", mode)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for each in self._processes():
            _send(number, each)

    def crash(self) -> None:
        """Kill all its processes; afterwards it can be started again."""
        _send(signal.SIGSTOP, self._processes()[0])  # it starts no other one from now on
        processes = self._processes()
        for each in processes:
            _send(signal.SIGKILL, each)
        while any(map(_runs, processes)):
            time.sleep(0.01)
        for left in (self.data / "postmaster.pid", self.folder / ".s.PGSQL.5432.lock"):
            left.unlink()

    def end(self) -> None:
        """Stop it at once, unless it has crashed."""
        if (self.data / "postmaster.pid").exists():
            self.stop("immediate")

    def _processes(self) -> list[int]:
        main = int((self.data / "postmaster.pid").read_text().splitlines()[0])
        children = subprocess.run(
            ["pgrep", "-P", str(main)], capture_output=True, text=True, check=False
        ).stdout.split()
        return [main, *map(int, children)]

    def run(self, name: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs as the server's user."""
        said = self.folder / "said"
        with said.open("a+") as output:  # no pipe, which the server would keep open
            done = subprocess.run(
                [program(name), *arguments],
                cwd=self.folder,
                env=os.environ | self.environment,
                user=self.user,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_PATIENCE,
                check=False,
            )
        assert done.returncode == 0, said.read_text()

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        """Run SQL as an administrator; return the rows."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


def _send(number: signal.Signals, process: int) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(process, number)


def _runs(process: int) -> bool:
    """Return true unless a process has ended, whether or not its parent has noticed."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@contextmanager
def a_server(*settings: str) -> Iterator[PostgresServer]:
    """Run a server, which the block may stop and start again."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    with clean_up_with(lambda: shutil.rmtree(folder, ignore_errors=True)):
        server = PostgresServer(folder, *settings)
        server.create()
        server.start()
        with clean_up_with(server.end):
            yield server


@contextmanager
def a_standby(server: PostgresServer, *, listens: bool = False) -> Iterator[PostgresServer]:
    """Run a standby of a server, which replicates asynchronously.

    Args:
        server: the primary; it is started again.
        listens: the standby listens on a port of its own, beside its socket.
    """
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    with clean_up_with(lambda: shutil.rmtree(folder, ignore_errors=True)):
        standby = PostgresServer(folder)
        if listens:
            standby.listen()
        server.stop()  # a copy needs no pg_basebackup of the same version
        standby.run("cp", "--recursive", str(server.data), str(standby.data))
        server.start()
        standby.run("touch", str(standby.data / "standby.signal"))
        with (standby.data / "postgresql.auto.conf").open("a") as settings:
            settings.write(
                f"primary_conninfo = 'host={server.folder} port={server.port} user=tenure'\n"
            )
        standby.start()
        with clean_up_with(standby.end):
            yield standby


@functools.cache
def shared() -> PostgresServer:
    """Return the server of all tests; it starts on first use and ends with the tests."""
    server_of_all = a_server("fsync=off", "max_connections=500")
    server = server_of_all.__enter__()
    atexit.register(server_of_all.__exit__, None, None, None)
    return server


def new_name() -> str:
    """Return the name of a schema that no other test uses."""
    return f"test_{os.getpid()}_{next(_numbers)}"


@contextmanager
def a_schema(parameters: str = "") -> Iterator[str]:
    """Yield the URL of an empty store in the shared server."""
    yield f"{shared().url}&schema={new_name()}{parameters}"
