"""Alerts, recording rules and dashboards in deploy/prometheus, with promtool and a real Prometheus."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from agents import short_tmp
from http_agents import full_agent, serve_app
from prometheus import Prometheus, need
from test_docs_site import listed_pages
from wire.serving import device, unhealthy

from agent.cli.checks.catalog import checks_by_section
from agent.http.app import create_app
from agent.http.metric_families import FAMILIES
from agent.model.settings import GpuLimits
from agent.system.timing import read_clocks

__all__ = ["short_tmp"]

PROJECT: Final = Path(__file__).parent.parent
PROMETHEUS: Final = PROJECT / "deploy" / "prometheus"
BASE: Final = "https://drahealth.example/docs/"
DASHBOARDS: Final = ("node", "fleet")


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page of the documentation site, which makes them from its source's headings."""
    source = (PROJECT / "docs" / page).with_suffix(".md")
    assert (page, source in listed_pages()) == (f"{source.stem}.html", True)
    headings = re.findall(r"^#+ (.*)$", source.read_text(), re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((PROMETHEUS / f"grafana-{name}.json").read_text())["panels"]
    return found


def dashboard_queries(name: str) -> list[str]:
    return [target["expr"] for panel in panels(name) for target in panel["targets"]]


def promtool_test(directory: Path, rows: dict[str, str], cases: list[dict[str, Any]]) -> None:
    """Let promtool evaluate queries on series with a value per minute."""
    series = [{"series": key, "values": value} for key, value in rows.items()]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": cases}
    (directory / "test.yml").write_text(json.dumps({"tests": [test]}))
    command = [need("promtool"), "test", "rules", directory / "test.yml"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_prometheus_rules_are_valid_and_pass_their_promtool_tests() -> None:
    for arguments in (("check", "rules", "alerts.yml", "fleet.yml"), ("test", "rules", "alerts.test.yml")):
        ended = subprocess.run(
            [need("promtool"), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_alert_and_record_has_a_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    raised = {
        case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]
    }
    assert raised == {rule["alert"] for rule in rules("alerts.yml")}
    queried = {case["expr"] for test in tests for case in test.get("promql_expr_test", ())}
    assert queried == {rule["record"] for rule in rules("fleet.yml")}


@pytest.mark.parametrize("rule", rules("alerts.yml"), ids=lambda rule: rule["alert"])
def test_runbook_of_an_alert_leads_to_a_heading_of_the_site(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].removeprefix(BASE).partition("#")
    known = anchors(page)
    if "{{" not in anchor:
        assert not anchor or anchor in known
        return
    replaced = re.findall(r'reReplaceAll "([^"]*)" "([^"]*)"', anchor)
    assert len(replaced) == 5
    codes = [check.code for section in checks_by_section(GpuLimits()) for check in section.checks]
    for code in (*codes, "custom.fabric", "custom.fabric.unknown", "check.links.expired"):
        text = code
        for pattern, replacement in replaced:
            text = re.sub(pattern.replace("\\\\", "\\"), replacement, text)
        assert text in known, code


@pytest.mark.parametrize("name", DASHBOARDS)
def test_queries_of_dashboards_name_existing_series_only(name: str) -> None:
    known = {family.series_name for family in FAMILIES} | {rule["record"] for rule in rules("fleet.yml")}
    for query in dashboard_queries(name):
        outside = re.sub(r'"[^"]*"|drahealth_device_health=', "", query)
        assert set(re.findall(r"drahealth[\w:]*", outside)) <= known | {"drahealth"}, query


@pytest.mark.parametrize("name", ["drahealth_gpu_xids_total", "drahealth_prepares_total"])
def test_dashboard_shows_the_first_event_of_a_series_that_begins_with_it(short_tmp: Path, name: str) -> None:
    (query,) = (query for query in dashboard_queries("node") if name in query)
    query = f"sum({query.replace('$instance', 'a:1').replace('$__rate_interval', '5m')})"
    labels = 'instance="a:1",job="drahealth"'
    rows = {f"{name}{{{labels}}}": "_x20 1+0x20", f"drahealth_build_info{{{labels}}}": "1+0x40"}
    events = {"19m": [], "20m": [1], "30m": [0]}
    cases = [
        {
            "expr": query,
            "eval_time": time,
            "exp_samples": [{"labels": "{}", "value": item} for item in values],
        }
        for time, values in events.items()
    ]
    promtool_test(short_tmp, rows, cases)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_with_one_value_query_the_present_only(name: str) -> None:
    targets = [target for panel in panels(name) if panel["type"] == "stat" for target in panel["targets"]]
    assert targets
    assert all((target.get("instant"), target.get("range")) == (True, False) for target in targets)


def test_dashboard_of_a_node_finds_an_instance_with_an_ipv6_address(short_tmp: Path) -> None:
    (query,) = (query for query in dashboard_queries("node") if query.startswith("sum by (state)"))
    node = "[2001:db8::7]:14680"
    rows = {f'drahealth_devices{{instance="{node}",state="healthy"}}': "8+0x10"}
    wanted = [{"labels": '{state="healthy"}', "value": 8}]
    case = {"expr": query.replace("$instance", node), "eval_time": "5m", "exp_samples": wanted}
    promtool_test(short_tmp, rows, [case])
    assert not [query for query in dashboard_queries("node") if '=~"$instance"' in query]


def test_timeline_of_devices_names_states_and_separates_pools(short_tmp: Path) -> None:
    (panel,) = (panel for panel in panels("node") if panel["type"] == "state-timeline")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    (target,) = panel["targets"]
    health = "drahealth_device_health"
    rows, wanted = {}, []
    for number, state in enumerate(("healthy", "degraded", "unknown", "unhealthy")):
        assert mapping["options"][str(number)]["text"] == state.title()
        for state_name in ("healthy", "degraded", "unknown", "unhealthy"):
            labels = f'driver="d",pool="{state}",device="gpu-0",instance="a:1",{health}="{state_name}"'
            rows[f"{health}{{{labels}}}"] = f"{int(state_name == state)}+0x10"
        labels = f'{{driver="d",pool="{state}",device="gpu-0"}}'
        wanted.append({"labels": labels, "value": number})
    case = {"expr": target["expr"].replace("$instance", "a:1"), "eval_time": "5m", "exp_samples": wanted}
    promtool_test(short_tmp, rows, [case])
    assert "{{pool}}" in target["legendFormat"]


def test_agents_that_service_discovery_has_lost_count_as_not_scraped(short_tmp: Path) -> None:
    (query,) = (query for query in dashboard_queries("fleet") if "up{" in query)
    up = {"a:1": "1+0x90", "b:1": "1+0x5 0+0x85", "c:1": "1+0x5 stale"}
    rows = {f'up{{instance="{node}",job="drahealth"}}': values for node, values in up.items()}
    for node, values in up.items():
        build = values.replace("0+0x85", "stale")
        rows[f'drahealth_build_info{{instance="{node}",job="drahealth",version="0.2.0"}}'] = build
    counts = {"5m": 0, "20m": 2, "80m": 1}
    cases = [
        {"expr": query, "eval_time": time, "exp_samples": [{"labels": "{}", "value": count}]}
        for time, count in counts.items()
    ]
    promtool_test(short_tmp, rows, cases)


def test_every_query_of_the_dashboards_returns_series(short_tmp: Path) -> None:
    """The rules of a fleet run every second instead of every minute."""
    need("prometheus")
    fast = short_tmp / "fleet.yml"
    fast.write_text((PROMETHEUS / "fleet.yml").read_text().replace("interval: 1m", "interval: 1s"))
    fake = full_agent()
    shown = fake.view.report()
    assert shown is not None
    with serve_app(create_app(fake.view, clock=read_clocks)) as server:
        host, port = server.addresses[0]
        target = f"{host}:{port}"
        with Prometheus(short_tmp, [target], rule_files=[fast, PROMETHEUS / "alerts.yml"]) as prometheus:
            prometheus.wait_for("up == 1")
            for name in DASHBOARDS:
                for query in dashboard_queries(name):
                    if "losses" not in query:
                        query = query.replace("$instance", target).replace("$__rate_interval", "1m")
                        prometheus.wait_for(query)
            for devices in (device("flaps"), unhealthy("flaps"), device("flaps"), unhealthy("flaps")):
                fake.publish(replace(shown, devices=(*shown.devices, devices)))
                prometheus.wait_for(f"drahealth_reports_total == {fake.view.latest.peek()[0]}")
            prometheus.wait_for("sort_desc(drahealth:device_losses:increase1h)")
            found = prometheus.get("/api/v1/rules")["groups"]
            assert all(rule["health"] == "ok" for group in found for rule in group["rules"])
