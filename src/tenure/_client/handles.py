"""Mistakes that every handle reports: the wrong kind of ``with``, and pickling.

A handle is a client, a session, or an object made by one of them. It belongs to one process, and to
the API (asynchronous or sync) that made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from tenure.errors import Misuse

__all__ = ["AsyncHandle", "Handle"]


class Handle:
    """Base of all handles: cannot be pickled or copied."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise Misuse(
            f"{self!r} cannot be pickled or copied, because it belongs to this process: pass the "
            "URL to the other process and call connect() there"
        )


class AsyncHandle(Handle):
    """Base of the asynchronous handles: rejects ``with``."""

    __slots__ = ()

    # Hidden from type checkers, so that they report the mistake themselves.
    if not TYPE_CHECKING:  # pragma: no branch

        def __enter__(self):
            raise Misuse(
                f"{self!r} is entered with 'async with'; for 'with', in a program without an "
                "event loop, import tenure.blocking"
            )

        def __exit__(self, *_):
            """Never called, since entering raises; Python looks it up first."""
