"""Session of the PostgreSQL engine: its statements, renewals and releases that are held up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol

from tenure.engines._kit.commands.pipeline import (
    HANDED,
    OWNS,
    SENT,
    WAITING,
    Statement,
    WithdrawOperation,
    removal,
)
from tenure.engines._kit.commands.session import (
    CommandSender,
    CommandSessionEngine,
    SessionParameters,
)
from tenure.engines.contract import Answer, Removal, Withdrawn
from tenure.engines.postgresql import values
from tenure.engines.postgresql.handoff import HandoffSession, HandoffWithdraw
from tenure.engines.postgresql.statements import DROPPED, Call, Refusal, session_call
from tenure.errors import TenureError
from tenure.model import UNCHANGED, Unchanged

_log = logging.getLogger("tenure")

_GUARDED = -2
"""Answer to a withdrawal that a transaction holds up, because it guards the lease."""
_PAUSE = 0.05
"""Seconds until the release is tried again."""

REPORTED_AFTER = 5.0
"""Seconds of waiting after which it is logged, because such a transaction should be short."""


def alive_in(found: int | list[int]) -> tuple[int, list[int]]:
    """Return a session that `renew` in the database has found, and its missing requests."""
    number, *missing = found if isinstance(found, list) else [found]
    return number, missing


class PostgresSessionEngine(CommandSessionEngine, CommandSender, Protocol):
    """The engine, as its sessions use it.

    Attributes:
        guarded: the tokens of leases that were guarded, while these are held.
        refusal: the refusal of the latest renewal, as a clause, or empty.
    """

    channel: str
    guarded: set[int]
    refusal: str

    @property
    def relaxed(self) -> bool:
        """True if commits do not wait for the disk."""
        ...

    def send(self, statement: Statement) -> None:
        """Send a statement, now or when there is a connection."""

    def renew(self, session: PostgresSession) -> None:
        """Renew a session, with others."""

    def push_all(self, events: Iterable[str] | Refusal) -> None:
        """Handle events, later in this iteration of the loop."""

    def note_waiter(self) -> None:
        """Look soon for an expired session that holds a request up."""

    def look(self, session: PostgresSession, requests: dict[int, int]) -> None:
        """Look at requests of a session, with others."""

    def note_ahead(self, ahead: int) -> None:
        """Note how many requests are ahead of one that waits."""


class GuardedRelease:
    """Wait of one release. It is logged once when it is long.

    Args:
        session: has the lease.
        name: the name of the semaphore; empty for all of the session's.
    """

    __slots__ = ("_began", "_name", "_reported", "_session")

    def __init__(self, session: PostgresSession, name: str) -> None:
        self._session = session
        self._name = name
        self._began = session.loop.time()
        self._reported = False

    def again(self, release: Callable[[], object]) -> None:
        """Try the release again after a pause."""
        session = self._session
        waited = session.loop.time() - self._began
        if waited >= REPORTED_AFTER and not self._reported:
            self._reported = True
            _log.warning(
                "release waits for the end of a transaction that guards the lease: "
                "node=%s name=%r session=%d seconds=%.0f",
                *(session.path, self._name, session.id, waited),
            )
        session.loop.call_later(_PAUSE, release)


class PostgresWithdraw(HandoffWithdraw):
    """Operation that takes a request out of its queue.

    Attributes:
        guarded: its wait for a transaction that guards the lease.
    """

    guarded: GuardedRelease | None = None


class PostgresSession(HandoffSession):
    """An attached session, as the contract defines it."""

    withdrawing = PostgresWithdraw

    _engine: PostgresSessionEngine

    def __init__(self, engine: PostgresSessionEngine, given: SessionParameters) -> None:
        super().__init__(engine, engine, given)

    # Proof

    def _renew(self) -> None:
        self._engine.renew(self)

    @property
    def refusal(self) -> str:
        """The refusal of the latest renewal, as a clause, or empty."""
        return self._engine.refusal

    def probe(self, requests: Iterable[int]) -> None:
        """Find out what has become of these requests, and of the session: it was not proven."""
        self._engine.look(
            self, {each: self.requests[each] for each in requests if each in self.requests}
        )

    async def remaining(self) -> float:
        """Renew the session; return for how long a former attachment may consider a lease held."""
        reply = await self._answer(partial(self._call, "remaining"))
        return float(reply[1])

    # Statements

    def _call(self, function: str, *args: Any, answered: Callable[[Any], object]) -> None:
        self._engine.send(session_call(function, self, args, answered))

    def _send_change(
        self,
        number: int,
        kind: str,
        name: str,
        args: tuple[Any, ...],
        answered: Callable[[Any], None],
    ) -> None:
        words = [values.base64(each) if isinstance(each, bytes) else each for each in args]
        place = self._engine.channel, self._engine.relaxed
        self._call(
            "change", number, kind, [values.to_text(name), *words], *place, answered=answered
        )

    def _change_made(self, number: int, reply: Any) -> None:  # noqa: ARG002  the last one is known
        if reply[0] == "ok":
            self._engine.push_all(reply[1])

    def _send_describe(self, name: str, kinds: str, answered: Callable[[Any], None]) -> None:
        words = self.path, values.to_text(name), kinds
        self._engine.send(Call("describe", words, answered))

    def _send_begin(self, description: str, answered: Callable[[Any], None]) -> None:
        self._call("begin_session", values.to_text(description), answered=answered)

    def _send_leave(self, *, detach: bool, answered: Callable[[Any], None]) -> None:
        engine = self._engine
        guarded: GuardedRelease | None = None

        def left(reply: Any) -> None:
            nonlocal guarded
            if isinstance(reply, list):
                engine.push_all(reply[1:])
                if reply[:1] == ["guarded"]:
                    guarded = guarded or GuardedRelease(self, "")
                    guarded.again(partial(engine.send, leaving))
                    return
            dropped = isinstance(reply, Refusal) and reply.code == DROPPED
            answered(None if dropped else reply)

        words = (self.id, list(self.tokens), detach, engine.channel, engine.relaxed)
        leaving = Call("leave", words, left, (self,))
        engine.send(leaving)

    def _acknowledge(self) -> None:
        words = (self.id, list(self.tokens), self._engine.channel)
        self._engine.send(Call("acknowledge", words, self._engine.push_all))

    def _wrong(self, reply: Any) -> TenureError | None:
        if isinstance(reply, Refusal) and reply.code == DROPPED:
            reply = ["gone"]  # the session ended with the store
        return super()._wrong(reply)

    # Requests

    def _ahead_of(self, reply: list[Any]) -> int:
        return int(reply[1]) if len(reply) > 1 else 0  # it was sent before, and was found

    def _may_hand_on(self, request_id: int) -> bool:
        guarded = self._engine.guarded
        return not guarded or self.handoff.order_id(request_id) not in guarded

    def _drop(self, request_id: int) -> str:
        if guarded := self._engine.guarded:
            guarded.discard(self.handoff.order_id(request_id))
        return super()._drop(request_id)

    def alter(
        self,
        request_id: int,
        *,
        count: int | None,
        data: bytes | None,
        timeout: float | Unchanged | None = UNCHANGED,
    ) -> Answer[None]:
        """Change a request in place."""
        answer = super().alter(request_id, count=count, data=data, timeout=timeout)
        if timeout is not UNCHANGED:
            self._engine.note_waiter()  # it may time out earlier
        return answer

    def not_withdrawn(self, operation: WithdrawOperation, reply: Any) -> None:
        """Handle the error of a withdrawal, or its delay."""
        if isinstance(operation, PostgresWithdraw) and reply == _GUARDED:
            operation.kept = None  # it has lost its timeout
            if operation.guarded is None:
                operation.guarded = GuardedRelease(self, operation.name)
            operation.guarded.again(partial(self._withdraw_again, operation))
        elif isinstance(reply, Refusal) and reply.code == DROPPED:
            operation.settle(Withdrawn.MISSING)  # with the store
        else:
            super().not_withdrawn(operation, reply)

    def compare(self, found: list[list[Any]]) -> None:
        """Compare the requests with those of a store that has lost data.

        Leases that it does not know, or knows as waiting, are lost. One that was handed on is kept
        if one of the session's requests that stand side by side ahead of it is the owner. Otherwise
        a request that was removed may be ahead again. What has been released here is released there
        once more.

        Args:
            found: request id, name, and whether it is an owner, for each request of the store.
        """
        owns = {request_id: granted for request_id, _, granted in found}
        for request_id, standing in list(self.requests.items()):
            ahead = self.handoff.side_by_side(request_id) if standing == HANDED else (request_id,)
            known = request_id in owns and any(map(owns.get, ahead))
            if standing >= HANDED and not known:
                self._removed(request_id, Removal.LAPSED)
        if self.early is None:  # otherwise its requests are not known here yet
            for request_id, name, _ in found:
                if request_id not in self.requests:
                    self._withdraw(request_id, values.from_text(name))

    # Looking up

    def _note_waiter(self, reply: Any) -> None:  # noqa: ARG002
        self._engine.note_waiter()

    def _look(self, requests: dict[int, int], standings: Collection[int]) -> None:
        if requests or OWNS in standings:
            self._engine.look(self, requests)

    def found(self, requests: dict[int, int], reply: Any) -> bool:
        """Handle the states of requests; return true if one was granted.

        Args:
            requests: their states when this was sent.
            reply: an order id, [requests ahead], a reason or null for each, or an error.
        """
        if self._wrong(reply) is not None or self.over:
            return False
        granted = False
        for (request_id, before), place in zip(requests.items(), reply, strict=True):
            standing = self.requests.get(request_id)
            if standing is None or standing == SENT:
                continue
            if isinstance(place, list):
                if before == OWNS:
                    self._removed(request_id, Removal.LAPSED)
                else:
                    self._engine.note_ahead(place[0])
            elif isinstance(place, int):
                if standing in (WAITING, HANDED):
                    self._granted(request_id, place)
                    granted = True
            else:
                self._removed(request_id, removal(place) if place else Removal.LAPSED)
        return granted
