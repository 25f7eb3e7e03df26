"""The messages of the native protocol: who sends each, when, and what it means.

A message is an array: its number, then its fields. Fields are added at the end, with a default;
an end that does not know them passes over them, and a message that an end would not know is sent
only when both have named the feature that it belongs to.

Rules of the conversation:

* **Greeting.** The client says `Hello`, the server `Welcome`, and only then anything else is
  said. Whatever else comes first, and what cannot be decoded, ends the connection, with a `Bye`.
* **Channels.** Over one connection a client has many sessions, each on a *channel*: a number
  that the client chooses, and gives to no other session. It may attach the same session to it
  again, on another connection or when it was refused on this one. Channel 0 is no session.
* **Requests** (`rid` is their first field) are numbered by the client, from 1, rising, over all
  channels and for the whole life of the program (its `Hello.program`), so over all connections.
  Each is answered once, with its rid: `Attached`, `Placed`, `Done`, `Failed`, or what it asked
  for. The requests of one channel take effect in the order in which they were sent; their
  answers come in any order.
* **Operations** are the requests of a session: those with a `rid` and a `channel`, but for
  `Attach`. When a connection is lost the client attaches again over another one, and sends again,
  in order and with the same rids, every operation that was not answered. The server keeps each
  answer until the client acknowledges it, so that what was done is answered again and not done
  twice; but what only reads it does again, and keeps nothing.
* **Acknowledging.** `acknowledged` is a rid: every operation of the session up to it has been
  answered, or was never sent. The client sees to it that no more than `Welcome.kept_answers`
  operations of a session have been sent since, so that what the server keeps is bounded.
* **Pushes** (`Granted`, `Removed`, `Changed`, `Contact`, `Ended`) have a channel and are not
  answered. The answer to an `Enqueue` precedes every push for that request.
* **Proof** goes beside the requests: `Renew` is answered by `Proven` or `Unproven` with its
  number, and a lost one is not sent again.
* **Heartbeat.** Who hears nothing for three times `Welcome.heartbeat` takes the connection for
  dead. So a client that has sent nothing for one heartbeat sends `Ping`.
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
    SemaphoreInfo,
    SessionInfo,
)

__all__ = [
    "FEATURES",
    "GRANTED",
    "GREETING_BYTES",
    "REFUSED",
    "VERSION",
    "WAITING",
    "Acknowledge",
    "Alter",
    "AlterNode",
    "Attach",
    "Attached",
    "Bye",
    "Changed",
    "ClientMessage",
    "Close",
    "Contact",
    "CreateNode",
    "CreateSemaphore",
    "DeleteSemaphore",
    "DescribeNode",
    "DescribeSemaphore",
    "Detach",
    "Done",
    "DropNode",
    "EndSession",
    "Ended",
    "Enqueue",
    "Evict",
    "Failed",
    "Granted",
    "Heard",
    "Hello",
    "ListNodes",
    "ListSemaphores",
    "ListSessions",
    "NodeDescribed",
    "NodesListed",
    "Ping",
    "Placed",
    "Pong",
    "Proven",
    "Removed",
    "Renew",
    "RenewAside",
    "SemaphoreDescribed",
    "SemaphoresListed",
    "ServerMessage",
    "SessionsListed",
    "Unproven",
    "Unwatch",
    "UpdateSemaphore",
    "Watch",
    "WatchRefused",
    "Welcome",
    "Withdraw",
    "client_message",
    "server_message",
]

VERSION = 1
"""The version of the protocol that this code speaks."""

FEATURES: frozenset[str] = frozenset()
"""What this code can do that was not always a part of this version."""

GREETING_BYTES = 16 * 1024
"""The most that a `Hello` or a `Welcome` may have: an end accepts no more before the greeting."""

GRANTED: Final = 0
WAITING: Final = 1
REFUSED: Final = 2
"""Where a request stands (`Placed.place`)."""

AttachKind: TypeAlias = Literal["new", "again", "resume"]
RemovalWord: TypeAlias = Literal["timed out", "deleted", "evicted", "unconfirmed"]


# --- what a client says --------------------------------------------------------------------


class Hello(Struct, array_like=True, tag=0, frozen=True):
    """The first thing that a client says.

    Attributes:
        oldest, newest: the versions of the protocol that it speaks.
        features: what it can do beside that version.
        token: what shows that it may come in; empty if it has nothing to show. It is never
            logged, neither here nor there.
        program: 16 random bytes that name this program, as long as it runs, over all its
            connections. Sessions that it attached are told apart by it from those of another
            program that has the same key, because it resumed them.
    """

    oldest: int
    newest: int
    features: list[str]
    token: str
    program: bytes


class Ping(Struct, array_like=True, tag=1, frozen=True):
    """Nothing else was to be said for a while. The server answers `Pong`."""


class Attach(Struct, array_like=True, tag=2, frozen=True):
    """Attach a session to a channel. Answered by `Attached` or `Failed`, perhaps much later.

    ``new``: begin a session. Sent again with the same rid by the same program, because the
    connection was lost before the answer, it means the session that it began the first time, if
    the server still has it.

    ``again``: go on with a session that this program has attached before, over a connection that
    is lost, perhaps through another server. The server that has the session moves it here from
    the other connection, which may be half open, and asks nobody; otherwise it takes it over from
    the store at once (as with `assume_dead`: it is the same program, and knows what it believes).
    If another program has resumed the session since, the answer is `SessionExpired`.

    ``resume``: take over the session of another program, which had better not believe any more
    that it holds anything: the answer comes when that is certain, unless `assume_dead`. It is
    certain when the other program has said `Detach`, `Close` or `Heard`, or when the window has
    passed since it was last heard of. Meanwhile the session is kept alive.

    `Failed` with `SessionExpired` or `AuthenticationFailed` says that the session is over for
    this program. Whatever else ``again`` fails with says that this server cannot just now: the
    client tries again, here or at another one, until its own deadline. What ends a session for
    its clients (its node was dropped, for one) is therefore told as `SessionExpired`.

    `Close` or `Detach` for the channel may be sent before the answer; then the attaching is not
    wanted any more. A new session is closed; one that was to be resumed is detached.

    Attributes:
        window: its recovery window, in seconds.
        key: its protection key, at most 16 bytes. A client that resumes nothing and has no key
            of its own draws one, so that ``again`` can show it.
        resumable: whether another program may resume it. To the store every session of a server
            is of liveness ``"window"``; this is what its own program asked for. Where the server
            knows that a session is not resumable, to ``resume`` it is `InvalidArgument`.
        session_id: 0 for ``new``.
        acknowledged: with ``again``, see the rules.
        drawn: the client drew the key: to other programs it is as if there were none.
    """

    rid: Number
    channel: Number
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


class Renew(Struct, array_like=True, tag=3, frozen=True):
    """Extend the session's expiry in the store. Answered by `Proven` or `Unproven`.

    Attributes:
        number: names this renewal in the answer.
    """

    channel: Number
    number: Number
    acknowledged: Number = 0


class RenewAside(Struct, array_like=True, tag=4, frozen=True):
    """The same, for a session that another connection of this program has.

    Sent over a connection of its own while the program's event loop does not turn. It changes
    nothing about where the session is attached. Answered by `Proven` or `Unproven` on channel 0:
    unproven when this server does not have the session, attached by this program or kept for it
    since its connection was lost, with this key.
    """

    number: Number
    node: str
    session_id: Number
    key: bytes


class Acknowledge(Struct, array_like=True, tag=5, frozen=True):
    """Answers need not be kept any longer; sent when `Renew` would not say so soon enough."""

    channel: Number
    acknowledged: Number


class Heard(Struct, array_like=True, tag=6, frozen=True):
    """`Ended` has been heard: the program believes no more that it holds anything there.

    The channel is over with it.
    """

    channel: Number


class Detach(Struct, array_like=True, tag=7, frozen=True):
    """Leave without ending the session. Answered by `Done`; the channel is over.

    The program does not believe any more that it holds anything.
    """

    rid: Number
    channel: Number


class Close(Struct, array_like=True, tag=8, frozen=True):
    """End the session. Answered by `Done`, also when it is over already; the channel is over."""

    rid: Number
    channel: Number


class Enqueue(Struct, array_like=True, tag=9, frozen=True):
    """`EngineSession.enqueue`. Answered by `Placed`.

    Attributes:
        timeout: seconds to wait from now on; 0: granted at once or not at all; ``None``: for
            ever. What is sent again carries what is left of it.
    """

    rid: Number
    channel: Number
    hold: Number
    name: str
    count: int
    data: bytes
    timeout: float | None
    ephemeral: bool


class Withdraw(Struct, array_like=True, tag=10, frozen=True):
    """`EngineSession.withdraw`. Answered by `Done`."""

    rid: Number
    channel: Number
    hold: Number


class Alter(Struct, array_like=True, tag=11, frozen=True):
    """`EngineSession.alter`. Answered by `Done`.

    Attributes:
        count, data: ``None`` leaves it as it is.
        new_timeout: whether the timeout is replaced, if the request still waits; otherwise
            `timeout` means nothing.
        timeout: seconds from now on, or ``None``: for ever.
    """

    rid: Number
    channel: Number
    hold: Number
    count: int | None
    data: bytes | None
    new_timeout: bool = False
    timeout: float | None = None


class CreateSemaphore(Struct, array_like=True, tag=12, frozen=True):
    """`EngineSession.create_semaphore`. Answered by `Done`."""

    rid: Number
    channel: Number
    name: str
    limit: int
    data: bytes
    exist_ok: bool


class UpdateSemaphore(Struct, array_like=True, tag=13, frozen=True):
    """`EngineSession.update_semaphore`. Answered by `Done`."""

    rid: Number
    channel: Number
    name: str
    data: bytes


class DeleteSemaphore(Struct, array_like=True, tag=14, frozen=True):
    """`EngineSession.delete_semaphore`. Answered by `Done`."""

    rid: Number
    channel: Number
    name: str
    force: bool


class DescribeSemaphore(Struct, array_like=True, tag=15, frozen=True):
    """`EngineSession.describe_semaphore`; it only reads. Answered by `SemaphoreDescribed`."""

    rid: Number
    channel: Number
    name: str
    owners: bool
    waiters: bool


class Watch(Struct, array_like=True, tag=16, frozen=True):
    """`EngineSession.watch`: from now on `Changed` is said with this number.

    No request: it is not answered, unless it is refused, and every attaching begins without
    watches: the client asks for them anew.

    Attributes:
        number: names the watch; not used twice on one channel.
    """

    channel: Number
    number: Number
    name: str
    data: bool
    owners: bool


class Unwatch(Struct, array_like=True, tag=17, frozen=True):
    """The end of a watch; none of that number is no error. Not answered."""

    channel: Number
    number: Number


class CreateNode(Struct, array_like=True, tag=20, frozen=True):
    """`Engine.create_node`. Answered by `Done`."""

    rid: Number
    path: str
    config: Config
    exist_ok: bool


class AlterNode(Struct, array_like=True, tag=21, frozen=True):
    """`Engine.alter_node`. Answered by `Done`."""

    rid: Number
    path: str
    config: Config


class DropNode(Struct, array_like=True, tag=22, frozen=True):
    """`Engine.drop_node`. Answered by `Done`."""

    rid: Number
    path: str
    force: bool


class DescribeNode(Struct, array_like=True, tag=23, frozen=True):
    """`Engine.describe_node`. Answered by `NodeDescribed`."""

    rid: Number
    path: str


class ListNodes(Struct, array_like=True, tag=24, frozen=True):
    """`Engine.list_nodes`. Answered by `NodesListed`."""

    rid: Number


class ListSemaphores(Struct, array_like=True, tag=25, frozen=True):
    """`Engine.list_semaphores`. Answered by `SemaphoresListed`."""

    rid: Number
    path: str
    owners: bool
    waiters: bool


class ListSessions(Struct, array_like=True, tag=26, frozen=True):
    """`Engine.list_sessions`. Answered by `SessionsListed`."""

    rid: Number
    path: str


class EndSession(Struct, array_like=True, tag=27, frozen=True):
    """`Engine.end_session`. Answered by `Done` with whether there was one."""

    rid: Number
    path: str
    session_id: Number


class Evict(Struct, array_like=True, tag=28, frozen=True):
    """`Engine.evict`. Answered by `Done` with whether there was one."""

    rid: Number
    path: str
    name: str
    order_id: Number


ClientMessage: TypeAlias = (
    Hello
    | Ping
    | Attach
    | Renew
    | RenewAside
    | Acknowledge
    | Heard
    | Detach
    | Close
    | Enqueue
    | Withdraw
    | Alter
    | CreateSemaphore
    | UpdateSemaphore
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
)


# --- what a server says --------------------------------------------------------------------


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


class Placed(Struct, array_like=True, tag=4, frozen=True):
    """The answer to `Enqueue`: where the request stands (`GRANTED`, `WAITING`, `REFUSED`)."""

    rid: Number
    place: Literal[0, 1, 2]
    order_id: Number | None


class Done(Struct, array_like=True, tag=5, frozen=True):
    """It has been done; `found` is the answer where there is one."""

    rid: Number
    found: bool | None = None


class Failed(Struct, array_like=True, tag=6, frozen=True):
    """It could not be done."""

    rid: Number
    error: WireError


class SemaphoreDescribed(Struct, array_like=True, tag=7, frozen=True):
    """The answer to `DescribeSemaphore`."""

    rid: Number
    semaphore: SemaphoreInfo


class NodeDescribed(Struct, array_like=True, tag=8, frozen=True):
    """The answer to `DescribeNode`."""

    rid: Number
    node: NodeInfo


class NodesListed(Struct, array_like=True, tag=9, frozen=True):
    """The answer to `ListNodes`, or a part of it: with `more`, the next part follows."""

    rid: Number
    paths: list[str]
    more: bool = False


class SemaphoresListed(Struct, array_like=True, tag=10, frozen=True):
    """The answer to `ListSemaphores`, or a part of it: with `more`, the next part follows."""

    rid: Number
    semaphores: list[SemaphoreInfo]
    more: bool = False


class SessionsListed(Struct, array_like=True, tag=11, frozen=True):
    """The answer to `ListSessions`, or a part of it: with `more`, the next part follows."""

    rid: Number
    sessions: list[SessionInfo]
    more: bool = False


class Granted(Struct, array_like=True, tag=12, frozen=True):
    """`SessionEvents.granted`."""

    channel: Number
    hold: Number
    order_id: Number | None


class Removed(Struct, array_like=True, tag=13, frozen=True):
    """`SessionEvents.removed`."""

    channel: Number
    hold: Number
    why: RemovalWord


class Changed(Struct, array_like=True, tag=14, frozen=True):
    """What the watch of that number watches has changed, once or oftener."""

    channel: Number
    number: Number


class WatchRefused(Struct, array_like=True, tag=15, frozen=True):
    """There will be no `Changed` for that watch: a limit is reached. The client looks by itself."""

    channel: Number
    number: Number
    error: WireError


class Proven(Struct, array_like=True, tag=16, frozen=True):
    """The store has extended the session's expiry.

    Attributes:
        age: how old the server's own proof was when the renewal came, counted from when the
            server sent for it: 0 if it did so afterwards. It is proven, then, for `age` seconds
            before the client sent the renewal. At the moment of this answer that proof is at
            most a third of the window old; an older one is none.
    """

    channel: Number
    number: Number
    age: float


class Unproven(Struct, array_like=True, tag=17, frozen=True):
    """Nothing proves just now that the session lives: no store, or no such session here."""

    channel: Number
    number: Number


class Contact(Struct, array_like=True, tag=18, frozen=True):
    """`SessionEvents.detached` or `attached`: the server's own contact to its store."""

    channel: Number
    there: bool


class Ended(Struct, array_like=True, tag=19, frozen=True):
    """`SessionEvents.ended`: the session is over by the store's word, or another program has it.

    The last thing said on the channel; the client answers `Heard` when its program knows.
    """

    channel: Number
    error: WireError


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
    """What decodes what a client sent; it raises `msgspec.DecodeError`, or `RecursionError`."""
    return Decoder(ClientMessage)


def server_message() -> Decoder[ServerMessage]:
    """What decodes what a server sent; it raises as `client_message`'s does."""
    return Decoder(ServerMessage)
