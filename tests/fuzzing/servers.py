"""A server as a process, fuzzed through the sockets of all its listeners.

A finding is a server that has ended, a line of its log that reports an error or is none, memory
that grows without end, and a client beside the fuzzing that is not served. The cause may be an
input shortly before the one that is shown, because the server is another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection

from tenure import blocking
from tenure.server.ydb.messages import Request
from tenure.wire.messages import (
    VERSION,
    Hello,
    Ping,
)
from tests.fuzzing.checks import Target
from tests.fuzzing.mutations import pieces
from tests.fuzzing.samples import CLIENT_MESSAGES, framed

_COMMAND = (
    *(sys.executable, "-m", "tenure", "serve", "--store", "memory://", "--log-format", "json"),
    *("--max-connections-per-second", "1000000", "--max-sessions", "1000"),
)
_SCHEMES = ("tenure", "ydb", "dflockd", "http")
_START = 60.0  # seconds
_ANSWER = 0.05  # seconds for which an answer is awaited
_SERVED = 20.0  # seconds in which a client beside it is served
_MEMORY = 512  # MiB that the server may have
_BETWEEN = 50  # inputs between two looks at its memory and at the client beside it


class _Server:
    """The process, and what it has logged."""

    def __init__(self) -> None:
        listen = [part for scheme in _SCHEMES for part in ("--listen", f"{scheme}://127.0.0.1:0")]
        self.process = subprocess.Popen([*_COMMAND, *listen], stderr=subprocess.PIPE)
        self.ports: dict[str, int] = {}
        self.url = ""
        self.wrong: list[str] = []
        self._ready = threading.Event()
        self._inputs = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        if not self._ready.wait(_START) or not self.ports:
            self.process.kill()
            raise AssertionError(f"the server did not start: {self.wrong}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                told = json.loads(line)
            except ValueError:
                self.wrong.append(line.decode(errors="replace"))
                continue
            if told["level"] in {"error", "critical"}:
                self.wrong.append(line.decode(errors="replace"))
            if told["event"] == "ready":
                for address in told["addresses"].split():
                    scheme, _, place = address.partition("://")
                    self.ports[scheme] = int(place.partition("/")[0].rpartition(":")[2])
                self.url = told["addresses"].split()[0]
                self._ready.set()
        self._ready.set()

    def hear(self, listener: str, data: bytes, chance: random.Random) -> None:
        """Say something to a listener, and look what became of the server."""
        with (
            contextlib.suppress(OSError),  # it may refuse to listen to the end
            socket.create_connection(("127.0.0.1", self.ports[listener]), 5.0) as client,
        ):
            client.settimeout(_ANSWER)
            for piece in pieces(chance, data):
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
        self._inputs += 1
        if self._inputs % _BETWEEN == 0:
            self.check_memory()
            self.check_service()
        assert self.process.poll() is None, f"the server ended: {self.process.returncode}"
        assert not self.wrong, "\n".join(self.wrong)

    def check_memory(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status")
        if status.exists():
            found = re.search(r"VmRSS:\s*([0-9]+) kB", status.read_text("utf-8"))
            assert found is None or int(found[1]) // 1024 < _MEMORY, f"it has {found[1]} kB"

    def check_service(self) -> None:
        with blocking.connect(self.url) as client, client.mutex("beside").lock(timeout=_SERVED):
            pass

    def end(self) -> None:
        self.process.terminate()
        try:
            code = self.process.wait(_START)
        finally:
            self.process.kill()
            self.process.wait()
            self._reading.join()
            assert self.process.stderr is not None
            self.process.stderr.close()
        assert code == 0, f"the server ended with {code}"


# What clients say


@dataclass(frozen=True)
class _Sent:
    """A conversation of YDB's API: a session, or a plain call."""

    method: str
    messages: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        client.initiate_connection()
        client.send_headers(
            1,
            [
                *((":method", "POST"), (":scheme", "http"), (":path", self.method)),
                *((":authority", "localhost"), ("content-type", "application/grpc")),
                *(("te", "trailers"), ("x-ydb-database", "/local")),
            ],
        )
        for message in self.messages:
            client.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message)
        client.ping(bytes(8))
        client.end_stream(1)
        return client.data_to_send()


def _ydb() -> tuple[bytes, ...]:
    session = (
        Request(session_start={"path": "/local/default", "timeout_millis": 1000, "seq_no": 1}),
        Request(create_semaphore={"req_id": 1, "name": "s", "limit": 3, "data": b"x"}),
        Request(acquire_semaphore={"req_id": 2, "name": "s", "count": 1, "timeout_millis": 10}),
        Request(describe_semaphore={"req_id": 3, "name": "s", "include_owners": True}),
        Request(release_semaphore={"req_id": 4, "name": "s"}),
        Request(ping={"opaque": 7}),
        Request(session_stop={}),
    )
    service = "/Ydb.Coordination.V1.CoordinationService/"
    return (
        _Sent(service + "Session", tuple(each.SerializeToString() for each in session)).to_bytes(),
        _Sent(service + "DescribeNode", (b"\x0a\x0e/local/default",)).to_bytes(),
        _Sent("/Ydb.Discovery.V1.DiscoveryService/ListEndpoints", (b"\x0a\x06/local",)).to_bytes(),
    )


def _native() -> tuple[bytes, ...]:
    hello = Hello(VERSION, VERSION, [], "", b"fuzzing")
    return (
        framed(hello, Ping()),
        *(framed(hello) + message for message in CLIENT_MESSAGES),
        framed(hello) + b"".join(CLIENT_MESSAGES[1:]),
    )


_LINES = (
    b"l\nkey\n0\nr\nkey\ntoken\n",
    b"sl\nkey\n0 3 33\nstats\n_\n\n",
    b"e\nkey\n33\nw\nkey\n0\nn\nkey\ntoken 33\n",
    b"auth\n_\nsecret\n",
)


def _http(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([*lines, b"", body])


_REQUESTS = (
    _http(b"GET /healthz HTTP/1.1", b"host: localhost") + _http(b"GET /readyz HTTP/1.0"),
    _http(b"GET /metrics HTTP/1.1", b"host: localhost", b"authorization: Bearer token"),
    _http(b"GET /semaphores?node=/default&search=a HTTP/1.1", b"host: 127.0.0.1:7080"),
    _http(b"GET /api/v1/semaphores?node=/default HTTP/1.1", b"host: [::1]", b"cookie: a=b; c"),
    _http(
        *(b"POST /sign-in HTTP/1.1", b"host: localhost", b"origin: http://localhost"),
        *(b"content-length: 7", b"content-type: application/x-www-form-urlencoded"),
        body=b"token=a",
    ),
    _http(
        *(b"POST /api/v1/sessions/end HTTP/1.1", b"host: localhost"),
        *(b"authorization: Bearer a", b"transfer-encoding: chunked"),
        body=b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n',
    ),
)


@contextlib.contextmanager
def serving() -> Iterator[tuple[Target, ...]]:
    """A server for the block, and the targets that fuzz it."""
    os.environ.pop("TENURE_TOKEN", None)
    sources = {"tenure": _native(), "ydb": _ydb(), "dflockd": _LINES, "http": _REQUESTS}
    server = _Server()
    try:
        yield tuple(
            Target(
                f"serve-{scheme}",
                lambda data, chance, scheme=scheme: server.hear(scheme, data, chance),  # type: ignore[misc]
                seeds,
                weight=20,
            )
            for scheme, seeds in sources.items()
        )
    finally:
        server.end()
