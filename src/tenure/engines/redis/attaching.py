"""Attaching of new sessions, and taking over of existing ones, as scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tenure.core import rules
from tenure.engines._kit.commands.attaching import AttachEngine, Attaching, TakenOver
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.redis.commands import SCRIPTS, Script, ScriptCall, Word, pack
from tenure.engines.redis.session import ConfirmedSession, RedisSession, RedisSessionEngine
from tenure.errors import InvalidArgument

__all__ = ["RedisAttachEngine", "RedisAttaching"]


class RedisAttachEngine(RedisSessionEngine, AttachEngine, Protocol):
    """The engine, as seen by `RedisAttaching`."""


class _AttachCall(ScriptCall):
    """Call that attaches, with the engine's known epoch at the time of sending."""

    __slots__ = ("_engine",)

    def __init__(
        self,
        engine: RedisSessionEngine,
        script: Script,
        args: tuple[Word, ...],
        answered: Callable[[Any], None],
    ) -> None:
        super().__init__(script, None, args, answered)
        self._engine = engine

    def packed(self, meta: str) -> bytes:
        return pack(("EVALSHA", self.script.digest, 1, meta, *self.args, self._engine.epoch))


class RedisAttaching(Attaching[RedisSession]):
    """Attaching to one engine, with no window longer than `longest` seconds."""

    _engine: RedisAttachEngine

    def __init__(self, engine: RedisAttachEngine, longest: float) -> None:
        """Attach sessions to this engine."""
        super().__init__(engine)
        self._longest = longest

    def check_window(self, how: Attach) -> None:
        """Raise `InvalidArgument` if the window is invalid, or longer than the namespace allows."""
        super().check_window(how)
        if how.recovery_window > self._longest:
            raise InvalidArgument(
                f"{self._engine.url}: a recovery window of {how.recovery_window:g} s is longer "
                f"than the longest one of the namespace, {self._longest:g} s. Write ?max_window="
                f"{how.recovery_window:g} in the URL of each program that uses the namespace",
                node=how.node,
            )

    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session."""
        self._send(
            "attach",
            (
                *(how.node, token, self._engine.channel, int(how.recovery_window * 1e6)),
                *(how.description, how.liveness, how.key, rules.SESSIONS_PER_NODE),
            ),
            answered,
        )

    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take over a session."""
        window = int(how.recovery_window * 1e6) if how.adopt else ""
        place = (how.node, number, secret, self._engine.channel, how.key)
        self._send("takeover", (*place, window), answered)

    def _send(self, script: str, args: tuple[Word, ...], answered: Callable[[Any], None]) -> None:
        call = _AttachCall(self._engine, SCRIPTS[script], args, answered)
        self._engine.reconnector.send(call)

    def read_take_over(self, number: int, reply: Any) -> TakenOver:  # noqa: ARG002
        """Decode the reply to a successful takeover."""
        return TakenOver(reply[1].decode(), reply[2] / 1e6, reply[3].decode())

    def new_session(
        self, how: Attach, events: SessionEvents, number: int, token: str, window: float
    ) -> RedisSession:
        """Create the object of the attached session."""
        kind = RedisSession if self._engine.confirmer is None else ConfirmedSession
        return kind(self._engine, how, events, number, token, window)
