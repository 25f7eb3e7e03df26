"""The life cycle that sessions of different engines share (`tenure.engines._kit.session`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from tenure.engines._kit.session import SessionBase, received
from tenure.engines.contract import Attach, Removal
from tenure.errors import EngineError, SessionExpired
from tenure.model import Recovered

FOUND = Recovered(1, "pump", 7, 1, b"", ephemeral=False, granted=True)


class Events:
    """Receiver that records what is reported."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def proven(self, at: float) -> None:
        self.seen.append(("proven", at))

    def resumed(self, requests: Sequence[Recovered]) -> None:
        self.seen.append(("resumed", *requests))

    def granted(self, request_id: int, order_id: int | None) -> None:
        self.seen.append(("granted", request_id, order_id))

    def removed(self, request_id: int, why: Removal) -> None:
        self.seen.append(("removed", request_id, why))

    def detached(self, cause: BaseException | None = None) -> None:
        self.seen.append(("detached", cause))

    def attached(self) -> None:
        self.seen.append(("attached",))

    def ended(self, error: SessionExpired) -> None:
        self.seen.append(("ended", error))


class Session(SessionBase):
    """Session of a store that records what it is sent."""

    def __init__(self, *, taken_over: bool = False, window: float = 60.0) -> None:
        self.seen = Events()
        how = Attach("/jobs", window, session_id=4 if taken_over else None)
        super().__init__(how, self.seen, 4, window)
        self.sent: list[str] = []

    def leave(self) -> None:
        self._forget()

    def abandon(self) -> None:
        if not self.over:
            self._forget()
            self.sent.append("detach" if self.taken_over else "close")

    def _acknowledge(self) -> None:
        self.sent.append("acknowledge")


def answers(session: Session, *seconds: float) -> Callable[[], Awaitable[float]]:
    """What the store says remains, one after the other; each answer comes with news."""
    left = list(seconds)

    async def remaining() -> float:
        session.recheck.set()
        return left.pop(0)

    return remaining


async def nothing() -> None:
    """Begin without requests."""


ENDS: dict[str, Callable[[Session], None]] = {
    "end": lambda session: session.end("its window has passed"),
    "superseded": Session.superseded,
    "stop": lambda session: session.stop(EngineError("the engine was closed")),
    "leave": Session.leave,
    "abandon": Session.abandon,
}


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
async def test_a_session_ends_once_and_keeps_the_first_reason(first: str, second: str) -> None:
    session = Session()
    session.check()
    ENDS[first](session)
    with pytest.raises((SessionExpired, EngineError)) as before:
        session.check()
    told, sent = list(session.seen.seen), list(session.sent)
    ENDS[second](session)
    assert (session.seen.seen, session.sent) == (told, sent)
    with pytest.raises((SessionExpired, EngineError)) as after:
        session.check()
    if first in {"end", "superseded", "stop"}:
        assert after.value is before.value


async def test_only_an_end_by_the_stores_word_is_reported() -> None:
    reported = {}
    for name, end in ENDS.items():
        session = Session()
        end(session)
        assert session.over
        assert session.recheck.is_set()
        reported[name] = [kind for kind, *_ in session.seen.seen]
    assert reported == {
        "end": ["ended"],
        "superseded": ["ended"],
        "stop": [],
        "leave": [],
        "abandon": [],
    }


async def test_a_superseded_attachment_reports_its_end_before_it_acknowledges() -> None:
    session = Session()
    session.events.ended = lambda error: session.sent.append(f"ended {error.taken_over}")  # type: ignore[method-assign]
    session.superseded()
    assert session.sent == ["ended True", "acknowledge"]


async def test_events_during_a_takeover_follow_the_requests_in_order() -> None:
    session = Session(taken_over=True)
    early = session.early
    assert early == []
    early.append(partial(session.events.granted, 1, 7))
    early.append(partial(session.events.removed, 2, Removal.EVICTED))
    session.resume([FOUND])
    assert session.early is None
    assert session.seen.seen == [
        ("resumed", FOUND),
        ("granted", 1, 7),
        ("removed", 2, Removal.EVICTED),
    ]


async def test_nothing_is_resumed_after_the_end() -> None:
    session = Session(taken_over=True)
    session.superseded()
    session.resume([FOUND])
    assert [kind for kind, *_ in session.seen.seen] == ["ended"]


async def test_a_takeover_asks_until_nothing_remains() -> None:
    session = Session(taken_over=True)

    async def begin() -> str:
        session.resume([FOUND])
        return "begun"

    assert await session.take_over(answers(session, 30.0, 20.0, 0.0), begin) == "begun"
    assert session.seen.seen == [("resumed", FOUND)]


async def test_a_takeover_from_a_dead_program_does_not_wait() -> None:
    session = Session(taken_over=True)
    await session.take_over(None, nothing)
    assert not session.over


async def test_a_takeover_asks_again_without_news() -> None:
    session, asked = Session(taken_over=True, window=0.003), 0

    async def remaining() -> float:
        nonlocal asked
        asked += 1
        return 60.0 if asked < 3 else -1.0

    await session.take_over(remaining, nothing)
    assert asked == 3


async def test_a_takeover_never_begins_once_the_session_is_over() -> None:
    """The answer that nothing remains may come for a session that was taken over once more."""
    session = Session(taken_over=True)

    async def remaining() -> float:
        session.superseded()
        return 0.0

    async def begin() -> None:
        raise AssertionError("two attachments would consider the leases theirs")

    with pytest.raises(SessionExpired) as caught:
        await session.take_over(remaining, begin)
    assert caught.value.taken_over
    assert session.sent == ["acknowledge"]


async def test_the_end_wakes_a_takeover_that_waits() -> None:
    session, asked = Session(taken_over=True), asyncio.Event()

    async def remaining() -> float:
        asked.set()
        return 1800.0

    taking_over = asyncio.ensure_future(session.take_over(remaining, nothing))
    await asked.wait()
    session.end("an administrator ended it")
    with pytest.raises(SessionExpired, match="an administrator"):
        await taking_over


@pytest.mark.parametrize("cancelled_in", ["remaining", "the wait", "begin"])
async def test_a_cancelled_takeover_leaves_the_session_detached(cancelled_in: str) -> None:
    session, there = Session(taken_over=True), asyncio.Event()

    async def stuck() -> Any:
        there.set()
        await asyncio.Event().wait()

    async def an_hour() -> float:
        there.set()
        return 3600.0

    remaining: Any = {"remaining": stuck, "the wait": an_hour, "begin": None}[cancelled_in]
    taking_over = asyncio.ensure_future(session.take_over(remaining, stuck))
    await there.wait()
    taking_over.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking_over
    assert session.sent == ["detach"]


async def test_a_takeover_that_fails_leaves_the_session_detached() -> None:
    session = Session(taken_over=True)

    async def remaining() -> float:
        raise EngineError("the store refused that")

    with pytest.raises(EngineError):
        await session.take_over(remaining, nothing)
    assert session.sent == ["detach"]


async def test_an_attached_session_is_received() -> None:
    attaching: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
    session = Session()
    attaching.set_result(session)
    assert await received(attaching) is session
    assert not session.over


@pytest.mark.parametrize("answered", ["before", "after"])
async def test_a_session_that_its_caller_does_not_receive_is_closed(answered: str) -> None:
    attaching: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
    session = Session()
    caller = asyncio.ensure_future(received(attaching))
    await asyncio.sleep(0)
    if answered == "before":  # in the same turn: the caller has not run since
        attaching.set_result(session)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    if answered == "after":
        attaching.set_result(session)
    await asyncio.sleep(0)
    assert session.sent == ["close"]


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
async def test_nothing_is_left_of_an_attachment_that_never_was(outcome: str) -> None:
    attaching: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(received(attaching))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    if outcome == "failed":
        attaching.set_exception(EngineError("refused"))  # retrieved, or else it would be logged
    else:
        attaching.cancel()
    await asyncio.sleep(0)


async def test_the_end_of_a_session_that_is_being_left_is_not_reported() -> None:
    session = Session()
    session.closing = True
    session.end("its window has passed")
    assert session.over
    assert session.seen.seen == []
    with pytest.raises(SessionExpired, match="its window"):
        session.check()
