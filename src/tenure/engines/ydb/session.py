"""Session on a coordination node: the contract's operations, over the session's members."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from tenure.core import refusals, rules
from tenure.engines.contract import Answer, Attach, Enqueued, SessionEvents, Withdrawn
from tenure.engines.ydb import errors, messages
from tenure.engines.ydb.database import Database
from tenure.engines.ydb.joining import Altering, Joining
from tenure.engines.ydb.members import GroupSession, Member
from tenure.engines.ydb.requests import State, YdbRequest, YdbRequests
from tenure.engines.ydb.watches import YdbWatches
from tenure.errors import SemaphoreNotFound, TenureError, Unsupported
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged
from tenure.wire.ydb import Status


class YdbSession(GroupSession):
    """The `EngineSession` on a coordination node.

    Args:
        ended: called with the session at its end.
    """

    def __init__(
        self,
        database: Database,
        how: Attach,
        events: SessionEvents,
        ended: Callable[[YdbSession], None],
    ) -> None:
        """Start unattached; its members attach."""
        super().__init__(database, how, events)
        self._ended = ended
        self._thread = threading.get_ident()
        self._requests = YdbRequests(self)
        self._joining = Joining(self, self._requests, self._placed)
        self._altering = Altering(self, self._requests, self._joining)
        self._watches = YdbWatches(self, self._requests)

    def sibling_failed(self, member: Member, error: TenureError) -> None:
        """Fail the requests of a sibling that cannot be attached."""
        self._joining.fail_member(member, error)

    def _placed(self, request: YdbRequest) -> None:
        """Record that a request waits or is an owner, so its semaphore exists."""
        self._watches.appeared(request.name)
        if request.state is State.OWNS:
            self._watches.granted()

    def _forget(self) -> None:
        self._watches.close()
        self._requests.close()
        super()._forget()
        self._ended(self)

    def renew(self) -> None:
        """Extend the session's expiry; the proof comes through the session's events."""
        if threading.get_ident() == self._thread:
            self._renew()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._renew)

    def _renew(self) -> None:
        if not self.over:
            self.renew_members()
            self._watches.renewed()

    # The contract: semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        """Create a lasting semaphore."""
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        while True:
            body, repeated = await self.perform("create_semaphore", name, limit=limit, data=data)
            if body.status == Status.SUCCESS:
                self._watches.appeared(name)
                return
            if body.status == Status.PRECONDITION_FAILED:
                rules.check_kind(False, True, self.path, name)
            if body.status != Status.ALREADY_EXISTS:
                raise errors.semaphore_error(self.path, name, body)
            try:
                found = await self.describe_semaphore(name, owners=False, waiters=False)
            except SemaphoreNotFound:
                continue  # deleted meanwhile
            rules.check_kind(False, found.ephemeral, self.path, name)
            is_same = repeated and (found.limit, found.data) == (limit, data)
            if found.limit == limit and (exist_ok or is_same):
                return
            raise refusals.semaphore_exists(self.path, name, found.limit)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        """Replace the data of a semaphore."""
        rules.check_data(data, self.path, name)
        rules.check_name(name, self.path)
        body, _ = await self.perform("update_semaphore", name, data=data)
        if body.status != Status.SUCCESS:
            raise errors.semaphore_error(self.path, name, body)

    async def resize_semaphore(self, name: str, limit: int) -> None:
        """Raise `Unsupported`: the API cannot change a limit."""
        rules.check_name(name, self.path)
        rules.check_new_limit(limit, self.path, name)
        raise Unsupported(
            f"the limit of semaphore {name!r} on {self.path} cannot be changed: YDB's API has no "
            "operation for that; sqlite://, redis:// and tenure:// can. If a tenure server is "
            "behind the API, change it through tenure://; otherwise delete the semaphore while it "
            f"is not in use, and create it with limit {limit}",
            node=self.path,
            name=name,
        )

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        """Delete a semaphore."""
        rules.check_name(name, self.path)
        body, repeated = await self.perform("delete_semaphore", name, force=force)
        if body.status == Status.SUCCESS or (repeated and body.status == Status.NOT_FOUND):
            self._watches.check_owned(name, None, self.step())
            return
        if force and body.status == Status.PRECONDITION_FAILED:
            raise Unsupported(
                f"{name!r} on {self.path} is ephemeral (a mutex, a registry), and YDB's API cannot "
                "delete one by force; end the sessions that use it, or delete it through "
                "tenure:// or the store itself",
                node=self.path,
                name=name,
            )
        raise errors.semaphore_error(self.path, name, body)

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        """Describe a semaphore."""
        rules.check_name(name, self.path)
        async with self.database.reads if owners or waiters else contextlib.nullcontext():
            body, _ = await self.perform(
                "describe_semaphore", name, include_owners=owners, include_waiters=waiters
            )
        if body.status != Status.SUCCESS:
            raise errors.semaphore_error(self.path, name, body)
        return messages.semaphore(body.semaphore_description, self.database.siblings)

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
        self.check()
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
        self.check()
        return self._altering.alter(request_id, count, data, timeout)

    def withdraw(self, request_id: int) -> Answer[Withdrawn]:
        """Take a request out of its queue."""
        self.check()
        return self._requests.withdraw(request_id)

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Watch a name; return the function that ends the watch."""
        self.check()
        rules.check_name(name, self.path)
        return self._watches.add(name, data=data, owners=owners, changed=changed)
