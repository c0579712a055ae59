"""Who uses a device, by what drivers keep of their own prepares: through the files of real drivers.

The fake kubelet's checkpoint is no kubelet's, so nobody else tells of claims here.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import DRIVER as LINKED
from agents import HEALTHY, Agent, PlainSysfs, hear_health, short_tmp
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
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.returncode, json.loads(said.stdout) if said.stdout else None


def told(found: Any) -> set[tuple[str, str, str]]:
    """Devices of the only claim: name, who says so, and what."""
    (claim,) = found["claims"]
    return {(one["name"], one["source"], one["relation"]) for one in claim["devices"]}


def test_what_a_driver_has_prepared_stands_in_its_own_record(node: Node, hostdev: Program) -> None:
    pod = node.running("it", BOTH)
    node.kubelet.wait_for(lambda: explain(node, "claim", "default/both")[0] == 0, "the record is written")
    _, found = explain(node, "claim", "default/both")
    assert told(found) == {(PAGES, "driver", "prepared"), (CPU_1, "driver", "prepared")}
    assert {one["name"]: one["verdict"]["health"] for one in found["devices"]} == {
        PAGES: "Healthy",
        CPU_1: "Healthy",
    }
    assert found["claims"][0]["uid"] == BOTH.uid
    _, found = explain(node, f"{HOSTDEV}/{NODE}/{PAGES}")
    assert [one["name"] for one in found["claims"]] == ["both"]
    node.end(pod)
    node.kubelet.wait_for(lambda: explain(node, "claim", "default/both")[0] == 64, "the record is written")
    _, found = explain(node, f"{HOSTDEV}/{NODE}/{PAGES}")
    assert found["claims"] == []


def test_a_claim_is_held_once_its_prepare_has_succeeded_and_not_before(node: Node, sick: Program) -> None:
    name = f"{SICK}/{NODE}/thing-0"
    node.fate(it=["odd", "no light"])
    pod = node.run("it", Ask("it", {"thing": "thing-0"}), driver=SICK)
    node.kubelet.wait_for(lambda: node.failures(pod), "it failed")
    assert explain(node, "claim", "default/it")[0] == 64
    assert explain(node, name)[1]["claims"] == []
    node.fate()
    node.kubelet.wait_running(pod)
    node.remembers_prepared("it")
    _, found = explain(node, name)
    assert told(found) == {("thing-0", "driver", "prepared")}


# --- a driver beside the agent -----------------------------------------------------------------------------


def test_what_a_linked_driver_reports_is_told_by_the_agents_record(
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
            hear_health(watcher, "cpu-node0", HEALTHY)
        driver.call("ReportPrepare", step=1, outcomes=[outcome])
        eventually(lambda: kubelet.explain("claim", "ns/cpus")[0] == 0, "the record is written")
        _, found = kubelet.document("claim", "ns/cpus")
        assert told(found) == {("cpu-node0", "driver", "prepared")}
        assert found["devices"][0]["driver"] == LINKED
        assert found["devices"][0]["verdict"]["source"] == "agent"
        driver.call("ReportPrepare", step=2, outcomes=[outcome])
        eventually(lambda: kubelet.explain("claim", "ns/cpus")[0] == 64, "the record is written")
