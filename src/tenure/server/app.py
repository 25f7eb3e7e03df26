"""The server: a store, its listeners, and their end. `tenure.server.process` runs one.

Rules:

* The store is opened first and closed last, when no listener has a session on it any more: closing
  a store ends the sessions that are attached to it, and the end of a server must end none.
* What is refused is refused before anything is bound, as far as that can be known.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from tenure.busy_poll import BusyPoll
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.errors import InvalidArgument, Unsupported
from tenure.server.addresses import Address
from tenure.server.admission import fitted, raise_file_limit
from tenure.server.auth import Authenticator, read_tokens
from tenure.server.context import Context
from tenure.server.examination import examine_files
from tenure.server.limits import NO_LIMIT, Limits
from tenure.server.listener import Listener
from tenure.server.log import LOGGER, tell
from tenure.server.settings import Settings, Wrong
from tenure.server.sockets import claim
from tenure.server.tls import renew_certificate, server_context

__all__ = ["Server", "make_listener"]

_LISTENERS = {
    "tenure": ("tenure.server.native", "NativeListener"),
    "ydb": ("tenure.server.ydb", "YdbListener"),
    "dflockd": ("tenure.server.dflockd.listener", "DflockdListener"),
}
"""Where the listener of a protocol is; imported when asked for, because it needs much."""


class Server:
    """One store on the network. It belongs to one event loop.

    Args:
        settings: what it is to do.
        passed: sockets that the service manager has opened; the server owns them.

    Raises:
        Wrong: files that the settings name are not what they should be.
        InvalidArgument, Unsupported: the store's URL is wrong, or there is no engine for it.
    """

    def __init__(self, settings: Settings, passed: list[socket.socket]) -> None:
        self._settings = settings
        self._passed = passed
        self._tokens = Authenticator()
        self._read_files()
        self._tls: dict[Address, ssl.SSLContext] = {
            address: server_context(files) for address, files in settings.tls.items()
        }
        self._engine = connect_engine(settings.store, SystemClock())
        self._listeners: list[Listener] = []

    @property
    def store(self) -> str:
        """The store's URL, without secrets."""
        return self._engine.url

    @property
    def addresses(self) -> list[str]:
        """Where it can be reached, once it is open."""
        return [listener.address for listener in self._listeners]

    async def open(self) -> None:
        """Open the store, then the listeners.

        Raises:
            EngineUnavailable: the store or an address cannot be used.
            Unsupported, AuthenticationFailed, EngineError: the store cannot be used.
            InvalidArgument: an address is not one for its listener.
        """
        await self._engine.open()
        can = self._engine.capabilities
        if not can.resume:
            raise Unsupported(
                f"a server needs a store whose sessions outlive a connection, and {self.store} has "
                "none; use sqlite:///FILE"
            )
        if not can.durable:
            tell(LOGGER, logging.WARNING, "the store ends with the server", store=self.store)
        context = Context(self._engine, self._fitted_limits(), self._tokens, LOGGER)
        if self._settings.busy_poll:
            poll = BusyPoll(asyncio.get_running_loop().call_soon, self._settings.busy_poll / 1e6)
            context.arrived = poll.arrived
        for address in self._settings.listen:
            sockets = claim(self._passed, address)
            listener = make_listener(
                self._settings, context, address, self._tls.get(address), sockets
            )
            self._listeners.append(listener)
            await listener.open()
            tell(
                LOGGER,
                logging.INFO,
                "listening",
                address=listener.address,
                tls="with client certificates"
                if address in self._settings.tls and self._settings.tls[address].client_ca
                else "yes"
                if address.tls
                else "no",
                tokens=len(self._tokens),
            )
        if self._passed:
            raise InvalidArgument(
                f"a socket was passed for {self._passed[0].getsockname()}, and no --listen has "
                "this address"
            )

    def _fitted_limits(self) -> Limits:
        """Return limits that this process has the open files for."""
        asked = self._settings.limits
        files = raise_file_limit()
        limits = fitted(asked, files)
        if limits.connections < asked.connections < NO_LIMIT:
            tell(
                LOGGER,
                logging.WARNING,
                "max-connections is lower than set, because the limit of open files is low",
                open_files=files,
                connections=limits.connections,
                greetings=limits.greetings,
                remedy="raise the limit (ulimit -n, LimitNOFILE=)",
            )
        return limits

    async def drain(self) -> None:
        """Accept nobody any more, and tell who is connected to go elsewhere."""
        for listener in self._listeners:
            await listener.drain()

    async def aclose(self) -> None:
        """Cut everybody off, then close the store. No session ends."""
        ends = await asyncio.gather(
            *(listener.aclose() for listener in self._listeners), return_exceptions=True
        )
        for each in self._passed:
            each.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end  # the store stays open: it may still have sessions attached
        await self._engine.aclose()

    def reload(self) -> None:
        """Read tokens and certificates again; when they are wrong, those from before go on."""
        try:
            self._read_files()
            for address, files in self._settings.tls.items():
                renew_certificate(self._tls[address], files)
        except InvalidArgument as error:
            tell(LOGGER, logging.ERROR, "not reloaded, and all goes on as before", why=str(error))
        else:
            tell(LOGGER, logging.INFO, "reloaded", tokens=len(self._tokens))

    def _read_files(self) -> None:
        faults = []
        for finding in examine_files(self._settings):
            if finding.level == "failure":
                faults.append(finding.found)
            elif finding.level == "warning":
                tell(
                    LOGGER,
                    logging.WARNING,
                    "take care",
                    found=finding.found,
                    remedy=finding.remedy or None,
                )
        if faults:
            raise Wrong(list(dict.fromkeys(faults)))  # one certificate may be several listeners'
        if self._settings.auth_token_file is not None:
            self._tokens.replace(
                {**self._settings.tokens, **read_tokens(self._settings.auth_token_file)}
            )
        elif self._settings.tokens:
            self._tokens.replace(self._settings.tokens)


def make_listener(
    settings: Settings,
    context: Context,
    address: Address,
    tls: ssl.SSLContext | None,
    sockets: Sequence[socket.socket] = (),
) -> Listener:
    """The listener of an address; it is not open.

    Raises:
        Unsupported: what it needs is not installed.
        InvalidArgument: something is wrong with what it is told.
    """
    more: dict[str, Any] = {}
    if address.protocol == "ydb":
        more = {"database": settings.database, "advertise": settings.advertise}
    elif address.protocol == "dflockd":
        more = {"options": settings.dflockd}
    factory = _factory(address)
    listener: Listener = factory(context, address.given, tls=tls, sockets=sockets, **more)
    return listener


def _factory(address: Address) -> Callable[..., Any]:
    module, name = _LISTENERS[address.protocol]
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "tenure":
            raise
        raise Unsupported(
            f"{address.url} needs {missing}, which is not installed; install it with: "
            f"pip install 'tenure[{'server-ydb' if address.protocol == 'ydb' else 'server'}]'"
        ) from error
    return factory
