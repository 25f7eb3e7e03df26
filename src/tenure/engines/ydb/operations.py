"""The order of a session's operations, over the members that they take.

On one member the server keeps the order in which it was asked. Two members have no order between
them, so an operation on a name waits until everything asked before it about that name on the
*other* members is answered. What is done to other names waits for none of that: a queue is that of
one name. A session of one member never waits here, and its operations have one order over all
names.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from functools import partial

__all__ = ["OperationQueue", "OperationQueues", "Step"]

Step = Callable[[], bool]
"""Goes, and returns true; or cannot go yet, has done nothing, and returns false."""


class OperationQueues:
    """A queue for each name of which something is asked, or waits to be."""

    def __init__(self) -> None:
        """Start without queues."""
        self._queues: dict[str, OperationQueue] = {}

    def of(self, name: str) -> OperationQueue:
        """The queue of a name; to be used at once, since one without operations is not kept."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = OperationQueue(partial(self._drop, name))
        return queue

    def _drop(self, name: str, queue: OperationQueue) -> None:
        if self._queues.get(name) is queue:
            del self._queues[name]

    def forget(self, member: Hashable) -> None:
        """The member is over: nothing asked on it will be answered."""
        for queue in list(self._queues.values()):
            queue.forget(member)

    def clear(self) -> None:
        """Nothing more is to go."""
        for queue in list(self._queues.values()):
            queue.clear()


class OperationQueue:
    """Operations on one name, one after the other.

    Args:
        empty: called with it when nothing waits here and everything is answered.
    """

    def __init__(self, empty: Callable[[OperationQueue], None]) -> None:
        """Start empty; `empty` is called when the queue is empty again."""
        self._empty = empty
        self._steps: deque[Step] = deque()
        self._unanswered: Counter[Hashable] = Counter()
        self._moving = False

    def add(self, step: Step) -> None:
        """Have it go after all that were added before."""
        self._steps.append(step)
        self.move()

    def free_for(self, member: Hashable) -> bool:
        """Return true if everything sent on other members has been answered."""
        return all(each == member for each in self._unanswered)

    @property
    def idle(self) -> bool:
        """True if everything sent on any member has been answered."""
        return not self._unanswered

    def begin(self, member: Hashable) -> None:
        """Something is asked on that member."""
        self._unanswered[member] += 1

    def end(self, member: Hashable) -> None:
        """It was answered."""
        left = self._unanswered[member] - 1
        if left > 0:
            self._unanswered[member] = left
        else:
            del self._unanswered[member]
        self.move()

    def forget(self, member: Hashable) -> None:
        """Nothing asked on that member will be answered."""
        del self._unanswered[member]
        self.move()

    def move(self) -> None:
        """Let go what can go now."""
        if self._moving:
            return
        self._moving = True
        try:
            while self._steps and self._steps[0]():
                self._steps.popleft()
        finally:
            self._moving = False
        if not self._steps and not self._unanswered:
            self._empty(self)

    def clear(self) -> None:
        """Nothing more is to go."""
        self._steps.clear()
        self._unanswered.clear()
        self._empty(self)
