"""The server as an attack sees it: addresses, sockets, and when to stop."""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Listener: TypeAlias = Literal["tenure", "ydb", "dflockd", "http"]
LISTENERS: tuple[Listener, ...] = ("tenure", "ydb", "dflockd", "http")

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CONNECT_TIME = 5.0  # seconds; a server that is busy may take so long
_SEND_TIME = 0.2  # seconds until an attack looks whether it is to stop
_PAUSE = 0.01  # seconds between two connections of one thread of an attack
_PIECE = 64 * 1024  # bytes of one write


@dataclass(frozen=True)
class Target:
    """A server under attack.

    Attributes:
        addresses: URL of each listener, by its scheme without TLS.
        ca: file of the authority that signed the server's certificate; empty without TLS.
        token: what the attack may authenticate with; empty for none.
        stopped: set when the attack is to end.
    """

    addresses: dict[Listener, str]
    ca: str = ""
    token: str = ""
    stopped: threading.Event = field(default_factory=threading.Event, compare=False)

    def to_json(self) -> str:
        """The target for another process, without `stopped`."""
        return json.dumps({"addresses": self.addresses, "ca": self.ca, "token": self.token})

    @classmethod
    def from_json(cls, text: str) -> Target:
        """The target that `to_json` described."""
        return cls(**json.loads(text))

    def port(self, listener: Listener) -> int:
        """Return the port of a listener on 127.0.0.1."""
        return int(
            self.addresses[listener].partition("://")[2].partition("/")[0].rpartition(":")[2]
        )

    def connect(self, listener: Listener) -> socket.socket:
        """Open a connection, with TLS where the server has it.

        Raises:
            OSError: the server does not accept it.
        """
        sock = socket.create_connection(("127.0.0.1", self.port(listener)), _CONNECT_TIME)
        if not self.ca:
            sock.settimeout(_SEND_TIME)
            return sock
        context = ssl.create_default_context(cafile=self.ca)
        if listener == "ydb":
            context.set_alpn_protocols(["h2"])
        secured = context.wrap_socket(sock, server_hostname="localhost")
        secured.settimeout(_SEND_TIME)
        return secured

    def flood(
        self,
        listener: Listener,
        opening: bytes,
        unit: bytes | Callable[[], Iterable[bytes]],
        piece: int = _PIECE,
    ) -> None:
        """Send `opening` once on a connection, then `unit` without end; when cut off, again.

        What a callable returns is sent once for each connection, and then the connection is closed.
        A write has about `piece` bytes.
        """
        while not self.stopped.is_set():
            try:
                with self.connect(listener) as sock:
                    self.send(sock, opening)
                    if isinstance(unit, bytes):
                        data = unit * max(1, piece // len(unit))
                        while self.send(sock, data):
                            pass
                    else:
                        for each in unit():
                            if not self.send(sock, each):
                                break
            except OSError:
                pass  # the server has cut this connection off: the attack opens another
            self.stopped.wait(_PAUSE)

    def send(self, sock: socket.socket, data: bytes) -> bool:
        """Send all of it, however slowly the server reads; false when the attack is to end.

        Without TLS, what the server answers is read and forgotten meanwhile, so that it goes on.

        Raises:
            OSError: the connection is lost.
        """
        rest = memoryview(data)
        while rest:
            if self.stopped.is_set():
                return False
            if not self.ca and select.select([sock], [], [], 0)[0] and not sock.recv(1 << 20):
                raise ConnectionResetError("the server has closed the connection")
            try:
                rest = rest[sock.send(rest) :]
            except TimeoutError:
                continue
        return not self.stopped.is_set()


def h2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def native_frame(message: bytes) -> bytes:
    """One frame of the native protocol."""
    return struct.pack(">I", len(message)) + message
