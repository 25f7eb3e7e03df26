"""Statements of the engine: calls of the functions in the database, and their replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from tenure.engines._kit.commands.pipeline import Statement
from tenure.engines._kit.commands.replies import Unanswered
from tenure.engines._kit.commands.session import CommandSession

Argument: TypeAlias = "str | int | float | bool | list[Any] | None"
Arguments: TypeAlias = tuple[Argument, ...]

DROPPED = "3F000"
"""Code of a store that does not exist any more."""


class Refusal(Exception):
    """Error of the database, as the reply to a statement.

    Attributes:
        code: its SQLSTATE.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Call(Statement):
    """Call of a function.

    Args:
        function: the name.
        args: the arguments, or a function that returns them when this is sent.
        answered: receives the reply.
        holds: see `Statement`.
        alone: see `Statement`.

    Attributes:
        may_have_run: it was sent before, without an answer.
    """

    __slots__ = ("_answered", "_args", "_function", "_sent", "alone", "holds", "may_have_run")

    def __init__(
        self,
        function: str,
        args: Arguments | Callable[[], Arguments],
        answered: Callable[[Any], object],
        holds: Collection[object] = (),
        *,
        alone: bool = False,
    ) -> None:
        self._function = function
        self._args = args
        self._answered = answered
        self.holds = holds
        self.alone = alone
        self._sent = self.may_have_run = False

    def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:
        """Return the SQL and its parameters; it is sent now."""
        self._sent = True
        args = self._args() if callable(self._args) else self._args
        places = ",".join(f"${at}" for at in range(1, len(args) + 1))
        return f"SELECT {schema}.{self._function}({places})".encode(), [*map(_encoded, args)]

    def answered(self, reply: Any) -> None:
        """Handle the reply."""
        self._answered(reply)

    def lost(self) -> bool:
        """Note the end of the connection."""
        self.may_have_run = self._sent
        return True


class SingleCall(Call):
    """Call of a function that is not sent again once the server may have executed it."""

    __slots__ = ()

    def lost(self) -> bool:
        """Answer it, unless it was not sent."""
        if self._sent:
            self._answered(Unanswered("the connection was lost"))
        return not self._sent


def session_call(
    function: str, session: CommandSession, args: Arguments, answered: Callable[[Any], object]
) -> Call:
    """Return a call of a function for a session, as it is attached when this is sent.

    None of the session's operations is under way at the same time.
    """
    return Call(function, lambda: (session.id, session.token, *args), answered, (session,))


class Sql(Statement):
    """SQL without a reply that matters, such as ``LISTEN``; it belongs to one connection.

    Args:
        text: the SQL.
        done: called when it has been carried out.
    """

    __slots__ = ("_done", "_text")

    recurs = False
    alone = True

    def __init__(self, text: str, done: Callable[[], None] | None = None) -> None:
        self._text = text
        self._done = done

    def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:  # noqa: ARG002
        """Return the SQL and its parameters."""
        return self._text.encode(), []

    def answered(self, reply: Any) -> None:  # noqa: ARG002
        """Ignore the reply, or the error."""
        if self._done is not None:
            self._done()

    def lost(self) -> bool:
        """Forget the statement with its connection."""
        return False


def _encoded(value: Argument) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, list):
        return json.dumps(value, separators=(",", ":")).encode()
    return str(value).encode()
