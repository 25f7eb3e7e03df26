"""The fence before an object in this process.

* One lock is held from the comparison to the end of the write, so that no write of a newer token
  comes between the two, from any thread.
* The lock is a thread's. A block that awaits inside would let another task of the same thread wait
  for it for ever; that is noticed, and refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tenure.errors import Misuse
from tenure.fencing.tokens import Token, name_of, stale, token_of

__all__ = ["Fence"]


class Fence:
    """Fence that refuses tokens older than the newest it saw; for any number of threads.

    Example::

        from tenure.fencing import Fence

        report = {}
        fence = Fence("report")
        async with session.mutex("report").lock() as lease:
            with fence.writing(lease):  # raises StaleToken after a newer holder wrote
                report["total"] = 42

    It forgets when the process ends, and so should what it stands before: for a resource that
    outlives the process take the fence of its store, or give `newest` back to a new `Fence`.

    Args:
        resource: what errors call it.
        newest: the newest token that has written to the resource so far, if any.

    Raises:
        InvalidArgument: `resource` is no name, or `newest` no token.
    """

    __slots__ = ("_inside", "_lock", "_newest", "resource")

    def __init__(self, resource: str, *, newest: Token | None = None) -> None:
        """Start with `newest` as the newest token, or with none."""
        self.resource = name_of(resource)
        self._newest = None if newest is None else token_of(newest)
        self._lock = threading.Lock()
        self._inside: int | None = None  # the thread that has the lock

    def __repr__(self) -> str:
        """Return the resource and its newest token, for people."""
        return f"<{type(self).__name__} {self.resource!r} newest={self._newest}>"

    @property
    def newest(self) -> int | None:
        """The newest token that was admitted; ``None`` before the first."""
        return self._newest

    def admit(self, token: Token) -> None:
        """Compare and remember, and no more.

        This suffices where nothing can come between it and the write: one thread that writes, and
        no ``await`` on the way. Anywhere else take `writing`.

        Raises:
            StaleToken: a newer token was admitted before.
            InvalidArgument: it is no token.
            Misuse: called inside a `writing` block of the same thread.
        """
        with self.writing(token):
            pass

    @contextmanager
    def writing(self, token: Token) -> Iterator[None]:
        """Return a block in which to write, one at a time; it is not to await.

        A write that fails half-way is not undone, and its token stays admitted.

        Raises:
            StaleToken: a newer token was admitted before; the block is not entered.
            InvalidArgument: it is no token.
            Misuse: entered inside another `writing` block of the same thread.
        """
        number = token_of(token)
        me = threading.get_ident()
        if self._inside == me:
            raise Misuse(
                f"this thread is writing to {self.resource!r} already: a block of Fence.writing is "
                f"not to be nested, nor to await, which lets another task of the thread come here"
            )
        with self._lock:
            if self._newest is not None and number < self._newest:
                raise stale(self.resource, number, self._newest)
            self._newest = number
            self._inside = me
            try:
                yield
            finally:
                self._inside = None
