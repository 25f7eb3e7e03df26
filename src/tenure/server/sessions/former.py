"""Earlier attachments of sessions, whose programs may still consider the session theirs.

Attach numbers show whether all of them are known. For each session that has ended here, the server
remembers the number of its last attachment, and the programs up to that one that may consider the
session theirs. If the next attachment has the next number, that record is complete. Otherwise an
unknown client owned the session in between.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tenure.clock import Clock
from tenure.server.sessions.session import UNKNOWN, ServerSession

_REMEMBERED = 10_000  # number of remembered sessions that have ended here


class EndedSession(NamedTuple):
    """A session that has ended here.

    Attributes:
        attach_number: the number of its last attachment here.
        holders: attachments up to that one whose programs may consider the session theirs.
        remote_until: time until which unknown programs may (see `ServerSession.remote_until`).
        resumable, key: checked before it is resumed.
    """

    attach_number: int
    holders: list[ServerSession]
    remote_until: float
    resumable: bool = True
    key: bytes = b""


class FormerAttachments:
    """Memory of the latest `_REMEMBERED` sessions that have ended here."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._ended: OrderedDict[int, EndedSession] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        """Return whether a session is remembered."""
        return number in self._ended

    def get(self, number: int) -> EndedSession | None:
        """Return the record of a session, or ``None``."""
        return self._ended.get(number)

    def remember(self, session: ServerSession) -> None:
        """Remember an attachment that has ended here, or was replaced."""
        now, number = self._now(), session.store.id
        there = self._ended.get(number)
        if there is not None and there.attach_number > session.store.attach_number:
            return
        self._ended[number] = EndedSession(
            session.store.attach_number,
            [each for each in (session, *session.former) if each.may_hold_until() > now],
            session.remote_until,
            session.resumable,
            session.shown_key,
        )
        self._ended.move_to_end(number)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def before(self, session: ServerSession, former: ServerSession | None) -> EndedSession | None:
        """Return the holders before this attachment; ``None`` if they are unknown here.

        Args:
            session: the new attachment.
            former: the current attachment here, if there is one.
        """
        number = session.store.attach_number - 1
        if former is not None and former.store.attach_number == number:
            ended = EndedSession(number, [former, *former.former], former.remote_until)
        else:
            ended = self._ended.get(session.store.id, EndedSession(0, [], UNKNOWN))
        known = ended.attach_number == number and ended.remote_until != UNKNOWN
        return ended if known else None

    def note(
        self, session: ServerSession, former: ServerSession | None, *, former_notified: bool
    ) -> None:
        """Record with an attachment which other programs may consider the session theirs.

        Args:
            session: the new attachment.
            former: the current attachment here, if there is one.
            former_notified: whether the store guarantees that the former holder gets no more proof,
                even if it is unknown here.
        """
        now = self._now()
        known = self.before(session, former)
        if known is None:
            session.remote_until = now + session.window if former_notified else UNKNOWN
        else:
            session.remote_until = known.remote_until
            session.former = [each for each in known.holders if each.may_hold_until() > now]
