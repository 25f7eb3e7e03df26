"""What an owner hears of its requests from the descriptions of what it watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tenure.engines.contract import Removal
from tenure.engines.ydb.watches import FEW, YdbWatches
from tenure.wire.ydb import Message, Status

ME, OTHER = 7, 8


class Question:
    """A describe that the server has not answered."""

    def __init__(
        self, make: Callable[[int], Message], heard: Callable[[str, Message], bool]
    ) -> None:
        self.message = make(1).describe_semaphore
        self.heard = heard

    def answer(self, owners: Iterable[tuple[int, int]], status: int = Status.SUCCESS) -> None:
        body = SimpleNamespace(
            status=status,
            semaphore_description=SimpleNamespace(
                data=b"", owners=[_Owner(session_id=each, order_id=at) for each, at in owners]
            ),
        )
        self.heard("describe_semaphore_result", cast("Message", body))


class _Owner(SimpleNamespace):
    def SerializeToString(self) -> bytes:  # noqa: N802  (protobuf's name)
        return repr(self).encode()


class Session:
    """One that owns at most one request, and whose server answers when a test says so."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.requests: list[Any] = []
        self.removals: list[Removal] = []
        self.main = SimpleNamespace(protocol=self)
        self._step = 0

    def step(self) -> int:
        self._step += 1
        return self._step

    def send(self, make: Callable[[int], Message], heard: Callable[[str, Message], bool]) -> None:
        self.questions.append(Question(make, heard))

    def grant(self, order_id: int) -> None:
        member = SimpleNamespace(id=ME)
        request = SimpleNamespace(member=member, order_id=order_id, owned_at=self.step())
        self.requests.append(request)

    def owned(self, _name: str) -> list[Any]:
        return list(self.requests)

    def owned_names(self) -> list[str]:
        return ["a"] if self.requests else []

    def removed(self, request: Any, why: Removal, *, release: bool) -> None:
        assert not release
        self.requests.remove(request)
        self.removals.append(why)


async def watched() -> tuple[Session, YdbWatches]:
    """A session whose watch of a semaphore has been asked for, and is not described yet."""
    session = Session()
    watches = YdbWatches(cast("Any", session), cast("Any", session))
    watches.add("a", data=True, owners=True, changed=lambda: None)
    return session, watches


async def test_an_owner_evicted_before_its_watch_was_described_hears_of_it() -> None:
    session, watches = await watched()
    session.grant(5)
    session.questions[0].answer([(OTHER, 6)])  # from before the grant, or after the eviction
    assert not session.removals
    look = session.questions[1]
    assert not look.message.watch_owners
    look.answer([(OTHER, 6)])
    assert session.removals == [Removal.EVICTED]
    assert len(session.questions) == 2
    watches.close()


async def test_an_owner_whose_watch_was_described_before_its_grant_keeps_it() -> None:
    session, watches = await watched()
    session.grant(5)
    session.questions[0].answer([])
    session.questions[1].answer([(ME, 5)])
    assert not session.removals
    assert len(session.questions) == 2
    watches.close()


async def test_an_owner_whose_semaphore_is_gone_hears_of_the_deletion() -> None:
    session, watches = await watched()
    session.grant(5)
    for question in 0, 1:
        session.questions[question].answer([], Status.NOT_FOUND)
    assert session.removals == [Removal.DELETED]
    watches.close()


@pytest.mark.parametrize("known", [5, None])
async def test_a_description_with_the_owner_is_enough(known: int | None) -> None:
    session, watches = await watched()
    session.grant(5)
    session.requests[0].order_id = known
    session.questions[0].answer([(ME, 5)])
    assert (len(session.questions), session.removals) == (1, [])
    watches.close()
    await asyncio.sleep(0)


async def test_an_owner_is_watched_by_a_watch_that_was_asked_for_after_its_grant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenure.engines.ydb.watches.SETTLED", 0.0)
    session, watches = await watched()
    session.questions[0].answer([(OTHER, 6)])
    session.grant(7)
    watches.granted()
    while len(session.questions) < 2:  # noqa: ASYNC110  the next turn of the loop
        await asyncio.sleep(0)
    later = session.questions[1]
    assert later.message.watch_owners
    later.answer([(OTHER, 6)])  # granted and evicted, of which the older watch tells nothing
    assert session.removals == [Removal.EVICTED]
    watches.close()


async def test_owners_are_watched_again_when_few_of_many_are_left() -> None:
    session = Session()
    session.grant(5)
    watches = YdbWatches(cast("Any", session), cast("Any", session))
    watches.add("a", data=True, owners=False, changed=lambda: None)
    first = session.questions[0]
    assert first.message.watch_owners
    first.answer([(ME, 5), *((OTHER, each) for each in range(6, 6 + FEW))])
    changed = SimpleNamespace(data_changed=False, owners_changed=True)
    first.heard("describe_semaphore_changed", cast("Message", changed))
    many = session.questions[1]
    assert not many.message.watch_owners
    many.answer([(ME, 5), (OTHER, 6)])
    few = session.questions[2]
    assert few.message.watch_owners
    few.answer([(OTHER, 6)])
    assert session.removals == [Removal.EVICTED]
    watches.close()


async def test_a_renewal_looks_for_what_no_watch_covers() -> None:
    session = Session()
    watches = YdbWatches(cast("Any", session), cast("Any", session))
    watches.add("a", data=True, owners=False, changed=lambda: None)
    session.grant(5)
    watches.renewed()
    look = session.questions[1]
    assert not look.message.watch_data
    look.answer([(OTHER, 6)])
    assert session.removals == [Removal.EVICTED]
    watches.close()
