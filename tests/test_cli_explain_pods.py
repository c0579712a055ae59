"""``drahealth explain``: running pods from cgroups, and the agent's notes on pods and devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import short_tmp
from claim_samples import (
    device,
    known_claim,
    known_pod,
    listed_claim,
    listed_pod,
    listed_prepared,
    source_answers,
    use,
)
from cli_reports import HIT, STOLEN, cause, instant, report
from cli_reports import device as reported
from explain_node import Node, pod_object, prepared_claim

from agent.cli.explain.build import explain
from agent.cli.explain.document import document
from agent.cli.explain.model import NodeAnswers
from agent.cli.explain.text import render
from agent.cli.output.terminal import TextStyle
from agent.model.claim_sources import ContainerCgroup, ContainerObject, PodCgroup, SourceAnswers
from agent.model.health import DeviceHealth, NonDeviceCause, Severity

__all__ = ["short_tmp"]

ID, SANDBOX = "e" * 64, "f" * 64


@pytest.fixture
def node(short_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    """The kubelet has prepared one device for two pods."""
    node = Node(short_tmp, capsys)
    node.write_checkpoint(prepared_claim("gpus", "gpu-0", pods=["u-1", "u-2"]))
    node.health_state("Healthy", "gpu-0")
    return node


def line_of(out: str, part: str) -> str:
    """Return the only line that contains `part`."""
    (line,) = (line for line in out.splitlines() if part in line)
    return line


def source(found: Any) -> Any:
    """Return the result of the cgroups source."""
    return next(source for source in found["sources"] if source["source"] == "cgroups")


# --- running pods ------------------------------------------------------------------------------------------


def test_pod_without_a_cgroup_is_not_running(node: Node) -> None:
    node.runs("u-1", ID)
    _, out, _ = node.explain("claim", "team-a/gpus")
    assert "has running processes" in line_of(out, "pod u-1")
    assert "has no running process" in line_of(out, "pod u-2")
    _, found = node.document("claim", "team-a/gpus")
    assert {pod["uid"]: pod["running"] for pod in found["pods"]} == {"u-1": True, "u-2": False}
    assert found["pods"][0]["cgroups"] == [{"container": ID, "running": True}]
    assert source(found)["found"] == "1 pod"
    _, out, _ = node.explain("gpu-0")
    assert "pod u-2 (no process)" in out
    assert "pod u-1 (" not in out


def test_without_cgroups_running_is_unknown(node: Node) -> None:
    _, out, _ = node.explain("pod", "u-1")
    _, found = node.document("pod", "u-1")
    assert "process" not in line_of(out, "name not known")
    assert found["pods"][0]["running"] is None
    assert source(found)["absence"] == "absent"
    assert f"cgroups: running pods and containers not known ({node.cgroups}: no kubelet has" in out


def test_unlistable_cgroup_makes_running_unknown(node: Node) -> None:
    node.runs("u-1")
    loop = node.cgroups / "kubepods" / "besteffort"
    loop.symlink_to(loop)
    _, found = node.document("pod", "u-2")
    assert found["pods"][0]["running"] is None
    assert source(found)["wrong"] == [f"cgroup directory {loop}: Too many levels of symbolic links"]


def test_kubelet_cgroup_root_is_respected(node: Node) -> None:
    node.runs("u-1")
    (node.cgroups / "kubelet").mkdir()
    (node.cgroups / "kubepods").rename(node.cgroups / "kubelet" / "kubepods")
    assert node.document("pod", "u-1")[1]["pods"][0]["running"] is None
    _, found = node.document("pod", "u-1", "--kubelet-cgroup-root", "/kubelet")
    assert found["pods"][0]["running"] is True


def test_with_pods_file_cgroups_are_read_only_by_flag(node: Node) -> None:
    node.runs("u-1")
    pods = node.write_objects("p.json", pod_object("train", uid="u-1"))
    _, out, _ = node.run_bare("pod", "train", "--pods", pods)
    assert "process" not in out
    _, out, _ = node.run_bare("pod", "train", "--pods", pods, "--cgroupfs-root", str(node.cgroups))
    assert "has running processes" in line_of(out, "pod team-a/train")


# --- without a node ----------------------------------------------------------------------------------------


def explain_and_render(
    kind: str,
    name: str,
    consumers: SourceAnswers,
    *notes: NonDeviceCause,
    devices: tuple[DeviceHealth, ...] = (),
) -> tuple[str, Any]:
    """Return text and document for the answers, with notes and devices in the agent's report."""
    answers = NodeAnswers(instant(), report(*devices, notes=notes), consumers=consumers)
    explanation = explain(kind, name, answers)
    return render(explanation, TextStyle(width=200)), document(explanation)


def a_pod(ident: str = ID) -> SourceAnswers:
    """Return a pod with one device whose container runs by the pods API, and the pod's cgroups."""
    return source_answers(
        checkpoint=[listed_prepared("c", use("gpu-0"), pods=["u-1"])],
        pods_api=[
            known_pod("u-1", "claim-c", containers=(ContainerObject("main", (), ident, running=True),))
        ],
        live=[PodCgroup("u-1", True, (ContainerCgroup(ID, True), ContainerCgroup(SANDBOX, True)))],
    )


def test_running_container_without_a_cgroup_is_a_conflict() -> None:
    out, found = explain_and_render("pod", "u-1", a_pod("a" * 64))
    (conflict,) = found["conflicts"]
    assert conflict["kind"] == "containers"
    assert [(statement["source"], statement["text"]) for statement in conflict["sayings"]] == [
        ("cgroups", f"no cgroup of {'a' * 64}"),
        ("pods-api", f"container main runs as {'a' * 64}"),
    ]
    assert "conflict  pod team-a/pod-u-1: cgroups: no cgroup of aaaa" in out
    assert explain_and_render("pod", "u-1", a_pod())[1]["conflicts"] == []


def test_conflict_of_other_claims_is_not_shown() -> None:
    other = source_answers(claims_file=[known_claim("c-1", name="gpus"), known_claim("c-2", name="gpus")])
    both = replace(a_pod(), claims=other.claims)
    assert explain_and_render("pod", "u-1", both)[1]["conflicts"] == []
    assert len(explain_and_render("claim", "gpus", both)[1]["conflicts"]) == 1


def test_note_that_names_a_device_is_shown_at_the_device() -> None:
    subject = f"pod u-1 container {ID}"
    about, other = (
        NonDeviceCause(subject, STOLEN, (str(device()),)),
        NonDeviceCause(subject, HIT, (str(device("gpu-1")),)),
    )
    out, found = explain_and_render("device", "gpu-0", a_pod(), about, other)
    line = "note  team-a/pod-u-1 container main: cgroup.cpu.throttled_exclusive: throttled (12s ago)"
    assert line in out
    assert "max_hit" not in out
    (note,) = found["devices"][0]["notes"]
    assert (note["subject"], note["code"]) == (subject, "cgroup.cpu.throttled_exclusive")


def test_note_of_a_pod_names_its_container() -> None:
    notes = (
        NonDeviceCause(f"pod u-1 container {ID}", HIT),
        NonDeviceCause("pod u-1", STOLEN),
        NonDeviceCause("pod u-11", STOLEN),
    )
    out, found = explain_and_render("pod", "u-1", a_pod(), *notes)
    assert "  container main: cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit\n" in out
    assert "  cgroup.cpu.throttled_exclusive: throttled\n" in out
    assert len(found["pods"][0]["notes"]) == 2


def test_note_of_an_unknown_pod_names_its_uid() -> None:
    out, _ = explain_and_render(
        "device", "gpu-0", a_pod(), NonDeviceCause("pod u-7 container x", HIT, (str(device()),))
    )
    assert "note  pod u-7 container x: cgroup.hugetlb.max_hit" in out


def test_note_that_is_a_cause_of_its_device_is_shown_once() -> None:
    subject, finding = "pod u-1 container main", "memory limit: 1Gi, expected 2Gi"
    note = NonDeviceCause(subject, cause("cgroup.lower", Severity.DEGRADED, finding), (str(device()),))
    same = cause("cgroup.lower", Severity.DEGRADED, f"pod team-a/pod-u-1 container main: {finding}; pod x: 7")
    of_others = cause("cgroup.lower", Severity.DEGRADED, f"pod team-a/other container main: {finding}")
    for causes, times in (((same,), 1), ((of_others,), 2), ((), 1)):
        gpu = reported("gpu-0", *causes, pool="node-1", owner="gpu.example.com")
        out, found = explain_and_render("device", "gpu-0", a_pod(), note, devices=(gpu,))
        assert out.count(finding) == times
        assert len(found["devices"][0]["notes"]) == 1


def test_device_age_is_that_of_its_worst_cause() -> None:
    lost = cause("gpu.xid.79", Severity.UNHEALTHY, ago_s=50)
    lesser = cause("cgroup.lower", Severity.DEGRADED, ago_s=7)
    gpu = reported("gpu-0", lost, lesser, pool="node-1", owner="gpu.example.com", since_s=7)
    out, _ = explain_and_render("device", "gpu-0", a_pod(), devices=(gpu,))
    assert "  Unhealthy for 50s, " in out


def test_ended_pod_is_counted_separately() -> None:
    ended = known_pod("u-2", "claim-c", phase="Failed")
    answers = source_answers(
        checkpoint=[listed_prepared("c", use("gpu-0"), pods=["u-1", "u-2"])], pods_api=[ended]
    )
    out, _ = explain_and_render("device", "gpu-0", answers)
    assert "used by 1 pod, 1 has ended, through 1 claim\n" in out
    assert "team-a/pod-u-2 (Failed)" in out


def test_maybe_same_pods_give_a_range_of_users() -> None:
    """This happens with every kubelet that does not serve its pods API."""
    answers = source_answers(
        checkpoint=[listed_prepared("c", use("gpu-0"), pods=["u-1", "u-2"])],
        podresources=[listed_pod("train-0", listed_claim("claim-c", use("gpu-0")))],
    )
    out, _ = explain_and_render("device", "gpu-0", answers)
    assert "used by 2 to 3 pods, through 1 claim\n" in out
    assert "some may be the same" in out
    out, _ = explain_and_render("device", "gpu-0", a_pod())
    assert "used by 1 pod, through 1 claim\n" in out
