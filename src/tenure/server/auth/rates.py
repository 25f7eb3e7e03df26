"""Count of the rates that a server's clients use, against their accounts.

A rate counts as a semaphore of the account that used it first, until the tokens that were taken
through this server have left its window.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from tenure.server.auth.accounts import Account


@dataclass(slots=True)
class _Counted:
    account: Account
    until: float
    under_way: int = 0


class RateCounts:
    """The rates that are counted, each until a time."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str], _Counted] = {}
        self._due: list[tuple[float, tuple[str, str]]] = []  # one for each, or more

    def __len__(self) -> int:
        """Return the number of rates."""
        return len(self._counted)

    def begin(self, account: Account, node: str, name: str, now: float) -> None:
        """Count a rate of which tokens are to be taken; `end` follows.

        Raises:
            LimitReached: the account has too many semaphores and rates.
        """
        self._expire(now)
        key = node, name
        counted = self._counted.get(key)
        if counted is None:
            account.semaphores.take(node=node, name=name)
            self._counted[key] = counted = _Counted(account, now)
            heappush(self._due, (now, key))
        counted.under_way += 1

    def end(self, node: str, name: str, until: float) -> None:
        """Record that a take has ended; tokens may be in the window until then."""
        counted = self._counted.get((node, name))
        if counted is not None:  # otherwise the node was dropped
            counted.under_way -= 1
            counted.until = max(counted.until, until)

    def extend(self, node: str, name: str, until: float) -> None:
        """Record that the window was changed, if the rate is counted."""
        counted = self._counted.get((node, name))
        if counted is not None:
            counted.until = max(counted.until, until)

    def dropped(self, node: str) -> None:
        """Stop counting the rates of a node."""
        for key in [each for each in self._counted if each[0] == node]:
            self._counted.pop(key).account.semaphores.release()

    def _expire(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, key = heappop(self._due)
            counted = self._counted.get(key)
            if counted is None:
                continue
            if counted.under_way or counted.until > now:
                heappush(self._due, (max(counted.until, now + 1.0), key))
            else:
                del self._counted[key]
                counted.account.semaphores.release()
