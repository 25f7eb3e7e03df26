"""Metrics of a client for Prometheus, in a registry of ``prometheus_client``.

`instrument` needs the extra ``prometheus``. The counts are kept by tenure and read when Prometheus
scrapes, so that an event costs little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from tenure.telemetry.handle import Instrumentation, instrumented, missing
from tenure.telemetry.recorder import (
    Histogram,
    Labels,
    Names,
    Recorder,
    RecorderGroup,
    Series,
    padded,
)
from tenure.telemetry.table import BOUNDS, METRICS, Metric, MetricKind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

    from tenure import Client, blocking

__all__ = ["instrument"]

AnyClient: TypeAlias = "Client | blocking.Client"


def instrument(
    client: AnyClient, *, registry: CollectorRegistry | None = None, names: Names = False
) -> Instrumentation:
    """Report the metrics of a client to a registry of ``prometheus_client``.

    Several clients may report to one registry, which then has their sums.

    Example::

        from tenure.telemetry import prometheus

        async with tenure.connect("sqlite:///jobs.db") as client:
            prometheus.instrument(client)
            async with client.mutex("nightly").lock():
                await work()

    Args:
        client: a client of `tenure` or `tenure.blocking`.
        registry: the registry; the global one of ``prometheus_client`` by default.
        names: whether names of locks are labels. Each name is a time series of its own for as long
            as the program runs, so this suits programs with few names. A callable returns the label
            of a name.

    Returns:
        The handle that ends it.

    Raises:
        InvalidArgument: `client` is something else.
        Misuse: the client reports to this registry already, or belongs to another event loop.
        SessionClosed: the client is closed.
        Unsupported: ``prometheus_client`` is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise missing("prometheus_client", "prometheus") from error
    chosen = prometheus_client.REGISTRY if registry is None else registry
    collector = _joined(chosen)

    def make(engine: str) -> list[Recorder]:
        return [Recorder(collector.group, engine, names)]

    leave = partial(_leave, collector, chosen)
    try:
        return instrumented(client, make, leave)
    except BaseException:
        leave()
        raise


class _Collector:
    """The clients of one registry, as the registry reads them.

    Attributes:
        group: the clients.
        users: number of instrumentations that have not been stopped.
    """

    def __init__(self) -> None:
        self.group = RecorderGroup()
        self.users = 0

    def describe(self) -> list[Family]:
        """Return the metrics without values, by which the registry knows their names."""
        return [_family(each, self.group.labels_of(each)) for each in METRICS]

    def collect(self) -> Iterator[Family]:
        """Yield the metrics with their values."""
        group = self.group
        values: dict[Metric, list[tuple[Labels, int | Histogram]]] = {}
        all_sums: tuple[Mapping[Series, int | Histogram], ...] = (
            group.counts(),
            group.levels(),
            group.histograms(),
        )
        for sums in all_sums:
            for (metric, labels), value in sums.items():
                values.setdefault(metric, []).append((labels, value))
        for metric in METRICS:
            names = group.labels_of(metric)
            family = _family(metric, names)
            for labels, value in values.get(metric, ()):
                _add(family, padded(labels, names), value)
            yield family


_collectors: WeakKeyDictionary[CollectorRegistry, _Collector] = WeakKeyDictionary()
_changing = threading.Lock()


def _joined(registry: CollectorRegistry) -> _Collector:
    """Return the collector of a registry, with one more instrumentation."""
    with _changing:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _Collector()
            registry.register(collector)
            _collectors[registry] = collector
        collector.users += 1
        return collector


def _leave(collector: _Collector, registry: CollectorRegistry) -> None:
    """End one instrumentation; with the last one, the metrics leave the registry."""
    with _changing:
        collector.users -= 1
        if collector.users == 0:
            del _collectors[registry]
            registry.unregister(collector)


def _family(metric: Metric, names: tuple[str, ...]) -> Family:
    from prometheus_client import metrics_core as core

    kinds: dict[MetricKind, type[Family]] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    make: Callable[..., Family] = kinds[metric.kind]
    unit = "seconds" if metric.unit == "s" else ""
    return make(metric.in_prometheus, f"{metric.description}.", labels=names, unit=unit)


def _add(family: Any, labels: Labels, value: int | Histogram) -> None:
    if not isinstance(value, Histogram):
        family.add_metric(labels, value)
        return
    below = accumulate(value.counts)
    bounds = [*map(str, BOUNDS), "+Inf"]
    family.add_metric(labels, list(zip(bounds, below, strict=True)), value.sum)
