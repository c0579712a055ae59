"""``drahealth audit`` on real cgroups: CPU time, memory and CPUs of v1, hugepages of v2."""

import errno
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from audit_samples import CONTAINER, running_status, write_pod_list
from cgroup_audit_pods import UID, claim, container, pod_object
from kubelet_files import DRIVER, checkpoint, device, devices
from kubelet_files import claim as claim_prepared
from machine import CGROUPFS, Kubepods, kubepods_tree, machine_lock

from agent.cgroup_audit.audit import AuditedNode, audit_pod_cgroups
from agent.cgroup_audit.audit_verdicts import AuditVerdict
from agent.cgroup_audit.cgroup_paths import container_path, parse_path, pod_path, qos_path
from agent.cgroup_audit.kubelet_config import CgroupDriver, NodeFacts
from agent.cgroup_audit.pod_model import Pod, QosClass
from agent.cgroup_audit.pod_parser import parse_pod
from agent.cli.audit.command import SECOND_AUDIT
from agent.model.cpuset import parse_cpus
from agent.model.pod_findings import NO_LIMIT, CgroupSettings
from agent.model.reading import Absence, Missing, is_absent
from agent.native.cgroup_settings import CgroupSettingReader
from agent.sources.cgroup_facts import pod_uids_with_cgroups, read_cgroup_facts

MIB: Final = 1 << 20
SIZES: Final = (2048, 1048576)
pytestmark = pytest.mark.usefixtures("hold_machine_lock")
namings = pytest.mark.parametrize("systemd", [False, True], ids=["cgroupfs", "systemd"])


@pytest.fixture
def hold_machine_lock() -> Iterator[None]:
    with machine_lock():
        yield


OBJECT: Final = pod_object(
    container("c1", "cpu=200m memory=64Mi", "cpu=1255m memory=100M"),
    claims=[claim("cpus", "c1", "cpu=1500m memory=128Mi hugepages-2Mi=64Mi")],
    qosClass="Burstable",
    phase="Running",
    containerStatuses=[running_status("c1")],
)
OBJECT["spec"]["resourceClaims"] = [{"name": "x", "resourceClaimName": "cpus"}]
LIMIT: Final = 100_000_000 + 128 * MIB
KEPT: Final = LIMIT - LIMIT % 4096
"""Return the value as v1 reads back."""


@contextmanager
def tree_of_a_pod(systemd: bool) -> Iterator[Kubepods]:
    """Create the cgroups as a kubelet does; systemd rounds quotas up."""
    with kubepods_tree("cpu", "memory", "cpuset", hugetlb=True, systemd=systemd) as tree:
        tree.make("besteffort")
        pod = tree.make("burstable", UID)
        tree.make("burstable", UID, CONTAINER)
        names = [("burstable", "", ""), ("burstable", UID, ""), ("burstable", UID, CONTAINER)]
        for name in names:
            at = tree.directory(*name)
            for controller, file, value in (
                ("cpu", "cpu.shares", 1740 if name[0] and not name[2] else 204),
                ("cpu", "cpu.cfs_quota_us", (276_000 if systemd else 275_500) if name[1] else -1),
                ("memory", "memory.limit_in_bytes", LIMIT if name[1] else -1),
            ):
                (CGROUPFS / controller / at / file).write_text(f"{value}")
        (CGROUPFS / "cpu" / tree.directory("besteffort") / "cpu.shares").write_text("2")
        for directory in (
            pod,
            pod.parent / tree.directory("burstable", UID, CONTAINER).relative_to(tree.directory("burstable")),
        ):
            for size, limit in (("2MB", 64 * MIB), ("1GB", 0)):
                (directory / f"hugetlb.{size}.max").write_text(f"{limit}")
                (directory / f"hugetlb.{size}.rsvd.max").write_text(f"{limit}")
        yield tree


def audit(tree: Kubepods, pods: Path, *more: str) -> tuple[int, Any]:
    args = ["--pods", str(pods), "--kubelet-cgroup-root", tree.cgroup_root, "-o", "json", *more]
    command = [sys.executable, "-m", "agent", "audit", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr.splitlines() in ([], [SECOND_AUDIT])  # a difference of a QoS class is audited twice
    return done.returncode, json.loads(done.stdout)


def wrong_of(document: Any) -> list[tuple[str, str, str]]:
    knobs = [*document["classes"], *(knob for pod in document["pods"] for knob in pod["knobs"])]
    fine = {AuditVerdict.MATCH, AuditVerdict.ROUNDED}
    return [
        (knob["container"], knob["file"], knob["verdict"]) for knob in knobs if knob["verdict"] not in fine
    ]


@namings
def test_pod_with_its_expected_allocation_has_no_findings(tmp_path: Path, systemd: bool) -> None:
    with tree_of_a_pod(systemd) as tree:
        code, document = audit(tree, write_pod_list(tmp_path / "pods.json", OBJECT))
    assert wrong_of(document) == []
    assert code == 0
    assert document["cgroups"]["version"] == 1
    assert document["cgroups"]["driver"] == ("systemd" if systemd else "cgroupfs")
    assert document["summary"]["rounded"] == (4 if systemd else 2)  # memory in pages, quotas in 10 ms


@namings
def test_every_wrong_value_is_found(tmp_path: Path, systemd: bool) -> None:
    with tree_of_a_pod(systemd) as tree:
        at, top = tree.directory("burstable", UID, CONTAINER), tree.directory("burstable", UID)
        (CGROUPFS / "cpu" / top / "cpu.shares").write_text("204")
        (CGROUPFS / "cpu" / at / "cpu.cfs_quota_us").write_text("125500")
        (CGROUPFS / "memory" / at / "memory.limit_in_bytes").write_text("100000000")
        (tree.roots[0] / at / "hugetlb.2MB.max").write_text("0")
        (tree.roots[0] / at / "hugetlb.1GB.rsvd.max").write_text("max")
        (CGROUPFS / "cpu" / tree.directory("burstable") / "cpu.shares").write_text("2")
        code, document = audit(tree, write_pod_list(tmp_path / "pods.json", OBJECT))
    assert code == 1
    assert sorted(wrong_of(document)) == [
        ("", "cpu.shares", "lower"),
        ("", "cpu.shares", "lower"),
        ("c1", "cpu.cfs_quota_us", "lower"),
        ("c1", "hugetlb.1GB.rsvd.limit_in_bytes", "unlimited"),
        ("c1", "hugetlb.2MB.limit_in_bytes", "lower"),
        ("c1", "memory.limit_in_bytes", "lower"),
    ]


@namings
def test_core_reads_the_values_of_the_files(systemd: bool) -> None:
    """The test compares the C reader with a reader in Python, file by file."""
    with tree_of_a_pod(systemd) as tree, CgroupSettingReader(CGROUPFS, SIZES) as reader:
        driver = CgroupDriver.SYSTEMD if systemd else CgroupDriver.CGROUPFS
        pod = pod_path(UID, QosClass.BURSTABLE, driver, tree.cgroup_root)
        for path in (pod, container_path(pod, CONTAINER, "containerd", driver)):
            assert parse_path(path, tree.cgroup_root) is not None
            knobs = reader.read(path, exclusive_cpus=True)
            assert knobs is not None
            assert knobs.controllers == {"cpu", "memory", "cpuset", "hugetlb"}
            assert knobs.weight == number(path, "cpu", "cpu.shares")
            assert knobs.quota_us == number(path, "cpu", "cpu.cfs_quota_us")
            assert knobs.period_us == number(path, "cpu", "cpu.cfs_period_us")
            assert knobs.memory == number(path, "memory", "memory.limit_in_bytes") == KEPT
            assert knobs.throttled == 0
            assert knobs.cpus == cpus(path, "cpuset.cpus")
            assert knobs.effective == cpus(path, "cpuset.effective_cpus")
            assert [(page.size_kib, page.max, page.rsvd_max) for page in knobs.pages] == [
                (2048, 64 * MIB, 64 * MIB),
                (1048576, 0, 0),
            ]
        assert reader.read(qos_path(QosClass.BURSTABLE, driver, tree.cgroup_root)) is not None
        assert reader.read(f"{pod}/nobody") is None


def number(path: str, controller: str, file: str) -> int:
    value = int((CGROUPFS / controller / path.lstrip("/") / file).read_text())
    return NO_LIMIT if value == -1 else value


def cpus(path: str, file: str) -> int:
    return parse_cpus((CGROUPFS / "cpuset" / path.lstrip("/") / file).read_text())


def test_new_cgroup_has_no_limits() -> None:
    with kubepods_tree("cpu", "memory", hugetlb=True) as tree, CgroupSettingReader(CGROUPFS, SIZES) as reader:
        tree.make("burstable", UID)
        knobs = reader.read(pod_path(UID, QosClass.BURSTABLE, CgroupDriver.CGROUPFS, tree.cgroup_root))
    assert knobs is not None
    assert (knobs.weight, knobs.quota_us, knobs.memory) == (1024, NO_LIMIT, NO_LIMIT)
    assert {(page.max, page.rsvd_max) for page in knobs.pages} == {(NO_LIMIT, NO_LIMIT)}
    assert is_absent(knobs.cpus)
    assert "cpuset" not in (knobs.controllers or ())


def test_cgroup_driver_and_pods_are_detected() -> None:
    with kubepods_tree("cpu", systemd=True) as tree, CgroupSettingReader(CGROUPFS, ()) as reader:
        assert read_cgroup_facts(reader, (), tree.cgroup_root, (), "") is None
        tree.make("burstable", UID)
        facts = read_cgroup_facts(reader, (), tree.cgroup_root, (), "")
        assert facts == NodeFacts(1, CgroupDriver.SYSTEMD, are_quotas_known=False)
        assert pod_uids_with_cgroups(CGROUPFS, CgroupDriver.SYSTEMD, tree.cgroup_root) == {UID}
        assert pod_uids_with_cgroups(CGROUPFS, CgroupDriver.CGROUPFS, tree.cgroup_root) == set()


def test_driver_that_pins_cpus_is_distinguished_from_one_that_does_not(tmp_path: Path) -> None:
    """The test sets the container's CPUs as an NRI plugin does through the runtime."""
    mine = json.loads(json.dumps(OBJECT))
    mine["spec"]["containers"][0]["resources"]["claims"] = [{"name": "x"}]
    (tmp_path / "devices.d").mkdir()
    (tmp_path / f"devices.d/{DRIVER}.toml").write_text(
        'version = 1\npool = "n1"\n[[device]]\nname = "own-0"\nkind = "cpu"\ncpus = "1"\nexclusive = true\n'
    )
    given = claim_prepared(
        "c", name="cpus", namespace="default", pods=[UID], drivers=devices(device("own-0", pool="n1"))
    )
    (tmp_path / "dra_manager_state").write_bytes(checkpoint([given]))
    (tmp_path / "cpu_manager_state").write_text('{"policyName":"none","defaultCpuSet":"","checksum":1}')
    pods = write_pod_list(tmp_path / "pods.json", mine)
    places = ("--kubelet-dir", str(tmp_path), "--runtime-dir", str(tmp_path))
    with tree_of_a_pod(False) as tree:
        for level in ("", "burstable"):
            copy_parents_cpus(tree, level)
        copy_parents_cpus(tree, "burstable", UID)
        container = CGROUPFS / "cpuset" / tree.directory("burstable", UID, CONTAINER)
        (container / "cpuset.cpus").write_text("1")
        kept = audit(tree, pods, *places)
        (container / "cpuset.cpus").write_text((container.parent / "cpuset.cpus").read_text())
        loose = audit(tree, pods, *places)
    assert wrong_of(kept[1]) == []
    assert kept[0] == 0
    assert [risk["code"] for risk in kept[1]["pods"][0]["risks"]] == []
    assert wrong_of(loose[1]) == [("c1", "cpuset.cpus", "higher"), ("c1", "cpuset.effective_cpus", "higher")]
    assert loose[0] == 1


def copy_parents_cpus(tree: Kubepods, *level: str) -> None:
    """Copy the CPUs of the parent cgroups: in v1 a new cgroup has none."""
    at = CGROUPFS / "cpuset" / tree.directory(*level)
    for parent in (at.parent, at):
        if not (parent / "cpuset.cpus").read_text().strip():
            (parent / "cpuset.cpus").write_text((parent.parent / "cpuset.cpus").read_text())


def parse_object() -> Pod:
    return parse_pod(OBJECT)


@namings
def test_container_removed_during_audit_is_gone_without_finding(systemd: bool) -> None:
    """The test removes the container hierarchy by hierarchy after its pod was read."""
    driver = CgroupDriver.SYSTEMD if systemd else CgroupDriver.CGROUPFS
    facts = NodeFacts(cgroup_version=1, cgroup_driver=driver, hugepages_kib=SIZES)
    with tree_of_a_pod(systemd) as tree, CgroupSettingReader(CGROUPFS, SIZES) as reader:
        at = tree.directory("burstable", UID, CONTAINER)
        left = [root / at for root in tree.roots]

        def read(path: str, own_cpus: bool) -> CgroupSettings | None:
            if path.strip("/") == str(at):  # at the first read of two hierarchies, at the second of all
                for _ in range(2):
                    left.pop().rmdir()
            return reader.read(path, own_cpus)

        judged = audit_pod_cgroups(parse_object(), AuditedNode(facts, tree.cgroup_root), read, 2e9)
    verdicts = {(comparison.cgroup.container, comparison.verdict) for comparison in judged.comparisons}
    assert {verdict for name, verdict in verdicts if name == "c1"} == {AuditVerdict.VANISHED}
    assert {verdict for name, verdict in verdicts if not name} <= {AuditVerdict.MATCH, AuditVerdict.ROUNDED}


def test_containers_that_come_and_go_are_complete_gone_or_new() -> None:
    """The values are readable all the time, and equal to the written values."""
    with tree_of_a_pod(False) as tree, CgroupSettingReader(CGROUPFS, SIZES) as reader:
        at = tree.directory("burstable", UID, CONTAINER)
        done = threading.Event()

        def come_and_go() -> None:
            while not done.is_set():
                for root in tree.roots:
                    (root / at).rmdir()
                for root in tree.roots:
                    (root / at).mkdir()

        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(come_and_go)
            try:
                seen = [reader.read(str(at)) for _ in range(2000)]
            finally:
                done.set()
            going.result()
    found = [knobs for knobs in seen if knobs is not None]
    assert found
    absent = {Missing(Absence.ABSENT, errno.ENOENT)}
    assert {knobs.weight for knobs in found} <= {204, 1024} | absent
    assert {knobs.memory for knobs in found} <= {KEPT, NO_LIMIT} | absent
    assert {page.max for knobs in found for page in knobs.pages} <= {64 * MIB, 0, NO_LIMIT} | absent


def test_container_without_cgroup_in_a_hierarchy_is_unlimited_there(tmp_path: Path) -> None:
    with tree_of_a_pod(False) as tree:
        (CGROUPFS / "memory" / tree.directory("burstable", UID, CONTAINER)).rmdir()
        code, document = audit(tree, write_pod_list(tmp_path / "pods.json", OBJECT))
    assert code == 1
    assert wrong_of(document) == [("c1", "memory.limit_in_bytes", "missing")]


def test_pods_without_hugetlb_controller_have_no_hugepage_findings(tmp_path: Path) -> None:
    plain = json.loads(json.dumps(OBJECT))
    del plain["status"]["nodeAllocatableResourceClaimStatuses"][0]["mapping"][2]
    with kubepods_tree("cpu", "memory", unified=False) as tree:
        tree.make("burstable", UID, CONTAINER)
        _, document = audit(tree, write_pod_list(tmp_path / "pods.json", plain), "--all")
        assert not [knob for knob in document["pods"][0]["knobs"] if knob["sizeKiB"]]
        assert "hugepages: pods have no hugetlb controller, so no limit applies" in document["notKnown"]
        _, document = audit(tree, write_pod_list(tmp_path / "pods.json", OBJECT), "--all")
    missing = [knob["sizeKiB"] for knob in document["pods"][0]["knobs"] if knob["verdict"] == "missing"]
    assert missing == [2048] * 4


def test_oom_score_of_a_real_process_is_compared(tmp_path: Path) -> None:
    pods, config = write_pod_list(tmp_path / "pods.json", OBJECT), tmp_path / "config.json"
    config.write_text("{}")
    more = ("p", "--kubelet-config", str(config))
    with tree_of_a_pod(False) as tree, subprocess.Popen(["sleep", "3600"]) as process:
        try:
            procs = CGROUPFS / "memory" / tree.directory("burstable", UID, CONTAINER) / "cgroup.procs"
            procs.write_text(f"{process.pid}")
            score = Path(f"/proc/{process.pid}/oom_score_adj")
            score.write_text("1000")
            code, wrong = audit(tree, pods, *more)
            (found,) = [knob for knob in wrong["pods"][0]["knobs"] if knob["knob"] == "OOM score"]
            score.write_text(f"{found['expected'][0]}")
            _, right = audit(tree, pods, *more)
        finally:
            process.kill()
    assert code == 1
    assert (found["actual"], found["verdict"]) == (1000, "higher")
    assert 3 <= found["expected"][0] < 1000
    (now,) = [knob for knob in right["pods"][0]["knobs"] if knob["knob"] == "OOM score"]
    assert now["verdict"] == "match"
    swap = [knob for knob in right["pods"][0]["knobs"] if knob["knob"] == "swap limit"]
    assert [knob["expected"] for knob in swap] == [[LIMIT, KEPT]]
