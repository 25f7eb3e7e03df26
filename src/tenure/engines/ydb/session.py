"""A session of the program: the contract's operations, over the session's members."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from tenure.core import rules
from tenure.engines.contract import (
    Answer,
    Attach,
    Enqueued,
    SessionDefaults,
    SessionEvents,
    Withdrawn,
)
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.altering import Altering
from tenure.engines.ydb.database import Database
from tenure.engines.ydb.joining import Joining
from tenure.engines.ydb.member import Member
from tenure.engines.ydb.members import Members
from tenure.engines.ydb.request import State, YdbRequest
from tenure.engines.ydb.requests import YdbRequests
from tenure.engines.ydb.watches import YdbWatches
from tenure.errors import (
    EngineUnavailable,
    SemaphoreExists,
    SemaphoreNotFound,
    TenureError,
    Unsupported,
)
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire.ydb import Status

__all__ = ["YdbSession"]


class YdbSession(SessionDefaults):
    """The `EngineSession` on a coordination node.

    Args:
        over: called with it when it is over.
    """

    def __init__(
        self,
        database: Database,
        how: Attach,
        events: SessionEvents,
        over: Callable[[YdbSession], None],
    ) -> None:
        """Start unattached; its members attach."""
        self.node = how.node
        self._siblings = database.siblings
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._members = Members(
            database,
            how,
            events,
            sibling_failed=self._sibling_failed,
            ended=self._ended,
        )
        self._requests = YdbRequests(self._members)
        self._joining = Joining(self._members, self._requests, self._seen)
        self._altering = Altering(self._members, self._requests, self._joining)
        self._watches = YdbWatches(self._members, self._requests)

    def _sibling_failed(self, member: Member, error: TenureError) -> None:
        self._joining.fail_member(member, error)

    def _seen(self, request: YdbRequest) -> None:
        """Note that a request waits or owns, and so that its semaphore exists."""
        self._watches.appeared(request.name)
        if request.state is State.OWNS:
            self._watches.granted()

    def _ended(self) -> None:
        self._watches.close()
        self._requests.close()
        self._over(self)

    @property
    def id(self) -> int:
        """Id of the session in the store."""
        return self._members.main.id

    @property
    def attach_number(self) -> int:
        """Number of this attachment of the session."""
        return self._members.main.protocol.seq_no

    @property
    def failure(self) -> EngineUnavailable | None:
        """Cause of a broken contact; ``None`` while the contact is not broken."""
        return self._members.failure

    # The contract: the session's life

    async def attach(self) -> None:
        """Wait until it is attached. Raises as `Engine.attach`."""
        await self._members.attach()

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if threading.get_ident() == self._thread:
            self._renew()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._renew)

    def _renew(self) -> None:
        if self._members.events is not None:
            self._members.renew()
            self._watches.renewed()

    async def close(self) -> None:
        """End the session."""
        await self._members.close()

    async def close_within(self, seconds: float) -> None:
        """Close as `close`, in that time; what the server cannot be notified of expires."""
        await self._members.close(seconds)

    async def detach(self) -> None:
        """Detach the session, without ending it."""
        await self._members.detach()

    # The contract: semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        rules.check_name(name, self.node)
        rules.check_limit(limit, self.node, name)
        rules.check_data(data, self.node, name)
        while True:
            body, again = await self._members.ask(
                name,
                lambda req_id: messages.request(
                    "create_semaphore", req_id=req_id, name=name, limit=limit, data=data
                ),
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
        """Replace the data of a semaphore."""
        rules.check_data(data, self.node, name)
        rules.check_name(name, self.node)
        body, _ = await self._members.ask(
            name,
            lambda req_id: messages.request(
                "update_semaphore", req_id=req_id, name=name, data=data
            ),
        )
        if body.status != Status.SUCCESS:
            raise errors.semaphore_error(self.node, name, body)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        rules.check_name(name, self.node)
        body, again = await self._members.ask(
            name,
            lambda req_id: messages.request(
                "delete_semaphore", req_id=req_id, name=name, force=force
            ),
        )
        if body.status == Status.SUCCESS or (again and body.status == Status.NOT_FOUND):
            self._watches.check_owned(name, None, self._members.step())
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
        """Describe a semaphore."""
        rules.check_name(name, self.node)
        body, _ = await self._members.ask(
            name, lambda req_id: messages.describe(req_id, name, owners=owners, waiters=waiters)
        )
        if body.status != Status.SUCCESS:
            raise errors.semaphore_error(self.node, name, body)
        return messages.semaphore(body.semaphore_description, self._siblings)

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
        """Add a request at the end of a queue."""
        self._members.check()
        return self._joining.enqueue(request_id, name, count, data, timeout, ephemeral)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        self._members.check()
        return self._altering.alter(request_id, count, data, timeout)

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        self._members.check()
        return self._requests.withdraw(request_id)

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; returns the function that ends the watch."""
        self._members.check()
        rules.check_name(name, self.node)
        return self._watches.add(name, data=data, owners=owners, changed=changed)
