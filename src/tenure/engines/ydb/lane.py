"""The order of a session's operations, over the strands that they take.

On one strand the server keeps the order in which it was asked. Two strands have no order between
them, so an operation on a name waits until everything asked before it about that name on the
*other* strands is answered. What is done to other names waits for none of that: a lane is that of
one name. A session of one strand never waits here, and its operations have one order over all
names.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from functools import partial

__all__ = ["Lane", "Lanes", "Step"]

Step = Callable[[], bool]
"""Goes, and returns true; or cannot go yet, has done nothing, and returns false."""


class Lanes:
    """A lane for each name of which something is asked, or waits to be."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}

    def of(self, name: str) -> Lane:
        """The lane of a name; to be used at once, since one without operations is not kept."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(partial(self._drop, name))
        return lane

    def _drop(self, name: str, lane: Lane) -> None:
        if self._lanes.get(name) is lane:
            del self._lanes[name]

    def forget(self, strand: Hashable) -> None:
        """The strand is over: nothing asked on it will be answered."""
        for lane in list(self._lanes.values()):
            lane.forget(strand)

    def clear(self) -> None:
        """Nothing more is to go."""
        for lane in list(self._lanes.values()):
            lane.clear()


class Lane:
    """Operations on one name, one after the other.

    Args:
        empty: called with it when nothing waits here and everything is answered.
    """

    def __init__(self, empty: Callable[[Lane], None]) -> None:
        self._empty = empty
        self._steps: deque[Step] = deque()
        self._unanswered: Counter[Hashable] = Counter()
        self._moving = False

    def add(self, step: Step) -> None:
        """Have it go after all that were added before."""
        self._steps.append(step)
        self.move()

    def free_for(self, strand: Hashable) -> bool:
        """Return true if everything sent on other strands has been answered."""
        return all(each == strand for each in self._unanswered)

    @property
    def idle(self) -> bool:
        """True if everything sent on any strand has been answered."""
        return not self._unanswered

    def begin(self, strand: Hashable) -> None:
        """Something is asked on that strand."""
        self._unanswered[strand] += 1

    def end(self, strand: Hashable) -> None:
        """It was answered."""
        left = self._unanswered[strand] - 1
        if left > 0:
            self._unanswered[strand] = left
        else:
            del self._unanswered[strand]
        self.move()

    def forget(self, strand: Hashable) -> None:
        """Nothing asked on that strand will be answered."""
        del self._unanswered[strand]
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
