"""A server as a process: its event loop, the signals that end it, and the service manager.

Rules:

* The first SIGTERM or SIGINT starts an orderly shutdown, with the timeout ``drain-time``. After the
  timeout, or a second signal, the rest is left as after a kill: sessions survive in the store.
* `_serve` owns all tasks. Only a forced end leaves some running; then the process must exit without
  waiting for them.

**The service manager** is systemd, whose protocols need no library. A notification is one datagram
to the socket that ``NOTIFY_SOCKET`` names; without it, none is sent. Sockets that systemd has
opened (``LISTEN_FDS``) can be taken once, and belong to the taker.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from tenure.clock import SystemClock
from tenure.engines import connect_engine
from tenure.engines.contract import Finding
from tenure.errors import InvalidArgument, TenureError, Unsupported
from tenure.server.addresses import Address
from tenure.server.app import Server, make_listener
from tenure.server.auth import Authenticator
from tenure.server.context import Context
from tenure.server.loading import examine_files, examine_store
from tenure.server.log import LOGGER, log_event
from tenure.server.settings import Settings

FIRST_DESCRIPTOR = 3
"""The first passed descriptor; the others follow it."""


class Notifier:
    """Sender of notifications to the service manager.

    Args:
        environment: the environment with its variables.

    Attributes:
        watchdog: seconds between two watchdog notifications, ``None`` if none are requested. It is
            half of the manager's timeout.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog = _watchdog(environment) if self._address else None

    def ready(self, status: str) -> None:
        """Report that the server accepts connections."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def reloading(self, now: float) -> None:
        """Report that the server reads its files again, until `ready` is called.

        Args:
            now: the monotonic clock, which systemd compares with its own.
        """
        self._send("RELOADING=1", f"MONOTONIC_USEC={int(now * 1e6)}")

    def stopping(self, status: str) -> None:
        """Report that the server is stopping."""
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def alive(self) -> None:
        """Send a watchdog notification."""
        self._send("WATCHDOG=1")

    def _send(self, *facts: str) -> None:
        if not self._address:
            return
        # "@" stands for the NUL byte of Linux's abstract namespace.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        # A manager that does not exist, or does not read, is no reason to stop serving.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way,
        ):
            way.setblocking(False)
            way.sendto("\n".join(facts).encode(), address)


def _watchdog(environment: Mapping[str, str]) -> float | None:
    pid, microseconds = environment.get("WATCHDOG_PID"), environment.get("WATCHDOG_USEC", "")
    if pid not in {None, "", str(os.getpid())} or not microseconds.isascii():
        return None
    if not microseconds.isdigit() or int(microseconds) == 0:
        return None
    return int(microseconds) / 2e6


def _line(text: str) -> str:
    return " ".join(text.split())


def passed_sockets(environment: MutableMapping[str, str]) -> list[socket.socket]:
    """Return the listening sockets passed to this process, and remove the variables."""
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not (count.isascii() and count.isdigit()):
        return []
    sockets: list[socket.socket] = []
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)
        sockets.append(socket.socket(fileno=descriptor))
    return sockets


_ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Ending:
    """Result of a server's run.

    Attributes:
        in_order: whether the shutdown was complete; otherwise something still runs, and the process
            must exit without waiting for it.
        signal: the signal that forced the end; 0 after the timeout.
    """

    in_order: bool = True
    signal: int = 0


async def examine(settings: Settings) -> tuple[list[Finding], list[Finding]]:
    """Check the settings' files and the store.

    Raises nothing.
    """
    named = list(examine_files(settings))
    try:
        engine = connect_engine(settings.store, SystemClock())
    except TenureError:
        pass  # the check of the store reports it
    else:
        context = Context(engine, settings.limits, Authenticator(), LOGGER)
        for address in settings.listen:
            try:
                make_listener(settings, context, address, _tls_of(address))
            except (Unsupported, InvalidArgument) as error:
                named.append(_refused("address", error))
    try:
        loop_factory(settings)
    except Unsupported as error:
        named.append(_refused("loop", error))
    return named, [each async for each in examine_store(settings)]


def _tls_of(address: Address) -> ssl.SSLContext | None:
    """Return a placeholder for an address's TLS context, for checks without connections."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if address.tls else None


def _refused(what: str, error: TenureError) -> Finding:
    found, _, remedy = str(error).partition("; ")
    return Finding("failure", what, found, remedy)


def run(settings: Settings, environment: MutableMapping[str, str]) -> Ending:
    """Serve until a signal ends it. After an end that is not in order, call `os._exit`.

    Args:
        settings: the settings of the server.
        environment: the service manager's variables.

    Raises:
        as `Server` and `Server.open`; nothing is left running.
    """
    runner = asyncio.Runner(loop_factory=loop_factory(settings))
    ending = Ending()
    try:
        ending = runner.run(_serve(settings, environment))
        return ending
    finally:
        if ending.in_order:
            runner.close()


def loop_factory(settings: Settings) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the event loop; ``None`` for asyncio's own.

    Raises:
        Unsupported: uvloop is requested, and not installed.
    """
    if settings.loop == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        if settings.loop == "auto":
            return None
        raise Unsupported(
            "--loop uvloop needs uvloop, which is not installed; install it with: "
            "pip install uvloop"
        ) from None
    new: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return new


async def _serve(settings: Settings, environment: MutableMapping[str, str]) -> Ending:
    loop = asyncio.get_running_loop()
    log_event(
        LOGGER,
        logging.INFO,
        "starting",
        pid=os.getpid(),
        loop=type(loop).__module__.partition(".")[0],
    )
    server = Server(settings, passed_sockets(environment))
    notifier = Notifier(environment)
    signals = _Signals(loop)
    life = loop.create_task(_live(server, notifier, signals))
    signs = loop.create_task(_signs_of_life(notifier))
    with signals.listening(lambda: _reload(server, notifier)):
        try:
            await _either(life, signals.first)
            await _either(life, signals.second, timeout=settings.drain_time)
            if not life.done():
                return _forced(signals, settings)
            life.result()
        finally:
            signs.cancel()
            await asyncio.wait({signs})
            server.audit.close()
    log_event(LOGGER, logging.INFO, "ended")
    return Ending()


async def _live(server: Server, notifier: Notifier, signals: _Signals) -> None:
    try:
        opening = asyncio.get_running_loop().create_task(server.open())
        await _either(opening, signals.first)
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        if not opening.cancelled():
            opening.result()
            where = " ".join(server.addresses)
            log_event(LOGGER, logging.INFO, "ready", store=server.store, addresses=where)
            # All current objects live as long as the process, so the collector can ignore them.
            gc.collect()
            gc.freeze()
            notifier.ready(f"serving {server.store} at {where}")
            number = await signals.first
            log_event(LOGGER, logging.INFO, "draining", signal=signal.Signals(number).name)
            notifier.stopping("draining")
            await server.drain()
    finally:
        await server.aclose()


async def _either(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def _signs_of_life(notifier: Notifier) -> None:
    """Notify the service manager while the loop iterates."""
    while notifier.watchdog is not None:
        notifier.alive()
        await asyncio.sleep(notifier.watchdog)


def _reload(server: Server, notifier: Notifier) -> None:
    notifier.reloading(time.monotonic())
    server.reload(lambda: notifier.ready(f"serving {server.store} at {' '.join(server.addresses)}"))


def _forced(signals: _Signals, settings: Settings) -> Ending:
    number = signals.second.result() if signals.second.done() else 0
    log_event(
        LOGGER,
        logging.ERROR,
        "ended by force; sessions live on in the store",
        why=f"a second signal, {signal.Signals(number).name}"
        if number
        else f"not done within drain-time, {settings.drain_time:g} s",
    )
    return Ending(in_order=False, signal=number)


class _Signals:
    """First and second signal to end.

    Attributes:
        first, second: futures of their numbers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.first: asyncio.Future[int] = loop.create_future()
        self.second: asyncio.Future[int] = loop.create_future()

    @contextlib.contextmanager
    def listening(self, reload: Callable[[], None]) -> Iterator[None]:
        """Handle signals inside the block; SIGHUP starts a reload."""
        for number in _ENDING:
            self._loop.add_signal_handler(number, self._receive, number)
        self._loop.add_signal_handler(signal.SIGHUP, reload)
        try:
            yield
        finally:
            for number in (*_ENDING, signal.SIGHUP):
                self._loop.remove_signal_handler(number)

    def _receive(self, number: int) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return
