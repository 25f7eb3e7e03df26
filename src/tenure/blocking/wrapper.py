"""Base of the sync wrappers.

A sync wrapper has only an asynchronous object and the portal. All state is in that object, so two
wrappers of one object are equal and equivalent. A method passes its arguments to the object's
method of the same name, through the portal if that method is awaited or uses state of the event
loop.

``make sync`` generates the wrappers' public methods from the asynchronous classes (`tools.sync`).

Rules for an exception that a signal handler raises, or that another thread sets:

* A method that releases something is decorated with `releasing`: the release is begun, even if
  the exception arrives before its first instruction. It is raised once the release has ended.
* A method that obtains something is decorated with `obtaining`: the exception is raised once it has
  been undone, as long as the method has not returned.
* The same holds for more exceptions meanwhile. Their handlers call nothing before they are inside
  a ``try`` again (`tenure.blocking.covered`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from tenure._client.habits import not_a_block
from tenure._client.handles import Handle
from tenure.blocking.covered import covered, covered_to_the_end
from tenure.blocking.portal import Portal, has_settled
from tenure.blocking.workers import Call
from tenure.errors import Misuse

_classes: dict[str, type[SyncWrapper[Any]]] = {}
"""The wrapper classes, by the names that they share with the asynchronous classes."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def releasing(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that releases: once called, it is begun, even if it is interrupted."""

    @covered
    @wraps(method)
    def _call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BaseException as interruption:
            insist(interruption, method, args, interruption)
            raise

    return _call


def obtaining(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that obtains: an interruption undoes what its caller will never get."""

    @covered_to_the_end
    @wraps(method)
    def _call(*args: P.args, **kwargs: P.kwargs) -> R:
        portal: Portal = args[0]._portal  # type: ignore[attr-defined]  # noqa: SLF001  its own class
        unclaimed = portal.unclaimed()
        before = len(unclaimed)  # a signal handler may have interrupted another such call
        claimed = None
        try:
            given = method(*args, **kwargs)
            claimed = unclaimed[before:]  # no signal is handled from here to the caller
            del unclaimed[before:]
            return given
        except BaseException as interruption:
            insist(interruption, _undo, (portal, unclaimed, before, claimed))
            del unclaimed[before:]
            raise

    return _call


@covered
def insist(
    interruption: BaseException,
    method: Callable[..., object],
    args: tuple[object, ...],
    another: BaseException | None = None,
    tries: int = 3,
) -> None:
    """Call a method that releases, and again if `another` exception interrupts that too early.

    Too early is before the portal, which then sees to the end of the call, has received it.
    """
    try:
        if another is not None and another is not interruption:
            interruption.add_note(f"and meanwhile: {another!r}")
        if tries and (another is None or not has_settled(another)):
            method(*args)
    except BaseException as more:
        insist(interruption, method, args, more, tries - 1)


def _undo(portal: Portal, unclaimed: list[Call], before: int, claimed: list[Call] | None) -> None:
    for call in claimed or unclaimed[before:]:
        if call.undo is not None:
            portal.undo(call.undo, call.result)


class SyncWrapper(Handle, Generic[T]):
    """A thread's handle on an asynchronous object."""

    __slots__ = ("__weakref__", "_portal", "_wrapped")

    def __init_subclass__(cls) -> None:
        """Register the wrapper class under the name that it shares with the wrapped class."""
        super().__init_subclass__()
        _classes.setdefault(cls.__name__, cls)

    def __init__(self, portal: Portal, wrapped: T) -> None:
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

        def __enter__(self):
            """Raise `Misuse`: a method of it returns the block."""
            raise not_a_block(self)

        def __exit__(self, *_):
            """Never called, since entering raises; Python looks it up first."""

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


def on_loop(wrapper: SyncWrapper[Any], function: Callable[[Any], T]) -> T:
    """Call a function with the wrapped object, on the event loop of the portal."""
    return wrapper._portal.run(function, wrapper._wrapped)  # noqa: SLF001  its own class


def wrap(portal: Portal, wrapped: object) -> Any:
    """Return a wrapper of an object whose wrapper class the caller cannot import."""
    return _classes[type(wrapped).__name__](portal, wrapped)
