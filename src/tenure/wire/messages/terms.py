"""Constants and types of both ends, and the base classes of messages."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from msgspec import Struct

from tenure.wire.values import Number

__all__ = [
    "DESCRIBE",
    "FEATURES",
    "GRANTED",
    "GREETING_BYTES",
    "REFUSED",
    "STORE_TIME",
    "VERSION",
    "WAITING",
    "AnswerMessage",
    "AttachKind",
    "ChannelMessage",
    "ChannelRequest",
    "RemovalWord",
    "RequestMessage",
]

VERSION = 1
"""Version of the protocol that this code implements."""

DESCRIBE = "describe"
"""The feature of servers that answer `Describe`."""

STORE_TIME = "store time"
"""The feature of servers that answer `ReadStoreTime`."""

FEATURES: frozenset[str] = frozenset({DESCRIBE, STORE_TIME})
"""Features of this code that were added to this protocol version later."""

GREETING_BYTES = 16 * 1024
"""Maximum bytes of a `Hello` or `Welcome`: neither end accepts more before the greeting."""

GRANTED: Final = 0
WAITING: Final = 1
REFUSED: Final = 2
"""State of a request (`Placed.place`)."""

AttachKind: TypeAlias = Literal["new", "again", "resume"]
RemovalWord: TypeAlias = Literal["timed out", "deleted", "evicted", "unconfirmed"]


class RequestMessage(Struct, array_like=True, frozen=True):
    """Message of a client that is answered."""

    rid: Number


class ChannelRequest(RequestMessage, array_like=True, frozen=True):
    """Request of a session: an operation, or `Attach`."""

    channel: Number


class AnswerMessage(Struct, array_like=True, frozen=True):
    """Message that answers a request."""

    rid: Number


class ChannelMessage(Struct, array_like=True, frozen=True):
    """Message about a session that is neither a request nor an answer."""

    channel: Number
