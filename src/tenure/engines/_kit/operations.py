"""Operation queues: the order of one program's operations on each name.

A store preserves the order of operations only within one member: a session or a connection. So an
operation on a name waits until all earlier operations on that name through *other* members are
answered. Names are independent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, KeysView

Step = Callable[[], bool]
"""Begins an operation and returns true, or returns false if it cannot begin yet."""


class OperationQueues:
    """A queue for each name that has operations."""

    def __init__(self) -> None:
        self._queues: dict[str, OperationQueue] = {}

    def of(self, name: str) -> OperationQueue:
        """Return the queue of a name. Use it at once: a queue without operations is dropped."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = OperationQueue(name, self._drop)
        return queue

    def _drop(self, queue: OperationQueue) -> None:
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]

    def forget(self, member: Hashable) -> None:
        """Stop waiting for answers through a member."""
        for queue in list(self._queues.values()):
            queue.forget(member)

    def clear(self) -> None:
        """Drop all operations."""
        for queue in list(self._queues.values()):
            queue.clear()


class OperationQueue:
    """Operations on one name, in order.

    Args:
        name: the name of the queue.
        empty: called with the queue when no operation waits and all are answered.
    """

    __slots__ = ("_empty", "_moving", "_steps", "_unanswered", "name")

    def __init__(self, name: str, empty: Callable[[OperationQueue], None]) -> None:
        self.name = name
        self._empty = empty
        self._steps: OrderedDict[Step, None] = OrderedDict()
        self._unanswered: dict[Hashable, int] = {}
        self._moving = False

    def add(self, step: Step) -> None:
        """Begin an operation after all that were added before."""
        self._steps[step] = None
        self.move()

    def drop(self, step: Step) -> None:
        """Remove an operation, unless it has begun."""
        self._steps.pop(step, None)
        self.move()

    def free_for(self, member: Hashable) -> bool:
        """Return true if all operations through other members are answered."""
        return all(each == member for each in self._unanswered)

    @property
    def idle(self) -> bool:
        """True if all operations are answered."""
        return not self._unanswered

    @property
    def unanswered(self) -> KeysView[Hashable]:
        """Members with unanswered operations."""
        return self._unanswered.keys()

    def begin(self, member: Hashable) -> None:
        """Record that an operation was sent through a member."""
        self._unanswered[member] = self._unanswered.get(member, 0) + 1

    def try_begin(self, member: Hashable) -> bool:
        """Begin an operation if the queue is free for its member; return whether it has begun."""
        if not self.free_for(member):
            return False
        self.begin(member)
        return True

    def end(self, member: Hashable) -> None:
        """Record that an operation through a member was answered."""
        left = self._unanswered.get(member, 0) - 1  # late after `clear` or `forget`
        if left > 0:
            self._unanswered[member] = left
        else:
            self._unanswered.pop(member, None)
        self.move()

    def forget(self, member: Hashable) -> None:
        """Stop waiting for answers through a member."""
        self._unanswered.pop(member, None)
        self.move()

    def move(self) -> None:
        """Begin the operations that can begin now."""
        if self._moving:
            return
        self._moving = True
        try:
            while self._steps and (step := next(iter(self._steps)))():
                self._steps.pop(step, None)
        finally:
            self._moving = False
        if not self._steps and not self._unanswered:
            self._empty(self)

    def clear(self) -> None:
        """Drop all operations."""
        self._steps.clear()
        self._unanswered.clear()
        self._empty(self)
