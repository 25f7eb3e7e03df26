"""Telemetry of a program: spans and metrics of its leases, for OpenTelemetry and Prometheus.

`instrument` reports a client to OpenTelemetry, and `tenure.telemetry.prometheus.instrument` to a
registry of ``prometheus_client``. They need the extras ``otel`` and ``prometheus``. Without a call
of one of them, nothing is reported.

Example::

    from tenure import telemetry

    async with tenure.connect("sqlite:///jobs.db") as client:
        telemetry.instrument(client)
        async with client.mutex("nightly").lock():
            await work()

The parts, in the order to read them:

* `table` lists the metrics: the single source of their names, units and labels.
* `recorder` counts what happens to one client, from its events, and adds up the clients that report
  to one registry or provider.
* `otel` and `prometheus` pass the sums on, and `spans` makes spans.
* `handle` adds all of this to a client, and removes it.
"""

from __future__ import annotations

from tenure.telemetry.handle import Instrumentation
from tenure.telemetry.otel import instrument
from tenure.telemetry.recorder import Names

__all__ = ["Instrumentation", "Names", "instrument"]
