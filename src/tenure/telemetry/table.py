"""The metrics of a client: one list for OpenTelemetry, Prometheus and the documents.

A metric has the name and the unit of OpenTelemetry's conventions. Its name in Prometheus follows
from them: underscores instead of dots, the unit in seconds, and ``_total`` for a counter. Labels
are attributes of OpenTelemetry with the prefix ``tenure.``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """A metric of a client.

    Attributes:
        name: the name in OpenTelemetry.
        kind: its kind.
        unit: its unit, as OpenTelemetry writes it.
        description: what it measures, in a sentence without a full stop.
        labels: the names of its labels, without a prefix, but for that of a lock's name.
        named: whether it has the label `NAME` for a client whose names are labels.
    """

    name: str
    kind: MetricKind
    unit: str
    description: str
    labels: tuple[str, ...]
    named: bool = False

    @property
    def in_prometheus(self) -> str:
        """The name in Prometheus."""
        unit = {"s": "_seconds"}.get(self.unit, "")
        total = "_total" if self.kind == "counter" else ""
        return self.name.replace(".", "_") + unit + total

    # A metric is a part of keys that are looked up for each event.
    __hash__ = object.__hash__


NAME = "name"
"""Label of a lock's name."""

PREFIX = "tenure."
"""Prefix of the labels' names in OpenTelemetry."""

_SESSION = ("engine", "node")
_REQUEST = (*_SESSION, "kind")

ACQUISITIONS = Metric(
    "tenure.client.acquisitions",
    "counter",
    "{acquisition}",
    "Waits for a lease that have ended, by their outcome",
    (*_REQUEST, "outcome"),
    named=True,
)
WAIT = Metric(
    "tenure.client.wait.duration",
    "histogram",
    "s",
    "Time from a request to the grant of its lease",
    _REQUEST,
    named=True,
)
HOLD = Metric(
    "tenure.client.hold.duration",
    "histogram",
    "s",
    "Time from the grant of a lease to its release or its loss",
    _REQUEST,
    named=True,
)
WAITERS = Metric(
    "tenure.client.waiters",
    "gauge",
    "{request}",
    "Requests of this program that wait for a lease now",
    _REQUEST,
    named=True,
)
LEASES = Metric(
    "tenure.client.leases",
    "gauge",
    "{lease}",
    "Leases that this program holds now",
    _REQUEST,
    named=True,
)
LOSSES = Metric(
    "tenure.client.losses",
    "counter",
    "{loss}",
    "Leases that were lost, by the cause",
    (*_REQUEST, "cause"),
    named=True,
)
SESSIONS = Metric(
    "tenure.client.sessions",
    "gauge",
    "{session}",
    "Sessions of this program now, by their state: attached or detached",
    (*_SESSION, "state"),
)
EXPIRATIONS = Metric(
    "tenure.client.session.expirations",
    "counter",
    "{session}",
    "Sessions that ended without being closed by the program",
    _SESSION,
)
RECONNECTS = Metric(
    "tenure.client.reconnects",
    "counter",
    "{reconnect}",
    "Sessions that lost contact to the store and were attached again",
    _SESSION,
)
RENEWALS = Metric(
    "tenure.client.renewal.delay",
    "histogram",
    "s",
    "Time by which the renewal of a session was sent too late, or sent again without an answer",
    _SESSION,
)

METRICS = (
    ACQUISITIONS,
    WAIT,
    HOLD,
    WAITERS,
    LEASES,
    LOSSES,
    SESSIONS,
    EXPIRATIONS,
    RECONNECTS,
    RENEWALS,
)
"""All metrics, in the order of the documents."""

BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
"""Upper bounds of the histograms' buckets, in seconds."""
