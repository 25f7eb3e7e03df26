"""A server with an HTTP listener, beside one of the native protocol, and requests to it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Engine
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.http.listener import HttpListener
from tenure.server.http.options import HttpOptions
from tenure.server.limits import Limits
from tenure.server.meter import Meter
from tenure.server.native import NativeListener

PATIENCE = 60.0
"""Seconds after which what a test waits for is taken to be lost."""

READER, HOLDER = "0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210"


@dataclass(frozen=True)
class Answered:
    """A response.

    Attributes:
        lasts: whether the connection stays open.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    lasts: bool

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """The metrics, by name and labels."""
        families = text_string_to_metric_families(self.body.decode())
        return {
            (each.name, frozenset(each.labels.items())): each.value
            for family in families
            for each in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """One of the metrics."""
        return self.samples[name, frozenset(labels.items())]


class _Socket:
    """What `HTTPResponse` reads from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


def parsed(data: bytes, method: str = "GET") -> Answered:
    """Read one response from its bytes."""
    response = HTTPResponse(cast("Any", _Socket(data)), method=method)
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answered(response.status, headers, response.read(), not response.will_close)


class Caller:
    """One connection of an HTTP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(
        self,
        path: str = "/healthz",
        *,
        method: str = "GET",
        token: str = "",
        body: bytes = b"",
        **headers: str,
    ) -> Answered:
        """Send a request, and return the response, which has a length."""
        lines = [f"{method} {path} HTTP/1.1"]
        headers = {"host": "localhost", **headers}
        if token:
            headers["authorization"] = f"Bearer {token}"
        if body:
            headers["content-length"] = str(len(body))
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.say("\r\n".join([*lines, "", ""]).encode() + body)
        return await self.hear(method)

    async def hear(self, method: str = "GET") -> Answered:
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = parsed(head, "HEAD").headers.get("content-length", "0")
            body = b"" if method == "HEAD" else await self.reader.readexactly(int(length))
        return parsed(head + body, method)

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def called(address: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Caller]:
    """A connection to an HTTP listener."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        yield Caller(reader, writer)
    finally:
        writer.transport.abort()


async def ask(
    address: str, path: str = "/healthz", *, tls: ssl.SSLContext | None = None, **more: Any
) -> Answered:
    """Send a request over a connection of its own."""
    async with called(address, tls) as caller:
        return await caller.ask(path, **more)


async def scraped(address: str, so: Callable[[Answered], bool], **more: Any) -> Answered:
    """Scrape until it is so: scrapes share a text for a moment, and clients end meanwhile."""
    answered = None
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                answered = await ask(address, "/metrics", **more)
                if so(answered):
                    return answered
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"never so: {answered}") from None


@dataclass(frozen=True)
class Hosted:
    """A server with two listeners."""

    context: Context
    http: HttpListener
    native: NativeListener

    @property
    def address(self) -> str:
        return self.http.address

    async def scrape(self, so: Callable[[Answered], bool] = lambda _: True) -> Answered:
        return await scraped(self.address, so)


async def two_ticks(server: Hosted) -> None:
    """Wait until the deadlines of the only connection were checked twice, a second apart."""
    (connection,) = server.http.connections
    ticks, checked, tick = 0, asyncio.Event(), connection.tick

    def count(now: float) -> None:
        nonlocal ticks
        tick(now)
        ticks += 1
        if ticks == 2:
            checked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "tick", count)
        async with asyncio.timeout(PATIENCE):
            await checked.wait()


@asynccontextmanager
async def hosted(
    store: str = "memory://",
    *,
    engine: Engine | None = None,
    authenticator: Authenticator | None = None,
    limits: Limits | None = None,
    options: HttpOptions | None = None,
    tls: ssl.SSLContext | None = None,
    nodes: int = 100,
) -> AsyncIterator[Hosted]:
    """A server on a store of its own, or on an engine that is open."""
    mine = engine is None
    if engine is None:
        engine = connect_engine(store, SystemClock())
        await engine.open()
    context = Context(
        engine,
        limits or Limits(),
        Authenticator() if authenticator is None else authenticator,
        logging.getLogger("tenure.server"),
        meter=Meter(nodes),
    )
    native = NativeListener(context, "tenure://127.0.0.1:0")
    scheme = "http" if tls is None else "https"
    http = HttpListener(context, f"{scheme}://127.0.0.1:0", tls=tls, options=options)
    try:
        await native.open()
        await http.open()
        yield Hosted(context, http, native)
    finally:
        await asyncio.gather(native.aclose(), http.aclose())
        await context.guard.aclose()
        if mine:
            await engine.aclose()
