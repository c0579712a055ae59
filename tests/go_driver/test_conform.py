"""Go driver under ``drahealth conform``, with and without an agent."""

import json
import signal
from collections.abc import Collection, Mapping
from typing import Any

from conform.running import ConformRun, conform, repeated_run
from kubelet import allocated_claim

from go_driver.node import CPU_0, CPU_1, GO, NODE, PAGES, GoNode, parameters

FREQUENT = '[stream]\nheartbeat = "500ms"\n'
"""Agent configuration with a short heartbeat and the default leases."""


def check(
    node: GoNode,
    *,
    failed: Collection[str] = (),
    warned: Collection[str] = (),
    not_run: Collection[str] = (),
) -> None:
    """Run conform on all registered sockets; assert that only these checks fail, warn or do not run."""
    registry = ("--plugin-dir", node.kubelet.root / "plugins_registry", "--kubelet-dir", node.kubelet.root)
    expected = dict.fromkeys(warned, "warn") | dict.fromkeys(failed, "fail")
    report = repeated_run(
        lambda: conform(*registry, "--refuse", "--for", "5s"),
        lambda report: report.not_passed == expected and not_run_codes(report) == set(not_run),
    )
    assert report.matches(expected), json.dumps(report.document, indent=1)
    assert not_run_codes(report) == set(not_run), json.dumps(report.document, indent=1)
    assert report.errors == ""


def not_run_codes(report: ConformRun) -> set[str]:
    """Return the codes of the checks that had no opportunity to run."""
    return {code for code, result in report.results.items() if result == "not run"}


def test_driver_with_agent_passes(node: GoNode) -> None:
    node.agent(config=FREQUENT)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    check(node)


def test_driver_without_agent_fails_only_since_nothing_is_known(node: GoNode) -> None:
    """Unknown devices are reported every ten seconds only, too rarely for some checks."""
    agent = node.agent(config=FREQUENT)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    agent.end(signal.SIGKILL)
    node.wait_agent_absent(PAGES, CPU_0, CPU_1)
    codes = ("heartbeat", "stopped_reader", "time.fresh", "two_kubelets", "lease.stable", "text.stable")
    check(node, failed=["health.known"], not_run=[f"health.{code}" for code in codes])


def test_two_instances_give_only_the_expected_warning(node: GoNode) -> None:
    """Kubelets up to 1.38 read the health of both instances, and kubeletplugin cannot mute one of them."""
    node.agent(config=FREQUENT)
    node.driver("--pod-uid", "pod-old")
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.driver("--pod-uid", "pod-new")
    node.kubelet.wait_registered(GO, count=2)
    check(node, warned=["registration.several"])


def test_driver_prepares_claims_as_a_kubelet_expects(node: GoNode) -> None:
    """The driver gets bad claims with invalid parameters: kubeletplugin reads claims before the driver does,
    and fails the whole call for claims that do not exist."""
    node.agent(config=FREQUENT)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    wrong = parameters("CpuParameters", cpus="9")
    given = [claim(node, "pages", PAGES), claim(node, "cpu", CPU_0)]
    bad = [claim(node, f"bad-{number}", CPU_1, wrong) for number in range(2)]
    for name, objects in {"given": given, "bad": bad}.items():
        (node.root / f"{name}.json").write_text(json.dumps(objects))
    files = ("--claims", node.root / "given.json", "--bad-claims", node.root / "bad.json")
    registry = ("--plugin-dir", node.kubelet.root / "plugins_registry", "--kubelet-dir", node.kubelet.root)
    flags = (*registry, "--for", "5s", "--prepare", "--cdi-dir", node.cdi)
    report = repeated_run(lambda: conform(*flags, *files), lambda report: not report.not_passed)
    assert report.matches({}), json.dumps(report.document, indent=1)
    assert report.results["unprepare.cdi"] == "pass"
    assert report.errors == ""
    expected = {"prepare.bad_claim": "warn"}
    report = repeated_run(lambda: conform(*flags, *files[:2]), lambda report: report.not_passed == expected)
    assert report.matches(expected), json.dumps(report.document, indent=1)
    assert "the whole call failed with" in report.observation("prepare.bad_claim")


def claim(node: GoNode, name: str, device: str, *config: Mapping[str, Any]) -> dict[str, Any]:
    """Add an allocated claim that no pod uses to the API server, and return it."""
    made = allocated_claim(name, f"uid-{name}", ("r", GO, NODE, device), pods=[], config=config)
    node.api.add_claim(made)
    return made
