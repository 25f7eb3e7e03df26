"""What a program does through one attached session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tenure.core import rules
from tenure.engines.contract import Answer, Attach, Enqueued, Place, Removal, SessionEvents
from tenure.engines.redis import describe
from tenure.engines.redis.attachment import Attachment, ignore, settle
from tenure.engines.redis.commands import Call, Reading
from tenure.engines.redis.operations import (
    Enqueue,
    Withdraw,
    WithdrawUnasked,
    count_text,
    microseconds,
)
from tenure.engines.redis.scripts import SCRIPTS
from tenure.errors import EngineError, SessionExpired
from tenure.model import UNCHANGED, SemaphoreDescription, Unchanged

if TYPE_CHECKING:
    from tenure.engines.redis.engine import RedisEngine

__all__ = ["OWNS", "WAITING", "RedisSession"]

ASKED, WAITING, OWNS = range(3)
"""What is known of a hold."""

REMOVALS = {b"t": Removal.TIMED_OUT, b"x": Removal.DELETED, b"e": Removal.EVICTED}

_GRANTED = Place.GRANTED
_REFUSED = Enqueued(Place.REFUSED, None)
_CHUNK = 256
_SOON = 4.5
"""Seconds that a request which does not wait spends in a quarantine, at the most."""


class RedisSession(Attachment):
    """What the contract calls a session.

    Attributes:
        holds: its requests, and what is known of them.
        waited: the names of those that wait.
    """

    def __init__(
        self,
        engine: RedisEngine,
        how: Attach,
        events: SessionEvents,
        number: int,
        token: str,
        window: float,
    ) -> None:
        super().__init__(engine, how, events, number, token, window)
        self.holds: dict[int, int] = {}
        self.waited: dict[int, str] = {}
        self._early: dict[int, tuple[bytes, bytes]] = {}
        self._fresh: set[int] = set()  # began to wait in this turn; some may not have heard it
        self._unwanted: set[int] = set()  # the store refused to take them out; it is asked again
        self._changes = 0
        self._seen_changes: list[int] = []
        self._operate = engine.link.operate

    # Semaphores

    async def create_semaphore(self, name: str, limit: int, data: bytes, *, exist_ok: bool) -> None:
        self.check()
        rules.check_name(name, self.path)
        rules.check_limit(limit, self.path, name)
        rules.check_data(data, self.path, name)
        most = rules.SEMAPHORES_PER_NODE
        await self._change(name, 0, "create", name, f"{limit:d}", data, int(exist_ok), most)

    async def update_semaphore(self, name: str, data: bytes) -> None:
        self.check()
        rules.check_name(name, self.path)
        rules.check_data(data, self.path, name)
        await self._change(name, 0, "update", name, data)

    async def delete_semaphore(self, name: str, *, force: bool) -> None:
        self.check()
        rules.check_name(name, self.path)
        await self._change(name, 0, "delete", name, int(force))

    async def describe_semaphore(
        self, name: str, *, owners: bool, waiters: bool
    ) -> SemaphoreDescription:
        self.check()
        rules.check_name(name, self.path)
        told: asyncio.Future[Any] = self.loop.create_future()
        wanted = describe.wanted(owners=owners, waiters=waiters)
        self._send(Reading(SCRIPTS["describe"], self, (wanted, name), partial(settle, told)))
        reply = await told
        error = self._wrong(reply)
        if error is None and reply[0] != b"ok":
            error = self._error(reply[0], reply, name, 0)
        if error is not None:
            raise error
        return describe.semaphore(reply[1][0], owners=owners, waiters=waiters)

    def _change(self, name: str, count: int, *args: str | bytes | int) -> asyncio.Future[None]:
        """Make a change that must not be made twice."""
        self._changes = number = self._changes + 1
        seen, self._seen_changes = self._seen_changes, []
        future: asyncio.Future[None] = self.loop.create_future()

        def answered(reply: Any) -> None:
            error = self._wrong(reply)
            if error is None:
                self._seen_changes.append(number)
                if reply[0] != b"ok":
                    error = self._error(reply[0], reply, name, count)
                elif len(reply) > 1:
                    self._engine.expect(reply[1])
            _finish(future, None, error)

        text = " ".join(map(str, seen))
        self._send(Call(SCRIPTS["change"], self, (number, text, *args), answered))
        return future

    # Requests

    def enqueue(
        self,
        hold: int,
        name: str,
        count: int,
        data: bytes,
        *,
        timeout: float | None,
        ephemeral: bool,
    ) -> Answer[Enqueued]:
        if self.over:
            self.check()
        if timeout is not None:
            rules.check_timeout(timeout, self.path, name)
        if data != b"":
            rules.check_data(data, self.path, name)
        rules.check_name(name, self.path)
        asked = Enqueue(self, hold, name, count, data, timeout, ephemeral)
        self.holds[hold] = ASKED
        self._operate(asked)
        return asked

    def placed(self, asked: Enqueue, reply: Any) -> None:
        """A request has been answered."""
        hold = asked.hold
        if type(reply) is int:
            engine, holds = self._engine, self.holds
            if reply == 0:
                holds.pop(hold, None)
                asked.settle(_REFUSED)
                return
            engine.saw(reply)
            if hold in holds:
                if engine.confirmer is not None:
                    engine.confirmer.confirm(self, partial(self._confirmed_at_once, asked, reply))
                    return
                holds[hold] = OWNS
            asked.settle(Enqueued(_GRANTED, reply))
            if self._early:
                self._push_early(hold)
        elif type(reply) is list and type(reply[0]) is int:
            order_id, due = reply
            self._engine.saw(order_id)
            self._engine.expect(due)
            if self._place(hold, WAITING):
                self.waited[hold] = asked.name
                if not self._fresh:
                    self.loop.call_soon(self._fresh.clear)
                self._fresh.add(hold)
            asked.settle(Enqueued(Place.WAITING, order_id))
            self._push_early(hold)
        elif type(reply) is list and reply[0] == b"quarantined":
            self._held_up(asked, reply[1] / 1e6)
        else:
            self.holds.pop(hold, None)
            error = self._wrong(reply)
            asked.fail(error or self._error(reply[0], reply, asked.name, asked.count))

    def _held_up(self, asked: Enqueue, left: float) -> None:
        """A request that does not wait met a quarantine: try again at its end, if that is soon."""
        quarantine = self._engine.quarantine
        quarantine.prolong(left)
        if left <= _SOON and not self.over:
            self.loop.call_later(left + 0.001, self._try_again, asked)
        else:
            self.holds.pop(asked.hold, None)
            asked.settle(_REFUSED)  # and `Engine.trouble` says why

    def _try_again(self, asked: Enqueue) -> None:
        if self.over:
            asked.fail(self._why_over or self._gone())
        elif asked.hold in self.holds:
            self._operate(asked)
        else:
            asked.settle(_REFUSED)  # it was withdrawn meanwhile

    def _push_early(self, hold: int) -> None:
        early = self._early.pop(hold, None)
        if early is not None:
            self.loop.call_soon(self.push, *early)

    def _place(self, hold: int, standing: int) -> bool:
        """Note what is known of a hold; false if it has been withdrawn meanwhile."""
        if hold not in self.holds:
            return False
        self.holds[hold] = standing
        return True

    def _confirmed_at_once(self, asked: Enqueue, order_id: int, error: EngineError | None) -> None:
        if error is None:
            self._place(asked.hold, OWNS)
            asked.settle(Enqueued(_GRANTED, order_id))
            self._push_early(asked.hold)
        else:
            if self.holds.pop(asked.hold, None) is not None:
                self._withdraw_unasked(asked.hold)
            asked.fail(error)

    def alter(
        self,
        hold: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        self.check()
        if hold in self.holds:
            if data is not None:
                rules.check_data(data, self.path)
            if timeout is not UNCHANGED:
                rules.check_timeout(timeout, self.path)
        return self._change(
            *("", 0 if count is None else count, "alter", hold),
            "" if count is None else count_text(count),
            *("0" if data is None else "1", data or b""),
            "-" if timeout is UNCHANGED else microseconds(timeout),
        )

    def withdraw(self, hold: int) -> Answer[bool]:
        if self.over:
            self.check()
        self._drop(hold)
        asked = Withdraw(self, hold)
        self._operate(asked)
        return asked

    def withdrawn(self, asked: Withdraw, reply: Any) -> None:
        """A withdrawal has failed."""
        error = self._wrong(reply)
        if asked.perhaps_done and isinstance(error, SessionExpired):
            asked.settle(True)
        else:
            asked.fail(error or self._failure(f"it answered {reply!r}"))

    def withdrawn_unasked(self, hold: int, reply: Any) -> None:
        """A withdrawal that nobody waits for did not succeed."""
        self._wrong(reply)
        if not self.over:
            self._unwanted.add(hold)

    def _withdraw_unasked(self, hold: int) -> None:
        if not self.over:
            self._operate(WithdrawUnasked(self, hold))

    def _drop(self, hold: int) -> None:
        self.holds.pop(hold, None)
        if self.waited:
            self.waited.pop(hold, None)
        if self._early:
            self._early.pop(hold, None)

    # What is pushed

    def push(self, kind: bytes, rest: bytes) -> None:
        """Something happened to the session, or to one of its requests."""
        if self.over:
            return
        if kind == b"T":
            self.superseded()
        elif kind == b"E":
            self.end(rest.decode())
        elif kind == b"A":
            self.look.set()
        elif self.put_by is not None:
            self.put_by.append((kind, rest))
        else:
            hold = int(rest.split()[0])
            standing = self.holds.get(hold)
            if hold in self._fresh:
                self.loop.call_soon(self.push, kind, rest)
            elif standing == ASKED:
                self._early[hold] = (kind, rest)
            elif standing is not None and kind != b"g":
                self._removed(hold, REMOVALS[kind])
            elif standing == WAITING:
                self._granted(hold, int(rest.split()[1]))

    def _granted(self, hold: int, order_id: int) -> None:
        self._engine.saw(order_id)
        if self._engine.confirmer is None:
            self._tell_granted(hold, order_id)
        else:
            self._engine.confirmer.confirm(self, partial(self._confirmed, hold, order_id))

    def _tell_granted(self, hold: int, order_id: int) -> None:
        self.holds[hold] = OWNS
        self.waited.pop(hold, None)
        self.events.granted(hold, order_id)

    def _confirmed(self, hold: int, order_id: int, error: EngineError | None) -> None:
        if self.over or self.holds.get(hold) != WAITING:
            return
        if error is None:
            self._tell_granted(hold, order_id)
        else:
            self._removed(hold, Removal.UNCONFIRMED)

    def _removed(self, hold: int, why: Removal) -> None:
        self._drop(hold)
        with self._engine.failures.contained():
            self._withdraw_unasked(hold)  # what the store keeps of it, it need not keep
        self.events.removed(hold, why)

    # What is looked up

    def look_up(self, standings: Sequence[int]) -> None:
        """Ask what has become of the requests that stand so, in case a push was missed."""
        if self.put_by is not None or self.over:
            return
        while self._unwanted:
            self._withdraw_unasked(self._unwanted.pop())
        for holds in _chunks([hold for hold, each in self.holds.items() if each in standings]):
            self._send(Call(SCRIPTS["look"], self, holds, partial(self._found, holds)))

    def _found(self, holds: tuple[int, ...], reply: Any) -> None:
        if self._wrong(reply) is not None or self.over:
            return
        _, *found, due = reply
        self._engine.expect(due)
        for hold, place in zip(holds, found, strict=True):
            standing = self.holds.get(hold)
            if standing is None or standing == ASKED or self.over:
                continue
            if isinstance(place, bytes) and place.startswith(b"!"):
                self._removed(hold, REMOVALS[place[1:2]])
            elif not isinstance(place, int) or (place < 0 and standing == OWNS):
                self._lost_something()
            elif place > 0 and standing == WAITING:
                self._granted(hold, place)

    def _lost_something(self) -> None:
        """The store lives on without the last of what it said: nothing it said can be relied on."""
        self.end("the store has lost what it had granted or queued (a failover, or old data)")
        self._send_leave("close", ignore)

    # Taking over

    async def until_nobody_believes(self) -> None:
        """Return when no attachment before this one can believe that it holds anything.

        Raises:
            SessionExpired: it has ended meanwhile, or was taken over once more.
        """
        while True:
            self.check()
            self.look.clear()
            reply = await self._ask("believed")
            if reply == 0:
                return
            wait = min(reply / 1e6, self.window / 3, 5.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait + 0.001):
                    await self.look.wait()

    async def begin(self, description: str) -> None:
        """The take-over is complete: tell what was found, and then what has happened since.

        Args:
            description: what the session says of itself from now on.
        """
        told: asyncio.Future[Any] = self.loop.create_future()

        def begun(reply: Any) -> None:
            if self._wrong(reply) is None and not self.over:
                found = describe.recovered(reply[1])
                self.holds = {each.hold: OWNS if each.granted else WAITING for each in found}
                self.waited = {each.hold: each.name for each in found if not each.granted}
                self._engine.expect(reply[2])
                self.events.resumed(found)
                put_by, self.put_by = self.put_by or [], None
                for push in put_by:
                    self.push(*push)
            settle(told, reply)

        self._send(Reading(SCRIPTS["begin"], self, (description,), begun))
        self._raise(await told)

    async def _ask(self, script: str) -> Any:
        told: asyncio.Future[Any] = self.loop.create_future()
        self._send(Call(SCRIPTS[script], self, (), partial(settle, told)))
        reply = await told
        self._raise(reply)
        return reply

    def _raise(self, reply: Any) -> None:
        error = self._wrong(reply)
        if error is not None:
            raise error
        self.check()

    # Watches

    def watch(
        self, name: str, *, data: bool, owners: bool, changed: Callable[[], None]
    ) -> Callable[[], None]:
        self.check()
        rules.check_name(name, self.path)
        return self._engine.watch(
            self, name, frozenset(b"b" + b"d" * data + b"o" * owners), changed
        )


def _chunks(holds: list[int]) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(holds), _CHUNK):
        yield tuple(holds[start : start + _CHUNK])


def _finish(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
