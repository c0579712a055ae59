"""Facts of a node for the audit of cgroups, and exclusive CPUs of the kubelet."""

import json
from pathlib import Path

import pytest
from audit_samples import kep_pod, sysfs_tree, v2_tree, write_cgroup
from cgroup_audit_pods import UID

from agent.cgroup_audit.kubelet_config import CgroupDriver
from agent.cgroup_audit.pod_parser import parse_pod
from agent.errors import ProbeError
from agent.model.reading import Absence, Missing, is_absent
from agent.native.cgroup_settings import CgroupSettingReader
from agent.sources.cgroup_facts import (
    kubelet_counts_claims,
    pod_uids_with_cgroups,
    read_cgroup_facts,
    read_hugepage_sizes,
)
from agent.sources.kubelet_files import parse_exclusive_cpus, read_exclusive_cpus

OTHER = "11111111-2222-4333-8444-555555555555"


def test_hugepage_sizes_are_those_of_the_kernel(tmp_path: Path) -> None:
    assert read_hugepage_sizes(tmp_path) == ()
    assert read_hugepage_sizes(sysfs_tree(tmp_path)) == (2048, 1048576)
    (tmp_path / "kernel/mm/hugepages/hugepages-64kB").mkdir()
    (tmp_path / "kernel/mm/hugepages/hugepages-0kB").mkdir()
    assert read_hugepage_sizes(tmp_path) == (64, 2048, 1048576)


def test_unlistable_hugepage_sizes_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "kernel/mm").mkdir(parents=True)
    (tmp_path / "kernel/mm/hugepages").write_text("")
    with pytest.raises(ProbeError, match="hugepages: Not a directory"):
        read_hugepage_sizes(tmp_path)


@pytest.mark.parametrize(
    ("version", "counts"),
    [
        ("", True),
        ("1.37", True),
        ("v1.37.2", True),
        ("1.38.0", True),
        ("1.38.0-alpha.1", True),
        ("v2.0.0", True),
        ("1.36.9", False),
        ("v1.36.0+k3s1", False),
        ("1.9.0-eks-12345", False),
    ],
)
def test_kubelets_count_claims_from_1_37_on(version: str, counts: bool) -> None:
    assert kubelet_counts_claims(version) is counts


@pytest.mark.parametrize("version", ["1", "v", "1.x", "latest", "1.37\n", "x1.37", "1.37 (beta)"])
def test_invalid_kubelet_version_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"kubelet version .* is not a version"):
        kubelet_counts_claims(version)


def test_cgroup_driver_with_more_pods_is_chosen(tmp_path: Path) -> None:
    pods = [parse_pod(kep_pod())]
    v2_tree(tmp_path, [kep_pod()], 274)
    write_cgroup(tmp_path, f"kubepods/burstable/pod{OTHER}", {})
    with CgroupSettingReader(tmp_path, ()) as reader:
        facts = read_cgroup_facts(reader, (), "/", pods, "")
        assert facts is not None
        assert facts.cgroup_driver is CgroupDriver.SYSTEMD
        others = [parse_pod(kep_pod("q", OTHER))]
        facts = read_cgroup_facts(reader, (), "/", others, "")
        assert facts is not None
        assert facts.cgroup_driver is CgroupDriver.CGROUPFS
    assert pod_uids_with_cgroups(tmp_path, CgroupDriver.SYSTEMD, "/") == {UID}
    assert pod_uids_with_cgroups(tmp_path, CgroupDriver.CGROUPFS, "/") == {OTHER}


# --- errors of the reader -------------------------------------------------------------------------------


def test_node_without_kubelet_cgroups_has_no_facts(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=f"{tmp_path}: no cgroup hierarchy is mounted here"):
        CgroupSettingReader(tmp_path, ())
    with pytest.raises(ProbeError, match="Not a directory"):
        CgroupSettingReader(Path("/dev/null"), ())


def test_too_many_hugepage_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="7 hugepage sizes, limit 6"):
        CgroupSettingReader(tmp_path, range(1, 8))


def test_absent_and_unreadable_cgroups_differ(tmp_path: Path) -> None:
    write_cgroup(tmp_path, "", {"cgroup.controllers": ""})
    write_cgroup(tmp_path, "a", {"cpu.weight": "torn", "cpu.max": "max 100000"})
    with CgroupSettingReader(tmp_path, (2048,)) as reader:
        knobs = reader.read("/a")
    assert knobs is not None
    assert knobs.weight == Missing(Absence.UNREADABLE, -4097)
    assert is_absent(knobs.memory)
    assert is_absent(knobs.pages[0].max)
    assert knobs.controllers is None  # not readable
    assert knobs.quota_us == 2**64 - 1


def test_closed_reader_can_be_closed_again_and_reads_nothing(tmp_path: Path) -> None:
    write_cgroup(tmp_path, "", {"cgroup.controllers": ""})
    reader = CgroupSettingReader(tmp_path, ())
    reader.close()
    reader.close()
    with pytest.raises(TypeError):
        reader.read("/")


# --- exclusive CPUs of the kubelet -----------------------------------------------------------------------


def test_exclusive_cpus_are_parsed_from_every_version(tmp_path: Path) -> None:
    path = tmp_path / "cpu_manager_state"
    entries = {UID: {"c1": "2-3", "c2": ""}}
    for more in ({}, {"podEntries": {}}, {"data": "{}", "dataChecksum": 7}):
        path.write_text(json.dumps({"policyName": "static", "entries": entries, "checksum": 0, **more}))
        assert read_exclusive_cpus(path) == {UID: {"c1": 0b1100}}
    assert parse_exclusive_cpus(b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}') == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"policyName":"static","entr',
        b"[]",
        b'{"entries":{}}',
        b'{"policyName":"static","entries":{"u":{"c1":"1-"}}}',
        b'{"policyName":"static","entries":{"a":"1"}}',
        b'{"policyName":"\xff"}',
        b"[" * 100_000,
    ],
)
def test_invalid_cpu_checkpoint_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "cpu_manager_state"
    path.write_bytes(data)
    with pytest.raises(ProbeError, match=str(path)):
        read_exclusive_cpus(path)


def test_absent_cpu_checkpoint_is_an_error_and_not_empty(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="No such file"):
        read_exclusive_cpus(tmp_path / "cpu_manager_state")
