"""The order in which one program's steps for one key reach the server.

They may go over several connections, between which the server knows no order. So a step is begun
when the one before it has been answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

__all__ = ["Lines", "Step"]


class Step(Protocol):
    """What is to be done in its turn."""

    def turn(self) -> None:
        """Begin. `Lines.done` is called when it is answered, perhaps before this returns."""


class Lines:
    """The lines of all keys; one that is empty takes no room."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[Step]] = {}

    def join(self, key: Hashable, step: Step) -> None:
        """Have a step begun when its turn comes, perhaps at once."""
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = deque([step])
            step.turn()
        else:
            line.append(step)

    def leave(self, key: Hashable, step: Step) -> None:
        """A step that has not been begun is not wanted any more."""
        line = self._lines.get(key)
        if line is not None and line[0] is not step and step in line:
            line.remove(step)

    def has_turn(self, key: Hashable, step: Step) -> bool:
        """Whether that step is under way."""
        line = self._lines.get(key)
        return line is not None and line[0] is step

    def done(self, key: Hashable, step: Step) -> None:
        """That step is over, if it was under way; the next one's turn has come."""
        line = self._lines.get(key)
        if line is None or line[0] is not step:
            return
        line.popleft()
        if line:
            line[0].turn()
        else:
            del self._lines[key]
