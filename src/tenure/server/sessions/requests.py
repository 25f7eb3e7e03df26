"""Requests of a hosted session, and the reasons why some have left their queues."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tenure.engines.contract import Enqueued, Removal
from tenure.model import Recovered
from tenure.server.auth.accounts import Account
from tenure.server.semaphores import Semaphores
from tenure.wire.messages import RemovalWord
from tenure.wire.values import Found

__all__ = ["Places", "Request", "error_of"]

_GONE = 128  # requests of one session of which it is remembered why they left

_REMOVAL_WORDS: dict[Removal, RemovalWord] = {
    Removal.TIMED_OUT: "timed out",
    Removal.DELETED: "deleted",
    Removal.EVICTED: "evicted",
    Removal.UNCONFIRMED: "unconfirmed",
    # Engines whose sessions end with a connection are not served.
    Removal.CUT_OFF: "evicted",
    Removal.LAPSED: "evicted",
}


class Request:
    """A request that the session has in a queue.

    Attributes:
        data: only of a recovered request, until the holder has been notified of it.
        placing: the rid of the enqueueing and the store's answer, while that is not there.
    """

    __slots__ = ("count", "data", "ephemeral", "granted", "name", "order_id", "placing")

    def __init__(self, name: str, count: int, ephemeral: bool) -> None:
        self.name = name
        self.count = count
        self.ephemeral = ephemeral
        self.data = b""
        self.order_id: int | None = None
        self.granted = False
        self.placing: tuple[int, asyncio.Future[Enqueued]] | None = None

    def see_answer(self) -> tuple[int, asyncio.Future[Enqueued]]:
        """Return the answered placing, and forget it."""
        assert self.placing is not None
        placing, self.placing = self.placing, None
        return placing


class Places:
    """The places of one session of a node.

    Attributes:
        requests: what it has in queues, by its holds.
        removals: why holds have left their queues, as far as that is remembered.
    """

    __slots__ = ("_account", "_node", "_recovered", "_semaphores", "removals", "requests")

    def __init__(self, node: str, semaphores: Semaphores, account: Account) -> None:
        self.requests: dict[int, Request] = {}
        self.removals: OrderedDict[int, RemovalWord] = OrderedDict()
        self._node = node
        self._semaphores = semaphores
        self._account = account
        self._recovered = False

    def found(self) -> list[Found]:
        """Return the requests in queues, in the order of the order ids."""
        placed = [
            Found(
                hold,
                each.name,
                each.order_id or 0,
                each.count,
                each.data,
                each.ephemeral,
                each.granted,
            )
            for hold, each in self.requests.items()
            if each.placing is None
        ]
        placed.sort(key=lambda each: each.order_id)
        return placed

    def gone(self) -> list[tuple[int, RemovalWord]]:
        """Which requests have left their queues by others' doing, and why."""
        return list(self.removals.items())

    def recover(self, requests: Sequence[Recovered]) -> None:
        """Take the requests of a session that was taken over."""
        for each in requests:
            self._semaphores.rejoin(
                self._node, each.name, ephemeral=each.ephemeral, account=self._account
            )
            self.requests[each.request_id] = request = Request(
                each.name, each.count, each.ephemeral
            )
            request.data = each.data
            request.order_id = each.order_id
            request.granted = each.granted
        self._recovered = True

    def told(self) -> None:
        """Forget the data of recovered requests: the holder has been notified of them."""
        if self._recovered:
            self._recovered = False
            for request in self.requests.values():
                request.data = b""

    def drop(self, hold: int, request: Request) -> None:
        """Forget a request that is in no queue, or will be in none."""
        if self.requests.get(hold) is request:
            del self.requests[hold]
            self._semaphores.leave(self._node, request.name)

    def remove(self, hold: int, request: Request, why: Removal) -> RemovalWord:
        """Forget a request that was taken out of its queue, and return the reason for the wire."""
        self.drop(hold, request)
        self.removals[hold] = word = _REMOVAL_WORDS[why]
        if len(self.removals) > _GONE:
            self.removals.popitem(last=False)
        return word

    def clear(self) -> None:
        """Forget all requests: the session is over."""
        for hold, request in list(self.requests.items()):
            self.drop(hold, request)
        self.removals.clear()


def error_of(answer: asyncio.Future[Any]) -> BaseException | None:
    """Return the error of an engine's future, a cancellation included."""
    if answer.cancelled():
        return asyncio.CancelledError()
    return answer.exception()
