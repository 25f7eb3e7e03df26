"""A real Prometheus scrapes a program, and answers queries with the numbers of what it did."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from tenure import blocking
from tenure.telemetry import prometheus
from tenure.telemetry.table import METRICS
from tests.ports import free_port

MONITORING = Path(__file__).parents[2] / "docs" / "operate" / "monitoring.md"

SOON = 60.0
"""Seconds for what takes one or two."""

CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: program
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Server:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, promql: str) -> dict[str, float]:
        """The values of a query by the labels that it has kept."""
        with urlopen(f"{self.url}/api/v1/query?query={quote(promql)}", timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return {",".join(each["metric"].values()): float(each["value"][1]) for each in result}

    def answers(self, promql: str, expected: dict[str, float]) -> None:
        """Wait until a query has this answer, which it has after the next scrape."""
        until = time.monotonic() + SOON
        found: dict[str, float] | str = {}
        while time.monotonic() < until:
            try:
                found = self.query(promql)
            except URLError as error:  # it has not started
                found = str(error)
            if found == expected:
                return
            time.sleep(0.1)
        pytest.fail(f"{promql}: {found} instead of {expected}")


@contextmanager
def a_prometheus(folder: Path, program: int) -> Iterator[Server]:
    """A Prometheus that scrapes the program at that port."""
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("no prometheus here: apt-get install prometheus")
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(port=program))
    port = free_port()
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([command, *options], stdout=log, stderr=log)
        try:
            yield Server(port)
        finally:
            server.kill()
            server.wait()


def test_queries_give_the_numbers_of_a_program(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with (
            a_prometheus(tmp_path, server.server_port) as scraping,
            blocking.connect(f"sqlite:///{tmp_path}/jobs.db") as client,
        ):
            prometheus.instrument(client, registry=registry, names=True)
            for _ in range(7):
                with client.mutex("report").lock():
                    pass
            with client.mutex("export").lock():
                waiting = Thread(target=_wait_for, args=(client, "export"))
                waiting.start()
                scraping.answers(
                    "sum by (name) (tenure_client_waiters) > 0", expected={"export": 1.0}
                )
                scraping.answers("sum by (name) (tenure_client_leases) > 0", {"export": 1.0})
            waiting.join()
            scraping.answers(
                "sum by (name, outcome) (tenure_client_acquisitions_total)",
                {"report,acquired": 7.0, "export,acquired": 2.0},
            )
            scraping.answers("sum(tenure_client_wait_duration_seconds_count)", {"": 9.0})
            scraping.answers(
                'sum(tenure_client_wait_duration_seconds_bucket{le="+Inf"})', {"": 9.0}
            )
            scraping.answers('sum(tenure_client_sessions{state="attached"})', {"": 1.0})
            for query in _documented_queries():
                scraping.query(query)  # one that Prometheus does not understand raises
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _wait_for(client: blocking.Client, name: str) -> None:
    with client.mutex(name).lock():
        pass


def _documented_queries() -> list[str]:
    """The queries that the documents show."""
    table = re.findall(r"^\| [^|`]+ \| `(.*)` \|$", MONITORING.read_text("utf-8"), re.MULTILINE)
    assert len(table) >= 5
    return table


def test_the_documented_alerts_are_valid(tmp_path: Path) -> None:
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    (rules,) = re.findall(r"```yaml\n(groups:.*?)```", MONITORING.read_text("utf-8"), re.DOTALL)
    file = tmp_path / "rules.yml"
    file.write_text(rules)
    done = subprocess.run(
        [command, "check", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rules found" in done.stdout


def test_the_documented_queries_and_alerts_name_metrics_that_there_are() -> None:
    named = set(re.findall(r"\btenure_client_\w+", MONITORING.read_text("utf-8")))
    known = {
        metric.in_prometheus + suffix
        for metric in METRICS
        for suffix in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
    }
    assert named
    assert named <= known
