"""What concerns nodes and whole stores, for who looks after them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from tenure.core import rules
from tenure.engines.redis import describe
from tenure.engines.redis.attachment import not_found
from tenure.engines.redis.commands import Call, Reading, Refusal
from tenure.engines.redis.link import Link
from tenure.engines.redis.scripts import SCRIPTS
from tenure.engines.redis.url import RedisUrl
from tenure.errors import (
    EngineError,
    EngineUnavailable,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    TenureError,
)
from tenure.model import (
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

__all__ = ["Administration", "no_node"]


class Administration:
    """The part of an engine that asks for nobody in particular."""

    loop: asyncio.AbstractEventLoop
    link: Link

    def __init__(self, address: RedisUrl) -> None:
        self.url = address.url
        self._address = address
        self._open = False
        self._awaited: dict[asyncio.Future[Any], tuple[type[TenureError], str]] = {}

    def _opened(self) -> None:
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open")

    def limit(
        self, answer: asyncio.Future[Any], kind: type[TenureError], path: str
    ) -> asyncio.TimerHandle:
        """What fails an answer that takes too long, unless it is cancelled."""
        patience = self._address.connect_timeout + self._address.patience
        self._awaited[answer] = kind, path
        answer.add_done_callback(self._awaited.pop)

        def fail() -> None:
            if not answer.done():
                self.link.give_up("the server does not answer")
                why = f" ({self.link.trouble})" if self.link.trouble else ""
                answer.set_exception(
                    kind(f"{self.url} did not answer within {patience:g} s{why}", node=path)
                )

        return self.loop.call_later(patience, fail)

    def fail_awaited(self) -> None:
        """The engine is closed: no answer comes any more."""
        for answer, (kind, path) in list(self._awaited.items()):
            if not answer.done():
                answer.set_exception(kind(f"{self.url} was closed", node=path))

    async def _ask(self, path: str, script: str, *args: str | bytes | int) -> Any:
        """What a script answers to nobody in particular."""
        return await self._asked(Call, path, script, *args)

    async def _read(self, path: str, script: str, *args: str | bytes | int) -> Any:
        """The same, where the answer may be large."""
        return await self._asked(Reading, path, script, *args)

    async def _asked(
        self, kind: type[Call], path: str, script: str, *args: str | bytes | int
    ) -> Any:
        self._opened()
        future: asyncio.Future[Any] = self.loop.create_future()

        def answered(reply: Any) -> None:
            if not future.done():
                future.set_result(reply)

        self.link.send(kind(SCRIPTS[script], None, args, answered))
        late = self.limit(future, EngineError, path)
        try:
            reply = await future
        finally:
            late.cancel()
        if isinstance(reply, Refusal):
            raise EngineError(f"{self.url} refused a command: {reply}", node=path)
        if reply[0] == b"no node":
            raise no_node(path)
        return reply

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        rules.check_path(path)
        text = describe.config_text(config)
        reply = await self._ask(
            path, "admin", "create", path, text, secrets.token_hex(8), int(exist_ok)
        )
        if reply[0] == b"exists":
            raise NodeExists(f"the node {path} exists already", node=path)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        rules.check_path(path)
        done = False
        while not done:  # until nobody else has altered it meanwhile
            _, old = await self._read(path, "admin", "config", path)
            new = describe.config_text(rules.merge_config(describe.config(old), config))
            reply = await self._ask(path, "admin", "alter", path, new, old)
            done = reply[0] == b"ok"

    async def drop_node(self, path: str, *, force: bool) -> None:
        rules.check_path(path)
        rules.check_droppable(path)
        reply = await self._ask(path, "admin", "drop", path, int(force))
        if reply[0] == b"busy":
            raise NodeBusy(
                f"the node {path} has {reply[1]} attached session(s); close them, or drop it by "
                "force, which ends them",
                node=path,
            )

    async def describe_node(self, path: str) -> NodeDescription:
        rules.check_path(path)
        _, config, sessions, semaphores = await self._read(path, "admin", "node", path)
        return NodeDescription(path, describe.config(config), sessions, semaphores)

    async def list_nodes(self) -> Sequence[str]:
        _, paths = await self._read("", "admin", "nodes", "")
        return sorted(path.decode() for path in paths)

    async def store_time(self) -> float:
        _, microseconds = await self._read("", "admin", "time", "")
        return int(microseconds) / 1e6

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        rules.check_path(path)
        wanted = describe.wanted(owners=owners, waiters=waiters)
        _, found = await self._read(path, "describe", "", path, wanted)
        described = [describe.semaphore(each, owners=owners, waiters=waiters) for each in found]
        return sorted(described, key=lambda each: each.name)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        rules.check_path(path)
        rules.check_name(name, path)
        wanted = describe.wanted(owners=owners, waiters=waiters)
        reply = await self._read(path, "describe", "", path, wanted, name)
        if reply[0] == b"missing":
            raise not_found(name, path)
        return describe.semaphore(reply[1][0], owners=owners, waiters=waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        rules.check_path(path)
        _, found = await self._read(path, "admin", "sessions", path)
        return describe.sessions(path, found)

    def pages(self) -> None:
        return None

    async def end_session(self, path: str, session_id: int) -> bool:
        rules.check_path(path)
        reply = await self._ask(path, "admin", "end", path, str(session_id))
        return bool(reply[1])

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        rules.check_path(path)
        reply = await self._ask(path, "admin", "evict", path, name, str(order_id))
        if reply[0] == b"missing":
            rules.check_name(name, path)
            raise not_found(name, path)
        return bool(reply[1])


def no_node(path: str) -> NodeNotFound:
    """The error for a path that no node has."""
    return NodeNotFound(
        f"there is no node {path}; create it with client.create_node({path!r}) or "
        f"'tenure node create {path}'",
        node=path,
    )
