"""``drahealth audit`` on cgroups of plain files: output, exit codes, and sources of pods."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
from agents import short_tmp
from audit_samples import (
    CONTAINER,
    CONTAINER_KNOBS,
    GI,
    MAX,
    UNUSED_KNOBS,
    Object,
    kep_pod,
    procfs_tree,
    sysfs_tree,
    systemd_path,
    v2_tree,
    write_cgroup,
    write_pod_list,
    write_process,
)
from cgroup_audit_pods import UID
from kubelet_files import DRIVER, checkpoint, claim, device, devices
from patience import PATIENCE_S
from wire.kubelet_apis import ListingApi, message_class

from agent.cli.audit.text import MAX_LISTED
from agent.cli.main import main
from agent.serve.kubelet.pods_api import LIST, SOCKET

__all__ = ["short_tmp"]
OTHER: Final = "11111111-2222-4333-8444-555555555555"


class Node(NamedTuple):
    """Node that consists of files."""

    top: Path
    pods: Path

    @property
    def cgroups(self) -> Path:
        return self.top / "cgroup"

    def args(self, *more: str, pods: bool = True) -> list[str]:
        pods_flags = ["--pods", str(self.pods)] if pods else []
        roots = ["--cgroupfs-root", str(self.cgroups), "--sysfs-root", str(self.top / "sys")]
        roots += ["--kubelet-dir", str(self.top / "kubelet"), "--node-name", "n1"]
        roots += ["--runtime-dir", str(self.top / "run"), "--procfs-root", str(self.top / "proc")]
        return ["audit", *roots, *pods_flags, "--color", "never", *more]

    def write(self, *pods: Object) -> None:
        write_pod_list(self.pods, *pods)


class Waits:
    """Clock whose time passes only in :meth:`sleep`."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.seconds: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """Actions during a wait."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds.append(seconds)
        self.now_s += seconds
        self.meanwhile()


def node_of(top: Path, *pods: Object, burstable: int = 274) -> Node:
    sysfs_tree(top / "sys")
    procfs_tree(top / "proc")
    v2_tree(top / "cgroup", pods, burstable)
    (top / "kubelet").mkdir()
    (top / "kubelet/cpu_manager_state").write_text('{"policyName":"none","defaultCpuSet":"","checksum":1}')
    return Node(top, write_pod_list(top / "pods.json", *pods))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return node_of(tmp_path, kep_pod())


def run(capsys: pytest.CaptureFixture[str], node: Node, *more: str, pods: bool = True) -> tuple[int, str]:
    code = main(node.args(*more, pods=pods))
    output = capsys.readouterr()
    return code, output.out + output.err


def document(capsys: pytest.CaptureFixture[str], node: Node, *more: str) -> tuple[int, Any]:
    code = main(node.args("-o", "json", *more))
    return code, json.loads(capsys.readouterr().out)


# --- output ------------------------------------------------------------------------------------------------


def test_node_without_findings_has_one_line_per_pod(capsys, node):
    code, out = run(capsys, node)
    assert code == 0
    head, *rest = out.splitlines()
    assert re.fullmatch(r"n1  cgroup v2, systemd  1 pod in a file, \d+s old", head)
    assert rest == [
        "",
        "● default/p  Burstable  as expected, 18 settings",
        "● QoS classes  as expected",
        "● node cgroups  as expected",
        "",
        "1 pod: 1 as expected",
    ]


def test_many_pods_without_findings_are_listed_up_to_a_limit(capsys, tmp_path):
    uids = [f"11111111-2222-4333-8444-{number:012d}" for number in range(MAX_LISTED + 7)]
    pods = [kep_pod(f"p{number}", uid, f"{number:064x}") for number, uid in enumerate(uids)]
    node = node_of(tmp_path, *pods, burstable=7383)
    write_cgroup(node.cgroups, systemd_path(uids[-1], f"{len(uids) - 1:064x}"), {"memory.max": "max"})
    code, out = run(capsys, node)
    assert code == 1
    assert out.splitlines()[2] == f"▲ default/p{len(uids) - 1}  Burstable  not as expected"
    assert out.count("as expected, 18 settings") == MAX_LISTED
    assert "\n● 6 more  as expected\n" in out
    assert f"{len(uids)} pods: 1 not as expected, {len(uids) - 1} as expected" in out


def test_finding_shows_arithmetic_and_consequence(capsys, node):
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), {"cpu.max": "400000 100000"})
    code, out = run(capsys, node)
    assert code == 1
    assert out.splitlines()[2:7] == [
        "▲ default/p  Burstable  not as expected",
        "    CGROUP  SETTING    EXPECTED   ACTUAL     VERDICT",
        "    c1      cpu quota  900000 us  400000 us  lower",
        "      4000m (limit) + 5000m (claim p-cpus) = 9000m -> 900000 us of 100000;"
        " 400000 us is the value of a kubelet that does not count claims",
        "      → the cgroup is throttled before it uses its allocation",
    ]
    assert out.endswith("\n\n1 pod: 1 not as expected\n")


def test_named_pod_is_shown_in_full(capsys, node):
    code, out = run(capsys, node, "default/p")
    assert code == 0
    assert "    pod     memory limit                     9Gi        9Gi        match\n" in out
    assert "      4Gi (c1) + 5Gi (claim p-cpus) = 9Gi -> 9663676416 bytes\n" in out
    assert "QoS classes" not in out


@pytest.mark.parametrize("name", ["p", "default/p", UID])
def test_pod_is_found_by_name_and_by_uid(capsys, node, name):
    assert run(capsys, node, name)[0] == 0


def test_json_has_every_field(capsys, node):
    write_cgroup(node.cgroups, systemd_path(), {"memory.max": "max"})
    code, found = document(capsys, node)
    assert code == 1
    assert found["apiVersion"] == "drahealth/v1"
    assert found["cgroups"] == {
        "version": 2,
        "driver": "systemd",
        "pageBytes": 4096,
        "hugepageSizesKiB": [2048, 1048576],
        "countsClaims": True,
        "kubeletConfig": "/var/lib/kubelet/config.yaml",
    }
    assert found["source"]["origin"] == "pods-file"
    assert found["unread"] == found["notKnown"] == []
    assert found["summary"] == {"match": 33, "unlimited": 1}
    (pod,) = found["pods"]
    assert (pod["name"], pod["claims"]) == ("p", ["p-cpus"])
    (wrong,) = [knob for knob in pod["knobs"] if knob["verdict"] != "match"]
    assert wrong == {
        "level": "pod",
        "qosClass": "Burstable",
        "atLeast": None,
        "container": "",
        "knob": "memory limit",
        "sizeKiB": None,
        "file": "memory.max",
        "expected": [9663676416],
        "arithmetic": "4Gi (c1) + 5Gi (claim p-cpus) = 9Gi -> 9663676416 bytes",
        "actual": "max",
        "verdict": "unlimited",
        "why": "unlimited, expected 9Gi: 4Gi (c1) + 5Gi (claim p-cpus) = 9Gi -> 9663676416 bytes",
        "risk": "the cgroup can use memory allocated to others",
    }


def test_pod_object_with_control_characters_is_cleaned(capsys, node):
    odd = kep_pod()
    odd["spec"]["containers"][0]["resources"]["limits"] = {}
    odd["status"]["nodeAllocatableResourceClaimStatuses"][0]["resourceClaimName"] = "x\u009b"
    node.write(odd)
    assert "\u009b" not in run(capsys, node, "p")[1]


def test_table_is_ascii_on_an_ascii_output(node):
    write_cgroup(node.cgroups, systemd_path(), {"memory.max": "max"})
    command = [sys.executable, "-m", "agent", *node.args()]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environ, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert b"! default/p  Burstable  not as expected\n" in done.stdout
    assert done.stdout.isascii()
    assert b"\\u" not in done.stdout


# --- settings that cannot be evaluated ---------------------------------------------------------------------


def test_container_that_just_started_is_shown_as_quiet(capsys, node):
    node.write(kep_pod(started=datetime.now(UTC).isoformat()))
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), {"memory.max": "max"})
    code, out = run(capsys, node)
    assert code == 3
    assert "unlimited  quiet" in out
    assert "it changed less than 30 s ago" in out


def test_vanished_container_is_shown_once(capsys, node):
    deleted = kep_pod(ident="dead" * 16)
    node.write(deleted)
    code, out = run(capsys, node)
    assert code == 3
    assert out.count("vanished") == 1
    assert "    c1      all                        vanished\n      the cgroup is gone\n" in out


def test_finding_outweighs_unevaluated_settings_in_the_exit_code(capsys, tmp_path):
    node = node_of(tmp_path, kep_pod(), kep_pod("q", OTHER, "beef" * 16), burstable=547)
    write_cgroup(node.cgroups, systemd_path(OTHER, "beef" * 16), {"cpu.weight": "torn"})
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), {"memory.max": 1 << 20})
    assert run(capsys, node)[0] == 1


def test_unreadable_setting_is_a_finding_with_its_reason(capsys, node):
    write_cgroup(node.cgroups, systemd_path(), {"cpu.weight": "torn"})
    code, out = run(capsys, node)
    assert code == 1
    assert "cpu.weight cannot be read: text cannot be parsed" in out


def test_pod_without_running_containers_is_not_evaluated(capsys, node):
    waiting = kep_pod()
    waiting["status"]["containerStatuses"] = []
    node.write(waiting)
    assert run(capsys, node)[0] == 0
    code, out = run(capsys, node, "p")
    assert code == 3
    assert "· default/p  Burstable  not running\n" in out


def test_invalid_pod_is_named_and_the_others_are_evaluated(capsys, node):
    odd = kep_pod("odd", OTHER)
    odd["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "much"
    node.write(kep_pod(), odd)
    code, out = run(capsys, node)
    assert code == 3
    assert "unread     pod 'odd': spec.containers[0].resources.limits.cpu: 'much' is not a quantity" in out
    assert "● default/p" in out
    assert "QoS classes: not audited" in out  # the pod may be part of their sum


def test_container_id_with_a_path_is_not_followed(capsys, node):
    node.write(kep_pod(ident="../../../kubepods.slice"))
    code, out = run(capsys, node)
    assert code == 3
    assert "is not the path of its cgroup" in out


def test_qos_classes_are_evaluated_only_if_all_pods_are_known(capsys, tmp_path):
    node = node_of(tmp_path, kep_pod(), kep_pod("q", OTHER, "beef" * 16), burstable=547)
    assert "● QoS classes  as expected\n" in run(capsys, node)[1]
    node.write(kep_pod())
    code, out = run(capsys, node)
    assert code == 0
    assert f"unlisted pods with cgroups (1): {OTHER}" in out
    assert "QoS classes: not audited, their weight is the sum over all pods" in out


BURSTABLE: Final = "kubepods.slice/kubepods-burstable.slice"


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Clock of the audit that moves only while it waits."""
    clock = Waits(time.time())
    own = SimpleNamespace(sleep=clock.sleep, time=lambda: clock.now_s)  # threads of other tests sleep, too
    monkeypatch.setattr("agent.cli.audit.command.time", own)
    return clock


def test_qos_class_wrong_in_two_audits_a_minute_apart_is_found(capsys, node, waits):
    write_cgroup(node.cgroups, BURSTABLE, {"cpu.weight": 79})
    code, out = run(capsys, node)
    assert (code, waits.seconds) == (1, [61])
    assert "▲ QoS classes  not as expected\n" in out
    assert "    Burstable  cpu weight  274       79      lower\n" in out
    assert (
        "drahealth: QoS classes and kubepods: a setting differs from its expected value; auditing again"
        in out
    )


def test_qos_class_that_the_kubelet_corrects_within_a_minute_matches(capsys, node, waits):
    write_cgroup(node.cgroups, BURSTABLE, {"cpu.weight": 79})
    waits.meanwhile = lambda: write_cgroup(node.cgroups, BURSTABLE, {"cpu.weight": 274})
    code, out = run(capsys, node)
    assert (code, waits.seconds) == (0, [61])
    assert "● QoS classes  as expected\n" in out


def test_qos_class_that_becomes_wrong_in_the_second_audit_is_quiet(capsys, node, waits):
    write_cgroup(node.cgroups, BURSTABLE, {"cpu.weight": 79, "hugetlb.2MB.max": "max"})

    def swap() -> None:
        write_cgroup(node.cgroups, BURSTABLE, {"cpu.weight": 274, "hugetlb.2MB.max": 0})

    waits.meanwhile = swap
    code, out = run(capsys, node)
    assert (code, waits.seconds) == (3, [61])
    assert "seen once; the kubelet rewrites this setting about once a minute" in out


def test_right_qos_classes_and_a_single_pod_need_no_second_audit(capsys, node, waits):
    assert run(capsys, node)[0] == 0
    write_cgroup(node.cgroups, BURSTABLE, {"cpu.weight": 79})
    assert run(capsys, node, "default/p")[0] == 0
    assert waits.seconds == []


def test_listed_pod_without_a_cgroup_leaves_qos_classes_unaudited(capsys, node, waits):
    node.write(kep_pod(), kep_pod("gone", OTHER, "beef" * 16))
    out = run(capsys, node)[1]
    assert f"listed pods without a cgroup (1): {OTHER}" in out
    assert "QoS classes: not audited, their weight is the sum over all pods" in out
    assert waits.seconds == []


# --- hugepage limits that the container runtime does not set -----------------------------------------------


def test_containerds_default_without_hugetlb_is_a_note_and_no_finding(capsys, node):
    free = {name: MAX for name in UNUSED_KNOBS if name.startswith("hugetlb.")}
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), free)
    code, out = run(capsys, node)
    assert code == 0
    assert "● default/p  Burstable  as expected, 18 settings\n" in out
    assert out.count("disable_hugetlb_controller") == 1
    assert document(capsys, node)[1]["notes"] == [
        "hugepages: the container runtime sets no limits on containers (containerd: "
        "disable_hugetlb_controller, true by default); the limits of the pods are compared"
    ]


def test_pod_that_may_use_more_pages_than_requested_is_found(capsys, node):
    free = {name: MAX for name in UNUSED_KNOBS if name.startswith("hugetlb.")}
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), free)
    write_cgroup(node.cgroups, systemd_path(UID), {"hugetlb.2MB.max": 64 << 20})
    code, out = run(capsys, node)
    assert code == 1
    assert "    pod     hugepages limit 2MB  0         64Mi    higher\n" in out


def test_missing_kubelet_cgroups_exit_3(capsys, node):
    code, out = run(capsys, node, "--kubelet-cgroup-root", "/elsewhere")
    assert code == 3
    assert f"no kubelet has created cgroups in {node.cgroups} below /elsewhere" in out
    code = main(["audit", "--pods", str(node.pods), "--cgroupfs-root", str(node.top / "sys")])
    assert code == 3
    assert (
        capsys.readouterr().err
        == f"drahealth: cgroupfs root {node.top / 'sys'}: no cgroup hierarchy is mounted here\n"
    )


# --- flags -------------------------------------------------------------------------------------------------


def test_kubelet_before_1_37_does_not_count_claims(capsys, node):
    code, out = run(capsys, node, "--kubelet-version", "v1.36.2")
    assert code == 1
    assert "a kubelet that does not count claims" in out
    assert "claim.not_counted" in out


def test_all_includes_pods_without_claims(capsys, tmp_path):
    plain = kep_pod("plain", OTHER, "beef" * 16)
    del plain["spec"]["resourceClaims"], plain["status"]["nodeAllocatableResourceClaimStatuses"]
    node = node_of(tmp_path, kep_pod(), plain, burstable=352)
    write_cgroup(node.cgroups, systemd_path(OTHER), {"cpu.weight": 79, "cpu.max": "400000 100000"})
    assert "plain" not in run(capsys, node)[1]
    code, out = run(capsys, node, "--all")
    assert code == 1
    assert "▲ default/plain  Burstable  not as expected\n" in out  # its memory is 9Gi


def test_exclusive_cpus_of_the_kubelet_lift_the_quota(capsys, tmp_path):
    exact = kep_pod()
    exact["status"]["qosClass"] = "Guaranteed"
    node = node_of(tmp_path, exact)
    write_cgroup(node.cgroups, f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice", {})
    pod = node.cgroups / f"kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice"
    pod.rmdir()
    (node.cgroups / systemd_path()).rename(pod)
    lifted = {"cpu.max": "max 100000", "cpuset.cpus": "2-3", "cpuset.cpus.effective": "2-3"}
    write_cgroup(pod, f"cri-containerd-{CONTAINER}.scope", lifted)
    write_cgroup(pod, "", {"cpu.max": "max 100000"})
    state = node.top / "kubelet/cpu_manager_state"
    assert run(capsys, node, "p")[0] == 1
    state.write_text(json.dumps({"policyName": "static", "entries": {UID: {"c1": "2-3"}}, "checksum": 1}))
    assert run(capsys, node, "p")[0] == 0
    state.unlink()  # not known, so no finding
    code, out = run(capsys, node, "p")
    assert code == 3
    assert "the kubelet may have assigned exclusive CPUs, which could not be read" in out
    assert f"exclusive CPUs of the kubelet: {state}: No such file" in out


# --- exclusive CPUs of drivers -----------------------------------------------------------------------------


@pytest.fixture
def node_with_exclusive_cpus(tmp_path: Path) -> Node:
    """A node whose pod has exclusive CPUs 2-3 from a driver, as expected."""
    pod = kep_pod()
    pod["spec"]["containers"][0]["resources"]["claims"] = [{"name": "x"}]
    node = node_of(tmp_path, pod)
    declared = node.top / "run/devices.d"
    declared.mkdir(parents=True)
    (declared / f"{DRIVER}.toml").write_text(
        'version = 1\n[[device]]\nname = "own-0"\nkind = "cpu"\ncpus = "2-3"\nexclusive = true\n'
    )
    prepared = claim(
        "c", name="p-cpus", namespace="default", pods=[UID], drivers=devices(device("own-0", pool="n1"))
    )
    (node.top / "kubelet/dra_manager_state").write_bytes(checkpoint([prepared]))
    write_cgroup(
        node.cgroups, systemd_path(UID, CONTAINER), {"cpuset.cpus": "2-3", "cpuset.cpus.effective": "2-3"}
    )
    return node


def test_exclusive_cpus_of_a_driver_are_expected(capsys, node_with_exclusive_cpus):
    code, out = run(capsys, node_with_exclusive_cpus, "p")
    assert code == 0
    assert re.search(r"^    c1 +cpus +CPUs 2-3 +CPUs 2-3 +match$", out, re.MULTILINE)
    assert "      CPUs 2-3 from a driver\n" in out
    assert "not known" not in out


def test_container_on_other_cpus_is_found(capsys, node_with_exclusive_cpus):
    write_cgroup(
        node_with_exclusive_cpus.cgroups,
        systemd_path(UID, CONTAINER),
        {"cpuset.cpus": "", "cpuset.cpus.effective": "0-7"},
    )
    code, out = run(capsys, node_with_exclusive_cpus)
    assert code == 1
    assert "    c1      cpus            CPUs 2-3  CPUs none  unlimited\n" in out
    assert "    c1      effective cpus  CPUs 2-3  CPUs 0-7   higher\n" in out
    assert "→ the cgroup runs on CPUs allocated to others" in out


def test_throttled_exclusive_cpus_are_a_risk(capsys, node_with_exclusive_cpus):
    stat = "usage_usec 1\nnr_periods 9\nnr_throttled 7"
    write_cgroup(node_with_exclusive_cpus.cgroups, systemd_path(UID, CONTAINER), {"cpu.stat": stat})
    code, out = run(capsys, node_with_exclusive_cpus)
    assert code == 0
    assert "● default/p" in out
    assert "    cpus.exclusive_throttled  c1: throttled at " in out


def test_missing_checkpoint_makes_exclusive_cpus_unknown(capsys, node_with_exclusive_cpus):
    (node_with_exclusive_cpus.top / "kubelet/dra_manager_state").unlink()
    code, out = run(capsys, node_with_exclusive_cpus)
    assert code == 0
    assert "exclusive CPUs of drivers: " in out
    assert "dra_manager_state: No such file or directory" in " ".join(out.split())


def test_invalid_declaration_is_named(capsys, node_with_exclusive_cpus):
    (node_with_exclusive_cpus.top / f"run/devices.d/{DRIVER}.toml").write_text("version = 7\n")
    out = " ".join(run(capsys, node_with_exclusive_cpus)[1].split())
    path = f"{node_with_exclusive_cpus.top}/run/devices.d/{DRIVER}.toml"
    assert f"exclusive CPUs of drivers: declaration file {path}: file format version 7" in out


# --- memory QoS, swap, OOM scores and node cgroups ----------------------------------------------------------

TIERED: Final = (
    "featureGates: {MemoryQoS: true, DRANodeAllocatableResources: true}\n"
    "memoryReservationPolicy: TieredReservation\n"
)


def write_kubelet_config(node: Node, config: str) -> None:
    (node.top / "proc/77/root/var/lib/kubelet/config.yaml").write_text(config)


def test_wrong_memory_qos_is_found_with_its_arithmetic(capsys, node):
    write_kubelet_config(node, f"{TIERED}memoryThrottlingFactor: 0.5\n")
    files = {"memory.min": 0, "memory.low": 2 * GI, "memory.high": 4 * GI}
    write_cgroup(node.cgroups, systemd_path(), {**files, "memory.low": 7 * GI})
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), files)
    code, out = run(capsys, node, "p", "--kubelet-version", "1.37")
    assert code == 1
    assert re.search(r"^    c1 +memory high +5632Mi +4Gi +lower$", out, re.MULTILINE)
    assert "2Gi (request) + 0.5 * (9Gi (limit) - 2Gi) -> 5905580032 bytes" in out
    assert "→ the cgroup is throttled before it uses its allocation" in out
    assert out.count("  lower") == 1


def test_leftover_throttling_limit_is_found(capsys, node):
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), {"memory.high": GI})
    code, out = run(capsys, node)
    assert code == 1
    assert re.search(r"^    c1 +memory high +unlimited +1Gi +limited$", out, re.MULTILINE)


def test_oom_score_is_compared_with_that_of_the_first_process(capsys, node):
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), {"cgroup.procs": 901})
    write_process(node.top / "proc", 901, 1000)
    code, out = run(capsys, node)
    assert code == 1
    assert re.search(r"^    c1 +OOM score +891 +1000 +higher$", out, re.MULTILINE)
    assert "1000 - 1000 * 7Gi (request) / 64Gi -> 891" in out
    write_process_score(node, 891)
    assert run(capsys, node)[0] == 0


def write_process_score(node: Node, score: int) -> None:
    (node.top / "proc/901/oom_score_adj").write_text(f"{score}\n")


def test_container_that_may_swap_is_found(capsys, node):
    write_cgroup(node.cgroups, systemd_path(UID, CONTAINER), {"memory.swap.max": MAX})
    code, out = run(capsys, node)
    assert code == 1
    assert re.search(r"^    c1 +swap limit +0 +unlimited +unlimited$", out, re.MULTILINE)


def test_wrong_protection_of_kubepods_is_found_by_the_second_audit(capsys, node, waits):
    write_cgroup(node.cgroups, "kubepods.slice", {"memory.min": GI})
    code, out = run(capsys, node)
    assert (code, waits.seconds) == (1, [61])
    assert re.search(r"^    kubepods +memory min +0 +1Gi +higher$", out, re.MULTILINE)


def test_protection_that_the_kubelet_rewrites_is_no_finding(capsys, node, waits):
    write_cgroup(node.cgroups, "kubepods.slice", {"memory.min": GI})
    waits.meanwhile = lambda: write_cgroup(node.cgroups, "kubepods.slice", {"memory.min": 0})
    assert run(capsys, node)[0] == 0


def test_wrong_limit_of_kubepods_is_found_at_once(capsys, node, waits):
    write_cgroup(node.cgroups, "kubepods.slice", {"memory.max": MAX})
    code, out = run(capsys, node)
    assert (code, waits.seconds) == (1, [])
    assert "▲ node cgroups  not as expected\n" in out
    assert re.search(r"^    kubepods +memory limit +64Gi +unlimited +unlimited$", out, re.MULTILINE)
    assert "64Gi of memory - 0 reserved -> 68719476736 bytes" in out


def test_reserved_cgroup_is_compared_with_the_reservation(capsys, node):
    write_kubelet_config(
        node,
        "enforceNodeAllocatable: [kube-reserved]\nkubeReserved: {cpu: 500m, memory: 1Gi}\n"
        "kubeReservedCgroup: /kube.slice\nfeatureGates: {MemoryQoS: false}\n",
    )
    write_cgroup(
        node.cgroups, "kube.slice", {"cpu.weight": 20, "memory.max": GI, "cgroup.controllers": "cpu memory"}
    )
    code, found = document(capsys, node)
    assert code == 0
    kube = [
        (entry["file"], entry["actual"]) for entry in found["nodeCgroups"] if entry["name"] == "kube-reserved"
    ]
    assert kube == [("cpu.weight", 20), ("memory.max", GI)]


def test_unknown_configuration_is_named_and_changes_no_exit_code(capsys, node):
    (node.top / "proc/77/comm").write_text("k3s-server\n")
    code, out = run(capsys, node)
    assert code == 0
    text = " ".join(out.split())
    assert (
        "configuration of the kubelet: no process named kubelet; memory QoS, swap limits, CPU quota periods"
        in text
    )
    assert "kubectl get --raw /api/v1/nodes/NODE/proxy/configz" in text
    assert "as expected, 14 settings" in out


def test_configuration_from_a_file_replaces_that_of_the_process(capsys, node):
    (node.top / "proc/77/comm").write_text("k3s-server\n")
    (node.top / "configz").write_text('{"kubeletconfig": {"memorySwap": {"swapBehavior": "LimitedSwap"}}}')
    code, found = document(capsys, node, "--kubelet-config", str(node.top / "configz"))
    assert code == 0
    (swap,) = [knob for knob in found["pods"][0]["knobs"] if knob["knob"] == "swap limit"]
    assert swap["arithmetic"] == "2Gi (request) / 64Gi * 0 of swap -> 0 bytes"
    assert found["cgroups"]["kubeletConfig"] == str(node.top / "configz")


def test_gate_in_the_configuration_decides_whether_claims_count(capsys, node):
    write_kubelet_config(node, "featureGates: {DRANodeAllocatableResources: false}\n")
    _, found = document(capsys, node)
    assert found["cgroups"]["countsClaims"] is False


def test_quota_period_of_the_configuration_is_expected(capsys, node):
    write_kubelet_config(node, "cpuCFSQuotaPeriod: 50ms\n")
    for path in (systemd_path(), systemd_path(UID, CONTAINER)):
        write_cgroup(node.cgroups, path, {"cpu.max": "450000 50000"})
    assert run(capsys, node)[0] == 0


# --- refused arguments, and pods of several nodes -----------------------------------------------------------


def test_pods_on_standard_input_are_audited(capsys, node):
    before = os.dup(0)
    try:
        with open(node.pods, "rb") as file:
            os.dup2(file.fileno(), 0)
        code, out = run(capsys, node, "--pods", "-", pods=False)
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert code == 0
    assert "1 pod in a file" in out


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("unknown",), "no pod 'unknown' among the 1 pod of this node"),
        (("default/o",), "did you mean 'default/p'?"),
        (("--kubelet-version", "new"), "--kubelet-version: kubelet version 'new' is not a version"),
        (("--kubelet-config", "/nonexistent"), "/nonexistent: No such file or directory"),
        (("--pods", "/nonexistent"), "/nonexistent: No such file or directory"),
    ],
)
def test_invalid_argument_is_refused(capsys, node, args, error):
    code, out = run(capsys, node, *args)
    assert code == 64
    assert error in out


def test_pods_of_other_nodes_are_ignored(capsys, node):
    node.write(kep_pod(), kep_pod("far", OTHER, "beef" * 16, node="n2"))
    code, out = run(capsys, node, "--all")
    assert code == 0
    assert "far" not in out


def test_pods_of_several_other_nodes_are_refused(capsys, node):
    node.write(kep_pod(node="n3"), kep_pod("far", OTHER, node="n2"))
    code, out = run(capsys, node)
    assert code == 64
    assert "the file has pods of 2 nodes, but none of node 'n1'" in out


def test_pods_of_one_node_define_the_node(capsys, node):
    node.write(kep_pod(node="worker-7.example.com"))
    code, out = run(capsys, node)
    assert code == 0
    assert out.startswith("worker-7.example.com  cgroup v2")


# --- from the kubelet --------------------------------------------------------------------------------------


@pytest.fixture
def served_node(short_tmp: Path) -> Iterator[Node]:
    """A node whose kubelet serves its pod, which has no claim but requests CPU."""
    node = node_of(short_tmp, kep_pod())
    with pods_api(node, kubelets_pod()):
        yield node


def kubelets_pod() -> Any:
    """Return the pod of kep_pod() without its claim, as the kubelet lists it."""
    found = message_class("core", "Pod")()
    found.metadata.name, found.metadata.namespace, found.metadata.uid = "p", "default", UID
    found.status.phase, found.status.qosClass = "Running", "Burstable"
    container = found.spec.containers.add(name="c1", image="")
    for resource, limits in (("cpu", ("2", "4")), ("memory", ("2Gi", "9Gi"))):
        container.resources.requests[resource].string = limits[0]
        container.resources.limits[resource].string = limits[1]
    state = found.status.containerStatuses.add(name="c1", containerID=f"containerd://{CONTAINER}")
    state.state.running.startedAt.seconds = 1_700_000_000
    return found


@contextmanager
def pods_api(node: Node, pod: Any) -> Iterator[None]:
    """Serve the pods API of the node's kubelet, which lists one pod."""
    answer = message_class("v1alpha1", "ListPodsResponse")(pods=[pod.SerializeToString()])
    socket = node.top / "kubelet" / SOCKET
    socket.parent.mkdir()
    with ListingApi(socket, LIST, lambda: answer):
        yield


def test_without_a_file_pods_come_from_the_kubelet(served_node):
    write_cgroup(served_node.cgroups, systemd_path(), {"cpu.weight": 79, "cpu.max": "400000 100000"})
    write_cgroup(
        served_node.cgroups, systemd_path(UID, CONTAINER), {**CONTAINER_KNOBS, "cpu.max": "400000 100000"}
    )
    write_cgroup(served_node.cgroups, "kubepods.slice/kubepods-burstable.slice", {"cpu.weight": 79})
    command = [sys.executable, "-m", "agent", *served_node.args("--all", pods=False)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "n1  cgroup v2, systemd  1 pod in the kubelet's pods API",
        "",
        "● default/p  Burstable  as expected, 18 settings",
        "● QoS classes  as expected",
        "● node cgroups  as expected",
        "",
        "1 pod: 1 as expected",
    ]
    assert done.returncode == 0


def test_claim_amounts_that_the_kubelet_does_not_know_are_not_compared(capsys, short_tmp):
    node = node_of(short_tmp, kep_pod())
    found = kubelets_pod()
    found.spec.resourceClaims.add(name="x", resourceClaimName="p-cpus")
    with pods_api(node, found):
        code, out = run(capsys, node, pods=False)
        assert code == 3
        assert "◌ default/p  Burstable  not evaluated\n" in out
        assert "    pod     cpu quota                        at least 400000 us  900000 us  unknown\n" in out
        assert "the API server does: drahealth audit --pods FILE" in out.replace("\n      ", " ")
        assert not re.search("  (higher|unlimited|lower)\n", out)
        write_cgroup(node.cgroups, systemd_path(), {"cpu.max": "399999 100000"})
        code, out = run(capsys, node, pods=False)
        assert code == 1
        assert "    pod     cpu quota                        at least 400000 us  399999 us  lower\n" in out


def test_pod_of_an_extended_resource_claim_is_selected_by_the_checkpoint(capsys, short_tmp):
    node = node_of(short_tmp, kep_pod())
    gpu = devices(device("gpu-0"))
    prepared = claim("c", name="p-extended", namespace="default", pods=[UID], drivers=gpu)
    with pods_api(node, kubelets_pod()):
        assert "p  Burstable" not in run(capsys, node, pods=False)[1], "the kubelet's object names no claim"
        file = node.top / "kubelet/dra_manager_state"
        file.write_bytes(checkpoint([prepared]))
        assert "◌ default/p  Burstable  not evaluated\n" in run(capsys, node, pods=False)[1]
        file.write_bytes(b"{")
        unread = run(capsys, node, pods=False)[1]
        assert "pods with claims for extended resources: claims checkpoint" in unread


def test_without_pods_the_alternative_is_shown(capsys, node):
    code, out = run(capsys, node, pods=False)
    assert code == 3
    assert f"no pods   {node.top}/kubelet/{SOCKET}: no such socket\n" in out.replace(
        "no pods  ", "no pods   "
    )
    assert "drahealth audit --pods FILE" in out
    assert out.endswith("\nno pod could be audited\n")
