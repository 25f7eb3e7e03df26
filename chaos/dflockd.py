"""`tenure serve` with dflockd's protocol, for chaos: processes on ``dflockd://``.

They have mutexes, semaphores and a limit that each says itself; administrators look at the same
store over tenure's own protocol.

A hold dies with its connection: when the network cuts that, the server gives the lock to the next
at once, and the holder believes until it notices, at the latest until its deadline. Nothing else is
promised, so what was asked for before a cut is taken to be gone from the cut on, as if somebody had
taken it away. The rest is judged as everywhere: that a loss is noticed by the deadline, that tokens
rise, that what is asked for afterwards is granted to no more than the limit. A server that ends
cuts its connections too, and is *not* excused: it has promised to keep what they held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from chaos.adapter import Fault, Inflict, Scene
from chaos.network import network_faults
from chaos.served import Served
from chaos.servers import server_faults

__all__ = ["Dflockd"]


class Dflockd(Served):
    """The server of `Served`, with dflockd's protocol for the processes."""

    name = "dflockd"
    schemes = ("dflockd", "tenure")
    plain = True
    spares = frozenset({"evict", "end-session", "delete"})
    seen_at = "/dflockd"

    @property
    def url(self) -> str:
        return f"dflockd://127.0.0.1:{self._network.port}"

    @property
    def admin_url(self) -> str:
        return f"tenure://127.0.0.1:{self._ports[1]}"

    async def start(self) -> None:
        self.not_done["what administrators do"] = "requests carry nothing to be known by"
        await super().start()

    def faults(self) -> Sequence[Fault]:
        cuts = network_faults([self._network])
        return [
            *server_faults([self._server]),
            *(replace(fault, inflict=_taking_away(fault.inflict)) for fault in cuts),
        ]


def _taking_away(inflict: Inflict) -> Inflict:
    """The same, and the history says that what is held may be lost when it begins and ends."""

    @asynccontextmanager
    async def recorded(scene: Scene) -> AsyncIterator[str]:
        async with AsyncExitStack() as broken:
            with scene.journal.revoking():
                what = await broken.enter_async_context(inflict(scene))
            yield what
            with scene.journal.revoking():
                await broken.aclose()

    return recorded
