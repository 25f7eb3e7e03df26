"""Requests of a server session, and the reasons why some have left their queues."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tenure.engines.contract import Enqueued, Place, Removal
from tenure.model import Recovered
from tenure.server.auth.accounts import Account
from tenure.server.semaphores import Semaphores
from tenure.wire.messages import GRANTED, REFUSED, WAITING, Placed, RemovalWord
from tenure.wire.values import Found

_GONE = 128  # number of requests of one session whose reason for leaving is remembered

_REMOVAL_WORDS: dict[Removal, RemovalWord] = {
    Removal.TIMED_OUT: "timed out",
    Removal.DELETED: "deleted",
    Removal.EVICTED: "evicted",
    Removal.UNCONFIRMED: "unconfirmed",
    # Engines whose sessions end with a connection are not served.
    Removal.CUT_OFF: "evicted",
    Removal.LAPSED: "evicted",
}


class ServerRequest:
    """A request of the session in a queue.

    Attributes:
        data: the data of a recovered request, until the holder is notified of it.
        placing: the rid of the `Enqueue` and the pending answer of the store.
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

    def take_placing(self) -> tuple[int, asyncio.Future[Enqueued]]:
        """Return the answered placing, and drop it."""
        assert self.placing is not None
        placing, self.placing = self.placing, None
        return placing


class SessionRequests:
    """The requests of one session.

    Attributes:
        queued: its requests in queues, by id.
        removals: the reasons why requests have left their queues, as far as remembered.
    """

    __slots__ = ("_account", "_node", "_recovered", "_semaphores", "queued", "removals")

    def __init__(self, node: str, semaphores: Semaphores, account: Account) -> None:
        self.queued: dict[int, ServerRequest] = {}
        self.removals: OrderedDict[int, RemovalWord] = OrderedDict()
        self._node = node
        self._semaphores = semaphores
        self._account = account
        self._recovered = False

    def found(self) -> list[Found]:
        """Return the requests in queues, in the order of the order ids."""
        placed = [
            Found(
                request_id,
                each.name,
                each.order_id or 0,
                each.count,
                each.data,
                each.ephemeral,
                each.granted,
            )
            for request_id, each in self.queued.items()
            if each.placing is None
        ]
        placed.sort(key=lambda each: each.order_id)
        return placed

    def gone(self) -> list[tuple[int, RemovalWord]]:
        """Return the requests that were removed from their queues, and the reasons."""
        return list(self.removals.items())

    def recover(self, requests: Sequence[Recovered]) -> None:
        """Register the requests of a session that was taken over."""
        for each in requests:
            self._semaphores.rejoin(
                self._node, each.name, ephemeral=each.ephemeral, account=self._account
            )
            request = ServerRequest(each.name, each.count, each.ephemeral)
            self.queued[each.request_id] = request
            request.data = each.data
            request.order_id = each.order_id
            request.granted = each.granted
        self._recovered = True

    def forget_recovered_data(self) -> None:
        """Drop the data of recovered requests: the holder has been notified of them."""
        if self._recovered:
            self._recovered = False
            for request in self.queued.values():
                request.data = b""

    def place(self, rid: int, request_id: int, request: ServerRequest, answer: Enqueued) -> Placed:
        """Process the store's answer to an `Enqueue`, and return the answer for the holder."""
        place, order_id = answer
        if place is Place.REFUSED:
            self.drop(request_id, request)
            return Placed(rid, REFUSED, None)
        request.order_id = order_id
        if place is Place.WAITING:
            return Placed(rid, WAITING, order_id)
        request.granted = True
        return Placed(rid, GRANTED, order_id)

    def drop(self, request_id: int, request: ServerRequest) -> None:
        """Drop a request that has left its queue, or will be in none."""
        if self.queued.get(request_id) is request:
            del self.queued[request_id]
            self._semaphores.leave(self._node, request.name)

    def remove(self, request_id: int, request: ServerRequest, why: Removal) -> RemovalWord:
        """Drop a request that was removed from its queue, and return the reason for the wire."""
        self.drop(request_id, request)
        self.removals[request_id] = word = _REMOVAL_WORDS[why]
        if len(self.removals) > _GONE:
            self.removals.popitem(last=False)
        return word

    def clear(self) -> None:
        """Forget all requests: the session has ended."""
        for request_id, request in list(self.queued.items()):
            self.drop(request_id, request)
        self.removals.clear()


def error_of(answer: asyncio.Future[Any]) -> BaseException | None:
    """Return the error of an engine's future, a cancellation included."""
    if answer.cancelled():
        return asyncio.CancelledError()
    return answer.exception()
