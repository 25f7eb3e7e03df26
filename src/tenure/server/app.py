"""The server: a store, its listeners, and their end. `tenure.server.process` runs one.

Rules:

* The store is opened first, and closed last, when no listener has a session on it: closing a store
  ends the sessions that are attached to it, and the end of a server must end none.
* Invalid settings are rejected before anything is bound, as far as possible.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from tenure.background import Failures
from tenure.busy_poll import BusyPoll
from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.errors import InvalidArgument, TenureError, Unsupported
from tenure.server.addresses import Address, claim
from tenure.server.admission import fitted, raise_file_limit
from tenure.server.audit import Audit
from tenure.server.auth import Authenticator, Identity, Peer, Verdict
from tenure.server.auth.guard import Guard
from tenure.server.context import Context
from tenure.server.limits import NO_LIMIT, Limits
from tenure.server.listener import Listener
from tenure.server.loading import LoadedFiles, Reloader, load_files
from tenure.server.log import LOGGER, log_event
from tenure.server.meter import Meter
from tenure.server.settings import Settings

_LISTENERS = {
    "tenure": ("tenure.server.native", "NativeListener"),
    "ydb": ("tenure.server.ydb", "YdbListener"),
    "dflockd": ("tenure.server.dflockd.listener", "DflockdListener"),
    "http": ("tenure.server.http.listener", "HttpListener"),
}
"""Modules of the listeners by protocol; imported on first use, because they are slow to import."""


_EXTRAS = {"ydb": "server-ydb", "http": "console"}
"""Extras of the listeners that need more than the extra ``server``."""

_LOOK_AGAIN = 60.0  # seconds between two readings of the time of day, while a token will expire


class Server:
    """One store on the network. It belongs to one event loop.

    Args:
        settings: the server's settings.
        passed: sockets opened by the service manager; the server owns them.

    Raises:
        Wrong: files in the settings are invalid.
        InvalidArgument, Unsupported: the store's URL is wrong or has no engine, or the audit log
            cannot be opened.

    Attributes:
        audit: the audit log, which its owner closes last.
    """

    def __init__(self, settings: Settings, passed: list[socket.socket]) -> None:
        """Read the files and find the engine; nothing is opened yet."""
        self._settings = settings
        self._passed = passed
        self._tokens = Authenticator()
        self._expiry: asyncio.TimerHandle | None = None
        self._ending = asyncio.Lock()
        self._endings: set[asyncio.Task[None]] = set()
        self._failures = Failures("ending connections", LOGGER)
        self._is_open = False
        self._reloader = Reloader(partial(load_files, settings), self._reloaded, self._not_reloaded)
        self._files = load_files(settings)
        self._apply(self._files)
        self.audit = Audit(LOGGER, settings.audit_log)
        self._engine = connect_engine(settings.store, SystemClock())
        self._listeners: list[Listener[Any]] = []
        self._guard: Guard | None = None

    @property
    def store(self) -> str:
        """The store's URL, without secrets."""
        return self._engine.url

    @property
    def addresses(self) -> list[str]:
        """Addresses at which it can be reached, once it is open."""
        return [listener.address for listener in self._listeners]

    async def open(self) -> None:
        """Open the store, then the listeners.

        Raises:
            EngineUnavailable: the store or an address cannot be used.
            Unsupported: the package of a listener is missing; nothing has been opened.
            Unsupported, AuthenticationFailed, EngineError: the store cannot be used.
            InvalidArgument: an address is invalid for its listener.
        """
        for address in self._settings.listen:
            _factory(address)  # a missing package is reported before a store is created
        self._is_open = True
        await self._engine.open()
        can = self._engine.capabilities
        if not can.resume:
            raise Unsupported(
                f"a server needs a store whose sessions outlive a connection, and {self.store} has "
                "none; use sqlite:///FILE"
            )
        if not can.durable:
            log_event(LOGGER, logging.WARNING, "the store ends with the server", store=self.store)
        context = Context(
            self._engine,
            self._fitted_limits(),
            self._tokens,
            LOGGER,
            audit=self.audit,
            meter=Meter(self._settings.metrics_nodes),
        )
        self._guard = context.guard
        if self._settings.busy_poll:
            poll = BusyPoll(asyncio.get_running_loop().call_soon, self._settings.busy_poll / 1e6)
            context.arrived = poll.arrived
        await context.counts.semaphores.count_once()
        for address in self._settings.listen:
            sockets = claim(self._passed, address)
            listener = make_listener(
                self._settings, context, address, self._files.tls.get(address), sockets
            )
            self._listeners.append(listener)
            await listener.open()
            log_event(
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
        self._await_expiry()
        if self._passed:
            raise InvalidArgument(
                f"a socket was passed for {self._passed[0].getsockname()}, and no --listen has "
                "this address"
            )

    def _fitted_limits(self) -> Limits:
        """Return limits for which this process has enough open files."""
        requested = self._settings.limits
        files = raise_file_limit()
        limits = fitted(requested, files)
        if limits.connections < requested.connections < NO_LIMIT:
            log_event(
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
        """Accept no more clients, and send the connected ones to other servers."""
        for listener in self._listeners:
            await listener.drain()

    async def aclose(self) -> None:
        """Disconnect all clients, then close the store. No session ends."""
        self._is_open = False
        await self._reloader.aclose()
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self._endings:
            task.cancel()
        if self._endings:
            await asyncio.wait(self._endings)
        try:
            ends = await asyncio.gather(
                *(listener.aclose() for listener in self._listeners), return_exceptions=True
            )
        finally:
            if self._guard is not None:
                await self._guard.aclose()
        for each in self._passed:
            each.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end  # the store stays open: it may still have sessions attached
        await self._engine.aclose()

    def reload(self, done: Callable[[], object]) -> None:
        """Read all files again, and end the connections that they no longer allow.

        If a file is wrong, nothing changes. See `tenure.server.loading`.

        Args:
            done: called afterwards, unless there was another call meanwhile.
        """
        self._reloader.request(done)

    def _not_reloaded(self, error: Exception) -> None:
        why = str(error) if isinstance(error, TenureError) else repr(error)
        log_event(LOGGER, logging.ERROR, "not reloaded, settings kept", why=why)

    def _reloaded(self, loaded: LoadedFiles) -> None:
        self.audit.reopen()
        before, self._files = self._files, loaded
        for event, facts in loaded.changes(before):
            self.audit.record(event, None, None, by="reload", **facts)
        self._apply(loaded)
        verdicts = []
        for address, listener in zip(self._settings.listen, self._listeners, strict=False):
            verdict: Verdict = self._tokens.verdict
            if address in loaded.tls:
                distrusted = loaded.distrusted(address, before)
                cut = distrusted or loaded.revoked != before.revoked
                listener.renew_tls(loaded.tls[address], cut_handshakes=cut)
                if distrusted:
                    verdict = _distrusting(verdict)
            verdicts.append((listener, verdict))
        self._start_ending(verdicts, reloaded=True)

    def _apply(self, loaded: LoadedFiles) -> None:
        if loaded.credentials is not None:
            self._tokens.replace(loaded.credentials)
        self._tokens.revoke(loaded.revoked)
        self._await_expiry()

    def _await_expiry(self) -> None:
        """End the connections of the next token that expires, at that time."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        at = self._tokens.next_expiry
        if at is not None and self._is_open:
            # The time of day may be set meanwhile, so the timer reads it repeatedly.
            delay = min(max((at - datetime.now(UTC)).total_seconds(), 0.0), _LOOK_AGAIN)
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(delay + 0.1, self._look_for_expiry, at)

    def _look_for_expiry(self, at: datetime) -> None:
        self._expiry = None
        if datetime.now(UTC) >= at:
            self._start_ending([(each, self._tokens.verdict) for each in self._listeners])
        self._await_expiry()

    def _start_ending(
        self, verdicts: list[tuple[Listener[Any], Verdict]], *, reloaded: bool = False
    ) -> None:
        """Start to end connections, after those of a former call."""
        task = asyncio.get_running_loop().create_task(self._end(verdicts, reloaded))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _end(self, verdicts: list[tuple[Listener[Any], Verdict]], reloaded: bool) -> None:
        async with self._ending:
            ended = 0
            for listener, verdict in verdicts:
                with self._failures.contained():
                    ended += await listener.end_connections(verdict)
        if reloaded:
            tokens = len(self._tokens)
            log_event(LOGGER, logging.INFO, "reloaded", tokens=tokens, connections_ended=ended)


def _distrusting(verdict: Verdict) -> Verdict:
    """Return a verdict that ends all connections with a client certificate."""

    def decide(identity: Identity | None, peer: Peer) -> str | None:
        if peer.certificate is not None:
            return "an authority for client certificates is not trusted any more; connect again"
        return verdict(identity, peer)

    return decide


def make_listener(
    settings: Settings,
    context: Context,
    address: Address,
    tls: ssl.SSLContext | None,
    sockets: Sequence[socket.socket] = (),
) -> Listener[Any]:
    """Return the listener of an address; it is not open.

    Raises:
        Unsupported: a required package is not installed.
        InvalidArgument: its address or its settings are invalid.
    """
    more: dict[str, Any] = {}
    if address.protocol == "ydb":
        more = {"database": settings.database, "advertise": settings.advertise}
    elif address.protocol == "dflockd":
        more = {"options": settings.dflockd}
    elif address.protocol == "http":
        more = {"options": settings.http}
    factory = _factory(address)
    listener: Listener[Any] = factory(context, address.given, tls=tls, sockets=sockets, **more)
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
            f"pip install 'tenure[{_EXTRAS.get(address.protocol, 'server')}]'"
        ) from error
    return factory
