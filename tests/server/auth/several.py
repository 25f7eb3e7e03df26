"""One server with a listener of each protocol, and clients with tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Attach, Engine, EngineSession
from tenure.engines.memory import MemoryEngine
from tenure.server.auth import Authenticator
from tenure.server.auth.accounts import Account
from tenure.server.auth.identity import EVERYTHING, UNSET, Permissions, Quotas
from tenure.server.auth.tokens import Credentials, Rights, Token
from tenure.server.context import Context
from tenure.server.dflockd.listener import DflockdListener
from tenure.server.limits import Limits
from tenure.server.listener import Listener
from tenure.server.native import NativeListener
from tenure.server.ydb import YdbListener


def rights(permissions: Permissions = EVERYTHING, quotas: Quotas = UNSET) -> Rights:
    return Rights(permissions, quotas)


def token_of(name: str) -> str:
    return f"{name}-0123456789abcdef"


class Several:
    """The server.

    Attributes:
        store: without permissions and quotas.
    """

    def __init__(self, identities: Mapping[str, Rights], limits: Limits | None) -> None:
        self.store = MemoryEngine("", SystemClock())
        self._tokens = Authenticator()
        self.set(identities)
        logger = logging.getLogger("tests.server.auth")
        self.context = Context(self.store, limits or Limits(), self._tokens, logger)
        self.listeners: dict[str, Listener[Any]] = {
            "tenure": NativeListener(self.context, "tenure://127.0.0.1:0"),
            "ydb": YdbListener(self.context, "ydb://127.0.0.1:0"),
            "dflockd": DflockdListener(self.context, "dflockd://127.0.0.1:0"),
        }

    def set(self, identities: Mapping[str, Rights]) -> None:
        """Replace what identities may do, as a reload does."""
        tokens = tuple(
            dataclasses.replace(Token.plain(token_of(name), name), rights=each)
            for name, each in identities.items()
        )
        self._tokens.replace(Credentials(tokens))

    def accounts(self) -> list[Account]:
        """The accounts of the identities that have one now."""
        return list(self.context.guard.accounts)

    def port(self, listener: str) -> int:
        place = self.listeners[listener].address.partition("://")[2].partition("/")[0]
        return int(place.rpartition(":")[2])

    @contextlib.asynccontextmanager
    async def client(self, listener: str, identity: str) -> AsyncIterator[Engine]:
        """A client's engine of that protocol, with an identity's token."""
        token, place = token_of(identity), f"127.0.0.1:{self.port(listener)}"
        url = {
            "tenure": f"tenure://{token}@{place}",
            "ydb": f"ydb://{place}/local?token={token}",
        }[listener]
        engine = connect_engine(url, SystemClock())
        await engine.open()
        try:
            yield engine
        finally:
            await engine.aclose()

    @contextlib.asynccontextmanager
    async def lines(self, identity: str) -> AsyncIterator[Any]:
        """Function that sends a request of dflockd's protocol and returns its reply.

        The connection is reset at the end. After an ordinary close the server would wait for as
        long as the kernel keeps the closed socket, a minute, because it may be half closed only.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port("dflockd"))

        async def ask(*request: str) -> str:
            writer.write("".join(f"{line}\n" for line in request).encode())
            return (await reader.readline()).decode().strip()

        try:
            assert await ask("auth", "_", token_of(identity))
            yield ask
        finally:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def several(
    identities: Mapping[str, Rights], limits: Limits | None = None
) -> AsyncIterator[Several]:
    """A server on a store of its own."""
    server = Several(identities, limits)
    await server.store.open()
    try:
        for each in server.listeners.values():
            await each.open()
        yield server
    finally:
        for each in server.listeners.values():
            await each.aclose()
        await server.store.aclose()


class _Deaf:
    """Events of a session that a test does not look at."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@contextlib.asynccontextmanager
async def attached(engine: Engine, node: str) -> AsyncIterator[EngineSession]:
    """A session, closed at the end of the block."""
    session = await engine.attach(Attach(node, 30.0), _Deaf())
    try:
        yield session
    finally:
        await session.close()
