"""Console for the user of this machine: `tenure console`, on any store and without a server.

The door has no tokens but those that it prints. Each of them signs in one browser, and the next one
takes its place, so that a copy of an address in a log or a history is of no use later.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator

import uvicorn

from tenure.console.access import Access, Connection, Visitor
from tenure.console.app import make_app
from tenure.console.service import LOGGER, Console
from tenure.engines.contract import Engine
from tenure.errors import AuthenticationFailed

WRONG_TOKEN_DELAY = 0.5
"""Seconds after which a wrong token is rejected."""

ENDING = 3
"""Seconds that open requests have to end."""


class LocalVisitor:
    """The user of this machine.

    Args:
        engine: the store.
        administer: whether it may end sessions and evict requests.
    """

    def __init__(self, engine: Engine, *, administer: bool) -> None:
        self.name = "administrator" if administer else "reader"
        self.engine = engine
        self._administer = administer

    def may(self, node: str, access: Access) -> bool:  # noqa: ARG002  the same for all nodes
        """Return true if the user may do this."""
        return access == "read" or self._administer


class LocalDoor:
    """Door with tokens that are each used once.

    Args:
        visitor: the user.
        used: called after the token was used, with the next one.
    """

    def __init__(self, visitor: LocalVisitor, used: Callable[[str], object]) -> None:
        self.token = secrets.token_urlsafe(24)
        self._visitor = visitor
        self._used = used

    def recognise(self, connection: Connection) -> Visitor | None:  # noqa: ARG002
        """Return ``None``: each browser has to sign in."""
        return None

    async def sign_in(self, token: str, host: str, connection: Connection) -> Visitor:  # noqa: ARG002
        """Return the user, and replace the token.

        Raises:
            AuthenticationFailed: the token is wrong, or was used before.
        """
        if not hmac.compare_digest(token.encode(errors="surrogatepass"), self.token.encode()):
            await asyncio.sleep(WRONG_TOKEN_DELAY)
            raise AuthenticationFailed(
                "this token is not valid, or a browser has used it before; open the latest address "
                "that 'tenure console' has printed"
            )
        self.token = secrets.token_urlsafe(24)
        self._used(self.token)
        return self._visitor

    def still_valid(self, visitor: Visitor) -> bool:
        """Return true for the user."""
        return visitor is self._visitor

    @contextlib.contextmanager
    def action(
        self,
        event: str,
        visitor: Visitor,  # noqa: ARG002  there is one
        host: str,
        /,
        **facts: object,
    ) -> Iterator[dict[str, object]]:
        """Log an administrative action that was carried out."""
        entry: dict[str, object] = {"outcome": "done"}
        yield entry
        if entry["outcome"] is None:
            return
        node = facts["node"]
        if event == "session ended":
            LOGGER.info("session ended: node=%s session=%s peer=%s", node, facts["session"], host)
        else:
            LOGGER.info("request evicted: node=%s name=%r peer=%s", node, facts["name"], host)


class _Server(uvicorn.Server):
    """Server that ends live pages before it waits for requests to end."""

    def __init__(
        self, config: uvicorn.Config, console: Console, listening: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._console = console
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all connections."""
        self._console.end_streams()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the server, and a second one end it at once."""
        if sys.platform == "win32":
            with super().capture_signals():
                yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _end(self, number: int) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self.signal = self.signal or number


async def serve_console(
    store: Engine,
    listening: socket.socket,
    printed: Callable[[str], object],
    *,
    administer: bool,
    hosts: Collection[str] = (),
) -> int | None:
    """Serve the console of an open store until SIGINT or SIGTERM, and return that signal.

    Args:
        store: the store.
        listening: a bound socket.
        printed: called with each token that signs a browser in.
        administer: whether the user may end sessions and evict requests.
        hosts: host names under which browsers reach it, besides addresses and ``localhost``.
    """
    door = LocalDoor(LocalVisitor(store, administer=administer), printed)
    app = make_app(door, store, hosts=hosts)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=ENDING,
        lifespan="off",
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    console: Console = app.state.console
    server = _Server(config, console, lambda: printed(door.token))
    async with console.running():
        await server.serve([listening])
    return server.signal
