"""Users of a device, from the prepare records in the files of real drivers and a real kubelet's checkpoint.

The fake kubelet writes no such checkpoint, so its claims have no other source here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import DRIVER as LINKED
from agents import HEALTHY, Agent, PlainSysfs, short_tmp, wait_for_health
from explain_node import Node as Kubelet
from wire.link import Driver, message
from wire.serving import eventually

from driver_scenarios.node import CPU_1, HOSTDEV, NODE, PAGES, SICK, Ask, Node, parameters
from driver_scenarios.program import Program

__all__ = ["short_tmp"]

BOTH = Ask("both", {"pages": PAGES, "cpu": CPU_1}, [parameters("HugepagesParameters", "pages", pages=4)])


def explain(node: Node, *argv: str) -> tuple[int, Any]:
    """Exit code and document; None if nothing of that name is known."""
    none = str(node.root / "none")
    flags = ("--runtime-dir", none, "--state-dir", none, "--cgroupfs-root", none, "-o", "json")
    command = [
        sys.executable,
        "-m",
        "agent",
        "explain",
        *argv,
        "--kubelet-dir",
        str(node.kubelet.root),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None


def uses_of(found: Any) -> set[tuple[str, str, str]]:
    """Return name, source and relation of each device of the only claim."""
    (claim,) = found["claims"]
    return {(device["name"], device["source"], device["relation"]) for device in claim["devices"]}


def expected_sources(node: Node, *devices: str) -> set[tuple[str, str, str]]:
    """Return the sources of a claim's prepared devices: the driver's record, a real kubelet's checkpoint."""
    sources = ("driver", "checkpoint") if node.is_real else ("driver",)
    return {(device, source, "prepared") for device in devices for source in sources}


def test_prepared_claims_are_in_the_drivers_record(node: Node, hostdev: Program) -> None:
    pod = node.run_and_wait("it", BOTH)
    node.kubelet.wait_for(lambda: explain(node, "claim", "default/both")[0] == 0, "the record is written")
    _, found = explain(node, "claim", "default/both")
    assert uses_of(found) == expected_sources(node, PAGES, CPU_1)
    assert {device["name"]: device["verdict"]["health"] for device in found["devices"]} == {
        PAGES: "Healthy",
        CPU_1: "Healthy",
    }
    assert found["claims"][0]["uid"] == BOTH.uid
    _, found = explain(node, f"{HOSTDEV}/{NODE}/{PAGES}")
    assert [claim["name"] for claim in found["claims"]] == ["both"]
    node.end(pod)
    node.kubelet.wait_for(lambda: explain(node, "claim", "default/both")[0] == 64, "the record is written")
    _, found = explain(node, f"{HOSTDEV}/{NODE}/{PAGES}")
    assert found["claims"] == []


def test_claim_is_in_use_only_after_a_successful_prepare(node: Node, failing_driver: Program) -> None:
    name = f"{SICK}/{NODE}/thing-0"
    node.fate(it=["odd", "no light"])
    pod = node.run("it", Ask("it", {"thing": "thing-0"}), driver=SICK)
    node.kubelet.wait_for(lambda: node.failures(pod), "it failed")
    assert explain(node, "claim", "default/it")[0] == 0  # known from its failed prepare only
    assert explain(node, name)[1]["claims"] == []
    node.fate()
    node.kubelet.wait_running(pod)
    node.wait_prepared("it")
    _, found = explain(node, name)
    assert uses_of(found) == expected_sources(node, "thing-0")


# --- a driver linked to the agent--------------------------------------------------------------------------


def test_reports_of_a_linked_driver_are_in_the_agents_record(
    short_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet = Kubelet(short_tmp, capsys)
    sysfs = PlainSysfs(short_tmp / "sys")
    flags = ["--sysfs-root", str(sysfs.root), "--nvml-library", "/nonexistent", "--kmsg", "/nonexistent"]
    flags += ["--node-name", NODE, "--period", "50ms", "--state-dir", str(kubelet.state)]
    given = message("ClaimedDevice", request="cpus", pool=NODE, device="cpu-node0")
    cpus = message("PrepareClaim", namespace="ns", name="cpus", uid="c-cpus", devices=[given])
    outcome = message("PrepareOutcome", claim=cpus)
    with Agent(short_tmp, *flags) as agent, Driver(agent.health_socket) as driver:
        with agent.kubelet() as watcher:
            wait_for_health(watcher, "cpu-node0", HEALTHY)
        driver.call("ReportPrepare", step=1, outcomes=[outcome])
        eventually(lambda: kubelet.explain("claim", "ns/cpus")[0] == 0, "the record is written")
        _, found = kubelet.document("claim", "ns/cpus")
        assert uses_of(found) == {("cpu-node0", "driver", "prepared")}
        assert found["devices"][0]["driver"] == LINKED
        assert found["devices"][0]["verdict"]["source"] == "agent"
        driver.call("ReportPrepare", step=2, outcomes=[outcome])
        eventually(lambda: kubelet.explain("claim", "ns/cpus")[0] == 64, "the record is written")
