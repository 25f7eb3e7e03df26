"""Fence for an object in this process.

* A lock is held from the comparison to the end of the write, so no thread can write with a newer
  token in between.
* The lock belongs to a thread. A block must not await: another task of the same thread would wait
  for the lock for ever. This is detected, and raises.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tenure.errors import Misuse
from tenure.fencing.tokens import Token, name_of, stale, token_of

__all__ = ["Fence"]


class Fence:
    """Fence that rejects tokens older than the newest it has seen. It can be used by any thread.

    Example::

        from tenure.fencing import Fence

        report = {}
        fence = Fence("report")
        async with session.mutex("report").lock() as lease:
            with fence.writing(lease):  # raises StaleToken after a newer holder wrote
                report["total"] = 42

    Its state is lost when the process ends. For a resource that outlives the process use the fence
    of its store, or pass `newest` to a new `Fence`.

    Args:
        resource: the name of the resource in errors.
        newest: the newest token used for the resource so far, if any.

    Raises:
        InvalidArgument: `resource` is not a name, or `newest` is not a token.
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
        """Compare and record a token.

        This suffices if nothing can run between it and the write: only one thread writes, without
        an ``await``. Otherwise use `writing`.

        Raises:
            StaleToken: a newer token was admitted before.
            InvalidArgument: it is not a token.
            Misuse: called inside a `writing` block of the same thread.
        """
        with self.writing(token):
            pass

    @contextmanager
    def writing(self, token: Token) -> Iterator[None]:
        """Return a block for the write; blocks exclude each other, and must not await.

        A failed write is not undone, and its token stays admitted.

        Raises:
            StaleToken: a newer token was admitted before; the block is not entered.
            InvalidArgument: it is not a token.
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
