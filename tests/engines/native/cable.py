"""The way from an engine to its server: real, and bad in exactly the way that a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from tenure.clock import Clock, SystemClock
from tenure.engines._kit.url import Endpoint
from tenure.engines.native import NativeEngine
from tenure.engines.native.reconnector import dialler
from tenure.engines.native.url import parse
from tenure.testing.stage import Stage, Stores


class Plug(asyncio.Protocol):
    """The engine's end of one connection."""

    def __init__(self, cable: Cable, endpoint: Endpoint, protocol: asyncio.Protocol) -> None:
        self.endpoint = endpoint
        self.lost = False
        self._cable = cable
        self._protocol = protocol
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        cable = self._cable
        cable.arrived += 1
        cable.news.set()
        if not cable.deaf:
            self._protocol.data_received(data)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._protocol.connection_lost(exc)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Cable:
    """A way to servers, for one engine.

    Attributes:
        deaf: what servers say is lost on the way.
        out: nobody can be dialled.
        plugs: the connections, in order.
        dialled: the endpoints that were tried, in order.
        arrived: how many pieces have arrived from servers, lost or not.
        news: set when something arrives.
    """

    def __init__(self, url: str) -> None:
        self.deaf = False
        self.out = False
        self.plugs: list[Plug] = []
        self.dialled: list[Endpoint] = []
        self.arrived = 0
        self.news = asyncio.Event()
        self._dial = dialler(parse(url), None)

    async def __call__(self, endpoint: Endpoint, protocol: asyncio.Protocol) -> None:
        self.dialled.append(endpoint)
        if self.out:
            raise ConnectionRefusedError("the cable is out")
        plug = Plug(self, endpoint, protocol)
        await self._dial(endpoint, plug)
        self.plugs.append(plug)

    def cut(self) -> None:
        """Every connection is reset; a deaf one hears again when it is made anew."""
        self.deaf = False
        for plug in self.plugs:
            if not plug.lost:
                plug.abort()

    async def loses_an_answer(self) -> None:
        """Return when something has arrived, and been lost."""
        assert self.deaf
        before = self.arrived
        while self.arrived == before:
            self.news.clear()
            await self.news.wait()


@asynccontextmanager
async def on_a_cable(
    address: str, clock: Clock | None = None
) -> AsyncIterator[tuple[Stage, Cable, NativeEngine]]:
    """A stage whose eye has a connection of its own, and an engine on a cable."""
    stores = Stores(lambda: contextlib.nullcontext(address))
    async with Stage(stores, address, clock or SystemClock()) as stage:
        cable = Cable(address)
        engine = NativeEngine(parse(address), stage.clock, cable)
        await engine.open()
        try:
            yield stage, cable, engine
        finally:
            await stage.disconnect(engine)
