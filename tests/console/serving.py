"""A console on a socket, over a store in memory, with a door of tokens and permissions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any

import httpx
import pytest
import uvicorn

from tenure.clock import SystemClock
from tenure.console.access import Access, Connection, Visitor
from tenure.console.app import make_app
from tenure.console.service import Console
from tenure.engines.contract import Attach, Engine, EngineSession
from tenure.engines.memory import MemoryEngine
from tenure.model import EPHEMERAL_LIMIT
from tenure.server.auth import Authenticator, Identity
from tenure.server.auth.authenticator import UNKNOWN_PEER
from tenure.server.auth.guard import Guard
from tenure.server.auth.guarded import GuardedEngine
from tenure.server.auth.identity import Access as Level
from tenure.server.auth.identity import Permissions
from tenure.server.auth.tokens import Credentials, Rights, Token
from tenure.server.dflockd.listener import Deaf
from tenure.server.limits import Limits

TOKENS = {
    "admin": {"/": "administer"},
    "holder": {"/": "hold"},
    "reader": {"/default": "read", "/billing": "none"},
    "billing": {"/billing": "read"},
}


def token_of(name: str) -> str:
    return f"{name}-0123456789abcdef"


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token_of(name)}"}


class GuardVisitor:
    def __init__(self, identity: Identity, engine: GuardedEngine) -> None:
        self.identity = identity
        self.name = identity.name
        self.engine = engine

    def may(self, node: str, access: Access) -> bool:
        return self.engine.allows(node, Level[access.upper()])


class GuardDoor:
    """The door of a server, with its real permissions.

    Attributes:
        acts: the recorded actions, with their outcomes.
        open: whether visitors without a token come in as the administrator.
    """

    def __init__(self, store: Engine, tokens: Mapping[str, Mapping[str, object]]) -> None:
        self.authenticator = Authenticator()
        self.guard = Guard(store, Limits())
        self.acts: list[dict[str, Any]] = []
        self.open = False
        self.set(tokens)

    def set(self, tokens: Mapping[str, Mapping[str, object]]) -> None:
        self.authenticator.replace(
            Credentials(
                tuple(
                    Token(
                        name,
                        Token.plain(token_of(name), name).digest,
                        Rights(Permissions.parse(given)),
                    )
                    for name, given in tokens.items()
                )
            )
        )

    def _visitor(self, identity: Identity) -> GuardVisitor:
        return GuardVisitor(identity, GuardedEngine(self.guard, identity))

    def recognise(self, connection: Connection) -> Visitor | None:
        if not self.open:
            return None
        return self._visitor(self.authenticator.authenticate(token_of("admin")))

    async def sign_in(self, token: str, host: str, connection: Connection) -> Visitor:
        assert host == "127.0.0.1"
        return self._visitor(self.authenticator.authenticate(token))

    def still_valid(self, visitor: Visitor) -> bool:
        assert isinstance(visitor, GuardVisitor)
        return self.authenticator.verdict(visitor.identity, UNKNOWN_PEER) is None

    @contextlib.contextmanager
    def action(
        self, event: str, visitor: Visitor, host: str, /, **facts: object
    ) -> Iterator[dict[str, object]]:
        entry: dict[str, object] = {"outcome": "done"}
        try:
            yield entry
        except BaseException:
            entry["outcome"] = "failed"
            raise
        finally:
            self.acts.append({"event": event, "by": visitor.name, **facts, **entry})


class Server(uvicorn.Server):
    """A server in the loop of the test.

    Attributes:
        listens: set once it accepts connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Served:
    """A console that is served.

    Attributes:
        url: its address.
        browser: a client without a sign-in.
    """

    def __init__(
        self, url: str, browser: httpx.AsyncClient, door: GuardDoor, store: Engine, console: Console
    ) -> None:
        self.url = url
        self.browser = browser
        self.door = door
        self.store = store
        self.console = console

    @contextlib.asynccontextmanager
    async def signed_in(self, name: str) -> AsyncIterator[httpx.AsyncClient]:
        """A browser that has signed in."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as browser:
            form = {"token": token_of(name)}
            response = await browser.post("/sign-in", data=form, headers=from_here(browser))
            assert response.status_code == 303
            yield browser


def from_here(browser: httpx.AsyncClient) -> dict[str, str]:
    """The header that a browser adds to the form of a page of this server."""
    return {"Origin": str(browser.base_url).rstrip("/")}


@contextlib.asynccontextmanager
async def served(
    store: Engine | None = None,
    tokens: Mapping[str, Mapping[str, object]] = TOKENS,
    hosts: Collection[str] = (),
) -> AsyncIterator[Served]:
    """Serve a console over a store, by default one in memory."""
    store = store or MemoryEngine("", SystemClock())
    await store.open()
    door = GuardDoor(store, tokens)
    app = make_app(door, store, hosts=hosts)
    console: Console = app.state.console
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    with socket.socket(proto=socket.IPPROTO_TCP) as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = Server(config)
        async with console.running():
            serving = asyncio.create_task(server.serve([sock]))
            try:
                async with asyncio.timeout(60):
                    await server.listens.wait()
                async with httpx.AsyncClient(base_url=url, timeout=60) as browser:
                    yield Served(url, browser, door, store, console)
            finally:
                console.end_streams()
                server.should_exit = True
                await serving
                await door.guard.aclose()
                await store.aclose()


async def attached(store: Engine, node: str = "/default", text: str = "worker") -> EngineSession:
    """Attach a session to a store."""
    return await store.attach(Attach(node, 60.0, text, "window", b"key"), Deaf())


async def enqueue(
    session: EngineSession,
    request_id: int,
    name: str,
    *,
    count: int = EPHEMERAL_LIMIT,
    data: bytes = b"",
    ephemeral: bool = True,
) -> None:
    """Add a request, which is granted or waits."""
    placed = session.enqueue(request_id, name, count, data, timeout=None, ephemeral=ephemeral)
    if isinstance(placed, asyncio.Future):
        await placed


async def observed(console: Served) -> None:
    """Wait until the observer has read the store twice from now on."""
    observer = console.console.observer
    observer.want()
    wanted = observer.record.rounds + 2
    await until(observer.record, "begin", lambda: observer.record.rounds >= wanted)


async def until_streams_end(console: Served) -> None:
    """Wait until no browser has an open stream."""
    hub = console.console.hub
    await until(hub, "closed", lambda: not hub.streams)


async def until(changed: object, by: str, so: Callable[[], bool]) -> None:
    """Wait until something is so, which only calls of one method can make so."""
    is_so, call = asyncio.Event(), getattr(changed, by)

    def record(*args: Any) -> None:
        call(*args)
        if so():
            is_so.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changed, by, record)
        async with asyncio.timeout(60):
            if not so():
                await is_so.wait()
