"""monitoring/: the dashboard and the alerts ask for what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sdcpd.metrics.families import FAMILIES
from tests.kit.promql import Selector, grouped_by, selectors, tokens

FOLDER = Path(__file__).parents[1] / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text("utf-8"))
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
TARGETS = [
    pytest.param(target, id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
OF_PROMETHEUS = {"job", "instance", "le"}
"""Labels that samples have in Prometheus and not here, or that are every histogram's."""


def family_name(name: str) -> str:
    """Of a sample's name."""
    return name if name in FAMILIES else re.sub("_(bucket|sum|count)$", "", name)


def check(selector: Selector) -> None:
    """That the metric is there, and has the labels."""
    family = FAMILIES[family_name(selector.name)]
    assert (family.kind == "histogram") == (family.name != selector.name)
    for label, _, _ in selector.matchers:
        assert label in {"role", *family.labels, *OF_PROMETHEUS}, (selector.name, label)


def expressions() -> list[str]:
    """All that both ask for."""
    targets = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return targets + [rule["expr"] for rule in RULES]


@pytest.mark.parametrize("target", TARGETS)
def test_a_panel_asks_for_what_there_is(target: dict[str, Any]) -> None:
    expression = target["expr"]
    asked = list(selectors(expression))
    assert asked
    for one in asked:
        check(one)
        assert ("job", "=~", "$job") in one.matchers
    labels = {label for one in asked for label in FAMILIES[family_name(one.name)].labels} | {
        "role",
        *OF_PROMETHEUS,
    }
    assert grouped_by(expression) <= labels
    shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert shown <= labels | {"exported_instance"}
    if "by (" in expression and "exported" not in target["legendFormat"]:
        assert shown <= grouped_by(expression)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    rows = [one["title"] for one in DASHBOARD["panels"] if one["type"] == "row"]
    assert rows == [
        "Clients",
        "Speculation",
        "Escalations and failovers",
        "Instances and cache",
        "Operation",
    ]
    ids = [one["id"] for one in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert {one["name"] for one in DASHBOARD["templating"]["list"]} == {"datasource", "job"}


@pytest.mark.parametrize("rule", [pytest.param(one, id=one["alert"]) for one in RULES])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(rule: dict[str, Any]) -> None:
    for one in selectors(rule["expr"]):
        if one.name != "up":  # Prometheus' own
            check(one)
    labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    grouped = grouped_by(rule["expr"])
    assert labels <= (grouped or {"role", "instance", "kind"})
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["description"]) > 100
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


def test_every_alert_that_is_wanted_is_there() -> None:
    waits = {rule["alert"]: rule.get("for") for rule in RULES}
    assert waits == {
        "SdcpdDown": "1m",
        "SdcpNotReady": "1m",
        "SdcpAcceptanceLow": "10m",
        "SdcpSelfDecoding": "10m",
        "SdcpStaleBases": "10m",
        "SdcpCommitFenced": None,
        "SdcpCertificateExpires": "5m",
        "SdcpQueue": "5m",
        "SdcpReloadFailed": "5m",
    }


def test_prometheus_takes_the_alerts() -> None:
    """With its own tool, where that is."""
    tool = shutil.which("promtool")
    if tool is not None:
        done = subprocess.run(
            [tool, "check", "rules", str(FOLDER / "alerts.yml")],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_reader_of_expressions_finds_what_is_asked() -> None:
    found = list(
        selectors(
            'sum by (a, b) (rate(x_total{k="v", l!~"w{"}[5m])) / on (a) group_left (c) y'
            " > 0.5 and 1 + x:y_sum offset 5m or vector(0)"
        )
    )
    assert found == [
        Selector("x_total", [("k", "=", "v"), ("l", "!~", "w{")]),
        Selector("y"),
        Selector("x:y_sum"),
    ]
    assert grouped_by("sum without (a,b) (x) / ignoring (c) y") == {"a", "b", "c"}
    with pytest.raises(ValueError, match="no PromQL at 2"):
        tokens("x # y")
