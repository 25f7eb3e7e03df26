"""What is asked of the server, before it is bytes, and who hears the answer.

A `Call` is one script; a `Reading` is one that may be in vain. An `Operation` is one of what
sessions do all the time; those that a session asks for in one go are one script, a `Batch`, and
each hears its part of the answer. All of them are sent again on another connection when this one
breaks before the answer; `Words`, a `Subscription` and `Once` are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import hiredis

from tenure.engines.prompt import Prompt
from tenure.engines.redis.scripts import SCRIPTS, Script

if TYPE_CHECKING:
    from tenure.engines.redis.attachment import Attachment

__all__ = [
    "Batch",
    "Call",
    "Once",
    "Operation",
    "Pending",
    "Reading",
    "Refusal",
    "Subscription",
    "Words",
    "never",
    "pack",
]

T = TypeVar("T")

Refusal = hiredis.ReplyError
"""A reply that is an error, as a value."""

pack = cast("Callable[[tuple[str | bytes | int, ...]], bytes]", hiredis.pack_command)
"""The bytes of a command; what hiredis declares as its argument's type is a tuple of one."""

_OPERATE = SCRIPTS["operate"]

_MOST_BREAKS = 5


class Pending(Protocol):
    """A command under way."""

    def packed(self, meta: str) -> bytes:
        """Its bytes, as of now; `meta` is the key that scripts are given."""
        ...

    def answered(self, reply: Any) -> None:
        """The reply is here."""
        ...


class Call:
    """A script to run, for a session (as which it is attached when this is sent) or for nobody."""

    __slots__ = ("answered", "args", "script", "session")

    def __init__(
        self,
        script: Script,
        session: Attachment | None,
        args: tuple[str | bytes | int, ...],
        answered: Callable[[Any], None],
    ) -> None:
        self.script = script
        self.session = session
        self.args = args
        self.answered = answered

    def packed(self, meta: str) -> bytes:
        session = self.session
        if session is None:
            words = ("EVALSHA", self.script.digest, 1, meta, *self.args)
        else:
            words = (
                *("EVALSHA", self.script.digest, 1, meta, session.id, session.token),
                *self.args,
            )
        return pack(words)

    def came_too_early(self, reply: Any) -> None:
        """It was done before what should have been, and is sent again."""


class Reading(Call):
    """A script whose answer may be large, and that does no harm if nobody hears it.

    An answer longer than ``client-output-buffer-limit pubsub`` breaks the connection, each time
    that it is asked for. Who asks is told so, since nobody would get anything else done.
    """

    __slots__ = ("_breaks",)

    def __init__(
        self,
        script: Script,
        session: Attachment | None,
        args: tuple[str | bytes | int, ...],
        answered: Callable[[Any], None],
    ) -> None:
        super().__init__(script, session, args, answered)
        self._breaks = 0

    def broken(self) -> bool:
        """A connection broke before the answer; whether that was once too often."""
        self._breaks += 1
        return self._breaks >= _MOST_BREAKS


class Operation(Prompt[T]):
    """One of what sessions do all the time. What is asked in one go becomes one `Batch`.

    Attributes:
        session: whose it is.
        words: what ``operate.lua`` is told of it.
    """

    __slots__ = ("session", "words")

    session: Attachment
    words: tuple[str | bytes | int, ...]

    def answered(self, reply: Any) -> None:
        """The reply is here."""
        raise NotImplementedError

    def settle(self, result: T) -> None:
        """That is what it comes to, unless nobody waits for that any more."""
        if not self.done():
            self.set_result(result)

    def fail(self, error: Exception) -> None:
        """It could not be done."""
        if not self.done():
            self.set_exception(error)

    def again(self) -> None:
        """It was sent, may have been done, and is sent once more."""


class Batch:
    """Operations of one session, in the order in which they were asked for, as one command."""

    __slots__ = ("operations", "session")

    def __init__(self, session: Attachment, operation: Operation[Any]) -> None:
        self.session = session
        self.operations = [operation]

    def packed(self, meta: str) -> bytes:
        session = self.session
        words: list[str | bytes | int]
        words = ["EVALSHA", _OPERATE.digest, 1, meta, session.id, session.token, session.seen]
        for operation in self.operations:
            words += operation.words
        return pack(tuple(words))

    def answered(self, reply: Any) -> None:
        operations = self.operations
        if type(reply) is not list or type(reply[0]) is bytes:  # the same for all
            for operation in operations:
                operation.answered(reply)
            return
        for operation, each in zip(operations, reply, strict=False):
            operation.answered(each)
        self._tell(reply)

    def came_too_early(self, reply: Any) -> None:
        """They were done before what should have been, and are sent again."""
        if type(reply) is list and type(reply[0]) is not bytes:
            self._tell(reply)
        for operation in self.operations:
            operation.again()

    def _tell(self, reply: list[Any]) -> None:
        for news in reply[len(self.operations) :]:
            self.session.told(news)


class Words:
    """A plain command, and the future of its reply; a refusal is raised."""

    __slots__ = ("reply", "words")

    def __init__(self, words: tuple[str | bytes | int, ...], reply: asyncio.Future[Any]) -> None:
        self.words = words
        self.reply = reply

    def packed(self, meta: str) -> bytes:  # noqa: ARG002  a script's business
        return pack(self.words)

    def answered(self, reply: Any) -> None:
        if self.reply.done():
            return
        if isinstance(reply, Refusal):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)

    def fail(self, why: str) -> None:
        """The connection is gone, and this is not sent again on another one."""
        if not self.reply.done():
            self.reply.set_exception(ConnectionResetError(why))


class Subscription(Words):
    """Hearing of what is published on some channels; the server confirms each by itself."""

    __slots__ = ("_left",)

    def __init__(self, channels: tuple[str, ...], reply: asyncio.Future[Any]) -> None:
        super().__init__(("SUBSCRIBE", *channels), reply)
        self._left = len(channels)

    def confirmed(self) -> bool:
        """One of them is; whether that was the last one."""
        self._left -= 1
        return self._left == 0


class Once(Words):
    """A script that is not sent again on another connection."""

    __slots__ = ("_call",)

    def __init__(self, call: Call, reply: asyncio.Future[Any]) -> None:
        super().__init__((), reply)
        self._call = call

    def packed(self, meta: str) -> bytes:
        return self._call.packed(meta)


def never(reply: object) -> None:
    """What is told of an answer that a `Once` keeps to itself."""
    raise AssertionError(f"the reply {reply!r} is somebody else's")
