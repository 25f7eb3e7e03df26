"""Messages from a client. `tenure.wire.messages` has the rules of their order."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from tenure.wire.messages.terms import AttachKind, ChannelMessage, ChannelRequest, RequestMessage
from tenure.wire.values import Config, Number

__all__ = [
    "Acknowledge",
    "Alter",
    "AlterNode",
    "Attach",
    "ClientMessage",
    "Close",
    "CreateNode",
    "CreateSemaphore",
    "DeleteSemaphore",
    "Describe",
    "DescribeNode",
    "DescribeSemaphore",
    "Detach",
    "DropNode",
    "EndReceived",
    "EndSession",
    "Enqueue",
    "Evict",
    "Hello",
    "ListNodes",
    "ListSemaphores",
    "ListSessions",
    "Ping",
    "ReadStoreTime",
    "Renew",
    "RenewAside",
    "Unwatch",
    "UpdateSemaphore",
    "Watch",
    "Withdraw",
]


class Hello(Struct, array_like=True, tag=0, frozen=True):
    """First message of a client.

    Attributes:
        oldest, newest: the versions of the protocol that it speaks.
        features: names of what it can do beyond that version.
        token: the access token, or empty. It is never logged, by either end.
        program: 16 random bytes that name this program, as long as it runs, over all its
            connections. It distinguishes the program that attached a session from another one
            that has the same key because it has resumed the session.
    """

    oldest: int
    newest: int
    features: list[str]
    token: str
    program: bytes


class Ping(Struct, array_like=True, tag=1, frozen=True):
    """Sign of life of a client that has sent nothing for a heartbeat. Answered by `Pong`."""


class Attach(ChannelRequest, array_like=True, tag=2, frozen=True):
    """Attach a session to a channel. Answered by `Attached` or `Failed`, perhaps much later.

    ``new``: open a session. When the same program sends it again with the same rid, because the
    connection was lost before the answer, it means the session that was opened the first time, if
    the server still has it.

    ``again``: reattach a session of this program after a lost connection, perhaps through another
    server. The server that has the session moves it here from the other connection, which may be
    half open, at once. Otherwise the server takes it over from the store at once, as with
    `assume_dead`: it is the same program, and knows which leases it considers held. If another
    program has resumed the session since, the answer is `SessionExpired`.

    ``resume``: take over the session of another program. Unless `assume_dead`, the answer comes
    when that program certainly considers nothing held any more: it has sent `Detach`, `Close` or
    `EndReceived`, or the window has passed since its last message. Meanwhile the session is kept
    alive.

    `Failed` with `SessionExpired` or `AuthenticationFailed` means that the session is over for
    this program. Any other error of ``again`` means that this server cannot attach it now: the
    client tries again, here or at another server, until its own deadline. Every end of a session,
    a dropped node for example, is therefore reported as `SessionExpired`.

    `Close` or `Detach` for the channel may be sent before the answer and cancels the attaching. A
    new session is closed, and one that was to be resumed is detached.

    Attributes:
        window: its recovery window, in seconds.
        key: its protection key, at most 16 bytes. A client that resumes nothing and has no key
            of its own draws one, so that ``again`` can show it.
        resumable: whether another program may resume it. In the store every session of a server
            has the liveness ``"window"``; this is the option of its own program. Where the server
            knows that a session is not resumable, ``resume`` fails with `InvalidArgument`.
        session_id: 0 for ``new``.
        acknowledged: with ``again``, see the rules.
        drawn: whether the client drew the key at random; other programs then cannot use it.
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
        number: names this renewal in the answer.
    """

    number: Number
    acknowledged: Number = 0


class RenewAside(Struct, array_like=True, tag=4, frozen=True):
    """The same, for a session that another connection of this program has.

    Sent over a connection of its own while the program's event loop is stuck. The session stays
    attached where it is. Answered by `Proven` or `Unproven` on channel 0:
    unproven when this server does not have the session, attached by this program or kept for it
    since its connection was lost, with this key.
    """

    number: Number
    node: str
    session_id: Number
    key: bytes


class Acknowledge(ChannelMessage, array_like=True, tag=5, frozen=True):
    """Permission to forget answers; sent where the next `Renew` would come too late for that."""

    acknowledged: Number


class EndReceived(ChannelMessage, array_like=True, tag=6, frozen=True):
    """Acknowledgement of `Ended`: the program no longer considers anything there held.

    The channel is over with it.
    """


class Detach(ChannelRequest, array_like=True, tag=7, frozen=True):
    """Leave without ending the session. Answered by `Done`; the channel is over.

    The program no longer considers any of its leases held.
    """


class Close(ChannelRequest, array_like=True, tag=8, frozen=True):
    """End the session. Answered by `Done`, also when it is over already; the channel is over."""


class Enqueue(ChannelRequest, array_like=True, tag=9, frozen=True):
    """`EngineSession.enqueue`. Answered by `Placed`.

    Attributes:
        timeout: seconds to wait from now on; 0: granted at once or not at all; ``None``: without
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
        count, data: ``None`` leaves it as it is.
        new_timeout: whether the timeout is replaced, if the request still waits; otherwise
            `timeout` means nothing.
        timeout: seconds from now on, or ``None``: for ever.
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

    It is no request: it is not answered, unless it is refused. Every attaching begins without
    watches, and the client sends them again.

    Attributes:
        number: names the watch; not used twice on one channel.
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
    """`Engine.end_session`. Answered by `Done` with whether there was one."""

    path: str
    session_id: Number


class Evict(RequestMessage, array_like=True, tag=28, frozen=True):
    """`Engine.evict`. Answered by `Done` with whether there was one."""

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
)
