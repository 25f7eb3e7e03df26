"""Messages from a server. `tenure.wire.messages` defines their order."""

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
        version: the version of all later messages, which both ends support.
        features: the client's features that the server supports, too.
        heartbeat: seconds; see the rules.
        abilities: the capabilities of the store.
        message_bytes: the longest message that the server accepts.
        operations: the number of unanswered requests of one connection at which the server stops
            reading. A client delays further requests.
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
    """Announcement that the server closes this connection, with the reason. No session ends.

    Attributes:
        again: whether the client may retry this server: it is busy, or restarting. If not, the
            client's token, version or input was wrong. In both cases the client may try another
            server at once.
    """

    error: WireError
    again: bool


class Attached(Struct, array_like=True, tag=3, frozen=True):
    """The session is attached to the channel.

    Attributes:
        session_id, attach_number: as in the store.
        age: as in `Proven`, at the arrival of the `Attach`; ``None``: there is no proof. After a
            long wait the client renews at once.
        kept: with ``again``: whether this server had the session without interruption. Then it
            knows which operations were carried out, and answers repeated ones. If false, only
            `requests` shows their outcome.
        requests: with ``again`` and ``resume``, all requests of the session that are in queues, in
            the order of the order ids. It includes the effects of earlier pushes, so that no later
            push refers to an earlier state.
        removed: with ``again``, requests that left their queues without `Withdraw`, with the
            reason, as far as the server knows.
    """

    rid: Number
    session_id: Number
    attach_number: Number
    age: float | None
    kept: bool = False
    requests: list[Found] = []
    removed: list[tuple[Number, RemovalWord]] = []


class Placed(AnswerMessage, array_like=True, tag=4, frozen=True):
    """Answer to `Enqueue`: `GRANTED`, `WAITING` or `REFUSED`."""

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
        age: the age of the server's own proof when the renewal arrived, counted from the server's
            renewal to the store; 0 if that was sent later. The client's proof is `age` seconds
            older than its own renewal. At this answer the server's proof is at most a third of the
            window old; an older one does not count.
    """

    number: Number
    age: float


class Unproven(ChannelMessage, array_like=True, tag=17, frozen=True):
    """Absence of a proof: the store does not answer, or the server does not have the session."""

    number: Number


class Contact(ChannelMessage, array_like=True, tag=18, frozen=True):
    """`SessionEvents.detached` or `attached`: the server's own contact to its store."""

    there: bool


class Ended(ChannelMessage, array_like=True, tag=19, frozen=True):
    """`SessionEvents.ended`: the session has ended in the store, or was taken over.

    It is the last message on the channel. The client answers `EndReceived` once its program no
    longer considers anything held.
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
