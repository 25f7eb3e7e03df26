"""Leave a session: close it, detach it, or yield it to the client that took it over.

A lease is revoked only if nobody else may have attached the session meanwhile: one that can be
taken over is first given back, by a compare with its key, which also says that nobody is attached.
What is not answered is tried again for a window; then there is nothing left to end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tenure.engines.etcd import wire
from tenure.engines.etcd.keys import Record
from tenure.engines.etcd.members import Lost, Refused, failure

if TYPE_CHECKING:
    from tenure.engines.etcd.session import EtcdSession

__all__ = ["acknowledge", "leave"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


async def leave(session: EtcdSession, *, detach: bool) -> None:
    """End a session of which nothing is told any more, or leave it to its window."""
    if (detach or session.resumable) and not await _give_back(session):
        return
    if not detach:
        await session.engine.revoke(session.id, session.window)


async def _give_back(session: EtcdSession) -> bool:
    """Mark the session as detached; false if another client has attached it meanwhile."""
    engine, record = session.engine, session.record
    free = Record(
        *(record.token, False, record.window, record.description, record.liveness, record.key)
    )
    then = (wire.put(session.key, free.value(), session.id), wire.delete(session.believes))
    until = engine.clock.now() + session.window
    pause = _FIRST_PAUSE
    while engine.clock.now() < until:
        try:
            await engine.keep_alive(session)
            answer = await engine.txn(
                wire.txn((session.mine,), then, (session.get,)), session.patience
            )
        except Lost:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        except Refused as refused:
            if refused.no_lease:
                return False
            raise failure(engine.url, refused, node=session.path) from refused
        else:
            if answer.ok:
                return True
            kv = answer.parts[0].first
            if kv is None or not session.is_mine(kv):
                await acknowledge(session)
                return False
            if not Record.read(kv.value).attached:
                return True  # an earlier attempt has done it
            session.became(kv.version)
    return False


async def acknowledge(session: EtcdSession) -> None:
    """Tell the store that this attachment does not believe any more."""
    request = wire.txn((), (wire.delete(session.believes),))
    await session.engine.eventually(request, session.window, "an acknowledgement")
