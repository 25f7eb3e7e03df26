"""What sessions do all the time: requests and withdrawals, in the words of ``operate.lua``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.engines.contract import Enqueued
from tenure.engines.redis.commands import Operation
from tenure.model import EPHEMERAL_LIMIT

if TYPE_CHECKING:
    from tenure.engines.redis.session import RedisSession

__all__ = ["Enqueue", "Withdraw", "WithdrawUnasked", "count_text", "microseconds"]

NOT_THERE = -1
"""The answer to the withdrawal of a request that was in no queue."""

_WHOLE = str(EPHEMERAL_LIMIT)


def count_text(count: int) -> str:
    """A count for a script: "0" is one that cannot be right, which the script finds in its turn."""
    if count == EPHEMERAL_LIMIT:
        return _WHOLE
    return f"{count:d}" if isinstance(count, int) and 1 <= count <= EPHEMERAL_LIMIT else "0"


def microseconds(timeout: float | None) -> str:
    """A timeout for a script; none at all is ""."""
    return "" if timeout is None else str(min(int(timeout * 1e6) + (timeout > 0), 10**15))


class Enqueue(Operation[Enqueued]):
    """A request joins its queue, or is granted, or refused."""

    __slots__ = ("count", "hold", "name")

    session: RedisSession

    def __init__(
        self,
        session: RedisSession,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        timeout: float | None,
        ephemeral: bool,
    ) -> None:
        super().__init__(session.loop)
        self.session = session
        self.hold = hold
        self.name = name
        self.count = count
        if count == EPHEMERAL_LIMIT and ephemeral and timeout is None and not data:
            self.words = ("m", hold, name)
        else:
            flag = "1" if ephemeral else "0"
            self.words = ("e", hold, name, count_text(count), data, microseconds(timeout), flag)

    def answered(self, reply: Any) -> None:
        self.session.placed(self, reply)

    def again(self) -> None:
        if self.words[0] == "m":
            self.words = ("E", self.hold, self.name, _WHOLE, b"", "", "1")
        else:
            self.words = ("E", *self.words[1:])


class Withdraw(Operation[bool]):
    """A request leaves its queue.

    Attributes:
        perhaps_done: it was sent before, and its answer was never seen.
    """

    __slots__ = ("perhaps_done",)

    session: RedisSession

    def __init__(self, session: RedisSession, hold: int) -> None:
        super().__init__(session.loop)
        self.session = session
        self.words = ("w", hold)
        self.perhaps_done = False

    def answered(self, reply: Any) -> None:
        if reply == 0:
            self.settle(True)
        elif reply == NOT_THERE:
            self.settle(self.perhaps_done)
        else:
            self.session.withdrawn(self, reply)

    def again(self) -> None:
        self.perhaps_done = True


class WithdrawUnasked(Withdraw):
    """Nobody waits for it."""

    __slots__ = ("hold",)

    def __init__(self, session: RedisSession, hold: int) -> None:
        super().__init__(session, hold)
        self.hold = hold

    def answered(self, reply: Any) -> None:
        if reply not in (0, NOT_THERE):  # a tuple: an error is a list, which no set can look up
            self.session.withdrawn_unasked(self.hold, reply)
