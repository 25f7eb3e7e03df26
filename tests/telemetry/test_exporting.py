"""Beyond the process: OTLP to a collector, exemplars, and the global providers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import tenure
from tenure import telemetry
from tenure.telemetry import table
from tests.telemetry.helpers import Backend

_RPC: dict[str, tuple[Any, Any]] = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
}


class Collector(ThreadingHTTPServer):
    """A receiver of OTLP over HTTP, which decodes what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.received: dict[str, list[Any]] = defaultdict(list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request, response = _RPC[self.path]
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received[self.path].append(request.FromString(body))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(response().SerializeToString())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def _attributes(pairs: Any) -> dict[str, object]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in pairs
    }


async def test_a_collector_gets_the_spans_and_the_metrics(collector: Collector) -> None:
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(collector.url("/v1/traces"), timeout=30))
    )
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(collector.url("/v1/metrics"), timeout=30), float("inf")
    )
    meters = MeterProvider([reader], shutdown_on_exit=False)
    async with tenure.connect("memory://collected") as client:
        telemetry.instrument(client, tracer_provider=tracers, meter_provider=meters, names=True)
        async with client.mutex("m").lock() as lease:
            assert await client.mutex("m").try_lock() is None
            await asyncio.to_thread(meters.force_flush)
        await asyncio.to_thread(tracers.shutdown)
        await asyncio.to_thread(meters.shutdown)

    spans = [
        span
        for request in collector.received["/v1/traces"]
        for resource in request.resource_spans
        for scope in resource.scope_spans
        if (scope.scope.name, scope.scope.version) == ("tenure", tenure.__version__)
        for span in scope.spans
    ]
    assert sorted(span.name for span in spans) == [
        *("acquire mutex", "acquire mutex", "hold mutex")
    ]
    (hold,) = [span for span in spans if span.name == "hold mutex"]
    assert _attributes(hold.attributes)["tenure.fencing_token"] == lease.fencing_token
    assert [link.span_id for link in hold.links] == [
        span.span_id
        for span in spans
        if _attributes(span.attributes).get("tenure.outcome") == "acquired"
    ]

    first, *_ = collector.received["/v1/metrics"]
    metrics = {
        metric.name: metric
        for resource in first.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    labels = {
        "tenure.engine": "memory",
        "tenure.node": "/default",
        "tenure.kind": "mutex",
        "tenure.name": "m",
    }
    counts = {
        _attributes(point.attributes)["tenure.outcome"]: point.as_int
        for point in metrics[table.ACQUISITIONS.name].sum.data_points
    }
    assert counts == {"acquired": 1, "rejected": 1}
    assert metrics[table.ACQUISITIONS.name].sum.is_monotonic
    (held,) = metrics[table.LEASES.name].sum.data_points
    assert _attributes(held.attributes) == labels
    assert held.as_int == 1
    assert not metrics[table.LEASES.name].sum.is_monotonic
    (waited,) = metrics[table.WAIT.name].histogram.data_points
    assert waited.count == 1
    assert tuple(waited.explicit_bounds) == table.BOUNDS
    assert metrics[table.WAIT.name].unit == "s"


async def test_an_exemplar_of_a_wait_names_its_trace(backend: Backend) -> None:
    tracer = backend.tracers.get_tracer("test")
    async with tenure.connect("memory://exemplars") as client:
        backend.instrument(client)
        with tracer.start_as_current_span("request") as around:
            held = await client.mutex("m").lock()
            waiting = asyncio.create_task(client.mutex("m").lock())
        while not backend.value(table.WAITERS):  # noqa: ASYNC110  a metric notifies no waiter
            await asyncio.sleep(0)
        with tracer.start_as_current_span("another"):
            await held.release()
        await (await waiting).release()
    ours = around.get_span_context().trace_id
    collected = backend.collect()
    for metric in (table.WAIT, table.HOLD):
        exemplars = [each for point in collected[metric.name] for each in point.exemplars]
        assert exemplars
        assert {each.trace_id for each in exemplars} == {ours}


def test_the_global_providers_may_be_set_later() -> None:
    program = """
import asyncio, tenure
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tenure import telemetry

async def use(client):
    async with client.mutex("m").lock():
        pass

def counted(reader):
    data = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {each.name: each.data.data_points for each in scope.metrics}
    acquisitions = sum(each.value for each in found["tenure.client.acquisitions"])
    waits = sum(each.count for each in found["tenure.client.wait.duration"])
    assert acquisitions == waits, (acquisitions, waits)
    return acquisitions

async def main():
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    async with tenure.connect("memory://") as early, tenure.connect("memory://") as late:
        telemetry.instrument(early)
        provider = MeterProvider([reader])
        metrics.set_meter_provider(provider)
        trace.set_tracer_provider(TracerProvider())
        trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
        telemetry.instrument(late, meter_provider=provider)
        await use(early)
        await use(late)
        assert counted(reader) == 2
        names = [span.name for span in exporter.get_finished_spans()]
        assert names == ["acquire mutex", "hold mutex"] * 2, names

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_without_an_sdk_nothing_happens() -> None:
    program = """
import asyncio, tenure
from tenure import telemetry

async def main():
    async with tenure.connect("memory://") as client:
        handle = telemetry.instrument(client)
        async with client.mutex("m").lock():
            pass
        handle.stop()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
