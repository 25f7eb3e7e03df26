"""Session of the Redis engine, and its variant with grants confirmed by replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

from tenure.core import rules
from tenure.engines._kit.commands.pipeline import (
    OWNS,
    SENT,
    WAITING,
    EnqueueOperation,
    removal,
)
from tenure.engines._kit.commands.replies import ignore
from tenure.engines._kit.commands.session import (
    CommandSession,
    CommandSessionEngine,
    SessionParameters,
)
from tenure.engines.contract import LastWords, Removal
from tenure.engines.redis.commands import LargeRead, ScriptCall, Word
from tenure.engines.redis.confirming import Confirmer
from tenure.engines.redis.lua import SCRIPTS
from tenure.engines.redis.reconnector import RedisReconnector
from tenure.errors import EngineError

_log = logging.getLogger("tenure")

_RENEW = SCRIPTS["renew"]
_CHUNK = 256


class RedisSessionEngine(CommandSessionEngine, Protocol):
    """The engine, as seen by its sessions.

    Attributes:
        confirmer: the confirmation of grants by replicas; ``None`` without ``min_replicas``.
        channel: the channel of pushes to its sessions.
        epoch: the epoch of the namespace, as far as known.
    """

    reconnector: RedisReconnector
    confirmer: Confirmer | None
    channel: str
    epoch: str

    def handle_push(self, message: bytes) -> None:
        """Handle a push that arrived with a reply."""

    def expect(self, microseconds: int) -> None:
        """Check for expired sessions and requests after that time; never if it is negative."""


class RedisSession(CommandSession):
    """An attached session, as defined by the contract."""

    time_unit = 1e-6

    _engine: RedisSessionEngine

    def __init__(self, engine: RedisSessionEngine, given: SessionParameters) -> None:
        super().__init__(engine, engine.reconnector, given)
        self.handle_push = engine.handle_push
        self._reconnector = engine.reconnector
        self._seen_changes: list[int] = []

    # Proof

    def _renew(self) -> None:
        if self._reconnector.is_up:  # otherwise the reattach is the proof
            renewed = partial(self._renewed, self._engine.clock.now())
            self._reconnector.send(ScriptCall(_RENEW, self, ("", *self.held()), renewed))

    def _renewed(self, at: float, reply: Any) -> None:
        if reply == 0 and not self.over:
            self.prove(at)
        elif isinstance(reply, list) and reply and isinstance(reply[0], int):
            self._look(dict.fromkeys(reply, OWNS), ())  # they are lost, unless they were removed
        else:
            error = self._wrong(reply)
            if error is not None and not self.over:
                _log.warning("session could not be renewed: node=%s error=%s", self.path, error)

    async def remaining(self) -> float:
        """Renew the session; return for how long a former attachment may consider a lease held."""
        reply = await self._answer(self._send_remaining)
        return float(reply * self.time_unit)

    def _send_remaining(self, *, answered: Callable[[Any], None]) -> None:
        self._reconnector.send(ScriptCall(SCRIPTS["remaining"], self, (), answered))

    # Commands

    def _send_change(
        self,
        number: int,
        kind: str,
        name: str,
        args: tuple[Any, ...],
        answered: Callable[[Any], None],
    ) -> None:
        seen, self._seen_changes = self._seen_changes, []
        words: list[Word] = [number, " ".join(map(str, seen)), kind]
        if kind == "alter":
            request_id, count, data, timeout = args
            words += (request_id, count or "", "0" if data is None else "1", data or b"", timeout)
        else:
            words += (name, *(int(each) if isinstance(each, bool) else each for each in args))
        self._reconnector.send(ScriptCall(SCRIPTS["change"], self, tuple(words), answered))

    def _change_made(self, number: int, reply: Any) -> None:
        self._seen_changes.append(number)
        if reply[0] == b"ok" and len(reply) > 1:
            self._engine.expect(reply[1])

    def _send_describe(self, name: str, kinds: str, answered: Callable[[Any], None]) -> None:
        self._reconnector.send(LargeRead(SCRIPTS["describe"], self, (kinds, name), answered))

    async def position(self, name: str, order_id: int) -> int | None:
        """Return a request's place in its queue, without reading the queue."""
        self.check()
        rules.check_name(name, self.path)
        place = await self._answer(partial(self._send_position, name, order_id))
        return None if place < 0 else int(place)

    def _send_position(self, name: str, order_id: int, answered: Callable[[Any], None]) -> None:
        self._reconnector.send(ScriptCall(SCRIPTS["position"], self, (name, order_id), answered))

    def _send_begin(self, description: str, answered: Callable[[Any], None]) -> None:
        self._reconnector.send(LargeRead(SCRIPTS["begin"], self, (description,), answered))

    def _send_leave(self, *, detach: bool, answered: Callable[[Any], None]) -> None:
        words = ("detach" if detach else "close", *self.tokens)
        self._reconnector.send(ScriptCall(SCRIPTS["leave"], self, words, answered))

    @property
    def last_words(self) -> LastWords | None:
        """The call that ends the session."""
        words = ("close", *self.tokens)
        return self._reconnector.last_words(ScriptCall(SCRIPTS["leave"], self, words, ignore))

    def _acknowledge(self) -> None:
        words: tuple[Word, ...] = (self.id, *self.tokens)
        self._reconnector.send(ScriptCall(SCRIPTS["acknowledge"], None, words, ignore))

    # Looking up

    def _note_waiter(self, reply: Any) -> None:
        self._engine.expect(reply[-1])

    def _look(self, requests: dict[int, int], standings: Collection[int]) -> None:  # noqa: ARG002
        found = tuple(requests)
        for start in range(0, len(found), _CHUNK):
            chunk = found[start : start + _CHUNK]
            known = {each: requests[each] for each in chunk}
            look = ScriptCall(SCRIPTS["look"], self, chunk, partial(self._found, known))
            self._reconnector.send(look)

    def _found(self, requests: dict[int, int], reply: Any) -> None:
        if self._wrong(reply) is not None or self.over:
            return
        _, *found, due = reply
        self._engine.expect(due)
        for (request_id, before), place in zip(requests.items(), found, strict=True):
            standing = self.requests.get(request_id)
            if standing is None or standing == SENT or self.over:
                continue
            if isinstance(place, bytes) and place.startswith(b"!"):
                self._removed(request_id, removal(place[1:].decode().partition(" ")[0]))
            elif not isinstance(place, int) or (place < 0 and before == OWNS):
                self._report_loss()
            elif place > 0 and standing == WAITING:
                self._granted(request_id, place)

    def _report_loss(self) -> None:
        """End the session, because the store has lost a grant or place that it had reported."""
        self.end("the store has lost what it had granted or queued (a failover, or old data)")
        self._send_leave(detach=False, answered=ignore)


class ConfirmedSession(RedisSession):
    """Session whose grants are reported after replicas have confirmed them."""

    def placed(self, operation: EnqueueOperation, reply: Any) -> None:
        """Handle the answer to a request."""
        if type(reply) is int and reply and operation.request_id in self.requests:
            self.order_ids.saw(reply)
            self._confirm(partial(self._confirmed_at_once, operation, reply))
        else:
            super().placed(operation, reply)

    def _confirm(self, done: Callable[[EngineError | None], None]) -> None:
        confirmer = self._engine.confirmer
        assert confirmer is not None  # it has such sessions
        confirmer.confirm(self, done)

    def _confirmed_at_once(
        self, operation: EnqueueOperation, order_id: int, error: EngineError | None
    ) -> None:
        request_id = operation.request_id
        if error is None or self.requests.get(request_id) == OWNS:  # confirmed by an event
            super().placed(operation, order_id)
            return
        if self.requests.pop(request_id, None) is not None:
            self._withdraw(request_id, operation.name)
        operation.fail(error)

    def _granted(self, request_id: int, order_id: int) -> None:
        self.order_ids.saw(order_id)
        self._confirm(partial(self._confirmed, request_id, order_id))

    def _confirmed(self, request_id: int, order_id: int, error: EngineError | None) -> None:
        if self.over or self.requests.get(request_id) not in (SENT, WAITING):
            return
        if error is None:
            super()._granted(request_id, order_id)
        else:
            self._removed(request_id, Removal.UNCONFIRMED)
