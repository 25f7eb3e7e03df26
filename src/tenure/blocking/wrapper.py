"""Base of the sync wrappers.

A sync wrapper has only an asynchronous object and the portal. All state is in that object, so two
wrappers of one object are equal and equivalent. A method passes its arguments to the object's
method of the same name, through the portal if that method is awaited or uses state of the event
loop.

``make sync`` generates the wrappers' public methods from the asynchronous classes (`tools.sync`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tenure._client.handles import Handle
from tenure.blocking.portal import Portal
from tenure.errors import Misuse

__all__ = ["SyncWrapper", "made_from", "wrap"]

_classes: dict[str, type[SyncWrapper[Any]]] = {}
"""The wrapper classes, by the names that they share with the asynchronous classes."""

T = TypeVar("T")


class SyncWrapper(Handle, Generic[T]):
    """A thread's handle on an asynchronous object."""

    __slots__ = ("__weakref__", "_portal", "_wrapped")

    def __init_subclass__(cls) -> None:
        """Register the wrapper class under the name that it shares with the wrapped class."""
        _classes.setdefault(cls.__name__, cls)

    def __init__(self, portal: Portal, wrapped: T) -> None:
        """Wrap an asynchronous object that belongs to the portal's loop."""
        self._portal = portal
        self._wrapped = wrapped

    def __repr__(self) -> str:
        """Return the description of the wrapped object, marked as blocking."""
        return f"<blocking {repr(self._wrapped).removeprefix('<')}"

    def __eq__(self, other: object) -> bool:
        """Return true if both wrap the same object."""
        return isinstance(other, SyncWrapper) and other._wrapped is self._wrapped

    def __hash__(self) -> int:
        """Return a hash of the wrapped object's identity."""
        return hash(id(self._wrapped))

    # Hidden from type checkers, so that they report the mistake themselves.
    if not TYPE_CHECKING:

        async def __aenter__(self):
            """Raise `Misuse`: a sync wrapper is not entered with ``async with``."""
            raise Misuse(f"{self!r} is entered with 'with'; for 'async with', import tenure")

        async def __aexit__(self, *_):
            """Never called, since entering raises; Python looks it up first."""


def made_from(
    source: SyncWrapper[Any], make: Callable[..., T], *args: object, **kwargs: object
) -> tuple[Portal, T]:
    """Create an asynchronous object from another one; return a wrapper's arguments."""
    return source._portal, make(source._wrapped, *args, **kwargs)  # noqa: SLF001  its own class


def wrap(portal: Portal, wrapped: object) -> Any:
    """Return a wrapper of an object whose wrapper class the caller cannot import."""
    return _classes[type(wrapped).__name__](portal, wrapped)
