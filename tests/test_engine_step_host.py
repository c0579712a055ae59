"""step() on a simulated node with all readings of the host and declared devices, under random events."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import pytest
from gpu_samples import pci_sample
from hypothesis import given
from hypothesis import strategies as st
from log_lines import CASES
from nic_samples import NIC as HCA
from nic_samples import PORT, nic_sample
from paper import (
    ABSENT,
    EIO,
    ENODEV,
    PaperNode,
    codes,
    cpus_sample,
    group_sample,
    hugetlb_sample,
    node_sample,
    pool_sample,
    without_times,
)

from agent.engine.step import EngineState, step
from agent.health.kernel_log.facts import HOST_PATTERNS, compile_pattern
from agent.health.state_machine import HEALTH_OF_SEVERITY
from agent.model.declared_devices import (
    DeclaredCpuDevice,
    DeclaredFile,
    DeclaredHugepageDevice,
    DeclaredMemoryDevice,
    DeclaredNicDevice,
    DeclaredPart,
    DeclaredPciDevice,
    DriverDevice,
)
from agent.model.health import DeviceHealth, Health, Severity
from agent.model.machine_samples import (
    DimmSample,
    LinkLayer,
    LogLine,
    LogSample,
    MachineSample,
    NicPortSample,
    NicSample,
    NumaMemorySample,
    PciSample,
    PerCpuSample,
    PressureSample,
)
from agent.model.reading import Missing, Reading, SourceSample, SourceState
from agent.model.report import Report
from agent.model.snapshot import Snapshot
from agent.model.time import NS, Instant

DRIVER: Final = "a.example.com"
NIC: Final = "0000:1b:00.0"
OTHER_NIC: Final = "0000:2b:00.0"
MACHINE_SOURCES: Final = ("edac", "memory", "cores", "pressure")
BUS_SOURCES: Final = ("pci", "nic")
CPUS: Final = DeclaredCpuDevice(0b10, 0, exclusive=True, isolated=False)


class HostNode(PaperNode):
    """Simulated node with all sources; ``states`` and ``stuck`` cover the new ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.machine: MachineSample | None = MachineSample(
            dimms=(DimmSample(0, None, "skx", "", 0, 0),),
            numa=(NumaMemorySample(0, 1 << 24, 0, 128, 0),),
            cores=tuple(PerCpuSample(cpu, cpu, 0, 3_000_000, 3_000_000, 0) for cpu in (0, 1)),
            pressure=PressureSample(0, 0, 0),
            nodes_online=0b1,
            nodes_memory=0b1,
            corrupted_kib=0,
            surplus_failed=0,
            smt_active=0,
            sources=(),
        )
        self.slow_beats: dict[str, tuple[int, int]] = {}
        self.functions: tuple[PciSample, ...] | Missing | None = (pci_sample(0, "mlx5_core"),)
        self.nics: tuple[NicSample, ...] | Missing | None = (nic_sample(),)
        self.lines: tuple[LogLine, ...] = ()
        self.reads_log = True
        self.files: tuple[DeclaredFile, ...] = ()
        self.pool(pool_sample(10))

    def declare(self, **whats: DeclaredPart) -> None:
        """Set the declared devices, by name."""
        devices = (DriverDevice(DRIVER, "node-a", name, event, 0) for name, event in whats.items())
        self.files = (DeclaredFile(DRIVER, tuple(devices)),) if whats else ()

    def change(self, **members: Any) -> None:
        """Change readings of the machine."""
        assert self.machine is not None, "the machine is read"
        self.machine = replace(self.machine, **members)

    def write(self, text: str, times: int = 1) -> None:
        """Add kernel-log lines that the reader has counted."""
        pattern = next(i for i, fact in enumerate(HOST_PATTERNS) if compile_pattern(fact).match(text))
        us = self.now_ns // 1000
        self.lines = (*self.lines, LogLine(pattern, times, us, us, text, text, len(self.lines)))

    def source(self, name: str) -> SourceSample:
        if name not in self.stuck:
            self.slow_beats[name] = self._beats["cpus"]
        passes, beat_ns = self.slow_beats.get(name, (0, 0))
        state = self.states.get(name, SourceState.OK)
        return SourceSample(name, state, beat_ns or self.started_ns, NS, 0, "", passes=passes, vital=False)

    def snapshot(self) -> Snapshot:
        more = {name: self.source(name) for name in (*MACHINE_SOURCES, *BUS_SOURCES, "kmsg")}
        slow = tuple(more[name] for name in MACHINE_SOURCES)
        read = super().snapshot()
        return replace(
            read,
            sources=(
                *read.sources,
                *(slow if self.machine else ()),
                *(more[n] for n in BUS_SOURCES),
                more["kmsg"],
            ),
            machine=replace(self.machine, sources=slow) if self.machine else None,
            log=LogSample(self.lines, more["kmsg"]) if self.reads_log else None,
            pci=self.functions,
            nics=self.nics,
            declared=self.files,
        )


def subject_of(device: DeviceHealth) -> str:
    return f"{device.driver}/{device.pool}/{device.device}"


def declared_health(report: Report, name: str) -> DeviceHealth:
    return next(device for device in report.devices if device.driver and device.device == name)


def host_device(report: Report, name: str) -> DeviceHealth:
    return next(device for device in report.devices if not device.driver and device.device == name)


# --- sources without a pass ------------------------------------------------------------------------------


def test_memory_with_unread_controllers_is_not_healthy() -> None:
    node = HostNode()
    node.stuck.add("edac")
    node.states["edac"] = SourceState.STARTING
    devices = [host_device(node.next(), "memory-node0") for _ in range(6)]
    assert {device.health for device in devices} == {Health.UNKNOWN}
    assert devices[0].message.startswith("source.stalled: edac: first pass not finished")
    node.stuck.clear()
    node.states.clear()
    assert host_device(node.next(3), "memory-node0").health is Health.HEALTHY


def test_unread_part_of_the_machine_is_not_healthy() -> None:
    node = HostNode()
    node.declare(mem=DeclaredMemoryDevice(0, 0))
    node.next()
    node.machine = None
    assert host_device(node.next(), "memory-node0").health is Health.UNKNOWN
    node.declare(mem=DeclaredMemoryDevice(0, 0), more=DeclaredMemoryDevice(0, 0))
    assert declared_health(node.next(3), "more").health is Health.UNKNOWN


def test_numa_node_without_memory_has_no_memory_device() -> None:
    node = HostNode()
    of_nodes = (
        NumaMemorySample(0, 1 << 24, 0, 8, 0),
        NumaMemorySample(1, 0, 0, 0, 0),
        NumaMemorySample(2, EIO, 0, 8, 0),
    )
    node.change(numa=of_nodes, nodes_online=0b111, nodes_memory=0b101)
    names = [device.device for device in node.next().devices if device.kind == "memory"]
    assert names == ["memory-node0", "memory-node2"]


def test_later_numa_nodes_are_reported_and_compared() -> None:
    node = HostNode()
    node.next()
    more = NumaMemorySample(1, 1 << 24, 0, 64, 0)
    assert node.machine is not None
    node.nodes[1] = node_sample(1, 0b1100)
    node.cpus = node.cpus._replace(present=0b1111, online=0b1111)
    node.pool(pool_sample(5, node=1))
    node.change(numa=(*node.machine.numa, more), nodes_online=0b11, nodes_memory=0b11)
    names = ["cpu-node1", "memory-node1", "hugepages-2mi-node1"]
    report = node.next()
    assert [host_device(report, name).health for name in names] == [Health.HEALTHY] * 3
    node.cpus = node.cpus._replace(online=0b0111)
    node.pool(pool_sample(4, node=1))
    node.change(numa=(node.machine.numa[0], more._replace(blocks_offline=1)))
    report = node.next()
    assert [codes(host_device(report, name)) for name in names] == [
        ["cpu.offline"],
        ["mem.blocks.offline"],
        ["mem.hugepages.pool_shrunk"],
    ]


# --- NICs -------------------------------------------------------------------------------------------------

DOWN: Final = {"state": 1, "phys_state": 2}


BY_NAME: Final = DeclaredNicDevice("", "mlx5_0")


def node_with_nic(*ports: NicPortSample, part: DeclaredNicDevice = BY_NAME) -> HostNode:
    node = HostNode()
    node.functions = (pci_sample(0, "mlx5_core")._replace(address=HCA),)
    node.nics = (nic_sample(*ports),)
    node.declare(hca=part)
    assert declared_health(node.next(3), "hca").health is Health.HEALTHY
    return node


@pytest.mark.parametrize("part", [BY_NAME, DeclaredNicDevice(HCA, "")], ids=["rdma", "pci"])
def test_declared_nic_is_unhealthy_while_its_only_port_is_down(part: DeclaredNicDevice) -> None:
    node = node_with_nic(part=part)
    node.nics = (nic_sample(PORT._replace(**DOWN)),)
    device = declared_health(node.next(), "hca")
    assert device.health is Health.UNHEALTHY
    assert device.message.startswith("nic.port_down: port 1 is DOWN, physical state Polling")
    node.nics = (nic_sample(),)
    assert declared_health(node.next(5), "hca").health is Health.HEALTHY


def test_declared_nic_with_one_down_port_is_healthy_and_names_the_port() -> None:
    second = PORT._replace(number=2)
    node = node_with_nic(PORT, second)
    node.nics = (nic_sample(PORT, second._replace(**DOWN)),)
    device = declared_health(node.next(), "hca")
    assert (device.health, device.severity) == (Health.HEALTHY, Severity.DEGRADED)
    assert device.message.startswith("nic.port_down: port 2 is DOWN")


def test_ports_that_come_up_after_boot_leave_the_nic_healthy() -> None:
    node = node_with_nic(PORT._replace(**DOWN), PORT._replace(number=2, **DOWN, link_downs=1))
    for _ in range(12):
        device = declared_health(node.next(5), "hca")
        assert (device.health, device.causes) == (Health.HEALTHY, ())
    node.nics = (nic_sample(PORT, PORT._replace(number=2, link_downs=1)),)
    assert declared_health(node.next(5), "hca").causes == ()


def test_nic_declared_by_name_has_faults_of_its_pci_function() -> None:
    node = node_with_nic()
    node.write(f"mlx5_core {HCA}: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer")
    assert codes(declared_health(node.next(), "hca")) == ["pci.aer.fatal"]


def test_nic_that_left_the_pci_bus_is_missing_once() -> None:
    node = node_with_nic()
    node.functions, node.nics = (), ()
    device = declared_health(node.next(), "hca")
    assert codes(device) == ["pci.missing"]
    assert device.causes[0].evidence == f"{HCA} is no longer on the PCI bus"


def test_nic_with_unbound_driver_is_gone() -> None:
    node = node_with_nic()
    node.functions, node.nics = (node.functions[0]._replace(driver=""),), ()
    assert sorted(codes(declared_health(node.next(), "hca"))) == ["nic.missing", "pci.unbound"]


@pytest.mark.parametrize(
    "nics",
    [EIO, (nic_sample()._replace(ports=EIO),), (nic_sample(PORT._replace(state=EIO)),),
     (nic_sample(PORT._replace(symbol_errors=EIO)),)],
    ids=["class", "ports", "state", "counter"],
)  # fmt: skip
def test_unreadable_nic_is_unknown(nics: tuple[NicSample, ...] | Missing) -> None:
    node = node_with_nic()
    node.nics = nics
    assert declared_health(node.next(), "hca").health is Health.UNKNOWN


def test_nic_is_unknown_while_its_source_is_stalled() -> None:
    node = node_with_nic()
    node.stuck.add("nic")
    assert declared_health(node.next(10), "hca").health is Health.UNKNOWN


# --- devices that appear and disappear --------------------------------------------------------------------


def test_flapping_cap_is_one_cause() -> None:
    node = HostNode()
    node.next()
    assert node.machine is not None
    free = node.machine.cores
    capped = tuple(core._replace(cap_khz=1_000_000) for core in free)
    for _ in range(3):
        node.change(cores=capped)
        device = host_device(node.next(5), "cpu-node0")
        assert codes(device) == ["cpu.capped"]
        node.change(cores=free)
        assert codes(host_device(node.next(20), "cpu-node0")) == ["cpu.capped"]
    assert codes(host_device(node.next(60), "cpu-node0")) == []


# --- random events ----------------------------------------------------------------------------------------

counts: Final = st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1))
readings: Final = st.one_of(counts, st.sampled_from([ABSENT, EIO, ENODEV]))
cpu_sets: Final = st.integers(0, 0b1111)
nodes: Final = st.integers(0, 2)
states: Final = st.sampled_from(
    [SourceState.OK, SourceState.ABSENT, SourceState.FAILING, SourceState.STARTING]
)
dimms: Final = st.builds(
    DimmSample,
    nodes,
    st.one_of(st.none(), nodes),
    st.sampled_from(["", "skx", "F19h", "CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "\N{SNOWMAN}" * 30]),
    st.sampled_from(["", "channel 0 slot 1"]),
    readings,
    readings,
)
memory_of_node: Final = st.builds(NumaMemorySample, nodes, readings, readings, readings, readings)
cores: Final = st.builds(
    PerCpuSample,
    st.integers(0, 3),
    st.one_of(st.integers(0, 3), readings),
    readings,
    readings,
    readings,
    readings,
)
pressures: Final = st.builds(PressureSample, readings, readings, readings)
functions: Final = st.builds(
    PciSample,
    st.sampled_from([NIC, OTHER_NIC]),
    st.integers(-1, 2),
    st.integers(-1, 2),
    st.sampled_from(["", "mlx5_core", "vfio-pci"]),
    st.just(""),
    *[readings] * 5,
)
ports: Final = st.builds(
    NicPortSample,
    st.integers(1, 2),
    st.sampled_from(LinkLayer),
    st.sampled_from([1, 2, 4, ABSENT, EIO]),
    st.sampled_from([0, 2, 5, 6, EIO]),
    *[readings] * 8,
    st.sampled_from(["", "eth0"]),
    st.booleans(),
    st.sampled_from(["", "bond0"]),
)
nics: Final = st.builds(
    NicSample,
    st.sampled_from(["mlx5_0", "mlx5_1"]),
    st.sampled_from(["", HCA]),
    st.sampled_from(["", "1", "2"]),
    st.one_of(st.just(EIO), st.lists(ports, max_size=2, unique_by=lambda port: port.number).map(tuple)),
)
whats: Final = st.one_of(
    st.builds(
        DeclaredCpuDevice,
        st.integers(1, 0xFF),
        st.one_of(st.none(), nodes),
        exclusive=st.booleans(),
        isolated=st.booleans(),
    ),
    st.builds(DeclaredMemoryDevice, st.integers(0, 2**40), nodes),
    st.builds(DeclaredHugepageDevice, st.sampled_from([2048, 1 << 20]), st.integers(1, 12), nodes),
    st.builds(DeclaredNicDevice, st.sampled_from([HCA]), st.just("")),
    st.builds(DeclaredNicDevice, st.just(""), st.sampled_from(["mlx5_0", "mlx5_1"])),
    st.builds(DeclaredPciDevice, st.sampled_from([NIC, OTHER_NIC]), st.sampled_from(["", "mlx5_core"])),
)


def unique_by(samples: st.SearchStrategy[Any], member: str) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return some samples without duplicate numbers."""
    return st.lists(samples, max_size=3, unique_by=lambda entry: getattr(entry, member)).map(tuple)


machines: Final = st.builds(
    MachineSample,
    dimms=st.lists(dimms, max_size=3, unique_by=lambda error: (error.controller, error.dimm)).map(tuple),
    numa=unique_by(memory_of_node, "numa_node"),
    cores=unique_by(cores, "cpu"),
    pressure=pressures,
    nodes_online=st.one_of(st.integers(0, 7), st.sampled_from([ABSENT, EIO])),
    nodes_memory=st.one_of(st.integers(0, 7), st.sampled_from([ABSENT, EIO])),
    corrupted_kib=readings,
    surplus_failed=readings,
    smt_active=st.one_of(st.integers(0, 1), st.sampled_from([ABSENT, EIO])),
    sources=st.just(()),
)
events: Final = st.one_of(
    st.tuples(st.just("machine"), st.one_of(st.none(), machines)),
    st.tuples(st.just("online"), st.one_of(cpu_sets, st.just(EIO))),
    st.tuples(st.just("nodes"), st.dictionaries(nodes, st.one_of(cpu_sets, st.just(EIO)), max_size=3)),
    st.tuples(st.just("pool"), readings, readings, nodes),
    st.tuples(st.just("group"), cpu_sets, counts, counts, readings, readings),
    st.tuples(
        st.just("bus"), st.one_of(st.sampled_from([None, ABSENT, EIO]), unique_by(functions, "address"))
    ),
    st.tuples(
        st.just("nics"),
        st.one_of(
            st.sampled_from([None, EIO]),
            st.lists(nics, max_size=2, unique_by=lambda nic: nic.name).map(tuple),
        ),
    ),
    st.tuples(
        st.just("declare"), st.dictionaries(st.sampled_from(["one", "two", "three"]), whats, max_size=3)
    ),
    st.tuples(st.just("line"), st.sampled_from([text for text, _ in CASES]), st.integers(1, 200)),
    st.tuples(st.just("log"), st.booleans()),
    st.tuples(st.just("state"), st.sampled_from([*MACHINE_SOURCES, *BUS_SOURCES, "kmsg"]), states),
    st.tuples(
        st.just("stuck"),
        st.sets(st.sampled_from(["cpus", "hugepages", *MACHINE_SOURCES, *BUS_SOURCES, "kmsg"])),
    ),
    st.tuples(st.just("pass")),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 1, 30, 700, 90_000])),
    st.tuples(st.just("wall"), st.sampled_from([-1e9, 1e9])),
)
stories: Final = st.lists(events, max_size=25)
History = list[tuple[Snapshot, Instant, Report]]


def apply_event(node: HostNode, event: str, values: list[Any]) -> None:
    match event:
        case "machine":
            node.machine = values[0]
        case "online":
            node.cpus = cpus_sample(values[0])
        case "nodes":
            node.nodes = {number: node_sample(number, cpus) for number, cpus in values[0].items()}
        case "pool":
            node.pool(pool_sample(values[0], values[1], node=values[2]))
        case "group":
            cpus, periods, throttled, kills, hits = values
            group = group_sample(7, hugetlb_sample(hits))
            node.groups = [
                group._replace(cpus=cpus, cpu_periods=periods, cpu_throttled=throttled, mem_oom_kill=kills)
            ]
        case "bus":
            node.functions = values[0]
        case "nics":
            node.nics = values[0]
        case "declare":
            node.declare(**values[0])
        case "line":
            node.write(*values)
        case "log":
            node.reads_log = values[0]
        case "state":
            node.states[values[0]] = values[1]
        case "stuck":
            node.stuck = values[0]
        case "pass":
            node.read()
        case "wait":
            node.wait(values[0])
        case "wall":
            node.wall_s += values[0]


def live(story: Iterable[Any]) -> tuple[EngineState, History]:
    """Run a story with an evaluation after each event."""
    node = HostNode()
    first = node.state
    history: History = []
    for event, *values in [("pass",), *story]:
        apply_event(node, event, values)
        snapshot = node.snapshot()
        history.append((snapshot, node.now, node.evaluate()))
    return first, history


@given(stories)
def test_each_device_has_one_verdict_with_its_worst_cause(story: list[Any]) -> None:
    for _, _, report in live(story)[1]:
        subjects = [subject_of(device) for device in report.devices]
        assert len(set(subjects)) == len(subjects)
        for device in report.devices:
            worst = max((cause.severity for cause in device.causes), default=Severity.OK)
            assert device.health is HEALTH_OF_SEVERITY[device.severity]
            # a stalled source outranks causes
            assert device.severity in (worst, Severity.UNKNOWN)
            assert (device.message == "") is (device.severity <= Severity.INFO)
            assert len(device.message.encode()) <= 1024
            assert device.message.startswith(f"{codes(device)[0]}: " if device.message else "")
            assert device.timeout_s >= 30


@given(stories)
def test_replay_is_identical_and_changes_nothing_in_place(story: list[Any]) -> None:
    state, history = live(story)
    for snapshot, now, report in history:
        frozen = copy.deepcopy((state, snapshot))
        state, again = step(state, snapshot, now)
        assert again == report
        assert step(*frozen, now) == (state, again)


@given(stories)
def test_second_evaluation_at_the_same_time_is_identical(story: list[Any]) -> None:
    state, history = live(story)
    for snapshot, now, _ in history:
        state, first = step(state, snapshot, now)
        state, second = step(state, snapshot, now)
        assert without_times(second.devices) == without_times(first.devices)
        assert second.notes == first.notes
        assert state.due_ns is None or state.due_ns > now.mono_ns


def is_lost(reading: Reading) -> bool:
    return isinstance(reading, Missing) and reading in (EIO, ENODEV)


def is_unread(snapshot: Snapshot, kind: str) -> bool:
    """Return whether the main readings of a kind of device are missing at the moment."""
    machine, bus = snapshot.machine, snapshot.pci
    match kind:
        case "cpu":
            return isinstance(snapshot.cpus.online, Missing)
        case "memory":
            return machine is not None and is_lost(machine.nodes_online)
        case "pci":
            return isinstance(bus, Missing) and bus == EIO
        case "nic":
            return isinstance(snapshot.nics, Missing)
    return False


@given(stories)
def test_unreadable_device_is_never_healthy(story: list[Any]) -> None:
    for snapshot, _, report in live(story)[1]:
        starting = {source.name for source in snapshot.sources if source.state is SourceState.STARTING}
        for device in report.devices:
            if is_unread(snapshot, device.kind) and "memory" not in starting:
                assert device.health is not Health.HEALTHY, device


@given(stories)
def test_declared_devices_are_always_reported(story: list[Any]) -> None:
    reported: set[str] = set()
    for snapshot, _, report in live(story)[1]:
        present = {device.subject for file in snapshot.declared for device in file.devices}
        subjects = {subject_of(device) for device in report.devices}
        assert reported & present <= subjects
        reported = subjects


# --- times of the kernel log -----------------------------------------------------------------------------

NIC: Final = pci_sample(0, "mlx5_core").address
OLD_LINES: Final = {
    "cpu.machine_check": "mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 5: be00000000800400",
    "cpu.lockup.soft": "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [cat:7]",
    "cpu.lockup.hard": "watchdog: Watchdog detected hard LOCKUP on cpu 1",
    "mem.poisoned": "Memory failure: 0x12345: recovery action for dirty LRU page: Recovered",
    "mem.ecc.uncorrectable": "EDAC MC1: 1 UE memory read error on DIMM_A1 (channel:0 slot:0 page:0x0)",
    "pci.aer.fatal": f"mlx5_core {NIC}: PCIe Bus Error: severity=Uncorrected (Fatal), type=x, (ID)",
    "pci.aer.nonfatal": f"mlx5_core {NIC}: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=x, (ID)",
    "pci.fault": f"pcieport {NIC}: pciehp: Slot(1): Link Down",
    "node.pci": f"mlx5_core {NIC}: PCIe Bus Error: severity=Uncorrected (Fatal), type=x, (ID)",
    "node.nvme": "nvme nvme0: I/O 12 QID 3 timeout, aborting",
    "node.read_only": "EXT4-fs (sda1): Remounting filesystem read-only",
    "node.machine_check": "{1}[Hardware Error]: event severity: recoverable",
    "node.hung_task": "INFO: task dd:7 blocked for more than 122 seconds.",
    "node.rcu_stall": "rcu: INFO: rcu_preempt self-detected stall on CPU",
    "node.oom": "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,global_oom,task=sh,pid=7",
}  # fmt: skip


def cause_since(report: Report, code: str) -> Instant:
    """Return when the cause of any device, or the note, with a code began."""
    of_devices = (cause for device in report.devices for cause in device.causes)
    causes = (*of_devices, *(note.cause for note in report.notes))
    return next(cause.since for cause in causes if cause.code == code)


@pytest.mark.parametrize("code", OLD_LINES)
def test_cause_from_old_log_line_has_the_time_of_its_first_line(code: str) -> None:
    node = HostNode()
    node.change(corrupted_kib=ABSENT, numa=(NumaMemorySample(0, 1 << 24, ABSENT, 128, 0),))
    node.declare(nic=DeclaredPciDevice(NIC, ""))
    node.write(OLD_LINES[code])
    first = node.now
    node.wait(300)
    (line,) = node.lines
    node.lines = (line._replace(times=2, last_us=node.now_ns // 1000),)
    node.wait(60)
    assert cause_since(node.next(3), code) == first
    node.lines = (node.lines[0]._replace(times=3, last_us=node.now_ns // 1000),)
    assert cause_since(node.next(2), code) == first, "a further line"


def test_cause_of_a_fault_that_was_over_has_the_time_of_the_new_line() -> None:
    node = HostNode()
    node.write(OLD_LINES["node.nvme"])
    node.next(2)
    node.wait(3600)
    assert not node.next(5).notes
    again = node.now
    node.lines = (node.lines[0]._replace(times=2, last_us=node.now_ns // 1000),)
    assert cause_since(node.next(2), "node.nvme") == again
