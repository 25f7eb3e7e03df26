"""Sums over the clients that report to one registry or one provider.

A registry has each metric once, so that several clients share it. The counts of a client that has
been closed are kept: a counter never decreases, and a program may open a client for each task.

A client's loop changes its recorder, and any thread reads the sums. The lock guards the set of the
recorders alone.

A forked child begins without counts, because those that it has copied are its parent's. Its own
clients may report to the same registries and providers.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from weakref import WeakSet

from tenure.telemetry.recorder import Histogram, Labels, Recorder, Series
from tenure.telemetry.table import NAME, Metric


class Group:
    """The clients that report to one registry or one provider."""

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


_groups: WeakSet[Group] = WeakSet()


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
