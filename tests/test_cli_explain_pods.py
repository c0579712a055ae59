"""``drahealth explain``: what cgroups say of pods, and the notes about them, beside claims and devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agents import short_tmp
from claims_paper import device, heard, known_claim, known_pod, listed, listed_claim, prepared, use
from cli_reports import HIT, STOLEN, cause, instant, report
from cli_reports import device as judged
from explain_node import Node, pod_object, prepared_claim

from agent.cli.explain.document import document
from agent.cli.explain.facts import explain
from agent.cli.explain.text import render
from agent.cli.explain.words import Gathered
from agent.cli.output.terminal import Style
from agent.model.claim_sources import Container, LiveContainer, LivePod, SourceAnswers
from agent.model.health import DeviceHealth, Note, Severity

__all__ = ["short_tmp"]

ID, SANDBOX = "e" * 64, "f" * 64


@pytest.fixture
def node(short_tmp: Path, capsys: pytest.CaptureFixture[str]) -> Node:
    """The kubelet has prepared one device for two pods."""
    node = Node(short_tmp, capsys)
    node.prepared(prepared_claim("gpus", "gpu-0", pods=["u-1", "u-2"]))
    node.believes("Healthy", "gpu-0")
    return node


def line_of(out: str, word: str) -> str:
    """The only line that has the word."""
    (line,) = (line for line in out.splitlines() if word in line)
    return line


def source(found: Any) -> Any:
    """What became of the source."""
    return next(one for one in found["sources"] if one["source"] == "cgroups")


# --- who is there ------------------------------------------------------------------------------------------


def test_a_pod_without_a_cgroup_is_not_running(node: Node) -> None:
    node.runs("u-1", ID)
    _, out, _ = node.explain("claim", "team-a/gpus")
    assert "processes of it run" in line_of(out, "pod u-1")
    assert "no process of it runs" in line_of(out, "pod u-2")
    _, found = node.document("claim", "team-a/gpus")
    assert {one["uid"]: one["running"] for one in found["pods"]} == {"u-1": True, "u-2": False}
    assert found["pods"][0]["cgroups"] == [{"container": ID, "running": True}]
    assert source(found)["found"] == "1 pod"
    _, out, _ = node.explain("gpu-0")
    assert "pod u-2 (no process)" in out
    assert "pod u-1 (" not in out


def test_without_cgroups_nobody_is_said_to_run_or_not_to(node: Node) -> None:
    _, out, _ = node.explain("pod", "u-1")
    _, found = node.document("pod", "u-1")
    assert "process" not in line_of(out, "name not known")
    assert found["pods"][0]["running"] is None
    assert source(found)["absence"] == "absent"
    assert f"cgroups: not known which pods and containers run ({node.cgroups}: no kubelet has made" in out


def test_of_cgroups_that_cannot_all_be_listed_nobody_is_gone(node: Node) -> None:
    node.runs("u-1")
    loop = node.cgroups / "kubepods" / "besteffort"
    loop.symlink_to(loop)
    _, found = node.document("pod", "u-2")
    assert found["pods"][0]["running"] is None
    assert source(found)["wrong"] == [f"{loop}: Too many levels of symbolic links"]


def test_a_kubelet_below_a_prefix_is_found_there(node: Node) -> None:
    node.runs("u-1")
    (node.cgroups / "kubelet").mkdir()
    (node.cgroups / "kubepods").rename(node.cgroups / "kubelet" / "kubepods")
    assert node.document("pod", "u-1")[1]["pods"][0]["running"] is None
    _, found = node.document("pod", "u-1", "--kubelet-cgroup-root", "/kubelet")
    assert found["pods"][0]["running"] is True


def test_with_files_cgroups_are_read_if_they_are_named(node: Node) -> None:
    node.runs("u-1")
    pods = node.saved("p.json", pod_object("train", uid="u-1"))
    _, out, _ = node.bare("pod", "train", "--pods", pods)
    assert "process" not in out
    _, out, _ = node.bare("pod", "train", "--pods", pods, "--cgroupfs-root", str(node.cgroups))
    assert "processes of it run" in line_of(out, "pod team-a/train")


# --- on paper ----------------------------------------------------------------------------------------------


def shown(
    kind: str, word: str, heard: SourceAnswers, *notes: Note, devices: tuple[DeviceHealth, ...] = ()
) -> tuple[str, Any]:
    """Text and document of what was heard, and of what the agent notes and judges."""
    explained = explain(kind, word, Gathered(instant(), report(*devices, notes=notes), heard=heard))
    return render(explained, Style(width=200)), document(explained)


def a_pod(ident: str = ID) -> SourceAnswers:
    """A pod whose container runs, as the kubelet says, with one device; and the cgroups of that pod."""
    return heard(
        checkpoint=[prepared("c", use("gpu-0"), pods=["u-1"])],
        pods_api=[known_pod("u-1", "claim-c", containers=(Container("main", (), ident, running=True),))],
        live=[LivePod("u-1", True, (LiveContainer(ID, True), LiveContainer(SANDBOX, True)))],
    )


def test_a_container_that_runs_as_the_kubelet_says_and_has_no_cgroup_is_a_conflict() -> None:
    out, found = shown("pod", "u-1", a_pod("a" * 64))
    (conflict,) = found["conflicts"]
    assert conflict["kind"] == "containers"
    assert [(one["source"], one["text"]) for one in conflict["sayings"]] == [
        ("cgroups", f"no cgroup of {'a' * 64}"),
        ("pods-api", f"container main runs as {'a' * 64}"),
    ]
    assert "conflict  pod team-a/pod-u-1: cgroups: no cgroup of aaaa" in out
    assert shown("pod", "u-1", a_pod())[1]["conflicts"] == []


def test_a_conflict_about_others_is_not_shown() -> None:
    other = heard(claims_file=[known_claim("c-1", name="gpus"), known_claim("c-2", name="gpus")])
    both = replace(a_pod(), claims=other.claims)
    assert shown("pod", "u-1", both)[1]["conflicts"] == []
    assert len(shown("claim", "gpus", both)[1]["conflicts"]) == 1


def test_a_note_that_names_a_device_stands_with_the_device() -> None:
    subject = f"pod u-1 container {ID}"
    about, other = Note(subject, STOLEN, (str(device()),)), Note(subject, HIT, (str(device("gpu-1")),))
    out, found = shown("device", "gpu-0", a_pod(), about, other)
    line = "noted  team-a/pod-u-1 container main: cgroup.cpu.throttled_exclusive: throttled (12s ago)"
    assert line in out
    assert "max_hit" not in out
    (note,) = found["devices"][0]["notes"]
    assert (note["subject"], note["code"]) == (subject, "cgroup.cpu.throttled_exclusive")


def test_notes_of_a_pod_say_which_container_they_are_about() -> None:
    notes = Note(f"pod u-1 container {ID}", HIT), Note("pod u-1", STOLEN), Note("pod u-11", STOLEN)
    out, found = shown("pod", "u-1", a_pod(), *notes)
    assert "  container main: cgroup.hugetlb.max_hit: 2MB limit of 64 MiB hit\n" in out
    assert "  cgroup.cpu.throttled_exclusive: throttled\n" in out
    assert len(found["pods"][0]["notes"]) == 2


def test_a_note_about_a_pod_of_which_nobody_else_knows_names_its_uid() -> None:
    out, _ = shown("device", "gpu-0", a_pod(), Note("pod u-7 container x", HIT, (str(device()),)))
    assert "noted  pod u-7 container x: cgroup.hugetlb.max_hit" in out


def test_a_note_that_is_a_cause_of_its_device_is_told_once() -> None:
    subject, what = "pod u-1 container main", "memory limit: 1Gi, expected 2Gi"
    note = Note(subject, cause("cgroup.lower", Severity.DEGRADED, what), (str(device()),))
    told = cause("cgroup.lower", Severity.DEGRADED, f"pod team-a/pod-u-1 container main: {what}; pod x: 7")
    of_others = cause("cgroup.lower", Severity.DEGRADED, f"pod team-a/other container main: {what}")
    for causes, times in (((told,), 1), ((of_others,), 2), ((), 1)):
        gpu = judged("gpu-0", *causes, pool="node-1", owner="gpu.example.com")
        out, found = shown("device", "gpu-0", a_pod(), note, devices=(gpu,))
        assert out.count(what) == times
        assert len(found["devices"][0]["notes"]) == 1


def test_a_device_is_as_bad_as_it_is_since_that_began_whatever_else_came_later() -> None:
    lost = cause("gpu.xid.79", Severity.UNHEALTHY, ago_s=50)
    lesser = cause("cgroup.lower", Severity.DEGRADED, ago_s=7)
    gpu = judged("gpu-0", lost, lesser, pool="node-1", owner="gpu.example.com", since_s=7)
    out, _ = shown("device", "gpu-0", a_pod(), devices=(gpu,))
    assert "  Unhealthy for 50s, " in out


def test_a_pod_that_has_ended_uses_nothing_and_is_shown_with_its_end() -> None:
    over = known_pod("u-2", "claim-c", phase="Failed")
    told = heard(checkpoint=[prepared("c", use("gpu-0"), pods=["u-1", "u-2"])], pods_api=[over])
    out, _ = shown("device", "gpu-0", told)
    assert "used by 1 pod, 1 has ended, through 1 claim\n" in out
    assert "team-a/pod-u-2 (Failed)" in out


def test_one_pod_that_goes_by_its_name_here_and_its_uid_there_may_be_one_or_two() -> None:
    """As with every kubelet that does not serve its pods API."""
    told = heard(
        checkpoint=[prepared("c", use("gpu-0"), pods=["u-1", "u-2"])],
        podresources=[listed("train-0", listed_claim("claim-c", use("gpu-0")))],
    )
    out, _ = shown("device", "gpu-0", told)
    assert "used by 2 to 3 pods, through 1 claim\n" in out
    assert "some may be the same" in out
    out, _ = shown("device", "gpu-0", a_pod())
    assert "used by 1 pod, through 1 claim\n" in out
