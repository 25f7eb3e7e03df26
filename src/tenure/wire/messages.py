"""Messages of the native protocol: sender, order and meaning of each.

A message is an array: its number, then its fields. Fields are added at the end, with a default; an
end that does not know them ignores them. A message that the other end may not know is sent only if
both ends have its feature. docs/reference/native-protocol.md is the complete specification.

Rules:

* **Greeting.** The client sends `Hello`, the server answers `Welcome`, and other messages follow.
  Any other first message, and any undecodable message, ends the connection with a `Bye`.
* **Channels.** A connection carries many sessions, each on a *channel*: a number that the client
  chooses, and uses for no other session. It may attach the same session to it again, on another
  connection or after a failure on this one. Channel 0 belongs to no session.
* **Requests** (`rid` is their first field) are numbered by the client from 1, in rising order, over
  all channels and connections of the program (its `Hello.program`). Each is answered once, with its
  rid: `Attached`, `Placed`, `Done`, `Failed`, or the requested description. The requests of one
  channel take effect in the order in which they were sent; their answers come in any order.
* **Operations** are the requests of a session: those with a `rid` and a `channel`, except `Attach`.
  When a connection is lost, the client reattaches over another one, and resends all unanswered
  operations, in order and with the same rids. The server keeps each answer until the client
  acknowledges it, so that a repeated operation is answered but not carried out twice. Answers of
  operations that only read are not kept; these operations are repeated.
* **Acknowledging.** `acknowledged` is a rid: every operation of the session up to it has been
  answered, or was never sent. The client sends at most `Welcome.kept_answers` operations of a
  session beyond it, which bounds the kept answers.
* **Pushes** (`Granted`, `Removed`, `Changed`, `Contact`, `Ended`) have a channel and are not
  answered. One for a request may precede the answer to its `Enqueue`; the push counts then.
* **Proof** does not use requests: `Renew` is answered by `Proven` or `Unproven` with its number,
  and a lost one is not sent again.
* **Heartbeat.** An end that receives nothing for three times `Welcome.heartbeat` considers the
  connection dead. So a client that has sent nothing for one heartbeat sends `Ping`.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.msgpack import Decoder

from tenure.wire.errors import WireError
from tenure.wire.values import (
    Abilities,
    Config,
    Found,
    NodeInfo,
    Number,
    RequestInfo,
    SemaphoreInfo,
    SessionInfo,
)

VERSION = 1
"""Version of the protocol that this code implements."""

DESCRIBE = "describe"
"""The feature of servers that answer `Describe`."""

READ_PRICE = 16
"""Number of unanswered requests that a list or a description counts for."""

STORE_TIME = "store time"
"""The feature of servers that answer `ReadStoreTime`."""

RESIZE = "resize"
"""The feature of servers that answer `ResizeSemaphore`."""

RATES = "rates"
"""The feature of servers that answer `Rate`."""

PAGES = "pages"
"""The feature of servers that answer `ReadSessions` and the three messages after it."""

FEATURES: frozenset[str] = frozenset({DESCRIBE, STORE_TIME, RESIZE, RATES, PAGES})
"""Features of this code that were added to this protocol version later."""

GREETING_BYTES = 16 * 1024
"""Maximum bytes of a `Hello` or `Welcome`: neither end accepts more before the greeting."""

GRANTED: Final = 0
WAITING: Final = 1
REFUSED: Final = 2
"""State of a request (`Placed.place`)."""

AttachKind: TypeAlias = Literal["new", "again", "resume"]
RateWord: TypeAlias = Literal["take", "refund", "peek", "resize"]
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


class Hello(Struct, array_like=True, tag=0, frozen=True):
    """First message of a client.

    Attributes:
        oldest, newest: the supported versions of the protocol.
        features: names of its additional features.
        token: the access token, or empty. It is never logged, by either end.
        program: 16 random bytes that identify this run of the program, over all its connections.
            They distinguish the program that attached a session from another program that resumed
            it with the same key.
    """

    oldest: int
    newest: int
    features: list[str]
    token: str
    program: bytes


class Ping(Struct, array_like=True, tag=1, frozen=True):
    """Heartbeat of a client that has sent nothing for a while. Answered by `Pong`."""


class Attach(ChannelRequest, array_like=True, tag=2, frozen=True):
    """Attach a session to a channel. Answered by `Attached` or `Failed`, perhaps much later.

    ``new``: open a session. If the connection was lost before the answer, the program sends it
    again with the same rid, and gets the session that was opened the first time, if the server
    still has it.

    ``again``: reattach a session of this program after a lost connection, perhaps through another
    server. A server that has the session immediately moves it here from the other connection, which
    may be half open. Otherwise the server immediately takes it over from the store, as with
    `assume_dead`: it is the same program, and knows which leases it considers held. If another
    program has resumed the session since, the answer is `SessionExpired`.

    ``resume``: take over the session of another program. Unless `assume_dead`, the answer is sent
    when that program certainly no longer considers anything held: it has sent `Detach`, `Close` or
    `EndReceived`, or the window has passed since its last message. Meanwhile the session is kept
    alive.

    `Failed` with `SessionExpired` or `AuthenticationFailed` means that the session has ended for
    this program. Any other error of ``again`` means that this server cannot attach it now: the
    client tries again, here or at another server, until its own deadline. Every end of a session, a
    dropped node for example, is therefore reported as `SessionExpired`.

    `Close` or `Detach` for the channel may be sent before the answer and cancels the attaching. A
    new session is closed, and a resumed session is detached.

    Attributes:
        window: the recovery window in seconds.
        key: the protection key, at most 16 bytes. A client without a key generates one for a new
            session, so that ``again`` can use it.
        resumable: whether another program may resume it. In the store every session of a server
            has the liveness ``"window"``; this is the option of its own program. Where the server
            knows that a session is not resumable, ``resume`` fails with `InvalidArgument`.
        session_id: 0 for ``new``.
        acknowledged: with ``again``, see the rules.
        drawn: whether the client generated the key; other programs then cannot use it.
    """

    kind: AttachKind
    node: str
    window: float
    description: str = ""
    key: bytes = b""
    resumable: bool = False
    session_id: Number = 0
    assume_dead: bool = False
    acknowledged: Number = 0
    drawn: bool = False


class Renew(ChannelMessage, array_like=True, tag=3, frozen=True):
    """Extend the session's expiry in the store. Answered by `Proven` or `Unproven`.

    Attributes:
        number: identifies this renewal in the answer.
    """

    number: Number
    acknowledged: Number = 0


class RenewAside(Struct, array_like=True, tag=4, frozen=True):
    """The same for a session that another connection of this program has.

    Sent over a separate connection while the program's event loop is stuck. The session stays
    attached to its connection. Answered by `Proven` or `Unproven` on channel 0: it is unproven
    unless this server has the session with this key, attached by this program or kept for it since
    its connection was lost.
    """

    number: Number
    node: str
    session_id: Number
    key: bytes


class Acknowledge(ChannelMessage, array_like=True, tag=5, frozen=True):
    """Permission to drop kept answers, sent when the next `Renew` would be too late for that."""

    acknowledged: Number


class EndReceived(ChannelMessage, array_like=True, tag=6, frozen=True):
    """Acknowledgement of `Ended`: the program no longer considers anything on the channel held.

    It ends the channel.
    """


class Detach(ChannelRequest, array_like=True, tag=7, frozen=True):
    """Detach without ending the session. Answered by `Done`, which ends the channel.

    The program no longer considers any of its leases held.
    """


class Close(ChannelRequest, array_like=True, tag=8, frozen=True):
    """End the session, or confirm its end. Answered by `Done`, which ends the channel."""


class Enqueue(ChannelRequest, array_like=True, tag=9, frozen=True):
    """`EngineSession.enqueue`. Answered by `Placed`.

    Attributes:
        timeout: seconds to wait from now; 0: granted at once or not at all; ``None``: without
            limit. A repeated message has the remaining time.
    """

    request_id: Number
    name: str
    count: int
    data: bytes
    timeout: float | None
    ephemeral: bool


class Withdraw(ChannelRequest, array_like=True, tag=10, frozen=True):
    """`EngineSession.withdraw`. Answered by `Done`, whose `found` says whether it was there.

    Old servers omit it; it then counts as true.
    """

    request_id: Number


class Alter(ChannelRequest, array_like=True, tag=11, frozen=True):
    """`EngineSession.alter`. Answered by `Done`.

    Attributes:
        count, data: ``None`` means unchanged.
        new_timeout: whether to replace the timeout of a waiting request; if false, `timeout` is
            ignored.
        timeout: seconds from now, or ``None`` for no limit.
    """

    request_id: Number
    count: int | None
    data: bytes | None
    new_timeout: bool = False
    timeout: float | None = None


class CreateSemaphore(ChannelRequest, array_like=True, tag=12, frozen=True):
    """`EngineSession.create_semaphore`. Answered by `Done`."""

    name: str
    limit: int
    data: bytes
    exist_ok: bool


class UpdateSemaphore(ChannelRequest, array_like=True, tag=13, frozen=True):
    """`EngineSession.update_semaphore`. Answered by `Done`."""

    name: str
    data: bytes


class ResizeSemaphore(ChannelRequest, array_like=True, tag=18, frozen=True):
    """`EngineSession.resize_semaphore`. Answered by `Done`. It belongs to the feature `RESIZE`."""

    name: str
    limit: int


class DeleteSemaphore(ChannelRequest, array_like=True, tag=14, frozen=True):
    """`EngineSession.delete_semaphore`. Answered by `Done`."""

    name: str
    force: bool


class DescribeSemaphore(ChannelRequest, array_like=True, tag=15, frozen=True):
    """`EngineSession.describe_semaphore`; it only reads. Answered by `SemaphoreDescribed`."""

    name: str
    owners: bool
    waiters: bool


class Watch(ChannelMessage, array_like=True, tag=16, frozen=True):
    """`EngineSession.watch`: from now on `Changed` is sent with this number.

    It is not a request, and only a rejection is answered. Each attachment starts without watches,
    and the client sends them again.

    Attributes:
        number: identifies the watch; not used twice on one channel.
    """

    number: Number
    name: str
    data: bool
    owners: bool


class Unwatch(ChannelMessage, array_like=True, tag=17, frozen=True):
    """End of a watch; an unknown number is no error. Not answered."""

    number: Number


class CreateNode(RequestMessage, array_like=True, tag=20, frozen=True):
    """`Engine.create_node`. Answered by `Done`."""

    path: str
    config: Config
    exist_ok: bool


class AlterNode(RequestMessage, array_like=True, tag=21, frozen=True):
    """`Engine.alter_node`. Answered by `Done`."""

    path: str
    config: Config


class DropNode(RequestMessage, array_like=True, tag=22, frozen=True):
    """`Engine.drop_node`. Answered by `Done`."""

    path: str
    force: bool


class DescribeNode(RequestMessage, array_like=True, tag=23, frozen=True):
    """`Engine.describe_node`. Answered by `NodeDescribed`."""

    path: str


class ListNodes(RequestMessage, array_like=True, tag=24, frozen=True):
    """`Engine.list_nodes`. Answered by `NodesListed`."""


class ListSemaphores(RequestMessage, array_like=True, tag=25, frozen=True):
    """`Engine.list_semaphores`. Answered by `SemaphoresListed`."""

    path: str
    owners: bool
    waiters: bool


class ListSessions(RequestMessage, array_like=True, tag=26, frozen=True):
    """`Engine.list_sessions`. Answered by `SessionsListed`."""

    path: str


class EndSession(RequestMessage, array_like=True, tag=27, frozen=True):
    """`Engine.end_session`. Answered by `Done`, with whether the session existed."""

    path: str
    session_id: Number


class Evict(RequestMessage, array_like=True, tag=28, frozen=True):
    """`Engine.evict`. Answered by `Done`, with whether the request existed."""

    path: str
    name: str
    order_id: Number


class Describe(RequestMessage, array_like=True, tag=29, frozen=True):
    """`Engine.describe_semaphore`. Answered by `SemaphoreDescribed`.

    It belongs to the feature `DESCRIBE`; a server without it is sent `ListSemaphores`.
    """

    path: str
    name: str
    owners: bool
    waiters: bool


class ReadStoreTime(RequestMessage, array_like=True, tag=30, frozen=True):
    """`Engine.store_time`. Answered by `StoreTime`. It belongs to the feature `STORE_TIME`."""


class Rate(RequestMessage, array_like=True, tag=31, frozen=True):
    """`Engine.rate`. Answered by `RateDecided`. It belongs to the feature `RATES`.

    Attributes:
        limit, per, burst: the rule; the period is in microseconds.
        longest_wait: of a take, in microseconds; ``None``: without limit.
        at: for ``refund``, the time of the grant.
    """

    path: str
    name: str
    kind: RateWord
    limit: Number
    per: Number
    burst: Number
    count: Number
    longest_wait: Number | None
    at: Number


class ReadSessions(RequestMessage, array_like=True, tag=32, frozen=True):
    """`Pages.sessions`. Answered by `SessionsListed`. It belongs to the feature `PAGES`."""

    path: str
    after: Number
    most: Number


class ReadSemaphores(RequestMessage, array_like=True, tag=33, frozen=True):
    """`Pages.semaphores`. Answered by `SemaphoresListed`. It belongs to the feature `PAGES`."""

    path: str
    owners: bool
    waiters: bool
    after: str
    most: Number


class ReadRequests(RequestMessage, array_like=True, tag=34, frozen=True):
    """`Pages.requests`. Answered by `RequestsListed`. It belongs to the feature `PAGES`."""

    path: str
    name: str
    waiters: bool
    after: Number
    most: Number


class ReadNames(RequestMessage, array_like=True, tag=35, frozen=True):
    """`Pages.names`. Answered by `NamesListed`. It belongs to the feature `PAGES`."""

    path: str
    after: str
    most: Number


PRICES: Final = dict.fromkeys(
    (
        Describe,
        DescribeNode,
        DescribeSemaphore,
        ListNodes,
        ListSemaphores,
        ListSessions,
        ReadNames,
        ReadRequests,
        ReadSemaphores,
        ReadSessions,
    ),
    READ_PRICE,
)
"""The number of unanswered requests that a request counts for, by its type; all others are one."""


ClientMessage: TypeAlias = (
    Hello
    | Ping
    | Attach
    | Renew
    | RenewAside
    | Acknowledge
    | EndReceived
    | Detach
    | Close
    | Enqueue
    | Withdraw
    | Alter
    | CreateSemaphore
    | UpdateSemaphore
    | ResizeSemaphore
    | DeleteSemaphore
    | DescribeSemaphore
    | Watch
    | Unwatch
    | CreateNode
    | AlterNode
    | DropNode
    | DescribeNode
    | ListNodes
    | ListSemaphores
    | ListSessions
    | EndSession
    | Evict
    | Describe
    | ReadStoreTime
    | Rate
    | ReadSessions
    | ReadSemaphores
    | ReadRequests
    | ReadNames
)


class Welcome(Struct, array_like=True, tag=0, frozen=True):
    """The answer to `Hello`.

    Attributes:
        version: the version of all later messages, which both ends support.
        features: the client's features that the server supports, too.
        heartbeat: seconds; see the rules.
        abilities: the capabilities of the store.
        message_bytes: the longest message that the server accepts.
        operations: the number of unanswered requests of one connection at which the server stops
            reading, renewals included. A list, or a description, counts for `READ_PRICE` of them. A
            client delays requests, so that the number is not reached.
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
        resized: those of them that were too large for a new limit, with that limit.
    """

    rid: Number
    session_id: Number
    attach_number: Number
    age: float | None
    kept: bool = False
    requests: list[Found] = []
    removed: list[tuple[Number, RemovalWord]] = []
    resized: list[tuple[Number, Number]] = []


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
    """`SessionEvents.removed`.

    Attributes:
        why: the reason; ``evicted`` if there is a limit.
        limit: the new limit of the semaphore, if the waiter was too large for it.
    """

    request_id: Number
    why: RemovalWord
    limit: Number | None = None


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


class RateDecided(AnswerMessage, array_like=True, tag=21, frozen=True):
    """The answer to `Rate`: the rule of the rate, which may be another, and the decision.

    Attributes:
        wait: microseconds until the grant, or until it would be.
        at: time of the grant by the store's clock, in microseconds; 0 if nothing was taken.
        free: number of tokens that are free now.
    """

    limit: Number
    per: Number
    burst: Number
    granted: bool
    wait: Number
    at: Number
    free: Number


class RequestsListed(AnswerMessage, array_like=True, tag=22, frozen=True):
    """The answer to `ReadRequests`, or a part of it: with `more`, the next part follows."""

    requests: list[RequestInfo]
    more: bool = False


class NamesListed(AnswerMessage, array_like=True, tag=23, frozen=True):
    """The answer to `ReadNames`."""

    names: list[str]


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
    | RateDecided
    | RequestsListed
    | NamesListed
    | Granted
    | Removed
    | Changed
    | WatchRefused
    | Proven
    | Unproven
    | Contact
    | Ended
)


def client_message() -> Decoder[ClientMessage]:
    """Return a decoder of client messages; it raises `msgspec.DecodeError` or `RecursionError`."""
    return Decoder(ClientMessage)


def server_message() -> Decoder[ServerMessage]:
    """Return a decoder of server messages; it raises like that of `client_message`."""
    return Decoder(ServerMessage)
