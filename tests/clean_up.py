"""Clean-up that a forked child leaves to its parent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def clean_up_with(action: Callable[[], object]) -> Iterator[None]:
    """Call `action` when the block ends, in the process that entered the block and in no other.

    A forked child has a copy of every suspended fixture. Where it collects one, the end of the
    fixture runs there as well, and must not touch the server or the folder of its parent.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            action()
