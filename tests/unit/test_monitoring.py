"""Dashboards and alert rules use only metrics that exist; each alert fires in a test of its own."""

import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
PAGE = runpy.run_path(str(ROOT / "docs" / "metrics_page.py"))
PROMTOOL = shutil.which(os.environ.get("PROMTOOL", "promtool"))
ALERTS = ROOT / "charts" / "penstock" / "alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
PANELS = [
    panel
    for path in sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    if panel["type"] != "row"
]
WORDS = {"rate", "delta", "sum", "min", "max", "group_left", "histogram_quantile", "time", "and", "or"}
"""Functions and operators of the queries."""


def used_metrics(expression):
    """Return the names of the metrics in a query: words that are neither functions nor labels."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|on|ignoring)\s*\([^)]*\)", " ", expression)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS


def known_metrics():
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    standard = {PAGE["exposed_name"](family) for family in registry.collect()}
    return PAGE["names"]() | standard | {"up"}


def promtool(*arguments):
    if PROMTOOL is None:
        pytest.skip("promtool is missing: apt-get install prometheus, or name it in $PROMTOOL")
    result = subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_uses_metrics_that_exist(rule):
    assert used_metrics(rule["expr"]) <= known_metrics()
    assert set(rule["annotations"]) == {"summary", "description"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_uses_metrics_that_exist(panel):
    for target in panel["targets"]:
        used = used_metrics(target["expr"])
        assert used
        assert used <= known_metrics()
    assert panel["fieldConfig"]["defaults"]["noValue"]


def test_panels_do_not_overlap():
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in PANELS
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not():
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    fires = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in tests[0]["alert_rule_test"] if not case.get("exp_alerts")}
    assert fires == quiet == {rule["alert"] for rule in RULES}


def test_compose_mounts_files_that_exist():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    mounts = [each for name in ("prometheus", "grafana") for each in services[name]["volumes"] if each.startswith(".")]
    assert len(mounts) == 4
    assert all((ROOT / mount.split(":")[0]).exists() for mount in mounts)
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["dns_sd_configs"][0]["names"][0] for job in jobs} == {"feed", "rollout", "score", "train", "engine"}


def test_promtool_accepts_rules_and_configuration(tmp_path):
    for file in (FOLDER / "prometheus.yml", ALERTS):  # side by side, as compose mounts them
        shutil.copy(file, tmp_path)
    promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_every_alert_fires_when_it_should():
    promtool("test", "rules", "alerts_test.yml")
