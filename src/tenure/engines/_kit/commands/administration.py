"""Operations on nodes and whole stores: the part of an engine without sessions."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tenure.clock import Clock
from tenure.core import refusals, rules
from tenure.engines._kit.commands.replies import REPEATED, first_word, settle
from tenure.engines._kit.commands.values import Values, config_from, config_text, included
from tenure.engines.contract import EngineDefaults
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.model import NodeConfig, NodeDescription, SemaphoreDescription, SessionDescription


class CommandAdministration(EngineDefaults, ABC):
    """Operations without a session.

    Args:
        url: the store's URL, without secrets.
        answer_timeout: timeout of an answer in seconds.
        values: decodes the store's replies.
        clock: measures the sessions' proofs.

    Attributes:
        loop: the event loop on which the engine was opened.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, url: str, answer_timeout: float, values: Values, clock: Clock) -> None:
        self.url = url
        self.values = values
        self.clock = clock
        self._answer_timeout = answer_timeout
        self._open = False
        self._awaited: dict[asyncio.Future[Any], tuple[type[TenureError], str]] = {}

    # Defined by each engine

    @abstractmethod
    def administer(
        self, command: str, args: tuple[Any, ...], answered: Callable[[Any], None]
    ) -> None:
        """Send a command; `answered` receives the reply, a list that begins with "ok".

        A store that does not recognize a command which it has executed before, for example because
        the answer was lost, passes the reply through `replies.repeated`.

        Commands and their arguments, with the rest of the reply after "ok" or another first word:

        * ``create_node``, path, configuration: "exists"
        * ``alter_node``, path, the former configuration, the new one: "changed"
        * ``drop_node``, path, by force: "busy", number of attached sessions
        * ``describe_node``, path: configuration, number of sessions, number of semaphores
        * ``describe``, path, name or ``None`` for all, `included`: a list for `Values.semaphore`
        * ``list_sessions``, path: a list for `Values.sessions`
        * ``end_session``, path, id: true if it existed
        * ``evict``, path, name, order id: true if it existed; "missing"

        All but the first may reply "no node". For `CommandPages`, ``list_sessions`` has an id
        and a number as further arguments, and ``describe`` a name and a number: the reply begins
        behind that id or name, and is no longer than the number.
        """

    @abstractmethod
    def note_silence(self) -> TenureError | None:
        """Record that an answer is overdue; return the reason, if it is known."""

    # Answers

    def limit(
        self, answer: asyncio.Future[Any], kind: type[TenureError], path: str
    ) -> asyncio.TimerHandle:
        """Fail an overdue answer after a timeout; return the timer, for cancelling it."""
        self._awaited[answer] = kind, path
        answer.add_done_callback(self._awaited.pop)

        def fail() -> None:
            if not answer.done():
                cause = self.note_silence() or "no answer"
                text = f"{self.url} did not answer within {self._answer_timeout:g} s: {cause}"
                error = kind(text, node=path)
                if isinstance(cause, TenureError):
                    error.__cause__ = cause
                answer.set_exception(error)

        return self.loop.call_later(self._answer_timeout, fail)

    def fail_awaited(self) -> None:
        """Fail all pending answers, because the engine is being closed."""
        for answer, (kind, path) in list(self._awaited.items()):
            if not answer.done():
                answer.set_exception(kind(f"{self.url} was closed", node=path))

    def check_open(self) -> None:
        """Raise `EngineUnavailable` if the engine is not open."""
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open")

    async def command(self, path: str, command: str, *args: Any) -> Any:
        """Send a command for a node, and return its reply.

        Raises:
            NodeNotFound: there is no such node.
            EngineError: the store rejected the command, or did not answer in time.
            EngineUnavailable: the engine is not open.
        """
        self.check_open()
        answer: asyncio.Future[Any] = self.loop.create_future()
        self.administer(command, args, partial(settle, answer))
        late = self.limit(answer, EngineError, path)
        try:
            reply = await answer
        finally:
            late.cancel()
        if isinstance(reply, Exception):
            raise EngineError(f"{self.url} refused a command: {reply}", node=path)
        if first_word(reply) == "no node":
            raise refusals.node_not_found(path)
        return reply

    # Nodes

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        rules.check_path(path)
        reply = await self.command(path, "create_node", path, config_text(config))
        if first_word(reply) == "exists" and not exist_ok:
            if reply[1:] == [REPEATED]:
                _, found, *_ = await self.command(path, "describe_node", path)
                if found == config_text(config):
                    return  # the first execution has created it
            raise refusals.node_exists(path)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        rules.check_path(path)
        done = False
        while not done:  # until no other client alters it at the same time
            _, old, *_ = await self.command(path, "describe_node", path)
            new = config_text(rules.merge_config(config_from(old), config))
            done = first_word(await self.command(path, "alter_node", path, old, new)) == "ok"

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node."""
        rules.check_path(path)
        rules.check_droppable(path)
        reply = await self.command(path, "drop_node", path, force)
        if first_word(reply) == "busy":
            raise refusals.node_busy(path, reply[1])

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node."""
        rules.check_path(path)
        _, text, sessions, semaphores = await self.command(path, "describe_node", path)
        return NodeDescription(path, config_from(text), sessions, semaphores)

    # Semaphores and sessions

    async def list_semaphores(
        self, path: str, *, owners: bool, waiters: bool
    ) -> Sequence[SemaphoreDescription]:
        """Describe the semaphores of a node, sorted by name."""
        rules.check_path(path)
        kinds = included(owners=owners, waiters=waiters)
        _, found = await self.command(path, "describe", path, None, kinds)
        described = self.described(found, owners=owners, waiters=waiters)
        return sorted(described, key=lambda each: each.name)

    def described(
        self, found: Iterable[Any], *, owners: bool, waiters: bool
    ) -> list[SemaphoreDescription]:
        """Decode semaphores."""
        return [self.values.semaphore(each, owners=owners, waiters=waiters) for each in found]

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_path(path)
        rules.check_name(name, path)
        kinds = included(owners=owners, waiters=waiters)
        reply = await self.command(path, "describe", path, name, kinds)
        if first_word(reply) == "missing" or not reply[1]:
            raise refusals.semaphore_not_found(path, name)
        return self.values.semaphore(reply[1][0], owners=owners, waiters=waiters)

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Describe the sessions of a node, sorted by id."""
        rules.check_path(path)
        _, found = await self.command(path, "list_sessions", path)
        return self.values.sessions(path, found)

    async def end_session(self, path: str, session_id: int) -> bool:
        """End a session; return false if it did not exist."""
        rules.check_path(path)
        reply = await self.command(path, "end_session", path, session_id)
        return bool(reply[1])

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Evict a request from its queue; return false if it did not exist."""
        rules.check_path(path)
        reply = await self.command(path, "evict", path, name, order_id)
        if first_word(reply) == "missing":
            rules.check_name(name, path)
            raise refusals.semaphore_not_found(path, name)
        return bool(reply[1])


class CommandPages:
    """Lists in pages, as the contract defines them, of a store that can continue a list."""

    def __init__(self, engine: CommandAdministration) -> None:
        self._engine = engine

    async def sessions(self, path: str, *, after: int, most: int) -> Sequence[SessionDescription]:
        """Return the next sessions of a node, by id."""
        rules.check_path(path)
        _, found = await self._engine.command(path, "list_sessions", path, after, most)
        return self._engine.values.sessions(path, found)

    async def semaphores(
        self, path: str, *, owners: bool, waiters: bool, after: str, most: int
    ) -> Sequence[SemaphoreDescription]:
        """Return the next semaphores of a node, by name."""
        rules.check_path(path)
        kinds = included(owners=owners, waiters=waiters)
        _, found = await self._engine.command(path, "describe", path, None, kinds, after, most)
        return self._engine.described(found, owners=owners, waiters=waiters)
