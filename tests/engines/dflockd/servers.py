"""Servers that speak dflockd's protocol, for tests: tenure's own, and dflockd's of its early days.

`dflockd` 0.5.0 on PyPI is a server of its own, in Python 3.13. It knows locks, and neither
semaphores nor fencing tokens. Its wheel is fetched once and run from where it lies.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.dflockd.listener import DflockdListener
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import Limits
from tests.clean_up import clean_up_with
from tests.ports import free_port

__all__ = ["Early", "InThread", "OwnProcess", "Server", "early_server", "free_port"]

PATIENCE = 60.0
_WHEEL = "dflockd==0.5.0"


class Server(Protocol):
    """Something to connect to."""

    port: int

    @property
    def url(self) -> str: ...


class InThread:
    """Tenure's server, in a thread, for as long as the block lasts.

    Args:
        store: what it stands on; one of its own in memory, when left out.
        port: a free one, when left out.
    """

    def __init__(
        self,
        store: str = "",
        *,
        authenticator: Authenticator | None = None,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        **options: Any,
    ) -> None:
        self.port = port or free_port()
        self._store = store or f"memory://{self.port}"
        self._authenticator = Authenticator() if authenticator is None else authenticator
        self._tls = tls
        self._options = DflockdOptions(**options)
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dflockd-server", daemon=True)

    @property
    def url(self) -> str:
        return f"dflockd://127.0.0.1:{self.port}"

    def __enter__(self) -> InThread:
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the server did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        if self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()
            raise

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        engine = connect_engine(self._store, SystemClock())
        await engine.open()
        context = Context(engine, Limits(), self._authenticator, logging.getLogger("tenure.server"))
        listening = socket.create_server(("127.0.0.1", self.port))
        listener = DflockdListener(
            context,
            self.url if self._tls is None else self.url.replace("dflockd", "dflockds", 1),
            tls=self._tls,
            sockets=[listening],
            options=self._options,
        )
        try:
            await listener.open()
            self._ready.set()
            await self._stop.wait()
        finally:
            await listener.aclose()
            await engine.aclose()


class _Process:
    """A server that can be stopped and killed."""

    command: list[str]
    environment: dict[str, str]
    says_when_ready: str

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self._listening: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"dflockd://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return when it listens."""
        process = subprocess.Popen(
            self.command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )
        self._process = process
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if self.says_when_ready in line:
                break
        else:
            pytest.fail(f"the server does not start:\n{''.join(said)}")
        self._listening = threading.Thread(target=process.stderr.read, daemon=True)
        self._listening.start()

    def kill(self) -> None:
        """End it at once. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            assert self._listening is not None
            self._listening.join()
            with process:
                process.wait()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class OwnProcess(_Process):
    """`tenure serve` on a file, which a restart finds again."""

    says_when_ready = " ready "

    def __init__(self, folder: Path) -> None:
        super().__init__()
        store = f"sqlite:///{folder}/store.db"
        self.environment = {"XDG_STATE_HOME": str(folder)}
        self.command = [
            *(sys.executable, "-m", "tenure", "serve", "--store", store),
            *("--listen", self.url),
        ]


class Early(_Process):
    """dflockd 0.5.0."""

    says_when_ready = "listening"

    def __init__(self, *options: str) -> None:
        super().__init__()
        python, self.environment = _python_313()
        self.environment = {**self.environment, "PYTHONPATH": str(_wheel())}
        self.command = [
            *(*python, "-W", "ignore", "-m", "dflockd.server"),
            *("--host", "127.0.0.1", "--port", str(self.port), *options),
        ]


@contextmanager
def early_server(*options: str) -> Iterator[Early]:
    """A running one; skips the test where it cannot be had."""
    server = Early(*options)
    with clean_up_with(server.kill):
        server.start()
        yield server


@functools.cache
def _python_313() -> tuple[list[str], dict[str, str]]:
    """A Python on which it runs, and what to add to its environment."""
    for name, environment in (
        ("python3.14", {}),
        ("python3.13", {}),
        ("python3.13", {"PYENV_VERSION": "3.13.0"}),
    ):
        found = shutil.which(name)
        if found is None:
            continue
        done = subprocess.run(
            [found, "-c", "import sys; print(sys.version_info >= (3, 13))"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **environment},
        )
        if done.stdout.strip() == "True":
            return [found], environment
    pytest.skip("dflockd 0.5.0 needs Python 3.13, and there is none here")


@functools.cache
def _wheel() -> Path:
    """Its wheel, from which Python can import it."""
    home = Path(sys.prefix if sys.prefix != sys.base_prefix else tempfile.gettempdir())
    folder = home / "dflockd-wheel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several tests may run at once
        if not list(folder.glob("*.whl")):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [
                        *(sys.executable, "-m", "pip", "download", "-qq", "--no-deps"),
                        *("--disable-pip-version-check", "--ignore-requires-python"),
                        *("--dest", str(folder), _WHEEL),
                    ],
                    check=False,
                    timeout=100,
                )
    found = list(folder.glob("*.whl"))
    if not found:
        pytest.skip(f"{_WHEEL} cannot be had: pip does not find it, or there is no network")
    return found[0]
