"""Attaching of new sessions, and taking over of existing ones."""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tenure.core import refusals, rules
from tenure.engines._kit.commands.administration import CommandAdministration
from tenure.engines._kit.commands.attachment import SessionParameters
from tenure.engines._kit.commands.replies import first_word, settle, text
from tenure.engines._kit.commands.session import CommandSession
from tenure.engines._kit.session import received, restores_default
from tenure.engines.contract import Attach, Orphan, SessionEvents
from tenure.errors import EngineError, EngineUnavailable, TenureError
from tenure.identity import retold
from tenure.model import Liveness

S = TypeVar("S", bound=CommandSession)


class TakenOver(NamedTuple):
    """A session that was taken over.

    Attributes:
        token: the token of the new attachment.
        window: its recovery window in seconds.
        description: its former description.
    """

    token: str
    window: float
    description: str


def new_token(number: int) -> str:
    """Return a unique token for a new attachment."""
    return f"{number}.{secrets.token_hex(8)}"


class CommandAttaching(CommandAdministration, Generic[S]):
    """The part of an engine that attaches sessions.

    The reply to an attach begins with "ok", or with one of these: "no node"; "full", for a node at
    its limit; "refused", with the session's liveness and key; or another word, without the session.
    """

    # Defined by each engine

    @abstractmethod
    def send_attach(self, how: Attach, token: str, answered: Callable[[Any], None]) -> None:
        """Attach a new session; the reply has its id after "ok"."""

    @abstractmethod
    def send_take_over(
        self, how: Attach, number: int, secret: str, answered: Callable[[Any], None]
    ) -> None:
        """Take over a session; the secret is that of its new token."""

    @abstractmethod
    def read_take_over(self, number: int, reply: Any) -> TakenOver:
        """Decode the reply to a successful takeover."""

    @abstractmethod
    def send_end(self, number: int, tokens: Sequence[str], answered: Callable[[Any], None]) -> None:
        """End a session that has one of these tokens."""

    @abstractmethod
    def new_session(self, given: SessionParameters) -> S:
        """Create the object of the attached session."""

    @abstractmethod
    def admit(self, session: S) -> bool:
        """Add an attached session; return false if the engine has been closed."""

    @abstractmethod
    def close_after(self, ending: asyncio.Future[Any]) -> None:
        """Have the engine's closing wait for the end of an abandoned attach."""

    def check_window(self, how: Attach) -> None:
        """Raise `InvalidArgument` if the recovery window is not allowed."""
        rules.check_window(how.recovery_window, how.node)

    async def end_orphan(self, orphan: Orphan) -> None:
        """End a session whose program is dead, by the tokens of its attachment."""
        self.check_open()
        ended: asyncio.Future[Any] = self.loop.create_future()
        tokens = orphan.credential.split(",")
        self.send_end(orphan.session_id, tokens, partial(settle, ended))
        late = self.limit(ended, EngineError, orphan.node)
        try:
            reply = await ended
        finally:
            late.cancel()
        if isinstance(reply, Exception):
            raise EngineError(
                f"{self.url} did not end the session on {orphan.node}: {reply}", node=orphan.node
            )

    # Attaching

    @restores_default
    async def attach(self, how: Attach, events: SessionEvents) -> S:
        """Attach a session, as defined by the contract."""
        self.check_open()
        rules.check_path(how.node)
        if how.session_id is not None:
            return await self._take_over(how, how.session_id, events)
        self.check_window(how)
        rules.check_description(how.description, how.node)
        rules.check_key(how.key, how.node)
        token = new_token(1)

        def made(reply: Any) -> S:
            given = SessionParameters(how, events, reply[1], token, how.recovery_window)
            return self.new_session(given)

        at = self.clock.now()
        session = await self._attached(how, made, partial(self.send_attach, how, token))
        events.proven(at)
        return session

    async def _take_over(self, how: Attach, number: int, events: SessionEvents) -> S:
        if how.adopt:
            self.check_window(how)
        secret = secrets.token_hex(8)
        former = ""

        def made(reply: Any) -> S:
            nonlocal former
            token, window, former = self.read_take_over(number, reply)
            return self.new_session(SessionParameters(how, events, number, token, window))

        send = partial(self.send_take_over, how, number, secret)
        session = await self._attached(how, made, send)

        async def begin() -> float:
            at = self.clock.now()
            await session.begin(how.description if how.adopt else retold(former, how.description))
            return at

        remaining = None if how.assume_dead else session.remaining
        events.proven(await session.take_over(remaining, begin))
        return session

    async def _attached(
        self,
        how: Attach,
        make: Callable[[Any], S],
        send: Callable[[Callable[[Any], None]], None],
    ) -> S:
        """Send the command that attaches; the answer creates the session at once."""
        made: asyncio.Future[S] = self.loop.create_future()

        def answered(reply: Any) -> None:
            if first_word(reply) != "ok":
                if not made.done():
                    made.set_exception(self._attach_error(how, reply))
                return
            session = make(reply)
            if self.admit(session) and not made.done():
                made.set_result(session)
                return
            session.abandon()  # the caller has an error, or the engine is being closed
            if not made.done():
                made.set_exception(EngineUnavailable(f"{self.url} was closed", node=how.node))

        send(answered)
        late = self.limit(made, EngineUnavailable, how.node)
        try:
            return await received(made)
        except asyncio.CancelledError:
            self.close_after(made)
            raise
        finally:
            late.cancel()

    def _attach_error(self, how: Attach, reply: Any) -> TenureError:
        number = how.session_id
        if isinstance(reply, Exception):
            return EngineError(
                f"the session on {how.node} could not be attached: {self.url} refused it: {reply}",
                node=how.node,
            )
        word = first_word(reply)
        if word == "no node":
            return refusals.node_not_found(how.node)
        if word == "full":
            return refusals.node_full(how.node)
        assert number is not None
        if word == "refused":
            liveness: Liveness = "window" if text(reply[1]) == "window" else "process"
            key = reply[2] if isinstance(reply[2], bytes) else bytes.fromhex(reply[2])
            try:
                rules.check_resumable(liveness, key, how.key, how.node, number)
            except TenureError as error:
                return error
        return rules.not_there_to_resume(how.node, number)
