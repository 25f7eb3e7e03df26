"""`tenure serve` with dflockd's protocol, for chaos: processes on ``dflockd://``.

They have mutexes, semaphores and a limit that each says itself; administrators look at the same
store over tenure's own protocol, and take away what they find there. A request of dflockd's carries
nothing to be known by, and a session is a connection, of which an administrator does not know whose
it is. So who takes out requests, or deletes a semaphore, excuses all that had been asked for under
its name by then; and who ends a session, or drops the node, excuses everything.

A hold dies with its connection: when the network cuts that, the server gives the lock to the next
at once, and the holder believes until it notices, at the latest until its deadline. Nothing else is
promised, so what was asked for before a cut is taken to be gone from the cut on, as if somebody had
taken it away. The rest is judged as everywhere: that a loss is noticed by the deadline, that tokens
rise, that what is asked for afterwards is granted to no more than the limit. A server that ends
cuts its connections too, and is *not* excused: it has promised to keep what they held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import tenure
from chaos.adapter import Fault, Inflict, NotNow, Scene
from chaos.network import network_faults
from chaos.served import Served
from chaos.servers import server_faults
from tenure.model import DEFAULT_NODE, SemaphoreDescription

_NODE = "/dflockd"
"""Where administrators find what the processes have on their only node."""


class Dflockd(Served):
    """The server of `Served`, with dflockd's protocol for the processes."""

    name = "dflockd"
    schemes = ("dflockd", "tenure")
    plain = True
    shows_waits = False
    spares = frozenset({"evict", "end-session", "delete"})
    seen_at = _NODE
    # Behind the proxy a dead client looks like one that has sent everything, until it is probed.
    lingers = 10.0

    @property
    def url(self) -> str:
        """URL of the listener for dflockd's clients, behind the network."""
        return f"dflockd://127.0.0.1:{self._network.port}"

    @property
    def admin_url(self) -> str:
        """URL of the native listener, which has no network before it."""
        return f"tenure://127.0.0.1:{self._ports[1]}"

    def faults(self) -> Sequence[Fault]:
        """Return the faults of the server, the network and administrators; or the store's."""
        if self._store is not None:
            return super().faults()
        cuts = network_faults([self._network])
        return [
            *server_faults([self.server]),
            *(replace(fault, inflict=_taking_away(fault.inflict)) for fault in cuts),
            Fault("evict", "an administrator takes requests out of a queue", _evict, (0.1, 0.3)),
            Fault("end-session", "an administrator ends a session", _end_session, (0.1, 0.3)),
            Fault("delete", "an administrator deletes a lock by force", _delete, (0.1, 0.3)),
            Fault("drop", "an administrator drops the node by force", _drop, (0.1, 0.3)),
        ]


def _taking_away(inflict: Inflict) -> Inflict:
    """Do the same, and record that leases may be lost from its start to its end."""

    @asynccontextmanager
    async def recorded(scene: Scene) -> AsyncIterator[str]:
        async with AsyncExitStack() as broken:
            with scene.journal.revoking():
                what = await broken.enter_async_context(inflict(scene))
            yield what
            with scene.journal.revoking():
                await broken.aclose()

    return recorded


async def _one_in_use(scene: Scene, admin: tenure.Client) -> SemaphoreDescription:
    """Return the requests of a process, as an administrator sees them."""
    try:
        found = await admin.list_semaphores(_NODE, owners=True, waiters=True)
    except tenure.NodeNotFound:
        found = []
    used = [each for each in found if each.owners or each.waiters]
    if not used:
        raise NotNow("nobody has or wants anything")
    return scene.random.choice(used)


@asynccontextmanager
async def _evict(scene: Scene) -> AsyncIterator[str]:
    async with tenure.connect(scene.engine.admin_url) as admin:
        found = await _one_in_use(scene, admin)
        requests = [*found.owners[:2], *found.waiters[:1]]
        with scene.journal.revoking(node=DEFAULT_NODE, name=found.name):
            for request in requests:
                with suppress(tenure.SemaphoreNotFound):  # nobody wants it any more
                    await admin.evict(_NODE, found.name, request.order_id)
    yield f"{len(requests)} requests for {found.name}"


@asynccontextmanager
async def _end_session(scene: Scene) -> AsyncIterator[str]:
    async with tenure.connect(scene.engine.admin_url) as admin:
        found = await _one_in_use(scene, admin)
        session_id = scene.random.choice([*found.owners, *found.waiters]).session_id
        with scene.journal.revoking():
            await admin.end_session(_NODE, session_id)
    yield f"session {session_id}"


@asynccontextmanager
async def _delete(scene: Scene) -> AsyncIterator[str]:
    """Whoever asks for it next makes it anew."""
    async with tenure.connect(scene.engine.admin_url) as admin:
        name = (await _one_in_use(scene, admin)).name
        async with admin.session(_NODE) as session:
            with scene.journal.revoking(node=DEFAULT_NODE, name=name):
                try:
                    await session.semaphore(name).delete(force=True)
                except tenure.SemaphoreNotFound:
                    raise NotNow(f"nobody has or wants {name} any more") from None
    yield name


@asynccontextmanager
async def _drop(scene: Scene) -> AsyncIterator[str]:
    """Whoever asks for a lock next makes it anew."""
    async with tenure.connect(scene.engine.admin_url) as admin:
        with scene.journal.revoking():
            try:
                await admin.drop_node(_NODE, force=True)
            except tenure.NodeNotFound:
                raise NotNow("nobody has asked for anything since it was dropped") from None
    yield _NODE
