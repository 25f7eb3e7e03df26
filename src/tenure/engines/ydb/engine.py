"""Engine on a YDB database: its nodes, and the sessions attached to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NoReturn

from tenure.clock import Clock
from tenure.core import rules
from tenure.engines.contract import Attach, EngineDefaults, Orphan, Removal, SessionEvents
from tenure.engines.ydb import errors, messages, orphans
from tenure.engines.ydb.database import Database
from tenure.engines.ydb.session import YdbSession
from tenure.engines.ydb.url import YdbUrl
from tenure.errors import (
    EngineUnavailable,
    NodeBusy,
    NodeExists,
    NodeNotFound,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.model import (
    DEFAULT_NODE,
    Capabilities,
    NodeConfig,
    NodeDescription,
    Recovered,
    SemaphoreDescription,
    SessionDescription,
)
from tenure.wire.ydb import Message, Status

_DESCRIBING = 5.0
"""Recovery window, in seconds, of a session that describes one semaphore."""

CLOSE_TIMEOUT = 5.0
"""Seconds for ending the sessions of a closed engine; the others expire after their windows."""


class YdbEngine(EngineDefaults):
    """One program's engine on a database.

    Attributes:
        database: the connection shared by its sessions.
        sessions: the sessions that have not ended.
    """

    def __init__(self, address: YdbUrl, clock: Clock) -> None:
        """Prepare the engine; `open` connects."""
        self.sessions: set[YdbSession] = set()
        self.database = Database(
            address, clock, lambda: (session.window for session in self.sessions)
        )
        self.url = address.url
        self.clock = clock
        self.capabilities = Capabilities(
            fencing=address.fencing,
            since=False,
            waiter_timeout=False,
            durable=True,
            waiter_order=False,
            one_step=False,
            removal_reason=False,
            descriptions=False,
            store_time=False,
        )
        self._open = False

    # The contract: opening and closing

    async def open(self) -> None:
        """Connect to the store."""
        try:
            await self.database.open()
        except EngineUnavailable as error:
            raise EngineUnavailable(
                f"{self.url} cannot be reached: {error}. Check the address, and that a server of "
                f"YDB's protocol runs there, {self.database.address.transport}."
            ) from error
        self._open = True

    async def aclose(self) -> None:
        """Close the sessions, then the connections. Safe to call twice."""
        self._open = False
        closing = [session.close_within(CLOSE_TIMEOUT) for session in list(self.sessions)]
        await asyncio.gather(*closing)
        await self.database.aclose()

    def _opened(self) -> None:
        if not self._open:
            raise EngineUnavailable(f"{self.url} is not open")

    # The contract: sessions

    def trouble(self, name: str | None = None) -> TenureError | None:  # noqa: ARG002
        """Return the reason why the store currently grants nothing, if known."""
        failures = (session.failure for session in self.sessions)
        return next((each for each in failures if each is not None), None)

    async def attach(self, how: Attach, events: SessionEvents) -> YdbSession:
        """Attach a new session; create the default node if it is missing."""
        self._opened()
        rules.check_path(how.node)
        rules.check_window(how.recovery_window, how.node)
        rules.check_description(how.description, how.node)
        rules.check_key(how.key, how.node)
        if how.liveness == "window":
            self._unsupported(
                "a resumable session", "cannot list the requests of a session", how.node
            )
        try:
            return await self._attach(how, events)
        except NodeNotFound:
            if how.node != DEFAULT_NODE:
                raise
            await self.create_node(how.node, NodeConfig(), exist_ok=True)
            return await self._attach(how, events)

    async def _attach(self, how: Attach, events: SessionEvents) -> YdbSession:
        session = YdbSession(self.database, how, events, self.sessions.discard)
        self.sessions.add(session)
        await session.attach()
        return session

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session whose program is dead, by the ids and the keys of its members."""
        self._opened()
        await orphans.end(self.database, orphan)

    # The contract: nodes

    async def create_node(self, path: str, config: NodeConfig, *, exist_ok: bool) -> None:
        """Create a node."""
        rules.check_path(path)
        if not exist_ok:
            # The server accepts the creation of a node that exists.
            with contextlib.suppress(NodeNotFound):
                await self.describe_node(path)
                raise NodeExists(f"node {path} exists already", node=path)
        await self._call("CreateNode", path, config)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change the settings of a node."""
        rules.check_path(path)
        await self._call("AlterNode", path, config)

    async def drop_node(self, path: str, *, force: bool) -> None:
        """Drop a node; by force it is unsupported while sessions are attached."""
        rules.check_path(path)
        rules.check_droppable(path)
        try:
            await self._call("DropNode", path)
        except NodeBusy:
            if force:
                self._unsupported(
                    f"dropping {path} by force", "cannot end the sessions attached there", path
                )
            raise

    async def describe_node(self, path: str) -> NodeDescription:
        """Describe a node; create the default node if it is missing."""
        rules.check_path(path)
        try:
            operation = await self._call("DescribeNode", path)
        except NodeNotFound:
            if path != DEFAULT_NODE:
                raise
            await self.create_node(path, NodeConfig(), exist_ok=True)
            operation = await self._call("DescribeNode", path)
        return NodeDescription(path, messages.node_config(messages.node_result(operation).config))

    async def _call(self, call: str, path: str, config: NodeConfig | None = None) -> Message:
        self._opened()
        request = messages.node_request(call, self.database.path_of(path), config)
        try:
            operation = await self.database.call(call, request)
        except EngineUnavailable as error:
            raise EngineUnavailable(f"node {path} on {self.url}: {error}", node=path) from error
        if operation.status != Status.SUCCESS:
            raise errors.node_error(path, operation)
        return operation

    # The contract: operations that YDB's API does not offer

    async def list_nodes(self) -> Sequence[str]:
        """Raise `Unsupported`: the API has no list of nodes."""
        self._unsupported("listing nodes", "has no list of them")

    async def list_semaphores(
        self,
        path: str,
        *,
        owners: bool,  # noqa: ARG002
        waiters: bool,  # noqa: ARG002
    ) -> Sequence[SemaphoreDescription]:
        """Raise `Unsupported`: the API describes one semaphore at a time."""
        self._unsupported("listing semaphores", "describes one by its name alone", path)

    async def describe_semaphore(
        self, path: str, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore, through a session that lasts as long as the call."""
        rules.check_path(path)
        rules.check_name(name, path)
        # The API describes a semaphore only through a session.
        session = await self.attach(Attach(path, _DESCRIBING), _NoEvents())
        try:
            return await session.describe_semaphore(name, owners=owners, waiters=waiters)
        finally:
            await session.close()

    async def store_time(self) -> float:
        """Return the local wall clock, since the API has no time."""
        return self.clock.wall()

    async def list_sessions(self, path: str) -> Sequence[SessionDescription]:
        """Raise `Unsupported`: the API has no list of sessions."""
        self._unsupported("listing sessions", "has no list of them", path)

    async def end_session(self, path: str, session_id: int) -> bool:  # noqa: ARG002
        """Raise `Unsupported`: the API cannot end another session."""
        self._unsupported("ending another session", "cannot do that", path)

    async def evict(self, path: str, name: str, order_id: int) -> bool:  # noqa: ARG002
        """Raise `Unsupported`: the API cannot evict a request."""
        self._unsupported("evicting a request", "cannot do that", path)

    def _unsupported(self, what: str, why: str, node: str | None = None) -> NoReturn:
        raise Unsupported(
            f"{what} is not possible through {self.url}: YDB's coordination API {why}; "
            "tenure://, sqlite:// and memory:// can",
            node=node,
        )


class _NoEvents:
    """Events of a session without requests (`SessionEvents`)."""

    def proven(self, at: float) -> None: ...

    def resumed(self, requests: Sequence[Recovered]) -> None: ...

    def granted(self, request_id: int, order_id: int | None) -> None: ...

    def removed(self, request_id: int, why: Removal) -> None: ...

    def detached(self, cause: BaseException | None = None) -> None: ...

    def attached(self) -> None: ...

    def ended(self, error: SessionExpired) -> None: ...
