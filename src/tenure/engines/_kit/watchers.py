"""Local watches of an engine, by subject and by session.

Adding and removing a watch takes constant time, regardless of the number of watches. A session's
end visits only its own watches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

Subject = TypeVar("Subject", bound=Hashable)
Session = TypeVar("Session", bound=Hashable)
Watch = TypeVar("Watch", bound=Hashable)
Watching = TypeVar("Watching", bound="WatchingSession")


class WatchingSession(Hashable, Protocol):
    """A session, as seen by its watches."""

    @property
    def over(self) -> bool:
        """True if it has ended, or was closed by this program."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalWatch(Generic[Watching]):
    """One watch of a session.

    Attributes:
        session: the watching session.
        kinds: letters of the kinds of changes to report, "b" among them.
        changed: called after such a change.
    """

    session: Watching
    kinds: str
    changed: Callable[[], None]

    def report(self, kind: str) -> None:
        """Report a change of a kind, unless the watch excludes it or its session has ended."""
        if kind in self.kinds and not self.session.over:
            self.changed()


class Watchers(Generic[Subject, Session, Watch]):
    """Watches of an engine, in the order of their creation. Iterates over the subjects."""

    def __init__(self) -> None:
        self._on: dict[Subject, dict[Watch, None]] = {}
        self._of: dict[Session, dict[Watch, Subject]] = {}

    def add(self, subject: Subject, session: Session, watch: Watch) -> None:
        """Add a watch."""
        self._on.setdefault(subject, {})[watch] = None
        self._of.setdefault(session, {})[watch] = subject

    def remove(self, subject: Subject, session: Session, watch: Watch) -> bool:
        """Remove a watch; return false if it does not exist (any more)."""
        of_session = self._of.get(session, {})
        if watch not in of_session:
            return False
        del of_session[watch]
        if not of_session:
            del self._of[session]
        on_subject = self._on[subject]
        del on_subject[watch]
        if not on_subject:
            del self._on[subject]
        return True

    def on(self, subject: Subject) -> tuple[Watch, ...]:
        """Return the watches of a subject."""
        return tuple(self._on.get(subject, ()))

    def of(self, session: Session) -> list[tuple[Subject, Watch]]:
        """Return the watches of a session."""
        return [(subject, watch) for watch, subject in self._of.get(session, {}).items()]

    def clear(self) -> None:
        """Remove all watches."""
        self._on.clear()
        self._of.clear()

    def __contains__(self, subject: Subject) -> bool:
        return subject in self._on

    def __iter__(self) -> Iterator[Subject]:
        return iter(self._on)

    def __len__(self) -> int:
        return len(self._on)


class LocalWatches(Watchers[str, Watching, LocalWatch[Watching]]):
    """Watches of an engine on the channels of its store.

    Args:
        subscribe: called with a channel before its first watch.
        unsubscribe: called with a channel after its last watch.
    """

    def __init__(
        self, subscribe: Callable[[str], object], unsubscribe: Callable[[str], object]
    ) -> None:
        super().__init__()
        self._subscribe = subscribe
        self._unsubscribe = unsubscribe

    def watch(
        self, channel: str, session: Watching, kinds: str, changed: Callable[[], None]
    ) -> Callable[[], None]:
        """Call `changed` after changes of these kinds; return a function that ends the watch."""
        watch = LocalWatch(session, kinds, changed)
        if channel not in self:
            self._subscribe(channel)
        self.add(channel, session, watch)
        return partial(self._end, channel, watch)

    def _end(self, channel: str, watch: LocalWatch[Watching]) -> None:
        if self.remove(channel, watch.session, watch) and channel not in self:
            self._unsubscribe(channel)

    def report(self, channel: str, kind: str) -> None:
        """Report a change of a kind to the watches of a channel."""
        for watch in self.on(channel):
            watch.report(kind)

    def report_all(self) -> None:
        """Report changes to all watches, because some may have been missed."""
        for channel in tuple(self):
            self.report(channel, "b")

    def forget(self, session: Watching) -> None:
        """End the watches of a session."""
        for channel, watch in self.of(session):
            self._end(channel, watch)
