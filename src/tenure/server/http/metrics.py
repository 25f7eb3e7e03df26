"""Metrics of a server, in Prometheus' text format.

`SECTIONS` is the one list of them: the exposition, the table in the documentation, the alert rules
and the dashboard in ``deploy/`` are made from it. A reader of a metric takes what is counted
already (`tenure.server.meter`), so that a server without scrapes does no work for them.

* **Nodes.** The first nodes that the server's clients use have series of their own, as many as the
  setting ``metrics-nodes`` allows. The others are added up as ``node="(others)"``, and so are those
  that the reader's identity may not see.
* **Identities** have series only with the setting ``metrics-identities``.
* **Names** are never those of semaphores, sessions or clients: any client could invent them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

import tenure
from tenure.server.auth.accounts import Account
from tenure.server.auth.identity import Access, Permissions
from tenure.server.context import Context
from tenure.server.http.health import RECENT, Health
from tenure.server.limits import Limits
from tenure.server.meter import ENDS, LOSSES, OTHERS, OUTCOMES, Histogram, NodeMeter, Traffic

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Type of the text format that every Prometheus reads."""

_AGE = 0.2  # seconds for which scrapes share a text
_TEXTS = 8  # texts for identities with different permissions

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]
Sample: TypeAlias = tuple[tuple[str, ...], float]
"""Values of the labels, and the value."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Sources of one scrape.

    Attributes:
        context: the server's context.
        health: the server's health.
        permissions: the reader's access to nodes.
        identities: number of identities with series of their own.
    """

    context: Context
    health: Health
    permissions: Permissions
    identities: int = 0

    def by_node(self) -> Iterator[tuple[str, list[NodeMeter]]]:
        """Yield each visible node with its counts; `OTHERS` has those of all others."""
        hidden = []
        for path, meter in self.context.meter.nodes.items():
            if path != OTHERS and self.permissions.access(path) >= Access.READ:
                yield path, [meter]
            else:
                hidden.append(meter)
        yield OTHERS, hidden

    def usage(self) -> Iterator[tuple[str, float, float]]:
        """Yield each resource of clients with its usage and its limit."""
        context = self.context
        counts, limits = context.counts, context.limits
        yield "connections", counts.connections.taken, limits.connections
        yield "greetings", counts.greetings.taken, limits.greetings
        yield "input_bytes", context.input.total, limits.input_bytes
        yield "semaphores", counts.semaphores.taken, limits.semaphores
        accounts = [*context.guard.accounts, context.guard.accounts.unowned]
        for name in _COUNTED:
            used = attrgetter(f"{name}.used")
            yield name, sum(map(used, accounts)), getattr(limits, name)

    def by_identity(self) -> Iterator[Sample]:
        """Yield the usage of the identities that have series of their own."""
        known: dict[str, list[Account]] = {}
        for each in self.context.guard.accounts:  # a token and a certificate may have one name
            known.setdefault(each.identity, []).append(each)
        for identity in sorted(known)[: self.identities]:
            for name in ("semaphores", *_COUNTED):
                yield (identity, name), sum(getattr(each, name).used for each in known[identity])


_REASONS = (*(each.name for each in fields(Limits)), "login")
_COUNTED = ("nodes", "requests", "sessions", "stored_bytes", "watches")


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric.

    Attributes:
        name: its name; a counter's ends in ``_total``.
        type: its type.
        help: its meaning, in one sentence.
        read: returns its samples, or its histogram.
        labels: the names of its labels.
    """

    name: str
    type: MetricType
    help: str
    read: Callable[[Reading], Iterable[Sample] | Histogram]
    labels: tuple[str, ...] = ()

    def family(self, reading: Reading) -> Metric:
        """Return the metric with its current samples."""
        if self.type == "histogram":
            return self._histogram(reading)
        kind: Any = CounterMetricFamily if self.type == "counter" else GaugeMetricFamily
        family: Metric = kind(self.name.removesuffix("_total"), self.help, labels=self.labels)
        for labels, value in self._samples(reading):
            family.add_metric(labels, value)  # type: ignore[attr-defined]  # of both families
        return family

    def _samples(self, reading: Reading) -> Iterable[Sample]:
        found = self.read(reading)
        assert not isinstance(found, Histogram)
        return found

    def _histogram(self, reading: Reading) -> HistogramMetricFamily:
        found = self.read(reading)
        assert isinstance(found, Histogram)
        family = HistogramMetricFamily(self.name, self.help)
        total = 0
        buckets = []
        for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric((), buckets, found.sum)
        return family


def _one(value: Callable[[Reading], float]) -> Callable[[Reading], Iterable[Sample]]:
    return lambda reading: [((), value(reading))]


def _per_node(name: str) -> Callable[[Reading], Iterable[Sample]]:
    """Return a reader of an attribute of each `NodeMeter`."""
    get: Callable[[NodeMeter], int] = attrgetter(name)
    return lambda reading: [((node,), sum(map(get, meters))) for node, meters in reading.by_node()]


def _per_listener(name: str) -> Callable[[Reading], Iterable[Sample]]:
    """Return a reader of an attribute of each listener's `Traffic`."""
    get: Callable[[Traffic], int] = attrgetter(name)
    return lambda reading: [
        ((url,), get(traffic)) for url, traffic in reading.context.meter.listeners.items()
    ]


def _by_kind(name: str, kinds: Iterable[str]) -> Callable[[Reading], Iterable[Sample]]:
    """Return a reader of a `NodeMeter`'s counts by kind, added up over all nodes."""
    known = tuple(kinds)

    def read(reading: Reading) -> list[Sample]:
        counts = [getattr(meter, name) for meter in reading.context.meter.nodes.values()]
        return [((kind,), sum(each[kind] for each in counts)) for kind in known]

    return read


def _lost(reading: Reading) -> list[Sample]:
    return [
        ((node,), sum(each.losses.total() for each in meters)) for node, meters in reading.by_node()
    ]


def _timed_out(reading: Reading) -> list[Sample]:
    return [
        ((node,), sum(each.outcomes["timed_out"] for each in meters))
        for node, meters in reading.by_node()
    ]


def _refusals(reading: Reading) -> list[Sample]:
    # With zeros, because Prometheus does not notice the first of a series that was not there.
    counts = dict.fromkeys(_REASONS, 0) | reading.context.meter.refusals
    return [((reason,), count) for reason, count in counts.items()]


def _info(reading: Reading) -> list[Sample]:
    return [((tenure.__version__, reading.context.engine.url.partition("://")[0]), 1)]


SECTIONS: Final[dict[str, tuple[MetricInfo, ...]]] = {
    "Server": (
        MetricInfo(
            "tenure_info",
            "gauge",
            "Always 1; the labels have the version and the kind of the store.",
            _info,
            ("version", "store"),
        ),
        MetricInfo(
            "tenure_draining",
            "gauge",
            "1 while the server is being stopped, else 0.",
            _one(lambda it: it.health.draining),
        ),
    ),
    "Sessions and requests": (
        MetricInfo(
            "tenure_sessions",
            "gauge",
            "Sessions that are attached through this server.",
            _per_node("sessions"),
            ("node",),
        ),
        MetricInfo(
            "tenure_sessions_opened_total",
            "counter",
            "Sessions that were opened, resumed or taken over through this server.",
            _per_node("opened"),
            ("node",),
        ),
        MetricInfo(
            "tenure_sessions_ended_total",
            "counter",
            "Sessions that have left this server, by how they ended; a detached one lives on in "
            "the store.",
            _by_kind("ends", ENDS),
            ("end",),
        ),
        MetricInfo(
            "tenure_requests_total",
            "counter",
            "Requests that were sent for semaphores, mutexes and elections.",
            _per_node("requests"),
            ("node",),
        ),
        MetricInfo(
            "tenure_grants_total",
            "counter",
            "Requests that were granted.",
            _per_node("grants"),
            ("node",),
        ),
        MetricInfo(
            "tenure_waiters",
            "gauge",
            "Requests that wait for a grant.",
            _per_node("waiting"),
            ("node",),
        ),
        MetricInfo(
            "tenure_leases",
            "gauge",
            "Requests that are granted and not released.",
            _per_node("held"),
            ("node",),
        ),
        MetricInfo(
            "tenure_wait_seconds",
            "histogram",
            "Time from a request to its grant.",
            lambda it: it.context.meter.waits,
        ),
        MetricInfo(
            "tenure_hold_seconds",
            "histogram",
            "Time from a grant to the end of the lease.",
            lambda it: it.context.meter.holds,
        ),
        MetricInfo(
            "tenure_requests_timed_out_total",
            "counter",
            "Requests whose timeout has passed in the queue.",
            _timed_out,
            ("node",),
        ),
        MetricInfo(
            "tenure_requests_not_granted_total",
            "counter",
            "Requests that ended without a grant, by outcome; busy: with timeout 0.",
            _by_kind("outcomes", OUTCOMES),
            ("outcome",),
        ),
        MetricInfo(
            "tenure_leases_lost_total",
            "counter",
            "Leases that ended before their holder released them.",
            _lost,
            ("node",),
        ),
        MetricInfo(
            "tenure_losses_total",
            "counter",
            "Leases that ended before their holder released them, by cause.",
            _by_kind("losses", LOSSES),
            ("cause",),
        ),
    ),
    "Clients": (
        MetricInfo(
            "tenure_connections",
            "gauge",
            "Open connections, those that are not identified yet included.",
            _per_listener("connections"),
            ("listener",),
        ),
        MetricInfo(
            "tenure_connections_opened_total",
            "counter",
            "Connections that were accepted.",
            _per_listener("opened"),
            ("listener",),
        ),
        MetricInfo(
            "tenure_received_bytes_total",
            "counter",
            "Bytes from clients, without the overhead of TLS.",
            _per_listener("received"),
            ("listener",),
        ),
        MetricInfo(
            "tenure_sent_bytes_total",
            "counter",
            "Bytes to clients, without the overhead of TLS.",
            _per_listener("sent"),
            ("listener",),
        ),
        MetricInfo(
            "tenure_refusals_total",
            "counter",
            "Connections, sessions and operations that were refused, by the limit that was "
            "reached; login: a token or a certificate that is not valid.",
            _refusals,
            ("reason",),
        ),
        MetricInfo(
            "tenure_usage",
            "gauge",
            "Usage of a limited resource by all clients.",
            lambda it: [((name,), used) for name, used, _ in it.usage()],
            ("resource",),
        ),
        MetricInfo(
            "tenure_limit",
            "gauge",
            "Limit of a resource, as it is set.",
            lambda it: [((name,), most) for name, _, most in it.usage()],
            ("resource",),
        ),
        MetricInfo(
            "tenure_identity_usage",
            "gauge",
            "Usage of a limited resource by one identity, with the setting metrics-identities.",
            lambda it: it.by_identity(),
            ("identity", "resource"),
        ),
        MetricInfo(
            "tenure_audit_records_dropped_total",
            "counter",
            "Records that the audit log could not be given in time.",
            _one(lambda it: it.context.audit.dropped),
        ),
    ),
    "Health": (
        MetricInfo(
            "tenure_loop_lag_seconds",
            "histogram",
            "Delay of the event loop, which all clients share; observed ten times a second.",
            lambda it: it.health.loop.lags,
        ),
        MetricInfo(
            "tenure_loop_lag_max_seconds",
            "gauge",
            f"Longest delay of the event loop in the last {RECENT:g} seconds.",
            _one(lambda it: it.health.loop.largest),
        ),
        MetricInfo(
            "tenure_store_up",
            "gauge",
            "1 if the store has answered the latest reading, else 0.",
            _one(lambda it: it.health.store.reason is None),
        ),
        MetricInfo(
            "tenure_store_latency_seconds",
            "histogram",
            "Time in which the store answers a small read; made for health checks and scrapes.",
            lambda it: it.health.store.latencies,
        ),
        MetricInfo(
            "tenure_store_failures_total",
            "counter",
            "Readings that the store did not answer, or refused.",
            _one(lambda it: it.health.store.failed),
        ),
    ),
}
"""All metrics by section. Those of the process (``process_*``) are of Prometheus' library."""

METRICS: Final = tuple(metric for section in SECTIONS.values() for metric in section)


class Exposition:
    """The texts that scrapes get.

    Args:
        context: the server's context.
        health: the server's health.
        identities: number of identities with series of their own.
    """

    def __init__(self, context: Context, health: Health, identities: int = 0) -> None:
        self._context = context
        self._health = health
        self._identities = identities
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._texts: dict[frozenset[tuple[str, Access]], tuple[float, bytes]] = {}

    async def text(self, permissions: Permissions) -> bytes:
        """Return the metrics as this identity may see them, after a look at the store.

        Scrapes with the same permissions share a text for a fraction of a second.
        """
        await self._health.store.read()
        now = self._context.clock.now()
        key = frozenset(permissions.prefixes.items())
        made_at, text = self._texts.get(key, (float("-inf"), b""))
        if now - made_at >= _AGE:
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            text = self._render(permissions)
            self._texts[key] = now, text
        return text

    def _render(self, permissions: Permissions) -> bytes:
        reading = Reading(self._context, self._health, permissions, self._identities)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(reading, self._process))
        return generate_latest(registry)


class _Families:
    """Families of one scrape (`prometheus_client.registry.Collector`)."""

    def __init__(self, reading: Reading, process: CollectorRegistry) -> None:
        self._reading = reading
        self._process = process

    def collect(self) -> Iterator[Metric]:
        for each in METRICS:
            yield each.family(self._reading)
        yield from self._process.collect()
