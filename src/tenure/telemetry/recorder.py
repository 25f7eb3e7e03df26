"""Counts of one client's events, and their sums over several clients.

A recorder is a sink (`tenure._client.listeners`). Only the loop of its client changes it, so it
needs no lock, and a count costs a fraction of a microsecond. Any thread may read it.

* A gauge is the number of requests or sessions that the recorder knows at the moment. So it cannot
  drift, also if the client was instrumented later or loses its store.
* The counts of a lock's names are kept until the recorder ends. That is why a name is a label only
  on request: each name would be a time series of its own, for ever.

A registry has each metric once, so that several clients share it: see `RecorderGroup`. The counts
of a client that has been closed are kept there. A counter never decreases, and a program may open
a client for each task.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakSet

from tenure._client.request import HELD, SENT, WAITING
from tenure.telemetry import table
from tenure.telemetry.table import BOUNDS, NAME, Metric

if TYPE_CHECKING:
    from tenure._client.client_core import ClientCore
    from tenure._client.listeners import Handler, SinkEventKind
    from tenure._client.request import AnyRequest, Request, UnsentRequest
    from tenure._client.session_core import SessionCore

Names: TypeAlias = bool | Callable[[str], str]
"""Label for the names of locks: none, the name itself, or what a callable returns for it."""

Labels: TypeAlias = tuple[str, ...]
"""Values of a metric's labels, in their order, and that of the name, if it has one."""

Series: TypeAlias = tuple[Metric, Labels]
"""A metric, with the values of its labels."""

Observe: TypeAlias = Callable[[float, Any], None]
"""Records a value in a histogram, with the context of the call that it is about."""

_NO_FACTS: tuple[object, ...] = ()


class Histogram:
    """Numbers of values below each of the bounds, and their sum.

    Attributes:
        counts: number of values for each bucket, with that above the last bound.
        sum: sum of the values.
    """

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, value: float, _context: object = None) -> None:
        """Record a value."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Add the values of another one."""
        for number, count in enumerate(tuple(other.counts)):
            self.counts[number] += count
        self.sum += other.sum


class _Requests:
    """Counts of the requests of one node and kind, and of one name if names are labels."""

    __slots__ = ("held", "hold", "labels", "losses", "outcomes", "wait", "waiting")

    def __init__(self, labels: Labels, wait: Observe, hold: Observe) -> None:
        self.labels = labels
        self.wait = wait
        self.hold = hold
        self.waiting = self.held = 0
        self.outcomes: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()


class Recorder:
    """Counts of one client's events, on its loop.

    Args:
        destination: keeps the counts after the end of the client.
        engine: the label of the engine.
        names: whether names of locks are labels.
        observer: returns the function that records the values of a histogram. Without it, the
            recorder keeps the histograms.
        capture: returns the context of a call.

    Attributes:
        destination: as given.
        handlers: the functions that count the events.
        named: whether names of locks are labels.
        histograms: the histograms that it keeps.
    """

    def __init__(
        self,
        destination: RecorderGroup,
        engine: str,
        names: Names,
        observer: Callable[[Metric, Labels], Observe] | None = None,
        capture: Callable[[], object] | None = None,
    ) -> None:
        self.destination = destination
        self.histograms: dict[Series, Histogram] = {}
        self._engine = engine
        self._names = names
        self.named = names is not False
        self._observer = observer or self._keep
        self._capture = capture
        self._requests: dict[Labels, _Requests] = {}
        self._waiting: dict[AnyRequest, tuple[_Requests, object]] = {}
        self._held: dict[AnyRequest, tuple[_Requests, object]] = {}
        self._states: dict[SessionCore, str] = {}
        self._expirations: Counter[str] = Counter()  # by node
        self._reconnects: Counter[str] = Counter()
        self._delays: dict[str, Observe] = {}
        self.handlers: Mapping[SinkEventKind, Handler] = {
            "Requested": self._requested,
            "Acquired": self._acquired,
            "TimedOut": self._timed_out,
            "NotAcquired": self._not_acquired,
            "Released": self._released,
            "Lost": self._lost,
            "SessionAttached": self._attached,
            "SessionDetached": self._detached,
            "Expired": self._expired,
            "Closed": self._closed,
            "Sent": self._sent,
            "Renewing": self._renewing,
        }

    def begin(self, client: ClientCore) -> None:
        """Begin with the sessions, waiters and leases that the client has already."""
        self.destination.add(self)
        for session in cast("list[SessionCore]", list(client.sessions)):
            if session.state not in ("attached", "detached"):
                continue
            self._states[session] = session.state
            for request in session.held_requests():
                if request.state is SENT or request.state is WAITING:
                    self._requested(session, request, _NO_FACTS)
                elif request.state is HELD:
                    requests = self._of(request)
                    requests.held += 1
                    self._held[request] = requests, None

    # Events; see `Sink`

    def _sent(self, session: SessionCore, request: Request, facts: tuple[UnsentRequest]) -> None:
        """Continue the wait as that of a request."""
        found = self._waiting.pop(facts[0], None)
        if found is None:
            self._requested(session, request, _NO_FACTS)
        else:
            self._waiting[request] = found

    def _renewing(self, session: SessionCore, _request: None, facts: tuple[float]) -> None:
        """Record by how much a renewal is late."""
        observe = self._delays.get(session.node)
        if observe is None:
            labels = (self._engine, session.node)
            observe = self._delays[session.node] = self._observer(table.RENEWALS, labels)
        observe(facts[0], None)

    def closed(self) -> None:
        """End: nothing more happens to the client, or it is no longer instrumented."""
        self.destination.end(self)

    def _keep(self, metric: Metric, labels: Labels) -> Observe:
        histogram = self.histograms[metric, labels] = Histogram()
        return histogram.observe

    def _of(self, request: AnyRequest) -> _Requests:
        key: Labels = (request.node, request.options.kind)
        names = self._names
        if names:
            key += (request.name if names is True else names(request.name),)
        found = self._requests.get(key)
        if found is None:
            labels = (self._engine, *key)
            wait, hold = (self._observer(each, labels) for each in (table.WAIT, table.HOLD))
            found = self._requests[key] = _Requests(labels, wait, hold)
        return found

    def _requested(
        self, _session: SessionCore | None, request: AnyRequest, _facts: tuple[object, ...]
    ) -> None:
        requests, capture = self._of(request), self._capture
        requests.waiting += 1
        self._waiting[request] = requests, None if capture is None else capture()

    def _ended(self, request: AnyRequest, outcome: str) -> tuple[_Requests, object]:
        found = self._waiting.pop(request, None)
        if found is None:  # it began before the client was instrumented
            found = self._of(request), None
        else:
            found[0].waiting -= 1
        found[0].outcomes[outcome] += 1
        return found

    def _acquired(self, _session: SessionCore, request: Request, facts: Any) -> None:
        self._held[request] = found = self._ended(request, "acquired")
        requests, context = found
        requests.held += 1
        requests.wait(facts[2], context)

    def _timed_out(self, _session: SessionCore, request: AnyRequest, _facts: Any) -> None:
        self._ended(request, "timed_out")

    def _not_acquired(self, _session: SessionCore, request: AnyRequest, facts: Any) -> None:
        self._ended(request, facts[2])

    def _released(self, _session: SessionCore, request: Request, facts: Any) -> None:
        self._let_go(request, facts[2])

    def _lost(self, session: SessionCore, request: Request, facts: Any) -> None:
        # It may have been released before, and only the release has shown the loss.
        requests = self._let_go(request, session.now() - request.granted_at)
        requests.losses[facts[3]] += 1

    def _let_go(self, request: Request, held_for: float) -> _Requests:
        found = self._held.pop(request, None)
        if found is None:
            return self._of(request)
        requests, context = found
        requests.held -= 1
        requests.hold(held_for, context)
        return requests

    def _attached(self, session: SessionCore, *_: object) -> None:
        if session in self._states:
            self._reconnects[session.node] += 1
        self._states[session] = "attached"

    def _detached(self, session: SessionCore, *_: object) -> None:
        self._states[session] = "detached"

    def _expired(self, session: SessionCore, *_: object) -> None:
        self._states.pop(session, None)
        self._expirations[session.node] += 1

    def _closed(self, session: SessionCore, *_: object) -> None:
        self._states.pop(session, None)

    # Reading, from any thread

    def counts(self) -> Iterator[tuple[Metric, Labels, int]]:
        """Yield the counters, with their labels."""
        for requests in tuple(self._requests.values()):
            labels, name = requests.labels[:3], requests.labels[3:]
            for outcome, count in tuple(requests.outcomes.items()):
                yield table.ACQUISITIONS, (*labels, outcome, *name), count
            for cause, count in tuple(requests.losses.items()):
                yield table.LOSSES, (*labels, cause, *name), count
        for metric, counter in (
            (table.EXPIRATIONS, self._expirations),
            (table.RECONNECTS, self._reconnects),
        ):
            for node, count in tuple(counter.items()):
                yield metric, (self._engine, node), count

    def levels(self) -> Iterator[tuple[Metric, Labels, int]]:
        """Yield the gauges, with their labels."""
        for requests in tuple(self._requests.values()):
            yield table.WAITERS, requests.labels, requests.waiting
            yield table.LEASES, requests.labels, requests.held
        states = Counter((each.node, state) for each, state in tuple(self._states.items()))
        for (node, state), count in states.items():
            yield table.SESSIONS, (self._engine, node, state), count


class RecorderGroup:
    """Sums over the clients that report to one registry or one provider.

    A client's loop changes its recorder, and any thread reads the sums. The lock guards the set of
    the recorders alone.

    A forked child begins without counts, because those that it has copied are its parent's. Its own
    clients may report to the same registries and providers.
    """

    def __init__(self) -> None:
        self.clear()
        _groups.add(self)

    def clear(self) -> None:
        """Forget everything, also the lock, which a thread of a parent process may hold."""
        self._named = False
        self._recorders: dict[Recorder, None] = {}
        self._counts: Counter[Series] = Counter()  # of the recorders that have ended
        self._levels: Counter[Series] = Counter()  # all 0: the gauges that there were
        self._histograms: dict[Series, Histogram] = {}
        self._lock = threading.Lock()

    def add(self, recorder: Recorder) -> None:
        """Add the recorder of a client."""
        with self._lock:
            self._named = self._named or recorder.named
            self._recorders[recorder] = None

    def end(self, recorder: Recorder) -> None:
        """Keep the counts of a recorder that has ended. Safe to call twice."""
        with self._lock:
            if recorder not in self._recorders:
                return
            del self._recorders[recorder]
            for metric, labels, count in recorder.counts():
                self._counts[metric, labels] += count
            for metric, labels, _ in recorder.levels():
                self._levels[metric, labels] = 0
            _add(self._histograms, recorder)

    # Reading, from any thread

    def labels_of(self, metric: Metric) -> tuple[str, ...]:
        """Return the names of a metric's labels."""
        return (*metric.labels, NAME) if metric.named and self._named else metric.labels

    def counts(self) -> Mapping[Series, int]:
        """Return the sums of the counters."""
        with self._lock:
            sums = Counter(self._counts)
            for recorder in self._recorders:
                for metric, labels, count in recorder.counts():
                    sums[metric, labels] += count
        return sums

    def levels(self) -> Mapping[Series, int]:
        """Return the sums of the gauges."""
        with self._lock:
            sums = Counter(self._levels)
            for recorder in self._recorders:
                for metric, labels, count in recorder.levels():
                    sums[metric, labels] += count
        return sums

    def histograms(self) -> Mapping[Series, Histogram]:
        """Return the sums of the histograms."""
        sums: dict[Series, Histogram] = {}
        with self._lock:
            for series, histogram in self._histograms.items():
                sums.setdefault(series, Histogram()).add(histogram)
            for recorder in self._recorders:
                _add(sums, recorder)
        return sums


_groups: WeakSet[RecorderGroup] = WeakSet()


def _clear() -> None:
    for group in list(_groups):
        group.clear()


if hasattr(os, "register_at_fork"):  # pragma: no branch  (there is no fork on Windows)
    os.register_at_fork(after_in_child=_clear)


def _add(sums: dict[Series, Histogram], recorder: Recorder) -> None:
    for series, histogram in tuple(recorder.histograms.items()):
        sums.setdefault(series, Histogram()).add(histogram)


def padded(labels: Labels, names: tuple[str, ...]) -> Labels:
    """Return the values for those names of labels; a client without names has an empty one."""
    return labels + ("",) * (len(names) - len(labels))
