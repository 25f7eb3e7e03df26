"""A store's server as chaos sees it: a real process, and what can be done to it.

An engine that has servers gets their faults from `server_faults`. Whoever starts a server ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from chaos.adapter import Fault, Inflict, Scene

_PATIENCE = 30.0
"""Seconds in which a server on a busy machine starts, or ends when it is told to."""

_ONCE_MORE = 0.02
"""Seconds between two looks at whether it accepts connections."""


class Server:
    """One process that listens on a port of this host.

    Args:
        command: what starts it, in the foreground.
        port: where it accepts connections once it is ready.
        log: the file that takes what it says.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        """Describe the process; `start` starts it."""
        self.port = port
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it accepts connections.

        Raises:
            OSError: it cannot be started, ended at once, or does not listen.
        """
        with self._log.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us, and we end it
            )
        try:
            async with asyncio.timeout(_PATIENCE):
                while not await _listens(self.port):
                    if process.returncode is not None:
                        raise OSError(
                            f"{self._command[0]} ended with status {process.returncode}; "
                            f"see {self._log}"
                        )
                    await asyncio.sleep(_ONCE_MORE)
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """SIGKILL, and wait for its end. Safe to call twice."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and wait for its end; one that does not obey is killed. Safe to call twice."""
        await self._end_or_kill(signal.SIGTERM)

    async def _end_or_kill(self, how: signal.Signals) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._end(how)
        except TimeoutError:
            await self.kill()

    def pause(self) -> None:
        """SIGSTOP."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    async def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._send(how)
            await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)  # asyncio's own may reap it unseen


def server_faults(
    servers: Sequence[Server], *, wipe: Callable[[Server], None] | None = None
) -> list[Fault]:
    """Return the faults of an engine's servers, of one of them at a time.

    Args:
        servers: the servers of the engine.
        wipe: removes the data of a server that has ended, where the engine promises to survive
            that; without it there is no such fault.
    """

    def down(
        end: Callable[[Server], Awaitable[None]],
        afterwards: Callable[[Server], None] | None = None,
    ) -> Inflict:
        @asynccontextmanager
        async def inflict(scene: Scene) -> AsyncIterator[str]:
            server = scene.random.choice(servers)
            await end(server)
            try:
                if afterwards is not None:
                    afterwards(server)
                yield f"the server on port {server.port}"
            finally:
                await server.start()

        return inflict

    @asynccontextmanager
    async def pause(scene: Scene) -> AsyncIterator[str]:
        server = scene.random.choice(servers)
        server.pause()
        try:
            yield f"the server on port {server.port}"
        finally:
            server.resume()

    faults = [
        Fault("kill-server", "kill -9 of a server", down(Server.kill), (0.1, 2.0)),
        Fault("restart-server", "a server ends and starts again", down(_stop), (0.1, 2.0)),
        Fault("pause-server", "SIGSTOP of a server", pause, (0.3, 4.0)),
    ]
    if wipe is not None:
        lost = down(Server.kill, wipe)
        faults.append(Fault("lose-data", "a server loses its data", lost, (0.1, 1.0)))
    return faults


async def _stop(server: Server) -> None:
    """End a server in its own way."""
    await server.stop()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
