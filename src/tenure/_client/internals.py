"""Cores behind the public objects, for tenure's other packages and its tests.

The public objects only have methods for programs. Code of tenure that needs more, such as the sync
wrappers, gets it here. That of a client is in `client`, which imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenure._client.handles import CallSite, call_site

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Iterable
    from types import TracebackType

    from tenure._client.election import Election
    from tenure._client.lease import Acquirable, Lease
    from tenure._client.mutex import Mutex
    from tenure._client.rate import Taken
    from tenure._client.request import Request, RequestOptions
    from tenure._client.semaphore import Semaphore
    from tenure._client.session_core import SessionCore
    from tenure._client.session_handle import SessionAnchor, SessionHandle
    from tenure._client.source import SessionSource
    from tenure._client.ticket import Ticket

T_contra = TypeVar("T_contra", contravariant=True)


class Readable(Protocol[T_contra]):
    """Asynchronous stream that accepts items back."""

    def _put_back(self, item: T_contra, /) -> None: ...


def session_core(session: SessionHandle) -> SessionCore:
    """Return the state of a session."""
    return session._core


def note_lease_site(lease: Lease, otherwise: CallSite | None = None) -> None:
    """Set the program's line that obtained a lease, unless it is known.

    `tenure.blocking` obtains its handles on the portal's loop, without the program's lines, and a
    task may execute a decorated function.

    Args:
        lease: the lease.
        otherwise: what is set if no line of the program leads to this call.
    """
    _note_site(lease._request, debug=lease._request.session.debug, otherwise=otherwise)


def note_session_site(session: SessionHandle) -> None:
    """Set the program's line that obtained a session, unless it is known."""
    if session._anchor.site is not None:  # not the implicit session
        _note_site(session._anchor, debug=session._core.debug)


def _note_site(
    obtained: Request | SessionAnchor, *, debug: bool, otherwise: CallSite | None = None
) -> None:
    if obtained.site is None or obtained.site.code is None:
        obtained.site = call_site(debug=debug, otherwise=otherwise)


def request_of(lease: Lease) -> Request:
    """Return the request of a lease."""
    return lease._request


def source_of(primitive: Mutex | Semaphore | Election) -> SessionSource:
    """Return the source of a primitive's session."""
    return primitive._source


def options_of(primitive: Mutex | Semaphore, count: int) -> RequestOptions[Lease]:
    """Return the options of a request for so many tokens, which of a mutex are all."""
    return primitive._wanted(count)


def key_request_of(lease: Lease) -> Request | None:
    """Return the request for tokens of the lease's key, if each key has a limit."""
    from tenure._client.semaphore import SlotsOfKey

    slots = lease._request.slots
    return slots.place if isinstance(slots, SlotsOfKey) else None


def granted_at(taken: Taken) -> int:
    """Return the time of the grant of a take by the store's clock, in microseconds."""
    return taken._at


def undo_take(taken: Taken | None) -> None:
    """Refund the tokens of a take in the background."""
    if taken is not None:
        taken._undo()


def lease_of(ticket: Ticket[Any]) -> Lease:
    """Return the lease that a ticket waits for."""
    lease: Lease = ticket._lease
    return lease


def check_enterable(lease: Lease) -> None:
    """Raise the error that entering the lease would raise."""
    lease._check_enterable()


def enter_lease(lease: Lease, task: asyncio.Task[object] | None) -> None:
    """Enter the block of a lease in that task."""
    lease._enter(task)


def leave_ticket(ticket: Ticket[Any]) -> None:
    """Leave the block of a ticket, if it was entered."""
    scope = ticket._scope
    if scope is not None and scope.task is not None:
        scope.exit(None)


def entered_lease(primitive: Acquirable, task: asyncio.Task[object]) -> Lease:
    """Return the lease that a task entered last by entering the primitive itself."""
    return primitive._entered(task)


def leave_entered(
    primitive: Acquirable,
    lease: Lease,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> Coroutine[Any, Any, None]:
    """Leave a primitive that was entered itself, with that lease."""
    return primitive._leave(lease, kind, error, trace)


def abandon_entered(primitive: Acquirable, lease: Lease) -> None:
    """Undo entering a primitive itself."""
    primitive._forget(lease)
    _abandon(lease)


def _abandon(lease: Lease) -> None:
    scope = lease._request.scope
    if scope is not None and scope.task is not None:
        scope.exit(None)
    lease._request.withdraw()


def abandon_all(leases: Iterable[Lease]) -> None:
    """Undo entering several leases, the last one first."""
    for lease in reversed(tuple(leases)):
        _abandon(lease)


def put_back(stream: Readable[T_contra], item: T_contra) -> None:
    """Return an item to its stream, after its reader was interrupted."""
    stream._put_back(item)
