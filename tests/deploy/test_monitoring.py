"""Dashboard, rules and docs name metrics and labels that a gateway exports, and every alert has its section."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import scripted
import yaml
from chats import data_url, random_image
from prometheus_client.parser import text_string_to_metric_families

from saccade.gateway.config import GatewayConfig
from saccade.gateway.tenants.key_table import digest_of

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "saccade.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PAGES = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
ADDED = {"instance", "job", "gateway_process", "le"}
"""Labels that Prometheus, the page of several processes, or a histogram adds."""

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def exported(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each series that a gateway with a tenant and two workers exports after a chat with an image."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[tenants.acme]\n[[keys]]\ntenant = "acme"\nsha256 = "{digest_of(b"key").hex()}"\n')
    config = GatewayConfig(api_keys_file=keys, api_keys=("operator",))
    with scripted.running(tiny_qwen3_vl, config) as gateway:
        gateway.answer_two_tokens()
        content = [{"type": "image_url", "image_url": {"url": data_url(random_image(64, 64, 1))}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        assert gateway.ask("POST", "/v1/chat/completions", body, Authorization="Bearer key").status == 200
        page = gateway.ask("GET", "/metrics", Authorization="Bearer operator").body.decode()
    labels: dict[str, set[str]] = {"up": set(), "saccade_worker_source_current": {"source"}}
    for family in text_string_to_metric_families(page):
        for suffix in SUFFIXES.get(family.type, ("",)):
            labels[family.name + suffix] = {"le"} if suffix == "_bucket" else set()
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for name, documented in re.findall(r"`([\w:]+)\{([\w, ]+)\}`", PAGES):
        for series in [name, *(name + suffix for suffix in SUFFIXES["histogram"])]:
            if series in labels:
                labels[series] |= set(documented.split(", "))
    return labels


def selectors(expression: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each series in a parsed query, and the labels that its matchers and aggregations name."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression.name, {one.name for one in expression.matchers.matchers}
        case promql_parser.AggregateExpr():
            grouped = set(expression.modifier.labels) if expression.modifier else set()
            yield from ((name, labels | grouped) for name, labels in selectors(expression.expr))
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql_parser.MatrixSelector():
            yield from selectors(expression.vector_selector)
        case promql_parser.ParenExpr() | promql_parser.SubqueryExpr() | promql_parser.UnaryExpr():
            yield from selectors(expression.expr)


def check(query: str, exported: dict[str, set[str]]) -> None:
    """Fail unless *query* is PromQL and names series and labels that exist."""
    found = list(selectors(promql_parser.parse(query)))
    assert found, query
    for name, labels in found:
        assert name in exported, f"{name} is not exported: {query}"
        assert labels <= exported[name] | ADDED, f"{labels - exported[name]} are no labels of {name}: {query}"


def test_dashboard_queries_what_is_exported(exported: dict[str, set[str]]) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "5m")
            check(query, exported)
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= {label for _, labels in selectors(promql_parser.parse(query)) for label in labels} | ADDED


def test_dashboard_can_be_provisioned() -> None:
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel covers another
    assert {x for x, _ in cells} == set(range(24))


def test_rules_query_what_is_exported(exported: dict[str, set[str]]) -> None:
    recorded: dict[str, set[str]] = {}
    for rule in RULES:
        check(rule["expr"], exported | recorded)
        if "record" in rule:
            labels = {one for _, labels in selectors(promql_parser.parse(rule["expr"])) for one in labels}
            recorded[rule["record"]] = labels | ADDED
    used = "".join(rule["expr"] for rule in ALERTS.values())
    assert all(name in used or "alert" not in name for name in recorded)


def test_a_wrong_name_or_label_is_detected(exported: dict[str, set[str]]) -> None:
    for query in ("sum(saccade_worker_redy)", "sum by (tenant) (saccade_worker_ready)", 'up{worker="a"}'):
        with pytest.raises(AssertionError):
            check(query, exported)


def test_every_alert_says_what_to_do_and_has_a_section() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    headings = set(re.findall(r"^### (Saccade\w+)$", page, re.MULTILINE))
    assert headings == set(ALERTS)
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), name
        assert set(alert["annotations"]) == {"summary", "description", "action"}, name
        assert all(text.endswith(".") for text in alert["annotations"].values()), name
        labels = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
        given = {one for _, labels in selectors(promql_parser.parse(alert["expr"])) for one in labels} | {"instance"}
        assert labels <= given | {"model_name", "worker", "tenant", "source", "collector"}, name


def test_flags_and_panels_that_alerts_name_exist() -> None:
    texts = str([alert["annotations"] for alert in ALERTS.values()])
    for flag in re.findall(r"(--[a-z-]+[a-z])", texts):
        assert f"`{flag}" in PAGES, flag
    titles = {panel["title"] for panel in PANELS}
    for title in re.findall(r'"([A-Z][^"]+)"', " ".join(alert["annotations"]["action"] for alert in ALERTS.values())):
        assert title in titles
