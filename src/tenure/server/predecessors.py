"""Who had a session before, and may still believe that he has it.

What is known of that is known by attach numbers. Of each session that is over here it is remembered
which attachment was the last one, and who of all up to that may believe. Whoever attaches it next
has the next number if nobody was in between; then that is all there is to know, and otherwise
somebody has had it of whom nobody here knows.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tenure.clock import Clock
from tenure.server.hosted import UNKNOWN, Hosted

__all__ = ["Left", "Predecessors"]

_REMEMBERED = 10_000  # sessions that are over here


class Left(NamedTuple):
    """A session that is over here.

    Attributes:
        attach_number: of its last attachment here.
        believers: those who had it until then and may believe that they have it.
        strangers_until: until when others may (see `Hosted.strangers_until`).
        resumable, key: what has to be known before it is resumed.
    """

    attach_number: int
    believers: list[Hosted]
    strangers_until: float
    resumable: bool = True
    key: bytes = b""


class Predecessors:
    """What is remembered, of so many sessions at the most."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._left: OrderedDict[int, Left] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._left

    def get(self, number: int) -> Left | None:
        """What is remembered of a session."""
        return self._left.get(number)

    def remember(self, hosted: Hosted) -> None:
        """It is over here, or has another attachment."""
        now, number = self._now(), hosted.store.id
        there = self._left.get(number)
        if there is not None and there.attach_number > hosted.store.attach_number:
            return
        self._left[number] = Left(
            hosted.store.attach_number,
            [each for each in (hosted, *hosted.former) if each.believes_until() > now],
            hosted.strangers_until,
            hosted.resumable,
            hosted.shown_key,
        )
        self._left.move_to_end(number)
        if len(self._left) > _REMEMBERED:
            self._left.popitem(last=False)

    def before(self, hosted: Hosted, former: Hosted | None) -> Left | None:
        """Who had the session before this attachment; ``None`` if that is not known here.

        Args:
            former: the attachment that is here until now, if there is one.
        """
        number = hosted.store.attach_number - 1
        if former is not None and former.store.attach_number == number:
            left = Left(number, [former, *former.former], former.strangers_until)
        else:
            left = self._left.get(hosted.store.id, Left(0, [], UNKNOWN))
        known = left.attach_number == number and left.strangers_until != UNKNOWN
        return left if known else None

    def note(self, hosted: Hosted, former: Hosted | None, *, told: bool) -> None:
        """Note with an attachment who may believe beside it.

        Args:
            told: the store has made sure that whoever had it gets no more proof, also where that
                is nobody known here.
        """
        now = self._now()
        known = self.before(hosted, former)
        if known is None:
            hosted.strangers_until = now + hosted.window if told else UNKNOWN
        else:
            hosted.strangers_until = known.strangers_until
            hosted.former = [each for each in known.believers if each.believes_until() > now]
