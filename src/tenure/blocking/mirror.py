"""What makes a class of `tenure.blocking` a mirror of one of the asynchronous API, its twin.

A mirror keeps its twin and the portal, and nothing else: all state is the twin's, so two mirrors
of one twin are equal and do the same. A method passes its arguments to the twin's method of the
same name, through the portal wherever the twin awaits or touches what belongs to the loop.

A public name here is a public name there, with the same parameters and the same documentation,
except for what `RENAMED` and `DIFFERENT` say. tests/blocking/test_surface.py holds both to it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from tenure._client.handles import Handle
from tenure.blocking.portal import Portal
from tenure.errors import Misuse

__all__ = ["DIFFERENT", "RENAMED", "Mirror", "mirrors"]

RENAMED = {
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
"""What has another name, by the name in the asynchronous API."""

BACK = {here: there for there, here in RENAMED.items()}

DIFFERENT = {
    "Leadership.__enter__": "says that it gives a Leadership, as the call that gives it does there",
    "RunLease.__enter__": "says that it gives a RunLease, as the call that gives it does there",
    "Lease.wait_lost": "takes a timeout, since nobody can cancel a thread; None when it is over",
}
"""What has other parameters, or gives something else, and why."""

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Mirror(Handle, Generic[T]):
    """A thread's handle on something of the asynchronous API."""

    __slots__ = ("__weakref__", "_portal", "_twin")

    def __init__(self, portal: Portal, twin: T) -> None:
        self._portal = portal
        self._twin = twin

    def __repr__(self) -> str:
        return f"<blocking {repr(self._twin).removeprefix('<')}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirror) and other._twin is self._twin

    def __hash__(self) -> int:
        return hash(id(self._twin))

    # Type checkers do not see these two, so that they report the mistake themselves.
    if not TYPE_CHECKING:

        async def __aenter__(self):
            raise Misuse(f"{self!r} is entered with 'with'; for 'async with', import tenure")

        async def __aexit__(self, *_):
            """Never called, since entering raises; Python looks for it first."""


def mirrors(twin: type) -> Callable[[C], C]:
    """Document the members of a mirror as those of its twin are documented."""

    def document(mirror: C) -> C:
        for name, here in vars(mirror).items():
            there = getattr(twin, name, None) or getattr(twin, BACK.get(name, name), None)
            if there is not None and there.__doc__ and not here.__doc__:
                here.__doc__ = _for_threads(there.__doc__)
        return mirror

    return document


def _for_threads(text: str) -> str:
    """Documentation of the asynchronous API, as it reads for threads."""
    text = re.sub(r", or (``)?await\1? it", "", inspect.cleandoc(text))
    text = re.sub(r"\b(?:async(?= with| for)|await) ", "", text)
    return re.sub(r"\btask(s?)\b", r"thread\1", text)
