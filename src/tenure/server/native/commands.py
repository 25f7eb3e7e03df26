"""Commands of the native protocol without a session.

Each is one call of the engine, and its answer is one message. Reads are in
`tenure.server.native.reads`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from tenure.engines.contract import Engine
from tenure.server.audit import Audit
from tenure.server.auth.identity import Identity
from tenure.wire.messages import (
    AlterNode,
    CreateNode,
    Done,
    DropNode,
    EndSession,
    Evict,
    ReadStoreTime,
    StoreTime,
)


async def run_audited(
    engine: Engine, message: Any, audit: Audit, identity: Identity, peer: str
) -> Struct:
    """Carry out a command, and record it if it is an administrative action.

    Args:
        engine: the store as the client may use it.
        message: the command.
        audit: the server's audit log.
        identity: the client's identity.
        peer: the client's address.

    Raises the engine's errors.
    """
    command = _COMMANDS[type(message)]
    describe = _AUDITED.get(type(message))
    if describe is None:
        return await command(engine, message)
    event, facts = describe(message)
    with audit.action(event, identity, peer, **facts) as entry:
        answer = await command(engine, message)
        if isinstance(answer, Done) and answer.found is False:
            entry["outcome"] = None  # there was nothing to end
        return answer


async def _create_node(engine: Engine, message: CreateNode) -> Struct:
    await engine.create_node(message.path, message.config.model(), exist_ok=message.exist_ok)
    return Done(message.rid)


async def _alter_node(engine: Engine, message: AlterNode) -> Struct:
    await engine.alter_node(message.path, message.config.model())
    return Done(message.rid)


async def _drop_node(engine: Engine, message: DropNode) -> Struct:
    await engine.drop_node(message.path, force=message.force)
    return Done(message.rid)


async def _end_session(engine: Engine, message: EndSession) -> Struct:
    return Done(message.rid, await engine.end_session(message.path, message.session_id))


async def _evict(engine: Engine, message: Evict) -> Struct:
    return Done(message.rid, await engine.evict(message.path, message.name, message.order_id))


async def _read_store_time(engine: Engine, message: ReadStoreTime) -> Struct:
    return StoreTime(message.rid, await engine.store_time())


_COMMANDS: dict[type[Struct], Callable[[Engine, Any], Awaitable[Struct]]] = {
    AlterNode: _alter_node,
    CreateNode: _create_node,
    DropNode: _drop_node,
    EndSession: _end_session,
    Evict: _evict,
    ReadStoreTime: _read_store_time,
}

_AUDITED: dict[type[Struct], Callable[[Any], tuple[str, dict[str, object]]]] = {
    AlterNode: lambda it: ("node altered", {"node": it.path}),
    CreateNode: lambda it: ("node created", {"node": it.path}),
    DropNode: lambda it: ("node dropped", {"node": it.path, "force": it.force}),
    EndSession: lambda it: ("session ended", {"node": it.path, "session": it.session_id}),
    Evict: lambda it: (
        "request evicted",
        {"node": it.path, "name": it.name, "order_id": it.order_id},
    ),
}

COMMANDS = frozenset(_COMMANDS)
"""Messages that this module answers."""
