"""Messages from a server. `tenure.wire.messages` has the rules of the conversation."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from tenure.wire.errors import WireError
from tenure.wire.messages.terms import AnswerMessage, ChannelMessage, RemovalWord
from tenure.wire.values import Abilities, Found, NodeInfo, Number, SemaphoreInfo, SessionInfo

__all__ = [
    "Attached",
    "Bye",
    "Changed",
    "Contact",
    "Done",
    "Ended",
    "Failed",
    "Granted",
    "NodeDescribed",
    "NodesListed",
    "Placed",
    "Pong",
    "Proven",
    "Removed",
    "SemaphoreDescribed",
    "SemaphoresListed",
    "ServerMessage",
    "SessionsListed",
    "StoreTime",
    "Unproven",
    "WatchRefused",
    "Welcome",
]


class Welcome(Struct, array_like=True, tag=0, frozen=True):
    """The answer to `Hello`.

    Attributes:
        version: the one that is spoken from here on; both speak it.
        features: those of the client's that the server has too.
        heartbeat: seconds; see the rules.
        abilities: what the store can do.
        message_bytes: the longest message that the server accepts.
        operations: how many unanswered requests it reads from one connection, before it stops
            reading until some are answered. A client keeps the rest for itself.
        kept_answers: see the rules.
    """

    version: int
    features: list[str]
    heartbeat: float
    abilities: Abilities
    message_bytes: int
    operations: int
    kept_answers: int


class Pong(Struct, array_like=True, tag=1, frozen=True):
    """The answer to `Ping`."""


class Bye(Struct, array_like=True, tag=2, frozen=True):
    """The server is about to close this connection, and says why. No session is ended by it.

    Attributes:
        again: whether it may be tried again here: the server is busy, or being restarted.
            If not, it is the client that was wrong (its token, its version, what it sent).
            Either way another server may be tried at once.
    """

    error: WireError
    again: bool


class Attached(Struct, array_like=True, tag=3, frozen=True):
    """The session is attached to the channel.

    Attributes:
        session_id, attach_number: as the store has them.
        age: as in `Proven`, counted to when the `Attach` came; ``None``: there is no proof. After
            a long wait the client asks for another.
        kept: with ``again``: this server has had the session all the time. It knows which
            operations it has carried out, and answers those that are sent again. If false, only
            `requests` tells what became of them.
        requests: with ``again`` and ``resume``, everything that the session has in queues, in
            the order of the order ids. What was pushed before is said by this too, so that no
            push refers to a state before it.
        removed: with ``again``, requests that left their queues otherwise than by `Withdraw`,
            and why: as many as the server remembers, and none that it has not.
    """

    rid: Number
    session_id: Number
    attach_number: Number
    age: float | None
    kept: bool = False
    requests: list[Found] = []
    removed: list[tuple[Number, RemovalWord]] = []


class Placed(AnswerMessage, array_like=True, tag=4, frozen=True):
    """The answer to `Enqueue`: where the request stands (`GRANTED`, `WAITING`, `REFUSED`)."""

    place: Literal[0, 1, 2]
    order_id: Number | None


class Done(AnswerMessage, array_like=True, tag=5, frozen=True):
    """Success of an operation; `found` is its result where there is one."""

    found: bool | None = None


class Failed(AnswerMessage, array_like=True, tag=6, frozen=True):
    """Failure of an operation."""

    error: WireError


class SemaphoreDescribed(AnswerMessage, array_like=True, tag=7, frozen=True):
    """The answer to `DescribeSemaphore`."""

    semaphore: SemaphoreInfo


class NodeDescribed(AnswerMessage, array_like=True, tag=8, frozen=True):
    """The answer to `DescribeNode`."""

    node: NodeInfo


class NodesListed(AnswerMessage, array_like=True, tag=9, frozen=True):
    """The answer to `ListNodes`, or a part of it: with `more`, the next part follows."""

    paths: list[str]
    more: bool = False


class SemaphoresListed(AnswerMessage, array_like=True, tag=10, frozen=True):
    """The answer to `ListSemaphores`, or a part of it: with `more`, the next part follows."""

    semaphores: list[SemaphoreInfo]
    more: bool = False


class SessionsListed(AnswerMessage, array_like=True, tag=11, frozen=True):
    """The answer to `ListSessions`, or a part of it: with `more`, the next part follows."""

    sessions: list[SessionInfo]
    more: bool = False


class Granted(ChannelMessage, array_like=True, tag=12, frozen=True):
    """`SessionEvents.granted`."""

    request_id: Number
    order_id: Number | None


class Removed(ChannelMessage, array_like=True, tag=13, frozen=True):
    """`SessionEvents.removed`."""

    request_id: Number
    why: RemovalWord


class Changed(ChannelMessage, array_like=True, tag=14, frozen=True):
    """Notification that the watched state has changed, at least once."""

    number: Number


class WatchRefused(ChannelMessage, array_like=True, tag=15, frozen=True):
    """Refusal of a watch: a limit is reached, no `Changed` follows, and the client polls."""

    number: Number
    error: WireError


class Proven(ChannelMessage, array_like=True, tag=16, frozen=True):
    """The store has extended the session's expiry.

    Attributes:
        age: how old the server's own proof was when the renewal came, counted from when the
            server sent for it: 0 if it did so afterwards. It is proven, then, for `age` seconds
            before the client sent the renewal. At the moment of this answer that proof is at
            most a third of the window old; an older one is none.
    """

    number: Number
    age: float


class Unproven(ChannelMessage, array_like=True, tag=17, frozen=True):
    """No proof at present that the session is alive: no store, or no such session here."""

    number: Number


class Contact(ChannelMessage, array_like=True, tag=18, frozen=True):
    """`SessionEvents.detached` or `attached`: the server's own contact to its store."""

    there: bool


class Ended(ChannelMessage, array_like=True, tag=19, frozen=True):
    """`SessionEvents.ended`: the session has ended in the store, or another program has it.

    It is the last message on the channel. The client answers `Heard` when its program knows.
    """

    error: WireError


class StoreTime(AnswerMessage, array_like=True, tag=20, frozen=True):
    """The answer to `ReadStoreTime`: seconds since the Unix epoch."""

    seconds: float


ServerMessage: TypeAlias = (
    Welcome
    | Pong
    | Bye
    | Attached
    | Placed
    | Done
    | Failed
    | SemaphoreDescribed
    | NodeDescribed
    | NodesListed
    | SemaphoresListed
    | SessionsListed
    | StoreTime
    | Granted
    | Removed
    | Changed
    | WatchRefused
    | Proven
    | Unproven
    | Contact
    | Ended
)
