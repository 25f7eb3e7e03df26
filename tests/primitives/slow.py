"""An engine between the primitives and another engine that answers late, fails, or not at all.

`SlowEngine` fulfils the contract: operations take effect in the order in which they were called,
answers are futures that come some turns of the loop later, and a cancelled future stops nothing.
What a test can do to it: `pause` and `resume` (the store is out of reach), `fail` (the next
operations of a kind fail), `drop_proofs` (renewals prove nothing).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tenure.clock import Clock
from tenure.engines.contract import (
    Answer,
    Attach,
    Engine,
    EngineSession,
    Enqueued,
    Removal,
    SessionEvents,
)
from tenure.errors import SessionExpired
from tenure.model import (
    Capabilities,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

T = TypeVar("T")


class SlowEngine:
    """Another engine, `turns` turns of the loop away in each direction."""

    def __init__(self, inner: Engine, turns: int = 1) -> None:
        self.inner = inner
        self.turns = turns
        self.paused = False
        self.failures: dict[str, list[Exception]] = {}
        self.prove = True
        self.sessions: list[SlowSession] = []

    # What a test does to it

    def pause(self) -> None:
        """Nothing reaches the store, and no answer comes, until `resume`."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        for session in self.sessions:
            session.pump()

    def fail(self, kind: str, *errors: Exception) -> None:
        """Let the next operations called `kind` fail with `errors`, one after the other."""
        self.failures.setdefault(kind, []).extend(errors)

    def check(self, kind: str) -> None:
        waiting = self.failures.get(kind)
        if waiting:
            raise waiting.pop(0)

    # The contract

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def clock(self) -> Clock:
        return self.inner.clock

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def open(self) -> None:
        await self.delay()
        self.check("open")
        await self.inner.open()

    async def aclose(self) -> None:
        await self.inner.aclose()
        self.check("aclose")

    async def delay(self) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)

    async def attach(self, how: Attach, events: SessionEvents) -> EngineSession:
        self.check("attach")
        session = SlowSession(self, events)
        attaching = asyncio.ensure_future(self.inner.attach(how, session))
        try:
            await self.delay()
            session.inner = await asyncio.shield(attaching)
            await self.delay()
        except asyncio.CancelledError:
            await (await attaching).close()
            raise
        self.sessions.append(session)
        return session

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        await self.inner.create_node(path, config, exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        await self.inner.alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        await self.inner.drop_node(path, force=force)

    async def describe_node(self, path: str) -> NodeDescription:
        return await self.inner.describe_node(path)

    async def list_nodes(self) -> Sequence[str]:
        return await self.inner.list_nodes()

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        return await self.inner.list_semaphores(path, owners=owners, waiters=waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        return await self.inner.list_sessions(path)

    async def end_session(self, path: str, session_id: int) -> bool:
        return await self.inner.end_session(path, session_id)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        return await self.inner.evict(path, name, order_id)


class SlowSession:
    """One session of a `SlowEngine`, and what stands between the events of the two."""

    inner: EngineSession

    def __init__(self, engine: SlowEngine, events: SessionEvents) -> None:
        self._engine = engine
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[str, Callable[[], Any], asyncio.Future[Any] | None]] = deque()

    @property
    def id(self) -> int:
        return self.inner.id

    @property
    def attach_number(self) -> int:
        return self.inner.attach_number

    def pump(self) -> None:
        while self._queue and not self._engine.paused:
            kind, operation, answer = self._queue.popleft()
            try:
                self._engine.check(kind)
                result = operation()
            except Exception as error:
                self._after(self._settle, answer, None, error)
            else:
                self._after(self._settle, answer, result, None)

    @staticmethod
    def _settle(answer: asyncio.Future[Any] | None, result: Any, error: Exception | None) -> None:
        if answer is None or answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def _after(self, call: Callable[..., None], *arguments: Any, turns: int | None = None) -> None:
        """Call it some turns of the loop later; what is called later comes later."""
        turns = self._engine.turns if turns is None else turns
        if turns <= 0:
            call(*arguments)
        else:
            self._loop.call_soon(lambda: self._after(call, *arguments, turns=turns - 1))

    def _operate(self, kind: str, operation: Callable[[], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self._loop.create_future()
        self._after(self._enter, kind, operation, answer)
        return answer

    def _enter(self, kind: str, operation: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self._queue.append((kind, operation, answer))
        self.pump()

    # The contract

    def renew(self) -> None:
        self.inner.renew()

    async def close(self) -> None:
        await self._engine.delay()
        self._engine.check("close")
        await self.inner.close()

    async def detach(self) -> None:
        await self.inner.detach()

    async def create_semaphore(
        self, name: str, limit: int, data: bytes, *, exist_ok: bool
    ) -> None:
        await self._engine.delay()
        await self.inner.create_semaphore(name, limit, data, exist_ok=exist_ok)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        await self.inner.update_semaphore(name, data)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        await self.inner.delete_semaphore(name, force=force)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        await self._engine.delay()
        self._engine.check("describe")
        return await self.inner.describe_semaphore(name, owners=owners, waiters=waiters)

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        return self._operate(
            "enqueue",
            lambda: self.inner.enqueue(
                hold, name, count, data, timeout=timeout, ephemeral=ephemeral
            ),
        )  # type: ignore[return-value]  # the inner engine answers at once

    def alter(self, hold: int, *, count: int | None, data: bytes | None) -> Answer[None]:
        return self._operate("alter", lambda: self.inner.alter(hold, count=count, data=data))  # type: ignore[return-value]

    def withdraw(self, hold: int) -> Answer[None]:
        return self._operate("withdraw", lambda: self.inner.withdraw(hold))  # type: ignore[return-value]

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        return self.inner.watch(name, data=data, owners=owners, changed=changed)

    # The inner engine's events, on their way up

    def proven(self, at: float) -> None:
        if self._engine.prove:
            self._events.proven(at)

    def granted(self, hold: int, order_id: int | None) -> None:
        self._after(self._events.granted, hold, order_id)

    def removed(self, hold: int, why: Removal) -> None:
        self._after(self._events.removed, hold, why)

    def detached(self) -> None:
        self._events.detached()

    def attached(self) -> None:
        self._events.attached()

    def ended(self, error: SessionExpired) -> None:
        self._after(self._events.ended, error)
