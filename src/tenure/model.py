"""Data model: the frozen values that pass between a program, the primitives and an engine.

A fact that some engines do not know is optional; ``None`` means unknown.
Times are seconds; data is bytes. The rules for names and numbers are in `tenure.core.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal

__all__ = [
    "DEFAULT_NODE",
    "EPHEMERAL_LIMIT",
    "UNCHANGED",
    "BlockedTask",
    "Capabilities",
    "Consistency",
    "CountersMode",
    "LastRun",
    "Leader",
    "Liveness",
    "MutexHolder",
    "NodeConfig",
    "NodeDescription",
    "RateDescription",
    "Recovered",
    "RequestDescription",
    "SemaphoreDescription",
    "SessionDescription",
    "Unchanged",
    "WaitGraph",
]

DEFAULT_NODE = "/default"
"""The node that always exists."""

EPHEMERAL_LIMIT = 2**64 - 1
"""The limit of every ephemeral semaphore; a mutex acquires all of it."""

Consistency = Literal["unset", "strict", "relaxed"]
CountersMode = Literal["unset", "aggregated", "detailed"]

Liveness = Literal["process", "window"]
"""Liveness of a session: bound to its process, or to its recovery window alone, so that it may
outlive the process and even a reboot of the machine."""


class Unchanged(Enum):
    """The type of `UNCHANGED`."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED
"""Marker for a value that is not changed; for values that may be ``None``."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The configuration of a node, stored as given.

    Zero or ``"unset"`` means the default; `alter_node` does not change such fields.

    Attributes:
        self_check_period: seconds between a node's checks of itself (default 1).
        session_grace_period: seconds added to the sessions' recovery windows after a restart of the
            store (default 10).
        read_consistency, attach_consistency: only stored, for YDB's clients.
        rate_limiter_counters_mode: only stored, for YDB's clients.
    """

    self_check_period: float = 0.0
    session_grace_period: float = 0.0
    read_consistency: Consistency = "unset"
    attach_consistency: Consistency = "unset"
    rate_limiter_counters_mode: CountersMode = "unset"


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A node."""

    path: str
    config: NodeConfig
    sessions: int | None = None
    semaphores: int | None = None


@dataclass(frozen=True, slots=True)
class SessionDescription:
    """A session, as the store knows it.

    Attributes:
        id: positive, never reused in a store.
        node: the path of its node.
        description: the description that its program gave.
        recovery_window: seconds it survives without contact.
        attached: whether its program is connected, where known.
        silent_for: seconds since its last contact with the store.
        pid: the process on `host`, where known.
        host: the name of the machine, where known.
        program: the name of the program, where known.
    """

    id: int
    node: str
    description: str
    recovery_window: float
    attached: bool | None = None
    silent_for: float | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None


@dataclass(frozen=True, slots=True)
class RequestDescription:
    """One request in a semaphore's queue: an owner or a waiter.

    Attributes:
        session_id: the session of the request.
        order_id: number that rises with every request of the store; it orders the queue, and is the
            fencing token.
        count: number of the semaphore's tokens that it requests or owns.
        data: the data of the request.
        since: seconds since the grant (of a waiter: since it joined the queue).
        timeout: seconds until a waiter times out; ``None`` for never or unknown.
        remaining: seconds until its session expires unless it is renewed.
        session_description: the session's description, where known.
        pid: the process on `host`, where known.
        host: the name of the machine, where known.
        program: the name of the program, where known.
    """

    session_id: int
    order_id: int
    count: int
    data: bytes
    since: float | None = None
    timeout: float | None = None
    remaining: float | None = None
    session_description: str | None = None
    pid: int | None = None
    host: str | None = None
    program: str | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A request of a resumed session that is still in a queue.

    Attributes:
        request_id: the request's number within the session.
        name: the name of the semaphore.
        order_id: its place in the queue, and its fencing token.
        count: number of tokens that it requests or owns.
        data: the data of the request.
        ephemeral: whether the semaphore is ephemeral.
        granted: whether it owns its tokens.
    """

    request_id: int
    name: str
    order_id: int
    count: int
    data: bytes
    ephemeral: bool
    granted: bool


@dataclass(frozen=True, slots=True)
class SemaphoreDescription:
    """A semaphore.

    Attributes:
        held: the sum of the owners' counts.
        owners, waiters: in the order of their order ids; empty unless requested.
        waiting: number of waiters, where known.
    """

    name: str
    data: bytes
    limit: int
    held: int
    ephemeral: bool
    owners: tuple[RequestDescription, ...] = ()
    waiters: tuple[RequestDescription, ...] = ()
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class BlockedTask:
    """A task, or a thread of `tenure.blocking`, whose wait others may have to wait for.

    It is inside leases, or it waits for several tokens and so is in the way of smaller requests.

    Attributes:
        name: the name of the semaphore, mutex or election that it waits for.
        order_id: the request that it waits for.
        leases: name and order id of each lease and ticket whose blocks it is inside, innermost
            first, on the same node.
        left_out: number of leases that are missing in `leases`, because they are too many.
        task: the name of the task.
        timeout: whether the wait has a timeout.
        raises: whether its session was opened with ``on_deadlock="raise"``.
        session_id: the session of the request.
        host, pid, program: its process; ``None`` is unknown.
        session_description: the session's description, where known.
    """

    name: str
    order_id: int
    leases: tuple[tuple[str, int], ...]
    left_out: int = 0
    task: str = ""
    timeout: bool = False
    raises: bool = False
    session_id: int = 0
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    session_description: str | None = None

    @property
    def requests(self) -> tuple[tuple[str, int], ...]:
        """Name and order id of each of its requests: the one that it waits for, then `leases`."""
        return (self.name, self.order_id), *self.leases


@dataclass(frozen=True, slots=True)
class WaitGraph:
    """The reason why the waiters of a name wait, as far as the store shows it.

    Attributes:
        node: the path of the node.
        name: the name.
        semaphores: the semaphore of that name, then those that tasks of its holders and waiters
            wait for, and so on; each with its queue. Empty if the name has no semaphore.
        tasks: the blocked tasks of the requests in these queues.
        sessions: the sessions of the requests in these queues.
        deadlocks: the deadlocks among the tasks, each with the oldest wait first.
        complete: whether everything that the tasks wait for was read; false beyond 200 semaphores.
    """

    node: str
    name: str
    semaphores: tuple[SemaphoreDescription, ...]
    tasks: tuple[BlockedTask, ...] = ()
    sessions: tuple[SessionDescription, ...] = ()
    deadlocks: tuple[tuple[BlockedTask, ...], ...] = ()
    complete: bool = True

    @property
    def holders(self) -> tuple[RequestDescription, ...]:
        """The holders of the name."""
        return self.semaphores[0].owners if self.semaphores else ()

    @property
    def waiters(self) -> tuple[RequestDescription, ...]:
        """The waiters of the name, in order."""
        return self.semaphores[0].waiters if self.semaphores else ()

    def semaphore(self, name: str) -> SemaphoreDescription | None:
        """Return one of the semaphores, or ``None``."""
        return next((each for each in self.semaphores if each.name == name), None)

    def task(self, name: str, order_id: int) -> BlockedTask | None:
        """Return the blocked task that waits for a request, or is inside its block.

        Returns:
            ``None`` if none is known: the program works, or waits for something outside of the
            store, or its request is in no block.
        """
        key = (name, order_id)
        return next((each for each in self.tasks if key in each.requests), None)

    def session(self, session_id: int) -> SessionDescription | None:
        """Return one of the sessions, or ``None``."""
        return next((each for each in self.sessions if each.id == session_id), None)

    @property
    def roots(self) -> tuple[RequestDescription, ...]:
        """The holders at the ends of the chains: those of whose tasks no wait is known."""
        return tuple(
            owner
            for semaphore in self.semaphores
            for owner in semaphore.owners
            if self.task(semaphore.name, owner.order_id) is None
        )

    def chain(self, order_id: int) -> WaitGraph | None:
        """Return the part of the graph that explains one request of the name.

        For a waiter, it has the waiters ahead of it, the holders, what their tasks wait for, and so
        on. For a holder, it has what the tasks inside its block wait for. So its `roots` are the
        holders that this request waits for.

        Example::

            async with client.mutex("invoices").lock() as lease:
                graph = await client.waits("invoices")
            if chain := graph.chain(lease.fencing_token):
                for root in chain.roots:
                    print(root.program, root.pid, root.host)

        Args:
            order_id: the order id of the request, which is its fencing token.

        Returns:
            A graph whose first semaphore has a waiter as the last of its waiters, or a holder as
            its only request. The requests behind it are left out, also if a task of a deadlock
            waits for one of them. ``None`` if the name has no such request.
        """
        waiters = tuple(each for each in self.waiters if each.order_id <= order_id)
        owners: tuple[RequestDescription, ...] = self.holders
        if not any(each.order_id == order_id for each in waiters):
            owners, waiters = tuple(each for each in owners if each.order_id == order_id), ()
            if not owners:
                return None
        tasks = self._tasks_of([(self.name, each.order_id) for each in (*owners, *waiters)])
        names = {task.name for task in tasks}
        first = replace(self.semaphores[0], owners=owners, waiters=waiters)
        semaphores = (first, *(each for each in self.semaphores[1:] if each.name in names))
        sessions = {each.session_id for queue in semaphores for each in _queue(queue)}
        return replace(
            self,
            semaphores=semaphores,
            tasks=tuple(each for each in self.tasks if each in tasks),
            sessions=tuple(each for each in self.sessions if each.id in sessions),
            deadlocks=tuple(each for each in self.deadlocks if not tasks.isdisjoint(each)),
        )

    def _tasks_of(self, left: list[tuple[str, int]]) -> set[BlockedTask]:
        """Return the tasks of these requests, those of the requests ahead of theirs, and so on."""
        inside: dict[tuple[str, int], list[BlockedTask]] = {}
        for task in self.tasks:
            for request in task.requests:
                inside.setdefault(request, []).append(task)
        queues = {each.name: list(_queue(each)) for each in self.semaphores}
        found: set[BlockedTask] = set()
        while left:
            for task in inside.pop(left.pop(), ()):
                found.add(task)
                left += [
                    (task.name, each.order_id)
                    for each in queues.get(task.name, ())
                    if each.order_id < task.order_id
                ]
        return found


def _queue(semaphore: SemaphoreDescription) -> tuple[RequestDescription, ...]:
    return (*semaphore.owners, *semaphore.waiters)


@dataclass(frozen=True, slots=True)
class Leader:
    """Leader of an election.

    Attributes:
        data: the leader's data, from `Election.campaign` or `Leadership.proclaim`.
        is_me: whether the leader campaigns through the observing session.
        term: rises with every leader; it is the leader's fencing token.
        host, pid, program: the leader's process, where known.
        description: the description of the leader's session, where known. These four take no
            part in comparisons.
    """

    data: bytes
    is_me: bool
    term: int
    host: str | None = field(default=None, compare=False)
    pid: int | None = field(default=None, compare=False)
    program: str | None = field(default=None, compare=False)
    description: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LastRun:
    """The latest run of a job that `Client.once` guards.

    Attributes:
        started: time of its start by the store's clock, in seconds since the Unix epoch.
        since: seconds since its start, by the same clock.
        succeeded: whether it was successful; false while it runs.
        fencing_token: fencing token of its lease; 0 if the store has none.
        host, pid, program: the process that ran it; ``None`` is unknown.
        description: the description of its session.
    """

    started: float
    since: float
    succeeded: bool
    fencing_token: int
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class RateDescription:
    """State of a rate.

    Attributes:
        free: number of tokens that a call could take now, without a wait.
        wait: seconds until the requested tokens could be taken.
        limit, per, burst: the values of the rate, as for `Client.rate`.
    """

    free: int
    wait: float
    limit: int
    per: float
    burst: int


@dataclass(frozen=True, slots=True)
class MutexHolder:
    """Holder of a mutex.

    Attributes:
        data: the data of the holder's request.
        is_me: whether it is held through the calling session.
        fencing_token: the holder's fencing token.
        since: seconds it has been held, where known.
        remaining: seconds until the holder's session expires unless it is renewed, where known.
        waiting: number of waiters, where known.
        host, pid, program: the holder's process, where known.
        description: the description of the holder's session, where known.
    """

    data: bytes
    is_me: bool
    fencing_token: int
    since: float | None = None
    remaining: float | None = None
    waiting: int | None = None
    host: str | None = None
    pid: int | None = None
    program: str | None = None
    description: str | None = None


FULL_STORES = "memory://, sqlite://, redis://, postgresql://, etcd:// and tenure://"
"""Stores with fencing tokens, positions of waiters, data and sessions that can be resumed."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of an engine, and the facts that it reports.

    Attributes:
        fencing: grants carry order ids (fencing tokens).
        watch: changes can be watched.
        data: semaphores and requests carry data.
        lasting: semaphores can exist without requests, and sessions can create them.
        resume: sessions of liveness ``window`` with resume tokens.
        since: descriptions report the time since the grant or the request.
        waiter_timeout: descriptions have the remaining timeout of a waiter.
        durable: the state survives the end of every process.
        waiter_order: a request's order id is known while it waits, and not only with its grant.
        one_step: a session that ends leaves all its queues in one step. If false, this holds only
            for its first request for each name.
        removal_reason: the deletion of an ephemeral semaphore is distinguished from the eviction
            of its last request.
        owners: descriptions list the owners and the waiters.
        descriptions: an owner and a waiter are described with their session's description.
        longest_window: seconds of the longest recovery window that a session may have.
        store_time: the store's wall clock can be read. If false, `Client.once` uses the caller's
            clock.
        adopt: a session that is taken over can get another recovery window.
        resize: the limit of a semaphore can be changed.
        rates: the engine has rates (`Client.rate`).
    """

    fencing: bool = True
    watch: bool = True
    data: bool = True
    lasting: bool = True
    resume: bool = False
    since: bool = True
    waiter_timeout: bool = True
    durable: bool = False
    waiter_order: bool = True
    one_step: bool = True
    removal_reason: bool = True
    owners: bool = True
    descriptions: bool = True
    longest_window: float = 1800.0
    store_time: bool = True
    adopt: bool = False
    resize: bool = False
    rates: bool = False
