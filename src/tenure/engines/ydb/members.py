"""Members of a session: one session on the server, and siblings where one does not suffice.

On YDB a session has one request for a name at the most. A further one goes through a *sibling*, a
session of its own beside the main one. Rules:

* The fates of all members are tied: the end of one is the end of all, and a proof is worth what
  the oldest of theirs is.
* A sibling without requests is used again, and ended when it has been idle for a window.
* A request that is leaving its queue keeps its member until the server has said that it is out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from tenure.engines.contract import Attach, SessionEvents
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.database import Database
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.operations import OperationQueues
from tenure.engines.ydb.protocol import Ask
from tenure.errors import EngineUnavailable, SessionExpired, TenureError, Unsupported
from tenure.wire.ydb import Message

__all__ = ["Members"]


class Members:
    """The members of one session, and the life that they have in common.

    Attributes:
        node: the path of its node, as tenure names it.
        fencing: whether the order id of a grant is wanted.
        main: the session on the server that gives the session its id.
        siblings: the other ones.
        queues: the order of operations, on each name.
        events: the receiver of the session's events; none after its end.

    Args:
        sibling_failed: called with a sibling that cannot be attached, and the reason.
        ended: called when the session is over for the program.
    """

    def __init__(
        self,
        database: Database,
        how: Attach,
        events: SessionEvents,
        *,
        sibling_failed: Callable[[Member, TenureError], None],
        ended: Callable[[], None],
    ) -> None:
        """Start with the main member, which is not attached yet."""
        self.node = how.node
        self.now = database.clock.now
        self.fencing = database.address.fencing
        self.events: SessionEvents | None = events
        self.queues = OperationQueues()
        self._database = database
        self._window = how.recovery_window
        self._sibling_failed = sibling_failed
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._step = 0
        self._proven = float("-inf")
        self._broken = False
        self._over: SessionExpired | None = None
        self._closing: asyncio.Task[None] | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._first: asyncio.Future[None] | None = self._loop.create_future()
        self._why_not = "it did not answer"
        self.main = self._new_member(how.description, how.key or secrets.token_bytes(16))
        self.siblings: list[Member] = []

    @property
    def all(self) -> list[Member]:
        """The main one, and its siblings."""
        return [self.main, *self.siblings]

    @property
    def failure(self) -> EngineUnavailable | None:
        """Cause of a broken contact; ``None`` while the contact is not broken."""
        return EngineUnavailable(self._why_not) if self._broken else None

    # Attaching

    async def attach(self) -> None:
        """Wait until the main member is attached. Raises as `Engine.attach`."""
        assert self._first is not None
        limit = self._database.address.connect_timeout
        try:
            async with asyncio.timeout(limit):
                await self._first
        except BaseException as error:
            self._leave(self._expired("it was never attached"))
            self._database.complete(self._end(2 * self.main.patience))
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(
                    f"no session on {self.node} at {self._database.address.url} within "
                    f"{limit:g} s: {self._why_not}",
                    node=self.node,
                ) from None
            raise
        finally:
            self._first = None

    def new_sibling(self) -> Member:
        """Add a member; what is sent through it goes out when it is attached.

        Raises:
            Unsupported: there are as many as may be.
        """
        most = self._database.address.siblings
        if len(self.siblings) >= most:
            raise Unsupported(
                f"the session on {self.node} has a request in each of {most + 1} sessions on the "
                f"server already, and YDB allows one for a name in each; raise siblings={most} in "
                "the URL, use several sessions, or tenure:// which has no such bound",
                node=self.node,
            )
        member = self._new_member(f"sibling of session {self.main.id}", secrets.token_bytes(16))
        self.siblings.append(member)
        return member

    def _new_member(self, description: str, key: bytes) -> Member:
        path = self._database.path_of(self.node)
        channel = self._database.channel
        return Member(channel, path, self._window, description, key, self.now, self)

    # MemberEvents

    def member_started(self, member: Member) -> None:
        """Note that a member is attached, and report contact once all are."""
        if member is not self.main:
            self._database.siblings[member.id] = self.main.id
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self._report_contact()

    def member_detached(self) -> None:
        """Report the loss of contact."""
        self._report_contact()

    def _report_contact(self) -> None:
        broken = any(member.detached for member in self.all)
        if broken != self._broken and self.events is not None:
            self._broken = broken
            if broken:
                self.events.detached(self.failure)
            else:
                self.events.attached()

    def member_proven(self) -> None:
        """Report a proof once it covers every member."""
        at = min(each.protocol.last_proof for each in self.all if each.id)
        if at > self._proven and self.events is not None:
            self._proven = at
            self.events.proven(at)

    def member_refused(self, member: Member, failure: Message) -> None:
        """Give up a member that can never attach; note the reason otherwise."""
        self._why_not = messages.reason(failure)
        if member.id:
            return
        error = errors.attach_error(self.node, failure)
        if error is None:
            return
        member.give_up()
        if member is self.main:
            self._fail_attach(error)
        else:
            self._sibling_failed(member, error)
            self._forget(member)

    def member_failed(self, member: Member, error: Exception) -> None:
        """Note why a member could not attach."""
        self._why_not = str(error) or type(error).__name__
        if isinstance(error, TenureError) and self._first is not None:
            member.give_up()
            self._fail_attach(error)

    def member_over(self, member: Member, failure: Message | None) -> None:
        """End the session with a member that the server ended."""
        if failure is None:
            self._database.siblings.pop(member.id, None)
            if member is not self.main:
                self._forget(member)
            return
        if self.events is None:
            return
        events, error = self.events, errors.expired(self.node, failure)
        self._leave(error)
        self._database.complete(self._end(self.main.patience))
        events.ended(error)

    def _fail_attach(self, error: TenureError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _forget(self, sibling: Member) -> None:
        if sibling in self.siblings:
            self.siblings.remove(sibling)
            self.queues.forget(sibling)
            self._report_contact()
            self._database.complete(sibling.finish())

    # Life

    def renew(self) -> None:
        """Ask for a proof of each member, and end siblings that have been idle for a window."""
        idle = self.now() - self._window
        for member in self.all:
            if member is not self.main and not member.names and member.idle_since < idle:
                member.stop()
            else:
                member.renew()

    async def close(self, seconds: float | None = None) -> None:
        """End the session in that time; by default, in the window. Safe to call twice."""
        await self._see_out(self._end(self._window if seconds is None else seconds))

    async def detach(self) -> None:
        """Leave the session to its window."""
        await self._see_out(self._detach())

    async def _see_out(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run it to its end whether or not the caller is cancelled; once."""
        if self._closing is None:
            self._leave(self._expired("it was closed"))
            self._closing = self._database.complete(ending)
        else:
            ending.close()
        await asyncio.shield(self._closing)

    async def _detach(self) -> None:
        await asyncio.gather(*(member.leave() for member in self.all))

    async def _end(self, seconds: float) -> None:
        """End all sessions on the server that have not ended yet."""
        members = self.all
        for member in members:
            if member.known:
                member.stop()
            else:
                member.give_up()
        await asyncio.wait([member.over for member in members], timeout=seconds)
        await asyncio.gather(*(member.finish() for member in members))
        for member in members:
            self._database.siblings.pop(member.id, None)

    def _expired(self, how: str) -> SessionExpired:
        return SessionExpired(f"the session on {self.node} is over: {how}", node=self.node)

    def _leave(self, why: SessionExpired) -> None:
        """End it for the program: no more events are delivered, and nothing is answered."""
        if self._over is not None:
            return
        self._over = why
        self.events = None
        self.queues.clear()
        self._ended()
        for future in list(self._pending):
            if not future.done():
                future.set_exception(why)

    def check(self) -> None:
        """Raise `SessionExpired` if the session is over."""
        if self._over is not None:
            raise SessionExpired(str(self._over), node=self.node, taken_over=self._over.taken_over)

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
            future.exception()  # a caller that has left does not need it

    async def ask(self, name: str, make: Callable[[int], Message]) -> tuple[Message, bool]:
        """Return the answer to an operation on a name through the main member, in its order.

        The second value tells whether it was sent more than once, by a broken connection.
        """
        self.check()
        answer = self.future()
        main = self.main
        sent: list[Ask] = []

        def go() -> bool:
            queue = self.queues.of(name)
            if not queue.free_for(main):
                return False
            queue.begin(main)
            sent.append(main.protocol.ask(make, heard))
            return True

        def heard(_: str, body: Message) -> bool:
            if not answer.done():
                answer.set_result((body, sent[0].again))
            self.queues.of(name).end(main)
            return True

        self.queues.of(name).add(go)
        body, again = await answer
        return body, again

    def step(self) -> int:
        """Return a number that rises with every call; what has a higher one was done later."""
        self._step += 1
        return self._step
