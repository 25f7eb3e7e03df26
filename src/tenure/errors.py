"""Exceptions of tenure, in one tree.

::

    TenureError
    ├── Misuse (RuntimeError)              the program used tenure wrongly
    │   └── SelfDeadlock                   a program waits for what it holds itself
    ├── InvalidArgument (ValueError)       a value no engine would accept
    ├── Unsupported                        this engine cannot; the message names one that can
    ├── NodeNotFound (LookupError)
    ├── NodeExists
    ├── NodeBusy
    ├── SemaphoreNotFound (LookupError)
    ├── SemaphoreExists
    ├── SemaphoreBusy
    ├── SessionExpired                     the store, or the holder's own clock, ended the session
    ├── SessionClosed                      the program ended the session
    ├── LeaseLost                          a lease ended before it was released
    ├── LeaseReleased                      a lease was used after its release
    ├── Deadlock                           tasks wait for each other, in a session that raises it
    ├── StaleToken                         a fence refused a write: a newer holder has written
    ├── AcquireTimeout (TimeoutError)      not granted in time; __cause__ has an outage
    │   └── RateExceeded                   a rate has no tokens in time; retry_after says when
    ├── AuthenticationFailed (PermissionError)
    ├── EngineUnavailable (ConnectionError)  the store cannot be reached, or does not answer
    └── EngineError                        the store failed in a way that is not the caller's doing

A message says what happened, on which node and name, and what to do. Facts that a program may need
are attributes, so that no program has to parse a message.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenure.model import BlockedTask, RequestDescription

__all__ = [
    "AcquireTimeout",
    "AuthenticationFailed",
    "Deadlock",
    "EngineError",
    "EngineUnavailable",
    "InvalidArgument",
    "LeaseLost",
    "LeaseReleased",
    "Misuse",
    "NodeBusy",
    "NodeExists",
    "NodeNotFound",
    "RateExceeded",
    "SelfDeadlock",
    "SemaphoreBusy",
    "SemaphoreExists",
    "SemaphoreNotFound",
    "SessionClosed",
    "SessionExpired",
    "StaleToken",
    "TenureError",
    "Unsupported",
]


class TenureError(Exception):
    """Base class of all errors that tenure raises.

    Attributes:
        node: the path of the node concerned, or ``None``.
        name: the name of the semaphore (mutex, election) concerned, or ``None``.
    """

    def __init__(self, message: str, *, node: str | None = None, name: str | None = None) -> None:
        """Keep the message, and the node and name that it concerns."""
        super().__init__(message)
        self.node = node
        self.name = name


class Misuse(TenureError, RuntimeError):
    """The program used tenure wrongly: entered a lease twice, used a client after a fork, ..."""


class SelfDeadlock(Misuse):
    """A wait without a timeout that would last for ever, because the program itself prevents it.

    It is raised in two cases, if the request cannot be granted before a lease is released that the
    program holds:

    * at once, if the calling task is inside the block of that lease or ticket;
    * after a second or two, if that lease is in no block of the calling task and the event loop has
      no other task of the program, which could release it.

    In `tenure.blocking` read *thread* for *task*; in the second case the program has no other
    thread. Where another task or thread exists, it may release the lease, and nothing is raised:
    after a second the log names the lease that is waited for, and the line that acquired it. The
    task that `asyncio.wait_for` makes on Python 3.11 is another task, and so is a child task.

    A timeout around the call, such as `asyncio.timeout`, does not prevent the error: pass the
    timeout to the call itself. A release by a callback alone, such as one of `loop.call_later` or
    of a signal handler, is not foreseen: release the lease in a task.
    """


class InvalidArgument(TenureError, ValueError):
    """A value that no engine accepts, such as a count above the limit.

    A request that waits gets it if the limit is changed to less than its count.
    """


class Unsupported(TenureError):
    """The engine does not support it; the message names engines that do."""


class NodeNotFound(TenureError, LookupError):
    """No such node. Nodes are created explicitly; only ``/default`` always exists."""


class NodeExists(TenureError):
    """The node exists already."""


class NodeBusy(TenureError):
    """The node has attached sessions, so it is dropped only by force."""


class SemaphoreNotFound(TenureError, LookupError):
    """No such semaphore on this node, or it has been deleted."""


class SemaphoreExists(TenureError):
    """The semaphore exists already, or exists with another limit.

    Attributes:
        limit: the limit of the existing semaphore, or ``None`` if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Keep the message, and the limit of the existing semaphore."""
        super().__init__(message, node=node, name=name)
        self.limit = limit


class SemaphoreBusy(TenureError):
    """The semaphore has owners or waiters, so it is deleted only by force."""


class SessionExpired(TenureError):
    """The session ended without being closed; everything held through it is lost.

    Attributes:
        taken_over: whether another program has resumed it with its token.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        taken_over: bool = False,
    ) -> None:
        """Keep the message, and whether another process took the session over."""
        super().__init__(message, node=node, name=name)
        self.taken_over = taken_over


class SessionClosed(TenureError):
    """The session, or its client, was closed by the program."""


class LeaseLost(TenureError):
    """A lease ended before it was released: another client may hold it already.

    If the end of the session is the reason, ``__cause__`` is its `SessionExpired` or
    `SessionClosed`.

    Attributes:
        fencing_token: the lost lease's fencing token, or ``None`` if the store has none.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        fencing_token: int | None = None,
    ) -> None:
        """Keep the message, and the fencing token of the lease."""
        super().__init__(message, node=node, name=name)
        self.fencing_token = fencing_token


class LeaseReleased(TenureError):
    """A lease was used after it had been released."""


class Deadlock(TenureError):
    """Tasks wait for each other, and none of them can be granted what it waits for.

    It is raised by the wait that joined its queue last, among those of sessions that were opened
    with ``on_deadlock="raise"``. The block of each lease that the task is inside releases it as
    usual, so the other tasks are granted theirs. Begin again from the outermost lease.

    Attributes:
        tasks: the tasks of the deadlock, the oldest wait first. One of them may have raised
            `Deadlock` a moment before, for a part of it that had formed first.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        tasks: Sequence[BlockedTask] = (),
    ) -> None:
        """Keep the message, and the tasks of the deadlock."""
        super().__init__(message, node=node, name=name)
        self.tasks = tuple(tasks)


class StaleToken(TenureError):
    """A fence rejected a write: a newer holder has already written to the resource.

    Attributes:
        resource: the name of the resource.
        token: the fencing token of the rejected write.
        newest: the newest admitted token, or ``None`` if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        token: int | None = None,
        newest: int | None = None,
    ) -> None:
        """Keep the message, the resource, and the rejected and newest tokens."""
        super().__init__(message)
        self.resource = resource
        self.token = token
        self.newest = newest


class AcquireTimeout(TenureError, TimeoutError):
    """The request was not granted in time; it has left the queue.

    If the store is the reason, and not another holder, the message says so, and ``__cause__`` is
    the store's failure: an `EngineUnavailable` during an outage.

    Attributes:
        holders: the holders at about the time of the timeout; empty when unknown.
        position: the place in the queue within the last second before the timeout, 1 for the next
            to be granted; ``None`` when unknown, as after a timeout of less than half a second.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        holders: Sequence[RequestDescription] = (),
        position: int | None = None,
    ) -> None:
        """Keep the message, the holders and the position."""
        super().__init__(message, node=node, name=name)
        self.holders = tuple(holders)
        self.position = position


class RateExceeded(AcquireTimeout):
    """The tokens of a rate are not there in time; none was taken.

    Attributes:
        retry_after: seconds after which the tokens would have been granted.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        name: str | None = None,
        retry_after: float = 0.0,
    ) -> None:
        """Keep the message, and the time until the tokens would have been there."""
        super().__init__(message, node=node, name=name)
        self.retry_after = retry_after


class AuthenticationFailed(TenureError, PermissionError):
    """The store rejected the credentials, or does not permit them the operation."""


class EngineUnavailable(TenureError, ConnectionError):
    """The store cannot be reached or does not answer: connecting, attaching or a read failed."""


class EngineError(TenureError):
    """The store failed for a reason outside the program (full disk, corrupt file, ...)."""
