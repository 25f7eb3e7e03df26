"""The order of a session's operations, over the strands that they take.

On one strand the server keeps the order in which it was asked. Two strands have no order between
them, so an operation waits until everything asked before it on the *other* strands is answered.
A session of one strand never waits here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable

__all__ = ["Lane", "Step"]

Step = Callable[[], bool]
"""Goes, and returns true; or cannot go yet, has done nothing, and returns false."""


class Lane:
    """Operations, one after the other."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()
        self._unanswered: Counter[Hashable] = Counter()
        self._moving = False

    def add(self, step: Step) -> None:
        """Have it go after all that were added before."""
        self._steps.append(step)
        self.move()

    def free_for(self, strand: Hashable) -> bool:
        """Whether everything asked on other strands has been answered."""
        return all(each == strand for each in self._unanswered)

    @property
    def idle(self) -> bool:
        """Whether everything asked on any strand has been answered."""
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
        """The strand is over: nothing asked on it will be answered."""
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

    def clear(self) -> None:
        """Nothing more is to go."""
        self._steps.clear()
        self._unanswered.clear()
