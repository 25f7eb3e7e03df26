"""Session that consists of one or more sessions on the server: its members.

On YDB a session has at most one request for a name. A further request uses a *sibling*, an
additional session. Rules:

* The end of one member ends all. The session's proof is the oldest proof of its members.
* A sibling without requests is reused. It is ended when it has been idle for a window.
* A request that is leaving its queue keeps its member until the server has confirmed that.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from tenure.background import Ending
from tenure.engines._kit.operations import OperationQueues
from tenure.engines._kit.session import PlainSession
from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.database import Database
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.protocol import YdbOperation
from tenure.errors import (
    AuthenticationFailed,
    EngineUnavailable,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.wire.ydb import Message


class GroupSession(PlainSession, ABC):
    """Life cycle of a session and of its members.

    Attributes:
        database: shared by all sessions of the engine.
        fencing: whether the order id of a grant is required.
        main: the session on the server with the id of this session.
        siblings: the other sessions on the server.
        queues: the operation queues of the names.
    """

    def __init__(self, database: Database, how: Attach, events: SessionEvents) -> None:
        super().__init__(how, events, 0, how.recovery_window)
        self.database = database
        self.now = database.clock.now
        self.fencing = database.address.fencing
        self.queues = OperationQueues()
        self._loop = asyncio.get_running_loop()
        self._step = 0
        self._proven = float("-inf")
        self._broken = False
        self._finishing: Ending | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._first: asyncio.Future[None] | None = self._loop.create_future()
        self._failure = "it did not answer"
        self.main = self._new_member(how.description, how.key or secrets.token_bytes(16))
        self.siblings: list[Member] = []

    @property
    def all(self) -> list[Member]:
        """The main member and its siblings."""
        return [self.main, *self.siblings]

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return self.main.protocol.seq_no

    @property
    def failure(self) -> EngineUnavailable | None:
        """Cause of a lost contact; ``None`` while there is contact."""
        return EngineUnavailable(self._failure) if self._broken else None

    # Attaching

    async def attach(self) -> None:
        """Wait until the main member is attached. Raises as `Engine.attach`."""
        assert self._first is not None
        limit = self.database.address.connect_timeout
        try:
            async with asyncio.timeout(limit):
                await self._first
        except BaseException as error:
            self.stop(self._expired("it was never attached"))
            self.database.complete(self._end_members(2 * self.main.answer_timeout))
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(
                    f"no session on {self.path} at {self.database.address.url} within "
                    f"{limit:g} s: {self._failure}",
                    node=self.path,
                ) from None
            raise
        finally:
            self._first = None

    def new_sibling(self) -> Member:
        """Add a member. Its operations are sent when it is attached.

        Raises:
            Unsupported: the maximum is reached.
        """
        most = self.database.address.siblings
        if len(self.siblings) >= most:
            raise Unsupported(
                f"the session on {self.path} has a request in each of {most + 1} sessions on the "
                f"server, and YDB allows one for a name in each. Raise siblings={most} in the URL, "
                "use several sessions, or tenure:// which has no such bound.",
                node=self.path,
            )
        member = self._new_member(f"sibling of session {self.main.id}", secrets.token_bytes(16))
        self.siblings.append(member)
        return member

    def _new_member(self, description: str, key: bytes) -> Member:
        path = self.database.path_of(self.path)
        return Member(self.database, path, self.window, description, key, self.now, self)

    # MemberEvents

    def member_started(self, member: Member) -> None:
        """Record that a member is attached, and report contact once all are."""
        if member is self.main:
            self.id = member.id
        else:
            self.database.siblings[member.id] = self.main.id
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._report_contact()

    def member_detached(self) -> None:
        """Report the loss of contact."""
        self._report_contact()

    def _report_contact(self) -> None:
        broken = any(member.detached for member in self.all)
        if broken != self._broken and not self.over:
            self._broken = broken
            if broken:
                self.events.detached(self.failure)
            else:
                self.events.attached()

    def member_proven(self) -> None:
        """Report a proof once it covers every member."""
        at = min(each.protocol.last_proof for each in self.all if each.id)
        if at > self._proven and not self.over:
            self._proven = at
            self.events.proven(at)

    def member_refused(self, member: Member, failure: Message) -> None:
        """Abandon a member that can never attach; otherwise record the reason."""
        self._failure = messages.reason(failure)
        if member.id:
            return
        error = errors.attach_error(self.path, failure)
        if error is None:
            return
        member.abandon()
        if member is self.main:
            self._fail_attach(error)
        else:
            self.sibling_failed(member, error)
            self._forget_sibling(member)

    def member_failed(self, member: Member, error: Exception) -> None:
        """Record why a member could not attach."""
        self._failure = str(error) or type(error).__name__
        if isinstance(error, AuthenticationFailed) and self._first is not None:
            member.abandon()
            self._fail_attach(error)

    def member_ended(self, member: Member, failure: Message | None) -> None:
        """End the session, because the server has ended a member."""
        if failure is None:
            self.database.siblings.pop(member.id, None)
            if member is not self.main:
                self._forget_sibling(member)
        elif self._end(errors.expired(self.path, failure)):
            self.database.complete(self._end_members(self.main.answer_timeout))

    def _fail_attach(self, error: TenureError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    @abstractmethod
    def sibling_failed(self, member: Member, error: TenureError) -> None:
        """Fail the requests of a sibling that cannot be attached."""

    def _forget_sibling(self, sibling: Member) -> None:
        if sibling in self.siblings:
            self.siblings.remove(sibling)
            self.queues.forget(sibling)
            self._report_contact()
            self.database.complete(sibling.finish())

    # Life

    def renew_members(self) -> None:
        """Request a proof of each member, and end siblings that have been idle for a window."""
        idle = self.now() - self.window
        for member in self.all:
            if member is not self.main and not member.names and member.idle_since < idle:
                member.stop()
            else:
                member.renew()

    async def close(self) -> None:
        """End the session."""
        await self.close_within(self.window)

    async def close_within(self, seconds: float) -> None:
        """Close like `close`, within a time; sessions that the server is not notified of expire."""
        await self._finish(partial(self._end_members, seconds))

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._finish(self._detach)

    async def _finish(self, step: Callable[[], Awaitable[None]]) -> None:
        if self._finishing is None:
            self.stop(self._expired("it was closed"))
            self._finishing = Ending(step, self.database.complete)
        await self._finishing.wait()

    async def _detach(self) -> None:
        await asyncio.gather(*(member.leave() for member in self.all))

    async def _end_members(self, seconds: float) -> None:
        """End all sessions on the server that have not ended yet."""
        members = self.all
        for member in members:
            if member.known:
                member.stop()
            else:
                member.abandon()
        await asyncio.wait([member.over for member in members], timeout=seconds)
        await asyncio.gather(*(member.finish() for member in members))
        for member in members:
            self.database.siblings.pop(member.id, None)

    def _expired(self, how: str) -> SessionExpired:
        return SessionExpired(f"the session on {self.path} has ended: {how}", node=self.path)

    def _forget(self) -> None:
        super()._forget()
        self.queues.clear()
        for future in list(self._pending):
            if not future.done():
                future.set_exception(self.reason)

    # Operations

    def future(self) -> asyncio.Future[Any]:
        """Return a future that is settled at the latest when the session ends."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._settled)
        return future

    def _settled(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # a cancelled caller does not retrieve it

    async def perform(self, kind: str, name: str, **fields: object) -> tuple[Message, bool]:
        """Perform an operation on a semaphore through the main member, in its order.

        Args:
            kind: the kind of the request message.
            name: the name of the semaphore.
            fields: further fields of the message.

        Returns:
            The answer, and true if the operation was sent more than once, after a broken
            connection.
        """
        self.check()
        answer = self.future()
        main = self.main
        sent: list[YdbOperation] = []

        def make(req_id: int) -> Message:
            return messages.request(kind, req_id=req_id, name=name, **fields)

        def begin() -> bool:
            if not self.queues.of(name).try_begin(main):
                return False
            sent.append(main.protocol.send(make, answered))
            return True

        def answered(_: str, body: Message) -> bool:
            if not answer.done():
                answer.set_result((body, sent[0].repeated))
            self.queues.of(name).end(main)
            return True

        self.queues.of(name).add(begin)
        body, repeated = await answer
        return body, repeated

    def step(self) -> int:
        """Return a number that rises with every call, to order events."""
        self._step += 1
        return self._step
