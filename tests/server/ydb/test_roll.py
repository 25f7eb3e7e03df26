"""What is kept of sessions that come and go."""

from __future__ import annotations

from typing import Any

from tenure.server.ydb.roll import Roll
from tests.server.ydb.raw import serving


async def test_a_session_that_comes_and_goes_is_kept_once() -> None:
    async with serving() as server:
        roll, stream = Roll(server.context), _stream()
        server.context.counts.sessions.take_anyway()
        for _ in range(1000):
            roll.join("/default", 1, 3_600_000, 0, stream)
            assert roll.leave("/default", 1, stream)
        assert len(roll) < 100
        assert roll.find("/default", 1) is not None
        roll.forget()


def _stream() -> Any:
    """Make something that speaks for the session."""
    return object()
