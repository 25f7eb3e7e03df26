"""Redis servers of the tests' own: processes that can be stopped, killed and started again.

Where there is none, the tests that need one are skipped, and say with which command they would not
be. A `Server` listens on a socket in a folder of its own, and on a port if it is given one.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import redis

from tenure.engines.redis.url import parse
from tests.clean_up import clean_up_with
from tests.ports import free_port

__all__ = ["Server", "a_namespace", "a_server", "forget_as_in_a_failover", "free_port", "shared"]

_numbers = itertools.count(1)


def program(name: str) -> str:
    """Where a program of Redis's or Valkey's is: in $REDIS_BIN, if that is set, else in PATH."""
    folder = os.environ.get("REDIS_BIN")
    names = f"redis-{name}", f"valkey-{name}"
    found = next(filter(None, (shutil.which(each, path=folder) for each in names)), None)
    if found is None:
        pytest.skip(f"no redis-{name} here: apt-get install redis-server redis-sentinel")
    return found


class Server:
    """One process.

    Args:
        folder: where it lives, and its data.
        options: of redis-server, beside those that every one gets here.
        port: on which it listens beside its socket; 0 for none.
        environment: what it gets beside this process's.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self.socket = str(folder / "redis.sock")
        self.port = port
        self.options = options
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Of its socket, for what is new there."""
        return f"redis+unix://{self.socket}?fresh=true"

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        process = subprocess.Popen(
            [
                *(program("server"), "--port", str(self.port), "--unixsocket", self.socket),
                *("--dir", str(self.folder), "--save", "", "--enable-debug-command", "yes"),
                *("--repl-diskless-sync-delay", "0"),
                *("--daemonize", "no", *self.options),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._environment},
        )
        self._process = process
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "ready to accept connections" in line.lower():
                return
        if "Failed finding TLS support" in said[-1]:
            pytest.skip("this Redis was built without TLS")
        pytest.fail(f"redis-server does not start:\n{''.join(said)}")

    def stop(self) -> None:
        """End it as it wishes to be ended. Safe to call twice."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once. Safe to call twice."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(how)
            with process:
                assert process.stdout is not None
                process.stdout.read()

    def tell(self, *words: str) -> object:
        """What it answers to a command."""
        with redis.Redis(unix_socket_path=self.socket) as client:
            return client.execute_command(*words)

    def all_keys(self) -> dict[str, bool]:
        """All keys, and whether each has a time to live."""
        with redis.Redis(unix_socket_path=self.socket, decode_responses=True) as client:
            return {key: client.ttl(key) > 0 for key in client.scan_iter()}


def forget_as_in_a_failover(url: str, session: int, name: str) -> None:
    """Have a server forget a lock, as one that has just been promoted, and cut its connections."""
    address = parse(url)
    place = address.places[0]
    assert isinstance(place, str)
    keys = f"{address.prefix}s:{session}", f"{address.prefix}m:/default:{name}"
    with redis.Redis(unix_socket_path=place) as client:
        holds = [field for field in client.hkeys(keys[0]) if field.isdigit()]
        client.hdel(keys[0], *holds)
        client.delete(keys[1])
        for kind in ("pubsub", "normal"):
            client.client_kill_filter(_type=kind, skipme=True)


@contextmanager
def a_folder() -> Iterator[Path]:
    """One with a short name, since that of a socket is limited to some 100 characters."""
    folder = Path(tempfile.mkdtemp(prefix="tenure-"))
    with clean_up_with(lambda: shutil.rmtree(folder, ignore_errors=True)):
        yield folder


@contextmanager
def a_server(*options: str, port: int = 0) -> Iterator[Server]:
    """A running server; the block may stop it and start it again."""
    with a_folder() as folder:
        server = Server(folder, *options, port=port)
        with clean_up_with(server.kill):
            server.start()
            yield server


@functools.cache
def shared() -> Server:
    """One that is started when a test first asks for it, and ends with the tests."""
    server_of_all = a_server()
    server = server_of_all.__enter__()
    atexit.register(server_of_all.__exit__, None, None, None)
    return server


@contextmanager
def a_namespace(parameters: str = "") -> Iterator[str]:
    """The URL of an empty namespace in the shared server."""
    yield f"{shared().url}&max_window=1800&prefix=test-{next(_numbers)}{parameters}"
