"""Reattaching of sessions after a lost connection, and after a loss of data.

A store that has lost data may know a session without its latest requests, or with requests that
were released. So what it knows is compared with what this program knows, before anything is proven.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tenure.engines._kit.commands.attaching import new_token
from tenure.engines.postgresql.connecting import OpenedConnections
from tenure.engines.postgresql.session import PostgresSession

__all__ = ["reattach"]

_MOST_TOKENS = 8
"""Tokens of a session that are remembered: a store that has lost data may have an earlier one."""


async def reattach(
    opened: OpenedConnections,
    schema: str,
    channel: str,
    sessions: Sequence[PostgresSession],
    epoch: str,
    now: Callable[[], float],
) -> str:
    """Attach sessions again; returns the store's epoch.

    Args:
        opened: the connections.
        schema: of the store.
        channel: for the events of the sessions.
        sessions: all of the engine.
        epoch: at which the store had everything that this program knows.
        now: the clock.
    """
    who = []
    for session in sessions:
        token = new_token(session.attach_number)
        session.tokens.append(token)
        who.append([session.id, session.tokens[:-1], token])
    at = now()
    found, answers = await opened.call(f"{schema}.reattach", channel, json.dumps(who), epoch)
    for session, answer in zip(sessions, answers, strict=True):
        known = isinstance(answer, list)  # the requests of a session in a store that lost data
        if session.reattached(["ok" if known else answer]):
            session.tokens = session.tokens[-_MOST_TOKENS:]
            if known:
                session.compare(answer)
            session.prove(at)
    return str(found)
