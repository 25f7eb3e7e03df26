"""Detection of forked children: a client's connections and threads belong to the parent."""

from __future__ import annotations

import os

from tenure.errors import Misuse

generation = 0
"""Number of forks between the process that imported tenure and this one. Not cached by callers."""


def _count() -> None:
    global generation  # noqa: PLW0603  one number for the process is the point
    generation += 1


if hasattr(os, "register_at_fork"):  # pragma: no branch  (there is no fork on Windows)
    os.register_at_fork(after_in_child=_count)


def check(born: int, what: str) -> None:
    """Raise `Misuse` if an object made in generation `born` is used in a forked child."""
    if born != generation:
        raise Misuse(
            f"{what} belongs to the parent of this forked process, which still uses it; "
            "connect again in the child"
        )
