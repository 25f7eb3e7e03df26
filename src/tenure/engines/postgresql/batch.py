"""Batches: operations of sessions as one statement, in the form that the functions take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from tenure.engines._kit.commands.pipeline import OperationBatch, OrderIds
from tenure.engines.postgresql.statements import Refusal

_ACQUIRE = "acquire($1,$2,$3,$4,$5,$6,$7,$8)"
_RELEASE = "release($1,$2,$3,$4,$5,$6,$7)"
_TURN_OVER = "turn_over($1,$2,$3,$4,$5,$6,$7,$8,$9,$10)"
_OPERATE = "operate($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13,$14,$15)"

NO_MORE = ("", "", "", "1")
"""Words of an operation that has only three, as far as it has no more."""


class Batch(OperationBatch):
    """Operations of sessions, in order, as a call of one function.

    Args:
        caller: the channel of the engine.
        order_ids: those that the program has seen.
        known: node and name of ephemeral semaphores that have a row in the store.
        relaxed: commit without the disk.
        pushed: called with events of the engine's sessions.
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
    ) -> None:
        self._clear()
        self._caller = caller
        self._order_ids = order_ids
        self._judged = False
        self._known = known
        self._relaxed = relaxed
        self._pushed = pushed

    def _like(self) -> Batch:
        place = self._caller, self._order_ids, self._known
        batch = Batch(*place, relaxed=self._relaxed, pushed=self._pushed)
        batch._judged = self._judged
        return batch

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
        words = [each.words for each in self.operations]
        sessions = sorted({each.session for each in self.operations}, key=attrgetter("id"))
        origins = {session: at for at, session in enumerate(sessions, 1)}
        fresh = []
        for at, each in enumerate(self.operations, 1):
            kind, _, name, *more = each.words
            place = each.session.path, name
            if kind != "w" and (not more or more[-1] == "1") and place not in self._known:
                fresh.append(at)
                self._known.add(place)
        lists = [
            *(_array([each.id for each in sessions]), _texts([each.token for each in sessions])),
            _array([origins[each.session] for each in self.operations]),
            *(_array([each[0] for each in words]), _array([each[1] for each in words])),
            _texts([each[2] for each in words]),
        ]
        if any(len(each) > 3 for each in words):
            more = [each[3:] or NO_MORE for each in words]
            lists += [
                *(_array([each[0] or "NULL" for each in more]), _texts([each[1] for each in more])),
                *(_array([each[2] or "NULL" for each in more]), _array([each[3] for each in more])),
            ]
        else:
            lists += [b"{}"] * 4
        return [*lists, _array(fresh), b"t" if self._judged else b"f"]

    def _packed_short(self) -> tuple[str, list[bytes | None]] | None:
        """Return the call for operations of a session on a mutex, if there is a function for them.

        Requests that leave come before others that join, as in the reply.
        """
        operations = self.operations
        session, name = operations[0].session, operations[0].words[2]
        leaving = [each for each in operations if each.words[0] == "w"]
        joining = [each for each in operations if each.words[0] == "m"]
        if self._judged or len(leaving) + len(joining) < len(operations):
            return None
        if joining and (session.path, name) not in self._known:
            return None
        whose: list[bytes | None] = [b"%d" % session.id, session.token.encode()]
        waits = ["".join(each.words[5:6]) for each in joining]
        kept = [each.words[3] if len(each.words) > 3 else "NULL" for each in leaving]
        if {*kept} == {"NULL"}:
            kept = []
        if len(operations) == 1 and not kept:
            whose += [b"%d" % operations[0].words[1], name.encode()]
            return (_RELEASE, whose) if leaving else (_ACQUIRE, [*whose, _number(waits[0])])
        numbers = [[each.words[1] for each in part] for part in (leaving, joining)]
        if not leaving or "0" in waits or len({*numbers[0], *numbers[1]}) < len(operations):
            return None
        self.operations = leaving + joining
        waits = [each or "NULL" for each in waits]
        return _TURN_OVER, [*whose, name.encode(), *map(_array, (*numbers, waits, kept))]

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


def _number(text: str) -> bytes | None:
    return text.encode() or None


def _array(values: Iterable[object]) -> bytes:
    return ("{" + ",".join(map(str, values)) + "}").encode()


def _texts(values: list[str]) -> bytes:
    together = "".join(values)
    if '"' in together or "\\" in together:
        values = [each.replace("\\", "\\\\").replace('"', '\\"') for each in values]
    return ('{"' + '","'.join(values) + '"}').encode()
