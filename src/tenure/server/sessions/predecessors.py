"""Earlier attachments of sessions, whose programs may still believe that they have the session.

Attach numbers show what is known of them. For each session that is over here, the server remembers
the number of its last attachment, and which programs up to that one may believe that they have the
session. If the next attachment has the next number, that knowledge is complete. Otherwise an
unknown client owned the session in between.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tenure.clock import Clock
from tenure.server.sessions.session import UNKNOWN, Hosted

__all__ = ["Left", "Predecessors"]

_REMEMBERED = 10_000  # sessions that are over here


class Left(NamedTuple):
    """A session that is over here.

    Attributes:
        attach_number: of its last attachment here.
        believers: attachments up to that one whose programs may believe that they have it.
        strangers_until: time until which other programs may (see `Hosted.strangers_until`).
        resumable, key: checked before it is resumed.
    """

    attach_number: int
    believers: list[Hosted]
    strangers_until: float
    resumable: bool = True
    key: bytes = b""


class Predecessors:
    """Memory of the sessions that are over here, limited to the latest `_REMEMBERED`."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._left: OrderedDict[int, Left] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._left

    def get(self, number: int) -> Left | None:
        """Return what is remembered of a session; ``None``: nothing."""
        return self._left.get(number)

    def remember(self, hosted: Hosted) -> None:
        """Remember an attachment that is over here, or replaced by another."""
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
        """Return who had the session before this attachment; ``None`` if that is not known here.

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
        """Note with an attachment which other programs may believe that they have the session.

        Args:
            told: the store guarantees that the former holder gets no more proof, also if it is
                not known here.
        """
        now = self._now()
        known = self.before(hosted, former)
        if known is None:
            hosted.strangers_until = now + hosted.window if told else UNKNOWN
        else:
            hosted.strangers_until = known.strangers_until
            hosted.former = [each for each in known.believers if each.believes_until() > now]
