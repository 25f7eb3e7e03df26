"""A session of the program: one session on the server, and siblings where one does not suffice.

On YDB a session has one request for a name at the most. A further one goes through a *sibling*, a
session of its own beside the main one. Rules:

* The fates of all these sessions are tied: the end of one is the end of all, and a proof is worth
  what the oldest of theirs is.
* A sibling without requests is used again, and ended when it has been idle for a window.
* A request that is leaving its queue keeps its strand until the server has said that it is out.
* With fencing, a grant is reported together with its order id, which comes from a description of
  the owners. The description is requested right behind a request that may be granted at once,
  unless the last request for that name had to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    Removal,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.hold import Hold, State
from tenure.engines.ydb.lane import Lanes
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.requests import Requests
from tenure.engines.ydb.watches import Watches
from tenure.errors import (
    EngineUnavailable,
    SemaphoreExists,
    SemaphoreNotFound,
    SessionExpired,
    TenureError,
    Unsupported,
)
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire.ydb import Message, Status

if TYPE_CHECKING:
    from tenure.engines.ydb.engine import YdbEngine
    from tenure.engines.ydb.strand import Ask

__all__ = ["YdbSession"]

T = TypeVar("T")


class YdbSession(SessionDefaults):
    """The `EngineSession` on a coordination node.

    Attributes:
        node: the path of its node, as tenure says it.
        main: the session on the server that gives it its id.
        lanes: the order of its operations, on each name.
        told: the receiver of its events; none after its end.
    """

    def __init__(self, engine: YdbEngine, how: Attach, events: SessionEvents) -> None:
        self.node = how.node
        self.now = engine.clock.now
        self.told: SessionEvents | None = events
        self.lanes = Lanes()
        self.fencing = engine.address.fencing
        self._engine = engine
        self._how = how
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
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
        self._requests = Requests(self)
        self._watches = Watches(self)

    @property
    def id(self) -> int:
        return self.main.id

    @property
    def attach_number(self) -> int:
        return self.main.strand.seq_no

    @property
    def members(self) -> list[Member]:
        """All of them."""
        return [self.main, *self.siblings]

    @property
    def is_over(self) -> bool:
        return self._over is not None

    @property
    def failure(self) -> EngineUnavailable | None:
        """Cause of a broken contact; ``None`` while the contact is not broken."""
        return EngineUnavailable(self._why_not) if self._broken else None

    # Attaching

    async def attach(self) -> None:
        """Wait until the main session is attached. Raises as `Engine.attach`."""
        assert self._first is not None
        limit = self._engine.address.connect_timeout
        try:
            async with asyncio.timeout(limit):
                await self._first
        except BaseException as error:
            self._leave(self._expired("it was never attached"))
            self._engine.see_through(self._end_members(2 * self.main.line.patience))
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(
                    f"no session on {self.node} at {self._engine.url} within {limit:g} s: "
                    f"{self._why_not}",
                    node=self.node,
                ) from None
            raise
        finally:
            self._first = None

    def new_sibling(self) -> Member:
        """One more session on the server; what is asked of it is sent when it is attached.

        Raises:
            Unsupported: there are as many as may be.
        """
        most = self._engine.address.siblings
        if len(self.siblings) >= most:
            raise Unsupported(
                f"the session on {self.node} has a request in each of {most + 1} sessions on the "
                f"server already, and YDB allows one for a name in each; raise siblings={most} in "
                "the URL, use several sessions, or tenure:// which has no such bound",
                node=self.node,
            )
        member = self._new_member(f"sibling of session {self.id}", secrets.token_bytes(16))
        self.siblings.append(member)
        return member

    def _new_member(self, description: str, key: bytes) -> Member:
        path = self._engine.path_of(self.node)
        window = self._how.recovery_window
        return Member(self, self._engine.channel, path, window, description, key)

    # What the members tell

    def member_started(self, member: Member) -> None:
        """It is attached: anew, or again."""
        if member is not self.main:
            self._engine.siblings[member.id] = self.id
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self.tell_contact()

    def tell_contact(self) -> None:
        """Tell whether the contact is broken, if that has changed."""
        broken = any(member.detached for member in self.members)
        if broken != self._broken and self.told is not None:
            self._broken = broken
            if broken:
                self.told.detached(self.failure)
            else:
                self.told.attached()

    def member_proven(self) -> None:
        """Process a new proof of one of them."""
        at = min(each.strand.last_proof for each in self.members if each.id)
        if at > self._proven and self.told is not None:
            self._proven = at
            self.told.proven(at)

    def member_refused(self, member: Member, failure: Message) -> None:
        """The server has ended a stream, for a reason that may pass."""
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
            self._requests.fail_member(member, error)
            self._forget(member)

    def member_failed(self, member: Member, error: Exception) -> None:
        """An attempt to reach the server has failed."""
        self._why_not = str(error) or type(error).__name__
        if isinstance(error, TenureError) and self._first is not None:
            member.give_up()
            self._fail_attach(error)

    def member_over(self, member: Member, failure: Message | None) -> None:
        """A session on the server has ended, by our wish (no failure) or the store's word."""
        if failure is None:
            self._engine.siblings.pop(member.id, None)
            if member is not self.main:
                self._forget(member)
            return
        if self.told is None:
            return
        told, error = self.told, errors.expired(self.node, failure)
        self._leave(error)
        self._engine.see_through(self._end_members(self.main.line.patience))
        told.ended(error)

    def _fail_attach(self, error: TenureError) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _forget(self, sibling: Member) -> None:
        """It is not one of ours any more."""
        if sibling in self.siblings:
            self.siblings.remove(sibling)
            self.lanes.forget(sibling)
            self.tell_contact()
            self._engine.see_through(sibling.line.finish())

    # The contract: the session's life

    def renew(self) -> None:
        if threading.get_ident() == self._thread:
            self._renew()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._renew)

    def _renew(self) -> None:
        if self.told is None:
            return
        idle = self.now() - self._how.recovery_window
        for member in self.members:
            if member is not self.main and not member.holds and member.idle_since < idle:
                member.stop()
            else:
                member.strand.renew()
            member.line.word()
        self._watches.renewed()

    async def close(self) -> None:
        await self._see_through(self._end_members(self._how.recovery_window))

    async def close_within(self, seconds: float) -> None:
        """Close as `close`, in that time; what the server cannot be notified of expires."""
        await self._see_through(self._end_members(seconds))

    async def detach(self) -> None:
        await self._see_through(self._detach())

    async def _see_through(self, ending: Any) -> None:
        """Carry it out whether or not the caller is cancelled; once."""
        if self._closing is None:
            self._leave(self._expired("it was closed"))
            self._closing = self._engine.see_through(ending)
        else:
            ending.close()
        await asyncio.shield(self._closing)

    async def _detach(self) -> None:
        async def leave(member: Member) -> None:
            member.strand.renew()  # so that its window begins now
            await member.line.leave()

        await asyncio.gather(*map(leave, self.members))

    async def _end_members(self, seconds: float) -> None:
        """End all sessions on the server that have not ended yet."""
        members = self.members
        for member in members:
            if member.id or member.line.connected:
                member.stop()
            else:
                member.give_up()  # the server does not know it
        await asyncio.wait([member.over for member in members], timeout=seconds)
        await asyncio.gather(*(member.line.finish() for member in members))
        for member in members:
            self._engine.siblings.pop(member.id, None)

    def _expired(self, how: str) -> SessionExpired:
        return SessionExpired(f"the session on {self.node} is over: {how}", node=self.node)

    def _leave(self, why: SessionExpired) -> None:
        """End it for the program: no more events are delivered, and nothing is answered."""
        if self._over is not None:
            return
        self._over = why
        self.told = None
        self.lanes.clear()
        self._watches.close()
        self._requests.close()
        for future in list(self._pending):
            if not future.done():
                future.set_exception(why)
        self._engine.sessions.discard(self)

    def alive(self) -> None:
        """Raises `SessionExpired` when it is over."""
        if self._over is not None:
            raise SessionExpired(str(self._over), node=self.node, taken_over=self._over.taken_over)

    # Asking

    def future(self) -> asyncio.Future[Any]:
        """Return a future that is settled at the latest when the session ends."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._heed)
        return future

    def _heed(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # a caller that has left does not need it

    async def ask(self, name: str, make: Callable[[int], Message]) -> tuple[Message, bool]:
        """The answer to what is asked about a name through the main session, in its order.

        The second value tells whether it was asked more than once, by a broken connection.
        """
        self.alive()
        answer = self.future()
        main = self.main
        asked: list[Ask] = []

        def go() -> bool:
            lane = self.lanes.of(name)
            if not lane.free_for(main):
                return False
            lane.begin(main)
            asked.append(main.strand.ask(make, heard))
            return True

        def heard(_: str, body: Message) -> bool:
            if not answer.done():
                answer.set_result((body, asked[0].again))
            self.lanes.of(name).end(main)
            return True

        self.lanes.of(name).add(go)
        body, again = await answer
        return body, again

    def step(self) -> int:
        """Rises with every call; what has a higher number was done later."""
        self._step += 1
        return self._step

    # The contract: semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        rules.check_name(name, self.node)
        rules.check_limit(limit, self.node, name)
        rules.check_data(data, self.node, name)
        while True:
            body, again = await self.ask(
                name, lambda req_id: messages.create(req_id, name, limit, data)
            )
            if body.status == Status.SUCCESS:
                self._watches.appeared(name)
                return
            if body.status == Status.PRECONDITION_FAILED:
                rules.check_kind(False, True, self.node, name)
            if body.status != Status.ALREADY_EXISTS:
                raise errors.semaphore_error(self.node, name, body)
            try:
                found = await self.describe_semaphore(name, owners=False, waiters=False)
            except SemaphoreNotFound:
                continue  # deleted meanwhile
            rules.check_kind(False, found.ephemeral, self.node, name)
            ours = again and (found.limit, found.data) == (limit, data)
            if found.limit == limit and (exist_ok or ours):
                return
            raise SemaphoreExists(
                f"{name!r} on {self.node} exists already, with limit {found.limit}",
                node=self.node,
                name=name,
                limit=found.limit,
            )

    async def update_semaphore(self, name: str, data: bytes) -> None:
        rules.check_data(data, self.node, name)
        rules.check_name(name, self.node)
        body, _ = await self.ask(name, lambda req_id: messages.update(req_id, name, data))
        if body.status != Status.SUCCESS:
            raise errors.semaphore_error(self.node, name, body)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        rules.check_name(name, self.node)
        body, again = await self.ask(
            name, lambda req_id: messages.delete(req_id, name, force=force)
        )
        if body.status == Status.SUCCESS or (again and body.status == Status.NOT_FOUND):
            self._watches.check_owned(name, None, self.step())
            return
        if force and body.status == Status.PRECONDITION_FAILED:
            raise Unsupported(
                f"{name!r} on {self.node} is ephemeral (a mutex, a registry), and YDB's API cannot "
                "delete one by force; end the sessions that use it, or delete it through "
                "tenure:// or the store itself",
                node=self.node,
                name=name,
            )
        raise errors.semaphore_error(self.node, name, body)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        rules.check_name(name, self.node)
        body, _ = await self.ask(
            name, lambda req_id: messages.describe(req_id, name, owners=owners, waiters=waiters)
        )
        if body.status != Status.SUCCESS:
            raise errors.semaphore_error(self.node, name, body)
        return messages.semaphore(body.semaphore_description, self._engine.siblings)

    # The contract: requests

    def enqueue(
        self,
        request_id: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        self.alive()
        return self._requests.enqueue(request_id, name, count, data, timeout, ephemeral)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        self.alive()
        return self._requests.alter(request_id, count, data, timeout)

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        self.alive()
        return self._requests.withdraw(request_id)

    def granted(self, hold: Hold) -> None:
        """Note that a request owns, and that the program has been notified."""
        self._watches.appeared(hold.name)
        self._watches.granted()

    def waits(self, hold: Hold) -> None:
        """Note that a request waits."""
        self._watches.appeared(hold.name)

    def owned(self, name: str) -> list[Hold]:
        """Return the program's owners of that semaphore."""
        return [each for each in self._requests.of(name) if each.state is State.OWNS]

    def all_owned(self) -> list[str]:
        """The names of what the program owns."""
        return self._requests.owned_names()

    def lost(self, hold: Hold, why: Removal, *, release: bool) -> None:
        """The server says that the program does not own that any more; see `Requests.removed`."""
        self._requests.removed(hold, why, release=release)

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        self.alive()
        rules.check_name(name, self.node)
        return self._watches.add(name, data=data, owners=owners, changed=changed)
