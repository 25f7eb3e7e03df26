"""A session's attachment: the token that it is known by, its proof, and its end, whoever brings it.

`RedisSession` adds what a program does through it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tenure.core import rules
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.redis.commands import Call, Refusal
from tenure.engines.redis.scripts import SCRIPTS
from tenure.errors import (
    EngineError,
    InvalidArgument,
    LeaseReleased,
    SemaphoreBusy,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
)

if TYPE_CHECKING:
    from tenure.engines.redis.engine import RedisEngine

__all__ = ["Attachment", "ignore", "not_found", "settle"]

_RENEW = SCRIPTS["renew"]

_log = logging.getLogger("tenure")


class Attachment:
    """What there is of a session without its requests.

    Attributes:
        token: what this attachment is known by, "<attach number>.<secret>"; every command has it.
        tokens: those that it may have in the store by now, while it is attached anew.
        over: it has ended or been closed here; nothing is told about it any more.
        look: set when something has happened that a take-over waits for.
        put_by: what was pushed while its take-over is not complete; ``None`` when it is.
    """

    def __init__(
        self,
        engine: RedisEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        token: str,
        window: float,
    ) -> None:
        self.id = number
        self.path = how.node
        self.token = token
        self.tokens = [token]
        self.window = window
        self.events = events
        self.over = False
        self.look = asyncio.Event()
        self.put_by: list[tuple[bytes, bytes]] | None = None if how.session_id is None else []
        self.loop = engine.loop
        self._took_over = how.session_id is not None
        self._why_over: TenureError | None = None
        self._engine = engine
        self._send = engine.link.send
        self._now = engine.clock.now

    @property
    def attach_number(self) -> int:
        return int(self.token.partition(".")[0])

    @property
    def seen(self) -> int:
        """The highest order id that this program has come across."""
        return self._engine.seen

    def told(self, message: bytes) -> None:
        """What would have been pushed came with an answer."""
        self._engine.told(message)

    # Proof

    def renew(self) -> None:
        if self.over:
            return
        engine = self._engine
        if not engine.is_in_loop():
            engine.renewer.renew(self)
        elif engine.link.is_up:  # or else attaching anew is the proof
            self._send(Call(_RENEW, self, (), partial(self._renewed, self._now())))

    def _renewed(self, at: float, reply: Any) -> None:
        if reply == 0 and not self.over:
            self.events.proven(at)
        else:
            error = self._wrong(reply)
            if error is not None and not self.over:
                _log.warning("the session on %s could not be renewed: %s", self.path, error)

    # The end

    async def close(self) -> None:
        await self._leave("close")

    async def detach(self) -> None:
        await self._leave("detach")

    async def _leave(self, how: str) -> None:
        if self.over:
            return
        self._forget()
        left: asyncio.Future[Any] = self.loop.create_future()
        self._send_leave(how, partial(settle, left))
        reply = await left
        if isinstance(reply, Refusal):
            raise self._failure(reply)

    def _send_leave(self, how: str, answered: Callable[[Any], None]) -> None:
        self._send(Call(SCRIPTS["leave"], self, (how, *self.tokens), answered))

    def abandon(self) -> None:
        """Nobody has heard of it: it ends, or is detached again if it was taken over."""
        if not self.over:
            how = "detach" if self._took_over else "close"
            self._forget()
            self._send_leave(how, ignore)

    def end(self, why: str) -> None:
        """The store says that it is over."""
        self._end(SessionExpired(f"the session on {self.path} is over: {why}", node=self.path))

    def superseded(self) -> None:
        """Another attachment has taken over. It is told so, and the store then that it was."""
        if not self.over:
            self._end(rules.taken_over(self.path))
            self._send(Call(SCRIPTS["acknowledge"], None, (self.id, *self.tokens), ignore))

    def stop(self, error: TenureError) -> None:
        """The engine is being closed."""
        self.over = True
        self._why_over = error
        self.look.set()

    def _end(self, error: SessionExpired) -> None:
        if not self.over:
            self._why_over = error
            self._forget()
            self.events.ended(error)

    def _forget(self) -> None:
        self.over = True
        self.look.set()
        self._engine.forget(self)

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.over:
            raise self._why_over or self._gone()

    def _gone(self) -> SessionExpired:
        return SessionExpired(f"the session on {self.path} is over", node=self.path)

    # Answers that are none

    def _wrong(self, reply: Any) -> TenureError | None:
        """Act on an answer that says that the session is over; returns the error, if it is one."""
        if isinstance(reply, Refusal):
            return self._failure(reply)
        if isinstance(reply, list) and reply and isinstance(reply[0], bytes):
            if reply[0] == b"error":
                return self._failure(reply[1].decode())
            if reply[0] == b"gone":
                self.end("the store does not know it any more")
                return self._why_over or self._gone()
            if reply[0] == b"taken":
                self.superseded()
                return self._why_over or self._gone()
        return None

    def _failure(self, refusal: Refusal | str) -> EngineError:
        return EngineError(
            f"{self._engine.url} refused a command for {self.path}: {refusal}", node=self.path
        )

    def _error(self, code: bytes, reply: list[Any], name: str, count: int) -> TenureError:
        """The error for what a script found wrong; the rules word it."""
        try:
            if code == b"missing":
                raise not_found(name, self.path)
            if code == b"kind":
                rules.check_kind(not reply[1], bool(reply[1]), self.path, name)
            elif code == b"count":
                rules.check_count(count, int(reply[1]), self.path, name)
            elif code == b"shrink":
                rules.check_shrink(
                    count, int(reply[2]), int(reply[3]), self.path, reply[1].decode()
                )
            elif code == b"busy":
                raise SemaphoreBusy(
                    f"{name!r} on {self.path} has owners or waiters; release it, or delete it by "
                    "force, which takes it from them",
                    node=self.path,
                    name=name,
                )
            elif code == b"full":
                raise InvalidArgument(
                    f"the node {self.path} has {rules.SEMAPHORES_PER_NODE} semaphores, which is "
                    "the most",
                    node=self.path,
                    name=name,
                )
            elif code == b"exists":
                raise SemaphoreExists(
                    f"{name!r} on {self.path} exists already, with limit {int(reply[1])}",
                    node=self.path,
                    name=name,
                    limit=int(reply[1]),
                )
            elif code == b"released":
                raise LeaseReleased(f"the request on {self.path} is over", node=self.path)
        except TenureError as error:
            return error
        return EngineError(f"{self._engine.url} answered {reply!r}", node=self.path, name=name)


def not_found(name: str, path: str) -> SemaphoreNotFound:
    """The error for a name that no semaphore has."""
    return SemaphoreNotFound(
        f"there is no semaphore {name!r} on {path}; create it first", node=path, name=name
    )


def ignore(reply: object) -> None:
    """Nobody waits for this answer."""


def settle(future: asyncio.Future[Any], reply: Any) -> None:
    """Give an answer to whoever waits for it, if somebody does."""
    if not future.done():
        future.set_result(reply)
