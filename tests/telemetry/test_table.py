"""The list of the metrics: by both conventions, and as the reference shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenure.telemetry.table import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "telemetry.md"

HEAD = (
    "| OpenTelemetry | Prometheus | kind | unit | labels | what it measures |\n"
    "|---|---|---|---|---|---|\n"
)


def rendered() -> str:
    """The table for the reference."""
    return HEAD + "".join(map(_row, METRICS))


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) + (" *" if metric.named else "")
    names = f"`{metric.name}` | `{metric.in_prometheus}`"
    return f"| {names} | {metric.kind} | {metric.unit} | {labels} | {metric.description} |\n"


def test_the_reference_has_the_table() -> None:
    assert rendered() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_follows_both_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"tenure\.client(\.[a-z]+)+", metric.name)
    assert metric.unit == "s" or re.fullmatch(r"\{[a-z]+\}", metric.unit)
    assert metric.in_prometheus.endswith("_total") == (metric.kind == "counter")
    assert ("_seconds" in metric.in_prometheus) == (metric.unit == "s")
    assert metric.description[0].isupper()
    assert not metric.description.endswith(".")


def test_each_name_stands_there_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
