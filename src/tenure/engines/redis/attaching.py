"""Attaching of new sessions, and taking over of existing ones."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from tenure.core import refusals, rules
from tenure.engines._kit.commands.replies import ignore
from tenure.engines._kit.session import received
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.redis.commands import SCRIPTS, Refusal, Script, ScriptCall, Word, pack
from tenure.engines.redis.session import ConfirmedSession, RedisSession, RedisSessionEngine
from tenure.errors import EngineError, EngineUnavailable, InvalidArgument, TenureError
from tenure.identity import retold
from tenure.model import Liveness

__all__ = ["attach", "new_token"]


class AttachEngine(RedisSessionEngine, Protocol):
    """The engine, as `attach` uses it."""

    def admit(self, session: RedisSession) -> bool:
        """Add an attached session; false if the engine has been closed."""
        ...

    def limit(
        self, answer: asyncio.Future[Any], kind: type[TenureError], path: str
    ) -> asyncio.TimerHandle:
        """Fail an answer that takes too long; returns the timer, to be cancelled."""
        ...


class _AttachCall(ScriptCall):
    """Call that attaches, with the epoch that the engine knows when this is sent."""

    __slots__ = ("_engine",)

    def __init__(self, engine: AttachEngine, script: Script, *args: Word) -> None:
        super().__init__(script, None, args, ignore)
        self._engine = engine

    def packed(self, meta: str) -> bytes:
        return pack(("EVALSHA", self.script.digest, 1, meta, *self.args, self._engine.epoch))


def new_token(number: int) -> str:
    """Return the token of a new attachment; it is unique."""
    return f"{number}.{secrets.token_hex(8)}"


async def attach(
    engine: AttachEngine, longest: float, how: Attach, events: SessionEvents
) -> RedisSession:
    """Attach a session as the contract says. No window is longer than `longest` seconds."""
    rules.check_path(how.node)
    if how.session_id is not None:
        return await _take_over(engine, longest, how, how.session_id, events)
    window = _window(engine, longest, how)
    rules.check_description(how.description, how.node)
    rules.check_key(how.key, how.node)
    token = new_token(1)
    at = engine.clock.now()
    session = await _attached(
        engine,
        how,
        lambda reply: _kind(engine)(engine, how, events, reply[1], token, how.recovery_window),
        _AttachCall(
            engine,
            SCRIPTS["attach"],
            *(how.node, token, engine.channel, window, how.description, how.liveness),
            *(how.key, rules.SESSIONS_PER_NODE),
        ),
    )
    events.proven(at)
    return session


def _window(engine: AttachEngine, longest: float, how: Attach) -> int:
    """Return the recovery window in microseconds.

    Raises:
        InvalidArgument: it is not one, or longer than the longest one of the namespace.
    """
    rules.check_window(how.recovery_window, how.node)
    if how.recovery_window > longest:
        raise InvalidArgument(
            f"{engine.url}: a recovery window of {how.recovery_window:g} s is longer than the "
            f"longest one of the namespace, {longest:g} s. Write ?max_window="
            f"{how.recovery_window:g} in the URL of each program that uses the namespace",
            node=how.node,
        )
    return int(how.recovery_window * 1e6)


async def _take_over(
    engine: AttachEngine, longest: float, how: Attach, number: int, events: SessionEvents
) -> RedisSession:
    secret = secrets.token_hex(8)
    former = ""

    def made(reply: Any) -> RedisSession:
        nonlocal former
        former = reply[3].decode()
        return _kind(engine)(engine, how, events, number, reply[1].decode(), reply[2] / 1e6)

    session = await _attached(
        engine,
        how,
        made,
        _AttachCall(
            engine,
            SCRIPTS["takeover"],
            *(how.node, number, secret, engine.channel, how.key),
            _window(engine, longest, how) if how.adopt else "",
        ),
    )

    async def begin() -> float:
        at = engine.clock.now()
        await session.begin(how.description if how.adopt else retold(former, how.description))
        return at

    events.proven(await session.take_over(None if how.assume_dead else session.remaining, begin))
    return session


def _kind(engine: AttachEngine) -> type[RedisSession]:
    return RedisSession if engine.confirmer is None else ConfirmedSession


async def _attached(
    engine: AttachEngine, how: Attach, make: Callable[[Any], RedisSession], call: ScriptCall
) -> RedisSession:
    """Send the call that attaches; the answer creates the session at once."""
    made: asyncio.Future[RedisSession] = engine.loop.create_future()

    def answered(reply: Any) -> None:
        if isinstance(reply, Refusal) or reply[0] != b"ok":
            if not made.done():
                made.set_exception(_attach_error(engine, how, reply))
            return
        session = make(reply)
        if engine.admit(session) and not made.done():
            made.set_result(session)
        else:
            session.abandon()  # the caller was cancelled, or the engine closed

    call.answered = answered
    engine.reconnector.send(call)
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
    if reply[0] == b"no node":
        return refusals.node_not_found(how.node)
    if reply[0] == b"full":
        return refusals.node_full(how.node)
    assert number is not None
    if reply[0] == b"refused":
        liveness: Liveness = "window" if reply[1] == b"window" else "process"
        try:
            rules.check_resumable(liveness, reply[2], how.key, how.node, number)
        except TenureError as error:
            return error
    return rules.not_there_to_resume(how.node, number)
