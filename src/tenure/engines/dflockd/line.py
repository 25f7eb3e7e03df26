"""The order in which one program's steps for one key reach the server.

They may go over several connections, between which the server knows no order. So a request is
begun when every step before it has been answered. What leaves does not wait for those before it:
they may be waiting for what it gives back.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

__all__ = ["Lines", "Step"]


class Step(Protocol):
    """Work that is to be done in its turn."""

    def turn(self) -> None:
        """Begin. `Lines.done` is called when it is answered, perhaps before this returns."""


class Lines:
    """The lines of all keys; one that is empty takes no room."""

    def __init__(self) -> None:
        # The steps of a key in order, and whether each has been begun.
        self._lines: dict[Hashable, dict[Step, bool]] = {}

    def join(self, key: Hashable, step: Step) -> None:
        """Have a step begun when its turn comes, perhaps at once."""
        line = self._lines.setdefault(key, {})
        line[step] = False
        self._go_on(line)

    def join_and_begin(self, key: Hashable, step: Step) -> None:
        """Begin a step now; steps that join later come after it."""
        self._lines.setdefault(key, {})[step] = True
        step.turn()

    def has_begun(self, key: Hashable, step: Step) -> bool:
        """Return true if that step is under way."""
        return self._lines.get(key, {}).get(step, False)

    def first(self, key: Hashable) -> Step | None:
        """The step for which the others wait."""
        return next(iter(self._lines.get(key, {})), None)

    def done(self, key: Hashable, step: Step) -> None:
        """Remove a step that is over or cancelled, and begin the next one."""
        line = self._lines.get(key)
        if line is not None and step in line:
            del line[step]
            if line:
                self._go_on(line)
            else:
                del self._lines[key]

    def _go_on(self, line: dict[Step, bool]) -> None:
        first = next(iter(line))
        if not line[first]:
            line[first] = True
            first.turn()
