"""Operations of a client on nodes and their contents, without a session.

A read raises `EngineUnavailable` when the store does not answer within the client's answer timeout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tenure._client.client_core import ClientCore
from tenure.core import rules
from tenure.engines.contract import Engine
from tenure.identity import semaphore_with_identities, session_with_identity
from tenure.model import (
    DEFAULT_NODE,
    NodeConfig,
    NodeDescription,
    SemaphoreDescription,
    SessionDescription,
)

T = TypeVar("T")


class Nodes:
    """Operations on nodes, a part of `Client`."""

    _core: ClientCore

    async def _read(self, subject: str, reading: Callable[[Engine], Awaitable[T]]) -> T:
        """Await a read of the engine, within the client's answer timeout."""

        async def read() -> T:
            return await reading(await self._core.opened())

        return await self._core.contact.answered(subject, read())

    async def create_node(
        self, path: str, config: NodeConfig | None = None, *, exist_ok: bool = False
    ) -> None:
        """Create a node. An existing node is not changed.

        Raises:
            NodeExists: it exists, and `exist_ok` is false.
        """
        rules.check_path(path)
        engine = await self._core.opened()
        await engine.create_node(path, config or NodeConfig(), exist_ok=exist_ok)

    async def alter_node(self, path: str, config: NodeConfig) -> None:
        """Change a node's configuration; unset fields are left alone. Raises `NodeNotFound`."""
        rules.check_path(path)
        await (await self._core.opened()).alter_node(path, config)

    async def drop_node(self, path: str, *, force: bool = False) -> None:
        """Drop a node with its semaphores and detached sessions.

        Args:
            path: the node.
            force: drop it even when sessions are attached; they expire.

        Raises:
            NodeNotFound: the node does not exist.
            NodeBusy: sessions are attached, and `force` is false.
            InvalidArgument: the path is ``/default``.
        """
        rules.check_path(path)
        await (await self._core.opened()).drop_node(path, force=force)

    async def describe_node(self, path: str = DEFAULT_NODE) -> NodeDescription:
        """Describe a node. Raises `NodeNotFound`."""
        rules.check_path(path)
        return await self._read(f"node {path}", lambda engine: engine.describe_node(path))

    async def list_nodes(self) -> Sequence[str]:
        """Return the paths of all nodes, sorted."""
        return await self._read("the list of nodes", lambda engine: engine.list_nodes())

    async def list_semaphores(
        self, path: str = DEFAULT_NODE, *, owners: bool = False, waiters: bool = False
    ) -> Sequence[SemaphoreDescription]:
        """Return all semaphores of a node, including mutexes and elections, sorted by name.

        Raises:
            NodeNotFound: there is no such node.
        """
        rules.check_path(path)
        found = await self._read(
            f"the semaphores on {path}",
            lambda engine: engine.list_semaphores(path, owners=owners, waiters=waiters),
        )
        return [semaphore_with_identities(each) for each in found]

    async def describe_semaphore(
        self, name: str, path: str = DEFAULT_NODE, *, owners: bool = True, waiters: bool = True
    ) -> SemaphoreDescription:
        """Describe a semaphore, without a session.

        Raises:
            NodeNotFound, SemaphoreNotFound: the node or the semaphore does not exist.
        """
        rules.check_name(name, path)
        rules.check_path(path)
        found = await self._read(
            f"{name!r} on {path}",
            lambda engine: engine.describe_semaphore(path, name, owners=owners, waiters=waiters),
        )
        return semaphore_with_identities(found)

    async def list_sessions(self, path: str = DEFAULT_NODE) -> Sequence[SessionDescription]:
        """Return all sessions of a node, sorted by id. Raises `NodeNotFound`."""
        rules.check_path(path)
        found = await self._read(
            f"the sessions on {path}", lambda engine: engine.list_sessions(path)
        )
        return [session_with_identity(each) for each in found]

    async def end_session(self, path: str, session_id: int) -> bool:
        """Expire a session; return false if it does not exist."""
        rules.check_path(path)
        return await (await self._core.opened()).end_session(path, session_id)

    async def evict(self, path: str, name: str, order_id: int) -> bool:
        """Take one request out of a queue; return false if it is not there.

        Its owner loses the lease (`LeaseLost`) when the notification arrives, at the latest when it
        releases. Until then it still considers the lease held.

        Raises:
            NodeNotFound, SemaphoreNotFound: the node or the semaphore does not exist. A mutex
                without a holder or waiter does not exist.
        """
        rules.check_path(path)
        rules.check_name(name, path)
        return await (await self._core.opened()).evict(path, name, order_id)
