"""Configuration of the kubelet: parsing, flags, drop-in files and its process; memory settings of cgroups."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from audit_samples import GI, MAX, procfs_tree, write_cgroup, write_process

from agent.cgroup_audit.cgroup_paths import reserved_path
from agent.cgroup_audit.kubelet_config import CgroupDriver, parse_flags, parse_kubelet_config, with_flags
from agent.cgroup_audit.pod_model import CPU, MEMORY
from agent.errors import UsageError
from agent.model.pod_findings import NO_LIMIT, CgroupSettings
from agent.model.reading import NEVER_READ, Absence, Missing
from agent.sources.cgroup_facts import CgroupMemoryReader, MachineSize, read_machine_size
from agent.sources.kubelet_files import read_config_file, read_running_config

# --- parsing -----------------------------------------------------------------------------------------------


def test_empty_configuration_has_the_kubelets_defaults() -> None:
    config = parse_kubelet_config({}, "test")
    assert config.enforced == ("pods",)
    assert (config.enforces_quota, config.period_us, config.has_qos_cgroups) == (True, 100_000, True)
    assert (config.throttling_factor, config.reservation_policy, config.swap_behavior) == (None, "", "")


def test_answer_of_the_endpoint_configz_is_a_configuration() -> None:
    found = parse_kubelet_config({"kubeletconfig": {"cpuCFSQuotaPeriod": "20ms"}}, "test")
    assert found.period_us == 20_000


@pytest.mark.parametrize(("given", "expected"), [({}, ()), ({"enforceNodeAllocatable": ["pods"]}, ("pods",))])
def test_configz_without_enforcement_enforces_nothing(
    given: dict[str, Any], expected: tuple[str, ...]
) -> None:
    """The kubelet shows all values in effect there, but leaves out empty lists."""
    found = parse_kubelet_config({"kubeletconfig": {"kind": "KubeletConfiguration", **given}}, "test")
    assert found.enforced == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("100ms", 100_000), ("500us", 500), ("0.05s", 50_000), ("0s", 100_000)]
)
def test_quota_period_is_a_duration(text: str, expected: int) -> None:
    assert parse_kubelet_config({"cpuCFSQuotaPeriod": text}, "test").period_us == expected


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ({"kind": "Pod"}, "kind: 'Pod' is not KubeletConfiguration"),
        ({"featureGates": {"MemoryQoS": "yes"}}, "featureGates.MemoryQoS: 'yes' is neither true nor false"),
        ({"memoryThrottlingFactor": 1.5}, "memoryThrottlingFactor: 1.5 is not a number above 0 and up to 1"),
        ({"cpuCFSQuotaPeriod": "9" * 400 + "s"}, "is not a duration, such as 100ms"),
        ({"cpuCFSQuotaPeriod": "soon"}, "cpuCFSQuotaPeriod: 'soon' is not a duration, such as 100ms"),
        ({"cgroupsPerQOS": "yes"}, "cgroupsPerQOS: 'yes' is neither true nor false"),
        ({"kubeReserved": {"memory": "much"}}, "kubeReserved.memory: 'much' is not a quantity"),
        ({"enforceNodeAllocatable": "pods"}, "enforceNodeAllocatable: is not a list of names"),
        ({"reservedSystemCPUs": "0-x"}, "reservedSystemCPUs: '0-x' is not a list of CPUs, such as 0-3"),
    ],
)
def test_invalid_field_is_refused_by_name(field: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        parse_kubelet_config(field, "test")


# --- flags -------------------------------------------------------------------------------------------------


def test_flags_are_read_with_and_without_equals_signs() -> None:
    flags = parse_flags(
        [
            *("--config", "/etc/k.yaml", "--v=2", "--feature-gates=MemoryQoS=true", "--cpu-cfs-quota"),
            *("--feature-gates", "A=false", "-kube-reserved=cpu=1", "--", "--system-reserved=cpu=9"),
        ]
    )
    assert flags == {
        "config": "/etc/k.yaml",
        "feature-gates": "MemoryQoS=true,A=false",
        "cpu-cfs-quota": "true",
        "kube-reserved": "cpu=1",
    }


def test_repeated_list_flag_has_all_its_values() -> None:
    flags = parse_flags(["--enforce-node-allocatable=pods", "--enforce-node-allocatable", "kube-reserved"])
    config = parse_kubelet_config(with_flags({}, flags), "test")
    assert config.enforced == ("pods", "kube-reserved")


def test_flag_with_underscores_is_the_flag_with_dashes() -> None:
    assert parse_flags(["--cpu_cfs_quota=false", "--feature_gates", "A=true"]) == {
        "cpu-cfs-quota": "false",
        "feature-gates": "A=true",
    }


def test_flags_take_precedence_and_gates_are_added() -> None:
    file = {"kubeReserved": {"cpu": "2"}, "cpuCFSQuota": True, "featureGates": {"A": True, "B": True}}
    flags = {"kube-reserved": "memory=1Gi", "cpu-cfs-quota": "false", "feature-gates": "B=false"}
    config = parse_kubelet_config(with_flags(file, flags), "test")
    assert (config.kube_reserved.keys(), config.enforces_quota) == ({MEMORY}, False)
    assert config.gates == {"A": True, "B": False}


@pytest.mark.parametrize(
    ("text", "expected"), [("none", ()), ("", ()), ("pods,kube-reserved", ("pods", "kube-reserved"))]
)
def test_enforcement_flag_is_a_list(text: str, expected: tuple[str, ...]) -> None:
    found = with_flags({}, {"enforce-node-allocatable": text})
    assert parse_kubelet_config(found, "test").enforced == expected


@pytest.mark.parametrize(
    ("name", "text"), [("feature-gates", "MemoryQoS"), ("feature-gates", "A=b"), ("cpu-cfs-quota", "maybe")]
)
def test_invalid_flag_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"--{name}: "):
        with_flags({}, {name: text})


# --- the kubelet's process ---------------------------------------------------------------------------------


def test_configuration_is_read_from_the_kubelets_process(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path, "memoryThrottlingFactor: 0.8\n", "--kube-reserved=cpu=500m")
    config = read_running_config(proc).config
    assert config is not None
    assert (config.source, config.throttling_factor) == ("/var/lib/kubelet/config.yaml", 0.8)
    assert config.kube_reserved[CPU].milli == 500


def test_drop_in_files_are_merged_in_order(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path, "featureGates:\n  A: true\ncpuCFSQuota: false\n", "--config-dir=/etc/k.d")
    directory = proc / "77/root/etc/k.d"
    directory.mkdir(parents=True)
    (directory / "20.conf").write_text("featureGates:\n  B: false\n")
    (directory / "10.conf").write_text('{"featureGates": {"B": true}, "cpuCFSQuota": true}')
    (directory / "30.yaml").write_text("featureGates:\n  A: false\n")  # the kubelet reads *.conf only
    config = read_running_config(proc).config
    assert config is not None
    assert (config.gates, config.enforces_quota) == ({"A": True, "B": False}, True)


def test_null_in_a_drop_in_file_restores_the_default(tmp_path: Path) -> None:
    file = "featureGates: {A: true, B: true}\nkubeReserved: {cpu: '1'}\ncpuCFSQuota: false\n"
    proc = procfs_tree(tmp_path, file, "--config-dir=/etc/k.d")
    (proc / "77/root/etc/k.d").mkdir(parents=True)
    text = "featureGates: {A: null}\nkubeReserved:\ncpuCFSQuota: ~\nsystemReserved: {cpu: null}\n"
    (proc / "77/root/etc/k.d/10.conf").write_text(text)
    config = read_running_config(proc).config
    assert config is not None
    assert (config.gates, config.kube_reserved, config.enforces_quota) == ({"B": True}, {}, True)
    assert config.system_reserved == {}


@pytest.mark.parametrize(
    ("flags", "drop_in", "expected"),
    [
        ((), "", ()),
        (("--config-dir=/etc/k.d",), "cpuCFSQuota: true\n", ("pods",)),
        (("--config-dir=/etc/k.d",), "enforceNodeAllocatable: []\n", ()),
    ],
)
def test_empty_enforcement_of_the_file_is_the_default_with_drop_in_files(
    tmp_path: Path, flags: tuple[str, ...], drop_in: str, expected: tuple[str, ...]
) -> None:
    """The kubelet writes its file to JSON without empty lists before it merges drop-in files."""
    proc = procfs_tree(tmp_path, "enforceNodeAllocatable: []\n", *flags)
    (proc / "77/root/etc/k.d").mkdir(parents=True)
    (proc / "77/root/etc/k.d/10.conf").write_text(drop_in or "{}")
    config = read_running_config(proc).config
    assert config is not None
    assert config.enforced == expected


def test_drop_in_files_of_a_subdirectory_are_merged_in_its_place(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path, "cpuCFSQuota: true\n", "--config-dir=/etc/k.d")
    directory = proc / "77/root/etc/k.d"
    (directory / "20-gpu.conf").mkdir(parents=True)  # a directory, although it is named as a file
    (directory / "10.conf").write_text("cpuCFSQuota: true\nfeatureGates:\n  A: true\n")
    (directory / "20-gpu.conf/10.conf").write_text("cpuCFSQuota: false\nfeatureGates:\n  A: false\n")
    (directory / "30.conf").write_text("featureGates:\n  B: true\n")
    config = read_running_config(proc).config
    assert config is not None
    assert (config.gates, config.enforces_quota) == ({"A": False, "B": True}, False)


@pytest.mark.parametrize(("slash", "is_read"), [("", False), ("/", True)])
def test_linked_drop_in_directory_is_read_with_a_final_slash(
    tmp_path: Path, slash: str, is_read: bool
) -> None:
    proc = procfs_tree(tmp_path, "cpuCFSQuota: true\n", f"--config-dir=/etc/k.d{slash}")
    (proc / "77/root/mnt/k.d").mkdir(parents=True)
    (proc / "77/root/mnt/k.d/10.conf").write_text("cpuCFSQuota: false\n")
    (proc / "77/root/etc").mkdir()
    (proc / "77/root/etc/k.d").symlink_to("/mnt/k.d")
    config = read_running_config(proc).config
    assert config is not None
    assert config.enforces_quota is not is_read


def test_drop_in_directory_with_too_many_files_is_a_reason(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path, "cpuCFSQuota: true\n", "--config-dir=/etc/k.d")
    (proc / "77/root/etc/k.d").mkdir(parents=True)
    for number in range(1001):
        (proc / f"77/root/etc/k.d/{number}").touch()
    found = read_running_config(proc)
    assert found.config is None
    assert found.reason == "directory /etc/k.d: over 1000 files, the limit; remove some"


def test_absolute_link_leads_to_the_kubelets_root_directory(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path, "cpuCFSQuota: false\n", "--config-dir=/etc/k.d")
    root = proc / "77/root"
    (root / "mnt/disk").mkdir(parents=True)
    (root / "var/lib/kubelet").rename(root / "mnt/disk/kubelet")
    (root / "var/lib/kubelet").symlink_to("/mnt/disk/kubelet")
    (root / "etc/k.d").mkdir(parents=True)
    (root / "etc/gates").write_text("featureGates:\n  A: true\n")
    (root / "etc/k.d/10.conf").symlink_to("/etc/gates")
    config = read_running_config(proc).config
    assert config is not None
    assert (config.gates, config.enforces_quota) == ({"A": True}, False)


def test_link_to_itself_is_a_reason_and_no_configuration(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path)
    path = proc / "77/root/var/lib/kubelet/config.yaml"
    path.unlink()
    path.symlink_to("config.yaml")
    found = read_running_config(proc)
    assert found.config is None
    assert found.reason == "file /var/lib/kubelet/config.yaml: over 40 symbolic links, the limit"


@pytest.mark.parametrize(("no", "yes"), [("False", "True"), ("no", "yes"), ("OFF", "On")])
def test_other_spellings_of_booleans_are_read(tmp_path: Path, no: str, yes: str) -> None:
    proc = procfs_tree(tmp_path, f"cpuCFSQuota: {no}\nfeatureGates: {{A: {yes}}}\n")
    config = read_running_config(proc).config
    assert config is not None
    assert (config.enforces_quota, config.gates) == (False, {"A": True})


def test_kubelet_without_a_file_has_its_flags(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path)
    (proc / "77/cmdline").write_bytes(b"kubelet\0--cpu-cfs-quota=false\0")
    config = read_running_config(proc).config
    assert config is not None
    assert (config.source, config.enforces_quota) == ("flags", False)


def test_machine_without_a_kubelet_has_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5/comm").write_text("k3s-server\n")
    assert read_running_config(tmp_path) == (None, "no process named kubelet")


def test_two_kubelets_have_no_configuration(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path)
    (proc / "78").mkdir()
    (proc / "78/comm").write_text("kubelet\n")
    assert read_running_config(proc) == (None, "2 processes named kubelet")


@pytest.mark.parametrize("text", ["cpuCFSQuota: [\n", "cpuCFSQuota: 7\n"], ids=["yaml", "field"])
def test_unusable_file_is_a_reason_and_no_configuration(tmp_path: Path, text: str) -> None:
    found = read_running_config(procfs_tree(tmp_path, text))
    assert found.config is None
    assert found.reason


def test_missing_file_of_the_kubelet_is_named(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path)
    (proc / "77/root/var/lib/kubelet/config.yaml").unlink()
    found = read_running_config(proc)
    assert found.config is None
    assert found.reason.endswith("config.yaml: No such file or directory")


def test_given_file_is_the_configuration_in_effect(tmp_path: Path) -> None:
    path = tmp_path / "configz"
    path.write_bytes(msgspec.json.encode({"kubeletconfig": {"memorySwap": {"swapBehavior": "LimitedSwap"}}}))
    assert read_config_file(path).swap_behavior == "LimitedSwap"


@pytest.mark.parametrize("text", ["[]", "kind: Pod\n", "{", ""], ids=["list", "kind", "json", "empty"])
def test_unusable_given_file_is_refused_with_the_command(tmp_path: Path, text: str) -> None:
    path = tmp_path / "configz"
    path.write_text(text)
    with pytest.raises(UsageError, match="proxy/configz"):
        read_config_file(path)


def test_missing_given_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_config_file(tmp_path / "none")


# --- the machine, and memory settings of cgroups -----------------------------------------------------------


def test_machine_size_counts_online_and_present_cpus(tmp_path: Path) -> None:
    proc = procfs_tree(tmp_path / "proc", swap_kib=4)
    cpus = tmp_path / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "online").write_text("0,2-3\n")
    (cpus / "present").write_text("0-3\n")
    assert read_machine_size(proc, tmp_path / "sys") == MachineSize(64 * GI, 4096, (3, 4))


def test_unreadable_machine_size_is_unknown(tmp_path: Path) -> None:
    assert read_machine_size(tmp_path, tmp_path) == MachineSize(None, None, ())


EMPTY: Final = CgroupSettings(
    None, NEVER_READ, NEVER_READ, NEVER_READ, NEVER_READ, NEVER_READ, NEVER_READ, NEVER_READ, ()
)


def read_memory(root: Path, version: int = 2) -> CgroupSettings:
    reader = CgroupMemoryReader(root / "cgroup", root / "proc", version)
    return reader.add_memory(EMPTY, "/a/b", with_oom_score=True)


def test_memory_qos_of_a_cgroup_is_read(tmp_path: Path) -> None:
    files = {"memory.high": 4096, "memory.min": 0, "memory.low": MAX, "memory.swap.max": 0}
    write_cgroup(tmp_path / "cgroup", "a/b", files)
    found = read_memory(tmp_path)
    assert (found.high, found.min, found.low, found.swap) == (4096, 0, NO_LIMIT, 0)
    assert found.oom_score == NEVER_READ


def test_swap_limit_of_a_v1_cgroup_includes_memory(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "cgroup", "memory/a/b", {"memory.memsw.limit_in_bytes": 8192})
    found = read_memory(tmp_path, 1)
    assert (found.swap, found.high) == (8192, NEVER_READ)


def test_unparsable_memory_file_is_unreadable(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "cgroup", "a/b", {"memory.high": "torn"})
    high = read_memory(tmp_path).high
    assert isinstance(high, Missing)
    assert high.absence is Absence.UNREADABLE


def test_oom_score_is_that_of_the_oldest_process(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "cgroup", "a/b", {"cgroup.procs": "12\n11\n13"})
    write_process(tmp_path / "proc", 11, 500, started=200)
    write_process(tmp_path / "proc", 12, 7, started=300)
    write_process(tmp_path / "proc", 13, -997, started=100)
    assert read_memory(tmp_path).oom_score == -997


def test_oom_score_is_found_in_a_cgroup_below(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "cgroup", "a/b", {"cgroup.procs": ""})
    write_cgroup(tmp_path / "cgroup", "a/b/container", {"cgroup.procs": "11"})
    write_process(tmp_path / "proc", 11, 500)
    assert read_memory(tmp_path).oom_score == 500


def test_ended_process_has_no_oom_score(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "cgroup", "a/b", {"cgroup.procs": "11"})
    assert read_memory(tmp_path).oom_score == NEVER_READ


def test_processes_of_another_pid_namespace_are_noted(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "cgroup", "a/b", {"cgroup.procs": "0\n0"})
    reader = CgroupMemoryReader(tmp_path / "cgroup", tmp_path / "proc", 2)
    assert reader.add_memory(EMPTY, "/a/b", with_oom_score=True).oom_score == NEVER_READ
    assert reader.has_hidden_processes


@pytest.mark.parametrize(
    ("name", "driver", "expected"),
    [
        ("/system.slice", CgroupDriver.SYSTEMD, "/system.slice"),
        ("/kube-daemons.slice", CgroupDriver.SYSTEMD, "/kube.slice/kube-daemons.slice"),
        ("/kube/daemons", CgroupDriver.CGROUPFS, "/kube/daemons"),
        ("kube", CgroupDriver.CGROUPFS, "/kube"),
    ],
)
def test_reserved_cgroup_has_the_path_of_its_driver(name, driver, expected) -> None:
    assert reserved_path(name, driver) == expected
