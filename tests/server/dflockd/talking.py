"""Clients that say lines, in virtual time and without a network; and what they say as a script.

A script is lines of these kinds; `$1` stands for a token, the same wherever it is in one script::

    a l job 10 33 = ok $1 33     client a sends a request of three lines, and hears that
    b l job 10 = ?               and hears nothing yet
    b = ok $2 33                 hears that now
    b = closed                   sees the connection closed
    + 30                         so many seconds pass
    b closes                     client b ends its connection
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from tenure.clock import Clock
from tenure.engines.contract import Engine
from tenure.engines.memory import MemoryEngine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.dflockd.connection import DflockdServerConnection
from tenure.server.dflockd.listener import DflockdListener
from tenure.server.dflockd.options import DflockdOptions
from tenure.server.limits import Limits
from tenure.server.listener import Greeting

SOON = 0.1
"""Seconds in which a server that has nothing to wait for has replied."""


@asynccontextmanager
async def serving(
    clock: Clock,
    *,
    engine: Engine | None = None,
    limits: Limits | None = None,
    authenticator: Authenticator | None = None,
    url: str = "dflockd://127.0.0.1:0",
    **options: Any,
) -> AsyncIterator[DflockdListener]:
    """A listener on a store of its own, or on an engine that is not open yet."""
    if engine is None:
        engine = MemoryEngine("", clock)
    await engine.open()
    context = Context(
        engine,
        limits or Limits(),
        Authenticator() if authenticator is None else authenticator,
        logging.getLogger("tenure.server"),
    )
    listener = DflockdListener(
        context,
        url,
        sockets=[socket.create_server(("127.0.0.1", urlsplit(url).port or 0))],
        options=DflockdOptions(**options),
    )
    try:
        await listener.open()
        yield listener
    finally:
        await listener.aclose()
        await engine.aclose()


class Client(asyncio.Transport):
    """A client that is its connection's transport.

    Attributes:
        heard: the bytes that it has been told and has not looked at.
        reads: whether it reads.
        connection: the server's end.
    """

    def __init__(self, listener: DflockdListener, *, peer: str = "memory") -> None:
        super().__init__()
        self.heard = b""
        self.reads = True
        self._closed = False
        self.reading = True
        self.gone = False
        self._loop = asyncio.get_running_loop()
        self._kept = b""
        self.connection: DflockdServerConnection = listener._connection(
            Greeting(listener.context, peer)
        )
        self.connection.connection_made(self)

    # What it does

    def say(self, data: bytes) -> None:
        """Send bytes."""
        assert self.reading, "the server does not read"
        self.connection.data_received(data)

    def ask(self, command: str, key: str = "_", argument: str = "_") -> None:
        """Send a request."""
        self.say(f"{command}\n{key}\n{argument}\n".encode())

    async def hears(self) -> str:
        """What it is told, at once or in a moment."""
        await asyncio.sleep(SOON)
        heard, self.heard = self.heard, b""
        return heard.decode()

    async def asks(self, command: str, key: str = "_", argument: str = "_") -> str:
        """Send a request; returns the reply without its end."""
        self.ask(command, key, argument)
        heard = await self.hears()
        assert heard.endswith("\n"), f"no reply to {command}: {heard!r}"
        return heard[:-1]

    def end(self) -> None:
        """Say nothing more, as `shutdown` does."""
        if not self.connection.eof_received():
            self.close()

    def read_again(self) -> None:
        self.reads = True
        self.heard += self._kept
        self._kept = b""
        self.connection.resume_writing()

    def is_closed(self) -> bool:
        """Whether it is closed, by whichever end."""
        return self._closed

    # What the server does

    def write(self, data: Any) -> None:
        assert not self.gone, "written to a connection that is lost"
        if self.reads:
            self.heard += bytes(data)
        else:
            first = not self._kept
            self._kept += bytes(data)
            if first:
                self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._kept)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        assert self.reading, "paused twice"
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading, "resumed twice"
        self.reading = True

    def close(self) -> None:
        if not self._kept:
            self.abort()

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        if not self.gone:
            self.gone = True
            self.connection.connection_lost(None)


_STEP = re.compile(
    r"(?P<who>[a-z]\w*) (?:(?P<closes>closes)|(?P<request>[^=].*?)? ?= (?P<reply>.*))"
)
_TOKEN = re.compile(r"\$\d")


async def play(listener: DflockdListener, script: str) -> None:
    """Play a script; each line has to come true."""
    clients: dict[str, Client] = {}
    tokens: dict[str, str] = {}
    for line in filter(None, map(str.strip, script.splitlines())):
        if line.startswith("+"):
            await asyncio.sleep(float(line[1:]))
            continue
        step = _STEP.fullmatch(line)
        assert step, f"not a step: {line!r}"
        who = step["who"]
        if who not in clients:
            clients[who] = Client(listener, peer=who)
        client = clients[who]
        if step["closes"]:
            client.abort()
            await asyncio.sleep(SOON)
            continue
        if step["request"]:
            words = _TOKEN.sub(lambda each: tokens[each[0]], step["request"]).split(" ", 2)
            client.ask(*[*words, "", ""][:3])
        heard = await client.hears()
        if step["reply"] == "closed":
            assert client.is_closed(), f"{line}: it is open, and heard {heard!r}"
            continue
        wanted = "" if step["reply"] == "?" else step["reply"] + "\n"
        _match(line, wanted, heard, tokens)
    for client in clients.values():
        client.abort()
    await asyncio.sleep(SOON)


def _match(line: str, wanted: str, heard: str, tokens: dict[str, str]) -> None:
    new: list[str] = []

    def pattern(each: re.Match[str]) -> str:
        if each[0] in tokens:
            return tokens[each[0]]
        new.append(each[0])
        return "([0-9a-f]{32})"

    parts = _TOKEN.split(wanted)
    names = list(_TOKEN.finditer(wanted))
    expression = re.escape(parts[0])
    for name, part in zip(names, parts[1:], strict=True):
        expression += pattern(name) + re.escape(part)
    match = re.fullmatch(expression, heard)
    assert match, f"{line}: heard {heard!r}"
    tokens.update(zip(new, match.groups(), strict=True))
    assert len(set(tokens.values())) == len(tokens), f"{line}: a token came twice"
