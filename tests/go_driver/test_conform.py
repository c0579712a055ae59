"""Go driver under ``drahealth conform``, with and without an agent."""

import json
import signal
from collections.abc import Collection

from conform.running import conform

from go_driver.node import CPU_0, CPU_1, GO, PAGES, GoNode

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
    report = conform(*registry, "--refuse", "--for", "5s")
    expected = dict.fromkeys(warned, "warn") | dict.fromkeys(failed, "fail")
    assert report.matches(expected), json.dumps(report.document, indent=1)
    skipped = {code for code, result in report.results.items() if result == "not run"}
    assert skipped == set(not_run), json.dumps(report.document, indent=1)
    assert report.errors == ""


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
