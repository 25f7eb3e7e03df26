"""dflockd's protocol: pairs of lock and release a second, at 1, 10 and 100 connections.

Servers in turn, each under the same load: `tenure serve` in memory; PyPI's dflockd 0.5.0, as it
comes (it logs each request, here to nowhere) and with that switched off; and a *bare* server that
reads lines, looks in a dict and replies, on the same event loop as ours: what Python and uvloop
leave to be had. The load is a process of its own, and what it could do
at most is measured against a server that replies without reading.

    python -m benchmarks.dflockd_lines bare | echo         one of these servers
    python -m benchmarks.dflockd_lines load PORT N S       N connections for S seconds

A figure of processor time is the server's, for one pair: it is what is left on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.measure import Measured
from benchmarks.servers import CLIENT, on_core, running

SECONDS = 1.0
ROUNDS = 5
CONNECTIONS = (1, 10, 100)
VERSION = "0.5.0"
TOKEN = b"0" * 32


class _Bare(asyncio.Protocol):
    """Reads requests, keeps a dict, replies: the least that a server of lines can do."""

    held: dict[bytes, bytes] = {}  # noqa: RUF012  (one for all connections)
    tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        replies = []
        for at in range(0, len(lines), 3):
            command, key, argument = lines[at : at + 3]
            if command == b"l":
                if key in self.held:
                    replies.append(b"timeout\n")
                    continue
                _Bare.tokens += 1
                self.held[key] = token = b"%032x" % self.tokens
                replies.append(b"ok %b 33\n" % token)
            elif self.held.get(key) == argument:
                del self.held[key]
                replies.append(b"ok\n")
            else:
                replies.append(b"error\n")
        self._transport.write(b"".join(replies))


class _Echo(asyncio.Protocol):
    """Replies without looking: what the load can do at most."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"ok " + TOKEN + b" 33\n" if data[:1] == b"l" else b"ok\n")


async def _serve(protocol: type[asyncio.Protocol]) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=500)
    print("listening on port", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class _Load(asyncio.Protocol):
    """One connection: lock, release, and so on."""

    pairs = 0

    def __init__(self, number: int) -> None:
        key = os.getpid(), number  # the bare server does not release what a load leaves
        self._lock = b"l\nkey-%d-%d\n10\n" % key
        self._release = b"r\nkey-%d-%d\n" % key

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._lock)

    def data_received(self, data: bytes) -> None:
        if data == b"ok\n":
            _Load.pairs += 1
            self._transport.write(self._lock)
        elif data[:3] == b"ok ":
            self._transport.write(self._release + data[3:35] + b"\n")
        else:
            raise RuntimeError(f"the server replied {data!r}")


async def _load(port: int, connections: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    failed: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    for number in range(connections):
        await loop.create_connection(lambda each=number: _Load(each), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(seconds / 5)
    begin, before = time.perf_counter(), _Load.pairs
    await asyncio.sleep(seconds)
    rate = (_Load.pairs - before) / (time.perf_counter() - begin)
    if failed:
        raise failed[0]
    print(json.dumps({"rate": rate, "pairs": _Load.pairs}))


# Measuring


def _processor(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _trial(pid: int, port: int, connections: int) -> tuple[float, float]:
    """Pairs a second, and the server's microseconds of processor time for one."""
    before = _processor(pid)
    command = [sys.executable, "-m", "benchmarks.dflockd_lines", "load"]
    with on_core(CLIENT):
        out = subprocess.run(
            [*command, str(port), str(connections), str(SECONDS)],
            capture_output=True,
            text=True,
            check=True,
        )
    told = json.loads(out.stdout)
    return told["rate"], (_processor(pid) - before) / told["pairs"] * 1e6


@contextmanager
def _own(kind: str) -> Iterator[tuple[int, int]]:
    with running([sys.executable, "-m", "benchmarks.dflockd_lines", kind], "listening") as each:
        yield each[0].pid, int(each[1].split()[-1])


@contextmanager
def _tenure(store: str) -> Iterator[tuple[int, int]]:
    command = [sys.executable, "-m", "tenure", "serve", "--store", store]
    with running([*command, "--listen", "dflockd://127.0.0.1:0"], "ready") as (process, line):
        yield process.pid, int(line.split("addresses=")[1].split()[0].rpartition(":")[2])


def _peer_python() -> str | None:
    """Return a Python that has dflockd; made once, where there is a Python 3.13 and the package."""
    folder = Path("build/benchmarks/dflockd").absolute()
    python = folder / "bin" / "python"
    if (folder / "bin" / "dflockd").exists():
        return str(python)
    found = shutil.which("python3.13")
    if found is None:
        return None
    environment = {"PYENV_VERSION": "3.13.0", **os.environ}
    try:
        subprocess.run([found, "-m", "venv", str(folder)], check=True, env=environment)
        install = [str(python), "-m", "pip", "install", "-qq", f"dflockd=={VERSION}"]
        subprocess.run(install, check=True)
    except subprocess.CalledProcessError:
        return None
    return str(python)


@contextmanager
def _peer(python: str, port: int, then: str) -> Iterator[tuple[int, int]]:
    environment = f"DFLOCKD_HOST='127.0.0.1', DFLOCKD_PORT='{port}'"
    code = f"""if True:
        import logging, os
        os.environ.update({environment})
        class Ready(logging.Filter):
            told = 0
            def filter(self, record):
                self.told += 1
                if self.told == 2:
                    {then}
                return True
        logging.getLogger("dflockd").addFilter(Ready())
        from dflockd.server import cli
        cli()
    """
    with running([python, "-u", "-c", code], "istening") as (process, _):
        yield process.pid, port


def _median(rounds: list[dict[str, tuple[float, float]]], of: str, which: int = 0) -> float:
    return statistics.median(each[of][which] for each in rounds)


def measure() -> list[Measured]:
    """Return the rows of the table."""
    results = []
    with ExitStack() as stack:
        servers: dict[str, tuple[int, int]] = {
            "tenure": stack.enter_context(_tenure("memory://")),
            "bare": stack.enter_context(_own("bare")),
            "echo": stack.enter_context(_own("echo")),
        }
        python = _peer_python()
        if python is not None:
            nowhere = "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)"
            servers["dflockd"] = stack.enter_context(_peer(python, 16388, nowhere))
            silent = stack.enter_context(_peer(python, 16389, "logging.disable(logging.INFO)"))
            servers["dflockd, silent"] = silent
        for connections in CONNECTIONS:
            rounds = [
                {name: _trial(*server, connections) for name, server in servers.items()}
                for _ in range(ROUNDS)
            ]
            results += _rows(connections, rounds, list(servers))
    return results


def _rows(
    connections: int, rounds: list[dict[str, tuple[float, float]]], names: list[str]
) -> list[Measured]:
    notes: dict[str, object] = {f"{name}, us each": _median(rounds, name, 1) for name in names}
    notes["echo, pairs/s"] = _median(rounds, "echo")
    ours = _median(rounds, "tenure")

    def row(peer: str, words: str, which: Callable[[str], float], bound: float | None) -> Measured:
        ratio = statistics.median(each["tenure"][0] / each[peer][0] for each in rounds)
        what = f"dflockd's lines, {connections} connections"
        return Measured(
            what, ours, "pairs/s", words, which(peer), ratio, at_least=bound, notes=notes
        )

    rows = [row("bare", "a bare server of lines", lambda peer: _median(rounds, peer), 0.75)]
    if "dflockd" in names:
        bound = 4.0 if connections >= 10 else None
        rows.append(row("dflockd", f"dflockd {VERSION}", lambda p: _median(rounds, p), bound))
        words = f"dflockd {VERSION}, not logging"
        rows.append(row("dflockd, silent", words, lambda p: _median(rounds, p), None))
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "load":
        uvloop.run(_load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
    else:
        uvloop.run(_serve({"bare": _Bare, "echo": _Echo}[sys.argv[1]]))
