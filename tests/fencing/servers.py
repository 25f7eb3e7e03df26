"""A Redis and a PostgreSQL of the tests' own: started for a run, on a socket in a folder of theirs.

Where one is not installed, its tests are skipped, and say with which command they would not be.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.clean_up import clean_up_with

_PATIENCE = 60  # seconds for a command that starts or ends a server


def _program(name: str) -> str:
    """Where a server's program is; Debian keeps PostgreSQL's out of the PATH."""
    beside = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(beside[-1]) if beside else "")


@contextmanager
def _a_folder() -> Iterator[Path]:
    """One with a short name, since that of a socket is limited to some 100 characters."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    with clean_up_with(lambda: shutil.rmtree(folder)):
        yield folder


@contextmanager
def a_redis() -> Iterator[str]:
    """The URL of a running Redis."""
    program = _program("redis-server") or _program("valkey-server")
    if not program:
        pytest.skip("no redis-server here: apt-get install redis-server")
    with _a_folder() as folder:
        socket = folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--daemonize", "no"]
        with subprocess.Popen(
            [program, *options, "--dir", str(folder)], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            said = []
            for line in server.stdout:
                said.append(line)
                if "ready to accept connections" in line.lower():
                    break
            else:
                pytest.fail(f"redis-server does not start:\n{''.join(said)}")
            with clean_up_with(server.kill):
                yield f"unix://{socket}"


@contextmanager
def a_postgres() -> Iterator[str]:
    """The URL of a running PostgreSQL, which may lose everything if the machine crashes."""
    if not _program("initdb"):
        pytest.skip("no PostgreSQL here: apt-get install postgresql")
    with _a_folder() as folder:
        user: str | None = None
        if os.geteuid() == 0:  # it refuses to run as root
            names = {each.pw_name for each in pwd.getpwall()}
            user = "postgres" if "postgres" in names else "nobody"
            shutil.chown(folder, user)
        data = folder / "data"

        def tell(*command: str) -> None:
            with (folder / "said").open("a+") as said:  # no pipe, which the server would keep open
                done = subprocess.run(
                    command,
                    cwd=folder,
                    user=user,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    timeout=_PATIENCE,
                    check=False,
                )
                said.seek(0)
                assert done.returncode == 0, said.read()

        tell(
            *(_program("initdb"), "--pgdata", str(data), "--username", "tenure"),
            *("--auth", "trust", "--no-sync", "--encoding", "UTF8", "--no-locale"),
        )
        options = f"-c listen_addresses= -c fsync=off -c unix_socket_directories={folder}"
        control = _program("pg_ctl")
        tell(control, "start", "--wait", "--pgdata", str(data), "--options", options)
        stop = (control, "stop", "--wait", "--pgdata", str(data), "--mode", "immediate")
        with clean_up_with(lambda: tell(*stop)):
            yield f"postgresql://tenure@/postgres?host={folder}"


def jobs_database(url: str) -> dict[str, str]:
    """Make an empty database `jobs` in a server; return the variables with which libpq finds it.

    With these, ``postgresql:///jobs`` is a URL of it.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS jobs WITH (FORCE)")
        connection.execute("CREATE DATABASE jobs")
    return {"PGHOST": url.partition("host=")[2], "PGUSER": "tenure"}
