"""The beginning of a session: attached, and proven to live."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tenure.engines.native.calls import Call, ConnectionGone
from tenure.errors import EngineError, EngineUnavailable, TenureError

if TYPE_CHECKING:
    from tenure.engines.native.link import Link
    from tenure.engines.native.session import NativeSession

__all__ = ["attach"]


async def attach(link: Link, session: NativeSession) -> None:
    """Attach a session for the first time.

    Raises:
        what `Engine.attach` raises. Then, and when it is cancelled, no session is left behind
        that was not there before.
    """
    rid = link.next_rid()  # one, for as often as it is asked
    call: Call | None = None
    link.add(session)
    refusals = 0
    try:
        while True:
            connection = await link.connected()
            call = session.ask_to_attach(rid, connection)
            await asyncio.wait([call.future])
            error = call.future.exception()
            if error is None:
                break
            if isinstance(error, ConnectionGone):
                continue
            refusals += 1
            if not _ask_elsewhere(link, error, refusals):
                raise error
            link.elsewhere(connection, str(error))
        await _until_proven(session)
    except BaseException:
        session.abandon(call)
        raise


def _ask_elsewhere(link: Link, error: BaseException, refusals: int) -> bool:
    """Return true to try another server: this one is the reason, and no session needs it."""
    return (
        isinstance(error, EngineError | EngineUnavailable)
        and refusals < len(link.address.endpoints)
        and len(link.sessions) == 1
    )


async def _until_proven(session: NativeSession) -> None:
    """Return when there is a proof that is not old already: the answer may have been long."""
    window = session.window
    try:
        async with asyncio.timeout(window):
            while not session.is_fresh():
                if session.why_over is not None:
                    raise _lost(session)
                session.look.clear()
                session.renew()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(window / 6):
                        await session.look.wait()
    except TimeoutError:
        raise EngineUnavailable(
            f"the server attached the session on {session.node}, and could not prove within "
            f"{window:g} s that it lives: its store may be out of reach",
            node=session.node,
        ) from None


def _lost(session: NativeSession) -> TenureError:
    """Return the error for a session that ended before its first proof."""
    assert session.why_over is not None
    if session.is_resumed:
        return session.why_over
    return EngineUnavailable(
        f"the server attached a session on {session.node}, and it was over before a client could "
        f"prove that it lives: {session.why_over}",
        node=session.node,
    )
