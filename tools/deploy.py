"""Files for monitoring that follow from the list of the server's metrics.

``python -m tools.deploy`` writes them, and ``--check`` tells whether they are up to date:

* docs/reference/metrics.md, the table,
* deploy/prometheus/alerts.yml, the alert rules,
* deploy/grafana/tenure.json, the dashboard: a panel for each metric.

`tests/deploy` checks them with Prometheus' own tools.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tenure.server.http.metrics import METRICS, SECTIONS, MetricInfo
from tenure.server.meter import ENDS, LAGS, LOSSES, NODES, OTHERS, OUTCOMES, WAITS

ROOT = Path(__file__).parent.parent

# --- alerts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alert:
    """An alert rule.

    Attributes:
        lasting: the time for which the expression must hold.
        summary: one line, which may have Prometheus' templates.
        action: what to look at, and what to do.
    """

    name: str
    expression: str
    lasting: str
    severity: Literal["critical", "warning"]
    summary: str
    action: str


ALERTS = (
    Alert(
        "TenureDown",
        'up{job="tenure"} == 0',
        "1m",
        "critical",
        "{{ $labels.instance }} cannot be scraped",
        "Clients cannot reach the server either, or its token for metrics is not valid any more. "
        "See its log.",
    ),
    Alert(
        "TenureStoreDown",
        "tenure_store_up == 0",
        "30s",
        "critical",
        "the store of {{ $labels.instance }} does not answer",
        "Nothing is granted, and leases end with their recovery windows. GET /readyz has the "
        "reason, and so has 'tenure doctor'.",
    ),
    Alert(
        "TenureStoreSlow",
        "histogram_quantile(0.99, sum by (instance, le) "
        "(rate(tenure_store_latency_seconds_bucket[5m]))) > 0.5",
        "5m",
        "warning",
        "the store of {{ $labels.instance }} takes {{ $value | humanizeDuration }} to answer",
        "Every request and every renewal takes as long. See the load of the store.",
    ),
    Alert(
        "TenureLoopBusy",
        "tenure_loop_lag_max_seconds > 0.25",
        "2m",
        "warning",
        "the event loop of {{ $labels.instance }} is late by {{ $value | humanizeDuration }}",
        "All clients wait. The server has too little of a processor, or too many clients.",
    ),
    Alert(
        "TenureLeasesLost",
        "sum by (instance, node) (increase(tenure_leases_lost_total[10m])) > 0",
        "0s",
        "warning",
        "{{ $labels.node }} has lost leases through {{ $labels.instance }}",
        "A holder was cut off, stuck or evicted while it worked. tenure_losses_total has the "
        "causes.",
    ),
    Alert(
        "TenureNothingGranted",
        "sum by (instance, node) (tenure_waiters) > 0 and "
        "sum by (instance, node) (increase(tenure_grants_total[15m])) == 0",
        "5m",
        "warning",
        "requests wait on {{ $labels.node }}, and none was granted for 15 minutes",
        "'tenure describe' shows the holder. A job of hours may be in order: raise the bound.",
    ),
    Alert(
        "TenureLimitNear",
        "tenure_usage / tenure_limit > 0.85",
        "5m",
        "warning",
        "{{ $labels.resource }} of {{ $labels.instance }} are at "
        "{{ $value | humanizePercentage }} of their limit",
        "At the limit clients are refused. Raise it, or find the client that uses so much.",
    ),
    Alert(
        "TenureClientsRefused",
        'sum by (instance, reason) (increase(tenure_refusals_total{reason!="login"}[5m])) > 0',
        "1m",
        "warning",
        "{{ $labels.instance }} refuses clients: {{ $labels.reason }}",
        "The reason is the name of a limit. The server's log has the clients.",
    ),
    Alert(
        "TenureWrongTokens",
        'sum by (instance) (increase(tenure_refusals_total{reason="login"}[5m])) > 20',
        "0s",
        "warning",
        "{{ $labels.instance }} was sent {{ $value | humanize }} wrong tokens in 5 minutes",
        "A program has an old token, or somebody guesses. The audit log has the addresses.",
    ),
    Alert(
        "TenureAuditIncomplete",
        "increase(tenure_audit_records_dropped_total[10m]) > 0",
        "0s",
        "critical",
        "the audit log of {{ $labels.instance }} has lost records",
        "The file system of the audit log is full or slow.",
    ),
)


def alerts() -> str:
    """Return the alert rules."""
    lines = [
        "# Alert rules for Prometheus. python -m tools.deploy writes this file.",
        "groups:",
        "  - name: tenure",
        "    rules:",
    ]
    for each in ALERTS:
        lines += [
            f"      - alert: {each.name}",
            f"        expr: {_quoted(each.expression)}",
            f"        for: {each.lasting}",
            "        labels:",
            f"          severity: {each.severity}",
            "        annotations:",
            f"          summary: {_quoted(each.summary)}",
            f"          description: {_quoted(each.action)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text as a scalar of YAML, which JSON's are."""
    return json.dumps(text, ensure_ascii=False)


# --- dashboard -----------------------------------------------------------------------------

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_FILTER = '{instance=~"$instance"}'
_WIDTH, _HEIGHT = 8, 7  # of a panel, on a grid of 24 columns


def expressions(metric: MetricInfo) -> list[tuple[str, str]]:
    """Return the queries that show a metric, each with its legend."""
    by = ", ".join(metric.labels)
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{instance}}"
    grouped = f"sum by ({by or 'instance'})"
    if metric.type == "histogram":
        rate = f"sum by (le) (rate({metric.name}_bucket{_FILTER}[$__rate_interval]))"
        return [(f"histogram_quantile({q}, {rate})", f"p{100 * q:g}") for q in (0.5, 0.99)]
    if metric.type == "counter":
        return [(f"{grouped} (rate({metric.name}{_FILTER}[$__rate_interval]))", legend)]
    if metric.name == "tenure_info":
        return [(f"{metric.name}{_FILTER}", "{{instance}} {{version}} {{store}}")]
    return [(f"{grouped} ({metric.name}{_FILTER})", legend)]


def _unit(metric: MetricInfo) -> str:
    if "_bytes" in metric.name:
        return "Bps" if metric.type == "counter" else "bytes"
    if "_seconds" in metric.name:
        return "s"
    return "ops" if metric.type == "counter" else "short"


def _title(metric: MetricInfo) -> str:
    words = metric.name.removeprefix("tenure_").removesuffix("_total").removesuffix("_seconds")
    return words.replace("_", " ").capitalize()


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 1
    for section, metrics in SECTIONS.items():
        yield {
            "id": number,
            "type": "row",
            "title": section,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        number, top = number + 1, top + 1
        for place, metric in enumerate(metrics):
            row, column = divmod(place, 24 // _WIDTH)
            yield {
                "id": number,
                "type": "timeseries",
                "title": _title(metric),
                "description": metric.help,
                "datasource": _SOURCE,
                "gridPos": {
                    "x": column * _WIDTH,
                    "y": top + row * _HEIGHT,
                    "w": _WIDTH,
                    "h": _HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": _unit(metric), "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
                "targets": [
                    {
                        "refId": chr(ord("A") + index),
                        "datasource": _SOURCE,
                        "expr": expression,
                        "legendFormat": legend,
                    }
                    for index, (expression, legend) in enumerate(expressions(metric))
                ],
            }
            number += 1
        top += -(-len(metrics) // (24 // _WIDTH)) * _HEIGHT


def dashboard() -> str:
    """Return the dashboard."""
    found = {
        "title": "tenure",
        "uid": "tenure",
        "description": "Servers of tenure. python -m tools.deploy writes this file.",
        "tags": ["tenure"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": "label_values(tenure_info, instance)", "refId": "A"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels()),
    }
    return json.dumps(found, indent=2) + "\n"


# --- documentation -------------------------------------------------------------------------

_LABELS = {
    "node": f"path of a node, or `{OTHERS}`",
    "end": ", ".join(f"`{each}`" for each in ENDS),
    "outcome": ", ".join(f"`{each}`" for each in OUTCOMES),
    "cause": ", ".join(f"`{each}`" for each in LOSSES),
    "listener": "URL in `--listen`, without its parameters",
    "reason": "name of a limit, with underscores, or `login`",
    "resource": "name of a limit, with underscores",
    "identity": "name of a token, or of another identity",
    "version": "version of the server",
    "store": "scheme of the store's URL",
}


_HEAD = """\
# Metrics

Look up a metric of `tenure serve`: its name, type, labels and meaning. [Monitoring](../operate/monitoring.md) shows how
to scrape them, with alert rules and a dashboard.

`python -m tools.deploy` writes this page, from the list that the server exposes.

"""

_TAIL = f"""
The first {NODES} nodes that the server's clients open sessions on have series of their own (`--metrics-nodes`). All
others are added up as `{OTHERS}`, and so are nodes that the reader's token may not read. Names of semaphores, sessions
and clients are never labels, because any client could invent them.

## Histograms

| of | bounds in seconds |
|---|---|
| waits and holds | {", ".join(f"{each:g}" for each in WAITS)} |
| the loop's lag, the store's latency | {", ".join(f"{each:g}" for each in LAGS)} |

Requests that are recovered with their session, after a restart of the server for example, began at an unknown time:
they count as waiters and leases, and not in a histogram.

A wait that a task [has published](../how-to/waits.md#what-is-known-of-a-task) is a request of its own, on `:tenure:waits`. It counts as
a request and a lease of its node.

`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and the other `process_` metrics are
those of Prometheus' client library for Python.
"""


def document() -> str:
    """Return the page with all metrics."""
    lines = []
    for section, metrics in SECTIONS.items():
        lines += [f"## {section}", "", "| metric | type | labels | |", "|---|---|---|---|"]
        for each in metrics:
            labels = ", ".join(f"`{label}`" for label in each.labels)
            lines.append(f"| `{each.name}` | {each.type} | {labels} | {each.help} |")
        lines.append("")
    lines += ["## Labels", "", "| label | values |", "|---|---|"]
    known = dict.fromkeys(label for each in METRICS for label in each.labels)
    lines += [f"| `{label}` | {_LABELS[label]} |" for label in known]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


# --- all of them ---------------------------------------------------------------------------


def written() -> dict[Path, str]:
    """Return each file with its text."""
    return {
        ROOT / "docs" / "reference" / "metrics.md": document(),
        ROOT / "deploy" / "prometheus" / "alerts.yml": alerts(),
        ROOT / "deploy" / "grafana" / "tenure.json": dashboard(),
    }


def metrics_in(expression: str) -> set[str]:
    """Return the names of tenure's metrics in a query."""
    names = re.findall(r"\btenure_[a-z_]+", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", each) for each in names}


def main() -> int:
    """Write the files; with ``--check``, only tell whether they are up to date."""
    texts = written()
    old = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in old:
            sys.stderr.write(f"{path.name} is out of date; run: python -m tools.deploy\n")
        return 1 if old else 0
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
