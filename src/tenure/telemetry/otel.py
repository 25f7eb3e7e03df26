"""Spans and metrics of a client for OpenTelemetry.

`instrument` needs the extra ``otel``, which installs OpenTelemetry's API. A program that exports
what is reported installs the SDK and an exporter.

Counters and gauges are read when a reader collects, and cost little before. The API takes a value
of a histogram when it occurs, and no sums of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from tenure.errors import InvalidArgument
from tenure.telemetry.handle import Instrumentation, instrumented, missing
from tenure.telemetry.recorder import Labels, Names, Observe, Recorder, RecorderGroup, padded
from tenure.telemetry.table import BOUNDS, METRICS, PREFIX, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from opentelemetry.trace import TracerProvider

    from tenure import Client, blocking
    from tenure._client.listeners import Sink

AnyClient: TypeAlias = "Client | blocking.Client"

SCOPE = "tenure"
"""Name of the instrumentation scope."""


def instrument(
    client: AnyClient,
    *,
    traces: bool = True,
    metrics: bool = True,
    names: Names = False,
    positions: bool = False,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Instrumentation:
    """Report a client to OpenTelemetry: spans of waits and leases, and metrics.

    Several clients may report to one provider, which then has their sums.

    Example::

        from tenure import telemetry

        async with tenure.connect("sqlite:///jobs.db") as client:
            telemetry.instrument(client)
            async with client.mutex("nightly").lock():
                await work()

    Args:
        client: a client of `tenure` or `tenure.blocking`.
        traces: whether spans are made.
        metrics: whether metrics are reported.
        names: whether names of locks are attributes of the metrics; spans always have them. Each
            name is a time series of its own for as long as the program runs, so this suits programs
            with few names. A callable returns the attribute of a name.
        positions: whether the span of a request that waits has its place in the queue. Each such
            request reads the queue once.
        tracer_provider: makes the spans; the global provider by default.
        meter_provider: takes the metrics; the global provider by default.

    Returns:
        The handle that ends it.

    Raises:
        InvalidArgument: `client` is something else, or nothing is to be reported.
        Misuse: the client reports to this provider already, or belongs to another event loop.
        SessionClosed: the client is closed.
        Unsupported: OpenTelemetry's API is not installed.
    """
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise missing("OpenTelemetry's API", "otel") from error
    from tenure import __version__
    from tenure.telemetry.spans import Spans

    if not traces and not metrics:
        raise InvalidArgument("instrument() reports traces, metrics or both, not neither")
    meters = _meters_of(meter_provider, __version__) if metrics else None
    tracers = tracer_provider or trace.get_tracer_provider()

    def make(engine: str) -> list[Sink]:
        sinks: list[Sink] = []
        if meters is not None:
            sinks.append(Recorder(meters, engine, names, meters.observer, meters.capture))
        if traces:
            tracer = tracers.get_tracer(SCOPE, __version__)
            sinks.append(Spans(tracers, tracer, engine, positions=positions))
        return sinks

    return instrumented(client, make)


class _Meters(RecorderGroup):
    """The clients of one provider, and its instruments."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        from opentelemetry import context
        from opentelemetry.metrics import Observation

        self.capture: Callable[[], object] = context.get_current
        self._observation = Observation
        self._record: dict[Metric, Callable[..., None]] = {}
        for metric in METRICS:
            facts = {"unit": metric.unit, "description": f"{metric.description}."}
            match metric.kind:
                case "counter":
                    read = [partial(self._read, metric, self.counts)]
                    meter.create_observable_counter(metric.name, read, **facts)
                case "gauge":
                    read = [partial(self._read, metric, self.levels)]
                    meter.create_observable_up_down_counter(metric.name, read, **facts)
                case "histogram":
                    self._record[metric] = meter.create_histogram(
                        metric.name, explicit_bucket_boundaries_advisory=BOUNDS, **facts
                    ).record

    def observer(self, metric: Metric, labels: Labels) -> Observe:
        """Return the function that records the values of a histogram."""
        record, attributes = self._record[metric], self._attributes(metric, labels)

        def observe(value: float, context: Any) -> None:
            record(value, attributes, context)

        return observe

    def _read(
        self,
        metric: Metric,
        sums: Callable[[], Mapping[tuple[Metric, Labels], int]],
        _options: CallbackOptions,
    ) -> Iterable[Observation]:
        return [
            self._observation(value, self._attributes(metric, labels))
            for (each, labels), value in sums().items()
            if each is metric
        ]

    def _attributes(self, metric: Metric, labels: Labels) -> dict[str, str]:
        names = self.labels_of(metric)
        pairs = zip(names, padded(labels, names), strict=True)
        return {PREFIX + name: value for name, value in pairs if value}


_meters: WeakKeyDictionary[MeterProvider, _Meters] = WeakKeyDictionary()
_global: list[_Meters] = []
_making = threading.Lock()


def _meters_of(provider: MeterProvider | None, version: str) -> _Meters:
    """Return the instruments of a provider, which takes them only once."""
    from opentelemetry import metrics

    with _making:
        # The program may set the global provider later: then the same instruments report to it.
        if provider is None or provider is metrics.get_meter_provider():
            if not _global:
                _global.append(_Meters(metrics.get_meter(SCOPE, version)))
            return _global[0]
        found = _meters.get(provider)
        if found is None:
            found = _meters[provider] = _Meters(provider.get_meter(SCOPE, version))
        return found
