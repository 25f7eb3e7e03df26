"""PgBouncer in front of a server of the tests."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.clean_up import clean_up_with
from tests.engines.postgresql.servers import PostgresServer, new_name, shared
from tests.ports import free_port

_ATTEMPTS = 100


@contextmanager
def a_pooler(
    server: PostgresServer, mode: str = "transaction", settings: str = "", *, ready: bool = True
) -> Iterator[str]:
    """Yield the URL of the server's database behind a PgBouncer.

    Args:
        server: behind it.
        mode: of its pools.
        settings: more of its settings, which prevail.
        ready: wait until it serves the database, and not only until it accepts connections.
    """
    program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("no PgBouncer here: apt-get install pgbouncer")
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    port = free_port()
    (folder / "users").write_text('"tenure" ""\n"app" "right"\n')
    (folder / "settings").write_text(
        f"""[databases]
* = host={server.folder} port={server.port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = {mode}
{settings}
"""
    )
    if server.user is not None:  # it refuses to run as root
        for each in (folder, *folder.iterdir()):
            shutil.chown(each, server.user)
    process = subprocess.Popen(
        [program, "-q", str(folder / "settings")],
        user=server.user,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"postgresql://tenure@127.0.0.1:{port}/postgres"

    def clean_up() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    with clean_up_with(clean_up):
        for attempt in range(_ATTEMPTS):
            try:
                if ready:
                    psycopg.connect(url).close()
                else:
                    socket.create_connection(("127.0.0.1", port)).close()
            except (psycopg.OperationalError, ConnectionRefusedError):
                assert process.poll() is None, "it has ended"
                assert attempt < _ATTEMPTS - 1, "it accepts no connection"
                time.sleep(0.05)
            else:
                break
        yield url


@functools.cache
def _shared_pooler() -> str:
    """Return the URL of a pooler in front of the server of all tests; it ends with the tests."""
    pooler_of_all = a_pooler(shared())
    url = pooler_of_all.__enter__()
    atexit.register(pooler_of_all.__exit__, None, None, None)
    return url


@contextmanager
def a_pooled_schema() -> Iterator[str]:
    """Yield the URL of an empty store behind a transaction pooler."""
    yield f"{_shared_pooler()}?schema={new_name()}"
