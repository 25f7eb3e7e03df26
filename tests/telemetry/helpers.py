"""What a test reads back: the spans and the metrics that a client has reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from tenure import blocking, telemetry
from tenure._client.client import Client
from tenure.telemetry import Instrumentation, prometheus
from tenure.telemetry.recorder import Names
from tenure.telemetry.table import PREFIX, Metric


@dataclass(frozen=True)
class Distribution:
    """A histogram."""

    count: int
    sum: float


class Backend:
    """A place for what clients report, through OpenTelemetry and to Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    def instrument(
        self, client: Client | blocking.Client, names: Names = False, *, positions: bool = False
    ) -> list[Instrumentation]:
        """Report a client to all of them."""
        return [
            telemetry.instrument(
                client,
                tracer_provider=self.tracers,
                meter_provider=self.meters,
                names=names,
                positions=positions,
            ),
            prometheus.instrument(client, registry=self.registry, names=names),
        ]

    # Spans

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in the order of their ends."""
        return list(self.exporter.get_finished_spans())

    def spans_named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    # Metrics

    def value(self, metric: Metric, **labels: str) -> float:
        """The sum over the series with these labels, which must be the same in both."""
        read, scraped = self.otel_value(metric, labels), self.prometheus_value(metric, labels)
        assert read == scraped, f"{metric.name}: {read} by OpenTelemetry, {scraped} by Prometheus"
        return read

    def distribution(self, metric: Metric, **labels: str) -> Distribution:
        """The sum over the histograms with these labels, which must be the same in both."""
        points = self._points(metric, labels)
        found = [each for each in points if isinstance(each, HistogramDataPoint)]
        count, total = sum(each.count for each in found), sum(each.sum for each in found)
        name = metric.in_prometheus
        assert count == self._scraped(f"{name}_count", labels)
        assert count == self._scraped(f"{name}_bucket", labels | {"le": "+Inf"})
        # At a loss each reads the clock itself.
        assert abs(total - self._scraped(f"{name}_sum", labels)) < 0.1
        return Distribution(count, total)

    def otel_value(self, metric: Metric, labels: dict[str, str]) -> float:
        return sum(
            each.value for each in self._points(metric, labels) if isinstance(each, NumberDataPoint)
        )

    def prometheus_value(self, metric: Metric, labels: dict[str, str]) -> float:
        return self._scraped(metric.in_prometheus, labels)

    def collect(self) -> dict[str, list[Any]]:
        """The points of all metrics, as OpenTelemetry has them."""
        data = self.reader.get_metrics_data()
        resources = () if data is None else data.resource_metrics
        return {
            metric.name: list(metric.data.data_points)
            for resource in resources
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def _points(self, metric: Metric, labels: dict[str, str]) -> list[Any]:
        wanted = {PREFIX + name: value for name, value in labels.items()}
        found = self.collect().get(metric.name, [])
        return [point for point in found if wanted.items() <= dict(point.attributes).items()]

    def _scraped(self, name: str, labels: dict[str, str]) -> float:
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
