"""A re-entrant mutex: a caller that holds it passes its lease on, and the callee enters it again.

The proof is the lease object. A task or a thread has no part in it, so a lease can be passed to
another task, and a task that does not get it waits like any other program.

State and its owners:

* The store has one request: that of the outermost block, which alone releases it.
* An inner block owns nothing but its scope: the task that is cancelled when the lease ends.

Rules:

* An inner block is entered only with a held lease of the same mutex, of the same client.
* When the lease is lost, or the outermost block releases it, the bodies of the inner blocks that
  are still entered are cancelled, in any task.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from tenure._client.internals import request_of, source_of
from tenure._client.lease import Lease, note_loss
from tenure._client.loss import OnLoss
from tenure._client.once import Once
from tenure._client.request import Request
from tenure._client.scope import Scope
from tenure.durations import Duration
from tenure.errors import InvalidArgument, Misuse
from tenure.model import EPHEMERAL_LIMIT
from tenure.recipes.base import Source


class InnerLease(Lease):
    """The lease of an outer block, inside of an inner one. It does not release it."""

    __slots__ = ("_change", "_inner", "_used")

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._inner = Scope(request)
        self._used = False
        self._change: asyncio.Future[None] | None = None

    def __del__(self) -> None:
        """Release nothing: the outermost block does."""

    async def release(self) -> None:
        """Do nothing: the outermost block releases the lease."""

    def _check_enterable(self) -> None:
        if self._used:
            raise Misuse(
                f"this inner block of {self.name!r} has been entered already; call lock() again",
                node=self.node,
                name=self.name,
            )
        self._request.check()

    def _enter(self, task: asyncio.Task[object] | None = None) -> None:
        self._used = True
        self._inner.enter(task or asyncio.current_task(self._request.session.loop))
        self._request.session.client.soon(self._changed)  # a thread enters outside of the loop

    def _changed(self, _: object = None) -> None:
        if self._inner.task is None:
            return
        if self._request.held:
            self._change = self._request.change()
            self._change.add_done_callback(self._changed)
        else:
            self._inner.trigger()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        request = self._request
        if self._inner.task is None:
            return  # a thread was interrupted before it was inside
        cancelled = self._inner.exit(error)
        if self._change is not None:
            self._change.cancel()
        if not request.held:
            if error is None or cancelled:
                raise request.why_not_held()
            if request.loss is not None:
                note_loss(request, error)


class ReentrantMutex:
    """A mutex on a node that a callee can enter again, with the lease of its caller.

    Example::

        from tenure.recipes import ReentrantMutex

        accounts = ReentrantMutex(session, "accounts")

        async def book(holding=None):
            async with accounts.lock(holding=holding) as lease:
                await work(lease.fencing_token)

        await book()  # locks the mutex
        async with accounts.lock() as lease:
            await book(holding=lease)  # is inside already

    Only the outermost block releases the mutex, at its end. Nothing is implicit: a callee that does
    not get the lease waits for the mutex, even in the same task.

    It is the mutex of that name: leases of `Client.mutex` can be passed on as well.

    Args:
        source: a session, or a client for its implicit session on ``/default``.
        name: 1 to 1,024 bytes.
    """

    def __init__(self, source: Source, name: str) -> None:
        """Set the name; nothing is sent to the store."""
        self.name = name
        self._mutex = source.mutex(name)
        self._source = source_of(self._mutex)

    def __repr__(self) -> str:
        """Return the class and the name."""
        return f"<ReentrantMutex {self.name!r}>"

    def lock(
        self,
        *,
        holding: Lease | None = None,
        data: bytes = b"",
        timeout: Duration | None = None,
        on_loss: OnLoss | None = None,
        stop_time: Duration = 0.0,
    ) -> Once[Lease]:
        """Lock the mutex, or enter it again: ``async with mutex.lock() as lease``.

        The lease can be passed on. An inner one has the fencing token of the outermost block, and
        its `Lease.release` does nothing. The body of an inner block is cancelled when the lease
        ends before it: by a loss, or because the outermost block was left.

        Args:
            holding: a held lease of this mutex, obtained through the same client; the store is not
                called then, and the other arguments have no effect. ``None``: lock it.
            data: bytes of the request, which clients see in descriptions of the holder.
            timeout: seconds to wait, on the local clock; 0 tries once; ``None`` waits until granted
                or the session ends.
            on_loss: reaction to a loss, besides raising it; the session's default if ``None``.
            stop_time: seconds that the work needs to stop after its cancellation; the lease
                counts as lost that much earlier.

        Raises:
            LeaseLost, LeaseReleased: `holding` is no longer held.
            InvalidArgument: `holding` is not a lease of this mutex; or a lasting semaphore has that
                name.
            AcquireTimeout: not granted in time.
            SelfDeadlock: what the program holds prevents the grant, and no other task is known
                that could release it (see `tenure.SelfDeadlock`).
            SessionExpired, SessionClosed: the session has ended.
        """
        if holding is None:
            return self._mutex.lock(
                data=data, timeout=timeout, on_loss=on_loss, stop_time=stop_time
            )
        return Once(f"the inner block of {self.name!r}", self._again, holding)

    async def _again(self, holding: Any) -> Lease:
        if not isinstance(holding, Lease):
            raise self._not_ours(f"a lease, not {holding!r}")
        request = request_of(holding)
        whole = request.options.ephemeral and request.count == EPHEMERAL_LIMIT
        if not whole or (request.name, request.node) != (self.name, self._source.node):
            raise self._not_ours(f"not {holding!r} of {request.node}")
        if request.session.contact is not self._source.contact:
            raise self._not_ours("of the same client")
        request.check()
        return InnerLease(request)

    def _not_ours(self, what: str) -> InvalidArgument:
        node = self._source.node
        return InvalidArgument(
            f"{self.name!r} on {node} is entered again with a held lease of this mutex, {what}",
            node=node,
            name=self.name,
        )
