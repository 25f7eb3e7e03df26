"""Servers for measurements: processes of their own, each kept on one core where that is possible.

A client and a server that share a core have a round trip of a quarter of the speed, so that where
the scheduler happens to put the two would be most of what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT, SERVER = 0, 1
"""The cores of the two ends."""


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, on one core, if the machine has two."""
    before = os.sched_getaffinity(0)
    if len(before) > 1:
        os.sched_setaffinity(0, {sorted(before)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(command: list[str], ready: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server on its core; yield it with the line in which it reported that it is ready."""
    with on_core(SERVER):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
    with process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if ready in line:
                break
        else:
            raise RuntimeError(f"{command[0]} does not start:\n{''.join(said)}")
        try:
            yield process, said[-1]
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def echo_server() -> Iterator[int]:
    """Frames come back as they are, on a Protocol under uvloop; gives the port."""
    command = [sys.executable, "-m", "benchmarks.echo"]
    with running(command, "listening") as (_, line):
        yield int(line.split()[-1])


@contextmanager
def redis_server() -> Iterator[str]:
    """Run a Redis without persistence; yield the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="tenure-") as folder:
        socket = str(Path(folder) / "redis.sock")
        command = ["redis-server", "--port", "0", "--unixsocket", socket, "--save", ""]
        with running(command, "eady to accept connections"):
            yield socket


@contextmanager
def tenure_server(store: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`tenure serve` on a port of its own; gives the process and the URL for clients."""
    command = [sys.executable, "-m", "tenure", "serve", "--store", store]
    command += ["--listen", "tenure://127.0.0.1:0"]
    with running(command, "tenure://127.0.0.1:") as (process, line):
        address = next(word for word in line.split() if "tenure://" in word)
        yield process, address[address.index("tenure://") :].strip(",;\"'")
