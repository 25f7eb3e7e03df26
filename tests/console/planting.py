"""Programs that wait inside leases, as sessions of a store that publish their waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from tenure.core.deadlocks import WAITS, encode
from tenure.engines.contract import Engine, EngineSession
from tenure.model import EPHEMERAL_LIMIT
from tests.console.serving import attached, enqueue


class Planted:
    """Programs on one node of a store."""

    def __init__(self, store: Engine, node: str = "/default") -> None:
        self.store = store
        self.node = node
        self._numbers = count(1)

    async def program(self, name: str, *locks: str, host: str = "db-1") -> EngineSession:
        """A program that asks for locks, which it gets if they are free."""
        text = f"[host={host} pid={4000 + next(self._numbers)} program={name}]"
        session = await attached(self.store, self.node, text)
        for each in locks:
            await self.request(session, each)
        return session

    async def request(
        self, session: EngineSession, name: str, tokens: int = EPHEMERAL_LIMIT
    ) -> int:
        await enqueue(session, next(self._numbers), name, count=tokens, ephemeral=tokens > 2**53)
        return (await self.order_ids(session, name))[-1]

    async def order_ids(self, session: EngineSession, name: str) -> list[int]:
        found = await self.store.describe_semaphore(self.node, name, owners=True, waiters=True)
        queue = (*found.owners, *found.waiters)
        return [each.order_id for each in queue if each.session_id == session.id]

    async def wait(
        self,
        session: EngineSession,
        name: str,
        inside: Sequence[str] = (),
        *,
        tokens: int = EPHEMERAL_LIMIT,
        task: str = "Task-1",
    ) -> None:
        """Let a task of a program wait for a lock inside others, and publish that."""
        order_id = await self.request(session, name, tokens)
        leases = [(each, (await self.order_ids(session, each))[0]) for each in inside]
        await self.publish(
            session, encode(name, order_id, leases, task=task, timeout=False, raises=False)
        )

    async def publish(self, session: EngineSession, data: bytes) -> None:
        await enqueue(session, next(self._numbers), WAITS, count=1, data=data)

    async def deadlock(self, *names: str) -> list[EngineSession]:
        """A circle of programs, each inside one lock; the last one waits for the first lock."""
        programs = [await self.program(f"{name}.py", name) for name in names]
        for at, session in enumerate(programs):
            await self.wait(session, names[(at + 1) % len(names)], [names[at]], task=f"Task-{at}")
        return programs
