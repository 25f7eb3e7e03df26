"""Encoding of errors that the server sends to a client.

The client raises an error of the class that was sent, with its message, its node and name, and the
attributes that this class adds. A class that the client does not know becomes an `EngineError`. The
text of other errors is never sent: it may contain internals of the server.
"""

from __future__ import annotations

from msgspec import Struct

from tenure import errors
from tenure.errors import EngineError, SemaphoreExists, SessionExpired, TenureError

_KINDS: dict[str, type[TenureError]] = {
    name: getattr(errors, name)
    for name in (
        "AuthenticationFailed",
        "EngineError",
        "EngineUnavailable",
        "InvalidArgument",
        "LeaseReleased",
        "NodeBusy",
        "NodeExists",
        "NodeNotFound",
        "SemaphoreBusy",
        "SemaphoreExists",
        "SemaphoreNotFound",
        "SessionClosed",
        "SessionExpired",
        "Unsupported",
    )
}
"""Errors that an engine raises, by class name."""


class WireError(Struct, array_like=True, frozen=True):
    """An encoded error.

    Attributes:
        kind: the name of its class in `tenure.errors`.
        limit: of a `SemaphoreExists`, the limit of the existing semaphore, where known.
        taken_over: of a `SessionExpired`, whether another process took over the session.
    """

    kind: str
    message: str
    node: str | None = None
    name: str | None = None
    limit: int | None = None
    taken_over: bool = False


def to_wire(error: Exception) -> WireError:
    """Encode an error for the wire."""
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS), None)
    if kind is None or not isinstance(error, TenureError):
        return WireError("EngineError", "the server failed; its log says how")
    limit = error.limit if isinstance(error, SemaphoreExists) else None
    taken_over = isinstance(error, SessionExpired) and error.taken_over
    return WireError(kind, str(error), error.node, error.name, limit, taken_over)


def from_wire(error: WireError) -> TenureError:
    """Decode an error from the wire."""
    kind = _KINDS.get(error.kind, EngineError)
    if kind is SemaphoreExists:
        return SemaphoreExists(error.message, node=error.node, name=error.name, limit=error.limit)
    if kind is SessionExpired:
        return SessionExpired(
            error.message, node=error.node, name=error.name, taken_over=error.taken_over
        )
    return kind(error.message, node=error.node, name=error.name)
