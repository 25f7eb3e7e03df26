"""Order in which one program's steps for one key reach the server.

They may go over several connections, between which the server knows no order. So a request is
begun when every step before it has been answered. What leaves does not wait for those before it:
they may be waiting for what it gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

__all__ = ["Lines"]


class Lines:
    """Lines of the steps for each key; one that is empty takes no room."""

    def __init__(self) -> None:
        """Start without steps."""
        # The steps of a key in order, and what begins each; ``None`` once it has been begun.
        self._lines: dict[str, dict[Hashable, Callable[[], None] | None]] = {}

    def join(self, key: str, step: Hashable, begin: Callable[[], None]) -> None:
        """Have a step begun when its turn comes, perhaps at once.

        `done` is called when it is answered, perhaps before `begin` returns.
        """
        line = self._lines.setdefault(key, {})
        line[step] = begin
        self._go_on(line)

    def begin(self, key: str, step: Hashable) -> None:
        """Take a step as begun; it joins the line if it was not there. Later steps wait for it."""
        self._lines.setdefault(key, {})[step] = None

    def first(self, key: str) -> Hashable:
        """Return the step for which the others wait."""
        return next(iter(self._lines.get(key, {})), None)

    def done(self, key: str, step: Hashable) -> None:
        """Remove a step that is over or cancelled, and begin the next one."""
        line = self._lines.get(key)
        if line is not None and step in line:
            del line[step]
            if line:
                self._go_on(line)
            else:
                del self._lines[key]

    def _go_on(self, line: dict[Hashable, Callable[[], None] | None]) -> None:
        first, begin = next(iter(line.items()))
        if begin is not None:
            line[first] = None
            begin()
