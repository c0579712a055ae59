"""Verdicts on the devices that drivers declare, from the rules for parts of the host."""

from dataclasses import replace
from typing import Any, Final

import pytest
from gpu_samples import ABSENT, gpu_set, pci_sample
from paper import PaperNode, codes, group_sample, pods_sample, pool_sample
from paper_gpus import GpuNode

from agent.devices.inventory import gpu_device
from agent.devices.taints import reported_devices
from agent.health.declared.state import REMOVED_MAX
from agent.health.declared.verdicts import DeclaredGpuRuleInput, evaluate_gpu_mismatch
from agent.health.rules import OK
from agent.model.claim import DeviceRef
from agent.model.cpuset import parse_cpus
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredGpuDevice,
    DeclaredHugepageDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.model.gpu import NvmlReturnCode
from agent.model.health import DeviceHealth, Finding, Health, Severity
from agent.model.machine_samples import PciSample
from agent.model.persistent_faults import KnownGpu
from agent.model.reading import SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS
from agent.serve.health.service import devices_of_socket

DRIVER: Final = "a.example.com"
GPU_0: Final = "0000:1b:00.0"
CPUS: Final = DeclaredCpuDevice(parse_cpus("1"), 0, exclusive=True, isolated=False)


def declared_device(name: str, part: DeclaredPart, driver: str = DRIVER, lease_s: int = 0) -> DriverDevice:
    return DriverDevice(driver, "node-a", name, part, lease_s)


def gpu(pci: str = "", uuid: str = "", gi: int = -1, ci: int = -1) -> DeclaredGpuDevice:
    return DeclaredGpuDevice(pci, uuid, gi, ci)


class Declaring:
    """Mixin for a simulated node whose drivers declare devices."""

    files: tuple[DeclaredFile, ...] = ()
    bus: SourceSample | None = None
    functions: tuple[PciSample, ...] | None = None

    def declare(self, *devices: DriverDevice, error: str = "") -> None:
        """Set all declared devices."""
        drivers = sorted({device.driver for device in devices}) or [DRIVER] * bool(error)
        self.files = tuple(
            DeclaredFile(driver, tuple(device for device in devices if device.driver == driver), error)
            for driver in drivers
        )

    def snapshot(self) -> Snapshot:
        read: Snapshot = super().snapshot()  # type: ignore[misc]
        sources = read.sources if self.bus is None else (*read.sources, self.bus)
        return replace(read, declared=self.files, sources=sources, pci=self.functions)


class Node(Declaring, PaperNode):
    """Simulated node with two CPUs and declared devices."""


class NodeWithGpus(Declaring, GpuNode):
    """Simulated node with GPUs and declared devices."""


def declared_verdict(report: Report, name: str, driver: str = DRIVER) -> DeviceHealth:
    return next(device for device in report.devices if (device.driver, device.device) == (driver, name))


# --- parts of the host -------------------------------------------------------------------------------------


def test_offline_declared_cpu_makes_only_its_device_unhealthy() -> None:
    node = Node()
    node.declare(declared_device("cpuset-0", CPUS._replace(cpus=1)), declared_device("cpuset-1", CPUS))
    node.next()
    node.set_online("0")
    report = node.next()
    assert declared_verdict(report, "cpuset-0").health is Health.HEALTHY
    device = declared_verdict(report, "cpuset-1")
    assert device.health is Health.UNHEALTHY
    assert "CPU 1 offline" in device.message
    assert "declared" in device.message


def test_declared_part_that_does_not_exist_is_unhealthy() -> None:
    node = Node()
    pages = DeclaredHugepageDevice(2048, 512, 3)
    node.declare(
        declared_device("cpuset-9", CPUS._replace(cpus=parse_cpus("8-15"))), declared_device("huge-3", pages)
    )
    report = node.next()
    for name, words in (("cpuset-9", "8-15"), ("huge-3", "no pool of 2mi pages on NUMA node 3")):
        assert declared_verdict(report, name).health is Health.UNHEALTHY
        assert words in declared_verdict(report, name).message


def test_declared_hugepages_are_healthy_until_pool_shrinks() -> None:
    node = Node()
    node.pool(pool_sample(10))
    node.declare(declared_device("huge-0", DeclaredHugepageDevice(2048, 10, 0)))
    assert declared_verdict(node.next(), "huge-0").health is Health.HEALTHY
    node.pool(pool_sample(9))
    assert codes(declared_verdict(node.next(), "huge-0")) == ["mem.hugepages.pool_shrunk"]


def test_declared_device_is_unknown_while_source_is_stalled() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS))
    node.next()
    node.stuck.add("cpus")
    assert declared_verdict(node.next(10), "cpuset-1").health is Health.UNKNOWN


def test_driver_can_lengthen_lease_but_not_shorten_it() -> None:
    node = Node()
    node.declare(declared_device("long", CPUS, lease_s=120), declared_device("short", CPUS, lease_s=1))
    report = node.next()
    assert (declared_verdict(report, "long").timeout_s, declared_verdict(report, "short").timeout_s) == (
        120,
        30,
    )


def test_throttling_of_exclusive_cpus_is_cause_of_their_device() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS))
    still = group_sample(7)._replace(cpus=CPUS.cpus, cpu_periods=100, cpu_throttled=0)
    node.groups = [still]
    node.pods = pods_sample({still.pod_uid: (DeviceRef(DRIVER, "node-a", "cpuset-1"),)})
    node.next(2)
    for throttled in (5, 10, 15, 20):
        node.groups = [still._replace(cpu_periods=100 + throttled, cpu_throttled=throttled)]
        report = node.next(2)
    device = declared_verdict(report, "cpuset-1")
    assert codes(device) == ["cgroup.cpu.throttled_exclusive"]
    assert device.severity is Severity.DEGRADED
    assert "container container-a" in device.message
    assert all(note.devices == (f"{DRIVER}/node-a/cpuset-1",) for note in report.notes)


def test_unread_pci_function_is_unreported_then_unknown() -> None:
    node = Node()
    node.declare(declared_device("nic-0", DeclaredPciDevice(GPU_0, "")))
    node.bus = SourceSample("pci", SourceState.STARTING, node.now_ns, 60 * NS, 0, "", vital=False)
    assert not [device for device in node.next().devices if device.driver]
    node.next()
    device = declared_verdict(node.next(), "nic-0")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["declared.unseen"])
    node.bus = node.bus._replace(state=SourceState.OK, passes=1, beat_ns=node.now_ns)
    node.functions = (pci_sample(),)
    assert declared_verdict(node.next(), "nic-0").health is Health.HEALTHY
    node.bus = node.bus._replace(state=SourceState.STARTING)  # for another that was declared since
    assert declared_verdict(node.next(), "nic-0").health is Health.HEALTHY


# --- declarations of drivers --------------------------------------------------------------------------------


def test_driver_gets_host_devices_until_it_declares_its_own() -> None:
    node = Node()
    report = node.next()
    assert [device.device for device in devices_of_socket(report, DRIVER)] == ["cpu-node0"]
    node.declare(declared_device("cpuset-1", CPUS), declared_device("cpuset-2", CPUS, "b.example.com"))
    report = node.next()
    assert [device.device for device in devices_of_socket(report, DRIVER)] == ["cpuset-1"]
    assert [device.device for device in devices_of_socket(report, "b.example.com")] == ["cpuset-2"]
    assert [device.device for device in devices_of_socket(report, "c.example.com")] == ["cpu-node0"]
    node.declare()
    report = node.next(700)
    assert list(devices_of_socket(report, DRIVER)) == []


def test_removed_device_is_unknown_for_ten_minutes_then_absent() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS))
    node.next()
    node.declare()
    device = declared_verdict(node.next(), "cpuset-1")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["declared.gone"])
    assert declared_verdict(node.next(590), "cpuset-1").since == device.since
    assert not [device for device in node.next(20).devices if device.driver]
    assert not [subject for subject, _ in node.state.conditions if subject.startswith(DRIVER)]


def test_redeclared_device_is_evaluated_again() -> None:
    node = Node()
    for present in (True, False, True):
        node.declare(*[declared_device("cpuset-1", CPUS)] * present)
        report = node.next()
    assert declared_verdict(report, "cpuset-1").health is Health.HEALTHY
    assert not node.state.declared.removed


def test_reused_name_keeps_no_state_of_previous_device() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS._replace(cpus=parse_cpus("1"))))
    node.next()
    node.set_online("0")
    assert declared_verdict(node.next(), "cpuset-1").health is Health.UNHEALTHY
    node.declare(declared_device("cpuset-1", CPUS._replace(cpus=parse_cpus("0"))))
    device = declared_verdict(node.next(), "cpuset-1")
    assert (device.health, device.causes) == (Health.HEALTHY, ())
    node.declare(declared_device("cpuset-1", CPUS._replace(cpus=parse_cpus("1"))))
    assert declared_verdict(node.next(), "cpuset-1").since == node.now


def test_unchanged_declaration_keeps_faults() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS))
    node.next()
    node.set_online("0")
    before = declared_verdict(node.next(), "cpuset-1")
    node.declare(declared_device("cpuset-1", CPUS, lease_s=60))
    assert declared_verdict(node.next(), "cpuset-1").causes == before.causes


@pytest.mark.parametrize("before", [CPUS, DeclaredPciDevice("0000:3b:00.0", ""), None])
def test_changed_pci_function_is_unknown_until_read(
    before: DeclaredPart | None,
) -> None:
    node = Node()
    node.functions = (pci_sample(),)
    node.declare(declared_device("dev-0", before or CPUS))
    node.bus = SourceSample("pci", SourceState.OK, node.now_ns + NS, 60 * NS, 0, "", passes=1, vital=False)
    node.next()
    if before is None:
        node.declare()
        node.next()
    node.declare(declared_device("dev-0", DeclaredPciDevice(GPU_0, "")))
    node.bus, node.functions = node.bus._replace(state=SourceState.STARTING), None
    for _ in range(3):
        assert codes(declared_verdict(node.next(), "dev-0")) == ["declared.unseen"]
    node.bus = node.bus._replace(state=SourceState.OK, passes=2, beat_ns=node.now_ns)
    node.functions = (pci_sample(),)
    assert declared_verdict(node.next(), "dev-0").health is Health.HEALTHY


def test_changing_device_names_do_not_grow_state() -> None:
    node = Node()
    for number in range(5):
        node.declare(*(declared_device(f"cpuset-{number}-{part}", CPUS) for part in range(1000)))
        report = node.next()
    node.declare()
    report = node.next()
    gone = [device.device for device in report.devices if device.driver]
    assert len(gone) == REMOVED_MAX
    assert "cpuset-4-0" in gone
    assert "cpuset-0-0" not in gone


def test_same_name_in_two_pools_is_two_devices() -> None:
    node = Node()
    here = declared_device("cpuset-0", CPUS._replace(cpus=0b01))
    node.declare(here, here._replace(pool="other", part=CPUS))
    node.next()
    node.set_online("0")
    report = node.next()
    healths = {device.pool: device.health for device in report.devices if device.device == "cpuset-0"}
    assert healths == {"node-a": Health.HEALTHY, "other": Health.UNHEALTHY}


def test_invalid_file_is_a_note_and_old_declaration_stays() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS), error="devices.d/a.example.com.toml: device 2: no name")
    report = node.next()
    assert declared_verdict(report, "cpuset-1").health is Health.HEALTHY
    (note,) = report.notes
    assert note.subject == f"driver {DRIVER}"
    assert note.cause.code == "declared.file"
    assert "device 2: no name" in note.cause.evidence
    assert node.next(5).notes == report.notes


def test_driver_with_invalid_first_file_gets_no_host_devices() -> None:
    node = Node()
    node.declare(error="devices.d/a.example.com.toml: is not UTF-8 text")
    report = node.next()
    assert list(devices_of_socket(report, DRIVER)) == []
    assert list(reported_devices(report, DRIVER)) == []
    assert [note.cause.code for note in report.notes] == ["declared.file"]
    assert [device.device for device in devices_of_socket(report, "c.example.com")] == ["cpu-node0"]


# --- GPUs --------------------------------------------------------------------------------------------------


def uuid_of(node: GpuNode, number: int) -> str:
    return node.gpus[number].uuid


@pytest.mark.parametrize("by", ["pci", "uuid", "both"])
def test_declared_gpu_has_health_of_host_gpu(by: str) -> None:
    node = NodeWithGpus()
    names: dict[str, Any] = {"pci": GPU_0, "uuid": uuid_of(node, 0)}
    node.declare(declared_device("mine", gpu(**(names if by == "both" else {by: names[by]}))))
    assert declared_verdict(node.next(), "mine").health is Health.HEALTHY
    node.gpus[0] = replace(node.gpus[0], status=NvmlReturnCode.LOST)
    report = node.next()
    mine, host = declared_verdict(report, "mine"), declared_verdict(report, "gpu-0", "")
    assert mine.health is Health.UNHEALTHY
    assert (mine.message, mine.causes, mine.attributes) == (host.message, host.causes, host.attributes)


def test_unknown_declared_gpu_is_unhealthy_and_named() -> None:
    node = NodeWithGpus()
    node.declare(declared_device("mine", gpu(uuid="GPU-none")))
    device = declared_verdict(node.next(), "mine")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["gpu.not_found"])
    assert "GPU-none is not among the 2 GPUs" in device.message


def test_declared_gpu_may_appear_while_nvml_identifies_its_gpus() -> None:
    node = NodeWithGpus()
    node.change(1, uuid="", bus="", passes=0, beat_ns=node.now_ns)
    node.hanging.add(1)
    node.declare(declared_device("mine", gpu(uuid="GPU-none")))
    assert "gpu.not_found" not in codes(declared_verdict(node.rest(5), "mine"))
    assert "gpu.not_found" in codes(declared_verdict(node.rest(70), "mine"))


def test_gpu_in_wrong_slot_is_unhealthy_and_both_are_named() -> None:
    node = NodeWithGpus()
    node.declare(
        declared_device("moved", gpu("0000:2b:00.0", uuid_of(node, 0))),
        declared_device("other", gpu(GPU_0, "GPU-none")),
    )
    report = node.next()
    for name, words in (
        ("moved", f"{uuid_of(node, 0)} is at {GPU_0}, declared at 0000:2b:00.0"),
        ("other", f"{GPU_0} is {uuid_of(node, 0)}, declared as GPU-none"),
    ):
        device = declared_verdict(report, name)
        assert (device.health, codes(device)) == (Health.UNHEALTHY, ["gpu.mismatch"])
        assert words in device.message


def test_gpu_with_unknown_address_has_no_mismatch() -> None:
    known = KnownGpu(0, "GPU-1", "", "H100")
    what = gpu(pci=GPU_0, uuid="GPU-1")
    assert evaluate_gpu_mismatch(DeclaredGpuRuleInput(what, known, gpu_device(0), gpu_set())) is OK
    elsewhere = evaluate_gpu_mismatch(
        DeclaredGpuRuleInput(what, known._replace(bus="0000:ff:00.0"), gpu_device(0), gpu_set())
    )
    assert isinstance(elsewhere, Finding)


def test_absent_declared_instance_is_unhealthy() -> None:
    node = NodeWithGpus(1, migs={0: [(1, 0), (2, 0)]})
    mig = node.gpus[0].migs[1]
    node.declare(
        declared_device("by-uuid", gpu(uuid=mig.uuid)),
        declared_device("by-number", gpu(GPU_0, gi=1, ci=0)),
        declared_device("none", gpu(GPU_0, gi=5, ci=0)),
    )
    report = node.next()
    assert [declared_verdict(report, name).health for name in ("by-uuid", "by-number", "none")] == [
        Health.HEALTHY,
        Health.HEALTHY,
        Health.UNHEALTHY,
    ]
    assert dict(declared_verdict(report, "by-uuid").attributes)["uuid"] == mig.uuid
    assert "has no instance 5/0" in declared_verdict(report, "none").message


def test_declared_instance_with_the_uuid_of_other_numbers_is_not_found() -> None:
    node = NodeWithGpus(1, migs={0: [(1, 0), (2, 0)]})
    mig, other = node.gpus[0].migs
    node.declare(
        declared_device("moved", gpu(GPU_0, other.uuid, gi=1, ci=0)),
        declared_device("replaced", gpu(GPU_0, "MIG-before", gi=1, ci=0)),
        declared_device("by-gpu", gpu(GPU_0, uuid_of(node, 0), gi=1, ci=0)),
    )
    report = node.next()
    uuids = [dict(declared_verdict(report, name).attributes).get("uuid") for name in ("moved", "by-gpu")]
    assert uuids == [other.uuid, mig.uuid]
    device = declared_verdict(report, "replaced")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["gpu.not_found"])
    assert "has no instance MIG-before" in device.message


def test_declared_gpu_is_not_reported_while_nvml_opens() -> None:
    node = NodeWithGpus(0)
    opening = SourceSample("nvml", SourceState.STARTING, node.now_ns, 10 * NS, 0, "", vital=False)
    node.nvml = opening
    node.declare(declared_device("mine", gpu(GPU_0)))
    assert not [device for device in node.next().devices if device.driver]
    device = declared_verdict(node.next(3), "mine")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["declared.unseen"])


def test_declared_gpu_without_nvml_is_unknown_not_missing() -> None:
    node = NodeWithGpus(0)
    node.nvml = SourceSample(
        "nvml", SourceState.ABSENT, node.now_ns, 10**10, 0, "no library", passes=1, vital=False
    )
    node.declare(declared_device("mine", gpu(GPU_0)))
    device = declared_verdict(node.next(), "mine")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["gpu.not_found"])
    assert f"{GPU_0} cannot be checked" in device.message
    assert "run nvidia-smi" in device.message, "comparing declarations would not help"


def test_declared_gpu_without_monitoring_is_unknown() -> None:
    node = Node()
    node.declare(declared_device("mine", gpu(GPU_0)))
    device = declared_verdict(node.next(), "mine")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["gpu.unwatched"])


def test_absent_cpus_of_group_attribute_it_to_no_device() -> None:
    node = Node()
    node.declare(declared_device("cpuset-1", CPUS))
    node.groups = [group_sample(7)._replace(cpus=ABSENT)]
    assert declared_verdict(node.next(2), "cpuset-1").health is Health.HEALTHY
