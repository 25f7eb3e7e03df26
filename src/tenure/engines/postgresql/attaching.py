"""Attaching of new sessions, and taking over of existing ones."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from tenure.core import refusals, rules
from tenure.engines._kit.session import received
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.postgresql import values
from tenure.engines.postgresql.session import PostgresSession, PostgresSessionEngine
from tenure.engines.postgresql.statements import Call, Refusal
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.identity import retold
from tenure.model import Liveness

__all__ = ["attach", "new_token"]


class AttachEngine(PostgresSessionEngine, Protocol):
    """The engine, as `attach` uses it."""

    def admit(self, session: PostgresSession) -> bool:
        """Add an attached session; false if the engine has been closed."""
        ...

    def limit(
        self, answer: asyncio.Future[Any], kind: type[TenureError], path: str
    ) -> asyncio.TimerHandle:
        """Fail an answer that takes too long; returns the timer, to be cancelled."""
        ...


def new_token(number: int) -> str:
    """Return the token of a new attachment; it is unique."""
    return f"{number}.{secrets.token_hex(8)}"


async def attach(engine: AttachEngine, how: Attach, events: SessionEvents) -> PostgresSession:
    """Attach a session as the contract says."""
    rules.check_path(how.node)
    if how.session_id is not None:
        return await _take_over(engine, how, how.session_id, events)
    rules.check_window(how.recovery_window, how.node)
    rules.check_description(how.description, how.node)
    rules.check_key(how.key, how.node)
    token = new_token(1)
    at = engine.clock.now()
    session = await _attached(
        engine,
        how,
        lambda reply: PostgresSession(engine, how, events, reply[1], token, how.recovery_window),
        "attach",
        *(how.node, token, engine.channel, how.recovery_window),
        *(values.to_text(how.description), how.liveness),
        *(how.key.hex(), rules.SESSIONS_PER_NODE),
    )
    events.proven(at)
    return session


async def _take_over(
    engine: AttachEngine, how: Attach, number: int, events: SessionEvents
) -> PostgresSession:
    if how.adopt:
        rules.check_window(how.recovery_window, how.node)
    secret = secrets.token_hex(8)
    former = ""

    def made(reply: Any) -> PostgresSession:
        nonlocal former
        _, token, window, text, mine = reply
        former = values.from_text(text)
        if mine is not None:  # the former attachment is one of this engine
            engine.push_all([f"T {number} {mine}"])
        return PostgresSession(engine, how, events, number, token, window)

    session = await _attached(
        engine,
        how,
        made,
        "take_over",
        *(how.node, number, secret, engine.channel, how.key.hex()),
        how.recovery_window if how.adopt else None,
    )

    async def begin() -> float:
        at = engine.clock.now()
        await session.begin(how.description if how.adopt else retold(former, how.description))
        return at

    events.proven(await session.take_over(None if how.assume_dead else session.remaining, begin))
    return session


async def _attached(
    engine: AttachEngine,
    how: Attach,
    make: Callable[[Any], PostgresSession],
    function: str,
    *args: Any,
) -> PostgresSession:
    """Send the call that attaches; the answer creates the session at once."""
    made: asyncio.Future[PostgresSession] = engine.loop.create_future()

    def answered(reply: Any) -> None:
        if isinstance(reply, Refusal) or reply[0] != "ok":
            if not made.done():
                made.set_exception(_attach_error(engine, how, reply))
            return
        session = make(reply)
        if engine.admit(session) and not made.done():
            made.set_result(session)
        else:
            session.abandon()  # the caller was cancelled, or the engine closed

    engine.send(Call(function, args, answered))
    late = engine.limit(made, EngineUnavailable, how.node)
    try:
        return await received(made)
    finally:
        late.cancel()


def _attach_error(engine: AttachEngine, how: Attach, reply: Any) -> TenureError:
    number = how.session_id
    if isinstance(reply, Refusal):
        return EngineError(
            f"the session on {how.node} could not be attached: {engine.url} refused it: {reply}",
            node=how.node,
        )
    if reply[0] == "no node":
        return refusals.node_not_found(how.node)
    if reply[0] == "full":
        return refusals.node_full(how.node)
    assert number is not None
    if reply[0] == "refused":
        liveness: Liveness = "window" if reply[1] == "window" else "process"
        try:
            rules.check_resumable(liveness, bytes.fromhex(reply[2]), how.key, how.node, number)
        except TenureError as error:
            return error
    return rules.not_there_to_resume(how.node, number)
