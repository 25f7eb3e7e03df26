"""Messages from a client. `tenure.wire.messages` defines their order."""

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
