"""Commands before they are bytes, and the handlers of their replies.

A `ScriptCall` runs one script. Concurrent operations of a session (see the kit) become one script
call, a batch (`tenure.engines.redis.connection`). When a connection breaks before the reply, these
commands are sent again on the next connection. A `PlainCommand` and a `Subscription` belong to one
connection and fail with it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import hiredis

from tenure.engines._kit.commands.pipeline import OrderIds
from tenure.engines._kit.commands.replies import Unanswered
from tenure.engines.redis.lua import Script

Word = str | bytes | int

Keys = tuple[int, str, str]
"""The keys that every script gets, behind their number.

The first is "meta". The second never exists, so that a cluster that is moving the keys one by one
rejects the script as a whole (``TRYAGAIN``). Otherwise the script would fail at the first key that
has been moved, and what it had written would stay.
"""

Refusal = hiredis.ReplyError
"""A reply that is an error, as a value."""

pack = cast("Callable[[tuple[Word, ...]], bytes]", hiredis.pack_command)
"""Encode a command; hiredis declares its argument as a 1-tuple."""

MOVING = (
    "the cluster is moving the keys of the namespace to another node. Wait, or repair a move that "
    "was interrupted with redis-cli --cluster fix"
)
UNSERVED = {
    "READONLY": "the server is a replica, which rejects writes. Name its master, or the "
    "sentinels with redis+sentinel://",
    "LOADING": "the server is loading its data",
    "MASTERDOWN": "the server is a replica that has lost its master. Name the master, or the "
    "sentinels with redis+sentinel://",
    "BUSY": "the server is busy with a script of a client. Wait, or end it with SCRIPT KILL",
    "UNBLOCKED": "the server has just become a replica",
    "MISCONF": "the server rejects writes, because it cannot save its data. See its log",
    "NOREPLICAS": "the server rejects writes, because it has too few replicas "
    "(min-replicas-to-write)",
    "CLUSTERDOWN": "the cluster does not serve. See its CLUSTER INFO",
    "TRYAGAIN": MOVING,
    "ASK": MOVING,
    "MOVED": "it is a node of a Redis Cluster that does not have the keys",
    "NOAUTH": "it requires a password",
}
"""Codes of a server that cannot serve now (see the kit's `reconnect`), and what they mean.

``OOM`` is none of them: a server without memory still renews and releases.
"""

_CODE = re.compile(r"(?:(?:ERR Error running script|@user_script).*?: -|-)?([A-Z]+)(?: |$)")
"""Matches the code of an error. Before Redis 7, an error in a script follows its place there."""
_DENIED = re.compile(
    r"NOPERM|ERR ACL failure|ERR unknown command|.*Unknown Redis command called|"
    r".*user executing the script can't (?:run|access|publish)"
)
_DENIED_COMMAND = re.compile(r"run the '([^']+)' command")
_UNKNOWN_COMMAND = re.compile(r"ERR unknown command,? ['`]?([^'`, ]+)")
_MOST_BREAKS = 5


def keys_of(prefix: str) -> Keys:
    """Return the keys that the scripts of a namespace get."""
    return 2, f"{prefix}meta", f"{prefix}none"


def code_of(error: str) -> str:
    """Return the code of an error, or an empty text."""
    found = _CODE.match(error)
    return "" if found is None else found[1]


def is_denied(error: str) -> bool:
    """Return true if a command was refused because of the account, or because it is unknown."""
    return _DENIED.match(error) is not None


def advice_on_rights(error: str, prefix: str) -> str:
    """Return what to do about a command that `is_denied`.

    Args:
        error: the text of the server.
        prefix: of the namespace's keys and channels.
    """
    page = "docs/engines/redis.md lists what an account needs"
    unknown = _UNKNOWN_COMMAND.match(error)
    if unknown and unknown[1].upper() == "PROXY":
        return "The proxy in front of it announces its clients: turn that off (HAProxy: send-proxy)"
    if unknown:
        return (
            f"Restore the command {unknown[1].upper()} (rename-command), or connect to the server "
            f"itself if a proxy does not know it; {page}"
        )
    if command := _DENIED_COMMAND.search(error):
        right = f"+{command[1]}"
    elif "key" in error:
        right = f"~{prefix}*"
    elif "channel" in error:
        right = f"&{prefix}*"
    else:
        right = "the commands of its scripts (+@read +@write +publish +time)"
    return f"Grant its account {right}; {page}"


class AttachedSession(Protocol):
    """An attached session, as seen by commands and connections.

    Attributes:
        id: its id in the store.
        token: identifies the current attachment: "<attach number>.<secret>".
        order_ids: the order ids seen by the engine.
        over: whether it has ended, or was closed by this program.
    """

    id: int
    token: str
    order_ids: OrderIds
    over: bool

    def handle_push(self, message: bytes) -> None:
        """Handle a push that arrived with a reply."""

    def held(self) -> list[int]:
        """Return the requests that this program owns. On any thread."""

    def prove(self, at: float) -> None:
        """Report a proof of that time. From any thread."""


class Command:
    """A command that is sent over a connection.

    Attributes:
        answered: handles the reply.
        session: the session whose operations keep their order with this command, or ``None``.
    """

    __slots__ = ()

    answered: Callable[[Any], None]

    session: AttachedSession | None = None

    def packed(self, keys: Keys) -> bytes:
        """Encode it at the time of sending; scripts get these keys."""
        raise NotImplementedError

    def ran_early(self, reply: Any) -> None:
        """Ignore the reply of a command that ran before an earlier one; it is sent again."""

    def unanswered(self, why: str, *, ran: bool) -> Iterable[Command]:  # noqa: ARG002
        """Handle the end of the connection.

        Args:
            why: the reason of the end.
            ran: whether the server may have run it.

        Returns:
            The commands for the next connection.
        """
        return (self,)


class ScriptCall(Command):
    """A script call, for a session with its token at the time of sending, or without a session."""

    __slots__ = ("answered", "args", "script", "session")

    def __init__(
        self,
        script: Script,
        session: AttachedSession | None,
        args: tuple[Word, ...],
        answered: Callable[[Any], None],
    ) -> None:
        """Set the script and its arguments; `answered` receives the reply."""
        self.script = script
        self.session = session
        self.args = args
        self.answered = answered

    def packed(self, keys: Keys) -> bytes:
        """Return the bytes of the command."""
        session = self.session
        attached = () if session is None else (session.id, session.token)
        return pack(("EVALSHA", self.script.digest, *keys, *attached, *self.args))


class SingleCall(ScriptCall):
    """A script call that is not sent again once the server may have run it."""

    __slots__ = ()

    def unanswered(self, why: str, *, ran: bool) -> Iterable[Command]:
        """Return the call again if it has not run; else answer it."""
        if not ran:
            return (self,)
        self.answered(Unanswered(why))
        return ()


class LargeRead(ScriptCall):
    """A call of a script that changes nothing, with a reply that may be large.

    A reply longer than ``client-output-buffer-limit pubsub`` breaks the connection each time. The
    call then fails after a few attempts, because it would block every other command.
    """

    _breaks = 0

    def unanswered(self, why: str, *, ran: bool) -> Iterable[Command]:
        """Return the call again, unless the connection broke too often; then fail it."""
        self._breaks += ran and code_of(why) not in UNSERVED
        if self._breaks < _MOST_BREAKS:
            return (self,)
        self.answered(
            Refusal(
                f"the connection broke each time before the answer ({why}); is the answer longer "
                "than 'client-output-buffer-limit pubsub' allows? With ?protocol=2 that does not "
                "matter"
            )
        )
        return ()


class PlainCommand(Command):
    """A command for one connection, and the future of its reply; an error reply is raised."""

    __slots__ = ("reply", "words")

    def __init__(self, words: tuple[Word, ...], reply: asyncio.Future[Any]) -> None:
        """Set the arguments of the command; `reply` receives the reply."""
        self.words = words
        self.reply = reply

    def packed(self, keys: Keys) -> bytes:  # noqa: ARG002  for scripts
        """Return the bytes of the command."""
        return pack(self.words)

    def answered(self, reply: Any) -> None:
        """Set the reply, or the error, of the future."""
        if self.reply.done():
            return
        if isinstance(reply, Refusal):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)

    def unanswered(self, why: str, *, ran: bool) -> Iterable[Command]:  # noqa: ARG002
        """Fail: the command is not sent again."""
        if not self.reply.done():
            self.reply.set_exception(ConnectionResetError(why))
        return ()


class Subscription(PlainCommand):
    """A subscription to channels; the server confirms each channel separately."""

    __slots__ = ("_left",)

    def __init__(self, channels: tuple[str, ...], reply: asyncio.Future[Any]) -> None:
        """Subscribe to channels; `reply` is set once all are confirmed."""
        super().__init__(("SUBSCRIBE", *channels), reply)
        self._left = len(channels)

    def confirmed(self) -> bool:
        """Record the confirmation of one channel; return true if it was the last one."""
        self._left -= 1
        return self._left == 0
