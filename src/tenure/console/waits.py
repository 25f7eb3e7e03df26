"""Waits of a node: tasks that wait, the holders at the root, deadlocks.

A value without I/O, made of one reading (`tenure.console.reading.read_waits`).
`tenure.core.deadlocks` has the rule for what is a deadlock. Each task, and each holder without a
known wait, is a `WaitParty`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tenure.console.graph import GraphNode, Picture, draw
from tenure.core.deadlocks import by_request, deadlocks, place, standing, waits_for
from tenure.core.rules import fits
from tenure.model import (
    BlockedTask,
    RequestDescription,
    SemaphoreDescription,
    SessionDescription,
)

MOST_PICTURED = 60
"""Tasks in the picture, and as many holders."""

MOST_AWAITED = 8
"""Requests that one task is shown to wait for."""

MOST_STEPS = 40
"""Lines of a chain."""

NOTHING = draw(())

Key: TypeAlias = tuple[str, int]
"""Name and order id of a request."""


@dataclass(frozen=True, slots=True)
class WaitParty:
    """A task that waits inside leases, or a holder of whose tasks no wait is known.

    Attributes:
        key: distinguishes it from the others of its node.
        task: its wait; ``None`` for a holder.
        leases: name and order id of each lease that it is inside, or that it holds. Those of
            semaphores for which no task waits are as the task has published them.
        began: the time at which its wait began, or its oldest lease; ``None`` is unknown.
        session: its session, if it was read.
        remaining: seconds until its session expires unless it is renewed, where known.
        awaited: the keys of the parties that it waits for.
        more: number of further requests that it waits for.
        deadlock: the number of the deadlock that it is a part of; 0: of none.
    """

    key: str
    session_id: int
    program: str | None
    host: str | None
    pid: int | None
    session_description: str | None
    task: BlockedTask | None = None
    leases: tuple[Key, ...] = ()
    began: float | None = None
    session: SessionDescription | None = None
    remaining: float | None = None
    awaited: tuple[str, ...] = ()
    more: int = 0
    deadlock: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its leases, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.leases))


@dataclass(frozen=True, slots=True)
class ChainStep:
    """One line of a chain: a holder, and what its task waits for.

    Attributes:
        name: the semaphore that it holds.
        request: the holder's request.
        began: the time of its grant, where known.
        session: its session, if it was read.
        party: the wait of its task, if one is known.
        again: whether what the task waits for stands above.
        more: number of further holders that have no line.
    """

    depth: int
    name: str
    request: RequestDescription
    began: float | None
    session: SessionDescription | None
    party: WaitParty | None
    again: bool
    more: int = 0


@dataclass(frozen=True, slots=True)
class NodeWaits:
    """The waits of one node.

    Attributes:
        read_at: the time of the reading.
        tasks: the tasks that wait, those of deadlocks first, then the oldest wait first.
        holders: the holders for which they wait, and of whose tasks no wait is known.
        deadlocks: the tasks of each deadlock.
        queues: the semaphores that were read, by name.
        sessions: the sessions that were read, by id.
        complete: whether everything was read.
        picture: the graph of the first tasks.
    """

    node: str
    read_at: float
    tasks: tuple[WaitParty, ...] = ()
    holders: tuple[WaitParty, ...] = ()
    deadlocks: tuple[tuple[WaitParty, ...], ...] = ()
    queues: Mapping[str, SemaphoreDescription] = field(default_factory=dict)
    sessions: Mapping[int, SessionDescription] = field(default_factory=dict)
    complete: bool = True
    picture: Picture = NOTHING

    @property
    def parties(self) -> Mapping[str, WaitParty]:
        """The tasks and the holders by key."""
        return {each.key: each for each in (*self.tasks, *self.holders)}

    def chain(self, name: str) -> list[ChainStep]:
        """Return the holders of a semaphore, what their tasks wait for in turn, and so on."""
        blocked = {key: each for each in self.tasks for key in _requests(each)}
        steps: list[ChainStep] = []
        self._follow(name, 0, {name}, blocked, steps)
        return steps

    def _follow(
        self,
        name: str,
        depth: int,
        seen: set[str],
        blocked: Mapping[Key, WaitParty],
        steps: list[ChainStep],
    ) -> None:
        owners = self.queues[name].owners if name in self.queues else ()
        shown = owners[:MOST_AWAITED]
        for owner in shown:
            if len(steps) >= MOST_STEPS:
                return
            party = blocked.get((name, owner.order_id))
            following = None if party is None or party.task is None else party.task.name
            again = following in seen
            left = len(owners) - len(shown) if owner is shown[-1] else 0
            session = self.sessions.get(owner.session_id)
            began = _began(owner, self.read_at)
            steps.append(ChainStep(depth, name, owner, began, session, party, again, left))
            if following is not None and not again:
                seen.add(following)
                self._follow(following, depth + 1, seen, blocked, steps)


def node_waits(
    node: str,
    read_at: float,
    published: Sequence[BlockedTask],
    queues: Mapping[str, SemaphoreDescription],
    sessions: Mapping[int, SessionDescription],
    *,
    complete: bool,
) -> NodeWaits:
    """Return the waits of a node.

    Args:
        node: its path.
        read_at: the time of the reading.
        published: the published waits, read before the queues.
        queues: the semaphores that they wait for.
        sessions: the sessions of the tasks and the owners, as far as they were read.
        complete: whether everything was read.
    """
    blocked = standing(published, queues)
    found = deadlocks(blocked, queues)
    number = {task: at for at, members in enumerate(found, start=1) for task in members}
    blocked.sort(key=lambda task: (number.get(task, len(found) + 1), task.order_id))
    seen = Counter[int]()
    keys: dict[BlockedTask, str] = {}
    for task in blocked:
        seen[task.order_id] += 1  # several tasks may wait for one ticket
        again = seen[task.order_id]
        keys[task] = f"t{task.order_id}" + (f"-{again}" if again > 1 else "")
    by_key = by_request(blocked)
    inside = {(each.name, each.order_id): each.leases for each in published}
    within = [by_request(members) for members in found]
    requests = {
        (name, each.order_id): each
        for name, queue in queues.items()
        for each in (*queue.owners, *queue.waiters)
    }
    holders: dict[str, WaitParty] = {}
    tasks: list[WaitParty] = []
    for task in blocked:
        queue, at = queues[task.name], number.get(task, 0)
        awaited = dict.fromkeys(
            keys[each] for each in (waits_for(task, queue, within[at - 1]) if at else ())
        )
        ahead = _awaited(task, queue, by_key)
        for request in ahead[:MOST_AWAITED]:
            key = (task.name, request.order_id)
            if key in by_key:
                awaited[keys[by_key[key]]] = None
            else:
                holder = _holder(key, request, read_at, sessions, holders)
                awaited[holder] = None
        request = requests[task.name, task.order_id]
        tasks.append(
            WaitParty(
                keys[task],
                task.session_id,
                task.program,
                task.host,
                task.pid,
                task.session_description,
                task,
                (
                    *task.leases,
                    *(each for each in inside[task.name, task.order_id] if each[0] not in queues),
                ),
                _began(request, read_at),
                sessions.get(task.session_id),
                request.remaining,
                tuple(awaited),
                max(0, len(ahead) - MOST_AWAITED),
                at,
            )
        )
    members = [tuple(each for each in tasks if each.deadlock == at + 1) for at in range(len(found))]
    return NodeWaits(
        node,
        read_at,
        tuple(tasks),
        tuple(holders.values()),
        tuple(members),
        queues,
        sessions,
        complete,
        _picture(tasks, holders),
    )


def _requests(party: WaitParty) -> Iterator[Key]:
    if party.task is not None:
        yield from party.task.requests


def _awaited(
    task: BlockedTask, queue: SemaphoreDescription, blocked: Mapping[Key, BlockedTask]
) -> Sequence[RequestDescription]:
    """Return the requests that a task waits for: the owners, if it does not fit beside them.

    Otherwise a larger request is ahead of it in the queue; then the last task that waits there.
    """
    ahead, count = place(task, queue)
    counts = [each.count for each in queue.owners]
    if not fits(sum(counts), queue.limit in counts, count, queue.limit):
        return queue.owners
    waiting = [
        each for each in ahead[len(queue.owners) :] if (queue.name, each.order_id) in blocked
    ]
    return waiting[-1:] or ahead[-1:]


def _holder(
    key: Key,
    request: RequestDescription,
    read_at: float,
    sessions: Mapping[int, SessionDescription],
    holders: dict[str, WaitParty],
) -> str:
    """Add a lease to the holder with its session, and return the holder's key."""
    at = f"h{request.session_id}"
    began = _began(request, read_at)
    holder = holders.get(at)
    if holder is None:
        holders[at] = WaitParty(
            at,
            request.session_id,
            request.program,
            request.host,
            request.pid,
            request.session_description,
            None,
            (key,),
            began,
            sessions.get(request.session_id),
            request.remaining,
        )
    elif key not in holder.leases:
        known = [each for each in (holder.began, began) if each is not None]
        holders[at] = replace(holder, leases=(*holder.leases, key), began=min(known, default=None))
    return at


def _began(request: RequestDescription, read_at: float) -> float | None:
    return None if request.since is None else read_at - request.since


def _picture(tasks: Sequence[WaitParty], holders: Mapping[str, WaitParty]) -> Picture:
    """Return the picture of the first tasks, and of the holders that they wait for."""
    shown = tasks[:MOST_PICTURED]
    awaited = dict.fromkeys(key for each in shown for key in each.awaited if key in holders)
    nodes = [GraphNode(each.key, each.awaited, each.deadlock) for each in shown]
    return draw([*nodes, *(GraphNode(key) for key in list(awaited)[:MOST_PICTURED])])
