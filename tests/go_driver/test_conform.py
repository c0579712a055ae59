"""The driver in Go passes ``drahealth conform``, with an agent and without one."""

import json
import signal
from collections.abc import Collection

from conform.running import conform

from go_driver.node import CPU_0, CPU_1, GO, PAGES, GoNode

OFTEN = '[stream]\nheartbeat = "500ms"\n'
"""Of an agent, so that all can be heard in seconds; leases as ever."""


def check(node: GoNode, *, warned: Collection[str] = (), not_run: Collection[str] = ()) -> None:
    """All that is registered passes, but for these checks."""
    registry = ("--plugin-dir", node.kubelet.root / "plugins_registry", "--kubelet-dir", node.kubelet.root)
    said = conform(*registry, "--refuse", "--for", "5s")
    assert said.says(dict.fromkeys(warned, "warn")), json.dumps(said.document, indent=1)
    left = {code for code, result in said.results.items() if result == "not run"}
    assert left == set(not_run), json.dumps(said.document, indent=1)
    assert said.errors == ""


def test_it_passes_beside_the_agent(node: GoNode) -> None:
    node.agent(config=OFTEN)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    check(node)


def test_it_passes_while_the_agent_is_away(node: GoNode) -> None:
    """Every device is Unknown, which no lease ends, and told so every ten seconds: two checks need more."""
    agent = node.agent(config=OFTEN)
    node.driver()
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    agent.end(signal.SIGKILL)
    node.wait_away(PAGES, CPU_0, CPU_1)
    check(node, not_run=["health.heartbeat", "health.stopped_reader"])


def test_of_two_instances_both_are_heard(node: GoNode) -> None:
    """Kubelets up to 1.37.1 hear both, into one memory, and kubeletplugin has no way to keep one silent."""
    node.agent(config=OFTEN)
    node.driver("--pod-uid", "pod-old")
    node.wait_healthy(PAGES, CPU_0, CPU_1)
    node.driver("--pod-uid", "pod-new")
    node.kubelet.wait_registered(GO, count=2)
    check(node, warned=["registration.several"])
