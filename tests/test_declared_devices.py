"""What is said of the devices that drivers declare: the host's verdicts, of parts of it."""

from dataclasses import replace
from typing import Any, Final

import pytest
from gpu_samples import ABSENT, gpu_set, pci_sample
from paper import PaperNode, codes, group_sample, pool_sample
from paper_gpus import GpuNode

from agent.devices.inventory import gpu_device
from agent.health.declared.gpus import DeclaredGpuView, mismatch
from agent.health.declared.state import GONE_KEPT
from agent.health.rules import OK
from agent.model.cpuset import parse_cpus
from agent.model.declared import (
    Declared,
    DeclaredCpus,
    DeclaredFile,
    DeclaredGpu,
    DeclaredHugepages,
    DeclaredPci,
    What,
)
from agent.model.faults import KnownGpu
from agent.model.gpu import Status
from agent.model.health import DeviceHealth, Finding, Health, Severity
from agent.model.pci import PciSample
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.source import SourceSample, SourceState
from agent.model.time import NS
from agent.serve.health.feed import devices_for

DRIVER: Final = "a.example.com"
GPU_0: Final = "0000:1b:00.0"
CPUS: Final = DeclaredCpus(parse_cpus("1"), 0, exclusive=True, isolated=False)


def declared(name: str, what: What, driver: str = DRIVER, lease_s: int = 0) -> Declared:
    return Declared(driver, "node-a", name, what, lease_s)


def gpu(pci: str = "", uuid: str = "", gi: int = -1, ci: int = -1) -> DeclaredGpu:
    return DeclaredGpu(pci, uuid, gi, ci)


class Declaring:
    """Makes a node on paper one whose drivers declare devices."""

    files: tuple[DeclaredFile, ...] = ()
    bus: SourceSample | None = None
    functions: tuple[PciSample, ...] | None = None

    def declare(self, *devices: Declared, error: str = "") -> None:
        """All that is declared from now on."""
        drivers = sorted({device.driver for device in devices}) or [DRIVER] * bool(error)
        self.files = tuple(
            DeclaredFile(driver, tuple(one for one in devices if one.driver == driver), error)
            for driver in drivers
        )

    def snapshot(self) -> Snapshot:
        read: Snapshot = super().snapshot()  # type: ignore[misc]
        sources = read.sources if self.bus is None else (*read.sources, self.bus)
        return replace(read, declared=self.files, sources=sources, pci=self.functions)


class Node(Declaring, PaperNode):
    """A node of two CPUs."""


class NodeWithGpus(Declaring, GpuNode):
    """A node of GPUs."""


def one(report: Report, name: str, driver: str = DRIVER) -> DeviceHealth:
    return next(device for device in report.devices if (device.driver, device.device) == (driver, name))


# --- parts of the host -------------------------------------------------------------------------------------


def test_a_declared_cpu_that_goes_offline_makes_its_device_unhealthy_and_no_other() -> None:
    node = Node()
    node.declare(declared("cpuset-0", CPUS._replace(cpus=1)), declared("cpuset-1", CPUS))
    node.next()
    node.online("0")
    report = node.next()
    assert one(report, "cpuset-0").health is Health.HEALTHY
    device = one(report, "cpuset-1")
    assert device.health is Health.UNHEALTHY
    assert "CPU 1 offline" in device.message
    assert "declared" in device.message


def test_what_does_not_exist_is_unhealthy_and_says_so() -> None:
    node = Node()
    pages = DeclaredHugepages(2048, 512, 3)
    node.declare(declared("cpuset-9", CPUS._replace(cpus=parse_cpus("8-15"))), declared("huge-3", pages))
    report = node.next()
    for name, words in (("cpuset-9", "8-15"), ("huge-3", "no pool of 2mi pages on node 3")):
        assert one(report, name).health is Health.UNHEALTHY
        assert words in one(report, name).message


def test_pages_that_are_declared_and_there_are_healthy_until_the_pool_shrinks() -> None:
    node = Node()
    node.pool(pool_sample(10))
    node.declare(declared("huge-0", DeclaredHugepages(2048, 10, 0)))
    assert one(node.next(), "huge-0").health is Health.HEALTHY
    node.pool(pool_sample(9))
    assert codes(one(node.next(), "huge-0")) == ["mem.hugepages.pool_shrunk"]


def test_a_declared_device_is_unknown_when_its_source_stands_still() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS))
    node.next()
    node.stuck.add("cpus")
    assert one(node.next(10), "cpuset-1").health is Health.UNKNOWN


def test_a_driver_may_ask_for_a_longer_lease_and_never_gets_a_shorter_one() -> None:
    node = Node()
    node.declare(declared("long", CPUS, lease_s=120), declared("short", CPUS, lease_s=1))
    report = node.next()
    assert (one(report, "long").timeout_s, one(report, "short").timeout_s) == (120, 30)


def test_throttling_of_exclusive_cpus_is_a_cause_of_the_device_that_they_are() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS))
    still = group_sample(7)._replace(cpus=CPUS.cpus, cpu_periods=100, cpu_throttled=0)
    node.groups = [still]
    node.next(2)
    for throttled in (5, 10, 15, 20):
        node.groups = [still._replace(cpu_periods=100 + throttled, cpu_throttled=throttled)]
        report = node.next(2)
    device = one(report, "cpuset-1")
    assert codes(device) == ["cgroup.cpu.throttled_exclusive"]
    assert device.severity is Severity.DEGRADED
    assert "container container-a" in device.message
    assert all(note.devices == (f"{DRIVER}/node-a/cpuset-1",) for note in report.notes)


def test_a_function_that_nobody_has_looked_for_is_not_told_of_and_then_unknown() -> None:
    node = Node()
    node.declare(declared("nic-0", DeclaredPci(GPU_0, "")))
    node.bus = SourceSample("pci", SourceState.STARTING, node.now_ns, 60 * NS, 0, "", vital=False)
    assert not [device for device in node.next().devices if device.driver]
    node.next()
    device = one(node.next(), "nic-0")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["declared.unseen"])
    node.bus = node.bus._replace(state=SourceState.OK, passes=1, beat_ns=node.now_ns)
    node.functions = (pci_sample(),)
    assert one(node.next(), "nic-0").health is Health.HEALTHY
    node.bus = node.bus._replace(state=SourceState.STARTING)  # for another that was declared since
    assert one(node.next(), "nic-0").health is Health.HEALTHY


# --- who declares what -------------------------------------------------------------------------------------


def test_a_driver_is_told_of_the_host_until_it_declares_and_of_its_own_from_then_on() -> None:
    node = Node()
    report = node.next()
    assert [device.device for device in devices_for(report, DRIVER)] == ["cpu-node0"]
    node.declare(declared("cpuset-1", CPUS), declared("cpuset-2", CPUS, "b.example.com"))
    report = node.next()
    assert [device.device for device in devices_for(report, DRIVER)] == ["cpuset-1"]
    assert [device.device for device in devices_for(report, "b.example.com")] == ["cpuset-2"]
    assert [device.device for device in devices_for(report, "c.example.com")] == ["cpu-node0"]
    node.declare()
    report = node.next(700)
    assert list(devices_for(report, DRIVER)) == []


def test_what_is_declared_no_more_is_unknown_for_ten_minutes_and_then_gone() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS))
    node.next()
    node.declare()
    device = one(node.next(), "cpuset-1")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["declared.gone"])
    assert one(node.next(590), "cpuset-1").since == device.since
    assert not [device for device in node.next(20).devices if device.driver]
    assert not [subject for subject, _ in node.state.tracks if subject.startswith(DRIVER)]


def test_what_is_declared_again_is_judged_again() -> None:
    node = Node()
    for present in (True, False, True):
        node.declare(*[declared("cpuset-1", CPUS)] * present)
        report = node.next()
    assert one(report, "cpuset-1").health is Health.HEALTHY
    assert not node.state.declared.gone


def test_a_name_that_is_another_device_now_keeps_nothing_of_the_one_before() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS._replace(cpus=parse_cpus("1"))))
    node.next()
    node.online("0")
    assert one(node.next(), "cpuset-1").health is Health.UNHEALTHY
    node.declare(declared("cpuset-1", CPUS._replace(cpus=parse_cpus("0"))))
    device = one(node.next(), "cpuset-1")
    assert (device.health, device.causes) == (Health.HEALTHY, ())
    node.declare(declared("cpuset-1", CPUS._replace(cpus=parse_cpus("1"))))
    assert one(node.next(), "cpuset-1").since == node.now


def test_a_declaration_that_says_the_same_again_takes_back_no_fault() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS))
    node.next()
    node.online("0")
    before = one(node.next(), "cpuset-1")
    node.declare(declared("cpuset-1", CPUS, lease_s=60))
    assert one(node.next(), "cpuset-1").causes == before.causes


@pytest.mark.parametrize("before", [CPUS, DeclaredPci("0000:3b:00.0", ""), None])
def test_a_name_that_is_another_function_now_is_unknown_until_somebody_has_looked(
    before: What | None,
) -> None:
    node = Node()
    node.functions = (pci_sample(),)
    node.declare(declared("dev-0", before or CPUS))
    node.bus = SourceSample("pci", SourceState.OK, node.now_ns + NS, 60 * NS, 0, "", passes=1, vital=False)
    node.next()
    if before is None:
        node.declare()
        node.next()
    node.declare(declared("dev-0", DeclaredPci(GPU_0, "")))
    node.bus, node.functions = node.bus._replace(state=SourceState.STARTING), None
    for _ in range(3):
        assert codes(one(node.next(), "dev-0")) == ["declared.unseen"]
    node.bus = node.bus._replace(state=SourceState.OK, passes=2, beat_ns=node.now_ns)
    node.functions = (pci_sample(),)
    assert one(node.next(), "dev-0").health is Health.HEALTHY


def test_a_driver_that_names_its_devices_anew_each_time_fills_no_memory() -> None:
    node = Node()
    for number in range(5):
        node.declare(*(declared(f"cpuset-{number}-{part}", CPUS) for part in range(1000)))
        report = node.next()
    node.declare()
    report = node.next()
    gone = [device.device for device in report.devices if device.driver]
    assert len(gone) == GONE_KEPT
    assert "cpuset-4-0" in gone
    assert "cpuset-0-0" not in gone


def test_the_same_name_in_two_pools_is_two_devices() -> None:
    node = Node()
    here = declared("cpuset-0", CPUS._replace(cpus=0b01))
    node.declare(here, here._replace(pool="other", what=CPUS))
    node.next()
    node.online("0")
    report = node.next()
    healths = {device.pool: device.health for device in report.devices if device.device == "cpuset-0"}
    assert healths == {"node-a": Health.HEALTHY, "other": Health.UNHEALTHY}


def test_a_file_that_is_wrong_is_a_note_and_what_it_declared_before_is_judged_on() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS), error="devices.d/a.example.com.toml: device 2: no name")
    report = node.next()
    assert one(report, "cpuset-1").health is Health.HEALTHY
    (note,) = report.notes
    assert note.subject == f"driver {DRIVER}"
    assert note.cause.code == "declared.file"
    assert "device 2: no name" in note.cause.evidence
    assert node.next(5).notes == report.notes


# --- GPUs --------------------------------------------------------------------------------------------------


def uuid_of(node: GpuNode, number: int) -> str:
    return node.gpus[number].uuid


@pytest.mark.parametrize("by", ["pci", "uuid", "both"])
def test_a_declared_gpu_is_what_the_hosts_is_by_whatever_name(by: str) -> None:
    node = NodeWithGpus()
    names: dict[str, Any] = {"pci": GPU_0, "uuid": uuid_of(node, 0)}
    node.declare(declared("mine", gpu(**(names if by == "both" else {by: names[by]}))))
    assert one(node.next(), "mine").health is Health.HEALTHY
    node.gpus[0] = replace(node.gpus[0], status=Status.LOST)
    report = node.next()
    mine, host = one(report, "mine"), one(report, "gpu-0", "")
    assert mine.health is Health.UNHEALTHY
    assert (mine.message, mine.causes, mine.attributes) == (host.message, host.causes, host.attributes)


def test_a_gpu_that_nobody_has_is_unhealthy_and_says_which() -> None:
    node = NodeWithGpus()
    node.declare(declared("mine", gpu(uuid="GPU-none")))
    device = one(node.next(), "mine")
    assert (device.health, codes(device)) == (Health.UNHEALTHY, ["gpu.not_found"])
    assert "no GPU-none among the 2 GPUs" in device.message


def test_a_gpu_in_anothers_slot_is_unhealthy_and_says_both() -> None:
    node = NodeWithGpus()
    node.declare(
        declared("moved", gpu("0000:2b:00.0", uuid_of(node, 0))), declared("other", gpu(GPU_0, "GPU-none"))
    )
    report = node.next()
    for name, words in (
        ("moved", f"{uuid_of(node, 0)} is at {GPU_0}, declared at 0000:2b:00.0"),
        ("other", f"{GPU_0} is {uuid_of(node, 0)}, declared as GPU-none"),
    ):
        device = one(report, name)
        assert (device.health, codes(device)) == (Health.UNHEALTHY, ["gpu.mismatch"])
        assert words in device.message


def test_a_gpu_whose_address_nobody_knows_is_at_no_other() -> None:
    known = KnownGpu(0, "GPU-1", "", "H100")
    what = gpu(pci=GPU_0, uuid="GPU-1")
    assert mismatch(DeclaredGpuView(what, known, gpu_device(0), gpu_set())) is OK
    elsewhere = mismatch(DeclaredGpuView(what, known._replace(bus="0000:ff:00.0"), gpu_device(0), gpu_set()))
    assert isinstance(elsewhere, Finding)


def test_an_instance_is_found_and_one_that_is_not_there_is_unhealthy() -> None:
    node = NodeWithGpus(1, migs={0: [(1, 0), (2, 0)]})
    mig = node.gpus[0].migs[1]
    node.declare(
        declared("by-uuid", gpu(uuid=mig.uuid)),
        declared("by-number", gpu(GPU_0, gi=1, ci=0)),
        declared("none", gpu(GPU_0, gi=5, ci=0)),
    )
    report = node.next()
    assert [one(report, name).health for name in ("by-uuid", "by-number", "none")] == [
        Health.HEALTHY,
        Health.HEALTHY,
        Health.UNHEALTHY,
    ]
    assert dict(one(report, "by-uuid").attributes)["uuid"] == mig.uuid
    assert "has no instance 5/0" in one(report, "none").message


def test_a_gpu_is_not_told_of_while_nvml_is_being_asked() -> None:
    node = NodeWithGpus(0)
    opening = SourceSample("nvml", SourceState.STARTING, node.now_ns, 10 * NS, 0, "", vital=False)
    node.nvml = opening
    node.declare(declared("mine", gpu(GPU_0)))
    assert not [device for device in node.next().devices if device.driver]
    device = one(node.next(3), "mine")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["declared.unseen"])


def test_without_nvml_a_declared_gpu_is_unknown_and_not_missing() -> None:
    node = NodeWithGpus(0)
    node.nvml = SourceSample(
        "nvml", SourceState.ABSENT, node.now_ns, 10**10, 0, "no library", passes=1, vital=False
    )
    node.declare(declared("mine", gpu(GPU_0)))
    device = one(node.next(), "mine")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["gpu.not_found"])
    assert f"{GPU_0} cannot be looked for" in device.message
    assert "whether nvidia-smi answers" in device.message, "comparing declarations would not help"


def test_a_gpu_that_nobody_watches_is_unknown() -> None:
    node = Node()
    node.declare(declared("mine", gpu(GPU_0)))
    device = one(node.next(), "mine")
    assert (device.health, codes(device)) == (Health.UNKNOWN, ["gpu.unwatched"])


def test_absent_cpus_of_a_group_attribute_it_to_nobody() -> None:
    node = Node()
    node.declare(declared("cpuset-1", CPUS))
    node.groups = [group_sample(7)._replace(cpus=ABSENT)]
    assert one(node.next(2), "cpuset-1").health is Health.HEALTHY
