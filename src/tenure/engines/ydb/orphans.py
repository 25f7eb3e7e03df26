"""Ends the session of a dead program, for the reaper.

Another process attaches to each of its members, by the protection key and with a number above all
that the program has used, and stops it.
"""

from __future__ import annotations

import asyncio

from tenure.engines.contract import Orphan
from tenure.engines.ydb import errors
from tenure.engines.ydb.database import Database
from tenure.engines.ydb.members import Member
from tenure.wire.ydb import Message

SEQ_NO = 1 << 62
"""Number of an attachment above all of any program; servers keep it in 64 bits with a sign."""


class _End:
    """The end of one member (`MemberEvents`)."""

    def __init__(self, database: Database, orphan: Orphan, session_id: int, key: bytes) -> None:
        self._node = orphan.node
        self._error: Exception | None = None
        path = database.path_of(orphan.node)
        self._member = Member(
            *(database, path, orphan.recovery_window, "", key, database.clock.now, self),
            session_id=session_id,
            seq_no=SEQ_NO,
        )

    async def confirmed(self) -> None:
        """Return when it has ended. Raises as `Engine.end_orphan`."""
        self._member.stop()
        try:
            await asyncio.wait([self._member.over])
        finally:
            await self._member.finish()
        if self._error is not None:
            raise self._error

    def member_started(self, member: Member) -> None:
        """Do nothing: the member stops the session."""

    def member_detached(self) -> None:
        """Do nothing: the member attaches again."""

    def member_proven(self) -> None:
        """Do nothing."""

    def member_refused(self, member: Member, failure: Message) -> None:
        """Stop if the server will never attach it."""
        self._error = errors.attach_error(self._node, failure)
        if self._error is not None:
            member.abandon()

    def member_failed(self, member: Member, error: Exception) -> None:
        """Stop: the reaper tries again."""
        self._error = error
        member.abandon()

    def member_ended(
        self,
        member: Member,  # noqa: ARG002
        failure: Message | None,  # noqa: ARG002
    ) -> None:
        """Succeed: it has ended, or another attachment has it."""
        self._error = None


async def end(database: Database, orphan: Orphan) -> None:
    """End all members of an orphan. Raises as `Engine.end_orphan`."""
    ends = []
    for each in orphan.credential.split(","):
        number, _, key = each.partition(":")
        ends.append(_End(database, orphan, int(number), bytes.fromhex(key)))
    results = await asyncio.gather(*(each.confirmed() for each in ends), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
