"""Watches on the channels of a store, as engines share them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tenure.engines._kit.watchers import LocalWatches


class Watching:
    over = False


class Subscriptions:
    def __init__(self) -> None:
        self.channels: set[str] = set()
        self.watches = LocalWatches[Watching](self.subscribe, self.channels.remove)

    def subscribe(self, channel: str) -> None:
        assert channel not in self.channels
        assert channel not in self.watches
        self.channels.add(channel)


@pytest.fixture
def store() -> Iterator[Subscriptions]:
    store = Subscriptions()
    yield store
    assert store.channels == set(store.watches)


def test_a_channel_is_subscribed_to_from_its_first_watch_to_its_last(store: Subscriptions) -> None:
    ends = [store.watches.watch("c", Watching(), "b", lambda: None) for _ in range(2)]
    assert store.channels == {"c"}
    ends[0]()
    ends[0]()
    assert store.channels == {"c"}
    ends[1]()
    assert store.channels == set()


def test_a_change_is_reported_to_the_watches_of_its_kind(store: Subscriptions) -> None:
    reported: list[str] = []
    for channel, kinds in (("c", "bd"), ("c", "bo"), ("d", "bd")):
        store.watches.watch(channel, Watching(), kinds, partial(reported.append, channel + kinds))
    store.watches.report("c", "d")
    store.watches.report("e", "d")
    assert reported == ["cbd"]
    store.watches.report_all()
    assert sorted(reported[1:]) == ["cbd", "cbo", "dbd"]


def test_the_watches_of_a_session_end_with_it(store: Subscriptions) -> None:
    session, other, reported = Watching(), Watching(), list[str]()
    store.watches.watch("c", session, "b", lambda: reported.append("the session's"))
    end = store.watches.watch("d", session, "b", lambda: reported.append("the session's"))
    store.watches.watch("d", other, "b", lambda: reported.append("the other's"))
    store.watches.forget(session)
    assert store.channels == {"d"}
    store.watches.report_all()
    assert reported == ["the other's"]
    end()
    assert store.channels == {"d"}
