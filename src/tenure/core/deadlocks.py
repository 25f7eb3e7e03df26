"""Deadlocks among blocked tasks: the published waits, and the rule.

A *publication* is a request on the ephemeral semaphore `WAITS` of a node. Its data says for which
request a task waits, and which leases and tickets the task is inside. The client publishes a wait
that lasts, and withdraws the publication when the wait ends (`tenure._client.blocked`).

**The rule.** The owners of a semaphore are the longest prefix of its queue whose counts fit. So a
task can continue if the counts of those requests ahead of its own that never leave, and its own,
fit in the limit. A request never leaves if a task that cannot continue is inside its block, or
waits for it. Of every other request nothing is known, and it may leave. The tasks that cannot
continue are the greatest set for which this holds. With counted tokens this is not every cycle of
waits: another holder outside of the cycle may release enough.

A *deadlock* is a set of tasks that wait for each other, directly or through others of the set, and
that cannot continue even if all other tasks do: a strongly connected part of the graph of waits
that is stuck by itself. Tasks that wait behind one are no part. Its *victim* is the member whose
request joined its queue last, among those whose sessions raise `Deadlock`. Order ids rise over the
whole store, so every observer finds the same one.

A timeout ends a wait some time, so it ends a deadlock too. It makes no difference to the rule.

**One state from several readings.** A reading describes `WAITS` first, and then each semaphore that
matters. No reading of several semaphores is of one instant. `standing` keeps a wait only if its
request still waits in the later description, and a lease only if its request is still in its queue
there. Each of these facts was true when its publication was read, because a publication follows
the beginning of its wait, and is withdrawn at its end before the task can release anything through
that session. Each was also true at the later description, and a request that left its queue never
returns. So at the instant between the first reading and the others, all of them were true at once.
A ticket keeps its place when its wait ends; what was then read is true of the first reading.

The facts are those of the store. A program that was cut off may have ended a wait of which the
store still knows; its requests stay in their queues until the store receives the withdrawal, or
its session has ended.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from tenure.core.rules import check_name, fits
from tenure.errors import Unsupported
from tenure.model import BlockedTask, Capabilities, RequestDescription, SemaphoreDescription

WAITS = ":tenure:waits"
"""Name of the ephemeral semaphore of a node whose owners' data are the published waits."""

DATA_BYTES = 8192
"""Greatest size of a publication: room for the longest name, escaped, and for many short ones.

Leases that do not fit, or are more than `MOST_LEASES`, are counted (`BlockedTask.left_out`).
"""

MOST_LEASES = 100
"""Leases in a publication. Many more would fit if their names are short, but take long to read."""

TASK_CHARACTERS = 80

Queues = Mapping[str, SemaphoreDescription]
"""Semaphores with their owners and waiters, by name."""


def shows_waits(capabilities: Capabilities) -> bool:
    """Return true if a store shows which request a task waits for."""
    return capabilities.owners and capabilities.data and capabilities.waiter_order


def unsupported(url: str, node: str) -> Unsupported:
    """Return the error of a store that does not show which request a task waits for."""
    return Unsupported(
        f"{url} does not show which task waits for which; memory://, sqlite://, redis://, "
        "postgresql://, etcd:// and tenure:// in front of them do",
        node=node,
    )


def encode(
    name: str,
    order_id: int,
    leases: Sequence[tuple[str, int]],
    *,
    task: str,
    timeout: bool,
    raises: bool,
) -> bytes:
    """Return the data of a publication, of at most `DATA_BYTES`, the innermost leases first."""
    fields = {
        "for": [name, order_id],
        "in": [],
        "more": len(leases),
        "task": task[:TASK_CHARACTERS],
        "timeout": timeout,
        "raise": raises,
    }
    room = DATA_BYTES - len(_json(fields))
    kept: list[tuple[str, int]] = []
    for lease in leases[:MOST_LEASES]:
        room -= len(_json(lease)) + 1
        if room < 0:
            break
        kept.append(lease)
    return _json(fields | {"in": kept, "more": len(leases) - len(kept)})


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def decode(owner: RequestDescription) -> BlockedTask | None:
    """Return the wait that an owner of `WAITS` has published; ``None`` for other data.

    Any program may write anything there.
    """
    if len(owner.data) > DATA_BYTES:
        return None
    try:
        match json.loads(owner.data):
            case {
                "for": [str(name), int(order_id)],
                "in": list(leases),
                "more": int(left_out),
                "task": str(task),
                "timeout": bool(timeout),
                "raise": bool(raises),
            } if len(leases) <= MOST_LEASES:
                pass
            case _:
                return None
        inside = tuple(pair for pair in map(_lease, leases) if pair is not None)
        check_name(name)
        task = task.encode(errors="replace").decode()[:TASK_CHARACTERS]
    except (ValueError, RecursionError):
        return None
    return BlockedTask(
        name,
        order_id,
        inside,
        left_out,
        task,
        timeout,
        raises,
        owner.session_id,
        owner.host,
        owner.pid,
        owner.program,
        owner.session_description,
    )


def _lease(value: object) -> tuple[str, int] | None:
    match value:
        case [str(name), int(order_id)]:
            check_name(name)
            return name, order_id
        case _:
            return None


def relevant(tasks: Sequence[BlockedTask]) -> list[BlockedTask]:
    """Leave out the tasks that, by the names alone, wait for no other task.

    A deadlock needs no description of what they wait for.
    """
    waiting: dict[str, list[BlockedTask]] = {}
    taken = Counter[str]()  # by name, the number of tasks inside a lease of it
    for task in tasks:
        waiting.setdefault(task.name, []).append(task)
        taken.update({name for name, _ in task.leases})
    free = [name for name in waiting if not taken[name]]
    while free:
        for task in waiting.pop(free.pop()):
            inside = {name for name, _ in task.leases}
            taken.subtract(inside)
            free += [name for name in inside if not taken[name] and name in waiting]
    return [task for task in tasks if task.name in waiting]


def standing(tasks: Iterable[BlockedTask], queues: Queues) -> list[BlockedTask]:
    """Return the tasks whose requests still wait, without the leases that have left their queues.

    Leases of semaphores that were not described are left out, too, and so are those of other
    processes: a program could publish anything.
    """
    waiting = {
        (name, each.order_id): each for name, queue in queues.items() for each in queue.waiters
    }
    there = {(name, each.order_id): each for name in queues for each in _queue(queues[name])}
    kept = []
    for task in tasks:
        request = waiting.get((task.name, task.order_id))
        if request is None or request.session_id != task.session_id:
            continue
        leases = tuple(key for key in task.leases if key in there and _is_of(task, there[key]))
        kept.append(replace(task, leases=leases))
    return kept


def _is_of(task: BlockedTask, request: RequestDescription) -> bool:
    if request.session_id == task.session_id:
        return True
    return task.pid is not None and (request.host, request.pid) == (task.host, task.pid)


def _queue(semaphore: SemaphoreDescription) -> Iterator[RequestDescription]:
    yield from semaphore.owners
    yield from semaphore.waiters


def stuck(tasks: Iterable[BlockedTask], queues: Queues) -> list[BlockedTask]:
    """Return the tasks that cannot continue, even if all others release everything.

    Args:
        tasks: as `standing` returns them.
        queues: the semaphores that they wait for.
    """
    # The oldest first: most tasks wait behind older ones, and so one pass finds most of them.
    left = sorted(tasks, key=_age)
    known = Counter(request for task in left for request in task.requests)
    blocked = {name: _BlockedQueue(queues[name], known) for name in {task.name for task in left}}
    while True:
        kept = []
        for task in left:
            if blocked[task.name].can_continue(task, known):
                known.subtract(task.requests)
            else:
                kept.append(task)
        if len(kept) == len(left):
            return kept
        left = kept


class _BlockedQueue:
    """The queue of a semaphore, with those of its requests that may never leave.

    Args:
        semaphore: the semaphore.
        known: the requests of blocked tasks.
    """

    def __init__(
        self, semaphore: SemaphoreDescription, known: Mapping[tuple[str, int], int]
    ) -> None:
        self._limit = semaphore.limit
        self._known: list[tuple[tuple[str, int], int]] = []  # with their counts
        self._places: dict[int, tuple[int, int]] = {}  # how many of them are ahead, and the count
        for each in _queue(semaphore):
            self._places[each.order_id] = len(self._known), each.count
            key = semaphore.name, each.order_id
            if key in known:
                self._known.append((key, each.count))

    def can_continue(self, task: BlockedTask, known: Mapping[tuple[str, int], int]) -> bool:
        """Return true if a task is granted once all requests that are not known have left."""
        ahead, count = self._places[task.order_id]
        counts = [each for key, each in self._known[:ahead] if known[key]]
        return fits(sum(counts), self._limit in counts, count, self._limit)


def by_request(tasks: Iterable[BlockedTask]) -> dict[tuple[str, int], BlockedTask]:
    """Return tasks by each of their requests."""
    return {request: task for task in tasks for request in task.requests}


def place(
    task: BlockedTask, semaphore: SemaphoreDescription
) -> tuple[list[RequestDescription], int]:
    """Return the requests ahead of the one that a task waits for, and its count."""
    queue = list(_queue(semaphore))
    place = [each.order_id for each in queue].index(task.order_id)
    return queue[:place], queue[place].count


def deadlocks(tasks: Iterable[BlockedTask], queues: Queues) -> list[tuple[BlockedTask, ...]]:
    """Return the deadlocks among tasks, each with the oldest wait first.

    Args:
        tasks: as `standing` returns them.
        queues: the semaphores that they wait for.
    """
    found = []
    left = [stuck(tasks, queues)]
    while left:
        members = left.pop()
        for part in _connected(members, queues):
            # The part may be stuck only because of tasks outside of it.
            alone = stuck(part, queues)
            if len(alone) == len(part):
                found.append(tuple(sorted(part, key=_age)))
            elif alone:
                left.append(alone)
    return sorted(found, key=lambda each: each[0].order_id)


def _connected(members: Sequence[BlockedTask], queues: Queues) -> list[list[BlockedTask]]:
    """Return the strongly connected parts of the graph of waits among stuck tasks."""
    known = by_request(members)
    tasks = list(dict.fromkeys(members))
    number = {task: at for at, task in enumerate(tasks)}
    after = [[number[each] for each in waits_for(task, queues[task.name], known)] for task in tasks]
    before: list[list[int]] = [[] for _ in tasks]
    for at, others in enumerate(after):
        for other in others:
            before[other].append(at)
    parts, left = [], set(number.values())
    while left:
        at = min(left)
        part = {at} | _reached(at, after, left) & _reached(at, before, left)
        left -= part
        parts.append([tasks[each] for each in sorted(part)])
    return parts


def waits_for(
    task: BlockedTask,
    semaphore: SemaphoreDescription,
    known: Mapping[tuple[str, int], BlockedTask],
) -> list[BlockedTask]:
    """Return the tasks for which this one waits.

    Those ahead of another one that waits in the same queue are left out, because that one waits
    for them.
    """
    found: list[BlockedTask] = []
    ahead, _ = place(task, semaphore)
    for each in reversed(ahead):
        other = known.get((semaphore.name, each.order_id))
        if other is not None:
            found.append(other)
            if other.order_id == each.order_id:
                break
    return found[::-1]


def _reached(start: int, after: Sequence[Sequence[int]], among: set[int]) -> set[int]:
    found: set[int] = set()
    left = list(after[start])
    while left:
        each = left.pop()
        if each in among and each not in found:
            found.add(each)
            left += after[each]
    return found


def _age(task: BlockedTask) -> int:
    return task.order_id


def victim(deadlock: Iterable[BlockedTask]) -> BlockedTask | None:
    """Return the member that raises `Deadlock`: the youngest wait of a session that does so."""
    return max((task for task in deadlock if task.raises), key=_age, default=None)
