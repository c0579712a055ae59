"""``drahealth audit`` on cgroups of plain files: what it shows, its exit codes, and where pods come from."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from agents import short_tmp
from audit_paper import (
    CONTAINER,
    ITS_CONTAINER,
    Object,
    kubectl,
    slices,
    sysfs_tree,
    v2_tree,
    walk,
    write_cgroup,
)
from enforce_pods import UID
from kubelet_files import DRIVER, checkpoint, claim, device, devices
from patience import PATIENCE_S
from wire.kubelet_apis import ListingApi, message_class

from agent.cli.audit.text import LISTED_MAX
from agent.cli.main import main
from agent.serve.kubelet.pods_api import LIST, SOCKET

__all__ = ["short_tmp"]
OTHER: Final = "11111111-2222-4333-8444-555555555555"


class Node(NamedTuple):
    """A node of files."""

    top: Path
    pods: Path

    @property
    def cgroups(self) -> Path:
        return self.top / "cgroup"

    def args(self, *more: str, pods: bool = True) -> list[str]:
        given = ["--pods", str(self.pods)] if pods else []
        roots = ["--cgroupfs-root", str(self.cgroups), "--sysfs-root", str(self.top / "sys")]
        roots += ["--kubelet-dir", str(self.top / "kubelet"), "--node-name", "n1"]
        roots += ["--runtime-dir", str(self.top / "run")]
        return ["audit", *roots, *given, "--color", "never", *more]

    def write(self, *pods: Object) -> None:
        kubectl(self.pods, *pods)


def node_of(top: Path, *pods: Object, burstable: int = 274) -> Node:
    sysfs_tree(top / "sys")
    v2_tree(top / "cgroup", pods, burstable)
    (top / "kubelet").mkdir()
    (top / "kubelet/cpu_manager_state").write_text('{"policyName":"none","defaultCpuSet":"","checksum":1}')
    return Node(top, kubectl(top / "pods.json", *pods))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return node_of(tmp_path, walk())


def run(capsys: pytest.CaptureFixture[str], node: Node, *more: str, pods: bool = True) -> tuple[int, str]:
    code = main(node.args(*more, pods=pods))
    told = capsys.readouterr()
    return code, told.out + told.err


def document(capsys: pytest.CaptureFixture[str], node: Node, *more: str) -> tuple[int, Any]:
    code = main(node.args("-o", "json", *more))
    return code, json.loads(capsys.readouterr().out)


# --- what it shows -----------------------------------------------------------------------------------------


def test_a_node_that_keeps_its_promises_takes_a_line_for_each_pod(capsys, node):
    code, told = run(capsys, node)
    assert code == 0
    head, *rest = told.splitlines()
    assert re.fullmatch(r"n1  cgroup v2, systemd  1 pod in a file, \d+s old", head)
    assert rest == [
        "",
        "● default/p  Burstable  as promised, 16 knobs",
        "● QoS classes  as promised",
        "",
        "1 pod: 1 as promised",
    ]


def test_of_many_that_are_as_promised_the_first_are_listed_and_the_others_counted(capsys, tmp_path):
    uids = [f"11111111-2222-4333-8444-{number:012d}" for number in range(LISTED_MAX + 7)]
    pods = [walk(f"p{number}", uid, f"{number:064x}") for number, uid in enumerate(uids)]
    node = node_of(tmp_path, *pods, burstable=6900)
    write_cgroup(node.cgroups, slices(uids[-1], f"{len(uids) - 1:064x}"), {"memory.max": "max"})
    code, told = run(capsys, node)
    assert code == 1
    assert told.splitlines()[2] == f"▲ default/p{len(uids) - 1}  Burstable  not as promised"
    assert told.count("as promised, 16 knobs") == LISTED_MAX
    assert "\n● 6 more  as promised\n" in told
    assert f"{len(uids)} pods: 1 not as promised, {len(uids) - 1} as promised" in told


def test_what_is_not_as_promised_has_its_arithmetic_and_what_comes_of_it(capsys, node):
    write_cgroup(node.cgroups, slices(UID, CONTAINER), {"cpu.max": "400000 100000"})
    code, told = run(capsys, node)
    assert code == 1
    assert told.splitlines()[2:7] == [
        "▲ default/p  Burstable  not as promised",
        "    CGROUP  KNOB       EXPECTED   ACTUAL     VERDICT",
        "    c1      cpu quota  900000 us  400000 us  lower",
        "      4000m (limit) + 5000m (claim p-cpus) = 9000m -> 900000 us of 100000;"
        " 400000 us is as if the kubelet did not count claims",
        "      → it is throttled before it has used what it was given",
    ]
    assert told.endswith("\n\n1 pod: 1 not as promised\n")


def test_one_pod_is_shown_in_full(capsys, node):
    code, told = run(capsys, node, "default/p")
    assert code == 0
    assert "    pod     memory limit                     9Gi         9Gi        match\n" in told
    assert "      4Gi (c1) + 5Gi (claim p-cpus) = 9Gi -> 9663676416 bytes\n" in told
    assert "QoS classes" not in told


@pytest.mark.parametrize("named", ["p", "default/p", UID])
def test_a_pod_is_known_by_its_name_and_its_uid(capsys, node, named):
    assert run(capsys, node, named)[0] == 0


def test_what_programs_get(capsys, node):
    write_cgroup(node.cgroups, slices(), {"memory.max": "max"})
    code, told = document(capsys, node)
    assert code == 1
    assert told["apiVersion"] == "drahealth/v1"
    assert told["cgroups"] == {
        "version": 2,
        "driver": "systemd",
        "pageBytes": 4096,
        "hugepageSizesKiB": [2048, 1048576],
        "countsClaims": True,
    }
    assert told["source"]["origin"] == "pods-file"
    assert told["unread"] == told["notKnown"] == []
    assert told["summary"] == {"match": 25, "unlimited": 1}
    (pod,) = told["pods"]
    assert (pod["name"], pod["claims"]) == ("p", ["p-cpus"])
    (wrong,) = [knob for knob in pod["knobs"] if knob["verdict"] != "match"]
    assert wrong == {
        "level": "pod",
        "qosClass": "Burstable",
        "container": "",
        "knob": "memory limit",
        "sizeKiB": None,
        "file": "memory.max",
        "expected": [9663676416],
        "arithmetic": "4Gi (c1) + 5Gi (claim p-cpus) = 9Gi -> 9663676416 bytes",
        "actual": "max",
        "verdict": "unlimited",
        "why": "unlimited, expected 9Gi: 4Gi (c1) + 5Gi (claim p-cpus) = 9Gi -> 9663676416 bytes",
        "risk": "it can use memory that was given to others",
    }


def test_what_a_pod_says_cannot_move_the_cursor(capsys, node):
    odd = walk()
    odd["spec"]["containers"][0]["resources"]["limits"] = {}
    odd["status"]["nodeAllocatableResourceClaimStatuses"][0]["resourceClaimName"] = "x\u009b"
    node.write(odd)
    assert "\u009b" not in run(capsys, node, "p")[1]


def test_the_table_is_ascii_where_the_output_is(node):
    write_cgroup(node.cgroups, slices(), {"memory.max": "max"})
    command = [sys.executable, "-m", "agent", *node.args()]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environ, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert b"! default/p  Burstable  not as promised\n" in done.stdout
    assert done.stdout.isascii()
    assert b"\\u" not in done.stdout


# --- what could not be judged ------------------------------------------------------------------------------


def test_a_container_that_has_just_started_is_quiet_and_told(capsys, node):
    node.write(walk(started=datetime.now(UTC).isoformat()))
    write_cgroup(node.cgroups, slices(UID, CONTAINER), {"memory.max": "max"})
    code, told = run(capsys, node)
    assert code == 3
    assert "unlimited  quiet" in told
    assert "it changed less than 30 s ago" in told


def test_a_container_that_is_gone_is_told_once(capsys, node):
    gone = walk(ident="dead" * 16)
    node.write(gone)
    code, told = run(capsys, node)
    assert code == 3
    assert told.count("vanished") == 1
    assert "    c1      all                     vanished\n      the cgroup is gone\n" in told


def test_a_finding_outweighs_what_could_not_be_judged(capsys, tmp_path):
    node = node_of(tmp_path, walk(), walk("q", OTHER, "beef" * 16), burstable=547)
    write_cgroup(node.cgroups, slices(OTHER, "beef" * 16), {"cpu.weight": "torn"})
    write_cgroup(node.cgroups, slices(UID, CONTAINER), {"memory.max": 1 << 20})
    assert run(capsys, node)[0] == 1


def test_a_knob_that_cannot_be_read_is_not_as_promised_and_says_why(capsys, node):
    write_cgroup(node.cgroups, slices(), {"cpu.weight": "torn"})
    code, told = run(capsys, node)
    assert code == 1
    assert "cpu.weight cannot be read: unintelligible text" in told


def test_a_pod_none_of_whose_containers_runs_is_nothing_to_judge(capsys, node):
    waiting = walk()
    waiting["status"]["containerStatuses"] = []
    node.write(waiting)
    assert run(capsys, node)[0] == 0
    code, told = run(capsys, node, "p")
    assert code == 3
    assert "· default/p  Burstable  not running\n" in told


def test_a_pod_that_cannot_be_read_is_told_and_the_others_are_judged(capsys, node):
    odd = walk("odd", OTHER)
    odd["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "much"
    node.write(walk(), odd)
    code, told = run(capsys, node)
    assert code == 3
    assert "unread     pod 'odd': spec.containers[0].resources.limits.cpu: 'much' is no quantity" in told
    assert "● default/p" in told
    assert "QoS classes: not judged" in told  # it may be in their sum


def test_an_id_that_is_no_name_of_a_cgroup_is_not_followed(capsys, node):
    node.write(walk(ident="../../../kubepods.slice"))
    code, told = run(capsys, node)
    assert code == 3
    assert "is no path of a cgroup" in told


def test_the_classes_are_judged_only_if_all_pods_are_known(capsys, tmp_path):
    node = node_of(tmp_path, walk(), walk("q", OTHER, "beef" * 16), burstable=547)
    assert "● QoS classes  as promised\n" in run(capsys, node)[1]
    node.write(walk())
    code, told = run(capsys, node)
    assert code == 0
    assert f"1 pods have cgroups and are not listed: {OTHER}" in told
    assert "QoS classes: not judged, their weight is the sum over all pods" in told


def test_a_class_with_another_sum_is_found(capsys, node):
    write_cgroup(node.cgroups, "kubepods.slice/kubepods-burstable.slice", {"cpu.weight": 79})
    code, told = run(capsys, node)
    assert code == 1
    assert "▲ QoS classes  not as promised\n" in told
    assert "    Burstable  cpu weight  274 or 477  79      lower\n" in told


def test_without_a_tree_of_the_kubelets_nothing_is_known(capsys, node):
    code, told = run(capsys, node, "--kubelet-cgroup-root", "/elsewhere")
    assert code == 3
    assert f"no kubelet has made cgroups in {node.cgroups} below /elsewhere" in told
    code = main(["audit", "--pods", str(node.pods), "--cgroupfs-root", str(node.top / "sys")])
    assert code == 3
    assert capsys.readouterr().err == f"drahealth: {node.top / 'sys'}: no cgroups are mounted here\n"


# --- what the flags say ------------------------------------------------------------------------------------


def test_a_kubelet_before_1_37_is_not_expected_to_count_claims(capsys, node):
    code, told = run(capsys, node, "--kubelet-version", "v1.36.2")
    assert code == 1
    assert "a kubelet that does not count claims" in told
    assert "claim.not_counted" in told


def test_all_pods_are_those_without_claims_too(capsys, tmp_path):
    plain = walk("plain", OTHER, "beef" * 16)
    del plain["spec"]["resourceClaims"], plain["status"]["nodeAllocatableResourceClaimStatuses"]
    node = node_of(tmp_path, walk(), plain, burstable=352)
    write_cgroup(node.cgroups, slices(OTHER), {"cpu.weight": 79, "cpu.max": "400000 100000"})
    assert "plain" not in run(capsys, node)[1]
    code, told = run(capsys, node, "--all")
    assert code == 1
    assert "▲ default/plain  Burstable  not as promised\n" in told  # its memory is 9Gi


def test_cpus_from_the_kubelet_lift_the_quota(capsys, tmp_path):
    exact = walk()
    exact["status"]["qosClass"] = "Guaranteed"
    node = node_of(tmp_path, exact)
    write_cgroup(node.cgroups, f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice", {})
    pod = node.cgroups / f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
    pod.rmdir()
    (node.cgroups / slices()).rename(pod)
    lifted = {"cpu.max": "max 100000", "cpuset.cpus": "2-3", "cpuset.cpus.effective": "2-3"}
    write_cgroup(pod, f"cri-containerd-{CONTAINER}.scope", lifted)
    write_cgroup(pod, "", {"cpu.max": "max 100000"})
    state = node.top / "kubelet/cpu_manager_state"
    assert run(capsys, node, "p")[0] == 1
    state.write_text(json.dumps({"policyName": "static", "entries": {UID: {"c1": "2-3"}}, "checksum": 1}))
    assert run(capsys, node, "p")[0] == 0
    state.unlink()  # nobody knows, so nobody is accused
    code, told = run(capsys, node, "p")
    assert code == 3
    assert "or the kubelet gave it CPUs of its own, which could not be looked up" in told
    assert f"CPUs that the kubelet gave to single containers: {state}: No such file" in told


# --- CPUs that a driver gave -------------------------------------------------------------------------------


@pytest.fixture
def driven(tmp_path: Path) -> Node:
    """A node whose pod has CPUs 2-3 for itself from a driver, as promised."""
    mine = walk()
    mine["spec"]["containers"][0]["resources"]["claims"] = [{"name": "x"}]
    node = node_of(tmp_path, mine)
    declared = node.top / "run/devices.d"
    declared.mkdir(parents=True)
    (declared / f"{DRIVER}.toml").write_text(
        'version = 1\n[[device]]\nname = "own-0"\nkind = "cpu"\ncpus = "2-3"\nexclusive = true\n'
    )
    given = claim(
        "c", name="p-cpus", namespace="default", pods=[UID], drivers=devices(device("own-0", pool="n1"))
    )
    (node.top / "kubelet/dra_manager_state").write_bytes(checkpoint([given]))
    write_cgroup(node.cgroups, slices(UID, CONTAINER), {"cpuset.cpus": "2-3", "cpuset.cpus.effective": "2-3"})
    return node


def test_cpus_from_a_driver_are_expected_of_the_container(capsys, driven):
    code, told = run(capsys, driven, "p")
    assert code == 0
    assert re.search(r"^    c1 +cpus +CPUs 2-3 +CPUs 2-3 +match$", told, re.MULTILINE)
    assert "      CPUs 2-3 from a driver\n" in told
    assert "not known" not in told


def test_a_container_that_nobody_keeps_to_its_cpus_is_found(capsys, driven):
    write_cgroup(driven.cgroups, slices(UID, CONTAINER), {"cpuset.cpus": "", "cpuset.cpus.effective": "0-7"})
    code, told = run(capsys, driven)
    assert code == 1
    assert "    c1      cpus            CPUs 2-3  CPUs none  unlimited\n" in told
    assert "    c1      effective cpus  CPUs 2-3  CPUs 0-7   higher\n" in told
    assert "→ it may run on CPUs that were given to others" in told


def test_cpus_from_a_driver_under_a_quota_are_a_risk_and_no_finding(capsys, driven):
    stat = "usage_usec 1\nnr_periods 9\nnr_throttled 7"
    write_cgroup(driven.cgroups, slices(UID, CONTAINER), {"cpu.stat": stat})
    code, told = run(capsys, driven)
    assert code == 0
    assert "● default/p" in told
    assert "    cpus.exclusive_throttled  c1: CPUs 2-3 are its own, and it was throttled at " in told


def test_without_the_kubelets_note_nobody_knows_who_has_them(capsys, driven):
    (driven.top / "kubelet/dra_manager_state").unlink()
    code, told = run(capsys, driven)
    assert code == 0
    assert "CPUs that drivers gave: " in told
    assert "dra_manager_state: No such file or directory" in " ".join(told.split())


def test_a_declaration_that_is_wrong_is_told(capsys, driven):
    (driven.top / f"run/devices.d/{DRIVER}.toml").write_text("version = 7\n")
    told = " ".join(run(capsys, driven)[1].split())
    assert f"CPUs that drivers gave: {driven.top}/run/devices.d/{DRIVER}.toml: version 7" in told


# --- what is refused, and whose pods it is about -----------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nobody",), "no pod 'nobody' among 1 of this node"),
        (("default/o",), "did you mean 'default/p'?"),
        (("--kubelet-version", "new"), "--kubelet-version: 'new' is no version of a kubelet"),
        (("--pods", "/nonexistent"), "/nonexistent: No such file or directory"),
    ],
)
def test_what_means_nothing_is_refused(capsys, node, args, words):
    code, told = run(capsys, node, *args)
    assert code == 64
    assert words in told


def test_pods_of_other_nodes_are_passed_over(capsys, node):
    node.write(walk(), walk("far", OTHER, "beef" * 16, node="n2"))
    code, told = run(capsys, node, "--all")
    assert code == 0
    assert "far" not in told


def test_pods_of_several_nodes_and_none_of_this_are_refused(capsys, node):
    node.write(walk(node="n3"), walk("far", OTHER, node="n2"))
    code, told = run(capsys, node)
    assert code == 64
    assert "pods of 2 nodes, and none of 'n1'" in told


def test_where_all_pods_are_of_one_node_that_is_meant(capsys, node):
    node.write(walk(node="worker-7.example.com"))
    code, told = run(capsys, node)
    assert code == 0
    assert told.startswith("worker-7.example.com  cgroup v2")


# --- from the kubelet --------------------------------------------------------------------------------------


@pytest.fixture
def served(short_tmp: Path) -> Iterator[Node]:
    """A node whose kubelet tells of its pod, which has no claim but asks for CPU."""
    node = node_of(short_tmp, walk())
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = "p", "default", UID
    found.status.phase, found.status.qosClass = "Running", "Burstable"
    container = found.spec.containers.add(name="c1", image="")
    for resource, limits in (("cpu", ("2", "4")), ("memory", ("2Gi", "9Gi"))):
        container.resources.requests[resource].string = limits[0]
        container.resources.limits[resource].string = limits[1]
    state = found.status.containerStatuses.add(name="c1", containerID=f"containerd://{CONTAINER}")
    state.state.running.startedAt.seconds = 1_700_000_000
    answer = message_class("v1alpha1", "ListPodsResponse")(pods=[found.SerializeToString()])
    socket = short_tmp / "kubelet" / SOCKET
    socket.parent.mkdir()
    with ListingApi(socket, LIST, lambda: answer):
        yield node


def test_the_kubelet_is_asked_where_no_file_is_given(served):
    write_cgroup(served.cgroups, slices(), {"cpu.weight": 79, "cpu.max": "400000 100000"})
    write_cgroup(served.cgroups, slices(UID, CONTAINER), {**ITS_CONTAINER, "cpu.max": "400000 100000"})
    write_cgroup(served.cgroups, "kubepods.slice/kubepods-burstable.slice", {"cpu.weight": 79})
    command = [sys.executable, "-m", "agent", *served.args("--all", pods=False)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "n1  cgroup v2, systemd  1 pod in the kubelet's pods API",
        "",
        "● default/p  Burstable  as promised, 16 knobs",
        "● QoS classes  as promised",
        "",
        "1 pod: 1 as promised",
    ]
    assert done.returncode == 0


def test_without_any_pods_it_says_what_nobody_can_know(capsys, node):
    code, told = run(capsys, node, pods=False)
    assert code == 3
    assert f"no pods   {node.top}/kubelet/{SOCKET}: no such socket\n" in told.replace(
        "no pods  ", "no pods   "
    )
    assert "drahealth audit --pods FILE" in told
    assert told.endswith("\nno pod could be judged\n")
