"""Batches: operations of sessions as one call of a function in the database.

There are functions for frequent batches, and one for all others (``sql/functions.sql``). Here ends
what has names: the functions take arrays, with an element for each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

from tenure.engines._kit.commands.pipeline import (
    EnqueueOperation,
    Operation,
    OperationBatch,
    OrderIds,
)
from tenure.engines._kit.commands.replies import count_text, microseconds
from tenure.engines.postgresql.handoff import HandoffWithdraw
from tenure.engines.postgresql.statements import Refusal
from tenure.engines.postgresql.values import base64, to_text

_ACQUIRE = "acquire($1,$2,$3,$4,$5,$6,$7,$8)"
_RELEASE = "release($1,$2,$3,$4,$5,$6,$7)"
_TURN_OVER = "turn_over($1,$2,$3,$4,$5,$6,$7,$8,$9,$10)"
_OPERATE = "operate($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13,$14,$15)"


class Batch(OperationBatch):
    """Operations of sessions, in order, as a call of one function.

    Args:
        caller: the channel of the engine.
        order_ids: those that the program has seen.
        known: node and name of ephemeral semaphores that have a row in the store.
        relaxed: commit without the disk.
        pushed: called with events of the engine's sessions.
        judged: see `judged`.
    """

    __slots__ = ("_caller", "_judged", "_known", "_order_ids", "_pushed", "_relaxed")

    def __init__(
        self,
        caller: str,
        order_ids: OrderIds,
        known: set[tuple[str, str]],
        *,
        relaxed: bool,
        pushed: Callable[[list[str]], None],
        judged: bool = False,
    ) -> None:
        self._clear()
        self._caller = caller
        self._order_ids = order_ids
        self._judged = judged
        self._known = known
        self._relaxed = relaxed
        self._pushed = pushed

    def _like(self) -> Batch:
        return Batch(
            *(self._caller, self._order_ids, self._known),
            relaxed=self._relaxed,
            pushed=self._pushed,
            judged=self._judged,
        )

    def packed(self, schema: str) -> tuple[bytes, list[bytes | None]]:
        """Return the SQL and its parameters."""
        one_place = len(self.shares) == len(self.holds) == 1
        short = self._packed_short() if one_place else None
        function, args = short or (_OPERATE, self._packed_all())
        return f"SELECT {schema}.{function}".encode(), [
            self._caller.encode(),
            b"%d" % self._order_ids.highest,
            b"t" if self._relaxed else b"f",
            *args,
        ]

    def _packed_all(self) -> list[bytes | None]:
        """Return the arguments of ``operate``, which takes any operations."""
        operations, known = self.operations, self._known
        sessions = sorted({each.session for each in operations}, key=attrgetter("id"))
        origins = {session: at for at, session in enumerate(sessions, 1)}
        rows = [_row(each) for each in operations]
        fresh = []
        for at, (operation, row) in enumerate(zip(operations, rows, strict=True), 1):
            place = operation.session.path, operation.name
            if row.kind != "w" and row.ephemeral == "1" and place not in known:
                fresh.append(at)
                known.add(place)
        options: list[bytes | None] = [b"{}"] * 4  # the defaults, for all operations
        if not _PLAIN.issuperset(rows):
            options = [
                _array([row.tokens for row in rows]),
                _texts([row.data for row in rows]),
                _array([row.wait for row in rows]),
                _array([row.ephemeral for row in rows]),
            ]
        return [
            _array([each.id for each in sessions]),
            _texts([each.token for each in sessions]),
            _array([origins[each.session] for each in operations]),
            _array([row.kind for row in rows]),
            _array([each.request_id for each in operations]),
            _texts([to_text(each.name) for each in operations]),
            *options,
            _array(fresh),
            b"t" if self._judged else b"f",
        ]

    def _packed_short(self) -> tuple[str, list[bytes | None]] | None:
        """Return the call for operations of a session on a mutex, if there is a function for them.

        Requests that leave come before others that join, as in the reply.
        """
        operations = self.operations
        session, name = operations[0].session, operations[0].name
        leaving = [each for each in operations if isinstance(each, HandoffWithdraw)]
        joining = [
            each
            for each in operations
            if isinstance(each, EnqueueOperation)
            and each.exclusive
            and not (each.data or each.may_have_run)
        ]
        if self._judged or len(leaving) + len(joining) < len(operations):
            return None
        if joining and (session.path, name) not in self._known:
            return None
        numbers = [each.request_id for each in operations]
        waits = ["" if each.timeout is None else microseconds(each.timeout) for each in joining]
        keeps = any(each.kept is not None for each in leaving)
        its_session = [b"%d" % session.id, session.token.encode()]
        its_name = to_text(name).encode()
        if len(operations) == 1 and not keeps:
            args: list[bytes | None] = [*its_session, b"%d" % numbers[0], its_name]
            return (_RELEASE, args) if leaving else (_ACQUIRE, [*args, waits[0].encode() or None])
        if not leaving or "0" in waits or len({*numbers}) < len(operations):
            return None
        self.operations = [*leaving, *joining]
        return _TURN_OVER, [
            *its_session,
            its_name,
            _array([each.request_id for each in leaving]),
            _array([each.request_id for each in joining]),
            _array([each or "NULL" for each in waits]),
            _array([each.kept or "NULL" for each in leaving] if keeps else []),
        ]

    def answered(self, reply: Any) -> None:
        """Give each operation its part of the reply, also after one that raises an error."""
        operations, failure = self.operations, None
        replies: list[Any] = reply
        if isinstance(reply, Refusal):
            replies = [reply] * len(operations)
        for operation, each in zip(operations, replies, strict=False):
            try:
                operation.answered(each)
            except Exception as error:
                failure = error
        if len(replies) > len(operations):
            self._pushed(replies[len(operations) :])
        if failure is not None:
            raise failure

    def judged(self) -> None:
        """Report no expired session again: a transaction may guard what it has."""
        self._judged = True

    def rolled_back(self) -> None:
        """Assume nothing of the rows: other programs remove those that are not used."""
        self._known.clear()


class _Row(NamedTuple):
    """An operation in the arguments of ``operate``, without its session, request and name.

    Attributes:
        kind: "m" locks a mutex, "e" adds another request, "E" one that may be there, and "w"
            withdraws one.
        tokens: its count; NULL for a mutex. For a withdrawal, the request that it keeps.
        data: in base64.
        wait: microseconds that the request may wait.
        ephemeral: "1" for an ephemeral semaphore.
    """

    kind: str
    tokens: str = "NULL"
    data: str = ""
    wait: str = "NULL"
    ephemeral: str = "1"


_LOCK, _WITHDRAWAL = _Row("m"), _Row("w")
_PLAIN = frozenset({_LOCK, _WITHDRAWAL})


def _row(operation: Operation[Any]) -> _Row:
    if not isinstance(operation, EnqueueOperation):
        kept = operation.kept if isinstance(operation, HandoffWithdraw) else None
        return _WITHDRAWAL if kept is None else _Row("w", str(kept))
    is_lock = operation.exclusive and not operation.data
    if is_lock and operation.timeout is None and not operation.may_have_run:
        return _LOCK
    return _Row(
        "E" if operation.may_have_run else "m" if is_lock else "e",
        "NULL" if is_lock else count_text(operation.count),
        base64(operation.data),
        microseconds(operation.timeout) or "NULL",
        "1" if operation.ephemeral else "0",
    )


def _array(values: Iterable[object]) -> bytes:
    return ("{" + ",".join(map(str, values)) + "}").encode()


def _texts(values: list[str]) -> bytes:
    together = "".join(values)
    if '"' in together or "\\" in together:
        values = [each.replace("\\", "\\\\").replace('"', '\\"') for each in values]
    return ('{"' + '","'.join(values) + '"}').encode()
