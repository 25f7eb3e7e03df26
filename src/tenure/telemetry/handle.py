"""Adding telemetry to a client, and removing it.

A client has one instrumentation for each destination, so that nothing is counted twice. It ends
with `Instrumentation.stop`, or with the client.

The sinks are added on the client's loop, where its sessions and leases do not change meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tenure._client.client import Client, client_core
from tenure._client.client_core import ClientCore
from tenure.errors import InvalidArgument, Unsupported
from tenure.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from tenure._client.listeners import Sink

T = TypeVar("T")


class Instrumentation:
    """A client's telemetry, which `instrument` has added.

    It ends with the client, or earlier with `stop`.
    """

    def __init__(
        self, core: ClientCore, sinks: Sequence[Sink], stopped: Callable[[], None] | None
    ) -> None:
        self._core = core
        self._sinks = tuple(sinks)
        self._stopped = stopped

    def __repr__(self) -> str:
        return f"<Instrumentation of {self._core.url}{'' if self.active else ' (ended)'}>"

    @property
    def active(self) -> bool:
        """True until it is stopped or the client is closed."""
        return any(each in self._core.listeners.sinks for each in self._sinks)

    def stop(self) -> None:
        """Stop reporting. Safe to call twice, after the client is closed, and from any thread.

        The counts so far remain, and the spans of current waits and leases end.
        """
        core = self._core
        core.listeners.remove(*self._sinks)
        if core.loop is None or core.loop.is_closed() or _is_running(core.loop):
            self._end()
        else:
            core.soon(self._end)  # where nothing reports to them meanwhile
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped()

    def _end(self) -> None:
        for each in self._sinks:
            each.closed()


def instrumented(
    client: object,
    make: Callable[[str], Sequence[Sink]],
    stopped: Callable[[], None] | None = None,
) -> Instrumentation:
    """Add sinks to a client, and return the handle.

    Args:
        client: a client of `tenure` or `tenure.blocking`.
        make: makes the sinks, given the name of the engine. Called on the client's loop.
        stopped: called when the program stops the instrumentation.

    Raises:
        InvalidArgument: the client is something else.
        Misuse: the client is instrumented already, or belongs to another process or loop.
        SessionClosed: the client is closed.
    """

    def add(client: Client) -> Instrumentation:
        core = client_core(client)
        core.check_process()
        if core.loop is not None:
            core.check_owner()
        if core.closed:
            raise core.closed_error()
        sinks = make(core.url.partition(":")[0])
        core.listeners.add(*sinks)
        for each in sinks:
            if isinstance(each, Recorder):
                each.begin(core)
        return Instrumentation(core, sinks, stopped)

    if isinstance(client, Client):
        return add(client)
    from tenure import blocking
    from tenure.blocking.wrapper import on_loop

    if isinstance(client, blocking.Client):
        return on_loop(client, add)
    raise InvalidArgument(
        f"instrument() takes a client of tenure or tenure.blocking, not {client!r}"
    )


def missing(package: str, extra: str) -> Unsupported:
    """Return the error for an extra that is not installed."""
    return Unsupported(f"telemetry needs {package}: pip install 'tenure[{extra}]'")


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
