"""A pair on Redis with telemetry, beside one without.

Prometheus and OpenTelemetry's metrics count each pair: the begin and the end of its wait, and its
release. With traces, a pair has two spans. The SDK of OpenTelemetry drops them at their end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

import tenure
from benchmarks.measure import Measured, in_turn
from benchmarks.redis_work import Pairs, a_server, ours
from tenure import telemetry
from tenure.telemetry import prometheus

ROUNDS = 9

Instrument = Callable[[tenure.Client], object]
"""Adds telemetry to a client."""


def _prometheus(client: tenure.Client) -> None:
    prometheus.instrument(client, registry=CollectorRegistry())


def _metrics(client: tenure.Client) -> None:
    meters = MeterProvider([InMemoryMetricReader()])
    telemetry.instrument(client, traces=False, meter_provider=meters)


def _traces(client: tenure.Client) -> None:
    telemetry.instrument(client, metrics=False, tracer_provider=TracerProvider())


def measure() -> Iterator[Measured]:
    """Pairs a second of one task and of 64, with each kind of telemetry."""
    with a_server() as port:
        for tasks in (1, 64):
            for name, instrument, at_least in (
                ("Prometheus", _prometheus, 0.95),
                ("OpenTelemetry, metrics", _metrics, 0.95),
                ("OpenTelemetry, traces", _traces, None),
            ):
                yield _beside(port, tasks, name, instrument, at_least if tasks == 1 else None)


def _beside(
    port: int, tasks: int, name: str, instrument: Instrument, at_least: float | None
) -> Measured:
    costs: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}

    def run(which: str, work: Callable[..., Coroutine[Any, Any, Pairs]]) -> float:
        pairs = asyncio.run(work(port, tasks))
        costs[which].append(pairs.microseconds)
        return pairs.rate

    rate, bare, ratio = in_turn(
        lambda: run("with", partial(ours, instrument=instrument)),
        lambda: run("without", ours),
        ROUNDS,
    )
    return Measured(
        f"redis, {tasks} task{'s on distinct keys' if tasks > 1 else ''}, with {name}",
        *(rate, "pairs/s", "without telemetry", bare, ratio),
        at_least=at_least,
        notes={"microseconds of processor time for a pair, of the client and of Redis": costs},
    )
