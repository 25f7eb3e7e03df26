"""Limits on the resources that clients can use.

Every limit has the same name in this class, in the configuration, in a client's error and in the
log. Counts are for one server: another server on the same store counts separately.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from tenure.core import rules
from tenure.errors import EngineError, InvalidArgument

NO_LIMIT = 2**31 - 1
"""The value of a limit that is switched off."""

_ENVELOPE = 64 * 1024  # maximum size of a message without its data


class LimitReached(EngineError):
    """A limit of the server is reached. The operation was not carried out, and may be retried.

    Attributes:
        limit: the limit's name, as in `Limits`.
    """

    def __init__(
        self, message: str, limit: str, *, node: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(message, node=node, name=name)
        self.limit = limit


def _limit(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server. The fields' metadata contain their description (``meaning``).

    Raises:
        InvalidArgument: a limit is not a positive number, or two of them contradict each other.
    """

    connections: int = _limit(10_000, "connections at a time, over all listeners")
    connections_per_source: int = _limit(
        10_000,
        "connections at a time of one source: an address (of IPv6, the first 64 bits), the user of "
        "a Unix socket, or an identity",
    )
    connections_per_second: int = _limit(
        1_000, "connections a second of one source, once it has opened max-connections at once"
    )
    greetings: int = _limit(
        2_000,
        "connections at a time that are not yet identified, TLS handshakes included; with "
        "more, the oldest one of the source with the most is closed",
    )
    greeting_time: float = _limit(10.0, "seconds from connecting to being identified")
    sessions: int = _limit(100_000, "sessions at a time")
    sessions_per_connection: int = _limit(1_000, "sessions at a time through one connection")
    semaphores: int = _limit(
        100_000,
        "semaphores at a time: lasting ones, ephemeral ones with requests, and rates with tokens "
        "in their windows",
    )
    requests: int = _limit(500_000, "requests at a time, waiting or owning, over all sessions")
    watches: int = _limit(200_000, "watches at a time, over all sessions")
    nodes: int = _limit(
        10_000, "nodes that this server's clients have created, or that it found when it started"
    )
    stored_bytes: int = _limit(
        2 * 1024**3,
        "bytes of data at a time that this server's clients have stored, or that it found when it "
        "started",
    )
    requests_per_session: int = _limit(10_000, "requests, waiting or owning, of one session")
    queue_length: int = _limit(10_000, "requests, waiting or owning, for one semaphore")
    watches_per_session: int = _limit(1_000, "watches of one session")
    data_bytes: int = _limit(
        rules.DATA_BYTES, "bytes of data on a semaphore or a request, at most 1 MiB"
    )
    message_bytes: int = _limit(4 * 1024 * 1024, "bytes of one message from a client")
    message_time: float = _limit(30.0, "seconds from the first byte of a message to its last")
    input_bytes: int = _limit(
        256 * 1024 * 1024, "bytes of unfinished messages and other unread input, over all clients"
    )
    identity_input_bytes: int = _limit(
        64 * 1024 * 1024,
        "bytes of unread input of one identity; of one source without identities, and of all "
        "connections that are not yet identified",
    )
    operations_in_flight: int = _limit(
        1_024, "unanswered operations of one connection; beyond them it is not read"
    )
    kept_answers: int = _limit(
        2_048, "answers of one session that are kept until its client acknowledges them"
    )
    output_bytes: int = _limit(
        16 * 1024 * 1024, "unread bytes of a client's output; then it is cut off"
    )
    output_time: float = _limit(
        30.0, "seconds that a client may leave its output unread; then it is cut off"
    )

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            InvalidArgument: a limit is not positive, or contradicts another one.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            expected = (int,) if each.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, expected) or not value > 0:
                kind = "whole number" if each.type == "int" else "number"
                raise InvalidArgument(f"the limit {each.name} is a positive {kind}, not {value!r}")
        if self.data_bytes > rules.DATA_BYTES:
            raise InvalidArgument(
                f"the limit data_bytes is at most {rules.DATA_BYTES}, not {self.data_bytes}"
            )
        if self.message_bytes < self.data_bytes + _ENVELOPE:
            raise InvalidArgument(
                f"the limit message_bytes ({self.message_bytes}) leaves no room for data of "
                f"data_bytes ({self.data_bytes}); it is at least {self.data_bytes + _ENVELOPE}"
            )
        if not 2 * self.message_bytes <= self.identity_input_bytes <= self.input_bytes:
            raise InvalidArgument(
                f"the limit identity_input_bytes ({self.identity_input_bytes}) is at least twice "
                f"message_bytes ({self.message_bytes}), and at most input_bytes "
                f"({self.input_bytes})"
            )
        if self.output_bytes < 2 * self.message_bytes:
            raise InvalidArgument(
                f"the limit output_bytes ({self.output_bytes}) is at least twice message_bytes "
                f"({self.message_bytes}): one long answer must not cut a client off"
            )


class Count:
    """A count with its limit.

    Args:
        limit: the name of the limit.
        most: the limit's value.
        where: the owner of the count, for the error.

    Attributes:
        taken: the current count.
    """

    __slots__ = ("limit", "most", "taken", "where")

    def __init__(self, limit: str, most: int, where: str = "this server") -> None:
        self.limit = limit
        self.most = most
        self.where = where
        self.taken = 0

    def take(self, *, node: str | None = None, name: str | None = None) -> None:
        """Count one more; each is released once.

        Raises:
            LimitReached: the limit is reached.
        """
        if self.taken >= self.most:
            raise self.reached(node=node, name=name)
        self.taken += 1

    def take_anyway(self) -> None:
        """Count one that already exists, regardless of the limit."""
        self.taken += 1

    def release(self) -> None:
        """Count one less."""
        assert self.taken > 0, f"more {self.limit} released than were taken"
        self.taken -= 1

    def reached(self, *, node: str | None = None, name: str | None = None) -> LimitReached:
        """Return the error."""
        return LimitReached(
            f"{self.where} has reached its limit {self.limit} = {self.most}; try again later, or "
            "have the server's limit raised",
            self.limit,
            node=node,
            name=name,
        )
